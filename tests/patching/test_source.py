"""Scripts as they lie on disk: encodings, line endings, links; and the diff that keeps them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.errors import PatchError
from flopwise.patching.source import Source, encoded, read, unified_diff


def applied(folder: Path, tool: str) -> None:
    command = {
        "patch": ["patch", "-p1", "-s", "--binary", "-i", "d"],
        "git": ["git", "apply", "--whitespace=nowarn", "d"],
    }
    if tool == "git":
        subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    subprocess.run(command[tool], cwd=folder, check=True)


@pytest.mark.parametrize("tool", ["patch", "git"])
@pytest.mark.parametrize(
    "data",
    [
        b"import torch\nx = 1\n",
        b"import torch\r\nx = 1\r\n",
        b"import torch\nx = 1",
        b"\xef\xbb\xbfimport torch\nx = '\xc3\xa4'\n",
        b"# -*- coding: latin-1 -*-\nimport torch\nx = '\xe4'\n",
        b"import torch\n\x0cx = '\xe2\x80\xa8'\n",
        b"import torch\r\nx = 1\ny = 2\r\n",
    ],
    ids=["unix", "windows", "no newline", "mark", "latin", "form feed", "mixed"],
)
def test_a_diff_gives_exactly_the_other_bytes(in_folder: Path, data: bytes, tool: str) -> None:
    script = in_folder / "train.py"
    script.write_bytes(data)
    source = read("train.py")
    text = source.text.replace("x = ", "x = 7 + ")
    (in_folder / "d").write_bytes(unified_diff(source, text))
    applied(in_folder, tool)
    assert script.read_bytes() == encoded(source, text) == data.replace(b"x = ", b"x = 7 + ")


LINES = st.lists(st.sampled_from(["a", "b", "  c", "", "ä", "\x0c", "x\r"]), max_size=12)


@settings(max_examples=25, deadline=None)
@given(before=LINES, after=LINES, ends=st.tuples(st.booleans(), st.booleans()))
def test_any_diff_applies(
    tmp_path_factory: pytest.TempPathFactory,
    before: list[str],
    after: list[str],
    ends: tuple[bool, bool],
) -> None:
    folder = tmp_path_factory.mktemp("diff")
    old, new = (
        "\n".join(lines) + ("\n" if lines and end else "")
        for lines, end in zip((before, after), ends, strict=True)
    )
    if not old:  # an empty file has no lines to be named
        return
    path = folder / "f.py"
    path.write_bytes(old.encode())
    diff = unified_diff(Source(path, "f.py", old.encode(), old, "utf-8", ""), new)
    assert bool(diff) == (old != new)
    if diff and new:
        (folder / "d").write_bytes(diff)
        applied(folder, "patch")
        assert path.read_bytes() == new.encode()


def test_a_name_with_a_blank_and_a_folder(in_folder: Path) -> None:
    (in_folder / "my jobs").mkdir()
    script = in_folder / "my jobs" / "träin it.py"
    script.write_text("x = 1\n")
    source = read(str(script))
    (in_folder / "d").write_bytes(unified_diff(source, "x = 2\n"))
    applied(in_folder, "patch")
    assert script.read_text() == "x = 2\n"


def test_a_link_is_named_by_what_it_points_to(in_folder: Path) -> None:
    (in_folder / "real.py").write_text("x = 1\n")
    (in_folder / "link.py").symlink_to("real.py")
    source = read("link.py")
    assert unified_diff(source, "x = 2\n").startswith(b"--- a/real.py\n+++ b/real.py\n")


def test_a_script_elsewhere_is_named_by_its_last_part(in_folder: Path) -> None:
    (in_folder / "here").mkdir()
    (in_folder / "train.py").write_text("x = 1\n")
    os.chdir(in_folder / "here")
    assert read("../train.py").name == "train.py"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"x = 1\ny = '\xe4'\n", "s.py:2: not utf-8, and it declares no other encoding"),
        (b"x = (\n", "s.py:1: is not Python"),
        (b"# coding: nosuch\nx = 1\n", "s.py: unknown encoding"),
        (b"x = 1\n\x00\n", "is not Python"),
        (b"#" * (4 * 1024 * 1024 + 1), "larger than"),
    ],
)
def test_what_is_no_script_is_refused(in_folder: Path, data: bytes, said: str) -> None:
    (in_folder / "s.py").write_bytes(data)
    with pytest.raises(PatchError) as error:
        read("s.py")
    assert said in str(error.value)
    assert str(error.value).endswith("Nothing was written")


def test_what_is_no_file_is_refused(in_folder: Path) -> None:
    os.mkfifo("pipe")
    for path, said in (("gone.py", "No such file"), (".", "not a regular"), ("pipe", "not a reg")):
        with pytest.raises(PatchError, match=said):
            read(path)
    (in_folder / 'a"b.py').write_text("x = 1\n")
    with pytest.raises(PatchError, match="a diff cannot name such a file"):
        read('a"b.py')
