"""Folded evaluation graphs: fewer operations, the same results, the original untouched."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flopwise.errors import GraphError
from flopwise.kit.graph import fold_passes, folding
from flopwise.kit.graph.folding import fold


class Net(nn.Module):
    """A convolution and a linear layer, each with its norm, dropout, and weights that are computed anew each call."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.linear, self.norm1 = nn.Linear(8, 4), nn.BatchNorm1d(4)
        self.drop, self.log_scale = (
            nn.Dropout(0.5),
            nn.Parameter(torch.tensor([0.1, 0.2, 0.3, 0.4])),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        x = self.drop(self.norm1(self.linear(x)))
        return x * torch.exp(self.log_scale) + torch.arange(4) * 2.0


def trained(model: nn.Module, *shape: int) -> nn.Module:
    """Gives batch norms statistics of their own."""
    torch.manual_seed(0)
    for part in model.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            nn.init.uniform_(part.running_mean, -1, 1)
            nn.init.uniform_(part.running_var, 0.5, 2)
            if part.affine:
                nn.init.uniform_(part.weight, 0.5, 2)
                nn.init.uniform_(part.bias, -1, 1)
    return model.eval()


def test_norms_dropout_and_constants_go() -> None:
    model = trained(Net())
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(4, 3, 6, 6)
    folded = fold(model, x)
    report = folded.report
    assert report.folded == {
        "identities": 1, "conv+bn": 1, "linear+bn": 1, "constants": 2,
        "branches": 0, "dead": 3, "relu in place": 1,
    }  # fmt: skip
    assert (report.nodes_before, report.nodes_after) == (12, 6)
    # exp, arange and its product are computed once; two norms are gone.
    assert (report.kernels_before, report.kernels_after) == (11, 6)
    assert report.error_after < 1e-5
    torch.testing.assert_close(folded(x), model(x), rtol=1e-4, atol=1e-5)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert str(report).startswith(
        "12 nodes to 6, 11 kernels to 6 (1 identities, 1 conv+bn, 1 linear+bn"
    )


def test_nothing_is_shared_with_the_original() -> None:
    model = trained(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    x = torch.randn(4, 4)
    folded = fold(model, x)
    expected = folded(x).clone()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert torch.equal(folded(x), expected)


def test_another_batch_size_and_a_frozen_one() -> None:
    model = trained(Net())
    folded = fold(model, torch.randn(4, 3, 6, 6))
    x = torch.randn(9, 3, 6, 6)
    torch.testing.assert_close(folded(x), model(x), rtol=1e-4, atol=1e-5)
    single = fold(model, x[:1])
    torch.testing.assert_close(single(x[:1]), model(x[:1]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("conv", "norm", "shape"),
    [
        (nn.Conv1d(4, 6, 3, padding="same"), nn.BatchNorm1d(6), (2, 4, 9)),
        (nn.Conv2d(4, 8, 3, groups=2, stride=2), nn.BatchNorm2d(8, affine=False), (2, 4, 9, 9)),
        (nn.Conv3d(2, 3, 2, bias=False), nn.BatchNorm3d(3), (2, 2, 4, 4, 4)),
    ],
)
def test_convolutions_of_every_rank(conv: nn.Module, norm: nn.Module, shape: Any) -> None:
    model = trained(nn.Sequential(conv, norm, nn.ReLU()))
    x = torch.randn(*shape)
    folded = fold(model, x)
    assert folded.report.folded["conv+bn"] == 1
    assert folded.report.nodes_after == 2
    torch.testing.assert_close(folded(x), model(x), rtol=1e-4, atol=1e-5)


def test_a_convolution_that_is_read_elsewhere_too_keeps_its_norm() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.conv(x)
            return y + self.norm(y)

    model = trained(Both())
    x = torch.randn(2, 2, 3, 3)
    folded = fold(model, x)
    assert folded.report.folded["conv+bn"] == 0
    assert folded.report.nodes_after == folded.report.nodes_before
    torch.testing.assert_close(folded(x), model(x))


def test_a_norm_over_another_dimension_than_the_features_stays() -> None:
    model = trained(nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(3)))
    x = torch.randn(2, 3, 5)
    folded = fold(model, x)
    assert folded.report.folded["linear+bn"] == 0
    torch.testing.assert_close(folded(x), model(x))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # eager `torch.cond` compiles
def test_branches_on_constant_conditions_are_chosen() -> None:
    class Branches(nn.Module):
        def __init__(self, on: bool) -> None:
            super().__init__()
            self.register_buffer("on", torch.tensor(on))
            self.register_buffer("mask", torch.ones(4, dtype=torch.bool))
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.where(self.mask, self.a(x), self.b(x))
            return torch.cond(self.on, lambda x: x.sin(), lambda x: x.cos().exp(), (x,))

    for on in (True, False):
        model = Branches(on).eval()
        x = torch.randn(3, 4)
        folded = fold(model, x)
        report = folded.report
        assert report.folded["branches"] == 2
        assert report.folded["dead"] == 1  # the other linear layer
        assert report.nodes_after == (2 if on else 3)
        assert torch.equal(folded(x), model(x))
        assert len(list(folded.graph.parameters())) == 2


def test_random_and_changing_operations_are_no_constants() -> None:
    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            return x * self.weight + 0 * torch.rand_like(self.weight) + self.calls * 2

    folded = fold(Draws().eval(), torch.ones(2, 3))
    first, second = folded(torch.ones(2, 3)), folded(torch.ones(2, 3))
    assert torch.equal(second, first + 2)
    assert folded.report.folded["constants"] == 0


def test_constants_much_larger_than_their_inputs_are_left() -> None:
    class Large(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.ones(1024, 1024).cumsum(0)

    folded = fold(Large().eval(), torch.ones(2, 1, 1))
    assert folded.report.folded["constants"] == 0


def test_training_mode_is_declined() -> None:
    with pytest.raises(
        GraphError, match=r"Net cannot be folded: the model is in training mode; call .eval\(\)"
    ):
        fold(Net(), torch.randn(2, 3, 6, 6))
    model = trained(Net())
    model.drop.train()
    with pytest.raises(GraphError, match="drop is in training mode"):
        fold(model, torch.randn(2, 3, 6, 6))
    folded = fold(trained(Net()), torch.randn(2, 3, 6, 6))
    with pytest.raises(GraphError, match="a folded model cannot be trained"):
        folded.train()
    assert folded.eval() is folded


def test_torchscript_and_what_cannot_be_exported_are_declined() -> None:
    with pytest.raises(GraphError, match=r"TorchScript, which has torch.jit.freeze"):
        fold(torch.jit.script(nn.Linear(2, 2)).eval(), torch.ones(2, 2))

    class Data(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.sum().item() > 0 else x

    with pytest.raises(GraphError, match=r"Data cannot be folded: torch.export fails \("):
        fold(Data().eval(), torch.ones(2, 2))


def test_a_wrong_fold_is_not_handed_out(monkeypatch: Any) -> None:
    right = fold_passes._folded
    monkeypatch.setattr(fold_passes, "_folded", lambda *a: [t * 1.01 for t in right(*a)])
    with pytest.raises(
        GraphError, match=r"Net is not folded: its error is 0.0\d+, the model's .*, allowed"
    ):
        fold(trained(Net()), torch.randn(2, 3, 6, 6))


def test_both_are_timed_on_request() -> None:
    report = fold(trained(Net()), torch.randn(2, 3, 6, 6), measure=True).report
    assert report.before_s > 0
    assert report.after_s > 0
    assert " ms to " in str(report)


def test_cudnn_takes_convolution_and_relu_together() -> None:
    """The rewriting alone: the call itself needs a GPU."""
    model = trained(nn.Sequential(nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.ReLU()))
    graph = torch.export.export(model, (torch.randn(2, 3, 6, 6),)).module()
    assert fold_passes.fuse_relu(graph) == 1
    (node,) = [n for n in graph.graph.nodes if n.op == "call_function"]
    assert node.target is torch.ops.aten.cudnn_convolution_relu.default
    assert list(node.args[3:]) == [[2, 2], [1, 1], [1, 1], 1]
    graph.graph.lint()


def test_keywords_and_autocast_dtypes() -> None:
    class Named(nn.Module):
        def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
            return F.relu(x) * scale

    model = Named().eval()
    x, scale = torch.randn(3, 4), torch.ones(4)
    assert torch.equal(fold(model, x, scale=scale)(x, scale=scale), model(x, scale=scale))
    half = trained(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))).to(torch.bfloat16)
    report = fold(half, torch.randn(8, 4, dtype=torch.bfloat16)).report
    assert report.error_before is not None
    assert report.error_after <= 10 * report.error_before


def test_the_check_names_its_allowance() -> None:
    assert (folding.MOST_TIMES, folding.FEWEST_ROUNDOFFS) == (10.0, 32.0)


@pytest.mark.parametrize(
    ("fused_s", "raises", "taken"), [(1.0, False, True), (3.0, False, False), (1.0, True, False)]
)
def test_the_cudnn_call_is_taken_if_it_is_right_and_faster(
    monkeypatch: Any, fused_s: float, raises: bool, taken: bool
) -> None:
    """On a GPU; here the rewriting is another one, that a CPU can run."""

    def rewrite(module: Any) -> int:
        for node in module.graph.nodes:
            if node.target is torch.ops.aten.relu_.default:
                node.target = torch.ops.aten.relu.default
        return 1

    def measure(arms: Any, *_: Any, **__: Any) -> dict[str, float]:
        for arm in arms.values():
            arm()
        if raises:
            raise RuntimeError("CUDNN_STATUS_NOT_SUPPORTED")
        return {"apart": 2.0, "fused": fused_s}

    model = trained(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()))
    x = torch.randn(2, 3, 6, 6)
    folded = fold(model, x)
    before = folded.graph
    monkeypatch.setattr(fold_passes, "fuse_relu", rewrite)
    monkeypatch.setattr(folding, "interleaved", measure)
    done: dict[str, int] = {}
    with torch.no_grad():
        folding._try_cudnn_relu(model, folded, (x,), {}, done, lambda: None)
    assert (folded.graph is not before) is taken
    assert done == ({"conv+relu in one call": 1} if taken else {})
    torch.testing.assert_close(folded(x), model(x))


def test_a_forward_that_writes_to_its_input_is_folded_and_the_example_left() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.add_(1)
            return self.norm(self.conv(x))

    model = trained(Writes())
    x = torch.randn(3, 2, 4, 4)
    before = x.clone()
    folded = fold(model, x)
    assert torch.equal(x, before)
    assert folded.report.folded["conv+bn"] == 1
    torch.testing.assert_close(folded(x.clone()), model(x.clone()), rtol=1e-4, atol=1e-5)


def test_a_report_without_kernels_says_nothing_of_them() -> None:
    report = folding.FoldReport(5, 3, None, None, {"constants": 2}, None, 1e-7, None, None)
    assert str(report) == "5 nodes to 3 (2 constants); error 1.0e-07"
    branches = dataclasses.replace(report, kernels_after=4)
    assert str(branches) == "5 nodes to 3, unknown kernels to 4 (2 constants); error 1.0e-07"


def _into_zeros(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = torch.zeros(4, 4)
    h += x
    return h


def _into_a_view(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = self.weight * 2
    h[0] += x[0]
    return h @ x


def _into_a_cache(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.cache[:2].copy_(x[:2])
    return self.cache.sum(0) * 2 + x


def _into_a_copy(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = x.to(torch.float32, copy=True)
    h.mul_(2)
    return h + x


def _counts(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.cache += 1
    return x * self.cache


def _hands_out(self: Any, x: torch.Tensor) -> Any:
    return x + 1, (self.weight * 2).t()


def _draws(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(4)


@pytest.mark.parametrize(
    "forward",
    [_into_zeros, _into_a_view, _into_a_cache, _into_a_copy, _counts, _hands_out, _draws],
)
def test_what_a_call_writes_to_is_made_anew_in_every_call(forward: Any) -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))
            self.register_buffer("cache", torch.zeros(4, 4))
            self.calls = 0

        def forward(self, x: torch.Tensor) -> Any:
            self.calls += 1
            return forward(self, x)

    torch.manual_seed(0)
    model, x = Writes().eval(), torch.randn(4, 4)
    twin, before, rng = copy.deepcopy(model), x.clone(), torch.get_rng_state()
    folded = fold(model, x, measure=True)
    # Neither the model nor random numbers nor the example have moved, and the folded graph starts where the model is.
    assert torch.equal(torch.get_rng_state(), rng)
    assert torch.equal(x, before)
    assert model.calls == 0
    for a, b in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    for k in range(3):
        with torch.no_grad():
            torch.manual_seed(k)
            expected = twin(x + k)
            torch.manual_seed(k)
            found = folded(x + k)
        if isinstance(found, torch.Tensor):
            found, expected = [found], [expected]
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)
            a.add_(1)  # what is handed out is the caller's
