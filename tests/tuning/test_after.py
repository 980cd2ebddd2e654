"""The ledger before and after: which process it is of, when there is none, and to which fix a line is credited."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest

from flopwise import tuning
from flopwise.diagnosis.ledger import build
from flopwise.fixes.registry import FIXES
from flopwise.measurement import ledgers as made
from flopwise.records.ledger import FAMILIES, LedgerRecord
from flopwise.records.rank import Profile, RankRecord
from flopwise.records.run import RunRecord
from flopwise.records.verdict import Comparison, Trial
from flopwise.summary import Context, summarise
from flopwise.tuning.after import LINES_OF, credits, ledgers
from flopwise.tuning.budget import Budget

Stage = Any  # of conftest.py
AA = Comparison("not shown", 1.0, (0.99, 1.01), 8, 4, 0.01, 0.01, 0.01, 0.01)
KEPT = [
    Trial("FW102", "fused-optimizer", "kept", "9 % less", causes=["optimizer-step"]),
    Trial("FW104", "bf16-autocast", "kept", "50 % less", 0.5, (0.49, 0.51), causes=["fp32-compute"]),
]  # fmt: skip


@pytest.fixture
def ledger(training: Any) -> LedgerRecord:
    return build.ledger(training(4).read())


@pytest.fixture
def run(make_rank: Callable[..., RankRecord], ledger: LedgerRecord) -> Callable[..., RunRecord]:
    """Returns a function that makes a run whose ledger's step, and all of its lines, are so many times as long."""

    def make(times: float = 1.0, **changes: Any) -> RunRecord:
        record = summarise([make_rank()], Context([], "train.py"))
        lines = [
            dataclasses.replace(n, s=n.s * times, ci95=(n.ci95[0] * times, n.ci95[1] * times))
            for n in ledger.lines
        ]
        each = [s * times for s in ledger.step_s_each]
        one = dataclasses.replace(
            ledger, step_s=ledger.step_s * times, step_s_each=each, lines=lines, **changes
        )
        return dataclasses.replace(record, ledger=one)

    return make


def comparison(ratio: float) -> Comparison:
    return dataclasses.replace(AA, outcome="faster", ratio=ratio, ci95=(ratio - 0.02, ratio + 0.02))


def test_lines_stand_side_by_side_in_the_order_of_the_ledger(run: Any) -> None:
    found, reason = ledgers(run(), run(0.5), KEPT, comparison(0.5))
    assert reason is None
    assert found.new_s == pytest.approx(found.old_s / 2)
    names = [line.name for line in found.lines]
    assert names == [name for name in FAMILIES if name in names]
    for line in found.lines:
        assert (line.new_s, line.difference_s) == (
            pytest.approx(line.old_s / 2),
            pytest.approx(-line.old_s / 2),
        )


def test_two_processes_that_contradict_the_proof_are_a_doubt(run: Any) -> None:
    found, _ = ledgers(run(), run(1.2), KEPT, comparison(0.5))
    assert found.doubts[0].startswith(
        "steps of these two processes have the ratio 1.2, those of the proof 0.5 (0.48 to 0.52): the proof stands"
    )
    agrees, _ = ledgers(run(), run(0.5), KEPT, comparison(0.5))
    assert not any(d.startswith("steps of these two") for d in agrees.doubts)


def test_other_flops_are_what_some_fixes_are_for_and_no_doubt(run: Any) -> None:
    found, _ = ledgers(
        run(model_flops_per_step=4e9), run(0.5, model_flops_per_step=1e9), KEPT, comparison(0.5)
    )
    assert not any("FLOPs a step" in doubt for doubt in found.doubts)
    doubted, _ = ledgers(run(trusted=False, untrusted_because=["so"]), run(0.5), KEPT, comparison(0.5))  # fmt: skip
    assert "the lines of the ledger before are not trusted: so" in doubted.doubts


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (True, "no time was left", "no time was left"),
        (False, True, "as it is it has no ledger: why"),
        (True, False, "with what was kept it has no ledger: why"),
    ],
)
def test_why_there_is_none(run: Any, before: bool, after: Any, reason: str) -> None:
    bare = dataclasses.replace(run(), ledger=None, ledger_reason="why")
    sides = [run() if one is True else bare if one is False else one for one in (before, after)]
    assert ledgers(*sides, KEPT, None) == (None, reason)


