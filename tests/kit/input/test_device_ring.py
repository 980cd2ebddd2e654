from __future__ import annotations

from typing import Any

import pytest
import torch

from flopwise.kit.input.device_ring import DeviceRing


def test_addresses_come_round_and_each_copy_waits_for_what_the_loop_has_queued(
    surface: Any,
) -> None:
    copy = surface.new_stream()
    ring = DeviceRing(surface, 2)
    addresses = []
    for number in range(5):
        sources = [torch.ones(4), torch.ones(2)]
        addresses.append(ring.targets(number, sources, copy, [surface.compute])[0].data_ptr())
    assert addresses[0] == addresses[2] == addresses[4]
    assert addresses[1] == addresses[3] != addresses[0]
    assert (
        surface.log == [("copy", "waits for stream", "compute")] * 3
    )  # the first two buffers were new


def test_batches_used_on_two_streams_are_waited_for_on_both(surface: Any) -> None:
    ring = DeviceRing(surface, 1)
    copy = surface.new_stream()
    other = type(surface.compute)("other", surface.log)
    ring.targets(0, [torch.ones(1)], copy, [])
    ring.targets(1, [torch.ones(1)], copy, [surface.compute, other])
    assert [line[2] for line in surface.log] == ["compute", "other"]


def test_a_broken_fence_is_one_that_does_not_wait(surface: Any) -> None:
    ring = DeviceRing(surface, 1, break_fence=True)
    for number in range(3):
        ring.targets(number, [torch.ones(1)], surface.new_stream(), [surface.compute])
    assert surface.log == []


def test_a_tensor_that_is_kept_keeps_its_memory(surface: Any) -> None:
    ring = DeviceRing(surface, 1)
    kept = ring.targets(0, [torch.zeros(4)], surface.new_stream(), [surface.compute])[0]
    view = kept[1:]
    del kept
    other = ring.targets(1, [torch.ones(4)], surface.new_stream(), [surface.compute])[0]
    assert other.untyped_storage().data_ptr() != view.untyped_storage().data_ptr()
    assert ring.left_to_users == 1
    address = other.data_ptr()
    del other
    assert (
        ring.targets(2, [torch.ones(4)], surface.new_stream(), [surface.compute])[0].data_ptr()
        == address
    )


@pytest.mark.parametrize(
    "second",
    [
        [torch.ones(5)],
        [torch.ones(4, dtype=torch.float64)],
        [],
        [torch.ones(4), torch.ones(1)],
        [torch.rand(1, 2, 2, 2).contiguous(memory_format=torch.channels_last)],
    ],
)
def test_batches_of_another_form_get_buffers_of_theirs(
    surface: Any, second: list[torch.Tensor]
) -> None:
    ring = DeviceRing(surface, 1)
    ring.targets(0, [torch.ones(4)], surface.new_stream(), [surface.compute])
    targets = ring.targets(1, second, surface.new_stream(), [surface.compute])
    assert [t.shape for t in targets] == [s.shape for s in second]
    assert [t.stride() for t in targets] == [s.stride() for s in second]
    assert [t.dtype for t in targets] == [s.dtype for s in second]
