from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.kit.memory.block_costs import BlockCost
from flopwise.kit.memory.checkpoint_choice import choose, predicted_peak
from flopwise.kit.memory.step_memory import StepMemory


def model(
    kept: list[int], times: list[float] | None = None, base: int = 100, gradients: int = 0
) -> tuple[list[BlockCost], StepMemory]:
    """Returns a model whose blocks keep these bytes, over a base, each of which makes gradients in backward."""
    n = len(kept)
    costs = [
        BlockCost(str(i), "Block", k, forward_s=t, calls=1)
        for i, (k, t) in enumerate(zip(kept, times or [1.0] * n, strict=True))
    ]
    done = [base + sum(kept[:i]) for i in range(n + 1)]
    starts = [done[i + 1] + gradients * (n - 1 - i) for i in range(n)]
    return costs, StepMemory(done, [s + gradients for s in starts], starts, kept)


class TestChoose:
    def test_nothing_where_it_fits(self) -> None:
        choice = choose(*model([10, 10, 10]), target_bytes=130)
        assert choice.blocks == ()
        assert choice.fits
        assert choice.peak_bytes == choice.peak_before_bytes == 130

    def test_as_few_as_needed_and_early_ones_so_that_one_is_not_computed_again_at_the_peak(
        self,
    ) -> None:
        choice = choose(*model([10, 10, 10, 10]), target_bytes=130)
        assert len(choice.blocks) == 1
        assert "3" not in choice.blocks  # it would be computed again on top of all others
        assert choice.peak_bytes == 130
        assert choice.recompute_s == 1

    def test_the_cheapest_set_frees_enough(self) -> None:
        choice = choose(*model([20, 10, 30, 5], [2, 1, 9, 1]), target_bytes=140)
        assert choice.blocks == ("0", "1")
        assert choice.recompute_s == 3
        assert choice.fits

    def test_gradients_that_gather_in_backward_are_no_ones_to_free(self) -> None:
        costs, memory = model([10, 10, 10, 10], gradients=50)
        assert memory.peak_bytes == 100 + 10 + 200
        choice = choose(costs, memory, target_bytes=305)
        assert not choice.fits
        assert choice.peak_bytes >= 100 + 200

    def test_the_least_peak_where_the_target_cannot_be_reached(self) -> None:
        choice = choose(*model([10, 10, 10]), target_bytes=1)
        assert not choice.fits
        assert choice.peak_bytes == 110
        assert len(choice.blocks) in (2, 3)

    def test_blocks_that_free_nothing_are_never_chosen(self) -> None:
        costs, memory = model([10, 10])
        costs[0].input_bytes = 10
        assert "0" not in choose(costs, memory, target_bytes=1).blocks

    def test_hundreds_of_unequal_blocks_are_chosen_from_in_no_time(self) -> None:
        kept = [10**6 + 7919 * i % 104729 for i in range(200)]
        costs, memory = model(kept, [1 + i % 7 / 10 for i in range(200)])
        choice = choose(costs, memory, target_bytes=memory.peak_bytes // 2)
        assert choice.fits
        assert 95 <= len(choice.blocks) <= 110

    @settings(deadline=None, max_examples=60)
    @given(
        st.lists(
            st.tuples(st.integers(0, 40), st.integers(1, 9), st.integers(0, 20)),
            min_size=1,
            max_size=6,
        ),
        st.integers(0, 300),
        st.integers(0, 30),
    )
    def test_no_other_set_is_cheaper_or_lower(
        self, blocks: list[tuple[int, int, int]], target: int, gradients: int
    ) -> None:
        costs, memory = model([b[0] for b in blocks], [float(b[1]) for b in blocks], 50, gradients)
        for cost, (_, _, more) in zip(costs, blocks, strict=True):
            cost.input_bytes = more
        choice = choose(costs, memory, target)
        useful = [c for c in costs if c.freed_bytes > 0]
        sets = [
            {c.name for c in chosen}
            for size in range(len(useful) + 1)
            for chosen in itertools.combinations(useful, size)
        ]
        peaks = {frozenset(s): predicted_peak(costs, memory, s) for s in sets}
        assert choice.peak_bytes == peaks[frozenset(choice.blocks)]
        fitting = [s for s, peak in peaks.items() if peak <= target]
        time_of = {c.name: c.forward_s for c in costs}
        if fitting:
            assert choice.fits
            assert choice.recompute_s == min(sum(time_of[n] for n in s) for s in fitting)
        else:
            assert choice.peak_bytes <= min(peaks.values()) + 1


def test_parameters_in_16_bits_are_missing_once_autocast_has_ended() -> None:
    costs, memory = model([10, 10, 10])
    for cost in costs:
        cost.kept_bytes, cost.cast_bytes = 6, 4  # 10 are freed in backward, 6 in forward
    everything = {"0", "1", "2"}
    assert predicted_peak(costs, memory, everything) == 130 - 18  # at the end of forward
    memory.autocast_in_backward = True
    assert (
        predicted_peak(costs, memory, everything) == 130 - 18 + 10
    )  # while the last one runs again


def test_a_prediction_without_checkpoints_is_what_was_measured() -> None:
    costs, memory = model([10, 20, 30], gradients=7)
    assert predicted_peak(costs, memory, set()) == memory.peak_bytes


@pytest.mark.parametrize("chosen", [{"0"}, {"1"}, {"0", "1", "2"}])
def test_a_checkpointed_block_runs_again_on_top_of_what_is_held(chosen: set[str]) -> None:
    costs, memory = model([10, 10, 10])
    expected = {frozenset("0"): 120, frozenset("1"): 120, frozenset("012"): 110}
    assert predicted_peak(costs, memory, chosen) == expected[frozenset(chosen)]
