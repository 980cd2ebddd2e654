"""What one call between ranks moves."""

from __future__ import annotations

import pytest

from flopwise.trace.collectives import moved
from flopwise.trace.table import Collective


@pytest.mark.parametrize(
    ("elements", "dtype", "nbytes"),
    [
        (1_000_000, "Float", 4_000_000),
        (1_000_000, "BFloat16", 2_000_000),
        (0, "Float", 0),
        (-1, "Float", -1),
        (10, "Unheard", -1),
        (2**48, "Byte", 2**48),
        (2**60, "Float", -1),
        (2**62, "Double", -1),
    ],
)
def test_bytes_of_a_call_and_none_that_no_device_holds(
    elements: int, dtype: str, nbytes: int
) -> None:
    said = Collective("allreduce", elements, elements, dtype, "0", 4, "[0, 1, 2, 3]", 7, -1)
    one = moved(said, "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)")
    assert (one.op, one.nbytes, one.members) == ("all_reduce", nbytes, (0, 1, 2, 3))
