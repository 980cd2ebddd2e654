"""The step time, and which steps it is of: kinds, pauses, input shapes."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence

from flopwise.records import run as records
from flopwise.records.rank import FlopCount, RankRecord, StepRow
from flopwise.trials.interval import mean_interval
from flopwise.units import percent

#: Strata shown one by one; the rest are summed.
STRATA = 8
#: Where inputs have several shapes, at least so many timed steps have to be looked at to tell the work of all.
LOOKS = 8
#: And the mean size of their inputs has to be known this well (half of its 95 % interval over the mean).
SIZE_ERROR_FRAC = 0.05


def looked_at(rank: RankRecord, timed: Sequence[StepRow]) -> list[StepRow]:
    """Returns the rows that tell what is in a timed step: those looked at closely, or the last ones before them.

    A script may end so soon that none of the timed steps was looked at.
    """
    before = [row for row in rank.rows if row.sampled and row.kind in ("warmup", "counted")]
    return [row for row in timed if row.sampled] or before[-3:] or list(timed)


def too_few_looks(rank: RankRecord, timed: Sequence[StepRow]) -> str | None:
    """Returns why the work of the timed steps is not known: their shapes differ, and few were looked at."""
    looks = sum(row.sampled for row in timed)
    shapes = {row.shape for row in rank.rows if row.sampled and row.shape}
    if len(shapes) < 2 or rank.boundary == "graph replay":
        return None
    if looks >= min(LOOKS, len(timed)):
        error = size_error_frac(timed)
        if error is None or error <= SIZE_ERROR_FRAC:
            return None
        return (
            f"the inputs have several shapes, and from the {looks} of {len(timed)} timed steps that were looked at their "
            f"mean size is known to ± {percent(error)} only: run for longer, or give --steps"
        )
    return (
        f"the inputs have several shapes, and only {looks} of {len(timed)} timed steps were looked at: run for longer, "
        "or give --steps"
    )


def size_error_frac(timed: Sequence[StepRow]) -> float | None:
    """Returns how well the mean size of the inputs is known from the steps looked at; None where no size is.

    Half of the 95 % interval of the mean, over it. Source: sampling without replacement, Cochran, Sampling Techniques
    (1977), section 2.6: s^2 / k (1 - k / n).
    """
    sizes = [row.tokens or row.samples for row in timed if row.sampled]
    known = [float(size) for size in sizes if size]
    if len(known) < 2 or len(known) < len(sizes):
        return None
    left = 1 - len(known) / len(timed)
    return 1.96 * statistics.stdev(known) * math.sqrt(left / len(known)) / statistics.fmean(known)


def own_ns_a_step(rank: RankRecord, rows: Sequence[StepRow]) -> float:
    """Returns the mean time a step inside our hooks, over steps looked at closely and steps only counted."""
    close = sum(row.own_ns for row in rows if row.sampled)
    brief = sum(not row.sampled for row in rank.rows)
    share = sum(not row.sampled for row in rows) / brief if brief else 0.0
    return (close + rank.brief_own_ns * share) / len(rows)


def mean_step_s(rows: Sequence[StepRow]) -> float:
    """Returns the mean length of some steps, seconds."""
    return statistics.fmean(row.ns for row in rows) * 1e-9


def step_time_of(rows: Sequence[StepRow], mean_s: float, clock: str) -> records.StepTime:
    """Returns the step time: the mean over ranks, `mean_s`, with the spread of the lead rank's `rows`."""
    values = [row.ns * 1e-9 for row in rows]
    interval = mean_interval(values)
    shift = mean_s - interval.mean  # the mean over ranks; the spread of the lead rank
    ci95 = None
    if interval.low is not None and interval.high is not None:
        ci95 = (max(0.0, interval.low + shift), interval.high + shift)
    ordered = sorted(values)
    return records.StepTime(
        mean=mean_s,
        median=statistics.median(values),
        ci95=ci95,
        p10=ordered[int(0.1 * (len(ordered) - 1))],
        p90=ordered[int(0.9 * (len(ordered) - 1) + 0.5)],
        source=clock,
    )


