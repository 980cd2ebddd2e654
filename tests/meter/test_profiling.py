"""Windows are recorded after the timed steps, hold what they say, and leave the script as it was."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import profiler as torch_profiler
from torch.autograd.profiler import record_function
from torch.utils.data import DataLoader, TensorDataset

from flopwise.meter import finish, hooks, profiling, recorder
from flopwise.meter.amounts import PythonCalls
from flopwise.meter.config import Config, StopTraining
from flopwise.meter.profiling import MOST_MEMORY
from flopwise.meter.rows import COMPILED, EPOCH, EVALUATION, SAVE, TIMED, Brief
from flopwise.meter.session import Session
from flopwise.records import rank as rank_records
from flopwise.records import store
from flopwise.records.rank import Profile, ProfiledWindow, RankRecord

TOUCHED = ("_prepare_profiler", "_enable_profiler", "_disable_profiler")
PATCHABLE = {name: getattr(torch_profiler, name) for name in TOUCHED}
ENVIRONMENT = ("KINETO_LOG_LEVEL", "TEARDOWN_CUPTI")


class Training:
    """A loop that a test steers: `at` says what comes before the n-th step."""

    def __init__(self) -> None:
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)
        self.step_no = 0

    def step(self) -> None:
        self.step_no += 1
        self.optimizer.zero_grad()
        self.net(torch.randn(6, 8)).square().mean().backward()
        self.optimizer.step()

    def run(self, steps: int, at: dict[int, Callable[[], Any]] | None = None) -> None:
        for _ in range(steps):
            act = (at or {}).get(self.step_no + 1)
            if act is not None:
                act()
            self.step()


@dataclass
class Profiled:
    """What came of a training with windows."""

    session: Session
    folder: Path
    training: Training

    @property
    def profile(self) -> Profile:
        """What the session says."""
        return self.session.profiling.snapshot()()

    @property
    def windows(self) -> dict[str, ProfiledWindow]:
        return {window.kind: window for window in self.profile.windows}

    def stored(self) -> RankRecord:
        """The record as the parent reads it."""
        self.session.writing.join()
        (path,) = (self.folder / "ranks").glob("*.json")
        return store.read(path, RankRecord, rank_records.SCHEMA)

    def trace(self, kind: str) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.folder / self.windows[kind].file).read_text())
        return content


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Profiled]]:
    """Attaches a session that times 5 steps after 3, and profiles; takes everything out again afterwards."""
    sessions: list[Session] = []

    def begin(**options: Any) -> Profiled:
        options = {"steps": 5, "warmup": 3, "count": False, "profile": True, "stride": 1} | options
        session = Session(Config(folder=str(tmp_path), **options))
        sessions.append(session)
        (tmp_path / "ranks").mkdir(exist_ok=True)
        session.attach()
        return Profiled(session, tmp_path, Training())

    torch.set_num_threads(1)
    torch.manual_seed(0)
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    yield begin
    for session in sessions:
        session.close()
        session.detach()
        atexit.unregister(session.close)
    assert {name: getattr(torch_profiler, name) for name in TOUCHED} == PATCHABLE
    assert {name: os.environ.get(name) for name in ENVIRONMENT} == before
    assert not torch_profiler._is_profiler_enabled
    assert not torch.autograd._profiler_enabled()


#: The steps before the first window opens, of which 5 are timed.
TIMED_STEPS = 8
#: A short step's windows on a CPU, with two leading steps each, and where each is open: steps that it holds.
HEAVY, STACKS, AFTER = 8, 2, 60
HEAVY_FROM = TIMED_STEPS + 1
STACKS_FROM = HEAVY_FROM + HEAVY + 2 + 1  # a step lies between
AFTER_FROM = STACKS_FROM + STACKS + 2
ENOUGH = AFTER_FROM + AFTER + 2 + 5


def test_windows_follow_the_timed_steps(start: Any) -> None:
    run = start()
    run.training.run(TIMED_STEPS - 1)
    assert run.session.phase == "timed"
    run.training.run(1)
    assert run.session.phase == "profiled"
    assert run.profile.state == "pending"
    run.training.run(ENOUGH - TIMED_STEPS)
    assert run.session.phase == "done"
    profile = run.profile
    assert profile.state == "done"
    assert [window.kind for window in profile.windows] == ["heavy", "stacks"]
    for kind, steps in (("heavy", HEAVY), ("stacks", STACKS)):
        window = run.windows[kind]
        assert (window.lead, len(window.flags), len(window.marks_ns)) == (2, steps + 2, steps + 3)
        assert window.flags == [0] * (steps + 2)
        assert window.marks_ns == sorted(set(window.marks_ns))
        assert window.bytes == (run.folder / window.file).stat().st_size > 0
        assert window.cost_ns > 0
        assert window.waits_ns == []
    assert (len(profile.after_ns), profile.after_clock) == (AFTER + 1, "host clock")
    assert min(profile.after_ns) > 0
    assert profile.torn_down is None


def test_the_record_has_them_once_they_are_there(start: Any) -> None:
    run = start()
    run.training.run(TIMED_STEPS)
    pending = run.stored()
    assert (pending.status, pending.profile) == ("complete", Profile("pending"))
    timed = [row for row in pending.rows if row.kind == "timed"]
    assert len(timed) == 5
    assert "torch.autograd.profiler._enable_profiler" in pending.patches
    run.training.run(ENOUGH)
    done = run.stored()
    assert done.profile == run.profile
    assert done.profile is not None
    assert done.profile.state == "done"
    assert done.rows == pending.rows


def test_marks_lie_where_steps_end_in_the_trace(start: Any) -> None:
    run = start()
    run.training.run(ENOUGH)
    window, trace = run.windows["heavy"], run.trace("heavy")
    base = trace["baseTimeNanoseconds"]
    marks_us = [(mark - base) / 1000 for mark in window.marks_ns]
    calls = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in trace["traceEvents"]
        if event.get("name", "").startswith("Optimizer.step#SGD") and event["ph"] == "X"
    )
    assert len(calls) == len(window.flags)
    slack_us = 200  # the two clocks
    for (low, high), begins, ends in zip(calls, marks_us, marks_us[1:], strict=False):
        assert begins - slack_us < low
        assert low < ends < high + slack_us  # our hook runs within the optimizer's range
    shaped = [e for e in trace["traceEvents"] if "Input Dims" in e.get("args", {})]
    assert shaped


def test_only_the_last_window_has_stacks(start: Any) -> None:
    run = start()
    run.training.run(ENOUGH)
    python = {
        kind: sum(e.get("cat") == "python_function" for e in run.trace(kind)["traceEvents"])
        for kind in ("heavy", "stacks")
    }
    assert python["heavy"] == 0
    assert python["stacks"] > 10


def test_a_range_of_the_profiler_never_ends_under_another_window(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An optimizer's step is a range, and windows begin and end in it: torch would write into memory that is freed."""
    began: list[int] = []
    ended: list[int] = []
    run = start()
    recorder = run.session.profiling._recorder
    for name, steps in (("start", began), ("stop", ended)):
        original = getattr(recorder, name)

        def noted(*args: Any, of: Any = original, into: list[int] = steps, **kwargs: Any) -> Any:
            into.append(run.training.step_no)
            return of(*args, **kwargs)

        monkeypatch.setattr(recorder, name, noted)
    run.training.run(ENOUGH)
    assert len(began) == len(ended) == 2
    assert began[1] == ended[0] + 1


