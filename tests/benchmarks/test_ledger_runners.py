"""What runs the benchmarks of the ledger: names, scripts, tables, processes and their limits."""

from __future__ import annotations

import ast
import json
import re
import sys
import tarfile
from pathlib import Path

import pytest


@pytest.fixture
def lines(benchmark_module):
    return benchmark_module("ledger_lines")


@pytest.fixture
def jobs(benchmark_module):
    return benchmark_module("ledger_jobs")


@pytest.fixture
def runs(benchmark_module):
    return benchmark_module("runs")


@pytest.fixture
def residue(benchmark_module):
    return benchmark_module("profile_residue")


def test_every_program_is_there_and_its_docstring_names_the_lines_that_move(lines):
    names = [program.name for program in lines.programs()]
    assert len(set(names)) == len(names)
    for program in lines.programs():
        text = ast.get_docstring(ast.parse(Path(program.path).read_text()))
        assert "Moves: " in text
        if program.lines:
            said = set(re.findall(r"`(\w+)(?:_\*)?`", text.partition("Moves: ")[2]))
            assert said & set(program.lines) or any(
                line.startswith(tuple(said)) for line in program.lines
            )


def test_every_script_of_a_program_is_run(lines):
    folder = Path(lines.programs()[0].path).parent
    scripts = {path.stem for path in folder.glob("*.py")} - {"loop", "net"}
    assert scripts == {Path(program.path).stem for program in lines.programs()}


def test_every_cause_that_names_a_fault_is_one_that_flopwise_finds(lines, jobs):
    diagnosis = Path(__file__).resolve().parents[2] / "src" / "flopwise" / "diagnosis"
    text = "\n".join(path.read_text() for path in diagnosis.rglob("causes/*.py"))
    known = set(re.findall(r'cause="([\w-]+)"', text))
    wanted = {cause for program in lines.programs() for cause in program.causes}
    wanted |= {cause for base in jobs.bases() for fix in base.fixes for cause in fix.causes}
    assert wanted | set(lines.HARMLESS) <= known


def test_every_line_is_one_of_the_ledger(lines):
    from flopwise.records.ledger import FAMILIES

    wanted = {line for program in lines.programs() for line in program.lines}
    assert wanted <= set(FAMILIES)


def test_every_job_and_rung_has_its_script_and_its_fixes(jobs):
    for job in [*jobs.table_jobs(), *(base.job for base in jobs.bases())]:
        script = jobs.GPU / job.script
        text = script.read_text()
        if "--with" in job.flags:
            fixes = ast.literal_eval(re.search(r"FIXES = (\([^)]*\))", text).group(1))
            assert set(filter(None, job.flags[-1].split(","))) <= set(fixes)
    for base in jobs.bases():
        text = (jobs.GPU / base.job.script).read_text()
        fixes = ast.literal_eval(re.search(r"FIXES = (\([^)]*\))", text).group(1))
        for fix in base.fixes:
            assert fix.name in fixes
            assert fix.name not in base.having.split(",")
    names = [job.name for job in jobs.table_jobs()]
    assert len(set(names)) == len(names)


def test_a_process_over_its_limit_is_ended_and_its_output_kept(runs, tmp_path):
    code = "import time; print('begun', flush=True); time.sleep(60)"
    ended = runs.execute([sys.executable, "-c", code], tmp_path, 1.5, runs.Lane())
    assert ended.code is None
    assert ended.problem.startswith("over its time limit after")
    assert ended.problem.endswith("begun")


def test_a_process_that_fails_says_how(runs, tmp_path):
    argv = [sys.executable, "-c", "raise SystemExit('bert.py: transformers is not installed')"]
    ended = runs.execute(argv, tmp_path, 30, runs.Lane())
    assert (ended.code, ended.tail) == (1, "bert.py: transformers is not installed")
    assert ended.problem.startswith("exit code 1 after")


def test_lanes_share_the_cores_and_have_a_gpu_each(runs, monkeypatch):
    monkeypatch.setattr(runs.os, "sched_getaffinity", lambda _: set(range(5)))
    assert runs.lanes(1) == [runs.Lane()]
    assert runs.lanes(2) == [
        runs.Lane(0, frozenset({0, 1})),
        runs.Lane(1, frozenset({2, 3})),
    ]


def test_every_job_runs_once_over_all_lanes(runs):
    done = []
    runs.in_lanes([lambda lane, k=k: done.append(k) for k in range(9)], [runs.Lane(0)] * 3)
    assert sorted(done) == list(range(9))


