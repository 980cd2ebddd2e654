"""Miscounted FLOPs and impossible MFU: one test a case, from the script to the report."""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from flopwise.hardware.accelerators import Peak
from flopwise.records.rank import RankRecord

ONE = 2 * 64 * 256 * 256  # one product of 64 rows with a 256 x 256 layer


def steps(parameters: Any, forward: Callable[[], torch.Tensor], n: int = 10) -> Callable[[], None]:
    """Returns a training script of n plain steps."""

    def train() -> None:
        optimizer = torch.optim.SGD(parameters, lr=1e-4)
        for _ in range(n):
            optimizer.zero_grad()
            forward().backward()
            optimizer.step()

    return train


def beside(op: Callable[[], torch.Tensor]) -> Callable[[], None]:
    """Returns a training script that runs `op` without gradients in every step, beside a product of 2 x 6 FLOPs."""
    student = nn.Linear(1, 1, bias=False)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            op()
        return student(torch.ones(3, 1)).sum()

    return steps(student.parameters(), forward)


STUDENT = 2 * (2 * 3)  # forward, and the gradient of its weight


class TestFL01:
    def layers(self) -> dict[str, tuple[Callable[[], torch.Tensor], int]]:
        q = torch.randn(1, 12, 64, 64)
        lstm, x = nn.LSTM(32, 64), torch.randn(10, 4, 32)
        attention = nn.MultiheadAttention(32, 4, batch_first=True).eval()
        y = torch.randn(2, 5, 32)
        return {
            "fused attention": (lambda: F.scaled_dot_product_attention(q, q, q), 12_582_912),
            "LSTM": (lambda: lstm(x)[0], 1_966_080),
            "attention-block fast path": (
                lambda: attention(y, y, y)[0],
                2 * 5 * (2 * 4 * 32**2 + 4 * 5 * 32),
            ),
        }

    @pytest.mark.parametrize("name", ["fused attention", "LSTM", "attention-block fast path"])
    def test_operators_that_are_counted_as_zero_elsewhere(self, run_case: Any, name: str) -> None:
        op, flops = self.layers()[name]
        case = run_case(beside(op))
        assert case.record.mfu.model_flops_per_step == flops + STUDENT
        assert case.record.mfu.coverage_frac == 1.0
        assert "coverage 100 % of op time" in case.report
        assert "torch.utils.flop_counter" in case.report  # what it counts otherwise is said

    def test_convolution_backward(self, run_case: Any) -> None:
        conv, x = nn.Conv2d(16, 32, 3, padding=1, bias=False), torch.randn(2, 16, 8, 8)
        case = run_case(steps(conv.parameters(), lambda: conv(x.requires_grad_()).sum()))
        assert case.record.mfu.model_flops_per_step == 3_538_944

    def test_an_op_without_a_formula_is_named_with_its_share(self, run_case: Any) -> None:
        big = torch.randn(300, 300)
        case = run_case(beside(lambda: torch.linalg.eigvals(big)))
        mfu = case.record.mfu
        assert mfu.coverage_frac < 0.98
        assert any("linalg_eig" in name for name in mfu.uncovered)
        assert "lower bound: coverage" in case.report
        assert "linalg_eig" in case.report


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
class TestFL02:
    def test_higher_order_attention_is_counted_and_the_script_goes_on(self, run_case: Any) -> None:
        q = torch.randn(1, 12, 64, 64)
        case = run_case(beside(lambda: flex_attention(q, q, q)))
        assert case.record.steps.total == 10
        assert case.record.mfu.model_flops_per_step == 4 * 12 * 64 * 64 * 64 + STUDENT

    def test_block_sparsity_is_counted_and_named(self, run_case: Any) -> None:
        q = torch.randn(2, 3, 128, 16)
        blocks = create_block_mask(
            lambda b, h, i, j: i >= j, None, None, 128, 128, device="cpu", BLOCK_SIZE=32
        )
        case = run_case(beside(lambda: flex_attention(q, q, q, block_mask=blocks)))
        full, kept = 4 * 2 * 3 * 128 * 128 * 16, 4 * 2 * 3 * 10 * 32 * 32 * 16
        assert case.record.mfu.model_flops_per_step == full + STUDENT
        assert case.record.mfu.model_flops_per_step_causal == kept + STUDENT
        assert any("flex_attention: block sparse" in n for f in case.rank.flops for n in f.notes)


