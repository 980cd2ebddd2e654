"""D101 input-wait: the training waits for its data, in every step or in every k-th."""

from __future__ import annotations

import math
import statistics

from flopwise.diagnosis.evidence import MEASURED, Evidence
from flopwise.diagnosis.series import period
from flopwise.records.finding import Finding
from flopwise.records.surroundings import LoaderFacts
from flopwise.units import duration, percent

#: Below this share of a step the wait is no finding.
LEAST_FRAC = 0.05
#: Waits are even where their median is at least this share of their mean.
EVEN_FRAC = 0.7


def find(evidence: Evidence) -> list[Finding]:
    """Returns one finding, with the workers that are needed where the time to load a batch is known."""
    share = evidence.input_wait_frac
    if share < LEAST_FRAC:
        return []
    loader = evidence.loader
    said = [f"{percent(evidence.data_frac)} of a step waits for data"]
    dry = evidence.run.phases.device_idle_at_data_frac
    if dry is not None:
        said.append(f"the device had run dry at {percent(dry)} of the waits")
    said += _rhythm(evidence, loader)
    if loader is None:
        advice, gain = "see what its next() does", None
    elif loader.num_workers == 0:
        advice, gain = _without_workers(evidence, said)
    else:
        advice, gain = _with_workers(evidence, loader, said)
    return [
        Finding(
            code="D101",
            cause="input-wait",
            share_frac=share,
            where=[loader.where] if loader is not None and loader.where else [],
            evidence="; ".join(said),
            advice=advice,
            predicted_gain_frac=gain,
            certainty=MEASURED,
        )
    ]


def _rhythm(evidence: Evidence, loader: LoaderFacts | None) -> list[str]:
    k = period([row.data_ns for row in evidence.steady])
    if k is None:
        return []
    ending = {1: "st", 2: "nd", 3: "rd"}.get(k % 10 if k % 100 not in (11, 12, 13) else 0, "th")
    same = loader is not None and k == loader.num_workers
    return [f"the wait comes at every {k}{ending} step{', the number of workers' if same else ''}"]


def _without_workers(evidence: Evidence, said: list[str]) -> tuple[str, float | None]:
    load_s, rest_s = evidence.wait_s, evidence.host_s - evidence.wait_s
    said.append(
        f"num_workers=0: loading ({duration(load_s)} a step) and the rest ({duration(rest_s)}) take turns, "
        "their overlap is zero"
    )
    cores = _cores(evidence)
    workers = min(_needed(load_s, rest_s), cores)
    return (
        f"num_workers={workers} (this process has {_of_cores(cores)}); `flopwise tune` tries it and "
        "measures the samples a second before and after",
        _gain(evidence, said, load_s, rest_s, workers, computing=1.0),
    )


def _with_workers(
    evidence: Evidence, loader: LoaderFacts, said: list[str]
) -> tuple[str, float | None]:
    have, cores = loader.num_workers, _cores(evidence)
    if loader.load_ns is None:
        said.append(
            f"{_workers(have)}, whose time to load a batch was not seen (they were not forked)"
        )
        return "measure what loading a batch takes: it is the workers' work", None
    load_s = loader.load_ns * 1e-9 * max(1.0, evidence.run.steps.micro_batches or 1.0)
    rest_s = evidence.host_s - evidence.wait_s
    needed = _needed(load_s, rest_s)
    computing = (loader.load_cpu_ns or 0) / max(1, loader.load_ns)
    said.append(
        f"a step's data take {duration(load_s)} to load ({percent(computing)} of it computing), so {_workers(have)} "
        f"deliver one in {duration(load_s / have)}; the rest of a step takes {duration(rest_s)}"
    )
    waits = [row.data_ns * 1e-9 for row in evidence.timed]
    if needed <= have and statistics.median(waits) >= EVEN_FRAC * evidence.wait_s:
        said.append(
            f"the workers keep up: {duration(evidence.wait_s)} is what each step takes to be handed its batch"
        )
        return (
            "hand over less: fewer and larger tensors instead of many small objects, what is needed in the dtype that "
            "is needed",
            None,
        )
    if needed <= have:
        return (
            f"{_workers(have)} are enough on average, but loading is uneven: even out the slow items (cache, repack), "
            "or let a larger prefetch_factor bridge them",
            None,
        )
    cheaper = "make loading cheaper (decode less, cache, repack)"
    said.append(
        f"{needed} workers are needed; a larger prefetch_factor alone does not raise the steady rate, "
        "as the workers are what is short"
    )
    if needed > cores:
        more = f"num_workers={cores} at most ({_of_cores(cores)}), and " if cores > have else ""
        gain = _gain(evidence, said, load_s, rest_s, max(have, cores), computing)
        return f"{more}{cheaper}", gain
    gain = _gain(evidence, said, load_s, rest_s, needed, computing)
    return f"num_workers={needed}, or {cheaper}", gain


def _needed(load_s: float, rest_s: float) -> int:
    """Returns the workers that load as fast as the rest of a step takes."""
    return max(1, math.ceil(load_s / max(rest_s, 1e-9)))


def _gain(
    evidence: Evidence,
    said: list[str],
    load_s: float,
    rest_s: float,
    workers: int,
    computing: float,
) -> float | None:
    """Returns the share of a step that perfect overlap with so many workers would save; None: nothing, or not known.

    On a CPU the training computes on the same cores: where its threads and what the workers compute (`computing` is
    the share of their time) want more than there are, there is no perfect overlap, and what comes of it is not known.
    """
    threads, cores = evidence.lead.cpu_threads, _cores(evidence)
    if evidence.on_cpu and threads + workers * computing > cores:
        said.append(
            f"no gain is predicted: {_workers(workers)} would take from the {_of_cores(cores)} on which the training "
            f"computes with {threads} thread{'s' if threads > 1 else ''}"
        )
        return None
    gain = 1 - max(rest_s, load_s / workers) / evidence.host_s
    return gain if gain > 0 else None


def _cores(evidence: Evidence) -> int:
    """Returns the cores of one rank."""
    return max(1, evidence.cores // max(1, len(evidence.ranks_here)))


def _of_cores(cores: int) -> str:
    return "1 core" if cores == 1 else f"{cores} cores"


def _workers(n: int) -> str:
    return "1 worker" if n == 1 else f"{n} workers"
