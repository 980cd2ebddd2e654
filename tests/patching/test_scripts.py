"""Scripts in the style of public examples, patched, applied with patch and git, and run: the losses are those of the plan."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flopwise import plans
from flopwise.launch.command import Job
from flopwise.patching import patch
from flopwise.records.plan import SCHEMA, Plan, PlannedFix

SCRIPTS = Path(__file__).parent / "scripts"
LOSS = re.compile(r"loss (\S+)")
#: A plan is applied after the first steps; what was rounded otherwise before leaves a trace of its own.
BFLOAT16, FLOAT32 = 3e-2, 2e-3

WORKERS = PlannedFix(
    "FW101", "loader-workers",
    {"num_workers": "2", "pin_memory": "false", "persistent_workers": "true", "match": ""},
)  # fmt: skip
FUSED = PlannedFix("FW102", "fused-optimizer", {"fused": "true"})
LAYOUT = PlannedFix("FW103", "channels-last", {"memory_format": "channels_last"})
BF16 = PlannedFix("FW104", "bf16-autocast", {"dtype": "bfloat16"})
COMPILE = PlannedFix("FW105", "compile-model", {"mode": "default"})

COUNTED = "\nprint('graphs', torch._dynamo.utils.counters['stats']['unique_graphs'])\n"

#: What is written into each script, and what is not.
RUN = {
    "nanogpt": ([FUSED, BF16], []),
    "imagenet": ([WORKERS, FUSED, LAYOUT, BF16], []),
    "mnist": ([WORKERS, FUSED, LAYOUT, BF16], []),
    "trainer_class": ([WORKERS, FUSED, BF16], []),
    "aliases": ([WORKERS, FUSED, BF16], [COMPILE]),
    "kwargs": ([WORKERS, FUSED, BF16], []),
    "two_loaders": ([WORKERS, FUSED, BF16], []),
    "gan": ([WORKERS, FUSED, BF16], []),
    "flat": ([WORKERS, FUSED, LAYOUT, BF16], [COMPILE]),
    "outputs": ([WORKERS, FUSED, BF16], []),
    "closure": ([FUSED, BF16], [WORKERS]),
    "segmentation": ([WORKERS, FUSED, LAYOUT, BF16], []),
}


def plan_for(script: Path, fixes: list[PlannedFix]) -> Plan:
    job = Job([sys.executable, str(script)], script.name, str(script))
    return Plan(
        SCHEMA, "0", "", script.name, plans.sha256_of(job), plans.torch_version() or "",
        plans.device_name(), fixes,
    )  # fmt: skip


def run(command: list[str], folder: Path, **more: str) -> str:
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **more}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def losses(output: str) -> list[float]:
    return [float(word) for word in LOSS.findall(output)]


@pytest.mark.parametrize("name", RUN)
def test_a_patched_script_trains_as_the_plan_does(
    name: str, in_folder: Path, loaded_python: list[str]
) -> None:
    written, left = RUN[name]
    script = in_folder / f"{name}.py"
    script.write_bytes((SCRIPTS / script.name).read_bytes())
    plan = plan_for(script, written)
    made = patch(plan_for(script, [*written, *left]), script.name)
    assert [o.code for o in made.outcomes if o.written] == [f.code for f in written]
    assert all(o.note and o.by_hand for o in made.outcomes if not o.written)

    bare = losses(run([*loaded_python, script.name], in_folder))
    (in_folder / "plan.toml").write_text(plans.dump(plan))
    options = [
        "run",
        "--plan",
        "plan.toml",
        "--quiet",
        "--no-profile",
        "--steps",
        "4",
        "--out",
        "r",
    ]
    python = in_folder / "python"  # `flopwise run -- python SCRIPT`, with torch loaded already
    python.write_text(f'#!/bin/sh\nexec {" ".join(loaded_python)} "$@"\n')
    python.chmod(0o755)
    said = run(
        [sys.executable, "-m", "flopwise", *options, "--", str(python), script.name], in_folder
    )
    record = (in_folder / "r" / "run.json").read_text()
    for fix in written:
        assert f"{fix.code} {fix.name}" in record, record[-2000:]
    assert "left out" not in record
    planned = losses(said)

    (in_folder / "made.diff").write_bytes(made.diff)
    run(["git", "init", "-q"], in_folder)
    run(["git", "apply", "--check", "made.diff"], in_folder)
    assert "Hunk" not in run(["patch", "-p1", "-i", "made.diff"], in_folder)
    patched = losses(run([*loaded_python, script.name], in_folder))

    assert len(bare) == len(planned) == len(patched) == 12
    rel = BFLOAT16 if BF16 in written else FLOAT32
    assert patched == pytest.approx(planned, rel=rel, abs=rel)
    assert patched == pytest.approx(bare, rel=rel, abs=rel)
    assert patched != bare  # what was written is there


@pytest.mark.parametrize("name", ["imagenet", "nanogpt"])
def test_a_compiled_model_gives_the_same_losses(
    name: str, in_folder: Path, loaded_python: list[str]
) -> None:
    script = in_folder / f"{name}.py"
    script.write_bytes((SCRIPTS / script.name).read_bytes())
    bare = losses(run([*loaded_python, script.name], in_folder))
    made = patch(plan_for(script, [COMPILE]), script.name)
    (in_folder / "made.diff").write_bytes(made.diff)
    run(["patch", "-p1", "-i", "made.diff"], in_folder)
    patched = script.read_text()
    assert patched.count(".compile()") == 1
    # Without the C++ compiler's seconds; and whether it was compiled at all.
    script.write_text(patched.replace(".compile()", ".compile(backend='aot_eager')") + COUNTED)
    log = run([*loaded_python, script.name], in_folder)
    assert int(log.rpartition("graphs ")[2]) >= 1
    assert losses(log) == pytest.approx(bare, rel=FLOAT32)


@pytest.mark.parametrize("name", ["hf_trainer", "lightning_module", "accelerated"])
def test_scripts_that_a_library_trains_are_told_its_flags(name: str, in_folder: Path) -> None:
    script = in_folder / f"{name}.py"
    script.write_bytes((SCRIPTS / script.name).read_bytes())
    made = patch(plan_for(script, [WORKERS, FUSED, LAYOUT, BF16, COMPILE]), script.name)
    by_hand = " ".join(line for o in made.outcomes for line in o.by_hand)
    expected = {
        "hf_trainer": ("bf16=True", "adamw_torch_fused", "dataloader_num_workers=2", "torch_compile=True"),
        "lightning_module": ('precision="bf16-mixed"', "torch.compile(model)"),
        "accelerated": ('mixed_precision="bf16"', "dynamo_backend"),
    }  # fmt: skip
    assert all(flag in by_hand for flag in expected[name])
    assert not any(o.written for o in made.outcomes if o.name in ("bf16-autocast", "compile-model"))
    in_the_script = [] if name == "hf_trainer" else ["FW101", "FW102"]
    assert [o.code for o in made.outcomes if o.written] == in_the_script
