"""The line that says how far reading is."""

from __future__ import annotations

import pytest

from flopwise.cli import progress


def test_progress_of_what_takes_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = iter([0.0, 1.0, 4.0, 4.1, 5.0, 9.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    told = progress.Progress("a\x1b.json")
    for n_bytes in (1_000_000, 8_000_000, 9_000_000, 20_000_000):
        told(n_bytes)
    # nothing in the first two seconds, and no more often than twice a second
    told.end()
    said = capsys.readouterr().err.split("\r")
    assert said == ["", r"a\x1b.json: 8 MB read, 2 MB/s ", "a\\x1b.json: 20 MB read, 4 MB/s \n"]
    progress.Progress("b.json").end()
    assert capsys.readouterr().err == ""


def test_how_many_ranks_are_read_is_said_at_the_end_in_any_case(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = iter([0.0, 1.0, 4.0, 4.1, 4.2])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    told = progress.Ranks()
    for done in (1, 2, 3, 4):
        told(done, 4)
    told.end()
    assert capsys.readouterr().err == "\r2 of 4 ranks read \r4 of 4 ranks read \n"
