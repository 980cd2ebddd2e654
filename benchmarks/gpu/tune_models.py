"""Tunes naive training scripts of well-known models and compares what comes out with the same jobs tuned by hand.

python benchmarks/gpu/tune_models.py --stage tune --models resnet50 --budget 570 --state state.tar.gz
python benchmarks/gpu/tune_models.py --stage compare --models resnet50 --budget 570 --state state.tar.gz
python benchmarks/gpu/tune_models.py --stage table --state state.tar.gz
python benchmarks/gpu/tune_models.py --tiny --models gpt2 --budget 300              # do they run, on a CPU?

tune: `flopwise tune` on naive/MODEL.py, once, no edit; a tune that was cut off is resumed. compare: the naive script, the
expert's and the naive one under `flopwise run --plan`, each in fresh processes, in turns, at least three times. What both
find is in WORK/tune_models.json after each process, and all that a later call needs is packed into --state: some
kilobytes; compile caches are too large to be carried, so each call warms its own up first, which is not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import hand_flops as hand

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
H200_BF16_PEAK = 989.5e12  # FLOP/s, dense. Source: NVIDIA H200 datasheet (1,979 with 2:4 sparsity)
#: A packed state must stay below what can be carried between two machines.
STATE_BYTES, FILE_BYTES = 14_000_000, 2_000_000
ENERGY_PERIOD_S = 0.1  # the counter itself moves about as often
FEWEST_ROUNDS = 3
ENDLESS = 1_000_000  # steps of a script that the tune itself ends
LOSS = re.compile(r"step (\d+) loss (\S+)")


@dataclass(frozen=True)
class Model:
    """One naive script and the expert's forms of the same job, the one to be held against first."""

    naive: str
    experts: dict[str, tuple[str, ...]]
    flops: float | None = None  # of one sample, a training step; None: samples differ
    unit: str = "samples"
    needs: tuple[str, ...] = ()  # libraries
    allow: str = ""  # opt-ins that the tune may try, with commas


BERT = hand.transformer(24 * 12 * 1024**2 + 1024**2 + 1024 * 30522, 24, 1024, 512)
GPT2 = hand.gpt(1024, 12, 768, 50257)

