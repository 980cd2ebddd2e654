from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flopwise.cli import main, report
from flopwise.errors import FlopwiseError, RecordError, RunFolderError, UsageError

DATA = Path(__file__).parents[1] / "reports" / "data"
PARSE = """
import argparse, sys
from flopwise.cli import report
parser = argparse.ArgumentParser()
report.add_parser(parser.add_subparsers())
args = parser.parse_args(sys.argv[1:])
code = report.run(args)
found = sorted(name for name in sys.modules if name.split(".")[0] == "torch")
print(f"torch modules: {len(found)}", file=sys.stderr)
sys.exit(code)
"""


def run(*words: object) -> int:
    parser = argparse.ArgumentParser()
    report.add_parser(parser.add_subparsers())
    return report.run(parser.parse_args(["report", *map(str, words)]))


def rank_record(rank: int, world_size: int, status: str) -> str:
    """Returns the JSON of a rank's record with one timed step."""
    row = {
        "ns": 1, "host_ns": 1, "kind": "timed", "shape": "", "micro_batches": 1, "samples": None,
        "tokens": None, "real_tokens": None, "skipped": False, "data_ns": 0, "forward_ns": None,
        "backward_ns": 0, "optimizer_ns": 0, "own_ns": 0, "pause_ns": 0, "data_dry": None,
    }  # fmt: skip
    fields = {
        "schema": "flopwise.rank/1", "rank": rank, "world_size": world_size, "local_rank": rank,
        "host": "h", "pid": 1, "argv": [], "python": "", "torch": "", "cuda": None, "nccl": None,
        "device_type": "cpu", "device_name": None, "device_index": None, "cpu_threads": 1,
        "cpu_cores": 1, "boundary": "optimizer", "status": status, "clock": "host clock",
        "steps_seen": 1, "rows": [row], "flops": [], "telemetry": {}, "allocated_peak_bytes": None,
        "reserved_peak_bytes": None, "device_total_bytes": None, "host_rss_peak_bytes": 1,
        "attach_ns": 1, "losses": [], "patches": [], "notes": [], "warmup_rule": "",
        "warmup_by_hand": False, "counted_from": None, "float32_matmul_precision": "highest",
    }  # fmt: skip
    return json.dumps(fields)


@pytest.mark.parametrize(("name", "file"), [("cpu", "run.json"), ("tune", "tune.json")])
def test_folder_and_file_print_the_stored_report(tmp_path, capsys, name, file):
    shutil.copy(DATA / f"{name}.json", tmp_path / file)
    expected = (DATA / f"{name}.100.txt").read_text(encoding="utf-8")
    for path in (tmp_path, tmp_path / file):
        assert run(path, "--width", "100") == 0
        assert capsys.readouterr() == (expected, "")


def test_a_folder_with_both_prints_the_tune(tmp_path, capsys):
    shutil.copy(DATA / "cpu.json", tmp_path / "run.json")
    shutil.copy(DATA / "tune.json", tmp_path / "tune.json")
    assert run(tmp_path) == 0
    assert capsys.readouterr().out.startswith("flopwise tune")


@pytest.mark.parametrize("name", ["cpu", "two_ranks", "tune"])
def test_json_is_the_whole_record_in_one_stable_form(tmp_path, capsys, name):
    assert run(DATA / f"{name}.json", "--json") == 0
    first = capsys.readouterr().out
    (tmp_path / "again.json").write_text(first, encoding="ascii")
    assert run(tmp_path / "again.json", "--json") == 0
    assert capsys.readouterr().out == first
    assert report.load(tmp_path / "again.json") == report.load(DATA / f"{name}.json")


def test_html_is_written_beside_what_is_printed(tmp_path, capsys):
    target = tmp_path / "page.html"
    expected = (DATA / "cpu.100.txt").read_text(encoding="utf-8")
    assert run(DATA / "cpu.json", "--width", "100", "--html", target) == 0
    assert capsys.readouterr() == (expected, "")
    page = target.read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert "flopwise run train_gpt.py --batch-size 16" in page
    assert run(DATA / "cpu.json", "--html", "/dev/null") == 0


