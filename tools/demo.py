"""Shows what flopwise does, on the two example scripts: measures them, tries fixes, proves what helped.

python tools/demo.py      (make demo)

On a CPU or a GPU, in three to five minutes. Everything is kept in a new folder below .demo/. The exit code is 0 only
if both scripts were measured, at least one fix was proven to help, and at least one was declined with its reason.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from flopwise import units
from flopwise.errors import FlopwiseError
from flopwise.records import store
from flopwise.records.run import SCHEMA as RUN_SCHEMA
from flopwise.records.run import RunRecord
from flopwise.records.verdict import SCHEMA as TUNE_SCHEMA
from flopwise.records.verdict import Trial, TuneRecord

ROOT = Path(__file__).resolve().parent.parent
#: The demo should be over after this long.
LIMIT_S = 290.0
#: Below this much time a tune is not started, seconds.
LEAST_S = 75.0
WIDTH = 96


@dataclass
class Example:
    """One script of the demo, and what came of it."""

    script: str
    what: str
    arguments: dict[str, str]  # by kind of device
    fixes: dict[str, str]
    run: RunRecord | None = None
    tuned: TuneRecord | None = None
    trouble: list[str] = field(default_factory=list)

    @property
    def proven(self) -> list[Trial]:
        """The fixes whose gain was shown again in fresh processes."""
        record = self.tuned
        if record is None or record.plan is None or record.proof is None:
            return []
        return [t for t in record.trials if t.verdict == "kept"]

    @property
    def declined(self) -> list[Trial]:
        """The fixes that were declined for a reason of the script's, not of the demo's short time."""
        trials = self.tuned.trials if self.tuned is not None else []
        short = ("the time for trials", "for one fix ended", "the script ended")
        return [
            t
            for t in trials
            if t.verdict == "declined" and not any(words in t.reason for words in short)
        ]


def examples() -> list[Example]:
    """Returns the two examples, with sizes and fixes that suit a short demo: compiling takes too long for it on a CPU."""
    return [
        Example(
            "train_gpt.py",
            "a small GPT on real English text, the reference that Python's help() shows",
            {
                "cpu": "--n-layer 3 --steps 9000",
                "cuda": "--batch-size 32 --block-size 256 --steps 30000",
            },
            {
                "cpu": "loader-workers,fused-optimizer,bf16-autocast",
                "cuda": "loader-workers,fused-optimizer,bf16-autocast,compile-model",
            },
        ),
        Example(
            "train_cnn.py",
            "a small convolutional net on 1,797 handwritten digits, changed at random as they are read",
            {"cpu": "--batch-size 16 --epochs 300", "cuda": "--batch-size 128 --epochs 900"},
            {
                "cpu": "loader-workers,fused-optimizer,channels-last",
                "cuda": "loader-workers,fused-optimizer,channels-last,bf16-autocast",
            },
        ),
    ]


class Demo:
    """The demo's clock, folder and voice."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.folder = new_folder(ROOT / ".demo")
        self.env = {**os.environ, "PYTHONUNBUFFERED": "1"}
        # torch says so on import; nothing here needs numpy.
        self.env.setdefault("PYTHONWARNINGS", "ignore:Failed to initialize NumPy:UserWarning")

    def left_s(self) -> float:
        """Returns the seconds until the demo should be over."""
        return LIMIT_S - (time.monotonic() - self.started)

    def say(self, text: str = "") -> None:
        """Prints a paragraph, wrapped."""
        print(textwrap.fill(text, WIDTH, subsequent_indent="   "), flush=True)

    def step(self, text: str) -> None:
        """Prints what is being done, with the time."""
        elapsed = int(time.monotonic() - self.started)
        print(f"\n== [{elapsed // 60}:{elapsed % 60:02d}] {text}", flush=True)

    def flopwise(self, words: Sequence[str], log: Path = Path(os.devnull)) -> int:
        """Runs a flopwise command and returns its exit code: its report is shown, the script's output goes to a file."""
        print(f"   $ flopwise {shlex.join(words)}\n", flush=True)
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(open(log, "wb")) if words[0] == "run" else None
            # A session of its own, so that nothing below is left behind if it has to be ended.
            child = subprocess.Popen(
                [sys.executable, "-m", "flopwise", *words],
                stdout=output,
                stdin=subprocess.DEVNULL,
                env=self.env,
                cwd=ROOT,
                start_new_session=True,
            )
            try:
                return child.wait(timeout=max(60.0, self.left_s() + 90))
            except (subprocess.TimeoutExpired, KeyboardInterrupt) as error:
                end(child)
                if isinstance(error, KeyboardInterrupt):
                    raise
                return -1


