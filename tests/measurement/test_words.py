"""What is said reaches a terminal as text, and nobody needs to be there to hear it."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from flopwise.measurement.words import line, say, short


def test_a_name_commands_no_terminal() -> None:
    assert line("a\x1b[2Jb\nc\u202ed\udcff") == "a\\x1b[2Jb\\nc\\u202ed\\udcff"
    assert line("plain, ä 漢 µs ± 3 %") == "plain, ä 漢 µs ± 3 %"


@pytest.mark.parametrize(
    "error", [BrokenPipeError(32, "gone"), OSError(28, "full"), ValueError("closed")]
)
def test_nobody_needs_to_listen(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    class Deaf(io.StringIO):
        def write(self, text: str) -> int:
            raise error

    monkeypatch.setattr(sys, "stderr", Deaf())
    say("hello")


def test_paths_are_short_where_they_can_be(in_folder: Path) -> None:
    assert short(in_folder / "a" / "b") == "a/b"
    assert short(in_folder.parent) == str(in_folder.parent)
