from __future__ import annotations

from typing import Any

import pytest
import torch

from flopwise.errors import ConsistencyError
from flopwise.kit.input import device_check
from flopwise.kit.input.checksum import host_checksum
from flopwise.kit.input.device_check import DeviceCheck
from flopwise.kit.input.findings import Judge, Stamp
from flopwise.kit.input.sent import Sent


def sent_of(number: int, raw: list[torch.Tensor], header: Stamp | None = None) -> Sent:
    sent = Sent(number, None, buffer=number % 3, step=number)
    sent.stamp = Stamp(number, 50 + number, host_checksum(raw))
    sent.keep(raw, (header or sent.stamp).words())
    return sent


def test_results_are_judged_in_their_order_when_they_have_come(surface: Any) -> None:
    judge = Judge(raising=False)
    check = DeviceCheck(surface, judge)
    for number in range(3):
        check.arrived(sent_of(number, [torch.ones(4)]), surface.compute)
    surface.events[0].passed = surface.events[2].passed = True
    check.read()
    assert judge.checked == 1  # the second has not come
    check.read(wait=True)
    assert judge.checked == 3
    assert ("host", "waits for", "event 1") in surface.log
    assert judge.found == []


def test_more_than_so_many_are_not_left_outstanding(
    surface: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_check, "MOST_OUTSTANDING", 2)
    judge = Judge(raising=False)
    check = DeviceCheck(surface, judge)
    for number in range(4):
        check.arrived(sent_of(number, [torch.ones(1)]), surface.compute)
        check.read()
    assert judge.checked == 3


def test_header_and_bytes_are_held_against_what_was_sent(surface: Any) -> None:
    judge = Judge(raising=True)
    check = DeviceCheck(surface, judge)
    check.arrived(sent_of(1, [torch.ones(4)], header=Stamp(4, 90, 7)), surface.compute)
    torn = sent_of(2, [torch.ones(4)])
    torn.raw = [torch.zeros(4)]
    check.after(torn, surface.compute)
    with pytest.raises(
        ConsistencyError, match=r"step 1, buffer 1: overwritten: it held batch 4.*and 1 more"
    ):
        check.read(wait=True)
    assert [f.step for f in judge.found] == [1, 2]


def test_memory_of_raw_tensors_is_kept_for_the_consumer(surface: Any) -> None:
    sent = sent_of(0, [torch.ones(2), torch.ones(3)])
    DeviceCheck(surface, Judge(False)).arrived(sent, surface.compute)
    assert sent.header is not None
    assert surface.recorded == [(t.data_ptr(), "compute") for t in (sent.header, *sent.raw)]
