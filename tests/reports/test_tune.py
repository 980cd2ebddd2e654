from __future__ import annotations

import dataclasses

import pytest

from flopwise.records.verdict import BreakEven, Predicted, TimeUse, Write
from flopwise.reports.terminal import render


def lines(record):
    return render(record, width=160, color=False).splitlines()


def with_proof(record, outcome, ratio, **changes):
    comparison = dataclasses.replace(
        record.proof.comparison, outcome=outcome, ratio=ratio, **changes
    )
    return dataclasses.replace(
        record, proof=dataclasses.replace(record.proof, comparison=comparison)
    )


def proof(record):
    return next(text for text in lines(record) if text.startswith("  proof"))


def test_a_gain_that_was_not_shown_is_not_called_faster(sample):
    record = with_proof(sample("tune"), "not shown", 0.991, ci95=(0.973, 1.009))
    assert proof(record).startswith(
        "  proof       not shown: t_new / t_old 0.9910 (0.9730 to 1.0090)"
    )
    assert "as fast" not in "".join(lines(record))


def test_slower_says_how_much_longer(sample):
    record = with_proof(sample("tune"), "slower", 1.5, ci95=(1.4, 1.6))
    assert proof(record).startswith("  proof       slower: 1.50x as long, t_new / t_old 1.5000")


def test_control_that_fails_takes_the_trust_away(sample):
    record = sample("tune")
    alarm = dataclasses.replace(record.aa, outcome="faster", ratio=0.97, ci95=(0.96, 0.98))
    text = "\n".join(lines(dataclasses.replace(record, aa=alarm)))
    assert "two equal arms differ: the verdicts below are not trusted" in text
    assert "not trusted" not in "\n".join(lines(record))


def test_proof_that_did_not_run_is_told_from_nothing_to_prove(sample):
    record = dataclasses.replace(sample("tune"), proof=None, kept=[])
    assert proof(record) == "  proof       not run"
    assert proof(sample("tune_nothing")) == "  proof       none: no fix was kept"


def test_an_outcome_that_was_withheld_is_not_called_too_small(sample):
    record = sample("tune")
    found = dataclasses.replace(record.trials[1].comparison, ratio=0.9, ci95=(0.89, 0.91))
    trial = dataclasses.replace(record.trials[1], comparison=found, reason="not believed: so")
    text = "\n".join(lines(dataclasses.replace(record, trials=[trial])))
    assert "not believed: so" in text
    assert "would have shown" not in text
    assert "would have shown" in "\n".join(lines(record))


def test_the_least_gain_that_would_have_shown_is_said_once(sample):
    record = sample("tune")
    said = "no gain shown: a gain of 0.9 % would have been"
    trial = dataclasses.replace(record.trials[1], reason=said)
    text = " ".join(" ".join(lines(dataclasses.replace(record, trials=[trial]))).split())
    assert text.count("would have") == 1


def test_how_the_first_losses_differ_is_said(sample):
    record = sample("tune")
    said = dataclasses.replace(record.proof, losses="first losses identical in all processes")
    text = " ".join(lines(dataclasses.replace(record, proof=said)))
    assert "first losses identical in all processes" in " ".join(text.split())


def test_take_home_line_repeats_the_script_with_its_arguments(sample):
    record = sample("tune")
    wanted = "  take home   flopwise run --plan runs/t1/plan.toml train_gpt.py --batch-size 16"
    assert wanted in lines(record)
    module = dataclasses.replace(
        record, script="pkg.train", command=["flopwise", "tune", "-m", "pkg.train", "--lr", "1"]
    )
    assert "  take home   flopwise run --plan runs/t1/plan.toml -m pkg.train --lr 1" in lines(
        module
    )
    assert not any("take home" in text for text in lines(sample("tune_nothing")))


def test_a_fix_that_is_slower_has_that_as_its_verdict(sample):
    record = sample("tune")
    found = dataclasses.replace(record.trials[1].comparison, outcome="slower", ratio=1.06)
    trial = dataclasses.replace(record.trials[1], comparison=found, reason="slower: so")
    (line,) = [x for x in lines(dataclasses.replace(record, trials=[trial])) if "fused-adamw" in x]
    assert "  not kept: slower  " in line
    assert not any("not kept: slower" in x for x in lines(record))


def test_a_plan_is_listed_once(sample):
    saved = [sample("tune").plan, "runs/t1/tune.json"]
    text = render(sample("tune"), width=160, color=False, saved=saved)
    assert "  saved       runs/t1/plan.toml · runs/t1/tune.json\n" in text


def test_what_parity_found_is_said_once(sample):
    record = sample("tune")
    trial = record.trials[2]
    detail = trial.parity.detail
    again = dataclasses.replace(trial, reason=f"parity failed: {detail}")
    for shown in (trial, again):
        text = " ".join(" ".join(lines(dataclasses.replace(record, trials=[shown]))).split())
        assert text.count(detail) == 1


def test_how_the_time_was_used_is_said(sample):
    use = TimeUse(budget_s=600, baseline_s=12, trials_s=200, proof_s=60, reserved_s=80)
    record = dataclasses.replace(sample("tune"), time=use, wall_s=275)
    (line,) = [x for x in lines(record) if x.startswith("  time")]
    assert line == (
        "  time        budget 10 min 0 s: as it is 12 s · trials 3 min 20 s · proof 60 s (80 s were set aside) · "
        "5 min 25 s of it left"
    )
    for wall_s, rest in ((600.4, "used up"), (605, "5 s over it")):
        (line,) = [
            x for x in lines(dataclasses.replace(record, wall_s=wall_s)) if x.startswith("  time")
        ]
        assert line.endswith(rest)
    assert not any(x.startswith("  time") for x in lines(sample("tune")))


