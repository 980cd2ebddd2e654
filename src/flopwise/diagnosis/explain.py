"""Why the counted FLOPs are not what a rule of thumb gives: looked-up embeddings, frozen parameters."""

from __future__ import annotations

from collections.abc import Sequence

from flopwise.records.rank import RankRecord
from flopwise.records.run import RunRecord
from flopwise.units import count, percent

#: An embedding with a smaller share of the parameters explains nothing.
LEAST_FRAC = 0.05


def notes(ranks: Sequence[RankRecord], run: RunRecord) -> list[str]:
    """Returns what is to be said beside the FLOPs of a run of one rank; of several, parameters may be sharded."""
    facts = ranks[0].surroundings
    flops = run.mfu.model_flops_per_step
    if len(ranks) > 1 or flops is None or facts is None or facts.parameters is None:
        return []
    found = []
    parameters, tokens = facts.parameters, run.throughput.tokens_per_step
    if parameters.trained < parameters.total:
        frozen = parameters.total - parameters.trained
        found.append(
            f"{_short(frozen)} of {_short(parameters.total)} parameters are frozen ({percent(frozen / parameters.total)}): "
            "their gradients are not computed, so the FLOPs are those of the backward pass that ran, not three times "
            "the forward pass"
        )
    elif tokens and parameters.looked_up >= LEAST_FRAC * parameters.total:
        # 6 N D, Kaplan et al. 2020, arXiv:2001.08361: 2 forward and 4 backward for each parameter and token.
        rule = 6 * parameters.total * tokens
        rest = 6 * (parameters.total - parameters.looked_up) * tokens
        found.append(
            f"6 x parameters x tokens would be {count(rule)}FLOP a step, {count(flops)}FLOP were counted: "
            f"{_short(parameters.looked_up)} of {_short(parameters.total)} parameters are an embedding, which is looked up "
            f"and not multiplied (without it the rule gives {count(rest)}FLOP; attention is not in it)"
        )
    return found


def _short(n: int) -> str:
    """Returns a count that a noun follows: `3.22 M`."""
    return count(n).rstrip()