def test_html_onto_the_record_is_refused(tmp_path):
    stored = tmp_path / "run.json"
    stored.write_bytes((DATA / "cpu.json").read_bytes())
    for given in (tmp_path, stored):
        with pytest.raises(UsageError, match="that is the record itself"):
            run(given, "--html", stored)
    assert stored.read_bytes() == (DATA / "cpu.json").read_bytes()


def test_html_of_a_tune_is_refused(tmp_path):
    target = tmp_path / "page.html"
    with pytest.raises(UsageError, match=r"tune\.json: --html draws runs, and this is a tune"):
        run(DATA / "tune.json", "--html", target)
    assert not target.exists()


def test_html_that_cannot_be_written(tmp_path):
    with pytest.raises(RunFolderError, match="none"):
        run(DATA / "cpu.json", "--html", tmp_path / "none" / "page.html")


@pytest.mark.parametrize("width", ["39", "201", "-5", "ten", "1e2", "٤٤", ""])
def test_width_outside_the_range_is_a_usage_error(capsys, width):
    with pytest.raises(SystemExit, match="2"):
        run(DATA / "cpu.json", "--width", width)
    assert "is not a number of columns from 40 to 200" in capsys.readouterr().err


def message(path: Path, kind: type[FlopwiseError]) -> str:
    with pytest.raises(kind) as caught:
        run(path)
    assert caught.value.exit_code == 2
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    return text.removeprefix(f"{path}: ")


def test_missing_path(tmp_path):
    expected = (
        "there is no such file or folder. Give the folder that `flopwise run` named when it ended, "
        "or the run.json in it"
    )
    assert message(tmp_path / "none", RunFolderError) == expected
    (tmp_path / "file").touch()
    assert message(tmp_path / "file" / "below", RunFolderError) == expected


def test_folder_without_a_record(tmp_path):
    assert message(tmp_path, RunFolderError) == (
        "no run.json or tune.json, and no record of a rank: not the folder of a run"
    )


def test_folder_of_runs_lists_them(tmp_path):
    for number in range(10):
        (tmp_path / f"run{number}").mkdir()
        shutil.copy(DATA / "cpu.json", tmp_path / f"run{number}" / "run.json")
    assert message(tmp_path, RunFolderError) == (
        "no run.json or tune.json, but runs inside: run0; run1; run2; run3; run4; run5; run6; run7; "
        "and 2 more. Give one of them"
    )


def test_folder_with_ranks_only_says_what_is_there(tmp_path):
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / "r10.json").write_text(rank_record(10, 16, "complete"))
    (tmp_path / "ranks" / "r2.json").write_text(rank_record(2, 16, "partial: killed"))
    (tmp_path / "ranks" / "r3.json").write_text("{")
    (tmp_path / "other.json").write_text("[]")
    assert message(tmp_path, RunFolderError) == (
        "no run.json or tune.json, so this run ended before its ranks were put together. There is: "
        "rank 2 of 16, partial: killed, 1 timed steps (ranks/r2.json); "
        "rank 10 of 16, complete, 1 timed steps (ranks/r10.json). "
        "These files can be read one by one; for a report, run again"
    )


def damaged(tmp_path: Path, data: bytes) -> str:
    path = tmp_path / "run.json"
    path.write_bytes(data)
    return message(path, RecordError)


def test_truncated_anywhere(tmp_path):
    data = (DATA / "cpu.json").read_bytes()
    for size in range(0, len(data) - 2, 97):
        text = damaged(tmp_path, data[:size])
        assert text.startswith("not a readable record (")
        assert text.endswith("It may have been cut short or edited; run again to replace it")


