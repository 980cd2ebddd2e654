from __future__ import annotations

from typing import Any

import pytest
import torch

from flopwise.errors import ConsistencyError
from flopwise.kit.input import PinnedPool, collate_into
from flopwise.kit.input.findings import Judge
from flopwise.kit.input.host_link import HostLink


def plain_write(tensor: torch.Tensor, value: float) -> None:
    """Writes past torch, as another process or a copy engine does."""
    import ctypes

    count = tensor.numel()
    (ctypes.c_float * count).from_address(tensor.data_ptr())[:] = [value] * count


@pytest.fixture
def judge() -> Judge:
    return Judge(raising=False)


def test_changes_are_made_in_order() -> None:
    link = HostLink(None, [lambda b: b + 1, lambda b: b * 10], None)
    assert link.hand_over(link.send(torch.ones(1), 0), 0) == 20


def test_a_batch_that_changes_while_it_waits_is_found(judge: Judge) -> None:
    link = HostLink(None, [], judge)
    x = torch.ones(8)
    sent = link.send({"x": x}, 0)
    plain_write(x, 3.0)
    link.hand_over(sent, 5)
    assert [(f.step, f.kind) for f in judge.found] == [(5, "overwritten")]


def test_a_loader_that_fills_one_buffer_again_and_again_is_found(judge: Judge) -> None:
    link, buffer, sent = HostLink(None, [], judge), torch.zeros(8), []
    for number in range(3):
        sent.append(link.send([buffer.fill_(number)], number))  # read ahead
    for step in range(3):
        link.hand_over(sent[step], step)
    assert [(f.step, f.kind) for f in judge.found] == [(0, "overwritten"), (1, "overwritten")]
    assert "it holds batch 2" in judge.found[0].said


def test_a_batch_with_slices_and_repeated_elements_is_checked_like_any(judge: Judge) -> None:
    tokens = torch.arange(30).view(3, 10)
    link = HostLink(None, [], judge)
    link.hand_over(link.send((tokens[:, :-1], tokens[:, 1:], torch.ones(1).expand(9)), 0), 0)
    link.finish()
    assert judge.checked == 2
    assert judge.found == []


def test_a_batch_that_changes_while_the_step_uses_it_is_found_when_the_next_is_asked_for(
    judge: Judge,
) -> None:
    link = HostLink(None, [], judge)
    x = torch.ones(8)
    link.hand_over(link.send(x, 0), 0)
    plain_write(x, 3.0)
    assert judge.found == []
    link.hand_over(link.send(torch.ones(1), 1), 1)
    assert [(f.step, f.kind) for f in judge.found] == [(0, "overwritten")]
    assert "while the step used it" in judge.found[0].said


def test_the_last_batch_is_checked_when_the_epoch_ends(judge: Judge) -> None:
    link = HostLink(None, [], judge)
    x = torch.ones(8)
    link.hand_over(link.send(x, 0), 0)
    plain_write(x, 3.0)
    link.finish()
    link.leave()
    assert len(judge.found) == 1


def test_what_the_loop_or_a_transform_changes_itself_is_no_finding(judge: Judge) -> None:
    link = HostLink(None, [lambda b: b.mul_(2)], judge)
    link.hand_over(link.send(torch.ones(8), 0), 0)
    other = HostLink(None, [], judge)
    got = other.hand_over(other.send(torch.ones(8), 0), 0)
    got.zero_()
    other.finish()
    assert judge.found == []


def test_what_a_loop_changes_in_inference_mode_is_no_finding(judge: Judge) -> None:
    link = HostLink(None, [], judge)
    with torch.inference_mode():
        link.hand_over(link.send([torch.ones(2)], 0), 0)[0].add_(1)
        link.finish()
    assert judge.found == []


def test_a_finding_is_raised_at_its_step() -> None:
    link = HostLink(None, [], Judge(raising=True))
    x = torch.ones(8)
    sent = link.send(x, 0)
    plain_write(x, 3.0)
    with pytest.raises(ConsistencyError, match="step 0"):
        link.hand_over(sent, 0)


def test_the_header_of_a_slot_goes_with_its_batch(judge: Judge) -> None:
    pool = PinnedPool(1024, 2, checksums=True)
    packed = collate_into(pool)([torch.ones(4), torch.zeros(4)])
    assert packed.header().tolist()[0] == -1
    assert packed.header().tolist()[2] == packed.checksum
    link = HostLink(pool, [], judge)
    sent = link.send(packed, 17)
    assert sent.stamp is not None
    assert packed.header().tolist() == [17, sent.stamp.sent_ns, packed.checksum]
    assert sent.buffer == packed.slot
    link.hand_over(sent, 3)
    assert judge.found == []
    assert judge.checked == 1


def test_a_slot_that_is_given_back_too_early_and_filled_again_is_found(judge: Judge) -> None:
    pool = PinnedPool(1024, 1, checksums=True)
    link = HostLink(pool, [], judge, break_fence=True)
    sent = link.send(collate_into(pool)([torch.ones(4)]), 0)
    again = collate_into(pool)([torch.zeros(4)])
    assert again.slot == 0
    link.hand_over(sent, 0)
    assert [str(f) for f in judge.found] == [
        "step 0, buffer 0: overwritten: a worker had filled its slot again before this step read it"
    ]


def test_marks_are_seconds_and_there_is_no_stream(judge: Judge) -> None:
    link: Any = HostLink(None, [], judge)
    assert link.span_s(1.0, 3.5) == 2.5
    assert link.mark() <= link.mark()
    assert link.streams() == []


@pytest.mark.parametrize(
    "odd",
    [
        torch.nn.Parameter(torch.ones(3)),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.ones(3, requires_grad=True) * 2,
    ],
)
def test_what_a_worker_did_not_place_is_not_held_against_its_checksum(
    judge: Judge, odd: torch.Tensor
) -> None:
    pool = PinnedPool(4096, 2, checksums=True)
    link = HostLink(pool, [], judge)
    item = collate_into(pool, lambda samples: samples[0])([(odd, torch.ones(5))])
    link.hand_over(link.send(item, 0), 0)
    link.finish()
    assert judge.checked == 2
    assert judge.found == []


def test_tensors_without_memory_are_not_summed(judge: Judge) -> None:
    link = HostLink(None, [], judge)
    link.hand_over(link.send((torch.ones(2, device="meta"), torch.ones(2)), 0), 0)
    assert judge.found == []
