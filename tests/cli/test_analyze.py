"""`flopwise analyze`: codes, output, and what it does not need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flopwise.cli import analyze, main
from flopwise.records import store
from flopwise.records.ledger import SCHEMA, LedgerRecord


def test_a_trace_is_drawn(training: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = training(4).write()
    assert main(["analyze", str(path), "--width", "100"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("flopwise analyze")
    assert "useful work" in out
    assert "saved" not in out
    assert err == ""
    assert max(map(len, out.splitlines())) <= 100


def test_json_to_stdout_is_all_of_it(training: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = training(4).write()
    assert main(["analyze", str(path), "--json", "-"]) == 0
    out = capsys.readouterr().out
    record = store.decode(out.encode(), LedgerRecord, SCHEMA, "stdout")
    assert record.trace == str(path)
    assert sum(line.s for line in record.lines) == pytest.approx(record.step_s)


def test_a_given_peak_measures_a_device_that_the_table_does_not_have(
    training: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = training(4, device="NVIDIA X100").write()
    assert main(["analyze", str(path), "--json", "-"]) == 0
    record = store.decode(capsys.readouterr().out.encode(), LedgerRecord, SCHEMA, "stdout")
    assert (record.mfu, record.peak_flops_per_s) == (None, None)
    assert "give --peak" in (record.mfu_reason or "")
    assert main(["analyze", str(path), "--json", "-", "--peak", "bf16=1P"]) == 0
    record = store.decode(capsys.readouterr().out.encode(), LedgerRecord, SCHEMA, "stdout")
    assert record.mfu == pytest.approx(2 * 1024**3 / (1e-3 * 1e15))
    assert record.peak_source == "given: --peak bf16=1P"


def test_a_peak_that_is_none_is_one_message(
    training: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["analyze", str(training(3).write()), "--peak", "much"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "--peak 'much' is not a rate" in err


def test_json_to_a_file_beside_the_report(
    training: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, target = training(4).write(), tmp_path / "ledger.json"
    assert main(["analyze", str(path), "--json", str(target)]) == 0
    out = capsys.readouterr().out
    assert "ledger.json" in out
    assert main(["analyze", str(path), "--json", "-"]) == 0
    assert capsys.readouterr().out == target.read_text("utf-8")


def test_html_to_a_file_beside_the_report(
    training: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, target = training(4).write(), tmp_path / "ledger.html"
    assert main(["analyze", str(path), "--html", str(target)]) == 0
    assert "ledger.html" in capsys.readouterr().out
    page = target.read_text("utf-8")
    assert page.startswith("<!doctype html>")
    assert "Where the step goes" in page
    assert main(["analyze", str(path), "--html", str(target), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["heat"]["bins"] == 100
    assert target.read_text("utf-8") == page


def test_html_that_cannot_be_written(training: Any, tmp_path: Path, capsys: Any) -> None:
    target = tmp_path / "none" / "ledger.html"
    assert main(["analyze", str(training(3).write()), "--html", str(target)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "none" in err


def test_a_device_by_number(training: Any, capsys: pytest.CaptureFixture[str]) -> None:
    t = training(4)
    t.kernel("other", 20_000, 50, device=1)
    assert main(["analyze", str(t.write()), "--device", "1"]) == 0
    assert "device 1" in capsys.readouterr().out
    assert main(["analyze", str(t.write()), "--device", "5"]) == 2
    assert "no work of device 5; there is [0, 1]" in capsys.readouterr().err


def test_a_file_that_ends_early_is_drawn_and_its_code_says_so(
    training: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    t = training(6)
    path = t.write()
    path.write_text(t.text[: len(t.text) * 3 // 4], "utf-8")
    assert main(["analyze", str(path)]) == 1
    assert "the file ends early" in " ".join(capsys.readouterr().out.split())
    assert main(["analyze", str(path), "--json", "-"]) == 1
    assert json.loads(capsys.readouterr().out)["steps"] > 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        (b"", "not a Chrome trace"),
        (b"hello", "not a Chrome trace"),
        (b"SQLite format 3\x00", "not a Chrome trace"),
        (b'{"traceEvents": []}', "no kernel or copy of a device"),
        (b"[]", "no kernel or copy of a device"),
    ],
)
@pytest.mark.parametrize("words", [[], ["--json", "-"]])
def test_what_cannot_be_analysed_is_one_message(
    tmp_path: Path, capsys: Any, content: bytes | None, said: str, words: list[str]
) -> None:
    path = tmp_path / "t.json"
    if content is not None:
        path.write_bytes(content)
    assert main(["analyze", str(path), *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("flopwise analyze: ")
    assert said in err
    assert "t.json" in err


def test_a_folder_is_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", str(tmp_path)]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_a_target_that_cannot_be_written(training: Any, tmp_path: Path, capsys: Any) -> None:
    target = tmp_path / "none" / "ledger.json"
    assert main(["analyze", str(training(3).write()), "--json", str(target)]) == 2
    assert "none" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--width", "0"], ["--device", "x"], []])
def test_words_that_make_no_sense(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["analyze", *(["t.json", *words] if words else [])])
    assert end.value.code == 2
    assert "usage: flopwise analyze" in capsys.readouterr().err


def test_it_needs_no_torch(training: Any) -> None:
    code = (
        "import sys; from flopwise.cli import main; code = main(sys.argv[1:]);"
        "print(sum(n.split('.')[0] == 'torch' for n in sys.modules), file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "analyze", str(training(3).write())],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stderr == "0\n"
    assert "useful work" in done.stdout


def test_progress_of_what_takes_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = iter([0.0, 1.0, 4.0, 4.1, 5.0, 9.0])
    monkeypatch.setattr(analyze.time, "monotonic", lambda: next(now))
    progress = analyze.Progress("a\x1b.json")
    for n_bytes in (1_000_000, 8_000_000, 9_000_000, 20_000_000):
        progress(n_bytes)
    # nothing in the first two seconds, and no more often than twice a second
    progress.end()
    said = capsys.readouterr().err.split("\r")
    assert said == ["", r"a\x1b.json: 8 MB read, 2 MB/s ", "a\\x1b.json: 20 MB read, 4 MB/s \n"]
    analyze.Progress("b.json").end()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_the_trace_is_never_written_over(
    training: Any, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = training(4).write()
    before = path.read_bytes()
    (tmp_path / "link").symlink_to(path)
    for target in (path, tmp_path / "link"):
        assert main(["analyze", str(path), option, str(target)]) == 2
        assert capsys.readouterr().err == (
            f"flopwise analyze: {option} {target}: that is the trace itself. Nothing was written\n"
        )
    assert path.read_bytes() == before


def test_two_reports_in_one_file_are_refused(
    training: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = str(tmp_path / "one")
    assert main(["analyze", str(training(4).write()), "--json", one, "--html", one]) == 2
    assert "that is what --json names" in capsys.readouterr().err
    assert not Path(one).exists()


def test_a_pipe_is_written_to_and_a_link_followed(training: Any, tmp_path: Path) -> None:
    path, pipe, link = training(4).write(), tmp_path / "pipe", tmp_path / "link.json"
    os.mkfifo(pipe)
    (tmp_path / "kept.json").write_text("")
    link.symlink_to(tmp_path / "kept.json")
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert main(["analyze", str(path), "--json", str(pipe)]) == 0
        assert os.read(reading, 2) == b"{\n"
    finally:
        os.close(reading)
    assert pipe.is_fifo()  # a device would stay one, too
    assert main(["analyze", str(path), "--json", str(link)]) == 0
    assert link.is_symlink()
    assert (tmp_path / "kept.json").stat().st_size > 100
