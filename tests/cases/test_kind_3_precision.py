"""Mixed precision and values that are not finite: one test a case, held against what the kit says and does."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.amp.grad_scaler import GradScaler

from flopwise.errors import PrecisionError, PrecisionWarning
from flopwise.kit.precision import (
    DynamicScaler,
    MasterWeights,
    MixedPrecision,
    check_step,
    effective_dtypes,
    find_nonfinite,
)


def line_of(marker: str) -> str:
    """Returns the end of a place in this file: the line with this marker."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    at = [n for n, line in enumerate(lines, start=1) if line.endswith(f"# {marker}")]
    assert len(at) == 1, marker
    return f"test_kind_3_precision.py:{at[0]}"


def said(run: Callable[[], Any]) -> list[str]:
    """Returns what is warned of while `run` runs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in caught if issubclass(w.category, PrecisionWarning)]


def step(scaler: GradScaler, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


class TestAMP01:
    """A loss that overflows at every step halves the scale without end."""

    def test_the_alarm_names_the_module_long_before_the_scale_is_gone(self) -> None:
        class Overflowing(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.last(self.first(x) * float("inf"))

        model = Overflowing()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = DynamicScaler("cpu", 65536.0, model=model)

        def train() -> None:
            for _ in range(7):
                step(scaler, optimizer, model(torch.ones(1, 2)).sum())

        words = said(train)
        assert len(words) == 2
        assert words[0].startswith(
            "5 optimizer steps in a row were skipped (5 of 5 in all), the scale fell to 2048."
        )
        assert "backward reaches last.bias first" not in words[0]  # its gradient is 1, and finite
        assert "backward reaches last.weight first" in words[0]
        assert words[1].startswith(
            "First non-finite in forward: the output of last (Linear); its inputs were not"
        )

    def test_the_scale_stops_at_a_floor_and_the_next_finite_step_is_right(self) -> None:
        weight = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], 0.1)
        scaler = DynamicScaler("cpu", 65536.0)

        def train() -> None:
            for _ in range(166):  # after which GradScaler's scale is exactly 0
                step(scaler, optimizer, (weight * float("inf")).sum())

        assert len(said(train)) == 1
        assert scaler.get_scale() == 2.0**-24
        assert weight.item() == 1.0
        step(scaler, optimizer, weight.sum())
        assert weight.item() == pytest.approx(0.9)
        assert "167 updates, 166 skipped" in scaler.report()

    def test_a_checkpoint_with_the_scale_at_0_is_not_continued(self) -> None:
        weight = nn.Parameter(torch.ones(1))
        optimizer, theirs = torch.optim.SGD([weight], 0.1), GradScaler("cpu", 65536.0)
        for _ in range(166):
            step(theirs, optimizer, (weight * float("inf")).sum())
        assert theirs.get_scale() == 0.0
        with pytest.raises(PrecisionError, match="Do not continue from it: roll back"):
            DynamicScaler("cpu").load_state_dict(theirs.state_dict())


class TestAMP02:
    """Gradients are clipped while they are still multiplied by the scale."""

    @staticmethod
    def update(clip: Callable[[Any, Any, Any], Any]) -> torch.Tensor:
        weight = nn.Parameter(torch.zeros(4))
        optimizer = torch.optim.SGD([weight], 1.0)
        scaler = DynamicScaler("cpu", 1024.0)
        scaler.scale((weight * torch.tensor([0.1, 0.2, 0.3, 0.4])).sum()).backward()
        clip(scaler, optimizer, weight)
        scaler.step(optimizer)
        return weight.detach().norm()

    def test_the_wrong_order_is_said_with_its_line_and_what_it_costs(self) -> None:
        def wrong(scaler: Any, optimizer: Any, weight: Any) -> None:
            nn.utils.clip_grad_norm_([weight], 1.0)  # AMP-02

        lengths: list[torch.Tensor] = []
        (words,) = said(lambda: lengths.append(self.update(wrong)))
        assert lengths[0].item() == pytest.approx(0.00098, rel=0.01)
        assert words.startswith("Clip runs on scaled gradients: clip_grad_norm_ at ")
        assert line_of("AMP-02") in words
        assert "with a norm of 560.9" in words
        assert "effective lr cut by about 561x" in words
        assert "The right order: scaler.unscale_(optimizer), clip, scaler.step(optimizer)" in words

    def test_the_scalers_own_clip_is_right_in_either_order(self) -> None:
        def early(scaler: Any, optimizer: Any, weight: Any) -> None:
            assert scaler.clip_grad_norm_([weight], 1.0).item() == pytest.approx(0.5477, rel=1e-4)

        def late(scaler: Any, optimizer: Any, weight: Any) -> None:
            scaler.unscale_(optimizer)
            scaler.clip_grad_norm_([weight], 1.0)

        assert said(lambda: self.update(early)) == []
        assert self.update(early) == self.update(late)
        assert self.update(early).item() == pytest.approx(0.5477, rel=1e-4)


class TestAMP03:
    """Calls that come twice, too early or for nothing."""

    @staticmethod
    def make() -> tuple[DynamicScaler, nn.Parameter, torch.optim.Optimizer]:
        weight = nn.Parameter(torch.zeros(1))
        return DynamicScaler("cpu"), weight, torch.optim.SGD([weight], 1.0)

    def test_unscaling_twice_is_explained_and_harmless(self) -> None:
        scaler, weight, optimizer = self.make()

        def train() -> None:
            scaler.scale(weight.sum()).backward()
            scaler.unscale_(optimizer)  # AMP-03 first
            scaler.unscale_(optimizer)  # AMP-03 second
            scaler.step(optimizer)
            scaler.update()

        (words,) = said(train)
        assert line_of("AMP-03 first") in words
        assert line_of("AMP-03 second") in words
        assert weight.item() == -1.0

    def test_an_optimizer_without_gradients_is_left_out(self) -> None:
        scaler, weight, optimizer = self.make()
        other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 1.0)

        def train() -> None:
            scaler.scale(weight.sum()).backward()
            scaler.step(optimizer)
            scaler.step(other)
            scaler.update()
            scaler.step(other)
            scaler.update()

        (words,) = said(train)
        assert "no parameter of this SGD has a gradient; it was left out" in words
        assert weight.item() == -1.0

    @pytest.mark.parametrize("unscale_each", [False, True])
    def test_a_short_last_window_and_a_call_in_every_micro_step(self, unscale_each: bool) -> None:
        scaler, weight, optimizer = self.make()

        def train() -> None:
            for epoch in range(2):
                for batch in range(10):  # windows of 4, 4 and 2
                    scaler.scale(weight.sum()).backward()
                    last = batch % 4 == 3 or batch == 9
                    if unscale_each or last:
                        scaler.unscale_(optimizer)
                    if last:
                        scaler.step(optimizer)
                        optimizer.zero_grad()
                    scaler.update()
                assert weight.item() == -10.0 * (epoch + 1)

        words = said(train)
        assert len(words) == (1 if unscale_each else 0)
        assert all("were put back on the scale" in w for w in words)

    def test_unscaling_after_the_step_says_where_in_the_window(self) -> None:
        scaler, weight, optimizer = self.make()
        for _ in range(3):
            scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        with pytest.raises(RuntimeError, match=r"after 3 backward calls of this window"):
            scaler.unscale_(optimizer)


class TestAMP04:
    """The scale changes in the middle of an accumulation window."""

    def test_gradients_of_two_scales_are_not_summed(self) -> None:
        weight = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], 1.0)
        scaler = DynamicScaler("cpu", 4.0, growth_interval=1, schedule="growth")

        def train() -> None:
            scaler.scale(weight.sum()).backward()
            scaler.unscale_(optimizer)
            scaler.update()
            assert scaler.get_scale() == 8.0
            scaler.scale(weight.sum()).backward()  # AMP-04
            scaler.unscale_(optimizer)

        (words,) = said(train)
        assert line_of("AMP-04") in words
        assert weight.grad is not None
        assert weight.grad.item() == 2.0  # GradScaler gives 9 before its second unscale_

    def test_an_update_inside_a_window_waits_for_its_end(self) -> None:
        weight = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], 1.0)
        scaler = DynamicScaler("cpu", 4.0, growth_interval=1, schedule="growth")
        for _ in range(4):
            scaler.scale(weight.sum()).backward()
            scaler.update()
            assert scaler.get_scale() == 4.0
        scaler.step(optimizer)
        scaler.update()
        assert (weight.item(), scaler.get_scale()) == (-4.0, 8.0)


class TestAMP05:
    """The schedule advances although the optimizer did not step."""

    def test_the_report_has_what_the_schedule_did_meanwhile(self) -> None:
        weight = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], 0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        scaler = DynamicScaler("cpu", 65536.0)

        def train() -> None:
            for _ in range(200):
                step(scaler, optimizer, (weight * float("inf")).sum())
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # torch's own about the order of the calls
                    schedule.step()

        said(train)
        last = scaler.report(schedule).splitlines()[-1]
        assert last.startswith(
            "skipped steps 200/200: the scheduler advanced 200 times without an update"
        )
        assert f"learning rate 0.1 to {0.1 * 0.9**200:g}" in last

    def test_advance_holds_the_schedule_back(self) -> None:
        weight = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], 0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        scaler = DynamicScaler("cpu", 65536.0)

        def train() -> None:
            for _ in range(200):
                step(scaler, optimizer, (weight * float("inf")).sum())
                scaler.advance(schedule)

        said(train)
        assert schedule.get_last_lr() == [0.1]


class Masked(nn.Module):
    """Attention by hand that fills with a constant."""

    def __init__(self, constant: float) -> None:
        super().__init__()
        self.project, self.constant = nn.Linear(4, 4), constant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.project(x) @ x.mT
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
        return torch.softmax(scores.masked_fill(hidden, self.constant), -1) @ x  # AMP-06


class TestAMP06:
    """A mask's constant does not fit half precision."""

    def test_before_float16_it_is_said_with_its_line(self) -> None:
        (words,) = said(lambda: MixedPrecision(nn.Sequential(Masked(-1e9)), "float16"))
        assert words.startswith("-1e+09 in 0 (Masked, ")
        assert line_of("AMP-06") in words
        assert "filling with it raises, adding it gives -inf" in words

    def test_for_bfloat16_nothing_is_said_as_it_fits(self) -> None:
        assert said(lambda: MixedPrecision(Masked(-1e9), "bfloat16")) == []

    def test_what_fits_is_not_said(self) -> None:
        assert said(lambda: MixedPrecision(Masked(-1e4), "float16")) == []
        assert said(lambda: MixedPrecision(Masked(-math.inf), "float16")) == []


