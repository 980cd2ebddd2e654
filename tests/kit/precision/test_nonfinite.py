"""Where a step first is not finite, and that looking changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flopwise.kit.precision import MixedPrecision, find_nonfinite


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.dropout(self.norm(self.a(x)), 0.5, True)).sum()


def test_a_finite_step_has_no_finding_and_is_left_as_it_was() -> None:
    net, x = Net(), torch.randn(8, 4)
    net(x).backward()
    grads = [p.grad for p in net.parameters()]
    values = [g.clone() for g in grads if g is not None]
    buffers = {n: b.clone() for n, b in net.named_buffers()}
    state = torch.random.get_rng_state()
    assert find_nonfinite(net, x) is None
    assert all(p.grad is g for p, g in zip(net.parameters(), grads, strict=True))
    assert all(torch.equal(g, v) for g, v in zip(grads, values, strict=True))  # type: ignore[arg-type]
    assert all(torch.equal(b, buffers[n]) for n, b in net.named_buffers())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(not m._forward_hooks for m in net.modules())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_batch_is_at_fault_itself(value: float) -> None:
    x = torch.randn(8, 4)
    x[3, 2] = value
    found = find_nonfinite(Net(), x)
    assert found is not None
    assert found.phase == "input"
    assert str(found).startswith(
        f"{'NaN' if value != value else 'inf'} is in tensor 0 of the batch"
    )
    assert "The data are at fault" in str(found)


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_a_weight_or_buffer_that_was_bad_before_is_named(kind: str) -> None:
    net = Net()
    with torch.no_grad():
        if kind == "parameter":
            net.b.weight[0, 1] = float("nan")
        else:
            net.norm.running_mean[0] = float("nan")  # type: ignore[index]
            net.eval()
    found = find_nonfinite(net, torch.randn(8, 4))
    assert found is not None
    assert found.phase == "input"
    assert found.op == ("parameter b.weight" if kind == "parameter" else "buffer norm.running_mean")


def test_the_first_of_several_is_named_with_module_and_line() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.layer(x).abs() * 0
            return (1 / h).log().sum()

    found = find_nonfinite(Model(), torch.randn(2, 4))
    assert found is not None
    assert (found.phase, found.op, found.module, found.value) == (
        "forward",
        "reciprocal",
        "",
        "inf",
    )
    assert found.line is not None
    assert "test_nonfinite.py" in found.line
    assert str(found).startswith("First inf in forward: reciprocal of the model at ")


def test_a_step_that_refuses_the_bad_value_still_has_its_finding() -> None:
    def step(x: torch.Tensor) -> None:
        bad = (x - x).log()
        if not torch.isfinite(bad).all():
            raise RuntimeError("loss is not finite")

    found = find_nonfinite(step, torch.ones(2, requires_grad=True))
    assert found is not None
    assert found.op == "log"


@pytest.mark.parametrize(
    "step",
    [
        lambda x: (
            (1 / (x - x)).clamp(max=10.0).sum().backward()
        ),  # its gradient is 0 where it is clamped
        lambda x: torch.minimum(x, torch.full((4,), float("inf"))).sum().backward(),
        lambda x: x.masked_fill(x > 5, float("inf")).min().backward(),
    ],
    ids=["clamped", "a bound of inf", "a fill of inf"],
)
def test_what_does_not_reach_the_loss_or_a_gradient_is_no_finding(step: Any) -> None:
    x = torch.ones(4, requires_grad=True)
    found = find_nonfinite(step, x)
    if found is not None:  # 0 x inf in backward of the quotient
        assert found.phase == "backward"
        assert x.grad is None or not torch.isfinite(x.grad).all()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_loss_that_takes_a_masked_logit_is_found(smoothing: float) -> None:
    logits = torch.zeros(2, 3, requires_grad=True)
    hidden = torch.tensor([[False, False, True], [False, False, True]])

    def step() -> None:
        masked = logits.masked_fill(hidden, float("-inf"))
        target = torch.tensor([0, 2 if smoothing == 0 else 1])
        nn.functional.cross_entropy(masked, target, label_smoothing=smoothing).backward()

    found = find_nonfinite(step)
    assert found is not None
    assert (found.phase, found.value, found.loss_finite) == ("forward", "inf", False)
    assert "-inf went in, as masks have it, and was used" in found.cause
    assert (
        find_nonfinite(
            lambda: nn.functional.cross_entropy(
                logits.masked_fill(hidden, float("-inf")), torch.tensor([0, 1])
            ).backward()
        )
        is None
    )


def test_a_loss_is_told_from_metrics_before_backward() -> None:
    def step(x: torch.Tensor) -> None:
        loss = (x - x).log().sum()
        (x > 0).float().mean()  # finite, and later
        loss.backward()

    found = find_nonfinite(step, torch.ones(3, requires_grad=True))
    assert found is not None
    assert (found.phase, found.op, found.loss_finite) == ("forward", "log", False)
    assert "log of 0" in found.cause


def test_a_mask_is_not_blamed_for_another_op() -> None:
    def step(x: torch.Tensor) -> None:
        least = torch.finfo(torch.bfloat16).min
        mask = torch.full((3,), least, dtype=torch.bfloat16) + least
        ((x.bfloat16() + mask).softmax(-1).sum() * 0 + (x - 2).sqrt().sum()).backward()

    found = find_nonfinite(step, torch.ones(3, requires_grad=True))
    assert found is not None
    assert found.op in ("softmax", "sqrt")  # both are; the sum of masks is not


def test_an_error_of_the_step_itself_is_raised() -> None:
    def step() -> None:
        raise RuntimeError("of its own")

    with pytest.raises(RuntimeError, match="of its own"):
        find_nonfinite(step)


@pytest.mark.parametrize("name", ["dict", "object", "tensors"])
def test_the_loss_of_a_module_is_found_by_its_name(name: str) -> None:
    class Out:
        def __init__(self, loss: torch.Tensor) -> None:
            self.loss = loss

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(3))

        def forward(self) -> Any:
            loss = self.w.square().sum().sqrt()
            return {
                "dict": {"loss": loss, "more": 1},
                "object": Out(loss),
                "tensors": (loss, loss),
            }[name]

    found = find_nonfinite(Model())
    assert found is not None
    assert (found.phase, found.op, found.loss_finite) == ("backward", "backward of sqrt", True)


def test_lazy_layers_are_made_by_the_step() -> None:
    assert find_nonfinite(nn.Sequential(nn.LazyLinear(2)), torch.ones(2, 4)) is None


def test_uninitialised_memory_is_no_finding() -> None:
    def step(x: torch.Tensor) -> None:
        made = torch.empty(1000)
        made.copy_(x)
        (made * 2).sum()

    garbage = torch.full((1000,), float("nan"))
    del garbage  # its memory is likely to be given out again
    assert find_nonfinite(step, torch.ones(1000)) is None


def test_mixed_precision_and_compiled_modules_are_looked_into() -> None:
    class Big(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.layer(x) * 30_000).square().sum()

    torch.manual_seed(0)
    model = Big()
    model.compile(backend="eager")
    MixedPrecision(model, "float16")
    found = find_nonfinite(model, torch.ones(2, 4) * 10)
    assert found is not None
    assert (found.dtype, found.value) == ("float16", "inf")
    assert "only it, the rest can stay" in found.cure


def test_a_models_named_arguments_are_passed_on() -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.layer(x)
            return {"loss": (logits - labels).abs().sqrt().sum(), "logits": logits}

    model, x = WithLoss(), torch.ones(1, 2)
    assert find_nonfinite(model, x, labels=x) is None
    found = find_nonfinite(model, x, labels=model.layer(x).detach())
    assert found is not None
    assert (found.phase, found.op) == ("backward", "backward of sqrt")
    came_in = find_nonfinite(model, x, labels=x / 0)
    assert came_in is not None
    assert (came_in.phase, came_in.value) == ("input", "inf")


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensors_are_looked_into(layout: torch.layout) -> None:
    eye = torch.eye(2).to_sparse(layout=layout)
    assert find_nonfinite(lambda: (eye * 2.0).to_dense().sum()) is None
    found = find_nonfinite(lambda: (eye * float("nan")).to_dense().sum())
    assert found is not None
    assert found.value == "NaN"
