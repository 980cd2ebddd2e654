"""The comparison of tuned scripts with an expert's: its arithmetic, its turns, its state, and the scripts themselves."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

GPU = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"
STEP_S = {"naive": 0.4, "R7": 0.1, "ours": 0.08}


@pytest.fixture
def bench(benchmark_module):
    return benchmark_module("tune_models")


def times_of(step_s: float, steps: int, amount: int = 16, start: float = 1000.0) -> dict:
    ended = [start + step_s * (k + 1) for k in range(steps)]
    return {"step_s": [step_s] * steps, "amounts": [amount] * steps, "ended_unix_s": ended}


class Launches:
    """Stands for processes: writes their step times, and moves the clock by what they take."""

    def __init__(self, broken: tuple[str, ...] = ()) -> None:
        self.now = 0.0
        self.arms: list[str] = []
        self.broken = broken

    def clock(self) -> float:
        return self.now

    def __call__(self, words, output, limit_s) -> int:
        output.parent.mkdir(parents=True, exist_ok=True)
        if "tune" in words:
            return self.tune(words, output)
        times = Path(words[words.index("--times") + 1])
        arm = times.stem.rpartition("-")[0]
        steps = int(words[words.index("--steps") + 1])
        self.arms.append(arm)
        self.now += steps * STEP_S[arm]
        output.write_text("step 1 loss 9.5\nstep 10 loss 8.25\n")
        if arm in self.broken:
            output.write_text("CUDA out of memory")
            return 1
        # A drift of the machine that all arms share.
        times.write_text(json.dumps(times_of(STEP_S[arm] * (1 + 1e-5 * self.now), steps - 1)))
        return 0

    def tune(self, words, output) -> int:
        output.write_text("--resume DIR" if "--help" in words else "")
        return 0


@pytest.fixture
def work(bench, tmp_path):
    launches = Launches()

    def make(budget_s=1000.0, broken=()):
        launches.broken = broken
        return bench.Work(
            tmp_path / "work", tmp_path / "state.tar.gz", bench.Settings(), budget_s, False,
            launches.clock, launches, bench.Energy(),
        )  # fmt: skip

    make.launches = launches
    return make


def with_plan(made) -> None:
    (made.folder / "gpt2").mkdir(parents=True)
    (made.folder / "gpt2" / "plan.toml").write_text("a plan\n")


def test_arms_take_turns_and_the_ratio_has_its_interval(bench, work):
    made = work()
    with_plan(made)
    bench.compare(made, "gpt2", bench.MODELS["gpt2"])
    arms = work.launches.arms
    assert arms[0] == "naive"
    assert sorted(arms[1:3]) == ["R7", "ours"]
    assert all(sorted(arms[k : k + 3]) == ["R7", "naive", "ours"] for k in (3, 6, 9))
    found = made.record["models"]["gpt2"]["compare"]["verdict"]
    assert found["rounds"] == 3
    ratio = found["ratios"]["R7"]
    assert ratio["ratio"] == pytest.approx(1.25, rel=1e-3)
    assert 1.24 < ratio["ci95"][0] < ratio["ratio"] < ratio["ci95"][1] < 1.26
    assert found["ratios"]["naive"]["ratio"] == pytest.approx(5.0, rel=1e-3)
    assert found["arms"]["R7"]["per_s"] == pytest.approx(160, rel=1e-2)
    flops = bench.hand.gpt(1024, 12, 768, 50257)
    assert found["arms"]["R7"]["mfu"] == pytest.approx(flops * 160 / 989.5e12, rel=1e-2)


def test_without_time_for_a_round_none_is_begun_and_nothing_is_claimed(bench, work):
    made = work(budget_s=60.0)
    with_plan(made)
    bench.compare(made, "gpt2", bench.MODELS["gpt2"])
    found = made.record["models"]["gpt2"]["compare"]
    assert found["rounds"] < 3
    assert "left, a round takes" in found["stopped"]
    assert found["verdict"]["ratios"] == {}
    assert bench.said(found["verdict"], "R7").startswith("no ratio to R7")


def test_an_arm_that_fails_is_recorded_and_the_others_go_on(bench, work):
    made = work(broken=("R7",))
    with_plan(made)
    bench.compare(made, "gpt2", bench.MODELS["gpt2"])
    found = made.record["models"]["gpt2"]["compare"]
    assert found["looks"]["R7"] == {"exit": 1, "problem": "CUDA out of memory"}
    assert {one["arm"] for one in found["runs"]} == {"naive", "ours"}
    assert found["verdict"]["rounds"] == 3
    assert (
        found["verdict"]["ratios"].keys() == found["verdict"]["arms"].keys() - {"ours"} == {"naive"}
    )
    assert bench.said(found["verdict"], "R7") == "no ratio to R7: it did not run"


def test_without_an_arm_of_ours_nothing_is_claimed(bench, work):
    made = work(broken=("ours",))
    with_plan(made)
    bench.compare(made, "gpt2", bench.MODELS["gpt2"])
    assert made.record["models"]["gpt2"]["compare"]["verdict"]["ratios"] == {}


def test_state_goes_from_one_call_to_the_next(bench, work, tmp_path):
    made = work()
    with_plan(made)
    (made.folder / "gpt2" / "trace.bin").write_bytes(b"x" * 10)
    (made.folder / "gpt2" / "huge.json").write_bytes(b" " * (bench.FILE_BYTES + 1))
    made.of("gpt2")["tune"] = {"sessions": [], "plan": "plan.toml"}
    made.store()
    elsewhere = bench.Work(tmp_path / "other", tmp_path / "state.tar.gz", bench.Settings(), 1.0)
    assert elsewhere.of("gpt2")["tune"]["plan"] == "plan.toml"
    names = {str(p.relative_to(elsewhere.folder)) for p in elsewhere.folder.rglob("*.*")}
    assert names == {"tune_models.json", "gpt2/plan.toml"}


def test_a_tune_is_made_once_and_one_that_was_cut_off_is_resumed(bench, work):
    made = work()
    asked = []
    original = made.launch

    def launch(words, output, limit_s):
        asked.append(list(words[3:]))
        return original(words, output, limit_s)

    made.launch = launch
    bench.tune(made, "gpt2", bench.MODELS["gpt2"], 100, ["--per-fix", "9s"])
    folder = made.folder / "gpt2" / "tune"
    json_path = str(made.folder / "gpt2" / "tune.json")
    budget = ["--budget", "100s", "--json", json_path]
    script = ["benchmarks/gpu/naive/gpt2.py", "--steps", str(bench.ENDLESS)]
    assert asked == [["tune", "--out", str(folder), *budget, "--per-fix", "9s", *script]]
    folder.mkdir()
    bench.tune(made, "gpt2", bench.MODELS["gpt2"], 100, [])
    assert asked[1:] == [["tune", "--help"], ["tune", "--resume", str(folder), *budget]]
    trial = {"fix": "FW102", "name": "fused-optimizer", "verdict": "kept", "reason": "", "ratio": 0.9,
             "ci95": [0.88, 0.92], "predicted_ratio": 0.95, "parity": {"passed": True}}  # fmt: skip
    (folder / "plan.toml").write_text("x\n")
    Path(json_path).write_text(
        json.dumps(
            {
                "trials": [trial],
                "kept": ["FW102"],
                "proof": {},
                "plan": str(folder / "plan.toml"),
                "wall_s": 90,
            }
        )
    )
    done = made.of("gpt2")["tune"]
    bench.take_tune(done, Path(json_path), made.folder / "gpt2" / "plan.toml")
    assert done["plan"] == "plan.toml"
    assert len(asked) == 3
    bench.tune(made, "gpt2", bench.MODELS["gpt2"], 100, [])
    assert len(asked) == 3
    assert (
        "| gpt2 | FW102 fused-optimizer | kept | 5.0% | 10.0% (8.0% to 12.0%) | held |"
        in bench.table(made.record)
    )


def test_the_window_is_the_end_of_a_run_and_says_whether_it_was_steady(bench):
    times = times_of(0.1, 100)
    times["step_s"][:50] = [1.0] * 50
    found = bench.window(times, 4.05)
    assert (found["steps"], found["step_s"], found["per_s"]) == (
        40,
        pytest.approx(0.1),
        pytest.approx(160),
    )
    assert found["halves_ratio"] == pytest.approx(1.0)
    assert found["j_per_unit"] is None
    times["step_s"][-20:] = [0.2] * 20
    assert bench.window(times, 6.0)["halves_ratio"] < 0.7


def test_joules_lie_on_the_line_between_readings(bench):
    readings = [(10.0, 100.0), (11.0, 800.0), (13.0, 1400.0)]
    assert bench.energy_between(readings, 10.5, 12.0) == pytest.approx(1100 - 450)
    assert bench.energy_between(readings, 9.9, 12.0) is None
    assert bench.energy_between(readings, 10.5, 13.1) is None
    assert bench.energy_between([], 1.0, 2.0) is None
    times = times_of(0.5, 8, amount=2, start=9.0)
    found = bench.window(times, 2.0, [(9.0, 0.0), (13.0, 400.0)])
    assert found["j_per_unit"] == pytest.approx(200 / 8)
    assert found["watts"] == pytest.approx(100)


def test_a_process_is_ended_when_its_time_is_over(bench, tmp_path):
    words = [sys.executable, "-c", "import time; print('began', flush=True); time.sleep(60)"]
    assert bench.run(words, tmp_path / "out.txt", 1.0) != 0
    assert bench.run([sys.executable, "-c", "pass"], tmp_path / "out.txt", 30.0) == 0


def test_an_unknown_model_is_refused(bench, capsys):
    with pytest.raises(SystemExit):
        bench.main(["--models", "vgg"])
    assert "no model is called vgg; there are resnet50" in capsys.readouterr().err


#: Each script, and what it takes. The others are the naive and the expert's.
SCRIPTS = [
    ("naive/gpt2.py", ()),
    ("expert/gpt2.py", ()),
    ("naive/resnet50.py", ("torchvision", "PIL")),
    ("expert/resnet50.py", ("torchvision", "PIL")),
    ("naive/efficientnet_b4.py", ("timm", "torchvision", "PIL")),
    ("expert/efficientnet_b4.py", ("timm", "torchvision", "PIL")),
    ("naive/llama.py", ("transformers",)),
    ("expert/llama.py", ("transformers",)),
    ("naive/bert_large.py", ("transformers",)),
    ("expert/bert_large.py", ("transformers",)),
    ("expert/bert_large.py --sparse-head", ("transformers",)),
    ("naive/bert_varlen.py", ("transformers",)),
    ("expert/bert_varlen.py", ("transformers",)),
    ("naive/gpt2_trainer.py", ("transformers", "accelerate")),
    ("expert/gpt2_trainer.py", ("transformers", "accelerate")),
    ("naive/bert_trainer.py", ("transformers", "accelerate")),
    ("expert/bert_trainer.py", ("transformers", "accelerate")),
    ("naive/gpt2_lightning.py", ("lightning",)),
    ("expert/gpt2_lightning.py --sdpa", ("lightning",)),
]


@pytest.mark.parametrize(("script", "needs"), SCRIPTS, ids=[s for s, _ in SCRIPTS])
def test_the_scripts_train_and_write_their_own_clock(script, needs, tmp_path, loaded_python):
    missing = [name for name in needs if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    path, *words = script.split()
    command = [*loaded_python, str(GPU / path), *words, "--tiny", "--steps", "12"]
    done = subprocess.run(
        [*command, "--times", str(tmp_path / "t.json")],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "loss" in done.stdout
    times = json.loads((tmp_path / "t.json").read_text())
    assert len(times["step_s"]) == len(times["amounts"]) == len(times["ended_unix_s"]) == 11
    assert all(s > 0 for s in times["step_s"])


def test_an_expert_trains_the_same_model_as_the_naive_script(benchmark_module, monkeypatch):
    """GPT-2's attention by hand and fused give the same loss from the same weights."""
    import torch

    monkeypatch.syspath_prepend(GPU / "naive")
    naive = benchmark_module("gpt2")
    torch.manual_seed(0)
    model = naive.GPT(64, 16, layers=2, heads=4, width=32)
    x, y = torch.randint(0, 64, (2, 2, 16))
    by_hand = model(x, y)
    spec = importlib.util.spec_from_file_location("expert_gpt2", GPU / "expert" / "gpt2.py")
    monkeypatch.syspath_prepend(GPU / "expert")
    expert = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpt2", naive)
    spec.loader.exec_module(expert)
    for block in model.h:
        block.attn.__class__ = expert.Attention
    torch.testing.assert_close(model(x, y), by_hand)


def test_opt_ins_are_allowed_where_a_model_says_so(bench, work) -> None:
    made = work()
    for name in ("bert_varlen", "bert_varlen_packed"):
        bench.tune(made, name, bench.MODELS[name], 300.0, [])
    plain, packed = (
        made.of(name)["tune"]["sessions"][0]["words"]
        for name in ("bert_varlen", "bert_varlen_packed")
    )
    assert "--allow" not in plain
    assert packed[packed.index("--allow") + 1] == "cross-batch-packing"
