"""A run folder belongs to one run."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from flopwise.errors import RunFolderError
from flopwise.launch import folder as folders


def test_a_new_folder_holds_the_options(in_folder: Path) -> None:
    folder = folders.create("a/b", "train.py", {"steps": 5})
    assert folder == in_folder / "a" / "b"
    assert json.loads((folder / "launch.json").read_text()) == {"steps": 5}
    assert (folder / "ranks").is_dir()


def test_a_folder_that_is_there_may_be_used_once(in_folder: Path) -> None:
    (in_folder / "mine").mkdir()
    (in_folder / "mine" / "notes.txt").write_text("kept")
    folders.create("mine", "x", {})
    with pytest.raises(
        RunFolderError, match=r"already holds a run\. It is left as it is and nothing was started"
    ):
        folders.create("mine", "x", {"other": 1})
    assert (in_folder / "mine" / "launch.json").read_text() == "{}\n"
    assert (in_folder / "mine" / "notes.txt").read_text() == "kept"


def test_a_folder_is_gone_with_all_that_is_in_it_or_without(in_folder: Path) -> None:
    folder = folders.create("mine", "x", {})
    assert not folders.gone(folder)
    (folder / "launch.json").unlink()
    (folder / "ranks" / "a.json").write_text("{}")
    assert not folders.gone(folder)  # made anew: what was measured is there
    (folder / "ranks" / "a.json").unlink()
    assert folders.gone(folder)
    (folder / "ranks").rmdir()
    folder.rmdir()
    assert folders.gone(folder)


def test_default_folders_have_the_name_of_the_job_and_never_meet(in_folder: Path) -> None:
    made = [folders.create(None, "a b/träin.py", {}) for _ in range(3)]
    assert len(set(made)) == 3
    assert all(f.parent == in_folder / "flopwise-runs" for f in made)
    assert all("-tr-in" in f.name for f in made)


@pytest.mark.parametrize("name", ["", "...", "/", "-- sh", "x" * 300, "\\udcff"])
def test_any_job_has_a_name(in_folder: Path, name: str) -> None:
    assert folders.create(None, name, {"command": [name]}).is_dir()


@pytest.mark.parametrize("out", ["one", None])
def test_of_two_at_the_same_moment_each_has_its_own_or_one_is_refused(
    in_folder: Path, out: str | None
) -> None:
    together = threading.Barrier(6)

    def create(_: int) -> str:
        together.wait()
        try:
            return str(folders.create(out, "x", {}))
        except RunFolderError as error:
            return f"error: {error}"

    with ThreadPoolExecutor(6) as threads:
        made = list(threads.map(create, range(6)))
    given = [m for m in made if not m.startswith("error")]
    assert len(set(given)) == len(given) == (1 if out else 6)


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("file", "is a file, not a folder"),
        ("file/below", "cannot be written (Not a directory)"),
        ("/proc/flopwise", "cannot be written ("),
        ("x" * 300, "cannot be written (File name too long)"),
    ],
)
def test_what_cannot_be_a_folder(in_folder: Path, out: str, said: str) -> None:
    (in_folder / "file").touch()
    with pytest.raises(RunFolderError) as caught:
        folders.create(out, "x", {})
    assert said in str(caught.value)
    assert "Nothing was started" in str(caught.value)


def test_a_failure_leaves_nothing_behind(in_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(RunFolderError, match="No space left on device"):
        folders.create("out", "x", {})
    monkeypatch.undo()
    monkeypatch.chdir(in_folder)
    assert not (in_folder / "out").exists()
    folders.create("out", "x", {})


def test_discarding_keeps_what_is_not_ours(in_folder: Path) -> None:
    folder = folders.create("out", "x", {})
    (folder / "theirs").touch()
    folders.discard(folder)
    assert [p.name for p in folder.iterdir()] == ["theirs"]
    (folder / "theirs").unlink()
    folders.create("out", "x", {})
    folders.discard(folder)
    assert not folder.exists()
