"""A measurement from start to report: what is written where, when, and what of it is the user's."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flopwise import api, plans
from flopwise.cli import main
from flopwise.errors import HardwareError, RunFolderError, UsageError
from flopwise.hardware import ceilings
from flopwise.launch.command import Job
from flopwise.records import ceilings as ceilings_records
from flopwise.records.ceilings import CeilingsRecord, GemmCeiling
from flopwise.records.rank import RankRecord, Telemetry

Go = Callable[..., Any]
MakeRank = Callable[..., RankRecord]

# ---------------------------------------------------------------------- when

WAIT = """
import json
def wait_for(path, limit_s=10):
    started = time.monotonic()
    while not os.path.exists(path) and time.monotonic() < started + limit_s: time.sleep(0.01)
    return time.monotonic() - started
"""


def test_a_long_script_is_reported_while_it_still_runs(go: Go) -> None:
    done = go(
        WAIT + "train(60)\n"
        "while not any(n[0] != '.' for n in os.listdir('run/ranks')): time.sleep(0.01)\n"
        "waited_s = wait_for('run/run.json')\n"
        "seen = json.load(open('run/run.json'))\n"
        "print(waited_s < 2.6, seen['complete'], seen['exit_code'])",
        steps=10,
    )
    assert (done.code, done.out) == (0, "True True None\n")
    assert done.err.count("  throughput") == done.err.count("flopwise run script.py") == 1
    assert done.ours()[-1] == "flopwise: report above; saved run"
    assert done.record.exit_code == 0


def test_a_script_that_ends_soon_is_reported_once(go: Go) -> None:
    done = go("train(60)", steps=10)
    assert done.err.count("  throughput") == 1
    assert "report above" not in done.err


def test_a_job_that_is_not_measured_in_time_gets_a_provisional_report(go: Go) -> None:
    done = go(
        WAIT + "train(400, lambda step: time.sleep(0.004))\n"
        "wait_for('run/run.json')\n"
        "print(json.load(open('run/run.json'))['complete'])",
        steps=1000,
        first_report_s=0.2,
    )
    assert (done.code, done.out) == (0, "False\n")
    assert done.err.count("  throughput") == 2  # the provisional one, and the last
    assert "partial" in done.err


# ---------------------------------------------------------------------- where


def test_nothing_of_ours_is_on_stdout_and_json_is_the_record(go: Go, tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    done = go("train(40); sys.stdout.buffer.write(bytes(range(128)))", json_path=str(path))
    assert done.out.encode() == bytes(range(128))
    assert path.read_bytes() == (done.folder / "run.json").read_bytes()
    assert json.loads(path.read_text())["schema"] == "flopwise.run/1"


def test_quiet_is_silent_and_measures(go: Go) -> None:
    done = go("train(40); print('out'); print('err', file=sys.stderr)", quiet=True)
    assert (done.out, done.err) == ("out\n", "err\n")
    assert done.record.steps.total == 40


def test_json_into_a_pipe(go: Go, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.append((tmp_path / "pipe").read_text()))
    reader.start()
    done = go("train(40)", json_path=str(tmp_path / "pipe"))
    reader.join(timeout=10)
    assert got == [(done.folder / "run.json").read_text()]


def test_json_through_a_link_replaces_what_it_points_to(in_folder: Path, make_rank: Any) -> None:
    (in_folder / "link.json").symlink_to(in_folder / "real.json")
    api.write_json("link.json", make_rank())
    assert (in_folder / "link.json").is_symlink()
    assert (in_folder / "real.json").is_file()


def test_a_device_is_written_to_and_stays_one(make_rank: MakeRank) -> None:
    api.write_json("/dev/null", make_rank())
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize("path", ["folder", "nowhere/x.json", "/proc/x.json"])
def test_json_that_cannot_be_written_is_said_before_the_start(in_folder: Path, path: str) -> None:
    (in_folder / "folder").mkdir()
    if path.startswith("/proc"):
        with pytest.raises(RunFolderError, match="cannot be written"):
            api.write_json(path, Telemetry())
        return
    with pytest.raises(RunFolderError, match=r"cannot be written there\. Nothing was started"):
        api.run_command(Job(["false"], "x", None), json_path=path)
    assert not (in_folder / "flopwise-runs").exists()


def test_the_record_has_the_command_as_it_was_typed(
    go: Go, loaded_python: list[str], tmp_path: Path
) -> None:
    script = go("train(12)").folder.with_name("script.py")
    line = [
        "run",
        "--out",
        "typed",
        "--peak",
        "1T",
        "--quiet",
        "--",
        *loaded_python,
        str(script),
        "--",
        "-m",
    ]
    assert main(line) == 0
    assert json.loads((tmp_path / "typed" / "run.json").read_text())["command"] == [
        "flopwise",
        *line,
    ]
    assert go("train(12)", out="other").record.command == ["flopwise", "run", "script.py"]


def test_the_next_command_is_the_jobs_own_words(go: Go) -> None:
    assert "next        flopwise tune script.py\n" in go("train(40)").err


# ---------------------------------------------------------------------- left out, and inside one another


def test_disabled_it_is_as_if_we_were_not_there(go: Go, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOPWISE_DISABLE", "1")
    done = go(
        "train(20); print(os.environ.get('FLOPWISE_RUN'), os.environ.get('PYTHONPATH')); sys.exit(5)",
        plan="nowhere",
        peak="nonsense",
    )
    assert (done.code, done.out) == (5, f"None {os.environ.get('PYTHONPATH')}\n")
    assert done.ours() == ["flopwise: FLOPWISE_DISABLE is set: script.py runs unmeasured"]
    assert not done.folder.exists()


def test_a_run_inside_a_run_measures_and_the_outer_one_says_so(go: Go) -> None:
    flopwise = [sys.executable, "-m", "flopwise", "run", "--peak", "1T", "--out", "inner", "--"]
    done = go("train(40); sys.exit(3)", command=lambda argv: [*flopwise, *argv])
    assert done.code == 3
    inner = json.loads(Path("inner/run.json").read_text())
    assert (inner["steps"]["total"], inner["exit_code"]) == (40, 3)
    assert done.ours()[-1] == (
        f"flopwise run: measured by another flopwise run inside this one: see {Path('inner').absolute()}"
    )


# ---------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"price": 0.0}, "--price 0.0: must be US dollars per device-hour, above 0"),
        ({"price": float("nan")}, "must be US dollars"),
        ({"peak": "fast"}, "peak"),
        ({"plan": "nowhere.toml"}, "nowhere.toml: cannot be read"),
    ],
)
def test_options_are_checked_before_anything_starts(
    in_folder: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(Exception, match=said) as caught:
        api.run_command(Job(["touch", "started"], "x", None), **options)
    assert caught.value.exit_code == 2  # type: ignore[attr-defined]
    assert list(in_folder.iterdir()) == []


def test_a_command_that_cannot_start_leaves_no_folder(in_folder: Path) -> None:
    (in_folder / "broken").write_text("no program")
    (in_folder / "broken").chmod(0o755)
    with pytest.raises(UsageError, match=r"broken cannot be started \(Exec format error\)"):
        api.run_command(Job(["./broken"], "broken", None), out="run", quiet=True)
    assert [p.name for p in in_folder.iterdir()] == ["broken"]


def test_a_stderr_that_nobody_reads_changes_nothing(
    go: Go, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone(io.StringIO):
        encoding = "utf-8"

        def write(self, text: str) -> int:
            raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(sys, "stderr", Gone())
    done = go("train(40); sys.exit(9)")
    assert done.code == 9
    assert done.record.steps.total == 40


def test_a_script_that_imports_no_torch(in_folder: Path, capfd: Any) -> None:
    job = Job([sys.executable, "-c", "import sys; sys.exit(1)"], "x", None)
    assert api.run_command(job) == 1
    message = capfd.readouterr().err.splitlines()[-1]
    assert message.startswith(
        "flopwise run: no training step was seen: no Python process below this one"
    )
    assert message.endswith("The script ended with exit code 1")


# ---------------------------------------------------------------------- ceilings


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A cache that holds `record` for any key, and a measurement that notes what it was asked for."""
    held: dict[str, Any] = {"record": None, "asked": []}

    def obtain(threads: int | None, **options: Any) -> Any:
        held["asked"].append((threads, options["key"]))
        error = held.get("error")
        if error is not None:
            raise error
        return held["record"], None

    monkeypatch.setattr(ceilings, "load", lambda key: (held["record"], None))
    monkeypatch.setattr(ceilings, "obtain", obtain)
    return held


