from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from flopwise.kit.input.barrier import Barrier, wait_for_all


def test_it_waits_for_each_stream_while_nothing_is_being_sent(
    capsys: pytest.CaptureFixture[str],
) -> None:
    reader = SimpleNamespace(sending=threading.Lock())
    waited = []

    def stream(name: str) -> SimpleNamespace:
        return SimpleNamespace(synchronize=lambda: waited.append((name, reader.sending.locked())))

    link = SimpleNamespace(streams=lambda: [stream("copy"), stream("compute")])
    took = wait_for_all(reader, link, say=True)
    assert waited == [("copy", True), ("compute", True)]
    assert took.streams == 2
    assert not reader.sending.locked()
    assert capsys.readouterr().err == f"{took}\n"
    assert str(Barrier(0.0012345, 2)) == "input barrier: 2 streams waited for, 1.234 ms"


def test_where_nothing_runs_there_is_nothing_to_wait_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert wait_for_all(None, None, say=False).streams == 0
    assert capsys.readouterr().err == ""
