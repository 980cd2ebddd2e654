"""From a script to its ledger, and what comes of windows that are missing, damaged or not what they say."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flopwise.measurement import ledgers
from flopwise.measurement.ledgers import _joined, ledger_or_reason, pack, with_ledger
from flopwise.records.finding import Finding
from flopwise.records.rank import Profile, ProfiledWindow, RankRecord
from flopwise.records.run import RunRecord
from flopwise.summary import Context, summarise

Go = Callable[..., Any]
CONTEXT = Context(["flopwise", "run", "train.py"], "train.py", created="2026-01-01T00:00:00+00:00")


@dataclasses.dataclass
class Run:
    """A rank with windows in a run folder."""

    folder: Path
    rank: RankRecord

    @property
    def record(self) -> RunRecord:
        return summarise([self.rank], CONTEXT)

    @property
    def windows(self) -> dict[str, ProfiledWindow]:
        assert self.rank.profile is not None
        return {window.kind: window for window in self.rank.profile.windows}

    def path(self, kind: str) -> Path:
        return self.folder / self.windows[kind].file

    def change(self, kind: str, **changed: Any) -> None:
        """Changes what the rank says of a window."""
        assert self.rank.profile is not None
        windows = [
            dataclasses.replace(one, **changed) if one.kind == kind else one
            for one in self.rank.profile.windows
        ]
        self.profile(windows=windows)

    def profile(self, **changed: Any) -> None:
        """Changes what the rank says of its windows."""
        assert self.rank.profile is not None
        self.rank = dataclasses.replace(
            self.rank, profile=dataclasses.replace(self.rank.profile, **changed)
        )

    def made(self) -> tuple[Any, str | None]:
        return ledger_or_reason(self.record, [self.rank], self.folder, CONTEXT)

    def reason(self) -> str:
        ledger, reason = self.made()
        assert ledger is None
        assert reason is not None
        return reason


@pytest.fixture
def run(window: Any, make_rank: Any, tmp_path: Path) -> Run:
    """A rank of an H200 whose steps take 1 ms, with the three windows."""
    folder = tmp_path / "profile"
    folder.mkdir()
    windows = [window(kind, folder=folder)[1] for kind in ("light", "heavy", "stacks")]
    rank = make_rank(
        step_ns=1_000_000,
        device_type="cuda",
        device_index=0,
        device_name="NVIDIA H200",
        profile=Profile("done", windows, [1_010_000] * 30, "cuda events", "yes"),
    )
    return Run(tmp_path, rank)


def test_a_run_has_a_ledger(run: Run) -> None:
    ledger, reason = run.made()
    assert reason is None
    assert sum(line.s for line in ledger.lines) == pytest.approx(1e-3)
    assert ledger.busy_frac == pytest.approx(0.7)
    live = ledger.live
    assert [(one.kind, one.steps, one.step_s, one.cost_s) for one in live.windows] == [
        (kind, 8, pytest.approx(1e-3), 5e-3) for kind in ("light", "heavy", "stacks")
    ]
    assert (live.step_s, live.steps, live.torn_down) == (pytest.approx(1e-3), 20, "yes")
    assert live.after_step_s == pytest.approx(1.01e-3)
    assert live.after_frac == pytest.approx(0.01)
    assert live.after_ci95 == pytest.approx((0.01, 0.01))
    record = with_ledger(run.record, ledger, None)
    assert record.ledger == ledger
    assert record.ledger_reason is None
    assert [f.cause for f in record.findings[: len(ledger.findings)]] == [
        f.cause for f in ledger.findings
    ]
    causes = [f.cause for f in record.findings]
    assert len(causes) == len({*causes}) or len(ledger.findings) > len({*causes})
    assert with_ledger(run.record, None, "why").ledger_reason == "why"


def test_of_several_ranks_it_says_whose_it_is_and_how_to_see_all(run: Run) -> None:
    assert not any("analyze" in note for note in with_ledger(run.record, run.made()[0], None).notes)
    run.rank = dataclasses.replace(run.rank, world_size=8)
    note = with_ledger(run.record, run.made()[0], None).notes[-1]
    assert note.startswith("the ledger is that of rank 0 of 8. All ranks together")
    assert "flopwise analyze RUN" in note


def test_steps_of_a_window_that_held_something_else_are_not_in_its_mean(run: Run) -> None:
    heavy = run.windows["heavy"]
    marks = [*heavy.marks_ns[:5], *(ns + 10**9 for ns in heavy.marks_ns[5:])]
    run.change("light", flags=[0, 0, 0, 0, 1, 0, 0, 0], marks_ns=marks)
    assert run.rank.profile is not None
    live = ledgers._live(run.rank.profile, [1e-3] * 9)
    assert live.windows[0].step_s == pytest.approx(1e-3)
    run.change("light", flags=[1] * 8)
    assert run.rank.profile is not None
    assert ledgers._live(run.rank.profile, [1e-3] * 9).windows[0].step_s is None


def test_few_steps_afterwards_tell_nothing(run: Run) -> None:
    run.profile(after_ns=[1_000_000, 1_000_000], after_clock="cuda events")
    live = run.made()[0].live
    assert (live.after_step_s, live.after_frac, live.after_ci95) == (None, None, None)


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("none: several threads train", "operators were not profiled: several threads train"),
        (
            "pending",
            "operators were not profiled: the record was written before they were complete",
        ),
        ("done", "operators were not profiled: each window of them was cut short"),
        ("partial: it failed (OSError: x)", "operators were not profiled: it failed (OSError: x)"),
    ],
)
def test_without_windows_there_is_a_reason(run: Run, state: str, reason: str) -> None:
    run.profile(state=state, windows=[])
    assert run.reason() == reason
    run.rank = dataclasses.replace(run.rank, profile=None)
    assert run.reason() == "no windows were profiled (--no-profile)"


def test_a_window_of_the_device_is_needed_where_there_is_one(run: Run) -> None:
    both = run.windows
    run.profile(windows=[both["heavy"]], state="partial: the script ended first")
    assert run.reason() == "the device was not profiled: the script ended first"
    run.profile(windows=[both["light"]])
    assert run.reason() == "operators were not profiled: the script ended first"
    run.profile(windows=[both["light"], both["heavy"]])
    assert run.made()[1] is None


def test_no_timed_step(run: Run) -> None:
    record = run.record
    run.rank = dataclasses.replace(
        run.rank, rows=[dataclasses.replace(row, ns=0) for row in run.rank.rows]
    )
    found = ledger_or_reason(record, [run.rank], run.folder, CONTEXT)
    assert found == (None, "no step was timed")


@pytest.mark.parametrize("kind", ["light", "heavy"])
class TestDamage:
    """Of the traces."""

    def test_gone(self, run: Run, kind: str) -> None:
        run.path(kind).unlink()
        assert run.reason() == (
            f"the trace of the {kind} window is not in the run folder (profile/{kind}.json)"
        )

    def test_cut(self, run: Run, kind: str) -> None:
        text = run.path(kind).read_text()
        run.path(kind).write_text(text[: len(text) // 2])
        assert run.reason().startswith(f"the trace of the {kind} window ends early")

    @pytest.mark.parametrize("content", ["", "{", "null", "[]", '{"traceEvents": 3}', "\x00" * 99])
    def test_no_trace(self, run: Run, kind: str, content: str) -> None:
        run.path(kind).write_text(content)
        assert f"{kind}" in run.reason()
        assert "could not be made" not in run.reason()

    def test_no_work(self, run: Run, kind: str) -> None:
        run.path(kind).write_text('{"baseTimeNanoseconds": 1800000000000000000, "traceEvents": []}')
        assert "no kernel or copy of a device is in it" in run.reason()

    def test_a_folder(self, run: Run, kind: str) -> None:
        run.path(kind).unlink()
        run.path(kind).mkdir()
        assert "is not in the run folder" in run.reason()

    def test_a_pipe(self, run: Run, kind: str) -> None:
        run.path(kind).unlink()
        os.mkfifo(run.path(kind))
        assert "is not in the run folder" in run.reason()

    @pytest.mark.parametrize(
        "file",
        [
            "", ".", "..", "/etc/hostname", "../outside.json", "profile/../../outside.json", "link.json",
            "loop.json", "bad\x00name", "x" * 5000, "profile", "profile/light.json/x",
        ],
    )  # fmt: skip
    def test_tricks(self, run: Run, kind: str, file: str, tmp_path: Path) -> None:
        run.folder = tmp_path / "profile"
        outside = tmp_path / "outside.json"
        outside.write_text((run.folder / f"{kind}.json").read_text())
        (run.folder / "link.json").symlink_to(outside)
        (run.folder / "loop.json").symlink_to(run.folder / "loop.json")
        for other in ("light", "heavy", "stacks"):
            run.change(other, file=f"{other}.json")
        run.change(kind, file=file)
        assert f"the trace of the {kind} window is not in the run folder" in run.reason()

    @pytest.mark.parametrize(
        "changed",
        [
            {"marks_ns": []},
            {"marks_ns": [2**80 + i for i in range(9)]},
            {"marks_ns": list(range(9, 0, -1))},
            {"flags": []},
            {"flags": [1] * 8},
            {"lead": 99},
            {"lead": -3},
            {"waits_ns": [(-(2**90), 2**90)]},
        ],
    )
    def test_marks(self, run: Run, kind: str, changed: dict[str, Any]) -> None:
        run.change(kind, **changed)
        assert f"the {kind} window" in run.reason()
        assert "could not be made" not in run.reason()


def test_the_window_with_stacks_is_no_loss(run: Run) -> None:
    whole = run.made()[0]
    run.path("stacks").write_text("{")
    assert run.made()[0].lines == whole.lines
    run.change("stacks", marks_ns=[2**80])
    assert run.made()[0].lines == whole.lines
    run.path("stacks").unlink()
    assert run.made()[0].lines == whole.lines


def test_what_nobody_has_foreseen_is_a_reason(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise KeyError("planted")

    monkeypatch.setattr(ledgers, "live_ledger", broken)
    assert run.reason() == "it could not be made (KeyError: 'planted')"


def test_traces_are_packed_and_read_all_the_same(run: Run) -> None:
    whole = run.made()[0]
    plain = {kind: run.path(kind).read_bytes() for kind in run.windows}
    pack(run.folder, [run.rank])
    names = sorted(path.name for path in (run.folder / "profile").iterdir())
    assert names == ["heavy.json.gz", "light.json.gz", "stacks.json.gz"]
    for kind, content in plain.items():
        packed = run.folder / "profile" / f"{kind}.json.gz"
        assert packed.stat().st_size < len(content) / 4
        assert gzip.decompress(packed.read_bytes()) == content
    again, reason = run.made()
    assert reason is None
    assert again.lines == whole.lines
    pack(run.folder, [run.rank])  # nothing is left to be done
    assert names == sorted(path.name for path in (run.folder / "profile").iterdir())
    (run.folder / "profile" / "heavy.json.gz").write_bytes(b"\x1f\x8b broken")
    assert "heavy.json.gz" in run.reason()


def test_a_folder_may_be_named_from_here_or_through_a_link(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "here").symlink_to(tmp_path)
    run.folder = tmp_path / "here"
    assert run.made()[1] is None
    pack(run.folder, [run.rank])
    assert not run.path("light").exists()
    monkeypatch.chdir(tmp_path)
    run.folder = Path(".")
    assert run.made()[1] is None


def test_what_is_not_ours_is_not_packed(run: Run, tmp_path: Path) -> None:
    outside = tmp_path / "outside.json"
    outside.write_text("theirs")
    run.folder = tmp_path / "profile"
    (run.folder / "link.json").symlink_to(run.folder / "heavy.json")
    run.change("light", file="../outside.json")
    run.change("heavy", file="link.json")
    run.change("stacks", file=str(outside))
    pack(run.folder, [run.rank])
    assert outside.read_text() == "theirs"
    assert (run.folder / "heavy.json").exists()
    assert not [*tmp_path.rglob("*.gz")]


def test_other_files_of_the_run_are_not_packed(run: Run) -> None:
    (run.folder / "launch.json").write_text("{}")
    run.change("light", file="launch.json")
    pack(run.folder, [run.rank])
    assert (run.folder / "launch.json").read_text() == "{}"


def test_a_link_in_the_way_is_not_followed(run: Run, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("theirs")
    packed = run.path("heavy").with_name("heavy.json.gz")
    packed.symlink_to(outside)
    pack(run.folder, [run.rank])
    assert outside.read_text() == "theirs"
    assert not packed.is_symlink()
    assert run.made()[1] is None


def test_no_half_packed_trace_is_left(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ledgers.shutil, "copyfileobj", full)
    with pytest.raises(OSError, match="No space"):
        pack(run.folder, [run.rank])
    assert not [*run.folder.rglob("*.gz")]
    assert run.made()[1] is None


def test_only_where_all_steps_do_the_same_work_are_flops_known(run: Run) -> None:
    assert ledgers._counted(run.rank) is not None
    rows = [dataclasses.replace(row, shape=f"{i % 2}x8") for i, row in enumerate(run.rank.rows)]
    assert ledgers._counted(dataclasses.replace(run.rank, rows=rows)) is None
    assert ledgers._counted(dataclasses.replace(run.rank, flops=[])) is None


# ---------------------------------------------------------------------- whole runs


def windows(done: Any) -> list[str]:
    (rank,) = done.ranks()
    return [window["kind"] for window in rank["profile"]["windows"]]


def test_a_script_is_profiled_and_nothing_of_it_changes(go: Go) -> None:
    code = (
        "keep = {**os.environ}\n"
        "train(400, lambda step: print(step) if step % 100 == 0 else None)\n"
        "print(keep == {**os.environ}, torch.autograd.profiler._is_profiler_enabled, net.weight.sum().item())\n"
        "print('an error of its own', file=sys.stderr)\n"
        "sys.exit(3)\n"
    )
    code = "torch.manual_seed(0); net.weight.data.fill_(0.5); net.bias.data.fill_(0.1)\n" + code
    done = go(code, profile=True, steps=20, warmup=5)
    plain = go(code, steps=20, warmup=5, out="plain")
    assert (done.code, done.out) == (plain.code, plain.out)
    assert done.code == 3
    theirs = [
        line
        for line in done.err.splitlines()
        if line.startswith(("an error", "USDT", "[W", "ERROR"))
    ]
    assert theirs == ["an error of its own"]
    record = done.record
    assert record.complete
    assert windows(done) == ["heavy", "stacks"]
    assert record.ledger is not None, record.ledger_reason
    assert sum(line.s for line in record.ledger.lines) == pytest.approx(record.step_s.mean)
    assert record.ledger.live is not None
    assert record.ledger.live.after_step_s is not None
    assert "where the step goes" in done.err
    assert "profiled" in done.err
    files = sorted(path.name for path in (done.folder / "profile").iterdir())
    assert [name.partition("-")[0] for name in files] == ["rank0", "rank0"]
    assert all(name.endswith(".json.gz") for name in files)
    assert plain.record.ledger is None
    assert plain.record.ledger_reason == "no windows were profiled (--no-profile)"
    assert not (plain.folder / "profile").exists()
    assert record.steps.timed == plain.record.steps.timed == 20


def test_a_script_that_ends_while_windows_are_open_ends_as_it_would(go: Go) -> None:
    for i, end in enumerate(("pass", "sys.exit(5)", "os._exit(6)", "raise ValueError('theirs')")):
        done = go(f"train(32)\n{end}\n", profile=True, steps=20, warmup=5, out=f"run{i}")
        assert done.code == (0, 5, 6, 1)[i], done.err
        assert ("ValueError: theirs" in done.err) == (i == 3)
        (rank,) = done.ranks()
        assert rank["profile"]["state"] == "partial: the script ended first"
        assert windows(done) == ["heavy"]
        assert done.record.complete
        assert done.record.ledger is not None


def test_a_script_that_is_killed_while_windows_are_open_says_so(go: Go) -> None:
    wait = (
        "from glob import glob\n"
        "def pending(): return any('\"complete\"' in open(p).read() for p in glob('run/ranks/*.json'))\n"
        "deadline = time.time() + 20\n"
        "while not pending() and time.time() < deadline: time.sleep(0.01)\n"
    )
    done = go(f"train(30)\n{wait}os.kill(os.getpid(), 9)", profile=True, steps=20, warmup=5)
    assert done.code == -9
    assert done.record.complete
    assert done.record.ledger is None
    assert done.record.ledger_reason == (
        "operators were not profiled: the record was written before they were complete"
    )


def test_processes_that_are_forked_while_windows_are_open(go: Go) -> None:
    code = (
        "import multiprocessing\n"
        "def child(): train(3); sys.exit(4)\n"
        "def fork(step):\n"
        "    if step in (30, 200):\n"
        "        process = multiprocessing.get_context('fork').Process(target=child)\n"
        "        process.start(); process.join(); print(process.exitcode)\n"
        "train(300, fork)\n"
    )
    done = go(code, profile=True, steps=20, warmup=5)
    assert (done.code, done.out) == (0, "4\n4\n"), done.err
    rank = next(rank for rank in done.ranks() if rank["steps_seen"] > 20)
    assert rank["profile"]["state"] == "done"


def test_a_script_that_profiles_by_itself_gets_its_own_trace(go: Go) -> None:
    code = (
        "from torch.profiler import profile, schedule\n"
        "with profile(schedule=schedule(wait=0, warmup=30, active=3, repeat=1)) as theirs:\n"
        "    train(60, lambda step: theirs.step())\n"
        "print(sum('Optimizer.step' in event.name for event in theirs.events()))\n"
    )
    done = go(code, profile=True, steps=20, warmup=5)
    assert (done.code, done.out) == (0, "3\n"), done.err
    assert done.record.complete
    assert done.record.ledger_reason == (
        "operators were not profiled: the script was profiling by itself"
    )


def test_two_trainings_of_one_run_keep_their_windows_apart(
    go: Go, loaded_python: list[str]
) -> None:
    def twice(argv: list[str]) -> list[str]:
        return ["bash", "-c", f"{' '.join(argv)} && {' '.join(argv)}"]

    done = go("train(200)", command=twice, profile=True, steps=20, warmup=5)
    assert done.code == 0
    named = [window["file"] for rank in done.ranks() for window in rank["profile"]["windows"]]
    assert len(named) == len({*named}) == 4
    assert all((done.folder / f"{name}.gz").exists() for name in named)


def test_the_trace_of_a_window_is_one_that_anybody_can_read(go: Go) -> None:
    done = go("train(200)", profile=True, steps=20, warmup=5)
    (rank,) = done.ranks()
    for window in rank["profile"]["windows"]:
        packed = done.folder / (window["file"] + ".gz")
        events = json.loads(gzip.decompress(packed.read_bytes()))["traceEvents"]
        assert sum("Optimizer.step" in event.get("name", "") for event in events) >= 4


def test_of_one_cause_the_ledger_has_the_share_and_the_run_what_to_set() -> None:
    of_ledger = Finding("L101", "input-wait", 0.3, [], "idle 30 %", "load ahead", None, "measured")
    of_run = Finding(
        "D101", "input-wait", 0.4, ["a.py:3"], "no workers", "num_workers=2", 0.4, "measured"
    )
    assert _joined(of_ledger, of_run) == Finding(
        "L101", "input-wait", 0.3, ["a.py:3"], "idle 30 %; no workers", "num_workers=2", 0.3,
        "measured",
    )  # fmt: skip
    assert _joined(of_ledger, None) == of_ledger
    own = dataclasses.replace(of_ledger, where=["b.py:1"], predicted_gain_frac=0.1)
    joined = _joined(own, of_run)
    assert (joined.where, joined.predicted_gain_frac) == (["b.py:1"], 0.1)