def test_nan_bytes_and_wrong_types(tmp_path):
    data = (DATA / "cpu.json").read_bytes()
    assert b'"value": 0.4412,' in data
    assert "invalid character" in damaged(
        tmp_path, data.replace(b'"value": 0.4412', b'"value": NaN')
    )
    assert "out of range" in damaged(tmp_path, data.replace(b'"value": 0.4412', b'"value": 1e999'))
    text = damaged(tmp_path, data.replace(b'"value": 0.4412', b'"value": "high"'))
    assert "Expected `float | null`, got `str` - at `$.mfu.value`" in text
    text = damaged(tmp_path, data.replace(b'"complete": true,', b""))
    assert "missing required field `complete`" in text
    assert "not a readable record" in damaged(tmp_path, b"\xff\xfe\x00")
    assert "not a readable record" in damaged(tmp_path, b"[" * 100_000)


def test_newer_version_and_other_kinds(tmp_path):
    data = (DATA / "cpu.json").read_bytes()
    assert damaged(tmp_path, data.replace(b"flopwise.run/1", b"flopwise.run/2")) == (
        "written as flopwise.run/2, and this flopwise reads flopwise.run/1. "
        "Read it with the flopwise that wrote it, or update this one"
    )
    assert damaged(tmp_path, rank_record(0, 2, "complete").encode()) == (
        "the record of one process, not of a run. Give the folder of the run"
    )
    assert damaged(tmp_path, b'{"traceEvents": []}') == (
        "not a record of flopwise (schema ''). Give a run.json or a tune.json"
    )


def test_a_number_too_large_for_any_arithmetic(tmp_path):
    data = (DATA / "cpu.json").read_bytes()
    record = json.loads(data)
    record["mfu"]["model_flops_per_step"] = 10**400
    text = damaged(tmp_path, json.dumps(record).encode())
    assert text.startswith("holds a number that no run writes (")


def test_control_characters_of_a_record_and_of_a_path_are_escapes(tmp_path, capsys):
    folder = tmp_path / "evil\x1b[31m\x07"
    folder.mkdir()
    schema = {"schema": "flopwise.run/\x1b[31m\x07"}
    (folder / "run.json").write_text(json.dumps(schema))
    for path in (folder, tmp_path, folder / "nothing\n"):
        assert main(["report", str(path)]) == 2
        said = capsys.readouterr().err
        assert r"\x1b[31m\x07" in said
        assert said.removesuffix("\n").isprintable()


def test_not_a_regular_file(tmp_path):
    fifo = tmp_path / "run.json"
    os.mkfifo(fifo)
    assert message(fifo, RunFolderError) == "neither a folder nor a regular file"
    assert "not the folder of a run" in message(tmp_path, RunFolderError)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file(tmp_path):
    path = tmp_path / "run.json"
    path.touch(mode=0)
    assert "Permission denied" in message(path, RunFolderError)


def test_a_path_with_a_zero_byte_is_no_traceback():
    with pytest.raises(RunFolderError, match="cannot be read"):
        run("a\0b")


def child(program: str, *words: object, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, words)],
        capture_output=True,
        encoding="utf-8",
        env=clean | environ,
        check=False,
    )


def test_piped_report_is_plain_and_100_wide_and_loads_no_torch():
    done = child(PARSE, "report", DATA / "cpu.json", PYTHONIOENCODING="utf-8")
    assert done.returncode == 0
    assert done.stdout == (DATA / "cpu.100.txt").read_text(encoding="utf-8")
    assert done.stderr == "torch modules: 0\n"


def test_the_torch_test_can_fail(tmp_path):
    (tmp_path / "torch.py").touch()
    done = child("import torch\n" + PARSE, "report", DATA / "cpu.json", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0
    assert done.stderr == "torch modules: 1\n"


def test_colour_can_be_forced_into_a_pipe_and_ascii_target_gets_ascii():
    coloured = child(PARSE, "report", DATA / "cpu.json", FORCE_COLOR="1", PYTHONIOENCODING="utf-8")
    assert "\x1b[" in coloured.stdout
    plain = child(
        PARSE, "report", DATA / "two_ranks.json", "--width", "70", PYTHONIOENCODING="ascii"
    )
    assert plain.stdout == (DATA / "two_ranks.70.ascii.txt").read_text(encoding="ascii")