MODELS = {
    "resnet50": Model("resnet50.py", {"R7": ("resnet50.py",)}, hand.resnet50(224), needs=("torchvision",)),
    "efficientnet_b4": Model(
        "efficientnet_b4.py", {"R6": ("efficientnet_b4.py",)}, hand.efficientnet(380, 1.4, 1.8),
        needs=("timm", "torchvision"),
    ),
    "bert_large": Model(
        "bert_large.py",
        {"R6m": ("bert_large.py",), "R9": ("bert_large.py", "--sparse-head")}, BERT, needs=("transformers",),
    ),
    "gpt2": Model("gpt2.py", {"R7": ("gpt2.py",)}, GPT2),
    "llama": Model(
        "llama.py", {"R6m": ("llama.py",)}, hand.llama(2048, 24, 2048, 5504, 32000), needs=("transformers",)
    ),
    "bert_varlen": Model(
        "bert_varlen.py",
        {"V3": ("bert_varlen.py",), "V4": ("bert_varlen.py", "--compile")}, unit="tokens", needs=("transformers",),
    ),
    "bert_varlen_packed": Model(
        "bert_varlen.py", {"V4": ("bert_varlen.py", "--compile")}, unit="tokens", needs=("transformers",),
        allow="cross-batch-packing",
    ),
    "gpt2_trainer": Model(
        "gpt2_trainer.py",
        {"flags": ("gpt2_trainer.py",), "graphs": ("gpt2_trainer.py", "--graphs"), "R7": ("gpt2.py",)},
        GPT2, needs=("transformers", "accelerate"),
    ),
    "gpt2_lightning": Model(
        "gpt2_lightning.py",
        {
            "flags": ("gpt2_lightning.py",), "graphs": ("gpt2_lightning.py", "--graphs"),
            "sdpa": ("gpt2_lightning.py", "--sdpa"), "R7": ("gpt2.py",),
        },
        GPT2, needs=("lightning",),
    ),
    "bert_trainer": Model(
        "bert_trainer.py", {"flags": ("bert_trainer.py",), "V4": ("bert_varlen.py", "--compile")},
        unit="tokens", needs=("transformers", "accelerate"),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """How long is measured, in seconds, and in how many steps the first look at an arm is taken."""

    rounds: int = 3
    window_s: float = 8.0
    warm_s: float = 3.0  # of steady steps before the window
    fewest_steps: int = 20
    look_steps: int = 40
    look_naive_steps: int = 12

    def steps(self, step_s: float) -> int:
        """Returns how many steps a process runs for its window and what comes before."""
        steady = math.ceil((self.window_s + self.warm_s) / step_s)
        return self.look_naive_steps + max(steady, self.fewest_steps)


TINY = Settings(3, 0.5, 0.2, 10, 25, 10)


class Energy:
    """Joules that the device has used so far, read every tenth of a second while a block runs."""

    def __init__(self) -> None:
        self.readings: list[tuple[float, float]] = []
        self._end = threading.Event()
        self._handle: Any = None
        with contextlib.suppress(Exception):
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
            self._handle = pynvml.nvmlDeviceGetHandleByIndex(0)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Reads while the block runs, where there is a counter."""
        self.readings.clear()
        self._end.clear()
        thread = threading.Thread(target=self._run, daemon=True)
        if self._handle is not None:
            thread.start()
        try:
            yield
        finally:
            self._end.set()
            if thread.ident is not None:
                thread.join()

    def _run(self) -> None:
        while not self._end.wait(ENERGY_PERIOD_S):
            with contextlib.suppress(Exception):
                joules = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1e3
                self.readings.append((time.time(), joules))


def energy_between(
    readings: Sequence[tuple[float, float]], start: float, end: float
) -> float | None:
    """Returns the joules between two times, between readings by a straight line; None where they are not covered."""
    if len(readings) < 2 or readings[0][0] > start or readings[-1][0] < end:
        return None

    def at(when: float) -> float:
        for (a, x), (b, y) in pairwise(readings):
            if a <= when <= b and b > a:
                return x + (y - x) * (when - a) / (b - a)
        return readings[0][1]

    return at(end) - at(start)


def window(
    times: dict[str, Any], length_s: float, readings: Sequence[tuple[float, float]] = ()
) -> dict[str, Any]:
    """Returns the rate over the last `length_s` seconds of a run, at most its second half, and whether it was steady."""
    steps, amounts, ended = times["step_s"], times["amounts"], times["ended_unix_s"]
    length_s = min(length_s, sum(steps) / 2)
    first = len(steps)
    while first > 0 and sum(steps[first - 1 :]) <= length_s:
        first -= 1
    first = min(first, len(steps) - 2)
    middle = (first + len(steps)) // 2
    halves = [
        sum(amounts[a:b]) / sum(steps[a:b]) for a, b in ((first, middle), (middle, len(steps)))
    ]
    seconds, amount = sum(steps[first:]), sum(amounts[first:])
    joules = energy_between(readings, ended[first] - steps[first], ended[-1])
    return {
        "steps": len(steps) - first,
        "seconds": seconds,
        "step_s": seconds / (len(steps) - first),
        "per_s": amount / seconds,
        "s_per_unit": seconds / amount,
        "halves_ratio": halves[1] / halves[0],
        "j_per_unit": None if joules is None else joules / amount,
        "watts": None if joules is None else joules / seconds,
    }


def run(words: Sequence[str], output: Path, limit_s: float) -> int:
    """Returns the exit code of a process whose output goes to a file; at the limit it is asked to end, then made to."""
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TOKENIZERS_PARALLELISM": "false"}
    output.parent.mkdir(parents=True, exist_ok=True)
    with open(output, "wb") as stream:
        process = subprocess.Popen(
            words,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=env,
            cwd=ROOT,
            start_new_session=True,
        )
        for patience_s, number in ((limit_s, signal.SIGINT), (15, signal.SIGKILL)):
            try:
                return process.wait(max(1.0, patience_s))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, number)
        return process.wait()


@dataclass
class Work:
    """The folder of a measurement, its record, and the time that is left."""

    folder: Path
    state: Path | None
    settings: Settings
    deadline: float
    tiny: bool = False
    clock: Callable[[], float] = time.monotonic
    launch: Callable[[Sequence[str], Path, float], int] = run
    energy: Energy = field(default_factory=Energy)
    record: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.state is not None and self.state.exists():
            unpack(self.state, self.folder)
        stored = self.folder / "tune_models.json"
        if stored.exists():
            self.record = json.loads(stored.read_text())

    def left_s(self) -> float:
        """Returns the seconds that are left."""
        return self.deadline - self.clock()

    def of(self, model: str) -> dict[str, Any]:
        """Returns the part of the record that is a model's."""
        found: dict[str, Any] = self.record.setdefault("models", {}).setdefault(model, {})
        return found

    def store(self) -> None:
        """Writes the record, and packs the state."""
        path = self.folder / "tune_models.json"
        path.with_suffix(".part").write_text(json.dumps(self.record, indent=1) + "\n")
        os.replace(path.with_suffix(".part"), path)
        if self.state is not None:
            pack(self.folder, self.state)

    def script(self, folder: str, words: Sequence[str], steps: int) -> list[str]:
        """Returns the words that name a script and its arguments."""
        more = ["--tiny"] if self.tiny else []
        path = os.path.relpath(HERE / folder / words[0], ROOT)
        return [path, *words[1:], *more, "--steps", str(steps)]


# ---------------------------------------------------------------------- tune


def tune(work: Work, name: str, model: Model, budget_s: float, more: Sequence[str]) -> None:
    """Tunes a naive script, or goes on where a tune was cut off."""
    folder = work.folder / name / "tune"
    json_path = work.folder / name / "tune.json"
    done = work.of(name).setdefault("tune", {"sessions": []})
    if done.get("plan") or done.get("finished"):
        print(f"{name}: tuned already", flush=True)
        return
    budget = ["--budget", f"{budget_s:.0f}s", "--json", str(json_path)]
    words = [sys.executable, "-m", "flopwise", "tune"]
    if done["sessions"] and folder.exists() and "--resume" in options_of(work):
        words += ["--resume", str(folder), *budget]
    else:
        if folder.exists():
            shutil.rmtree(folder)
        allowed = ["--allow", model.allow] if model.allow else []
        words += ["--out", str(folder), *budget, *allowed, *more]
        words += work.script("naive", (model.naive,), ENDLESS)
    began = work.clock()
    output = work.folder / name / f"tune-{len(done['sessions'])}.txt"
    code = work.launch(words, output, min(budget_s + 60, work.left_s()))
    done["sessions"].append({"seconds": work.clock() - began, "exit": code, "words": words[3:]})
    take_tune(done, json_path, work.folder / name / "plan.toml")
    work.store()
    print(
        f"{name}: tune ended with {code} after {done['sessions'][-1]['seconds']:.0f} s", flush=True
    )


def options_of(work: Work) -> str:
    """Returns what `flopwise tune --help` says."""
    output = work.folder / "tune-help.txt"
    work.launch([sys.executable, "-m", "flopwise", "tune", "--help"], output, 60)
    return output.read_text() if output.exists() else ""


def take_tune(done: dict[str, Any], json_path: Path, plan: Path) -> None:
    """Takes over what a tune has found: its plan, and each fix with what was predicted and measured."""
    if not json_path.exists():
        return
    found = json.loads(json_path.read_text())
    done["finished"] = found.get("proof") is not None or not found.get("kept")
    done["trials"] = [
        {
            key: trial.get(key)
            for key in ("fix", "name", "verdict", "reason", "ratio", "ci95", "predicted_ratio", "warmup_s", "setting")
        }
        | {"parity": (trial.get("parity") or {}).get("passed")}
        for trial in found["trials"]
    ]  # fmt: skip
    for key in ("kept", "notes", "wall_s", "time", "aa_spread_frac", "speedup"):
        done[key] = found.get(key)
    for key in ("baseline_step_s", "baseline_mfu", "final_step_s", "final_mfu"):
        done[key] = found.get(key)
    written = found.get("plan")
    if written and Path(written).exists():
        shutil.copyfile(written, plan)
        done["plan"] = str(plan.name)


# ---------------------------------------------------------------------- compare


def arms_of(work: Work, name: str, model: Model) -> dict[str, Callable[[int, Path], list[str]]]:
    """Returns, for each arm, what makes the words of a process from its steps and the file for its times."""

    def plain(folder: str, words: Sequence[str]) -> Callable[[int, Path], list[str]]:
        return lambda steps, times: [
            sys.executable, *work.script(folder, words, steps), "--times", str(times)
        ]  # fmt: skip

    def planned(steps: int, times: Path) -> list[str]:
        out = times.with_suffix("")
        shutil.rmtree(out, ignore_errors=True)
        return [
            sys.executable, "-m", "flopwise", "run", "--plan", str(work.folder / name / "plan.toml"), "--no-profile",
            "--quiet", "--out", str(out), *work.script("naive", (model.naive,), steps), "--times", str(times),
        ]  # fmt: skip

    arms = {"naive": plain("naive", (model.naive,))}
    arms |= {expert: plain("expert", words) for expert, words in model.experts.items()}
    if (work.folder / name / "plan.toml").exists():
        arms["ours"] = planned
    return arms


def compare(work: Work, name: str, model: Model, seed: int = 0) -> None:
    """Runs the arms of a model in turns, in fresh processes, as long as there is time."""
    arms = arms_of(work, name, model)
    found = work.of(name).setdefault("compare", {})
    found.update(unit=model.unit, arms=list(arms), looks={}, runs=[], rounds=0)
    if "ours" not in arms:
        found["note"] = "no plan: nothing was kept"
    step_s = look(work, name, arms, found)
    took_s: dict[str, float] = {}
    order = random.Random(seed)
    while found["rounds"] < work.settings.rounds and step_s:
        needed_s = 1.1 * sum(took_s.values()) if took_s else 60.0
        if work.left_s() < needed_s:
            found["stopped"] = f"{work.left_s():.0f} s left, a round takes {needed_s:.0f} s"
            break
        for arm in order.sample(list(step_s), len(step_s)):
            began = work.clock()
            one = measure(work, name, arm, arms[arm], work.settings.steps(step_s[arm]))
            took_s[arm] = work.clock() - began
            found["runs"].append(
                {"round": found["rounds"], "arm": arm, "took_s": took_s[arm], **one}
            )
            if "step_s" in one:
                step_s[arm] = one["step_s"]
            work.store()
        found["rounds"] += 1
    found["verdict"] = verdict(found, model)
    work.store()
    for expert in model.experts:
        print(f"{name}: {said(found['verdict'], expert)}", flush=True)


def look(
    work: Work, name: str, arms: dict[str, Callable[[int, Path], list[str]]], found: dict[str, Any]
) -> dict[str, float]:
    """Runs each arm once, to fill compile caches and see how long a step is; those that compile run at once."""
    step_s: dict[str, float] = {}

    def once(arm: str) -> None:
        steps = work.settings.look_naive_steps if arm == "naive" else work.settings.look_steps
        one = measure(work, name, arm, arms[arm], steps, "look", energy=False)
        found["looks"][arm] = one
        if "step_s" in one:
            step_s[arm] = one["step_s"]

    once("naive")
    threads = [threading.Thread(target=once, args=(arm,)) for arm in arms if arm != "naive"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    work.store()
    return {arm: step_s[arm] for arm in arms if arm in step_s}


def measure(
    work: Work,
    name: str,
    arm: str,
    words_of: Callable[[int, Path], list[str]],
    steps: int,
    kind: str = "run",
    energy: bool = True,
) -> dict[str, Any]:
    """Returns what one process of an arm did."""
    folder = work.folder / name / "compare"
    folder.mkdir(parents=True, exist_ok=True)
    times, output = folder / f"{arm}-{kind}.json", folder / f"{arm}-{kind}.txt"
    times.unlink(missing_ok=True)
    words = words_of(steps, times)
    with work.energy.reading() if energy else contextlib.nullcontext():
        code = work.launch(words, output, max(10.0, work.left_s()))
    if code != 0 or not times.exists():
        tail = output.read_text(errors="replace")[-600:] if output.exists() else ""
        return {"exit": code, "problem": tail}
    made = json.loads(times.read_text())
    readings = work.energy.readings if energy else ()
    one = {"exit": code, "steps_run": steps, **window(made, work.settings.window_s, readings)}
    said = output.read_text(errors="replace")
    one["losses"] = {int(n): float(v) for n, v in LOSS.findall(said) if int(n) in (1, 10, 20, 40)}
    record = times.with_suffix("") / "run.json"
    if record.exists():
        notes = json.loads(record.read_text()).get("notes") or []
        one["applied"] = [n for n in notes if "plan" in n]
    return one


def verdict(found: dict[str, Any], model: Model) -> dict[str, Any]:
    """Returns rates, MFU, joules and ratios with their intervals, over the rounds in which all arms ran."""
    from flopwise.trials.compare import compare_runs

    by_arm: dict[str, list[dict[str, Any]]] = {}
    rounds: dict[int, dict[str, dict[str, Any]]] = {}
    for one in found["runs"]:
        if "s_per_unit" in one:
            rounds.setdefault(one["round"], {})[one["arm"]] = one
    # An expert's form that never ran (a flag that a library refuses, say) leaves the others' rounds whole.
    failed = {arm for arm, one in found["looks"].items() if "step_s" not in one} - {"naive", "ours"}
    running = [arm for arm in found["arms"] if arm not in failed]
    whole = [r for r in rounds.values() if set(r) == set(running)]
    for arm in running:
        by_arm[arm] = [r[arm] for r in whole]
    made: dict[str, Any] = {"rounds": len(whole), "arms": {}, "ratios": {}}
    for arm, runs in by_arm.items():
        if runs:
            per_s = len(runs) / sum(r["s_per_unit"] for r in runs)
            joules = [r["j_per_unit"] for r in runs if r["j_per_unit"] is not None]
            made["arms"][arm] = {
                "per_s": per_s,
                "step_s": sum(r["step_s"] for r in runs) / len(runs),
                "mfu": None if model.flops is None else model.flops * per_s / H200_BF16_PEAK,
                "j_per_unit": sum(joules) / len(joules) if joules else None,
                "worst_halves_ratio": max(
                    (r["halves_ratio"] for r in runs), key=lambda h: abs(h - 1)
                ),
            }
    if len(whole) < FEWEST_ROUNDS or "ours" not in by_arm:
        return made
    ours = [r["s_per_unit"] for r in by_arm["ours"]]
    for arm in running:
        if arm != "ours":
            theirs = [r["s_per_unit"] for r in by_arm[arm]]
            comparison = compare_runs(theirs, ours, by_arm[arm][0]["steps"])
            low, high = comparison.ci95
            made["ratios"][arm] = {"ratio": 1 / comparison.ratio, "ci95": [1 / high, 1 / low]}
    return made


def said(found: dict[str, Any], arm: str) -> str:
    """Returns how ours compares with an arm, in words."""
    if found["rounds"] and arm not in found["arms"]:
        return f"no ratio to {arm}: it did not run"
    if arm not in found["ratios"]:
        return f"no ratio to {arm}: {found['rounds']} whole rounds"
    ratio = found["ratios"][arm]
    low, high = ratio["ci95"]
    return f"ours / {arm} {ratio['ratio']:.3f} ({low:.3f} to {high:.3f})"


# ---------------------------------------------------------------------- state and tables


def pack(folder: Path, state: Path) -> None:
    """Packs what a later call needs: small text files, the smallest first, while they fit."""
    kinds = {".json", ".toml", ".txt", ".jsonl"}
    files = [p for p in folder.rglob("*") if p.is_file() and p.suffix in kinds]
    files.sort(key=lambda p: (p.suffix != ".toml", p.stat().st_size))
    part = state.with_name(state.name + ".part")
    total = 0
    with tarfile.open(part, "w:gz") as archive:
        for path in files:
            size = path.stat().st_size
            if size > FILE_BYTES or total + size > STATE_BYTES:
                continue
            total += size
            archive.add(path, str(path.relative_to(folder)))
    os.replace(part, state)


def unpack(state: Path, folder: Path) -> None:
    """Unpacks what an earlier call packed."""
    with tarfile.open(state) as archive:
        archive.extractall(folder, filter="data")


def table(record: dict[str, Any]) -> str:
    """Returns the results as Markdown."""
    lines = [
        "| model | naive | expert | ours | ours / expert | ours / naive | MFU naive, expert, ours | J naive, expert, ours | tuning |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    fixes = [
        "",
        "| model | fix | verdict | predicted gain | measured gain | parity |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in record.get("models", {}).items():
        made = found.get("compare", {}).get("verdict")
        if made:
            lines += _rows(name, found, made)
        for trial in found.get("tune", {}).get("trials", ()):
            measured = (
                ""
                if trial["ratio"] is None
                else f"{_gain(trial['ratio'])} ({_interval(trial['ci95'])})"
            )
            predicted = "" if trial["predicted_ratio"] is None else _gain(trial["predicted_ratio"])
            parity = {True: "held", False: "failed", None: ""}[trial["parity"]]
            fixes.append(
                f"| {name} | {trial['fix']} {trial['name']} | {trial['verdict']} | {predicted} | {measured} | {parity} |"
            )
    return "\n".join([*lines, *fixes, "", *_predictions(record)]) + "\n"


def _predictions(record: dict[str, Any]) -> list[str]:
    """Returns predicted against measured gains over all models, where one of them was tuned."""
    from predicted_gains import report, trials_of

    tunes = {
        name: trials_of(found["tune"])
        for name, found in record.get("models", {}).items()
        if found.get("tune", {}).get("trials")
    }
    return ["Predicted against measured, over all trials:", "", report(tunes)] if tunes else []


def _rows(name: str, found: dict[str, Any], made: dict[str, Any]) -> Iterator[str]:
    wall_s = found.get("tune", {}).get("wall_s")
    for expert in [a for a in made["arms"] if a not in ("naive", "ours")]:
        three = [made["arms"].get(arm) for arm in ("naive", expert, "ours")]
        rates = " | ".join("" if a is None else f"{a['per_s']:.4g}" for a in three)
        ratios = [
            f"{r['ratio']:.3f} ({r['ci95'][0]:.3f} to {r['ci95'][1]:.3f})" if r else "not shown"
            for r in (made["ratios"].get(expert), made["ratios"].get("naive"))
        ]
        mfu = ", ".join("-" if a is None or a["mfu"] is None else f"{a['mfu']:.1%}" for a in three)
        joules = ", ".join(
            "-" if a is None or a["j_per_unit"] is None else f"{a['j_per_unit']:.3g}" for a in three
        )
        tuning = "" if wall_s is None else f"{wall_s / 60:.1f} min"
        yield f"| {name} ({expert}) | {rates} | {ratios[0]} | {ratios[1]} | {mfu} | {joules} | {tuning} |"


def _gain(ratio: float) -> str:
    return f"{1 - ratio:.1%}"


def _interval(ci95: Sequence[float] | None) -> str:
    return "" if ci95 is None else f"{1 - ci95[1]:.1%} to {1 - ci95[0]:.1%}"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 once the stages that were asked for have run, 1 where an arm of one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS), help="some of them, with commas")
    parser.add_argument("--stage", choices=("tune", "compare", "both", "table"), default="both")
    parser.add_argument("--budget", type=float, default=560.0, help="seconds for this call")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "tune_models")
    parser.add_argument("--state", type=Path, help="carry what is found in this file (tar.gz)")
    parser.add_argument("--tiny", action="store_true", help="small models, short windows, a CPU")
    parser.add_argument("--rounds", type=int, help="processes an arm (at least 3 for a ratio)")
    parser.add_argument(
        "--tune-args", default="", help="more arguments for flopwise tune, in one word"
    )
    parser.add_argument(
        "--again", action="store_true", help="forget what was found of these models"
    )
    args = parser.parse_args(argv)
    names = [name for name in args.models.split(",") if name]
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        parser.error(f"no model is called {unknown[0]}; there are {', '.join(MODELS)}")
    settings = TINY if args.tiny else Settings()
    if args.rounds:
        settings = replace(settings, rounds=args.rounds)
    models = {n: replace(m, flops=None if args.tiny else m.flops) for n, m in MODELS.items()}
    work = Work(
        args.work.resolve(), args.state and args.state.resolve(), settings, time.monotonic() + args.budget, args.tiny
    )  # fmt: skip
    for number, name in enumerate(names):
        if args.stage == "table":
            break
        if args.again:
            work.record.get("models", {}).pop(name, None)
            shutil.rmtree(work.folder / name, ignore_errors=True)
        share_s = work.left_s() / (len(names) - number)
        if args.stage in ("tune", "both"):
            part = 0.5 if args.stage == "both" else 0.9
            tune(work, name, models[name], max(30.0, part * share_s - 20), args.tune_args.split())
        if args.stage in ("compare", "both"):
            compare(work, name, models[name])
    text = table(work.record)
    (work.folder / "tune_models.md").write_text(text)
    print(text)
    bad = [
        n for n in names for r in work.of(n).get("compare", {}).get("runs", ()) if r["exit"] != 0
    ]
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
