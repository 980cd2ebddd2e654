"""The work of a step, and MFU before and after of the same work, whatever fixes leave out or add."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.hardware.accelerators import Peak
from flopwise.records.rank import FlopCount, RankRecord, StepRow
from flopwise.records.run import RunRecord
from flopwise.summary import Context, summarise
from flopwise.trials.work import useful_frac, work_of

Run = Callable[..., RunRecord]
PEAK = 1e12


def made(
    make_rank: Callable[..., RankRecord], step_ms: float, flops: int, **more: Any
) -> RunRecord:
    """Returns a run: `positions` a step, `real` of them tokens, `pairs` of the FLOPs those of attention."""
    ns = int(step_ms * 1e6)
    row = StepRow(
        ns, ns, "timed", "4x512 int64", 1, more.get("samples", 4), more.get("positions"), more.get("real")
    )  # fmt: skip
    attention = int(flops * more.get("pairs", 0.0))
    by_op = {"aten::mm": flops - attention, "aten::_scaled_dot_product_flash_attention": attention}
    executed = {"fp32": flops + more.get("recomputed", 0)}
    count = FlopCount("4x512 int64", "eager step", {"fp32": flops}, {"fp32": flops}, executed, 0, 1.0, "op time", [], by_op, None)  # fmt: skip
    rank = replace(make_rank(), rows=[row] * 20, flops=[count] if flops else [])
    return summarise([rank], Context([], "train.py", peak=Peak(PEAK, "fp32", "--peak", "given")))


@pytest.fixture(scope="module")
def run(make_rank: Callable[..., RankRecord]) -> Run:
    return lambda *args, **more: made(make_rank, *args, **more)


def test_without_fixes_it_is_the_mfu_of_the_run(run: Run) -> None:
    work = work_of([run(10, 10**9)])
    assert (work.unit, work.per_step, work.old_per_s) == ("samples", 4, pytest.approx(400))
    assert (work.mfu_old, work.mfu_new, work.new_per_s) == (pytest.approx(0.1), None, None)
    assert work.model_flops_per_step == 1e9


def test_padding_left_out_makes_mfu_higher_and_not_lower(run: Run) -> None:
    """Of 2,048 positions 512 are tokens; without the padding a step computes a quarter and takes half as long."""
    old = run(10, 4 * 10**9, positions=2048, real=512)
    new = run(5, 10**9, positions=512, real=512)
    assert new.mfu.value < old.mfu.value  # what each computed: the step is faster and its MFU lower
    work = work_of([old, old], [new, new])
    assert work.unit == "real tokens"
    assert (work.old_per_s, work.new_per_s) == (pytest.approx(51_200), pytest.approx(102_400))
    assert (work.mfu_old, work.mfu_new) == (pytest.approx(0.1), pytest.approx(0.2))
    assert work.padding_frac == pytest.approx(0.75)
    assert work.model_flops_per_step == pytest.approx(1e9)
    counted = (work.old_counted_flops_per_step, work.new_counted_flops_per_step)
    assert counted == (4e9, 1e9)


def test_positions_that_a_fix_hides_from_the_meter_do_not_matter(run: Run) -> None:
    """The real tokens of the new arm are not seen (a mask on the device, say): samples are the unit."""
    work = work_of([run(10, 4 * 10**9, positions=2048, real=512)], [run(5, 10**9, positions=2048)])
    assert work.unit == "samples"
    assert (work.mfu_old, work.mfu_new) == (pytest.approx(0.1), pytest.approx(0.2))


@pytest.mark.parametrize(
    ("name", "flops", "more"),
    [
        ("padded-dimension: columns that are nothing of the model", 1_250_000_000, {}),
        ("labelled-logits: logits of places without a label", 600_000_000, {}),
        ("recompute-off", 10**9, {"recomputed": 0}),
        ("not counted at all", 0, {}),
    ],
)
def test_what_a_fix_adds_or_leaves_out_is_no_other_work(
    run: Run, name: str, flops: int, more: dict[str, Any]
) -> None:
    old = run(10, 10**9, recomputed=3 * 10**8)
    work = work_of([old], [run(8, flops, **more)])
    assert (work.mfu_old, work.mfu_new) == (pytest.approx(0.1), pytest.approx(0.125)), name


def test_attention_among_padding_counts_pairs_of_tokens(run: Run) -> None:
    half = run(10, 10**9, positions=2048, real=1024, pairs=0.2)
    assert useful_frac(half) == pytest.approx(0.8 * 0.5 + 0.2 * 0.25)
    older = replace(half, mfu=replace(half.mfu, pairwise_frac=None))  # nothing is known of its ops
    assert useful_frac(older) == pytest.approx(0.25)
    assert useful_frac(run(10, 10**9, pairs=0.2)) == 1


@given(
    lengths=st.lists(st.integers(1, 512), min_size=4, max_size=4),
    pairs=st.floats(0, 1),
)
def test_it_is_a_lower_bound_whatever_the_lengths(
    make_rank: Callable[..., RankRecord], lengths: list[int], pairs: float
) -> None:
    """Truth: products have a row for each token, attention a pair for each two tokens of one sequence."""
    run = made(make_rank, 10, 10**9, positions=2048, real=sum(lengths), pairs=pairs)
    truth = (1 - pairs) * sum(lengths) / 2048 + pairs * sum(n * n for n in lengths) / (4 * 512**2)
    assert useful_frac(run) <= truth + 1e-6
    assert useful_frac(run) > 0


def test_samples_that_were_not_counted_alike_are_no_unit(run: Run) -> None:
    work = work_of([run(10, 10**9, samples=4)], [run(5, 10**9, samples=2)])
    assert (work.unit, work.mfu_new) == ("steps", pytest.approx(0.2))
    assert (
        work.note
        == "samples of a step differ by 50 % between the arms, so they were not counted alike"
    )


def test_lengths_that_were_drawn_anew_are_counted_by_their_tokens(run: Run) -> None:
    old, new = run(10, 10**9, positions=2048, real=1000), run(5, 10**9, positions=2048, real=1050)
    work = work_of([old], [new])
    assert work.unit == "real tokens"
    assert work.mfu_new == pytest.approx(work.mfu_old * 2 * 1.05)


def test_the_impossible_is_not_reported(run: Run) -> None:
    work = work_of([run(2, 10**9)], [run(0.5, 10**9)])
    assert (work.mfu_old, work.mfu_new) == (pytest.approx(0.5), None)
    assert work.mfu_reason.startswith("MFU with the fixes would be 2, which is impossible")


def test_no_mfu_has_its_reason_and_rates_stand(run: Run) -> None:
    old = run(10, 10**9)
    bare = replace(old, mfu=replace(old.mfu, value=None, reason="no peak is known"))
    work = work_of([bare], [run(5, 10**9)])
    assert (work.mfu_old, work.mfu_new, work.mfu_reason) == (None, None, "no peak is known")
    assert work.new_per_s == pytest.approx(800)


def test_what_limits_the_count_limits_both(run: Run) -> None:
    old = run(10, 10**9)
    partly = replace(old, mfu=replace(old.mfu, reason="lower bound: coverage 90 %"))
    work = work_of([partly], [run(5, 10**9)])
    assert (work.mfu_new, work.mfu_reason) == (pytest.approx(0.2), "lower bound: coverage 90 %")


def test_tokens_of_a_sample_are_known_where_none_is_padding(run: Run) -> None:
    assert work_of([run(10, 10**9, positions=2048)]).tokens_per_unit == 512
    assert work_of([run(10, 10**9)]).tokens_per_unit is None