def test_a_line_is_credited_to_the_fixes_whose_cause_it_is() -> None:
    lines = ["ideal", "precision", "optimizer", "idle_launch"]
    assert credits(lines, KEPT) == {
        "precision": ["bf16-autocast"],
        "optimizer": ["fused-optimizer"],
    }
    both = [*KEPT, Trial("FW106", "tf32-matmul", "kept", "", causes=["fp32-compute", "unheard-of"])]
    assert credits(lines, both)["precision"] == ["bf16-autocast", "tf32-matmul"]
    assert credits(["ideal"], both) == {}


def test_every_cause_of_a_fix_has_its_lines() -> None:
    assert {cause for fix in FIXES for cause in fix.causes} <= set(LINES_OF)
    assert {line for lines in LINES_OF.values() for line in lines} <= set(FAMILIES)


# ---------------------------------------------------------------------- the process


@pytest.fixture
def profiled(stage: Stage, ledger: LedgerRecord, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """A stage whose processes leave windows where they were asked to, of which a ledger is made."""
    rank = stage.rank

    def with_windows(name: str, options: dict[str, Any]) -> RankRecord:
        found = rank(name, options)
        profile = Profile("done") if options.get("profile") else None
        return dataclasses.replace(found, profile=profile)

    monkeypatch.setattr(stage, "rank", with_windows)
    monkeypatch.setattr(made, "ledger_or_reason", lambda *_: (ledger, None))
    monkeypatch.setattr(made, "pack", lambda *_: None)
    stage.trials = [(KEPT, AA, [])]
    return stage


CODES = {"codes": ["FW102", "FW104"]}


def test_it_is_of_one_more_process_that_is_none_of_the_proofs(profiled: Stage) -> None:
    record = profiled.tune(**CODES)
    assert list(profiled.options)[-1] == "after"
    options = profiled.options["after"]
    assert (options["profile"], options["stop_after"], options["steps"]) == (True, True, None)
    assert [fix["code"] for fix in options["apply"]] == ["FW102", "FW104"]
    assert record.ledgers.credits.get("optimizer", ["fused-optimizer"]) == ["fused-optimizer"]
    assert record.ledgers_reason is None
    assert (record.proof.processes_per_arm, record.time.proof_s, record.time.after_s) == (3, 60, 10)
    assert (profiled.folder / "report.html").exists()


def test_without_time_for_it_the_proof_stands_and_the_reason_is_given(profiled: Stage) -> None:
    profiled.takes_s = {"proof-": 17.0}
    record = profiled.tune(budget_s=128, **CODES)
    assert "after" not in profiled.options
    assert record.plan is not None
    assert record.ledgers is None
    assert record.ledgers_reason.startswith("no time was left to profile it with what was kept")


@pytest.mark.parametrize("how", ["fails", "left out", "no plan"])
def test_what_does_not_work_costs_nothing_else(profiled: Stage, how: str) -> None:
    if how == "fails":
        profiled.ends = {"after": 1}
    elif how == "left out":
        profiled.looks = lambda name: profiled.left_out.add("FW104") if name == "after" else None
    else:
        profiled.left_out = {"FW102", "FW104"}
    record = profiled.tune(**CODES)
    assert record.ledgers is None
    if how == "no plan":
        assert (record.plan, record.ledgers_reason, record.savings) == (None, None, None)
        assert "after" not in profiled.options
        return
    said = {"fails": "it was not measured once more", "left out": "bf16-autocast was left out"}
    assert record.plan is not None
    assert record.ledgers_reason.startswith(said[how])


def test_trials_leave_time_for_it_where_it_takes_little(profiled: Stage) -> None:
    profiled.tune(**CODES)
    first = profiled.options["trials-1"]["trial"]["budget_s"]
    assert first == pytest.approx(600 - 10 - (1.2 * 60 + 5 + 0.09) - 1.2 * 10, abs=0.05)


def test_cut_off_in_it_the_next_session_makes_it_alone(
    profiled: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "Budget", functools.partial(Budget, clock=lambda: profiled.now))
    profiled.cuts = {"after": KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        profiled.tune(**CODES)
    assert (profiled.folder / "plan.toml").exists()
    assert not (profiled.folder / "tune.json").exists()
    profiled.cuts.clear()
    before = list(profiled.options)
    record = tuning.resume(profiled.folder, budget_s=None, force=False, quiet=True).run()
    assert list(profiled.options) == [*before, "after-2"]
    assert record.ledgers is not None
    assert record.plan is not None
