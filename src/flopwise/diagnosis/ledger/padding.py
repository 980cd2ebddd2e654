"""Which operators work on tokens, and so on padding, too: those that have the tokens of a batch among their sizes.

The tokens are those that an embedding looks up: a batch of 8 rows of 1024 shows as (8, 1024, ...) or as (8192, ...) in what follows.
"""

from __future__ import annotations

import math

from flopwise.trace.calls import Tensor, arguments, tensors
from flopwise.trace.table import Events, Operands

EMBEDDING = "aten::embedding"


def tokens(events: Events) -> frozenset[tuple[int, ...]]:
    """Returns the shapes of the batches of tokens in a trace, from the lookups of its embeddings."""
    found: set[tuple[int, ...]] = set()
    numbers = events.operands[events.names_where(lambda name: name == EMBEDDING)]
    for number in set(numbers.tolist()) - {-1}:
        try:
            given = arguments(events.all_operands[number])
        except ValueError:
            continue
        if len(given) > 1 and isinstance(given[1], Tensor) and given[1].operand.numel > 1:
            found.add(given[1].operand.shape)
    return frozenset(found)


def works_on(operands: Operands, batches: frozenset[tuple[int, ...]]) -> bool:
    """Returns whether a call has a tensor of all tokens of a batch: their number among its sizes, or rows and columns apart."""
    try:
        shapes = [list(tensor.operand.shape) for tensor in tensors(operands)]
    except ValueError:
        return False
    return any(_holds(shape, batch) for shape in shapes for batch in batches)


def _holds(shape: list[int], batch: tuple[int, ...]) -> bool:
    if math.prod(batch) in shape:
        return True
    rest = list(shape)
    for size in batch:
        if size not in rest:
            return False
        rest.remove(size)
    return True
