"""The six-N rule of thumb, held against a count: where they differ, look-ups and attention say why."""

from __future__ import annotations

from flopwise.units import count


def six_n(parameters: int, tokens: int) -> int:
    """Returns 6 N D: two FLOPs forward and four backward for each parameter and token.

    Source: Kaplan et al., arXiv:2001.08361, section 2.1. Ignores: attention scores; that a table which is only looked
    up multiplies nothing; frozen weights; that the first layer's input needs no gradient.
    """
    return 6 * parameters * tokens


def against_count(counted: int, parameters: int, looked_up: int, tokens: int) -> str:
    """Returns one line that sets 6 N D beside the count and explains the part that embeddings make.

    Args:
        counted: needed FLOPs of the step.
        parameters: all of the model's, tied ones once.
        looked_up: those that are only looked up; a table that is tied to the output head is multiplied and is not
            among them.
        tokens: of the step.
    """
    naive, lean = six_n(parameters, tokens), six_n(parameters - looked_up, tokens)
    text = f"6 N D = {count(naive)}FLOP for {count(parameters).strip()} parameters, counted {count(counted)}FLOP"
    if looked_up:
        text += f"; {count(looked_up).strip()} of them are only looked up: without them 6 N D = {count(lean)}FLOP"
    rest = counted - lean
    if rest > 0:
        text += f"; the other {count(rest)}FLOP are attention scores and what else has no weights"
    elif rest < 0:
        text += f"; {count(-rest)}FLOP less, as not every weight is trained, multiplied or reached by a gradient"
    return text