def end(child: subprocess.Popen[bytes]) -> None:
    """Ends a process and all below it."""
    for number, patience_s in ((signal.SIGTERM, 10), (signal.SIGKILL, 10)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=patience_s)


def main() -> int:
    """Returns 0 if everything that the demo is to show came out, else 1."""
    demo = Demo()
    device, described = find_device()
    if device == "cpu":
        demo.env.setdefault("OMP_NUM_THREADS", "1")
    demo.say(
        f"flopwise measures two plain PyTorch scripts as they are, tries fixes on them, and proves what helped. "
        f"On {described}. It takes 3 to 5 minutes; a quiet machine helps."
    )
    scripts = examples()
    for number, example in enumerate(scripts, 1):
        measure(demo, example, device, f"{number} of {len(scripts)}")
    measured = [example for example in scripts if example.run is not None]
    for n, example in enumerate(measured):
        share_s = demo.left_s() / (len(measured) - n)
        tune(demo, example, device, seconds=min(share_s, 135.0))
    again(demo, measured, device)
    return conclude(demo, scripts, described)


def measure(demo: Demo, example: Example, device: str, number: str) -> None:
    """Measures an example with `flopwise run`."""
    name = Path(example.script).stem
    demo.step(f"Measuring {number}: {example.what}")
    out = demo.folder / f"{name}-run"
    words = ["run", "--stop-after", "--out", shown(out), f"examples/{example.script}"]
    code = demo.flopwise(
        [*words, *shlex.split(example.arguments[device])], demo.folder / f"{name}-output.txt"
    )
    try:
        example.run = store.read(out / "run.json", RunRecord, RUN_SCHEMA)
    except (FlopwiseError, OSError) as error:
        example.trouble.append(f"it was not measured (exit code {code}): {error}")


def tune(demo: Demo, example: Example, device: str, *, seconds: float, fix: str = "") -> None:
    """Tunes an example with `flopwise tune` in some `seconds`; with `fix`, once more, with that one fix only."""
    demo.step(
        f"Trying fixes on {example.script}: each on and off between steps, in random order; then the proof"
    )
    if seconds < LEAST_S:
        example.trouble.append("no time was left to try fixes on it: the machine is slow or busy")
        return
    out = demo.folder / f"{Path(example.script).stem}-{'tune-again' if fix else 'tune'}"
    words = ["tune", "--fixes", fix or example.fixes[device]]
    words += ["--budget", f"{seconds:.0f}s", "--per-fix", "25s" if fix else "15s"]
    words += [
        "--processes",
        "4",
        "--proof-steps",
        "40",
        "--out",
        shown(out),
        f"examples/{example.script}",
    ]
    code = demo.flopwise([*words, *shlex.split(example.arguments[device])])
    try:
        example.tuned = store.read(out / "tune.json", TuneRecord, TUNE_SCHEMA)
    except (FlopwiseError, OSError) as error:
        example.trouble.append(f"the tune came to no end (exit code {code}): {error}")


def again(demo: Demo, scripts: Sequence[Example], device: str) -> None:
    """Tries a fix once more, if there is time: one that looked faster and was not proven, the most promising first."""
    none = not any(example.proven for example in scripts)
    tried = [
        (trial.ratio, trial.name, example)
        for example in scripts
        for trial in (example.tuned.trials if example.tuned is not None else [])
        if not example.proven and trial.ratio is not None and trial.ratio < 1
        if none or trial.verdict == "kept"
    ]
    if not tried or demo.left_s() < LEAST_S:
        return
    _, name, example = min(tried, key=lambda item: item[0])
    demo.step(
        f"{example.script}: {name} looked faster, and was not proven. A busy machine? Once more, that fix alone"
    )
    before = example.tuned
    tune(demo, example, device, seconds=demo.left_s(), fix=name)
    if before is not None and example.tuned is not before and example.tuned is not None:
        others = [
            replace(
                t, verdict="not proven", reason=f"{t.reason} in the trial; not in the second proof"
            )
            if t.verdict == "kept"
            else t
            for t in before.trials
            if t.name != name
        ]
        example.tuned = replace(example.tuned, trials=[*example.tuned.trials, *others])


