"""The order of fences on a device that writes it down; what it does to real memory is tested on a GPU."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from flopwise.errors import ConsistencyError, FlopwiseWarning
from flopwise.kit.input import PinnedPool, collate_into
from flopwise.kit.input.cuda_link import CudaLink
from flopwise.kit.input.findings import Judge

pytestmark = pytest.mark.usefixtures("page_locking")


def link_of(
    surface: Any,
    depth: int = 2,
    pool: Any = None,
    changes: Any = (),
    judge: Any = None,
    **more: Any,
) -> CudaLink:
    return CudaLink(surface, depth, pool, list(changes), judge, **more)


def test_the_loop_waits_for_the_copy_and_nothing_waits_for_the_loop(surface: Any) -> None:
    link = link_of(surface)
    batch = {"x": torch.arange(4.0), "name": "a"}
    sent = link.send(batch, 0)
    assert surface.log == [("copy", "records", "event 0")]
    got = link.hand_over(sent, 0)
    assert surface.log[1:] == [("compute", "waits for", "event 0")]
    link.hand_over(link.send(batch, 1), 1)
    assert ("compute", "records", "event 2") in surface.log  # the step before is over here
    assert torch.equal(got["x"], batch["x"])
    assert got["x"].data_ptr() != batch["x"].data_ptr()
    assert got["name"] == "a"
    assert (
        got["x"].data_ptr(),
        "compute",
    ) in surface.recorded  # not used again before the loop's stream is past it


def test_page_locked_memory_is_read_where_it_lies_and_kept_until_the_copy_is_over(
    surface: Any,
) -> None:
    link = link_of(surface)
    x = torch.ones(8)
    surface.pinned.add(x.untyped_storage().data_ptr())
    count = surface.share_count(x)
    link.send([x], 0)
    assert link.counts.in_place_batches == 1
    assert link.counts.host_copied_bytes == 0
    assert link.counts.moved_bytes == 32
    kept = link._in_flight[0][1][0][0]
    assert kept is x
    del kept
    surface.events[0].passed = True
    link.send([torch.ones(1)], 1)
    assert all(x is not t for _, host in link._in_flight for t in host[0])
    assert surface.share_count(x) == count


def test_pinned_memory_with_holes_is_not_taken_for_one_transfer(surface: Any) -> None:
    link = link_of(surface)
    x = torch.arange(8.0)
    surface.pinned.add(x.untyped_storage().data_ptr())
    got = link.hand_over(link.send(x[::2], 0), 0)
    assert got.tolist() == [0, 2, 4, 6]
    assert link.counts.staged_batches == 1


def test_pageable_memory_is_staged_and_a_block_is_written_again_only_after_its_copy(
    surface: Any,
) -> None:
    link = link_of(surface, depth=1)  # two blocks
    for number in range(3):
        link.send(torch.ones(4), number)
    waits = [line for line in surface.log if line[0] == "host"]
    assert waits[0] == ("host", "waits for", "event 0")
    assert surface.log.index(waits[0]) < surface.log.index(("copy", "records", "event 2"))
    assert link.counts.staged_batches == 3
    assert link.counts.host_copied_bytes == link.counts.moved_bytes == 48


def test_no_more_host_memory_is_kept_than_the_ring_is_long(surface: Any) -> None:
    link = link_of(surface, depth=2)
    tensors = [torch.ones(2) for _ in range(8)]
    surface.pinned |= {t.untyped_storage().data_ptr() for t in tensors}
    for number, tensor in enumerate(tensors):
        link.send(tensor, number)
        assert len(link._in_flight) <= 3
    assert ("host", "waits for", "event 4") in surface.log
    assert ("host", "waits for", "event 5") not in surface.log


def test_reading_waits_where_the_loop_has_queued_more_steps_than_the_ring_is_long(
    surface: Any,
) -> None:
    link = link_of(surface, depth=1)
    for step in range(6):
        link.hand_over(link.send(torch.ones(2), step), step)
    released = [line[2] for line in surface.log if line[:2] == ("compute", "records")]
    waited = [line[2] for line in surface.log if line[:2] == ("host", "waits for")]
    assert [e for e in waited if e in released] == released[
        :2
    ]  # of five steps that are over two are left, and one more


def test_where_nothing_can_be_page_locked_the_plain_copy_is_taken(
    surface: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flopwise.kit.input.staging.Stage._grow", lambda *_: False)
    link = link_of(surface)
    assert link.hand_over(link.send(torch.ones(3), 0), 0).sum() == 3
    assert link.counts.plain_batches == 1


def test_batches_that_are_on_the_device_already_are_ordered_behind_who_made_them(
    surface: Any,
) -> None:
    surface.device = torch.device("cpu")
    link = link_of(surface)
    link.send(torch.ones(1), 0)
    assert surface.log[0] == ("copy", "waits for stream", "compute")


def test_so_are_those_inside_objects_that_move_themselves(surface: Any) -> None:
    class Graph:
        def __init__(self, x: torch.Tensor) -> None:
            self.x = x

        def to(self, device: Any, non_blocking: bool = False) -> Graph:
            return self

    surface.device = torch.device("cpu")
    link_of(surface).send({"graph": Graph(torch.ones(1))}, 0)
    assert surface.log[0] == ("copy", "waits for stream", "compute")


def test_memory_that_a_transform_hides_in_an_object_is_kept_from_early_use(surface: Any) -> None:
    class Made:
        def __init__(self, x: torch.Tensor) -> None:
            self.parts = [x]

    link = link_of(surface, changes=[Made])
    got = link.hand_over(link.send(torch.ones(5), 0), 0)
    assert (got.parts[0].data_ptr(), "compute") in surface.recorded


def test_plain_batches_go_on_two_streams_in_turn_and_changed_ones_on_one(surface: Any) -> None:
    names = iter("abcdef")
    made = type(surface.compute)
    surface.new_stream = lambda: made(next(names), surface.log)
    link, changed = link_of(surface), link_of(surface, changes=[lambda b: b])
    for number in range(4):
        link.send(torch.ones(1), number)
    assert [line[0] for line in surface.log if line[0] != "host"] == ["a", "b", "a", "b"]
    assert [s.name for s in link.streams()] == ["a", "b", "compute"]
    surface.log.clear()
    for number in range(2):
        changed.send(torch.ones(1), number)
    assert [line[0] for line in surface.log] == ["c", "c"]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_owned_buffers_are_always_written_by_the_same_stream(surface: Any, depth: int) -> None:
    names = iter("ab")
    made = type(surface.compute)
    surface.new_stream = lambda: made(next(names), surface.log)
    link = link_of(surface, depth=depth, reuse=True)
    by_address: dict[int, set[str]] = {}
    for step in range(20):
        sent = link.send(torch.ones(4), step)
        stream = [line[0] for line in surface.log if line[1] == "records" and line[0] in "ab"][-1]
        got = link.hand_over(sent, step)
        by_address.setdefault(got.data_ptr(), set()).add(stream)
        del got, sent
    assert len(by_address) == depth + 2
    assert all(len(streams) == 1 for streams in by_address.values())
    assert set().union(*by_address.values()) == {"a", "b"}


@pytest.mark.parametrize("depth", [2, 3, 5])
def test_where_reading_waits_for_a_copy_as_many_as_the_depth_are_queued_behind_it(
    surface: Any, depth: int
) -> None:
    """So the copy engine has work while the host wakes up and sends the next."""
    link = link_of(surface, depth=depth)
    tensors = [torch.ones(2) for _ in range(12)]
    surface.pinned |= {t.untyped_storage().data_ptr() for t in tensors}
    for number, tensor in enumerate(tensors):
        link.send(tensor, number)
    events = [e.name for e in surface.events]
    for k, line in enumerate(surface.log):
        if line[:2] == ("host", "waits for"):
            queued = [x[2] for x in surface.log[:k] if x[1] == "records"]
            behind = len(queued) - 1 - queued.index(line[2])
            assert behind == depth
            assert queued == events[: len(queued)]
    assert sum(line[:2] == ("host", "waits for") for line in surface.log) == 12 - depth - 1


def test_a_batch_that_was_handed_over_is_the_loops_alone(surface: Any) -> None:
    link = link_of(surface)
    sent = link.send([torch.ones(3), {"y": torch.zeros(2)}], 0)
    got = link.hand_over(sent, 0)
    assert sent.parts is None
    assert {(t.data_ptr(), "compute") for t in (got[0], got[1]["y"])} == set(surface.recorded)
    gone = [weakref.ref(got[0]), weakref.ref(got[1]["y"])]
    del got
    assert [r() for r in gone] == [None, None]


def test_a_link_that_is_dropped_waits_for_its_copies_before_pages_are_unlocked(
    surface: Any,
) -> None:
    link = link_of(surface)
    link.send(torch.ones(1), 0)
    del link
    gc.collect()
    assert surface.log[-1] == ("host", "waits for stream", "copy")


def test_transforms_run_on_the_copy_stream_before_the_event(surface: Any) -> None:
    seen = []
    link = link_of(surface, changes=[lambda b: seen.append(surface.current.name) or b * 2])
    assert link.hand_over(link.send(torch.ones(2), 0), 0).sum() == 4
    assert seen == ["copy"]


def test_a_stream_of_the_loops_own_is_the_one_that_waits(surface: Any) -> None:
    own = type(surface.compute)("own", surface.log)
    link = link_of(surface, consumer=own, reuse=True)
    for step in range(5):
        link.hand_over(link.send(torch.ones(2), step), step)
    assert ("own", "waits for", "event 0") in surface.log
    assert not any(line[0] == "compute" for line in surface.log)
    assert {name for _, name in surface.recorded} == {"own"}
    assert [s.name for s in link.streams()] == ["copy", "copy", "own"]


def test_owned_buffers_are_written_again_only_after_the_loop_is_past_them(surface: Any) -> None:
    link = link_of(surface, depth=1, reuse=True)  # three buffers
    addresses = []
    for step in range(7):
        sent = link.send(torch.full((4,), float(step)), step)
        got = link.hand_over(sent, step)
        assert got.tolist() == [step] * 4
        addresses.append(got.data_ptr())
        del got, sent
    assert addresses[:3] == addresses[3:6]
    assert len(set(addresses)) == 3
    waits = [
        k for k, line in enumerate(surface.log) if line == ("copy", "waits for stream", "compute")
    ]
    copies = [k for k, line in enumerate(surface.log) if line[:2] == ("copy", "records")]
    assert len(waits) == 4  # three buffers were new
    assert [w + 1 for w in waits] == copies[3:]  # each before its copy


def test_a_batch_that_is_kept_a_step_longer_and_then_dropped_is_fenced_too(surface: Any) -> None:
    link = link_of(surface, depth=1, reuse=True)  # three buffers
    before = None
    for step in range(8):
        got = link.hand_over(link.send(torch.full((4,), float(step)), step), step)
        if before is not None:
            surface.log.append(("compute", "uses", step - 1))  # the step reads two batches
        before = got
    uses = [k for k, line in enumerate(surface.log) if line[1] == "uses"]
    waits = [
        k for k, line in enumerate(surface.log) if line == ("copy", "waits for stream", "compute")
    ]
    for number in range(4, 7):  # batch number - 3 was used last in step number - 2
        assert any(uses[number - 3] < w for w in waits)
    assert link._ring is not None
    assert link._ring.left_to_users == 0


def test_a_loop_that_changed_its_stream_is_waited_for_on_both(surface: Any) -> None:
    link = link_of(surface, depth=1, reuse=True)
    other = type(surface.compute)("other", surface.log)
    for step in range(4):
        link.hand_over(link.send(torch.ones(1), step), step)
        surface.current = other
    waits = [line[2] for line in surface.log if line[:2] == ("copy", "waits for stream")]
    assert waits == ["compute", "other"]


def test_what_the_loop_left_in_use_is_over_before_device_memory_is_counted_free(
    surface: Any,
) -> None:
    link = link_of(surface)
    link.hand_over(link.send(torch.ones(2), 0), 0)
    link.leave()  # the loop broke off
    link.leave()
    assert [line[:2] for line in surface.log].count(("compute", "records")) == 1


def test_tensors_that_are_more_than_bytes_and_objects_go_by_their_own_way(surface: Any) -> None:
    class Own:
        def __init__(self) -> None:
            self.x = torch.ones(2)

        def to(self, device: Any, non_blocking: bool = False) -> Own:
            assert non_blocking
            return self

    link = link_of(surface)
    sparse = torch.ones(2, 2).to_sparse()
    own = Own()
    got = link.hand_over(link.send([sparse, own, torch.ones(1)], 0), 0)
    assert got[0].is_sparse
    assert got[1] is own
    parts = (own.x, got[0]._values(), got[0]._indices())
    assert {(t.data_ptr(), "compute") for t in parts} <= set(surface.recorded)


def test_marks_are_events_with_times(surface: Any) -> None:
    link = link_of(surface)
    mark = link.mark()
    assert surface.log == [("compute", "records", mark.name)]
    mark.elapsed_time = lambda end: 2500.0
    assert link.span_s(mark, surface.event()) == 2.5


def test_what_nobody_takes_is_dropped_after_its_copy_and_closing_waits(surface: Any) -> None:
    link = link_of(surface)
    sent = link.send(torch.ones(1), 0)
    link.drop(sent)
    assert surface.log[-1] == ("host", "waits for", "event 0")
    assert sent.batch is None
    link.close()
    assert ("host", "waits for stream", "copy") in surface.log
    assert len(link._in_flight) == 0


# ---------------------------------------------------------------------- consistency


@pytest.mark.parametrize("reuse", [False, True])
def test_slices_and_repeated_elements_are_summed_as_the_device_has_them(
    surface: Any, reuse: bool
) -> None:
    judge = Judge(raising=True)
    link = link_of(surface, judge=judge, reuse=reuse)
    for step in range(6):
        tokens = torch.arange(30).view(3, 10) + step
        batch = (tokens[:, :-1], tokens[:, 1:], tokens.t()[2:], torch.tensor([step]).expand(9))
        got = link.hand_over(link.send(batch, step), step)
        assert all(torch.equal(a, b) for a, b in zip(got, batch, strict=True))
    link.finish()
    assert judge.checked == 12
    assert judge.found == []


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("pinned", [False, True])
def test_every_batch_is_checked_before_and_after_its_step(
    surface: Any, reuse: bool, pinned: bool
) -> None:
    judge = Judge(raising=True)
    link = link_of(surface, judge=judge, reuse=reuse)
    for step in range(12):
        x = torch.full((64,), float(step))
        if pinned:
            surface.pinned.add(x.untyped_storage().data_ptr())
        link.hand_over(link.send({"x": x, "y": torch.ones(0)}, step), step)
    link.finish()
    assert judge.checked == 24
    assert judge.found == []
    assert link.counts.in_place_batches == (12 if pinned else 0)


def test_a_buffer_that_is_written_while_it_is_used_is_found(surface: Any) -> None:
    judge = Judge(raising=False)
    link = link_of(surface, judge=judge)
    got = link.hand_over(link.send(torch.ones(8), 0), 0)
    _write(got, 3.0)
    link.hand_over(link.send(torch.ones(8), 1), 1)
    link.finish()
    assert [(f.step, f.kind) for f in judge.found] == [(0, "overwritten")]


def test_a_buffer_that_a_later_copy_has_written_already_is_named_by_its_header(
    surface: Any,
) -> None:
    judge = Judge(raising=False)
    link = link_of(surface, depth=1, judge=judge, reuse=True)  # three buffers
    first = link.send(torch.zeros(8), 0)
    for number in range(1, 4):
        later = link.send(torch.full((8,), float(number)), number)
    assert first.header is not None
    assert later.header is not None
    for mine, its in zip([first.header, *first.raw], [later.header, *later.raw], strict=True):
        _write_like(mine, its)  # what a copy does that does not wait
    link.hand_over(first, 0)
    link.finish()
    assert judge.found[0].kind == "overwritten"
    assert "it held batch 3" in judge.found[0].said


def test_findings_are_raised_when_their_results_have_come_not_waited_for(surface: Any) -> None:
    link = link_of(surface, judge=Judge(raising=True))
    first = link.send(torch.ones(8), 0)
    _write(first.batch, 5.0)
    link.hand_over(first, 0)
    link.hand_over(link.send(torch.ones(8), 1), 1)  # nothing has come yet
    for event in surface.events:
        event.passed = True
    with pytest.raises(ConsistencyError, match="step 0"):
        link.hand_over(link.send(torch.ones(8), 2), 2)


def test_what_the_loop_changes_itself_is_no_finding(surface: Any) -> None:
    judge = Judge(raising=True)
    link = link_of(surface, judge=judge)
    for step in range(3):
        link.hand_over(link.send(torch.ones(8), step), step).zero_()
    link.finish()
    assert judge.checked == 3


def test_a_slot_of_a_pool_brings_its_checksum_and_its_number_along(surface: Any) -> None:
    pool = PinnedPool(1024, 3, checksums=True)
    surface.pinned.add(pool._block.address)
    judge = Judge(raising=True)
    link = link_of(surface, pool=pool, judge=judge)
    for step in range(6):
        packed = collate_into(pool, wait_s=0.0)([torch.full((4,), float(step))])
        surface.pinned.add(packed.room().untyped_storage().data_ptr())
        surface.pinned.add(packed.header().untyped_storage().data_ptr())
        sent = link.send(packed, step)
        assert sent.buffer == packed.slot
        del packed
        assert link.hand_over(sent, step).tolist() == [[step] * 4]
        for event in surface.events:
            event.passed = True
    link.finish()
    assert judge.found == []
    assert link.counts.in_place_batches == 6
    assert pool.counts.fallbacks == {}


def _write_like(tensor: torch.Tensor, other: torch.Tensor) -> None:
    import ctypes

    ctypes.memmove(tensor.data_ptr(), other.data_ptr(), tensor.nbytes)


def _write(tensor: torch.Tensor, value: float) -> None:
    import ctypes

    (ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr())[:] = [value] * tensor.numel()


def test_refused_staging_is_said_once_by_the_link(
    surface: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("no memory")

    monkeypatch.setattr("flopwise.kit.input.staging.mmap.mmap", refuse)
    link = link_of(surface)
    with pytest.warns(FlopwiseWarning, match="copied the plain way") as said:
        assert [link.send(torch.ones(3), step).number for step in range(6)] == list(range(6))
    assert len(said) == 1
    assert link.counts.plain_batches == 6
