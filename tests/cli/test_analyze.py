"""`flopwise analyze`: codes, output, and what it does not need."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flopwise.cli import main
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


def test_a_folder_without_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", str(tmp_path)]) == 2
    assert "nothing is in it" in capsys.readouterr().err
    (tmp_path / "notes.txt").write_text("no trace")
    assert main(["analyze", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert (out, "notes.txt" in err) == ("", True)


@pytest.fixture
def job(timelines: Any, tmp_path: Path) -> Path:
    """A folder with the traces of four ranks, of which rank 1 comes 200 us late to each all-reduce of a step of 1 ms."""
    folder = tmp_path / "traces"
    folder.mkdir()
    words = {
        "Collective name": "allreduce", "In msg nelems": 1_000_000, "Out msg nelems": 1_000_000, "dtype": "Float",
        "Process Group Name": "0", "Group size": 4, "Process Group Ranks": "[0, 1, 2, 3]",
    }  # fmt: skip
    for rank in range(4):
        late = 200 if rank == 1 else 0
        timeline = timelines()
        for k in range(8):
            at = 1000.0 * k + 1000
            timeline.kernel("gemm", at + 20, 300 + late, at=at)
            op = timeline.op("record_param_comms", at + 300, 10, **words)
            timeline.kernel(
                "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)",
                at + 330 + late,
                370 - late,
                at=at + 302,
                op=op,
                stream=20,
                **words,
            )
            timeline.optimizer(at + 705, 40)
            timeline.kernel("update", at + 720, 200, at=at + 710)
        timeline.on("NVIDIA H100 80GB HBM3")
        timeline.header["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": 4}
        (folder / f"worker_{rank}.json").write_text(timeline.text)
    return folder


@pytest.mark.parametrize("flags", [[], ["--no-ledger"]])
def test_a_folder_is_a_job(
    job: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, flags: list[str]
) -> None:
    target, page = tmp_path / "job.json", tmp_path / "job.html"
    assert main(["analyze", str(job), "--json", str(target), "--html", str(page), *flags]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "4 of 4 ranks read" in out
    record = json.loads(target.read_text())
    assert [one["rank"] for one in record["ranks"]] == [0, 1, 2, 3]
    assert record["health"]["clean"] is True
    assert [one["rank"] for one in record["stragglers"]] == [1]
    assert record["stragglers"][0]["delay_s"] == pytest.approx(200e-6, rel=0.01)
    assert record["redundant_bytes_frac"] == 0
    assert record["collectives"][0]["bus_bytes_per_s"] == pytest.approx(4e6 * 1.5 / 170e-6)
    assert all((one["ledger"] is None) == bool(flags) for one in record["ranks"])
    assert "<html" in page.read_text()[:200]


def test_files_are_a_job_as_their_folder_is(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(path) for path in sorted(job.iterdir(), reverse=True)]
    assert main(["analyze", *files, "--json", "-"]) == 0
    one = capsys.readouterr().out
    assert main(["analyze", str(job), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(one)


def test_one_damaged_rank_is_said_and_the_others_stand(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = job / "worker_2.json"
    broken.write_bytes(broken.read_bytes()[:2000])
    code = main(["analyze", str(job), "--json", "-"])
    record = json.loads(capsys.readouterr().out)
    assert code in (0, 1)
    assert record["health"]["clean"] is False
    assert record["ranks"][0]["ledger"] is not None
    assert "stragglers" in record["health"]["withheld"]


def test_of_one_file_the_json_has_the_job_too(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["analyze", str(job / "worker_1.json"), "--json", "-"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["schema"] == "flopwise.ledger/1"
    assert {"lines", "health", "collectives", "stragglers", "redundant_bytes_frac"} <= record.keys()
    assert [(one["rank"], one["steps"]) for one in record["ranks"]] == [(1, record["steps"])]
    assert record["stragglers"] == []


def test_copies_and_tables(job: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    copy = tmp_path / "copy.json.gz"
    assert main(["analyze", str(job / "worker_1.json"), "--perfetto", str(copy)]) == 0
    with gzip.open(copy) as stream:
        names = {event["name"] for event in json.load(stream)["traceEvents"]}
    assert {"gemm", "update"} < names
    assert main(["analyze", str(job), "--perfetto", str(copy)]) == 2
    assert "--perfetto copies one trace" in capsys.readouterr().err
    pytest.importorskip("polars", reason="Polars is not installed: tables are not written")
    import polars

    assert main(["analyze", str(job), "--tables", str(tmp_path / "tables")]) == 0
    calls = polars.read_parquet(tmp_path / "tables" / "collectives.parquet")
    assert calls.height == 32
    assert set(calls["rank"]) == {0, 1, 2, 3}
    lines = polars.read_parquet(tmp_path / "tables" / "lines.parquet")
    assert lines.filter(polars.col("name") == "comm_unsplit").height > 0


@pytest.mark.parametrize("more", [[], ["--no-ledger"]])
def test_a_device_that_is_not_in_the_trace_is_one_message(
    job: Path, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    assert main(["analyze", str(job / "worker_1.json"), "--device", "7", *more]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "no work of device 7; there is [0]" in err
    assert main(["analyze", str(job / "worker_1.json"), "--device", "0", *more]) == 0


def test_options_of_one_trace_say_what_is_in_their_way(
    job: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["analyze", str(job), "--device", "0"]) == 2
    assert "--device chooses in one trace" in capsys.readouterr().err
    copy = ["--perfetto", str(tmp_path / "copy.json")]
    assert main(["analyze", str(job / "worker_1.json"), "--no-ledger", *copy]) == 2
    assert "leave out --no-ledger" in capsys.readouterr().err


def test_a_ledger_that_was_not_asked_for_is_said_so(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["analyze", str(job / "worker_1.json"), "--no-ledger"]) == 0
    assert "ledger      none · not asked for (--no-ledger)" in capsys.readouterr().out


def test_what_lies_among_the_traces_is_not_replaced(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (job / "worker_0.json").read_bytes()
    assert main(["analyze", str(job), "--json", str(job / "worker_0.json")]) == 2
    assert "lies among the traces" in capsys.readouterr().err
    assert (job / "worker_0.json").read_bytes() == before


@pytest.mark.parametrize("base", [2**63, 2**64, -(2**62), 1e308, True, "x", None, [1], {}])
def test_a_beginning_that_is_no_time_is_none(
    job: Path, base: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in job.iterdir():
        path.write_text(json.dumps({**json.loads(path.read_text()), "baseTimeNanoseconds": base}))
    assert main(["analyze", str(job), "--no-ledger", "--json", "-"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [one["wait_s"] for one in record["ranks"]] == pytest.approx([200e-6, 0, 200e-6, 200e-6])


def test_names_that_are_too_long_are_one_message(
    training: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path, long = str(training(3).write()), "a" * 5000
    for words in (
        ["analyze", long],
        ["analyze", path, "--json", long],
        ["analyze", path, "--html", long],
        ["analyze", path, "--perfetto", long],
        ["compare", long, path, "--json", "new.json"],
        ["report", long, "--html", "new.html"],
    ):
        assert main(words) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)


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