class TestFL03:
    """The count and the time of a real run are kept; the peak is put where the rate is impossible."""

    @pytest.fixture
    def rank(self, run_case: Any) -> RankRecord:
        net, x = nn.Linear(256, 256), torch.randn(64, 256)
        rank: RankRecord = run_case(steps(net.parameters(), lambda: net(x).sum(), n=30)).rank
        jitter = [0.93, 1.07, 0.96, 1.04]  # 10 ms, with what a timer leaves open
        rows = [
            dataclasses.replace(row, kind="timed", ns=int(1e7 * jitter[i % 4]))
            for i, row in enumerate(rank.rows)
        ]
        return dataclasses.replace(rank, rows=rows[:8])

    def mfu_at(self, conclude: Any, rank: RankRecord, times_peak: float) -> Any:
        rate = sum(rank.flops[0].needed.values()) / statistics.fmean(
            row.ns * 1e-9 for row in rank.rows
        )
        return conclude(rank, peak=Peak(rate / times_peak, "fp32", "given by the test", "given"))

    def test_four_times_the_peak_is_refused_with_the_largest_term(
        self, conclude: Any, rank: RankRecord
    ) -> None:
        case = self.mfu_at(conclude, rank, 4.0)
        assert case.record.mfu.value is None
        assert case.record.mfu.hfu is None
        assert "MFU 4 is impossible: the count or the time is wrong" in case.report
        assert "largest term aten::addmm" in case.report or "largest term aten::mm" in case.report
        assert "400 %" not in case.report

    def test_two_percent_above_is_refused_with_the_noise_named(
        self, conclude: Any, rank: RankRecord
    ) -> None:
        case = self.mfu_at(conclude, rank, 1.02)
        assert case.record.mfu.value is None
        assert "is impossible" in case.report
        assert "The timer's noise (±" in case.report
        assert self.mfu_at(conclude, rank, 0.98).record.mfu.value == pytest.approx(0.98)

    def test_transposed_convolution_is_three_times_its_forward(self, run_case: Any) -> None:
        conv, x = nn.ConvTranspose2d(8, 6, 4, stride=2, bias=False), torch.randn(1, 8, 5, 5)
        case = run_case(steps(conv.parameters(), lambda: conv(x.requires_grad_()).sum()))
        assert case.record.mfu.model_flops_per_step == 3 * 2 * 8 * 5 * 5 * 6 * 16


class TestFL04:
    @pytest.mark.parametrize(
        ("how", "executed"),
        [("plain", 100_663_296), ("checkpoint", 125_829_120), ("re-entrant", 134_217_728)],
    )
    def test_recomputation_is_in_hfu_and_not_in_mfu(
        self, run_case: Any, how: str, executed: int
    ) -> None:
        net = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(4)])
        x = torch.randn(64, 256, requires_grad=True)

        def forward() -> torch.Tensor:
            if how == "plain":
                return net(x).sum()
            return checkpoint(net, x, use_reentrant=how == "re-entrant").sum()

        mfu = (case := run_case(steps(net.parameters(), forward))).record.mfu
        assert mfu.model_flops_per_step == 12 * ONE == 100_663_296
        assert mfu.hardware_flops_per_step == executed
        assert mfu.hfu == pytest.approx(mfu.value * executed / 100_663_296)
        assert ("(recomputation included)" in case.report) == (how != "plain")


class TestFL05:
    @pytest.mark.parametrize("tied", [False, True])
    def test_a_look_up_is_no_product(self, run_case: Any, tied: bool) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.tokens = nn.Embedding(50257, 64)
                self.head = nn.Linear(64, 50257, bias=False)
                if tied:
                    self.head.weight = self.tokens.weight

            def forward(self, ids: torch.Tensor) -> torch.Tensor:
                return self.head(self.tokens(ids))

        net, ids = Net(), torch.arange(32).reshape(1, 32)
        case = run_case(steps(net.parameters(), lambda: net(ids).square().mean(), n=8))
        head = 2 * 32 * 64 * 50257
        assert head == 205_852_672
        assert case.record.mfu.model_flops_per_step == 3 * head
        said = [n for n in case.record.notes if n.startswith("6 x parameters x tokens would be")]
        if tied:
            assert said == []  # the one matrix is multiplied: the rule holds
            return
        assert said == [
            "6 x parameters x tokens would be 1.24 GFLOP a step, 617.6 MFLOP were counted: 3.22 M of 6.43 M parameters "
            "are an embedding, which is looked up and not multiplied (without it the rule gives 617.6 MFLOP; attention is "
            "not in it)"
        ]
        assert "an embedding, which is looked up and not multiplied" in case.report


