"""A plan: written, read with suspicion, checked against what it was made for, and applied."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flopwise import plans
from flopwise.cli import main
from flopwise.errors import PlanError, UsageError
from flopwise.launch.command import Job
from flopwise.records import plan as plan_records
from flopwise.records.plan import Plan, PlannedFix

Go = Callable[..., Any]

FUSED = PlannedFix("FW102", "fused-optimizer", {"fused": "true"}, 0.9, (0.88, 0.93))
LOADERS = PlannedFix("FW101", "loader-workers", {"num_workers": "2", "pin_memory": "false"})


@pytest.fixture
def job(in_folder: Path) -> Job:
    (in_folder / "train.py").write_text("print('hello')\n")
    return Job([sys.executable, "train.py"], "train.py", "train.py", ["train.py"])


def plan_of(job: Job, *fixes: PlannedFix) -> Plan:
    return Plan(
        plan_records.SCHEMA, "0.1", "2026-01-01T00:00:00+00:00", job.script, plans.sha256_of(job),
        plans.torch_version() or "", plans.device_name(), list(fixes), 0.9, (0.85, 0.95),
    )  # fmt: skip


# ---------------------------------------------------------------------- written and read


def test_a_plan_comes_back_as_it_was(job: Job, in_folder: Path) -> None:
    for plan in (plan_of(job, FUSED, LOADERS), replace(plan_of(job, FUSED), ratio=None, ci95=None)):
        path = in_folder / "plan.toml"
        path.write_text(plans.dump(plan))
        assert plans.load(path) == plan
        assert path.read_text().startswith("# A plan of flopwise")


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda text: "[", "not TOML"),
        (lambda text: "", "schema 'None'"),
        (lambda text: text.replace("plan/2", "plan/3"), "schema 'flopwise.plan/3', this flopwise reads"),
        (lambda text: text.replace('code = "FW102"', "code = 102"), "Expected `str`, got `int`"),
        (lambda text: text.replace('fused = "true"', "fused = true"), "Expected `str`, got `bool`"),
        (lambda text: text.replace("device =", "machine ="), "missing required field `device`"),
        (lambda text: "a = " + 100_000 * "[", "not TOML"),
        (lambda text: "number = " + 5000 * "9" + "\n" + text, "not TOML"),
        (lambda text: text + "# " + 300_000 * "x", "larger than 262144 bytes"),
    ],
)  # fmt: skip
def test_a_plan_that_somebody_has_edited(
    job: Job, in_folder: Path, edit: Callable[[str], str], said: str
) -> None:
    path = in_folder / "plan.toml"
    path.write_text(edit(plans.dump(plan_of(job, FUSED))))
    with pytest.raises(PlanError) as caught:
        plans.load(path)
    assert said in str(caught.value)
    assert "Nothing was started" in str(caught.value)


def test_a_plan_that_is_no_text_or_not_there(in_folder: Path) -> None:
    (in_folder / "plan.toml").write_bytes(b"\xff\xfe")
    for name, said in [
        ("plan.toml", "not TOML"),
        ("nowhere", "cannot be read"),
        (".", "cannot be read"),
        ("/dev/zero", "larger than"),
    ]:
        with pytest.raises(PlanError, match=said):
            plans.load(in_folder / name)


# ---------------------------------------------------------------------- checked


def test_a_plan_that_fits_has_no_differences(job: Job) -> None:
    assert plans.check(plan_of(job, FUSED), job, force=False) == []


def differences(job: Job) -> dict[str, tuple[Plan, str]]:
    fitting = plan_of(job, FUSED)
    return {
        "script": (replace(fitting, script_sha256="0" * 64), "train.py has changed since"),
        "torch": (replace(fitting, torch="2.1.0"), "it was 2.1.0"),
        "device": (replace(fitting, device="NVIDIA H200"), "it was NVIDIA H200"),
        "module": (replace(fitting, script_sha256="", script="pkg.mod"), "it was made for pkg.mod, not for train.py"),
    }  # fmt: skip


@pytest.mark.parametrize("what", ["script", "torch", "device", "module"])
def test_a_plan_for_something_else_is_refused_unless_forced(job: Job, what: str) -> None:
    plan, said = differences(job)[what]
    with pytest.raises(PlanError, match=said) as caught:
        plans.check(plan, job, force=False)
    assert str(caught.value).endswith("Nothing was started; tune again, or give --force-plan")
    (difference,) = plans.check(plan, job, force=True)
    assert said in difference


def test_all_differences_are_named_at_once(job: Job) -> None:
    plan = replace(plan_of(job, FUSED), torch="2.1.0", device="NVIDIA H200")
    assert len(plans.check(plan, job, force=True)) == 2


def test_the_torch_of_another_interpreter_is_not_ours_to_compare(job: Job) -> None:
    plan = replace(plan_of(job, FUSED), torch="2.1.0")
    assert plans.check(plan, replace(job, argv=["/other/python", "train.py"]), force=False) == []


@pytest.mark.parametrize(
    ("fixes", "said"),
    [
        ([], "holds no fix"),
        ([FUSED, LOADERS, FUSED], "holds FW102 twice"),
        ([replace(FUSED, code="FW999")], "'FW999' is unknown to this flopwise; known are FW101"),
    ],
)
def test_fixes_that_cannot_be_applied(job: Job, fixes: list[PlannedFix], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        plans.to_apply(plan_of(job, *fixes))


def test_fixes_are_handed_over_with_their_settings(job: Job) -> None:
    assert plans.to_apply(plan_of(job, FUSED, LOADERS)) == [
        {"code": "FW102", "setting": {"fused": "true"}},
        {"code": "FW101", "setting": {"num_workers": "2", "pin_memory": "false"}},
    ]


def test_the_fixes_that_can_be_planned_are_those_of_the_catalog() -> None:
    from flopwise.fixes.registry import FIXES

    assert tuple((fix.code, fix.name) for fix in FIXES) == plans.FIXES


def test_the_version_of_torch_is_what_torch_says_of_itself() -> None:
    import torch

    assert plans.torch_version() == str(torch.__version__)


def test_without_torch_there_is_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert plans.torch_version() is None


# ---------------------------------------------------------------------- applied

SCRIPT = """
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.001)
from torch.utils.data import DataLoader, TensorDataset
loader = DataLoader(TensorDataset(torch.ones(160, 8)), 4)
for (batch,) in loader: train(1)
print(optimizer.param_groups[0].get('fused'), loader.num_workers)
"""


def stored(go: Go, tmp_path: Path, *fixes: PlannedFix) -> str:
    """Stores a plan for the script that `go` is about to run."""
    script = tmp_path / "script.py"
    job = Job(["python", str(script)], "script.py", str(script))
    plan = replace(plan_of(job, *fixes), script_sha256="")
    (tmp_path / "plan.toml").write_text(plans.dump(plan))
    return str(tmp_path / "plan.toml")


def test_without_a_plan_nothing_changes(go: Go) -> None:
    done = go(SCRIPT)
    assert done.out == "None 0\n"
    assert done.record.plan is None


def test_a_plan_is_applied_in_a_fresh_process(go: Go, tmp_path: Path) -> None:
    done = go(SCRIPT, plan=stored(go, tmp_path, FUSED, LOADERS))
    assert (done.code, done.out) == (0, "True 2\n")
    assert done.record.plan == str(tmp_path / "plan.toml")
    assert "applied by the plan: FW101 loader-workers, FW102 fused-optimizer" in done.record.notes
    assert "DataLoader, built with the workers of the plan" in done.record.patches
    assert "flopwise tune" not in done.err  # it has been tuned
    assert len(done.ours()) == 2


def test_what_of_a_plan_does_not_fit_is_left_out_and_said(go: Go, tmp_path: Path) -> None:
    elsewhere = replace(LOADERS, setting={"num_workers": "2", "match": "another data set"})
    done = go(SCRIPT.replace("AdamW", "RMSprop"), plan=stored(go, tmp_path, FUSED, elsewhere))
    assert (done.code, done.out) == (0, "None 0\n")
    notes = done.record.notes
    assert "applied by the plan: nothing" in notes
    assert any(
        n.startswith("planned fix FW101 loader-workers left out: the script built no")
        for n in notes
    )
    assert any(n.startswith("planned fix FW102 fused-optimizer left out: ") for n in notes)


def test_a_setting_that_cannot_be_read_is_said_and_the_script_runs(go: Go, tmp_path: Path) -> None:
    done = go(SCRIPT, plan=stored(go, tmp_path, replace(LOADERS, setting={"num_workers": "few"})))
    assert (done.code, done.out) == (0, "None 0\n")
    assert any(n.startswith("planned fix FW101 left out: ") for n in done.record.notes)


def test_a_plan_that_does_not_fit_starts_nothing_and_forced_is_noted(
    go: Go, tmp_path: Path
) -> None:
    path = Path(stored(go, tmp_path, FUSED))
    path.write_text(path.read_text().replace('script = "script.py"', 'script = "other.py"'))
    with pytest.raises(PlanError, match=r"it was made for other\.py, not for script\.py"):
        go(SCRIPT, plan=str(path))
    assert not (tmp_path / "run").exists()
    done = go(SCRIPT, plan=str(path), force_plan=True)
    assert done.out == "True 0\n"
    assert (
        "the plan was applied by force: it was made for other.py, not for script.py"
        in done.record.notes
    )


def test_a_forced_plan_is_not_taken_for_the_reason_of_a_failure(go: Go, tmp_path: Path) -> None:
    path = Path(stored(go, tmp_path, FUSED))
    path.write_text(path.read_text().replace('script = "script.py"', 'script = "other.py"'))
    done = go("print('done')", plan=str(path), force_plan=True)
    assert "no training step was seen" in done.ours()[-1]


def test_from_the_command_line(
    job: Job, in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = replace(plan_of(job, FUSED), script_sha256="0" * 64)
    (in_folder / "plan.toml").write_text(plans.dump(plan))
    assert main(["run", "--plan", "plan.toml", "train.py"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("flopwise run: the plan does not fit: train.py has changed since")
    assert sorted(p.name for p in in_folder.iterdir()) == ["plan.toml", "train.py"]


# ---------------------------------------------------------------------- what a process starts with

ALLOCATOR = PlannedFix(
    "FW116", "allocator-settings", environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
)  # fmt: skip


def test_a_plan_of_the_version_before_is_read(job: Job, in_folder: Path) -> None:
    plan = replace(plan_of(job, FUSED), schema="flopwise.plan/1")
    path = in_folder / "plan.toml"
    path.write_text(plans.dump(plan))
    assert plans.load(path) == plan


def test_variables_come_back_and_go_to_the_process(job: Job, in_folder: Path) -> None:
    path = in_folder / "plan.toml"
    path.write_text(plans.dump(plan_of(job, FUSED, ALLOCATOR)))
    assert plans.environment(plans.load(path).fixes) == dict(ALLOCATOR.environment)
    assert plans.environment([FUSED]) == {}


@pytest.mark.parametrize(
    ("code", "name", "value"),
    [
        ("FW116", "LD_PRELOAD", "evil.so"),
        ("FW116", "PATH", "/tmp"),
        ("FW116", "PYTORCH_CUDA_ALLOC_CONF", "a\nb"),
        ("FW116", "PYTORCH_CUDA_ALLOC_CONF", "x" * 300),
        ("FW102", "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
    ],
)
def test_a_plan_sets_only_what_its_fix_may(code: str, name: str, value: str) -> None:
    with pytest.raises(PlanError, match=r"which it may not\. Edited by hand\? Nothing was started"):
        plans.environment([PlannedFix(code, "x", environment={name: value})])


def test_two_fixes_that_set_a_variable_differently_are_refused() -> None:
    other = replace(ALLOCATOR, environment={"PYTORCH_CUDA_ALLOC_CONF": "backend:native"})
    with pytest.raises(PlanError, match="set PYTORCH_CUDA_ALLOC_CONF differently"):
        plans.environment([ALLOCATOR, other])


def test_opt_ins_are_those_of_the_catalogue() -> None:
    from flopwise.fixes.registry import FIXES

    assert {kind.code: kind.changes for kind in FIXES if kind.opt_in} == plans.OPT_IN
    assert not any(kind.changes for kind in FIXES if not kind.opt_in)
    for kind in FIXES:
        assert bool(kind.environment({})) == (kind.code in plans.ENVIRONMENT), kind.code
        assert set(kind.environment({})) <= set(plans.ENVIRONMENT.get(kind.code, {}))


OPT_INS = {"FW105": "the order of the data"}


def test_opt_ins_are_tried_beside_the_others_when_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "OPT_IN", OPT_INS)
    every = [code for code, _ in plans.FIXES]
    assert plans.codes_of(None) == tuple(code for code in every if code != "FW105")
    assert plans.codes_of(None, ["compile-model"]) == tuple(every)
    assert plans.codes_of("fw101", ["FW105"]) == ("FW101", "FW105")
    assert plans.codes_of("compile-model, FW101") == ("FW101", "FW105")


@pytest.mark.parametrize(
    ("fixes", "allow", "said"),
    [
        (None, "compile-modle", "--allow compile-modle: 'compile-modle' is no fix; nearest: FW105 compile-model"),
        (None, "zzz", "--allow zzz: 'zzz' is no fix; known: FW105 compile-model. Nothing was started"),
        (None, ",", "--allow ',' names no fix; known: FW105 compile-model. Nothing was started"),
        (None, "FW101", "--allow FW101: FW101 loader-workers is no opt-in, and tried anyway. Opt-ins are FW105 compile-model"),
        ("loader-worker", "FW105", "--fixes loader-worker: 'loader-worker' is no fix; nearest: FW101 loader-workers"),
    ],
)  # fmt: skip
def test_a_name_that_is_none_is_one_clear_error(
    fixes: str | None, allow: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "OPT_IN", OPT_INS)
    with pytest.raises(UsageError) as error:
        plans.codes_of(fixes, [allow])
    assert said in str(error.value)


def test_a_plan_says_what_its_opt_ins_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "OPT_IN", OPT_INS)
    both = [FUSED, PlannedFix("FW105", "compile-model", changes=OPT_INS["FW105"])]
    words = "FW105 compile-model was allowed, and changes more than time and rounding: the order of the data"
    assert plans.changes(both) == [words]
    job = Job([sys.executable, "train.py"], "train.py", None, ["train.py"])
    text = plans.dump(plan_of(job, *both))
    assert f"# {words}\n" in text
    assert 'changes = "the order of the data"' in text
