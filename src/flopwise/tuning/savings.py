"""What a plan saves: time, energy and money of a step, of an epoch and of what is left of the run."""

from __future__ import annotations

from collections.abc import Sequence

from flopwise.records.rank import RankRecord
from flopwise.records.run import Cost, RunRecord
from flopwise.records.verdict import Proof, Saved, Savings


def savings(
    proof: Proof,
    cost: Cost,
    epoch: tuple[float | None, str],
    *,
    warmup_s: float,
    steps_remaining: int | None,
    tune_s: float,
) -> Savings:
    """Returns what a plan saves, from what the processes of its proof took.

    Args:
        proof: of the plan.
        cost: of the run of the script as it is: the price that the user gave, and how often it is paid.
        epoch: steps of one, None if they are not known, and how, or why not.
        warmup_s: what switching the plan on costs in each run.
        steps_remaining: that the user said are left.
        tune_s: what the tune took.
    """
    old_s, new_s = proof.comparison.old_s, proof.comparison.new_s
    usd_per_s = _usd_per_s(cost)
    scopes: list[tuple[str, float, float]] = [("step", 1.0, 0.0)]
    if epoch[0] is not None:
        scopes.append(("epoch", epoch[0], 0.0))
    if steps_remaining is not None:
        scopes.append(("run", float(steps_remaining), warmup_s))
    saved_j = None if proof.j_old is None or proof.j_new is None else proof.j_old - proof.j_new
    saved = []
    for scope, steps, once_s in scopes:
        saved_s = steps * (old_s - new_s) - once_s
        saved.append(
            Saved(
                scope,
                steps,
                saved_s,
                None if saved_j is None else steps * saved_j,
                None if usd_per_s is None else usd_per_s * saved_s,
            )
        )

    def usd(seconds: float) -> float | None:
        return None if usd_per_s is None else usd_per_s * seconds

    gained_s = old_s - new_s
    return Savings(
        old_s=old_s,
        new_s=new_s,
        old_j=proof.j_old,
        new_j=proof.j_new,
        energy=proof.energy or "not measured",
        usd_per_device_hour=cost.usd_per_device_hour,
        devices=cost.devices,
        old_usd=usd(old_s),
        new_usd=usd(new_s),
        saved=saved,
        epoch=epoch[1],
        tune_usd=usd(tune_s),
        tune_steps=(tune_s + warmup_s) / gained_s if gained_s > 0 else None,
    )


def _usd_per_s(cost: Cost) -> float | None:
    if cost.usd_per_device_hour is None or cost.devices is None:
        return None
    return cost.usd_per_device_hour * cost.devices / 3600


def steps_of_epoch(record: RunRecord, ranks: Sequence[RankRecord]) -> tuple[float | None, str]:
    """Returns the steps of an epoch, None where they are not known, and how they are known, or why not.

    Args:
        record: of the script as it is.
        ranks: of the same run.
    """
    around = next((rank.surroundings for rank in ranks if rank.surroundings is not None), None)
    loaders = around.loaders if around is not None else []
    if not loaders:
        return None, "no loader was seen, so the steps of an epoch are not known"
    lengths = {loader.batches for loader in loaders}
    if len(lengths) > 1:
        return (
            None,
            f"{len(loaders)} loaders of different lengths fed the training: an epoch is not known",
        )
    (batches,) = lengths
    if not batches:
        return None, "the loader has no length, so the steps of an epoch are not known"
    each = record.steps.micro_batches
    if not each:
        return None, "how many batches a step takes was not seen"
    how = f"the loader has {batches:,} batches" + (f", {each:.3g} a step" if each != 1 else "")
    return batches / each, how
