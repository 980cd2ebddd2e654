"""`flopwise compare`: codes, output, and what it does not need."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flopwise.cli import main
from flopwise.records import store
from flopwise.records.comparison import SCHEMA, ComparisonRecord


@pytest.fixture
def pair(training: Any) -> tuple[str, str]:
    """Returns the paths of traces with steps of 1000 us, and of 1400."""
    t = training(8)
    old = t.write("old.json")
    for event in t.events:
        if event["cat"] == "kernel":
            event["ts"] += 400 * ((event["ts"] - 20_000) // 1000)
    return str(old), str(t.write("new.json"))


def test_a_comparison_is_drawn(pair: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *pair, "--width", "110"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("flopwise compare")
    assert "slower · 1 ms to 1.40 ms · t_new / t_old 1.4000" in out
    assert "where the difference lies" in out
    assert "saved" not in out
    assert err == ""
    assert max(map(len, out.splitlines())) <= 110


def test_folders_of_ranks_are_their_means(
    training: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, shift in (("old", 0), ("new", 300)):
        for rank in range(2):  # steps of 1000 us; of the new job 1300
            t = training(8)
            t.header["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": 2}
            for event in t.events:
                if event["cat"] == "kernel":
                    event["ts"] += shift * ((event["ts"] - 20_000) // 1000)
            folder = tmp_path / name / f"node{rank}"  # below the folder, one a node
            folder.mkdir(parents=True)
            (folder / "trace.json").write_text(t.text)
            t.events.clear()
    sides = [str(tmp_path / "old"), str(tmp_path / "new")]
    assert main(["compare", *sides, "--json", "-"]) == 0
    record = store.decode(
        capsys.readouterr().out.encode(), ComparisonRecord, SCHEMA, "stdout"
    )  # fmt: skip
    assert (record.old.kind, record.old.world_size, record.new.kind) == ("job", 2, "job")
    assert record.step.ratio == pytest.approx(1.3, rel=0.01)
    (tmp_path / "none").mkdir()
    assert main(["compare", sides[0], str(tmp_path / "none")]) == 2
    assert "nothing is in it" in capsys.readouterr().err


def test_json_to_stdout_is_all_of_it(
    pair: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *pair, "--json", "-"]) == 0
    record = store.decode(capsys.readouterr().out.encode(), ComparisonRecord, SCHEMA, "stdout")
    assert record.step.ratio == pytest.approx(1.4)
    assert sum(line.difference_s for line in record.lines) == pytest.approx(4e-4)


def test_json_to_a_file_can_be_compared_no_further(
    pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "c.json"
    assert main(["compare", *pair, "--json", str(target)]) == 0
    assert "c.json" in capsys.readouterr().out
    assert json.loads(target.read_text())["schema"] == SCHEMA
    assert main(["compare", pair[0], str(target)]) == 2
    assert "of another kind (flopwise.comparison/1)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--fail-above", "5%"], 1),
        (["--fail-above", "50%"], 0),
        (["--fail-above", "50%", "--fail-above", "0.1ms"], 1),
        (["--fail-above", "ideal=1%"], 0),  # profiled: its lines are not trusted
        (["--fail-above", "ideal=1%", "--fail-unclear"], 1),
    ],
)
@pytest.mark.parametrize("output", [[], ["--json", "-"]])
def test_limits_decide_the_code(
    training: Any,
    pair: tuple[str, str],
    words: list[str],
    code: int,
    output: list[str],
    capsys: Any,
) -> None:
    doubted = training(0, device="NVIDIA X100")
    doubted.header["deviceProperties"] = [{"id": 0, "name": "NVIDIA X100"}]
    names = ("old.json", "new.json")
    if "ideal=1%" in words:
        for name in names:
            path = doubted.folder / name
            path.write_text(path.read_text().replace("NVIDIA H200", "NVIDIA X100"))
    assert main(["compare", *pair, *words, *output]) == code
    out = capsys.readouterr().out
    assert ("unclear" in out) is ("ideal=1%" in words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--fail-above", "5"], "not a limit"),
        (["--fail-above", "idle=5%"], "no line 'idle'"),
        (["--fail-unclear"], "of what"),
        (["--peak", "much"], "is not a rate"),
    ],
)
def test_words_that_make_no_sense_are_one_message(
    pair: tuple[str, str], words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *pair, *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("flopwise compare: ")
    assert said in err


@pytest.mark.parametrize(
    "content", [None, b"", b"hello", b'{"traceEvents": []}', b"{", b"\xff\xfe"]
)
@pytest.mark.parametrize("first", [True, False])
def test_what_cannot_be_compared_is_one_message(
    pair: tuple[str, str], tmp_path: Path, capsys: Any, content: bytes | None, first: bool
) -> None:
    path = tmp_path / "t.json"
    if content is not None:
        path.write_bytes(content)
    sides = [str(path), pair[1]] if first else [pair[0], str(path)]
    assert main(["compare", *sides]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("flopwise compare: ")
    assert "t.json" in err


def test_numbers_that_no_measurement_gives(
    training: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = training(4).write()
    assert main(["analyze", str(path), "--json", str(tmp_path / "l.json")]) == 0
    record = json.loads((tmp_path / "l.json").read_text())
    record["step_s"] = 1e-320
    record["step_s_each"] = [1e308, 1e308, 1e308]
    (tmp_path / "l.json").write_text(json.dumps(record))
    capsys.readouterr()
    assert main(["compare", str(path), str(tmp_path / "l.json")]) == 2
    assert capsys.readouterr().err.startswith("flopwise compare: ")


def test_a_side_is_never_written_over(
    pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = Path(pair[1]).read_bytes()
    (tmp_path / "link").symlink_to(pair[1])
    for target in (pair[1], str(tmp_path / "link")):
        assert main(["compare", *pair, "--json", target]) == 2
        assert f"that is {pair[1]} itself. Nothing was written" in capsys.readouterr().err
    assert Path(pair[1]).read_bytes() == before


def test_the_page_is_written_beside_report_and_json(
    pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "c.html"
    assert main(["compare", *pair, "--html", str(page), "--fail-above", "5%"]) == 1
    out = capsys.readouterr().out
    assert "slower" in out
    assert "c.html" in out.partition("saved")[2]
    first = page.read_text()
    assert first.startswith("<!doctype html>")
    assert "default-src 'none'" in first.replace("&#x27;", "'")
    assert "Where the difference lies" in first
    assert main(["compare", *pair, "--html", str(page), "--fail-above", "5%", "--json", "-"]) == 1
    assert json.loads(capsys.readouterr().out)["schema"] == SCHEMA
    assert page.read_text() == first


def test_one_file_is_not_two(
    pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = str(tmp_path / "c")
    assert main(["compare", *pair, "--html", pair[0]]) == 2
    assert f"--html {pair[0]}: that is {pair[0]} itself" in capsys.readouterr().err
    assert main(["compare", *pair, "--json", target, "--html", target]) == 2
    assert f"--html {target}: that is what --json names" in capsys.readouterr().err
    assert not Path(target).exists()


def test_traces_of_a_job_are_not_replaced(
    training: Any, pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inside = tmp_path / "job" / "rank0.json"
    inside.parent.mkdir()
    inside.write_text(Path(pair[0]).read_text())
    before = inside.read_bytes()
    assert main(["compare", str(inside.parent), pair[1], "--html", str(inside)]) == 2
    assert "lies among what is compared" in capsys.readouterr().err
    assert inside.read_bytes() == before


def test_a_target_that_cannot_be_written(
    pair: tuple[str, str], tmp_path: Path, capsys: Any
) -> None:
    assert main(["compare", *pair, "--json", str(tmp_path / "none" / "c.json")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "none" in err


def test_it_needs_no_torch(pair: tuple[str, str]) -> None:
    code = (
        "import sys; from flopwise.cli import main; code = main(sys.argv[1:]);"
        "print(sum(n.split('.')[0] == 'torch' for n in sys.modules), file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "compare", *pair], capture_output=True, text=True, check=True
    )
    assert done.stderr == "0\n"
    assert "where the difference lies" in done.stdout


def test_the_records_of_a_run_are_not_replaced_but_its_report_is(
    pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    for name in ("report.html", "ranks/0.json", "profile/rank0.json"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("kept")
    assert main(["analyze", pair[0], "--json", str(run / "run.json")]) == 0
    for name in ("ranks/0.json", "profile/rank0.json"):
        assert main(["compare", pair[0], str(run), "--html", str(run / name)]) == 2
        assert "othing was written" in capsys.readouterr().err
        assert (run / name).read_text() == "kept"
    assert main(["compare", pair[0], str(run), "--html", str(run / "run.json")]) == 2
    assert main(["compare", pair[0], str(run), "--html", str(run / "report.html")]) == 0
    assert (run / "report.html").read_text().startswith("<!doctype html>")