def steps_of(lead: RankRecord, timed: Sequence[StepRow], step_s: float) -> records.Steps:
    """Returns what became of the lead rank's steps: timed, left out and why, by input shape."""
    kinds = Counter(row.kind for row in lead.rows)
    close = [row for row in timed if row.sampled] or list(timed)
    pauses = []
    for kind in sorted(
        k for k in kinds if k not in ("timed", "warmup", "compile", "counted", "mixed")
    ):
        rows = [row for row in lead.rows if row.kind == kind]
        extra_s = sum(row.ns for row in rows) * 1e-9 - len(rows) * step_s
        pauses.append(
            records.Pause(
                kind,
                len(rows),
                max(0.0, extra_s),
                "; ".join(_EVIDENCE[part] for part in kind.split("+")),
            )
        )
    return records.Steps(
        total=lead.steps_seen,
        timed=len(timed),
        # The first step has no beginning that anyone saw: it is warm-up, too.
        dropped_warmup=kinds["warmup"] + max(0, lead.steps_seen - len(lead.rows)),
        dropped_compile=kinds["compile"],
        dropped_counted=kinds["counted"] + kinds["mixed"],
        dropped_pause=sum(p.count for p in pauses),
        skipped_by_scaler=sum(row.skipped for row in timed),
        boundary=lead.boundary,
        warmup_rule=lead.warmup_rule,
        micro_batches=_micro_batches(looked_at(lead, timed)),
        strata=_strata(close, {f.shape: f for f in lead.flops}),
        pauses=pauses,
        by_hand=lead.warmup_by_hand,
        note=None,
    )


def _micro_batches(rows: Sequence[StepRow]) -> float | None:
    """Returns the mean number of backward passes, None where no step was looked at closely."""
    close = [row.micro_batches for row in rows if row.sampled]
    return statistics.fmean(close) if close else None


_EVIDENCE = {
    "evaluation": "a trained module ran without gradient, or was switched to eval",
    "checkpoint": "torch.save was called",
    "epoch_start": "a loader was started",
}


def _strata(timed: Sequence[StepRow], counts: dict[str, FlopCount]) -> list[records.Stratum]:
    by_shape: dict[str, list[StepRow]] = {}
    for row in timed:
        by_shape.setdefault(row.shape, []).append(row)
    total_ns = sum(row.ns for row in timed)
    strata = [
        records.Stratum(
            shape=shape,
            steps=len(rows),
            mean_s=mean_step_s(rows),
            share_frac=sum(row.ns for row in rows) / total_ns,
            model_flops_per_step=_model_flops(counts.get(shape), rows),
        )
        for shape, rows in by_shape.items()
    ]
    strata.sort(key=lambda s: -s.share_frac)
    if len(strata) > STRATA:
        rest = strata[STRATA - 1 :]
        n = sum(s.steps for s in rest)
        strata = strata[: STRATA - 1] + [
            records.Stratum(
                shape=f"{len(rest)} other shapes",
                steps=n,
                mean_s=sum(s.mean_s * s.steps for s in rest) / n,
                share_frac=sum(s.share_frac for s in rest),
                model_flops_per_step=None,
            )
        ]
    return strata


def _model_flops(count: FlopCount | None, rows: Sequence[StepRow]) -> int | None:
    if count is None:
        return None
    micro_batches = statistics.fmean(row.micro_batches for row in rows)
    return round(sum(count.needed.values()) * repeats(count, micro_batches))


def repeats(count: FlopCount, micro_batches: float) -> float:
    """Returns how often a step does what was counted: a count on fake tensors is of one forward and backward, one of
    an eager step of as many as that step had; another step may have fewer, at the end of an epoch."""
    return max(1.0, micro_batches) / count.micro_batches