H200 = "NVIDIA H200"
H200_BYTES = 150_000_000_000


def gpu(make_rank: MakeRank, **fields: Any) -> RankRecord:
    seen = Telemetry(name=H200, sm_count=132, power_limit_w=700.0, power_limit_default_w=700.0)
    return make_rank(
        **{
            "device_type": "cuda",
            "device_name": H200,
            "device_total_bytes": H200_BYTES,
            "telemetry": seen,
        }
        | fields
    )


def measured(**fields: Any) -> CeilingsRecord:
    made: dict[str, Any] = {
        "schema": ceilings_records.SCHEMA, "flopwise": "0", "created": "2026-01-01T00:00:00+00:00",
        "device_type": "cuda", "device_name": H200, "torch": "2.13.0+cpu", "cuda": "13.0", "driver": None,
        "threads": 0, "cores": 0, "wall_s": 1.0,
        "gemm": [GemmCeiling("bf16", 794e12, "8192x8192x8192 nt", 671e12)], "copy_bytes_per_s": None,
        "copy_size_bytes": None, "dispatch_s": None, "launch_s": None, "link": None,
        "memory_bytes": H200_BYTES, "sm_count": 132, "power_limit_w": 700.0,
    }  # fmt: skip
    return CeilingsRecord(**(made | fields))


