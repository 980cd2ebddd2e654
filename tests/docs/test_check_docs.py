"""The checks of tools/check_docs.py find what they are there to find."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

Tool = Callable[[str], ModuleType]


def page_of(folder: Path, text: str) -> Path:
    page = folder / "page.md"
    page.write_text(text, encoding="utf-8")
    return page


def test_links_to_nowhere_are_found(tmp_path: Path, tool: Tool) -> None:
    text = (
        "# One\n## `Two` words\n[a](other.md) [b](page.md#two-words) [c](#one) [d](#three)\n"
        "![e](gone.svg) [f](https://example.org/x) `[g](code.md)`\n```\n[h](block.md)\n```\n"
    )
    found = list(tool("check_docs").broken_links(page_of(tmp_path, text)))
    assert [line.split(": ", 1)[1] for line in found] == [
        "broken link other.md",
        "no such heading: #three",
        "broken link gone.svg",
    ]


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("see /home/ann/run.json", "/home"),
        ("in `/mnt/disk/x`", "/mnt"),
        (r"C:\Users", "C:\\"),
        ("TO" + "DO: more", "TO" + "DO"),
    ],
)
def test_words_that_do_not_belong_are_found(
    tmp_path: Path, tool: Tool, line: str, word: str
) -> None:
    (found,) = tool("check_docs").forbidden_words(page_of(tmp_path, f"fine\n{line}\n"))
    assert f"page.md:2: {word!r}" in found


@pytest.mark.parametrize("line", ["runs/home/x", "https://x.org/data/y", "docs/tmp", "a / b"])
def test_words_that_are_fine_are_left_alone(tmp_path: Path, tool: Tool, line: str) -> None:
    assert list(tool("check_docs").forbidden_words(page_of(tmp_path, line))) == []


def test_examples_run_in_order_in_one_folder(tmp_path: Path, tool: Tool) -> None:
    text = (
        "<!-- run: file a.txt -->\n```text\nhello\n```\n\n<!-- run -->\n```sh\ngrep hello a.txt\n```\n"
        "<!-- run: exit 3 -->\n```python\nimport sys\nsys.exit(3)\n```\n```sh\nfalse\n```\n"
    )
    assert list(tool("check_docs").run_examples(page_of(tmp_path, text))) == []


def test_an_example_that_fails_is_found(tmp_path: Path, tool: Tool) -> None:
    text = "# Page\n<!-- run -->\n```sh\necho seen\nfalse\necho unseen\n```\n"
    (found,) = tool("check_docs").run_examples(page_of(tmp_path, text))
    assert "page.md:4: exit code 1, not 0:" in found
    assert "    seen" in found
    assert "unseen" not in found


@pytest.mark.parametrize("text", ["<!-- run -->\nno block\n", "<!-- run: fast -->\n```sh\n```\n"])
def test_a_mark_that_marks_nothing_is_an_error(tmp_path: Path, tool: Tool, text: str) -> None:
    with pytest.raises(ValueError, match=r"page\.md:1"):
        tool("check_docs").examples(page_of(tmp_path, text))
