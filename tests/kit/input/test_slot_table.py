from __future__ import annotations

import os
import subprocess
import sys

import pytest

from flopwise.kit.input.shared_block import SharedBlock
from flopwise.kit.input.slot_table import ROW_BYTES, SlotTable


@pytest.fixture
def table() -> SlotTable:
    return SlotTable(SharedBlock(4096 + 4 * ROW_BYTES), 4096, 4)


def test_a_slot_keeps_its_ticket_until_it_is_taken_again(table: SlotTable) -> None:
    table.filling(2)
    assert table.filled(2) == table.ticket(2) == 1
    table.freed(2)
    assert table.ticket(2) == 1
    table.filling(2)
    assert table.filled(2) == 2
    assert [table.ticket(k) for k in (0, 1, 3)] == [0, 0, 0]


def test_slots_of_processes_that_live_are_not_taken_back(table: SlotTable) -> None:
    table.filling(0)
    assert not table.take_back(0)
    assert not table.take_back(1)  # free


def test_a_slot_of_a_process_that_is_gone_is_and_its_batch_is_void(
    table: SlotTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: gone.pid)
        table.filling(3)
        ticket = table.filled(3)
    assert table.take_back(3)
    assert table.ticket(3) == ticket + 1
    assert not table.take_back(3)


def test_a_fork_sees_and_writes_the_same_rows(table: SlotTable) -> None:
    table.filling(1)
    child = os.fork()
    if child == 0:
        table.filling(1)
        os._exit(table.ticket(1))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 2
    assert table.ticket(1) == 2
