from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from flopwise.fixes.interface import HEADINGS, Declined, Fix, Scene
from flopwise.fixes.registry import FIXES, page

PAGE = Path(__file__).parents[2] / "docs" / "fixes.md"
CATALOG = Path(__file__).parents[2] / "src" / "flopwise" / "fixes" / "catalog"


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), (
        "docs/fixes.md is out of date: python -c "
        "'from flopwise.fixes.registry import page; print(page(), end=\"\")' > docs/fixes.md"
    )


def test_codes_and_names_are_unique_and_well_formed() -> None:
    assert len({f.code for f in FIXES}) == len({f.name for f in FIXES}) == len(FIXES)
    for fix in FIXES:
        assert re.fullmatch(r"FW1\d\d", fix.code)
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", fix.name)
        assert fix.causes
        assert fix.numerics in ("identical", "reordered")  # a lossy fix is never on by default


def test_every_file_of_the_catalog_is_registered() -> None:
    files = {path.stem for path in CATALOG.glob("*.py")} - {"__init__"}
    assert {fix.__module__.rsplit(".", 1)[1] for fix in FIXES} == files
    assert {fix.name.replace("-", "_") for fix in FIXES} == files


@pytest.mark.parametrize("fix", FIXES, ids=lambda fix: fix.code)
def test_every_heading_is_there_in_order(fix: type[Fix]) -> None:
    sections = fix.sections()
    assert tuple(sections) == ("", *HEADINGS)
    assert all(len(text) > 40 for text in sections.values())


@pytest.mark.parametrize("fix", FIXES, ids=lambda fix: fix.code)
def test_an_empty_scene_is_declined_with_a_reason(fix: type[Fix]) -> None:
    answer = fix().check(Scene())
    assert isinstance(answer, Declined)
    assert answer.reason


@pytest.mark.parametrize(
    "doc",
    [
        None,
        "Only a first line.",
        "First.\n\nWhat it does:\na\n\nWhy it helps:\nb\n\nWhen it declines:\nc",
        "First.\n\nWhy it helps:\nb\n\nWhat it does:\na\n\nWhen it declines:\nc\n\nWhat can change:\nd",
        "First.\n\nWhat it does:\n\nWhy it helps:\nb\n\nWhen it declines:\nc\n\nWhat can change:\nd",
    ],
)
def test_a_docstring_without_its_headings_is_an_error(doc: str | None) -> None:
    class Undocumented(FIXES[0]):
        pass

    Undocumented.__doc__ = doc
    with pytest.raises(ValueError, match="Undocumented"):
        Undocumented.sections()


def test_the_fixes_load_no_room_of_the_kit() -> None:
    code = "import sys, flopwise.fixes.registry; print([m for m in sys.modules if m.startswith('flopwise.kit.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    rooms = {"input", "precision", "memory", "graph"}
    assert not {name for name in rooms if f"flopwise.kit.{name}" in done.stdout}
    assert "flopwise.kit.compiler" in done.stdout