def test_names_are_chosen_by_word_or_beginning(runs):
    names = ["gpt2", "gpt2-tuned", "llama"]
    assert runs.chosen(names, None) == names
    assert runs.chosen(names, "gpt2") == ["gpt2"]
    assert runs.chosen(names, "gpt2*") == names[:2]
    with pytest.raises(SystemExit, match="--only x: there are gpt2, gpt2-tuned, llama"):
        runs.chosen(names, "x")


def test_the_archive_leaves_out_large_files(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "LARGEST_KEPT", 100)
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "small.json").write_text("{}")
    (tmp_path / "w" / "trace.json").write_text("x" * 200)
    runs.archive(tmp_path / "w", tmp_path / "a.tar.gz")
    with tarfile.open(tmp_path / "a.tar.gz") as packed:
        assert packed.getnames() == ["small.json"]


def job_outcome(jobs, busy_ratio=1.0, busy=False, idle=0.02, trusted=True, because=(), error=0.0):
    outcome = jobs.Outcome("job", busy_ratio=busy_ratio)
    outcome.figures = {
        "identity_error_frac": error,
        "idle_frac": idle,
        "trusted": trusted,
        "untrusted_because": list(because),
    }
    jobs.judge(outcome, jobs.Job("job", "jobs/gpt2.py", busy=busy))
    return outcome.verdict


def test_what_a_job_must_show(jobs):
    assert job_outcome(jobs) == "pass"
    assert job_outcome(jobs, busy_ratio=None) == "pass"
    assert job_outcome(jobs, busy_ratio=1.0049) == "pass"
    assert job_outcome(jobs, busy_ratio=0.994) == "FAIL"
    assert job_outcome(jobs, error=1e-5) == "FAIL"
    assert job_outcome(jobs, idle=0.5) == "pass"
    assert job_outcome(jobs, idle=0.5, busy=True) == "FAIL"
    assert job_outcome(jobs, trusted=False) == "FAIL"
    assert job_outcome(jobs, trusted=False, because=["coverage"]) == "pass"


def test_the_raw_trace_of_the_light_window_is_read_and_compared(jobs, tmp_path):
    window = {"kind": "light", "file": "profile/rank0-light.json", "flags": [0] * 5, "lead": 1}
    for name, value in (
        ("ranks/host-1.json", {"profile": {"windows": [window]}}),
        (
            "profile/rank0-light.json",
            {
                "traceEvents": [
                    {"ph": "X", "cat": "kernel", "name": "k", "ts": 1000 * k, "dur": 900}
                    for k in range(5)
                ]
            },
        ),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(value))
    outcome = jobs.Outcome("job", figures={"busy_frac": 0.9, "step_ms": 1.01})
    jobs.read_raw(outcome, tmp_path)
    assert outcome.raw_busy["busy_s"] == pytest.approx(0.9e-3)
    assert outcome.busy_ratio == pytest.approx(1.01)


def test_steps_before_and_after_are_cut_from_the_scripts_own_clock(residue):
    step_s = [0.5] * 10 + [0.1] * 40 + [0.9] * 10 + [0.2] * 40  # warm-up, timed, windows, after
    unix_s = [0.0]
    for s in step_s:
        unix_s.append(unix_s[-1] + s)
    truth = {"step_s": step_s, "unix_s": unix_s}
    assert residue.split(truth, rows=50, timed=40, last_s=5.05) == pytest.approx(
        (0.11, 0.2), rel=0.1
    )
    with pytest.raises(LookupError, match="too few"):
        residue.split(truth, rows=50, timed=40, last_s=0.3)


def test_pairs_of_processes_are_compared_whatever_their_order(residue):
    def process(arm: str, ratio: float):
        return residue.Process(arm, before_s=1.0, after_s=ratio)

    found = residue.judge(
        [
            process("profiled", 1.21),
            process("plain", 1.1),
            process("plain", 1.0),
            process("profiled", 1.1),
            process("profiled", 0.99),
            process("plain", 0.9),
        ]
    )
    assert found["ratio"]["ratio"] == pytest.approx(1.1)
    assert (found["pairs"], found["verdict"]) == (3, "FAIL")
    assert residue.judge([process("profiled", 1), process("plain", 1)])["verdict"] == (
        "not shown: too few pairs"
    )
    failed = process("profiled", 1.1)
    failed.problem = "the windows reach into the last seconds"
    assert residue.judge([failed, process("plain", 1.0)])["pairs"] == 0


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (0.991, 1.009, "pass"),
        (1.011, 1.02, "FAIL"),
        (0.97, 0.985, "FAIL"),
        (0.97, 1.002, "not shown: no difference seen, but one of 3.0% could be"),
        (1.005, 1.02, "not shown: the limit lies in the interval"),
    ],
)
def test_the_whole_interval_is_held_against_the_limit(residue, low, high, words):
    assert residue.verdict(low, high) == words