def test_a_gpu_of_the_table_is_never_measured(make_rank: MakeRank, cached: dict[str, Any]) -> None:
    assert api._ceilings(gpu(make_rank), [], may_measure=True, quiet=True) is None
    assert cached["asked"] == []


@pytest.mark.parametrize(
    "fields",
    [
        {"device_name": "NVIDIA Z9000"},
        {"device_name": "NVIDIA H200 MIG 1g.18gb", "telemetry": Telemetry(name=H200, mig=True)},
        {"device_total_bytes": 16_000_000_000},  # a slice of it, or another card of that name
        {"telemetry": Telemetry(name=H200, sm_count=16)},
    ],
)
def test_a_gpu_that_only_has_the_name_is_measured(
    make_rank: MakeRank, cached: dict[str, Any], fields: dict[str, Any]
) -> None:
    lead = gpu(make_rank, **fields)
    api._ceilings(lead, [], may_measure=True, quiet=True)
    ((threads, key),) = cached["asked"]
    assert (threads, key.device_type, key.device_name) == (None, "cuda", lead.device_name)
    api._ceilings(replace(lead, world_size=2), [], may_measure=True, quiet=True)
    api._ceilings(lead, [], may_measure=False, quiet=True)
    assert len(cached["asked"]) == 1


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, None),
        ({"memory_bytes": 80_000_000_000}, "8e+10 bytes of memory"),
        ({"sm_count": 16}, "16 SMs, this device has 132"),
        ({"power_limit_w": 500.0}, "500 W power limit, this device has 700"),
        ({"power_limit_w": 700.4}, None),
        ({"mig": True}, "MIG on, it is off here"),
    ],
)
def test_ceilings_of_another_device_of_that_name_are_left_out(
    make_rank: MakeRank, cached: dict[str, Any], fields: dict[str, Any], said: str | None
) -> None:
    cached["record"] = measured(**fields)
    notes: list[str] = []
    found = api._ceilings(gpu(make_rank), notes, may_measure=False, quiet=True)
    if said is None:
        assert found is cached["record"]
        assert notes == []
    else:
        assert found is None
        assert notes[0].startswith("the cached ceilings are left out: they were measured with ")
        assert said in notes[0]


def test_only_this_hosts_cpu_has_a_measured_peak(
    make_rank: MakeRank, cached: dict[str, Any]
) -> None:
    cached["record"] = measured(device_type="cpu")
    cpu = make_rank(torch=plans.torch_version())
    assert api._ceilings(cpu, [], may_measure=False, quiet=True) is cached["record"]
    for other in (replace(cpu, host="elsewhere"), replace(cpu, device_type="mps")):
        assert api._ceilings(other, [], may_measure=True, quiet=True) is None
    assert cached["asked"] == []


def test_what_another_torch_measured_is_said(make_rank: MakeRank, cached: dict[str, Any]) -> None:
    notes: list[str] = []
    api._ceilings(make_rank(torch="2.11.0+cu130"), notes, may_measure=True, quiet=True)
    own = plans.torch_version()
    assert cached["asked"][0][1].torch == own
    assert notes == [f"ceilings are measured with torch {own}; the script used 2.11.0+cu130"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (HardwareError("busy"), "the ceilings of this device could not be measured: busy"),
        (KeyboardInterrupt(), "the ceilings of this device were not measured: interrupted"),
    ],
)
def test_ceilings_that_cannot_be_had_are_a_note(
    make_rank: MakeRank, cached: dict[str, Any], error: BaseException, said: str
) -> None:
    cached["error"] = error
    notes: list[str] = []
    cpu = make_rank(torch=plans.torch_version())
    assert api._ceilings(cpu, notes, may_measure=True, quiet=True) is None
    assert notes == [said]


@pytest.mark.parametrize(
    ("end", "asked"), [("sys.exit(1)", 1), ("os.kill(os.getpid(), signal.SIGINT)", 0)]
)
def test_after_an_interrupt_nothing_is_measured_any_more(
    go: Go, cached: dict[str, Any], end: str, asked: int
) -> None:
    done = go(f"train(40); {end}", peak=None)
    assert done.record.exit_code in (1, 128 + signal.SIGINT)
    assert len(cached["asked"]) == asked