def conclude(demo: Demo, scripts: Sequence[Example], described: str) -> int:
    """Prints what came out, where it is, and what to do next; returns the exit code."""
    demo.step("What came out")
    demo.say(f"   {described}")
    for example in scripts:
        print()
        for lead, text in outcome_lines(example):
            print(
                textwrap.fill(
                    text, WIDTH, initial_indent=f"   {lead:<12} ", subsequent_indent=" " * 16
                )
                if text
                else f"   {lead}"
            )
    missing = what_is_missing(scripts)
    print(f"\n   Saved in {shown(demo.folder)}: reports again with `flopwise report FOLDER`")
    for example in scripts:
        if example.tuned is not None and example.tuned.plan:
            plan = Path(example.tuned.plan)
            print(f"   Plan     {shown(plan)}, and {plan.with_name('report.html').name} beside it")
    own = "flopwise" if ROOT / ".venv" not in Path(sys.executable).parents else ".venv/bin/flopwise"
    print("\n   Your own script, as it is:")
    for words in (
        "run train.py --its --own --options",
        "tune train.py --its --own --options",
        "run --plan flopwise-runs/.../plan.toml train.py --its --own --options",
    ):
        print(f"      {own} {words}")
    print("   More: README.md, docs/getting-started.md")
    if missing:
        print("\n== The demo did not show everything:")
        for text in missing:
            demo.say(f"   {text}")
        return 1
    elapsed = time.monotonic() - demo.started
    print(f"\n== All shown, in {units.duration(elapsed)}.")
    return 0


def outcome_lines(example: Example) -> list[tuple[str, str]]:
    """Returns what came of an example, as (label, text)."""
    lines = []
    run, tuned = example.run, example.tuned
    if run is not None:
        mfu = (
            f"{units.percent(run.mfu.value)} MFU"
            if run.mfu.value is not None
            else f"no MFU ({run.mfu.reason})"
        )
        lines.append(
            (
                "measured",
                f"{units.duration(run.step_s.mean)} a step, {mfu}, {run.steps.timed} steps",
            )
        )
        if run.phases.verdict:
            lines.append(("", run.phases.verdict))
    if tuned is not None and tuned.proof is not None and example.proven:
        found = tuned.proof.comparison
        names = ", ".join(t.name for t in example.proven)
        lines.append(
            (
                "PROVEN",
                f"{names}: {units.percent(1 - found.ratio)} less time a step; t_new / t_old {found.ratio:.3f} "
                f"(95 %: {found.ci95[0]:.3f} to {found.ci95[1]:.3f}), {tuned.proof.processes_per_arm} fresh "
                "processes an arm",
            )
        )
    elif tuned is not None and tuned.proof is not None:
        low, high = tuned.proof.comparison.ci95
        names = ", ".join(t.name for t in tuned.trials if t.verdict == "kept")
        lines.append(
            (
                "not proven",
                f"{names}: faster in the trial, but fresh processes do not tell: t_new / t_old {low:.3f} to "
                f"{high:.3f}",
            )
        )
    for trial in tuned.trials if tuned is not None else []:
        if trial.verdict != "kept":
            lines.append((trial.verdict, f"{trial.name}: {trial.reason}"))
    lines += [("TROUBLE", text) for text in example.trouble]
    return [(example.script, ""), *lines]


def what_is_missing(scripts: Sequence[Example]) -> list[str]:
    """Returns what the demo was to show and did not."""
    missing = [
        f"{e.script}: {text}"
        for e in scripts
        for text in e.trouble
        if e.run is None or e.tuned is None
    ]
    if not any(e.proven for e in scripts):
        missing.append(
            "No fix was proven: fresh processes with and without it did not differ by more than their own noise. "
            "That is an honest answer on a busy machine or with one core. Close other programs and run it again."
        )
    if not any(e.declined for e in scripts):
        missing.append("No fix was declined for a reason of the script's.")
    return missing


def find_device() -> tuple[str, str]:
    """Returns the kind of device that the examples will use, "cpu" or "cuda", and a description."""
    question = (
        "import torch, warnings; ok = torch.cuda.is_available(); "
        "print('cuda' if ok else 'cpu', torch.cuda.get_device_name() if ok else '', torch.__version__, sep='|')"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", question],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"== torch does not start:\n{done.stderr.strip()[-600:]}")
    kind, name, version = done.stdout.strip().splitlines()[-1].split("|")
    if kind == "cuda":
        return kind, f"{name}, torch {version}"
    from flopwise.hardware.host import cpu_model, usable_cores

    return kind, f"{cpu_model()} ({usable_cores()} cores), torch {version}"


def new_folder(base: Path) -> Path:
    """Returns a new folder below `base`; no older one is touched."""
    stem = datetime.now().astimezone().strftime("%Y-%m-%d-%H%M%S")
    for n in range(1000):
        folder = base / (stem if n == 0 else f"{stem}-{n + 1}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            sys.exit(f"== {folder} cannot be made ({error.strerror}). Nothing was started")
        return folder
    sys.exit(f"== no free name below {base}")


def shown(path: Path) -> str:
    """Returns a path as it is typed from the top of the checkout."""
    try:
        return str(path.relative_to(ROOT))
    except ValueError:
        return str(path)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\n== Interrupted; what was measured so far is in .demo/")
        sys.exit(130)