class TestFL06:
    @pytest.mark.parametrize(("adapted", "flops"), [(True, 9_699_328), (False, 16_777_216)])
    def test_a_frozen_layer_with_an_adapter_costs_what_ran(
        self, run_case: Any, adapted: bool, flops: int
    ) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.base = nn.Linear(256, 256, bias=False)
                self.base.weight.requires_grad_(not adapted)
                self.down, self.up = nn.Linear(256, 8, bias=False), nn.Linear(8, 256, bias=False)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.base(x) + self.up(self.down(x)) if adapted else self.base(x)

        net, x = Net(), torch.randn(64, 256)
        trained = [p for p in net.parameters() if p.requires_grad]
        case = run_case(steps(trained, lambda: net(x).square().mean()))
        assert case.record.mfu.model_flops_per_step == flops
        frozen = (
            "their gradients are not computed, so the FLOPs are those of the backward pass that ran"
        )
        assert (frozen in case.report) == adapted
        assert ("65.5 k of 69.6 k parameters are frozen" in case.report) == adapted


@pytest.fixture
def on_gpu(run_case: Any, conclude: Any) -> Callable[..., Any]:
    """Returns a function that concludes a run of one second a step with these FLOPs on a GPU of this name."""
    net, x = nn.Linear(8, 8), torch.randn(2, 8)
    rank: RankRecord = run_case(steps(net.parameters(), lambda: net(x).sum())).rank

    def run(name: str, flops: dict[str, float], **more: Any) -> Any:
        counts = {dtype: int(n) for dtype, n in flops.items()}
        count = dataclasses.replace(
            rank.flops[0],
            needed=counts,
            needed_causal=counts,
            executed=counts,
            by_op={"aten::mm": 1},
        )
        rows = [dataclasses.replace(row, ns=10**9, host_ns=10**9) for row in rank.rows]
        return conclude(
            dataclasses.replace(
                rank,
                device_type="cuda",
                device_name=name,
                flops=[count],
                rows=rows,
                clock="cuda events",
                **more,
            )
        )

    return run


class TestFL07:
    def test_a_known_device_has_its_percentage(self, on_gpu: Any) -> None:
        case = on_gpu("NVIDIA H100 80GB HBM3", {"bf16": 324e12})
        assert case.record.mfu.value == pytest.approx(324 / 989.5, rel=1e-3)  # 33 %
        assert case.report.count("32.7 %") >= 1

    @pytest.mark.parametrize("name", ["NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 4090"])
    def test_more_than_the_peak_is_an_error_and_no_percentage(self, on_gpu: Any, name: str) -> None:
        case = on_gpu(name, {"bf16": 324e12})
        assert case.record.mfu.value is None
        assert "is impossible" in case.report
        assert "the peak belongs to another device or dtype" in case.report

    def test_an_unknown_device_has_its_rate_only(self, on_gpu: Any) -> None:
        case = on_gpu("Foo9000", {"bf16": 324e12})
        assert case.record.mfu.value is None
        assert case.record.mfu.achieved_flops_per_s == pytest.approx(324e12)
        assert "not given" in case.report
        assert "Foo9000" in case.report
        assert "achieved 324 TFLOP/s a device" in case.report