def test_a_proof_that_came_to_no_end_is_told_from_one_that_was_not_begun(sample):
    use = TimeUse(budget_s=600, baseline_s=12, trials_s=200, proof_s=60, reserved_s=80)
    record = dataclasses.replace(sample("tune"), proof=None, kept=[], plan=None, time=use)
    assert proof(record) == "  proof       came to no end, see the notes"
    never = dataclasses.replace(record, time=dataclasses.replace(use, proof_s=0.0))
    assert proof(never) == "  proof       not run"


def test_nothing_tried_is_said(sample):
    assert "  no fix was tried" in lines(dataclasses.replace(sample("tune"), trials=[]))


def test_predictions_break_even_and_writes_have_a_line_each(sample):
    record = dataclasses.replace(
        sample("tune"),
        predicted=Predicted(3, 0.12, 1, 1),
        break_even=BreakEven(42.0, 0.1, 420.0, 9000),
        writes=[
            Write("/home/me/data.bin", "changed in spite of it", 3),
            Write("/home/me/ckpt/1.pt", "written", 3, 7),
            Write("/home/me/ckpt/0.pt", "removed", 0, 7),
        ],
        more_writes=10,
        sessions=2,
    )
    text = "\n".join(lines(record))
    assert (
        "predicted   predicted against measured: median error 12 % of 3 measured gains · 1 predicted above the interval"
        in text
    )
    assert (
        "break-even  the warm-up of 42 s a run has paid after 420 steps · 9,000 steps remain"
        in text
    )
    assert "changed although the script ran apart: /home/me/data.bin" in text
    assert (
        "the script wrote or removed 12 files in copies of its own; yours are as they were" in text
    )


def test_a_predicted_ratio_stands_beside_the_measured_one(sample):
    record = sample("tune")
    assert "predicted" not in "\n".join(lines(record))
    trials = [dataclasses.replace(record.trials[0], predicted_ratio=0.75), *record.trials[1:]]
    text = lines(dataclasses.replace(record, trials=trials))
    head = next(line for line in text if "numerics" in line)
    assert head.index("predicted") > head.index("t_new")
    assert any("0.7500" in line and record.trials[0].name in line for line in text)


def test_a_tune_that_can_go_on_says_how(sample):
    record = dataclasses.replace(sample("tune_nothing"), resume="runs/t 1")
    assert "  go on       flopwise tune --resume 'runs/t 1' --budget TIME" in lines(record)


def flat(record, width=160):
    return " ".join(render(record, width=width, color=False).split())


@pytest.mark.parametrize(
    ("multiplied", "ratio", "ci95", "why"),
    [
        (0.40, 0.30, (0.29, 0.31), "so what two of them could both save is in neither ratio"),
        (0.20, 0.30, (0.29, 0.31), "so what one makes possible for another is in both ratios"),
        (0.30, 0.31, (0.29, 0.33), "the interval of the proof holds both"),
    ],
)
def test_why_single_gains_do_not_multiply(sample, multiplied, ratio, ci95, why):
    record = with_proof(sample("tune_whole"), "faster", ratio, ci95=ci95)
    text = flat(dataclasses.replace(record, multiplied=multiplied))
    head = f"the ratios of the 2 kept fixes multiply to {multiplied:.4f}, together they give"
    assert f"{head} {ratio:.4f}" in text
    assert why in text
    one = dataclasses.replace(record, multiplied=multiplied, kept=["FW104 bf16-autocast"])
    assert "multiply to" not in flat(one)


def test_mfu_says_of_which_work_it_is(sample):
    record = sample("tune_whole")
    work = record.proof.work
    text = flat(record)
    assert "at least 13.2 TFLOP a step, as the script as it is needs them" in text
    assert (
        "25 % of the positions are padding: not counted; 17.6 TFLOP with what it computes" in text
    )
    assert "with the fixes a step computes 13.2 TFLOP, 24.7 % less for the same work" in text
    plain = dataclasses.replace(
        work, padding_frac=None, old_counted_flops_per_step=1.32e13, new_counted_flops_per_step=1.32e13,
        mfu_reason="no peak is known",
    )  # fmt: skip
    text = flat(dataclasses.replace(record, proof=dataclasses.replace(record.proof, work=plain)))
    assert "the same work: 13.2 TFLOP a step" in text
    assert "no peak is known" in text
    assert "with the fixes a step computes" not in text


def test_what_is_saved_and_what_is_not_known(sample):
    record = sample("tune_whole")
    saved = dataclasses.replace(
        record.savings, old_j=None, new_j=None, energy="not measured: why", old_usd=None, new_usd=None,
        usd_per_device_hour=None, devices=None,
    )  # fmt: skip
    text = flat(dataclasses.replace(record, savings=saved))
    assert "energy not measured: why" in text
    assert "money not reckoned: no price was given" in text
    assert "MJ" not in text
    missing = dataclasses.replace(saved, usd_per_device_hour=3.5)
    assert "not all ranks were measured" in flat(dataclasses.replace(record, savings=missing))


def test_ledgers_that_are_not_there_have_a_reason(sample):
    record = dataclasses.replace(sample("tune_whole"), ledgers=None, ledgers_reason="no time")
    assert "ledger not compared · no time" in flat(record)
    assert "the ledger as it is" not in flat(record)


def test_the_tune_itself_pays_too(sample):
    record = dataclasses.replace(sample("tune_whole"), break_even=None)
    assert "break-even the tune itself (9 min 12 s, $0.54) has paid after 1,699 steps" in flat(
        record
    )
