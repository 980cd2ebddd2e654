"""The documents of the project: links lead somewhere, no page names one machine, marked examples run."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from flopwise.reports import job_tables, job_words

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "changes").glob("*.md")]
)
RUNNABLE = [page for page in PAGES if "<!-- run" in page.read_text("utf-8")]
Tool = Callable[[str], ModuleType]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path, tool: Tool) -> None:
    assert list(tool("check_docs").broken_links(page)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_names_one_machine_or_is_unfinished(page: Path, tool: Tool) -> None:
    assert list(tool("check_docs").forbidden_words(page)) == []


@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: str(page.relative_to(ROOT)))
def test_marked_examples_run(page: Path, tool: Tool) -> None:
    assert list(tool("check_docs").run_examples(page)) == []


def test_there_are_examples_to_run() -> None:
    assert {"README.md", "getting-started.md"} <= {page.name for page in RUNNABLE}


def test_every_page_is_reached_from_the_first_one() -> None:
    docs = ROOT / "docs"
    linked = set(re.findall(r"\]\(([\w-]+\.md)", (docs / "index.md").read_text("utf-8")))
    assert {page.name for page in docs.glob("*.md")} - {"index.md"} == linked


def test_the_sample_of_several_ranks_is_what_the_report_looks_like() -> None:
    page = (ROOT / "docs" / "ranks.md").read_text("utf-8")
    sample = page.partition("```text\n")[2].partition("```")[0]
    assert max(map(len, sample.splitlines())) <= 80
    for title in (
        f"  stragglers, {job_words.STRAGGLERS}\n",
        f"  by rank, a step; {job_tables.WAITING}\n",
        f"  collectives, the longest first; {job_tables.COLLECTIVES_OF}\n",
        f"  findings, {job_words.FINDINGS}\n",
        f" of {job_words.SHARE_OF} ",
    ):
        assert title in sample
    rank = [column.title for column in job_tables.RANK_COLUMNS]
    assert any(line.split() == " ".join(rank).split() for line in sample.splitlines())


def test_every_change_is_one_line_of_its_own_kind() -> None:
    kinds = {"added", "changed", "fixed", "removed"}
    for page in (ROOT / "changes").glob("*.md"):
        if page.name == "README.md":
            continue
        assert page.stem.rsplit(".", 1)[-1] in kinds, page.name
        assert len(page.read_text("utf-8").strip().splitlines()) == 1, page.name


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "index.html").is_file()
