"""What is done in the user's process before the first step, apart from attaching itself (see test_faults.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flopwise import bootstrap


def run(code: str, folder: Path) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True
    ).stdout


def test_our_imports_find_the_standard_library_and_leave_no_trace(in_folder: Path) -> None:
    (in_folder / "statistics.py").write_text("print('theirs')\n")
    (in_folder / "colorsys.py").write_text("print('theirs, too')\n")
    out = run(
        "import sys, os\n"
        "from flopwise import bootstrap\n"
        "path, modules = list(sys.path), set(sys.modules)\n"
        "with bootstrap._imports_apart():\n"
        "    import statistics as ours, flopwise.units\n"
        "    assert ours.fmean([1, 3]) == 2\n"
        "    from colorsys import rgb_to_hsv\n"
        "print(sys.path == path, sorted(set(sys.modules) - modules))\n"
        "import statistics, colorsys\n"
        "print(ours is not statistics)",
        in_folder,
    )
    assert out == "True ['flopwise.units']\ntheirs\ntheirs, too\nTrue\n"


def test_the_path_is_put_back_after_a_failure() -> None:
    path = list(sys.path)
    with pytest.raises(ZeroDivisionError), bootstrap._imports_apart():
        raise ZeroDivisionError
    assert sys.path == path


@pytest.mark.parametrize(
    ("entry", "belongs"),
    [("", True), ("/lib-dynload", True), ("/site-packages", False), ("/dist-packages/x", False)],
)
def test_what_belongs_to_the_standard_library(entry: str, belongs: bool) -> None:
    library = os.path.dirname(os.__file__)
    assert bootstrap._belongs_to(library + entry, library) is belongs
    assert not bootstrap._belongs_to(library + "x" + entry, library)


@pytest.mark.parametrize(
    ("folder", "disabled"), [(None, None), ("", None), ("/nowhere", "1"), ("/nowhere", "yes")]
)
def test_outside_of_a_run_nothing_is_loaded(
    monkeypatch: pytest.MonkeyPatch, in_folder: Path, folder: str | None, disabled: str | None
) -> None:
    for name, value in (("FLOPWISE_RUN", folder), ("FLOPWISE_DISABLE", disabled)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    out = run(
        "import sys\nfrom flopwise import bootstrap\nbefore = set(sys.modules)\n"
        "bootstrap.attach()\nprint(set(sys.modules) - before)",
        in_folder,
    )
    assert out == "set()\n"