def test_no_window_opens_while_a_range_of_an_earlier_one_is_open(start: Any) -> None:
    run = start()
    scope = record_function("some steps")
    outside = record_function("all of it")
    run.training.run(3)
    outside.__enter__()  # before any window: no profiler knows of it
    run.training.run(HEAVY_FROM, {HEAVY_FROM + 3: lambda: scope.__enter__()})
    run.training.run(HEAVY + 20)
    assert [window.kind for window in run.profile.windows] == ["heavy"]
    assert run.profile.state == "pending"
    scope.__exit__(None, None, None)
    run.training.run(STACKS + AFTER + 10)
    assert [window.kind for window in run.profile.windows] == ["heavy", "stacks"]
    assert run.profile.state == "done"
    outside.__exit__(None, None, None)


def test_too_many_calls_of_python_leave_the_stacks_out(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start()
    run.session.profiling._calls = PythonCalls(50)
    run.training.run(ENOUGH)
    assert run.profile.state == "done"
    assert [window.kind for window in run.profile.windows] == ["heavy"]
    [note] = run.profile.notes  # said once
    assert "too many to record" in note
    assert sys.getprofile() is None


def test_a_window_that_fills_the_memory_ends_with_what_it_has(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = iter([0, 0, 0, 0, *[int(MOST_MEMORY) + 1] * 100])
    monkeypatch.setattr(profiling, "resident_bytes", lambda: next(sizes))
    run = start()
    run.training.run(ENOUGH)
    assert len(run.windows["heavy"].flags) == 4
    assert run.profile.state == "done"


def test_a_step_that_alone_fills_the_memory_is_not_written(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = iter([0, *[600_000_000] * 100])
    monkeypatch.setattr(profiling, "resident_bytes", lambda: next(sizes))
    run = start()
    run.training.run(ENOUGH)
    assert run.profile.state == "none: a step has too much to record: 600 MB"
    assert not (run.folder / "profile").exists()
    assert run.session.phase == "done"


def test_that_python_calls_too_much_is_said_once(start: Any) -> None:
    run = start()
    run.session.profiling._calls = PythonCalls(50)
    run.training.run(ENOUGH, at={HEAVY_FROM: lambda: [len("") for _ in range(200)]})
    assert len(run.profile.notes) == 1


def test_a_half_written_trace_is_taken_away(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(  # as torch does on a full disk
        torch_profiler.profile,
        "export_chrome_trace",
        lambda _, path: Path(path + ".tmp").write_text("half"),
    )
    run = start()
    run.training.run(ENOUGH)
    assert run.profile.state == (
        "none: it failed (OSError: its trace could not be written: the disk may be full)"
    )
    assert not list((run.folder / "profile").iterdir())


def odd() -> None:
    return None


odd.__code__ = odd.__code__.replace(co_filename="\udcff.py")


def test_code_that_has_no_name_is_not_recorded_with_its_stacks(start: Any) -> None:
    run = start()
    # Under torch's profiler the call would raise an error, in the script's own code.
    run.training.run(ENOUGH, at={HEAVY_FROM: odd, STACKS_FROM + 2: odd})
    assert run.profile.state == "done"
    assert list(run.windows) == ["heavy"]
    assert run.profile.notes == [f"the lines of findings are not known: {profiling.NAMELESS}"]


@pytest.mark.parametrize("where", ["path", "module", "running"])
def test_nor_where_a_file_has_no_name(
    start: Any, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "path":
        monkeypatch.setattr(sys, "path", [*sys.path, "/\udcff"])
    if where == "module":
        module = type(sys)("odd")
        module.__file__ = "/\udcff.py"
        monkeypatch.setitem(sys.modules, "odd", module)
    run = start()
    run.training.run(TIMED_STEPS - 1)
    if where == "running":
        code = compile("run.training.run(1)", "/\udcff.py", "exec")
        exec(code, {"run": run})
    run.training.run(ENOUGH)
    assert list(run.windows) == ["heavy"]
    assert len(run.profile.notes) == 1


def test_to_stop_what_does_not_run_says_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    profiler = recorder.Recorder(Session(Config()), lambda: None)
    profiler.start(operators=True, stacks=False)
    leave = torch_profiler.profile.__exit__

    def failing(self: Any, *args: Any) -> None:
        leave(self, *args)
        raise RuntimeError

    monkeypatch.setattr(torch_profiler.profile, "__exit__", failing)
    with pytest.raises(RuntimeError):
        profiler.stop(lets_go=False)
    assert "profiling session" not in capfd.readouterr().err
    assert not torch.autograd._profiler_enabled()


FORKED = """
import ctypes, os, sys, threading
from types import SimpleNamespace
import torch
from flopwise.meter.recorder import Recorder
recorder = Recorder(SimpleNamespace(device=torch.device("cpu")), lambda: None)
recorder.start(operators=True, stacks=False)
torch.ones(2) + 1
recorder.stop(lets_go=True)
for code in (0, 7):
    child = os.fork()
    if child == 0:
        threading.Thread(target=len, args=("",)).start()
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        print("from Python", code)
        ctypes.CDLL(None).printf(b"from C %d\\n", code)
        sys.exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code
"""


def test_a_child_is_not_kept_by_what_another_thread_held() -> None:
    session = Session(Config())
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with session.profiling._recorder.lock:
            held.set()
            done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    session.profiling.forget()  # what a child does first
    session.profiling.leave()  # would wait
    assert thread.is_alive()  # it did not
    done.set()
    thread.join()


def test_a_child_that_is_forked_afterwards_ends_with_its_own_code(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.split("\n")[:-1]) == [
        "from C 0",
        "from C 7",
        "from Python 0",
        "from Python 7",
    ]


def test_nothing_is_profiled_unless_asked_for(start: Any) -> None:
    run = start(profile=False)
    run.training.run(TIMED_STEPS)
    assert run.session.phase == "done"
    assert run.stored().profile is None
    assert not (run.folder / "profile").exists()


@pytest.mark.parametrize(
    ("steps", "state", "kinds", "marks"),
    [
        (HEAVY_FROM, "none: ", [], None),
        (HEAVY_FROM + 4, "partial: ", ["heavy"], 6),  # two of training
        (STACKS_FROM, "partial: ", ["heavy"], HEAVY + 3),
        (STACKS_FROM + 4, "partial: ", ["heavy", "stacks"], HEAVY + 3),
        (AFTER_FROM + 10, "partial: ", ["heavy", "stacks"], HEAVY + 3),
    ],
)
def test_a_script_that_ends_meanwhile_keeps_what_is_complete(
    start: Any, steps: int, state: str, kinds: list[str], marks: int | None
) -> None:
    run = start()
    run.training.run(steps)
    run.session.close()
    record = run.stored()
    assert record.profile is not None
    assert record.profile.state == f"{state}the script ended first"
    assert [window.kind for window in record.profile.windows] == kinds
    if marks is not None:
        assert len(record.profile.windows[0].marks_ns) == marks
    assert record.status == "complete"
    assert run.session.phase == "done"


def evaluate(training: Training) -> None:
    with torch.no_grad():
        for (x,) in DataLoader(TensorDataset(torch.randn(8, 8)), batch_size=4):
            training.net(x)


@pytest.mark.parametrize("how", ["no_grad loader", "eval", "save"])
def test_what_is_no_training_interrupts_a_window(start: Any, how: str, tmp_path: Path) -> None:
    run = start()
    training = run.training

    def pause() -> None:
        if how == "eval":
            training.net.eval()
            training.net.train()
        elif how == "save":
            torch.save(training.net.state_dict(), tmp_path / "net.pt")
        else:
            evaluate(training)
        assert not torch_profiler._is_profiler_enabled

    # In the first leading step, and then with four steps of training recorded.
    training.run(ENOUGH + 20, at={HEAVY_FROM + 1: pause, HEAVY_FROM + 9: pause})
    profile = run.profile
    assert profile.state == "done"
    heavy = run.windows["heavy"]
    # Opened at the end of the step that held the pause, and closed where the next one began.
    assert (len(heavy.flags), heavy.lead) == (7, 2)
    assert heavy.flags == [0] * 7
    assert len(run.windows["stacks"].flags) == 4


@pytest.mark.parametrize(
    ("recorded", "lead"), [(62, 32), (34, 32), (33, 16), (20, 10), (5, 2), (3, 2), (2, 1)]
)
def test_a_light_window_that_is_cut_short_keeps_half_of_its_steps(recorded: int, lead: int) -> None:
    inside = Session(Config()).profiling
    window = profiling._Window("light", 30, lead=32, flags=[0] * recorded)
    assert inside._lead_of(window) == lead


def test_windows_that_are_always_interrupted_are_given_up(start: Any) -> None:
    run = start()
    training = run.training
    at = dict.fromkeys(range(HEAVY_FROM, HEAVY_FROM + 40, 2), training.net.eval)
    training.run(ENOUGH + 40, at=at)
    assert run.profile.windows == []
    assert run.profile.state == (
        "none: each was cut short by an evaluation, a save, a new epoch or a forked process"
    )
    assert run.session.phase == "done"


def test_what_most_steps_hold_is_part_of_them(start: Any) -> None:
    run = start()
    training = run.training
    training.run(ENOUGH + 10, at=dict.fromkeys(range(1, 200), training.net.eval))
    assert run.profile.state == "done"
    assert run.windows["heavy"].flags == [0] * (HEAVY + 2)


def test_a_step_that_begins_an_epoch_is_flagged(start: Any) -> None:
    run = start()
    training = run.training
    training.run(ENOUGH, at={HEAVY_FROM + 5: lambda: iter(DataLoader(torch.randn(4, 8)))})
    assert run.windows["heavy"].flags == [0] * 5 + [EPOCH] + [0] * 4


def test_waits_for_batches_are_noted(start: Any) -> None:
    class Slow(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 400

        def __getitem__(self, index: int) -> torch.Tensor:
            time.sleep(0.002)
            return torch.randn(8)

    run = start()
    batches = iter(DataLoader(Slow(), batch_size=1))
    for _ in range(ENOUGH):
        next(batches)
        run.training.step()
    heavy = run.windows["heavy"]
    assert len(heavy.waits_ns) == HEAVY + 2
    for (entered, left), low, high in zip(
        heavy.waits_ns, heavy.marks_ns, heavy.marks_ns[1:], strict=False
    ):
        assert low < entered < left < high
        assert 2_000_000 <= left - entered < high - low


def test_batches_that_another_thread_draws_are_no_waits(start: Any) -> None:
    run = start()
    batches = iter(DataLoader(torch.randn(400, 8)))

    def draw() -> None:
        thread = threading.Thread(target=lambda: next(batches))
        thread.start()
        thread.join()

    run.training.run(ENOUGH, at=dict.fromkeys(range(3, 100), draw))
    assert run.session.draws_apart
    assert run.windows["heavy"].waits_ns == []


def test_workers_are_not_forked_under_a_profiler(start: Any) -> None:
    run = start()
    seen: list[tuple[bool, int]] = []

    def epoch() -> None:
        loader = DataLoader(torch.randn(8, 8), batch_size=4, num_workers=1, worker_init_fn=told)
        seen.append((torch_profiler._is_profiler_enabled, len(list(loader))))

    run.training.run(ENOUGH + 20, at={HEAVY_FROM + 6: epoch})
    assert seen == [(True, 2)]  # (it was on before the epoch began)
    assert (run.folder / "told").read_text() == "False"
    assert run.profile.state == "done"
    assert len(run.windows["heavy"].flags) == 6


def told(_: int) -> None:
    from flopwise.meter import marks

    folder = marks.current.config.folder if marks.current else os.environ["TOLD"]
    Path(folder, "told").write_text(str(torch_profiler._is_profiler_enabled))


@pytest.mark.parametrize("at", [HEAVY_FROM + 5, STACKS_FROM + 1])
def test_a_process_that_is_forked_meanwhile_ends_well(start: Any, at: int) -> None:
    run = start()
    codes: list[int] = []

    def fork() -> None:
        child = os.fork()
        if child == 0:
            on = torch_profiler._is_profiler_enabled or torch.autograd._profiler_enabled()
            os.kill(os.getpid(), 9) if on else None
            with contextlib.suppress(BaseException):
                for _ in range(3):
                    run.training.step()
            os.execv(sys.executable, [sys.executable, "-c", "raise SystemExit(7)"])
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    run.training.run(ENOUGH + 20, at={at: fork})
    assert codes == [7]
    assert run.profile.state == "done"
    assert [window.kind for window in run.profile.windows] == ["heavy", "stacks"]
    assert run.session.phase == "done"


def test_the_script_may_profile_before(start: Any) -> None:
    run = start()
    with torch.profiler.profile() as theirs:
        run.training.run(2)
    assert theirs.events()
    run.training.run(ENOUGH)
    assert run.profile.state == "done"


def test_the_script_may_profile_afterwards(start: Any) -> None:
    run = start()
    run.training.run(ENOUGH)
    with torch.profiler.profile() as theirs:
        run.training.run(2)
    assert sum("Optimizer.step" in event.name for event in theirs.events()) == 2


@pytest.mark.parametrize("kind", ["torch.profiler", "autograd", "schedule", "prepared"])
def test_where_the_script_profiles_by_itself_there_are_no_windows(start: Any, kind: str) -> None:
    run = start()
    if kind == "autograd":
        with torch.autograd.profiler.profile() as old:
            run.training.run(ENOUGH)
        assert old.function_events
    elif kind == "torch.profiler":
        with torch.profiler.profile() as theirs:
            run.training.run(ENOUGH)
        assert sum("Optimizer.step" in event.name for event in theirs.events()) == ENOUGH
    else:  # warmed up, not yet recording, while the timed steps end: to start another one would crash
        warm = 1 if kind == "schedule" else TIMED_STEPS + 5
        wait = TIMED_STEPS - 2 if kind == "schedule" else 0
        schedule = torch.profiler.schedule(wait=wait, warmup=warm, active=3, repeat=1)
        with torch.profiler.profile(schedule=schedule) as theirs:
            for _ in range(ENOUGH):
                run.training.run(1)
                theirs.step()
        assert sum("Optimizer.step" in event.name for event in theirs.events()) == 3
    assert run.profile.state == "none: the script was profiling by itself"
    assert run.profile.windows == []
    assert run.stored().status == "complete"


@pytest.mark.parametrize(
    ("at", "kinds"),
    [(HEAVY_FROM + 1, []), (HEAVY_FROM + 6, ["heavy"]), (AFTER_FROM, ["heavy", "stacks"])],
)
def test_a_profiler_of_the_scripts_comes_first(start: Any, at: int, kinds: list[str]) -> None:
    run = start()
    found: list[Any] = []

    def profiled() -> None:
        with torch.profiler.profile(record_shapes=True) as theirs:
            run.training.step()
        found.append(theirs)

    run.training.run(ENOUGH, at={at: profiled})
    names = [event.name for event in found[0].events()]
    assert sum("Optimizer.step" in name for name in names) == 1
    assert "aten::addmm" in names
    state = "partial" if kinds else "none"
    assert run.profile.state == f"{state}: the script began to profile by itself"
    assert [window.kind for window in run.profile.windows] == kinds
    assert run.session.phase == "done"
    assert run.stored().profile == run.profile


def test_a_scheduled_profiler_of_the_scripts_comes_first(start: Any, tmp_path: Path) -> None:
    run = start()
    schedule = torch.profiler.schedule(wait=HEAVY_FROM + 4, warmup=1, active=2, repeat=1)
    ready: list[int] = []

    def on_ready(theirs: torch.profiler.profile) -> None:
        theirs.export_chrome_trace(str(tmp_path / "theirs.json"))
        ready.append(len(theirs.events()))

    with torch.profiler.profile(schedule=schedule, on_trace_ready=on_ready) as theirs:
        for _ in range(ENOUGH):
            run.training.run(1)
            theirs.step()
    assert len(ready) == 1
    assert ready[0] > 20
    assert json.loads((tmp_path / "theirs.json").read_text())["traceEvents"]
    assert run.profile.state == "partial: the script began to profile by itself"


def test_a_profiler_in_another_thread_waits_for_the_step_to_end(start: Any) -> None:
    run = start()
    found: list[int] = []

    def profiled() -> None:
        with torch.profiler.profile() as theirs:
            torch.randn(4, 4).sum()
        found.append(len(theirs.events()))

    thread = threading.Thread(target=profiled)
    run.training.run(HEAVY_FROM + 5)
    thread.start()
    while thread.is_alive():
        run.training.run(1)
    thread.join()
    assert found[0] > 0
    run.training.run(3)
    assert run.profile.state == "partial: the script began to profile by itself"
    assert run.session.phase == "done"


def test_a_training_in_another_thread_than_the_main_one_has_no_windows(start: Any) -> None:
    run = start()
    thread = threading.Thread(target=run.training.run, args=(ENOUGH,))
    thread.start()
    thread.join()
    assert run.profile.state.startswith("none: not the main thread trains")
    assert run.session.phase == "done"


@pytest.mark.parametrize("at", [HEAVY_FROM + 1, AFTER_FROM + 3])
def test_another_thread_that_begins_to_train_ends_them(start: Any, at: int) -> None:
    run = start()

    def elsewhere() -> None:
        thread = threading.Thread(target=run.training.step)
        thread.start()
        thread.join()

    run.training.run(ENOUGH, at={at: elsewhere})
    assert run.profile.state.endswith("another thread trains, too")
    assert run.session.phase == "done"


@pytest.mark.parametrize("where", ["eval", "save"])
def test_pauses_of_other_threads_only_flag_the_step(start: Any, where: str, tmp_path: Path) -> None:
    run = start()

    def elsewhere() -> None:
        target = run.training.net.eval if where == "eval" else lambda: torch.save(1, tmp_path / "x")
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()

    run.training.run(ENOUGH, at={HEAVY_FROM + 4: elsewhere})
    flag = EVALUATION if where == "eval" else SAVE
    assert run.windows["heavy"].flags == [0] * 4 + [flag] + [0] * 5
    assert run.profile.state == "done"


def test_another_optimizer_ends_them(start: Any) -> None:
    run = start()
    other = Training()
    run.training.run(HEAVY_FROM + 5)
    other.run(30)
    assert run.profile.state == "partial: another optimizer steps"
    assert [window.kind for window in run.profile.windows] == ["heavy"]
    assert run.session.phase == "done"


class Planted(Exception):
    pass


def planted(*_: Any, **__: Any) -> Any:
    raise Planted("by a test")


@pytest.mark.parametrize("name", TOUCHED)
def test_a_profiler_that_fails_costs_its_windows_alone(
    start: Any, name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    original = getattr(torch_profiler, name)
    with monkeypatch.context() as patch:
        patch.setattr(torch_profiler, name, planted)
        run = start()
        run.training.run(TIMED_STEPS + 15)
    if name == "_disable_profiler":
        original()  # what cannot be stopped by anybody runs still
    run.training.run(5)
    assert run.profile.state == "none: it failed (Planted: by a test)"
    assert run.session.phase == "done"
    run.session.detach()
    assert not torch_profiler._is_profiler_enabled
    record = run.stored()
    assert record.status == "complete"
    assert sum(row.kind == "timed" for row in record.rows) == 5
    assert record.profile == run.profile
    assert "flopwise" not in capfd.readouterr().err
    with torch.profiler.profile() as theirs:
        run.training.run(1)
    assert theirs.events()


def test_a_device_that_is_lost_while_a_window_is_open(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start()
    run.training.run(HEAVY_FROM + 4)
    monkeypatch.setattr(torch_profiler.profile, "__exit__", planted)
    run.session.close()
    assert not torch_profiler._is_profiler_enabled
    assert not torch.autograd._profiler_enabled()
    state = run.stored().profile
    assert state is not None
    assert state.state == ("none: the script ended first; its window was lost (Planted: by a test)")


@pytest.mark.parametrize("what", ["file", "gone"])
def test_a_folder_that_cannot_be_written_costs_the_windows_alone(
    start: Any, what: str, capfd: pytest.CaptureFixture[str]
) -> None:
    run = start()
    run.training.run(HEAVY_FROM + 2)
    run.stored()
    if what == "file":
        (run.folder / "profile").write_text("in the way")
    else:
        run.folder.rename(run.folder.with_name("moved"))
    run.training.run(ENOUGH)
    assert run.profile.state.startswith("none: it failed (")
    assert run.session.phase == "done"
    if what == "gone":
        run.folder.with_name("moved").rename(run.folder)
    assert "Traceback" not in capfd.readouterr().err


def test_a_failure_of_the_meter_while_they_are_recorded_is_told(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start()
    run.training.run(HEAVY_FROM + 6)
    monkeypatch.setattr(run.session, "frames_changed", planted)
    monkeypatch.setattr(run.session.profiling, "_end", planted)
    run.training.run(10)
    assert run.session.phase == "done"
    profile = run.stored().profile
    assert profile is not None
    assert profile.state == "partial: the meter failed"


def test_a_tracer_of_the_scripts_is_left_alone(start: Any) -> None:
    calls = [0]

    def count(*_: Any) -> None:
        calls[0] += 1

    run = start()
    sys.setprofile(count)
    try:
        run.training.run(ENOUGH)
        assert sys.getprofile() is count
    finally:
        sys.setprofile(None)
    assert calls[0] > 100
    assert list(run.windows) == ["heavy"]
    assert run.profile.state == "done"


def test_several_windows_of_one_rank_do_not_share_files(start: Any) -> None:
    run = start()
    run.training.run(ENOUGH)
    names = [window.file for window in run.profile.windows]
    assert names == [f"profile/rank0-{os.getpid()}-{kind}.json" for kind in ("heavy", "stacks")]
    assert sorted(path.name for path in (run.folder / "profile").iterdir()) == sorted(
        Path(name).name for name in names
    )


def test_the_script_is_ended_once_they_are_recorded(start: Any) -> None:
    run = start(stop_after=True)
    with pytest.raises(StopTraining):
        run.training.run(1000)
    assert run.profile.state == "done"
    assert run.training.step_no == AFTER_FROM + AFTER + 3
    assert run.session.phase == "done"


def test_a_script_that_ends_before_it_is_ended_keeps_its_windows(start: Any) -> None:
    run = start(stop_after=True)
    run.training.run(STACKS_FROM + 4)
    run.session.close()  # at the exit, where nothing is to be raised any more
    assert run.session.phase == "done"
    record = run.stored()
    assert record.profile is not None
    assert record.profile.state == "partial: the script ended first"
    assert [window.kind for window in record.profile.windows] == ["heavy", "stacks"]


def test_a_step_takes_part_that_is_marked_by_hand_or_begins_with_a_backward(start: Any) -> None:
    run = start()
    for _ in range(ENOUGH + 10):
        for parameter in run.training.net.parameters():
            parameter.grad = None
        run.training.net(torch.randn(6, 8)).square().mean().backward()
    assert run.profile.state == "done"
    assert len(run.windows["heavy"].flags) == HEAVY + 2


@pytest.mark.parametrize(
    ("step_s", "plan"),
    [
        (0.001, "30 8 2 60 2 32"),  # more leading steps would be too much to record
        (0.05, "20 8 2 30 2 7"),  # 0.25 s until the device runs as it did
        (0.4, "5 4 2 8 2 2"),
        (2.0, "5 4 1 8 1 1"),
        (10.0, "3 2 1 4 1 1"),
    ],
)
def test_windows_are_as_long_as_steps_allow(step_s: float, plan: str) -> None:
    session = Session(Config())
    session.rows = [Brief(int(i * step_s * 1e9), TIMED, None) for i in range(6)]
    session.device = torch.device("cuda")
    assert session.profiling._plan() == plan
    session.device = torch.device("cpu")
    light, *rest, _ = plan.split()
    assert light != "0"
    assert session.profiling._plan() == " ".join(["0", *rest, rest[-1]])
    session.profiling._take(plan)
    leads = {window.kind: window.lead for window in session.profiling._left}
    assert leads == {
        "light": int(plan.split()[-1]),
        "heavy": int(rest[-1]),
        "stacks": int(rest[-1]),
    }


@pytest.mark.parametrize(
    ("flags", "usual"),
    [
        ([TIMED] * 5, 0),
        ([TIMED | EVALUATION] * 3 + [TIMED] * 2, EVALUATION),
        ([TIMED | EVALUATION] * 2 + [TIMED] * 3, 0),
        ([TIMED | SAVE | EPOCH] * 4 + [TIMED | COMPILED], SAVE | EPOCH),
        ([EVALUATION] * 9, 0),
        ([], 0),
    ],
)
def test_usual_is_what_most_steps_hold(flags: list[int], usual: int) -> None:
    assert profiling._usual_flags([Brief(i, f, None) for i, f in enumerate(flags)]) == usual


def test_steps_afterwards_leave_out_what_was_no_training() -> None:
    after = [(n * 10, None, EVALUATION if n == 4 else 0) for n in range(7)]
    assert profiling._spans(after) == ([10] * 4, "host clock")
    assert profiling._spans([]) == ([], "host clock")
    assert profiling._spans(after[:2]) == ([], "host clock")


def test_heavy_windows_are_cut_down_by_what_light_ones_wrote(start: Any) -> None:
    run = start()
    run.training.run(TIMED_STEPS)
    inside = run.session.profiling
    light = ProfiledWindow("light", "", [], [0] * 10, 2, [], 0, bytes=400_000_000)
    inside._windows.append(light)
    window = profiling._Window("heavy", 8)
    inside._recorder.stop(lets_go=False)
    inside._open(window)
    assert window.steps == 1  # 240 MB a step, of 400 MB
    inside._windows.clear()
    inside._recorder.stop(lets_go=False)
    inside._left.clear()
    run.session.detach()


@pytest.mark.parametrize(
    ("each_bytes", "lead", "steps"),
    [(10_000_000, 2, 2), (30_000_000, 1, 2), (45_000_000, 1, 1), (200_000_000, 1, 1), (0, 2, 2)],
)
def test_windows_with_stacks_are_cut_down_by_what_the_heavy_one_wrote(
    each_bytes: int, lead: int, steps: int
) -> None:
    inside = Session(Config()).profiling
    inside._windows.append(
        ProfiledWindow("heavy", "", [], [0] * 10, 2, [], 0, bytes=10 * each_bytes)
    )
    window = profiling._Window("stacks", 2)
    inside._cut_down(window)
    assert (window.lead, window.steps) == (lead, steps)


def test_the_identity_of_a_session_outlives_its_process_group() -> None:
    session = Session(Config())
    assert finish.identity_of(session) == (0, 1, 0)
    session.identity = (3, 4, 1)
    assert finish.identity_of(session) == (3, 4, 1)


def test_which_loaders_start_workers() -> None:
    plain = DataLoader(torch.randn(4, 8), num_workers=0)
    workers = DataLoader(torch.randn(4, 8), num_workers=2)
    kept = DataLoader(torch.randn(4, 8), num_workers=2, persistent_workers=True)
    assert [hooks._starts_workers(loader) for loader in (plain, workers, kept)] == [
        False, True, True
    ]  # fmt: skip
    kept._iterator = object()  # its workers live on
    assert not hooks._starts_workers(kept)
    kept._iterator = None
    assert not hooks._starts_workers(object())  # a stand-in for a loader
