"""What is known of an op while it runs: module, line, and in backward its forward's."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from flopwise.kit.precision.watching import (
    call_of,
    current_node,
    device_type,
    forward_line,
    modules_of,
    nodes_behind,
)


class Watch(TorchDispatchMode):
    def __init__(self, where: Any) -> None:
        super().__init__()
        self.where, self.seen = where, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        node = current_node()
        self.seen.append(
            (func._schema.name, self.where.module(), node is not None, forward_line(node))
        )
        return func(*args, **(kwargs or {}))


def test_ops_belong_to_their_module_in_forward_and_backward() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    with modules_of(net) as where, Watch(where) as watch:
        (net(torch.ones(1, 2)) * 2).sum().backward()
    of = {
        (name.removeprefix("aten::"), backward): module for name, module, backward, _ in watch.seen
    }
    assert of["addmm", False] == "0"
    assert of["relu", False] == "1.0"
    assert of["mul", False] is None
    assert of["threshold_backward", True] == "1.0"
    assert of["mm", True] == "0"
    assert of["mul", True] is None
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in net.modules())


def test_a_module_that_fails_leaves_the_stack() -> None:
    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError

    net = nn.Sequential(Failing())
    with modules_of(net) as where:
        for _ in range(2):
            try:
                net(torch.ones(1))
            except ValueError:
                assert where.module() is None


def test_the_line_of_the_forward_is_kept_by_anomaly_mode() -> None:
    x = torch.ones(1, requires_grad=True)
    anomaly = torch.autograd.set_detect_anomaly(True, check_nan=False)
    with modules_of(None) as where, anomaly, Watch(where) as watch:
        x.sqrt().sum().backward()
    lines = [line for name, _, backward, line in watch.seen if backward and name == "aten::div"]
    assert lines
    assert all(line is not None and "test_watching.py:" in line for line in lines)


def test_nodes_behind_are_each_seen_once() -> None:
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    z = y + y.exp()
    names = [type(n).__name__ for n in nodes_behind(z.grad_fn)]
    assert sorted(names) == ["AccumulateGrad", "AddBackward0", "ExpBackward0", "MulBackward0"]
    seen: set[Any] = set()
    assert len(list(nodes_behind(y.grad_fn, seen=seen))) == 2
    assert len(list(nodes_behind(z.grad_fn, None, seen=seen))) == 2


def test_calls_are_converted_for_the_formulas() -> None:
    a, b = torch.ones(2, 3), torch.ones(3, 4)
    call = call_of(torch.ops.aten.mm.default, (a, b), {}, a @ b)
    assert call.name == "aten::mm"
    assert call.outs[0].shape == (2, 4)


def test_a_tensor_that_holds_float8_is_told_by_what_it_holds() -> None:
    class Holding(torch.Tensor):
        @staticmethod
        def __new__(cls, data: torch.Tensor) -> Any:
            made = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.bfloat16)
            made._data = data
            return made

        @classmethod
        def __torch_dispatch__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return NotImplemented

    held = Holding(torch.zeros(2, 3, dtype=torch.float8_e4m3fn))
    plain = torch.zeros(3, 4, dtype=torch.bfloat16)
    call = call_of(torch.ops.aten.mm.default, (held, plain), {}, plain)
    assert [call.args[name].dtype for name in ("self", "mat2")] == ["float8_e4m3fn", "bfloat16"]


def test_the_device_is_that_of_the_parameters() -> None:
    assert device_type(nn.Linear(1, 1)) == "cpu"
    assert device_type(nn.Linear(1, 1, device="meta")) == "meta"