class TestFL08:
    def test_h200_against_its_dense_peak(self, on_gpu: Any) -> None:
        case = on_gpu("NVIDIA H200", {"bf16": 420e12})
        assert case.record.mfu.value == pytest.approx(420 / 989.5, rel=1e-3)
        assert "42.4 %" in case.report  # and not the 21 % of the sparse headline
        assert "dense a device" in case.report
        assert case.record.mfu.peak_kind == "datasheet"
        assert case.record.mfu.peak_source

    def test_h100_nvl_has_a_row_of_its_own(self, on_gpu: Any) -> None:
        case = on_gpu("NVIDIA H100 NVL", {"bf16": 400e12})
        assert case.record.mfu.peak_flops_per_s == pytest.approx(835.5e12, rel=1e-3)
        assert "47.9 %" in case.report

    def test_a_mixed_run_is_weighted_by_what_each_dtype_can_do(self, on_gpu: Any) -> None:
        mfu = (case := on_gpu("NVIDIA H200", {"fp32": 20e12, "bf16": 200e12})).record.mfu
        assert mfu.value == pytest.approx(220 / 989.5, rel=1e-3)
        assert mfu.dtype_weighted == pytest.approx(20 / 66.9 + 200 / 989.5, rel=5e-3)
        assert "of the peaks of the dtypes that ran" in case.report


def lengths() -> list[int]:
    """Returns 4096 lengths, log-normal(5, 1), cut to 16..1024."""
    rng = random.Random(0)
    return [min(1024, max(16, round(rng.lognormvariate(5, 1)))) for _ in range(4096)]


def padded(batch: Sequence[int]) -> torch.Tensor:
    ids = torch.zeros(len(batch), max(batch), dtype=torch.int64)
    for row, n in enumerate(batch):
        ids[row, :n] = 1
    return ids


class TestFL09:
    @pytest.mark.parametrize(("order", "waste"), [("random", 0.641), ("sorted", 0.004)])
    def test_padding_is_waste_and_not_tokens(self, run_case: Any, order: str, waste: float) -> None:
        sizes = sorted(lengths()) if order == "sorted" else lengths()
        loader = DataLoader(sizes, batch_size=8, collate_fn=padded)
        net = nn.Embedding(2, 2, padding_idx=0)

        def train() -> None:
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            for ids in loader:
                net(ids).mean().backward()
                optimizer.step()
                optimizer.zero_grad()

        case = run_case(train, count=False, warmup=1)
        work = case.record.throughput
        assert work.padding_frac == pytest.approx(waste, abs=0.02 if order == "random" else 0.002)
        batches = [sizes[at : at + 8] for at in range(0, 4096, 8)][1:]  # the first has no beginning
        positions, real = sum(8 * max(b) for b in batches), sum(map(sum, batches))
        assert case.record.steps.timed == 511
        assert work.padding_frac == pytest.approx(1 - real / positions)
        assert work.real_tokens_per_s == pytest.approx(work.tokens_per_s * real / positions)
        assert "real tokens/s" in case.report
        if order == "sorted":
            assert "padding" not in case.causes()
            return
        found = case.finding("padding")
        assert f"{100 * work.padding_frac:.1f} % of the positions are padding" in found.evidence
        assert "are tokens of use" in found.evidence

    def test_mfu_with_and_without_what_padding_computes(self, run_case: Any) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.tokens = nn.Embedding(2, 64, padding_idx=0)
                self.head = nn.Linear(64, 64)

            def forward(self, ids: torch.Tensor) -> torch.Tensor:
                return self.head(self.tokens(ids))

        net = Net()
        loader = DataLoader([256] + [64] * 3, batch_size=4, collate_fn=padded)

        def train() -> None:
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            for _ in range(14):
                for ids in loader:
                    net(ids).mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()

        case = run_case(train)
        share = 1 - (256 + 3 * 64) / 1024
        assert case.record.throughput.padding_frac == pytest.approx(share)
        found = case.finding("padding")
        assert "counts what padding computes; without it at most" in found.evidence
        assert case.record.mfu.value is not None


class TestFL10:
    """That a device's counter reads 100 % needs a GPU. flopwise never reads that counter: MFU alone is printed."""

    def test_small_products_have_a_small_mfu_and_no_busy_counter(self, run_case: Any) -> None:
        net, x = nn.Linear(64, 64, bias=False), torch.randn(64, 64)
        peak = Peak(1e14, "fp32", "given by the test", "given")
        case = run_case(steps(net.parameters(), lambda: net(x).sum(), n=30), peak=peak)
        assert case.record.mfu.value < 0.01
        assert "utili" not in case.report.lower()