class TestAMP07:
    """Two planes of a mask, each at the dtype's minimum, are summed."""

    def test_the_cause_is_the_mask_with_both_lines(self) -> None:
        class Attention(nn.Module):
            def forward(self, scores: torch.Tensor) -> torch.Tensor:
                least = torch.finfo(scores.dtype).min
                rows, columns = (
                    torch.zeros(4, 4, dtype=scores.dtype),
                    torch.zeros(4, 4, dtype=scores.dtype),
                )
                rows[2], columns[2] = least, least
                return torch.softmax(scores + (rows + columns), -1)  # AMP-07

        model = nn.Sequential()
        model.add_module("attention", Attention())
        found = find_nonfinite(model, torch.zeros(4, 4, dtype=torch.bfloat16, requires_grad=True))
        assert found is not None
        assert (found.op, found.module, found.value) == ("softmax", "attention", "NaN")
        assert (
            "Row fully masked, mask = -inf: 1 fully masked row, the first at index [2]"
            in found.cause
        )
        assert "two saturated mask planes added" in found.cause
        assert line_of("AMP-07") in found.cause
        assert found.cure == "Combine masks as booleans, then fill once."


class TestAMP08:
    """A row of the attention is masked altogether."""

    def test_the_empty_row_is_named_though_the_loss_leaves_it_out(self) -> None:
        allowed = torch.ones(4, 4, dtype=torch.bool)
        allowed[2] = False

        class Attention(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.query = nn.Linear(8, 8)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                scores = self.query(x) @ x.mT
                return torch.softmax(scores.masked_fill(~allowed, -math.inf), -1) @ x

        model, x = Attention(), torch.randn(4, 8)

        def forward_and_backward() -> None:
            model(x)[[0, 1, 3]].sum().backward()

        found = find_nonfinite(forward_and_backward, module=model)
        assert found is not None
        assert found.loss_finite is True
        assert "1 fully masked row, the first at index [2]" in found.cause
        assert "its gradient is NaN x 0 = NaN" in found.cure

    def test_fused_attention_gives_no_alarm(self) -> None:
        allowed = torch.ones(4, 4, dtype=torch.bool)
        allowed[2] = False
        q = torch.randn(1, 1, 4, 8, requires_grad=True)

        def fused() -> None:
            F.scaled_dot_product_attention(q, q, q, attn_mask=allowed).sum().backward()

        assert find_nonfinite(fused) is None


class TestAMP09:
    """Adam on float16 weights divides 0 by 0."""

    @pytest.mark.parametrize("foreach", [False, True])
    def test_the_optimizer_is_named_as_the_cause_at_step_1(self, foreach: bool) -> None:
        model = nn.Module()
        model.weight = nn.Parameter(torch.ones(10, dtype=torch.float16))
        model.weight.grad = torch.zeros(10, dtype=torch.float16)
        model.weight.grad[0] = 1e-4
        optimizer = torch.optim.Adam(model.parameters(), 1e-3, foreach=foreach)
        seen: list[Any] = []
        (words,) = said(lambda: seen.append(check_step(optimizer, model)))
        assert words.startswith("Model weights are float16 without float32 master copies")
        assert seen[0].broken == 10
        assert "Adam made 10 weights non-finite (most in weight, float16)" in str(seen[0])

    def test_mixed_precision_and_the_scaler_refuse_such_weights(self) -> None:
        model = nn.Linear(4, 4).half()
        (words,) = said(lambda: MixedPrecision(model, "float16"))
        assert "Model weights in 16 bits without a float32 master copy lose updates" in words
        scaler, optimizer = DynamicScaler("cpu"), torch.optim.Adam(model.parameters())
        scaler.scale(model(torch.ones(1, 4).half()).float().sum()).backward()
        with pytest.raises(ValueError, match="MasterWeights"):
            scaler.step(optimizer)

    def test_with_masters_the_step_is_right(self) -> None:
        model = nn.Linear(10, 1, bias=False)
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        MasterWeights(model, optimizer, "float16")
        x = torch.zeros(1, 10, dtype=torch.float16)
        x[0, 0] = 1e-4
        model(x).sum().backward()
        before = model.state_dict()["weight"].clone()
        optimizer.step()
        moved = (model.state_dict()["weight"] - before).flatten().tolist()
        # the first step of Adam is lr x g / (|g| + eps)
        assert moved == pytest.approx([-1e-3, *[0.0] * 9], rel=1e-3)


class TestAMP10:
    """bfloat16 weights do not move."""

    def test_the_lost_share_is_told_by_tensor(self) -> None:
        model = nn.Module()
        model.weight = nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
        optimizer = torch.optim.AdamW(model.parameters(), 6e-4, weight_decay=0.0)

        def train() -> None:
            for _ in range(100):
                model.weight.grad = torch.ones(1000, dtype=torch.bfloat16)
                seen = check_step(optimizer, model)
                assert seen.unmoved_frac == 1.0
                assert str(seen).startswith(
                    "100.0% of the updates were lost to rounding: weight (bfloat16) 100.0%."
                )
                assert "Such a loss curve looks flat, though nothing is NaN" in str(seen)

        assert len(set(said(train))) == 1
        assert torch.equal(model.weight, torch.ones(1000, dtype=torch.bfloat16))

    def test_with_masters_they_move_as_in_float32(self) -> None:
        model = nn.Linear(1000, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.AdamW(model.parameters(), 6e-4, weight_decay=0.0)
        MasterWeights(model, optimizer)
        for _ in range(100):
            optimizer.zero_grad()
            model(torch.ones(1, 1000, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
        assert (1 - model.state_dict()["weight"]).mean().item() == pytest.approx(0.06, rel=1e-3)


class Product(torch.autograd.Function):
    """A product whose backward meets saved float32 tensors and 16-bit gradients under autocast."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x.mm(w)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grads[0].mm(w.t()), x.t().mm(grads[0])


class TestAMP11:
    """An autograd Function does not know of autocast."""

    def test_its_module_stays_in_float32_and_all_runs(self) -> None:
        class Custom(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.randn(8, 8))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return Product.apply(x, self.weight)

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), Custom(), nn.Linear(8, 8))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.randn(4, 8)).sum()
        with pytest.raises(RuntimeError, match="dtype"):
            loss.backward()
        mixed = MixedPrecision(model, "bfloat16")

        def train() -> None:
            for _ in range(3):
                model(torch.randn(4, 8)).sum().backward()

        (words,) = said(train)
        assert words.startswith(
            "1 (Custom) stays in float32: its autograd Function Product declares no autocast policy"
        )
        assert list(mixed.kept) == ["1"]
        seen = effective_dtypes(lambda: model(torch.randn(4, 8)).sum().backward(), asked=mixed)
        assert {(r.dtype, r.count) for r in seen.rows if r.op_class == "matmul"} == {
            ("bfloat16", 5), ("float32", 3),
        }  # fmt: skip
        assert (
            "1 is kept in float32: its autograd Function Product declares no autocast policy"
            in seen.verdict
        )


class TestAMP12:
    """Sums and activations overflow in half precision."""

    @pytest.mark.parametrize(
        ("compute", "op"),
        [
            (lambda: torch.ones(70_000, dtype=torch.float16, requires_grad=True).sum(), "sum"),
            (
                lambda: (
                    torch.full((10,), 300.0, dtype=torch.float16, requires_grad=True).square().sum()
                ),
                "pow",
            ),
            (
                lambda: (
                    torch.full((10,), 100.0, dtype=torch.float16, requires_grad=True).square().sum()
                ),
                "sum",
            ),
        ],
        ids=["of many", "of squares beyond it", "of squares within it"],
    )
    def test_the_first_op_is_named_with_float32_for_it_alone(self, compute: Any, op: str) -> None:
        found = find_nonfinite(compute)
        assert found is not None
        assert (found.op, found.value, found.dtype) == (op, "inf", "float16")
        assert "beyond 65504, the largest float16, though no input is" in found.cause
        assert f"Compute this {op} in float32 (x.float()); only it" in found.cure
        assert found.line is not None
        assert "test_kind_3_precision.py" in found.line

    def test_an_activation_by_hand(self) -> None:
        class Activation(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                grown = x * x.exp()  # AMP-12
                return grown / (1 + x.exp())

        found = find_nonfinite(
            Activation(), torch.full((1,), 12.0, dtype=torch.float16, requires_grad=True)
        )
        assert found is not None
        assert found.line is not None
        assert found.line.endswith(line_of("AMP-12"))
        assert (found.op, found.value) == ("exp", "inf")


class TestAMP13:
    """The loss is finite and the gradient is not."""

    def test_the_branch_that_was_not_selected(self) -> None:
        x = torch.tensor([-1.0, -4.0], requires_grad=True)

        def forward_and_backward() -> None:
            root = torch.sqrt(x)  # AMP-13
            torch.where(x > 0, root, x).sum().backward()

        found = find_nonfinite(forward_and_backward)
        assert found is not None
        assert (found.phase, found.op, found.loss_finite) == ("backward", "backward of sqrt", True)
        assert found.line is not None
        assert found.line.endswith(line_of("AMP-13"))
        assert "watching the loss would have missed it" in str(found)
        assert "sqrt(where(x > 0, x, 1))" in found.cure

    def test_the_root_of_a_sum_of_squares_at_0(self) -> None:
        x = torch.zeros(3, requires_grad=True)
        found = find_nonfinite(lambda: x.square().sum().sqrt().backward())
        assert found is not None
        assert (found.phase, found.op) == ("backward", "backward of sqrt")
        assert "torch.linalg.vector_norm" in found.cure
        fresh = torch.zeros(3, requires_grad=True)
        # inside its formula 0/0 is masked: that is no finding
        assert find_nonfinite(lambda: torch.linalg.vector_norm(fresh).backward()) is None


class TestAMP14:
    """Products in float32 without TF32. What TF32 gains and moves needs a GPU (test_precision_on_a_gpu.py, and the section
    tf32 of the benchmark); that a tolerance refuses it is the same code for every dtype."""

    def test_with_a_tolerance_of_1e_5_a_rounding_dtype_is_refused(self) -> None:
        model = nn.Linear(64, 64)
        mixed = MixedPrecision(model, "bfloat16")
        (words,) = said(lambda: mixed.verify(torch.randn(8, 64), tolerance=1e-5))
        assert words.startswith("bfloat16 is taken back: it moves results by ")
        assert "and 1e-05 is allowed" in words
        assert not mixed.active

    def test_a_cpu_has_no_tf32_and_says_so(self) -> None:
        (words,) = said(lambda: MixedPrecision(nn.Linear(4, 4), "tf32"))
        assert words.startswith(
            "tf32 is not used: TF32 is a format of CUDA tensor cores; the model is on a CPU."
        )
