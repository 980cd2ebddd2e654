"""`flopwise tune`: what of the command line does not go together, and what is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flopwise import plans, tuning
from flopwise.cli import main
from flopwise.tuning import preview
from flopwise.tuning import state as states


@pytest.fixture(autouse=True)
def _script(in_folder: Path) -> None:
    (in_folder / "train.py").write_text("")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    seen: list[Any] = []

    def run(tune: tuning.Tuning, **_: Any) -> int:
        seen.append(tune)
        return 0

    monkeypatch.setattr(tuning, "tune_command", run)
    monkeypatch.setattr(preview, "preview_command", lambda *a, **k: seen.append((a, k)) or 0)
    return seen


def test_what_is_typed_is_what_is_asked(asked: list[Any], in_folder: Path) -> None:
    words = "tune --out o --budget 5m --per-fix 10s --processes 4 --proof-steps 9 --steps-remaining 70 --allow-writes d"
    assert main([*words.split(), "--allow-writes", "/e", "train.py", "--lr", "1"]) == 0
    (tune,) = asked
    a = tune.state.asked
    assert (a.budget_s, a.per_fix_s, a.processes, a.proof_steps) == (300, 10, 4, 9)
    assert (a.steps_remaining, a.allowed) == (70, [str(in_folder / "d"), "/e"])
    assert (a.typed, a.cwd) == (["train.py", "--lr", "1"], str(in_folder))
    assert tune.folder == in_folder / "o"
    assert a.codes == [code for code, _ in plans.FIXES if code not in plans.OPT_IN]


def test_eleven_minutes_and_no_opt_in_unless_it_is_named(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "OPT_IN", {"FW105": "the order of the data"})
    main(["tune", "--out", "a", "train.py"])
    main(["tune", "--out", "b", "--fixes", "compile-model", "train.py"])
    assert asked[0].state.asked.budget_s == 660
    assert "FW105" not in asked[0].state.asked.codes
    assert asked[1].state.asked.codes == ["FW105"]
    main(["tune", "--out", "c", "--allow", "compile-model", "train.py"])
    assert asked[2].state.asked.codes == [code for code, _ in plans.FIXES]
    main(["tune", "--out", "d", "--fixes", "FW101", "--allow", "fw105", "train.py"])
    assert asked[3].state.asked.codes == ["FW101", "FW105"]


def test_a_dry_run_makes_no_tune(asked: list[Any]) -> None:
    assert main(["tune", "--dry-run", "--baseline", "run-1", "--fixes", "FW101", "train.py"]) == 0
    ((args, how),) = asked
    assert args[0].codes == ["FW101"]
    assert how["baseline"] == "run-1"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--force train.py", "--force goes with --resume only. Nothing was started"),
        ("--baseline x train.py", "--baseline goes with --dry-run only. Nothing was started"),
        ("--resume nowhere", "--resume {here}/nowhere: no tune was begun there (it has no state.json). Nothing was started"),
        ("--resume old --out x", "--out is of a new tune: --resume goes on as it was begun"),
        ("--resume old --steps-remaining 3", "--steps-remaining is of a new tune"),
        ("--resume old --dry-run", "--dry-run is of a new tune"),
        ("--resume old --allow-writes x", "--allow-writes is of a new tune"),
        ("--resume old other.py", "that tune is of another command: train.py --lr 1. Leave it out"),
        ("--steps-remaining 0 train.py", "must be 1 or more"),
        ("--nnodes 2 --nproc-per-node 8 train.py", "--nnodes=2: a tune starts its processes on one machine"),
        ("--dry-run --nnodes 1:4 train.py", "Tune on one machine with as many ranks as it has devices"),
        ("-- python3 -m torch.distributed.run --nnodes=2 train.py", "flopwise run --plan PLAN --nnodes ... SCRIPT"),
        ("", "nothing to run"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_one_message(
    words: str, said: str, in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun(in_folder)
    (in_folder / "other.py").write_text("")
    try:
        code = main(["tune", *words.split()])
    except SystemExit as end:  # argparse's own
        code = int(end.code or 0)
    assert code == 2
    assert said.replace("{here}", str(in_folder)) in capsys.readouterr().err


def test_a_tune_is_taken_up_with_its_own_options_and_without_its_script(
    asked: list[Any], in_folder: Path
) -> None:
    begun(in_folder)
    assert main(["tune", "--resume", "old", "--budget", "2m"]) == 0
    assert main(["tune", "--resume", "old", "train.py", "--lr", "1"]) == 0
    first, second = asked
    assert first.state.asked.typed == ["train.py", "--lr", "1"]
    assert (first.budget.given_s, second.budget.given_s) == (40 + 120, 40 + 300)
    assert first.state.sessions == 2


def begun(folder: Path) -> None:
    """A tune of train.py --lr 1 that was begun in the folder "old", and has used 40 s."""
    from flopwise.launch.command import job

    it = job(["train.py", "--lr", "1"])
    asked = states.Asked(
        ["flopwise", "tune"], it.argv, it.script, it.file, it.typed, ["FW101"], 300.0, 30.0, 3, 40, cwd=str(folder),
    )  # fmt: skip
    state = states.begin(asked)
    state.used_s = 40.0
    (folder / "old").mkdir()
    states.save(folder / "old", state)
