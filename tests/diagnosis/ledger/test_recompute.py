"""A forward that runs again: real operators of a CPU, kernels added by hand."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from flopwise.diagnosis.ledger.recompute import recomputed
from flopwise.trace.chrome import read
from flopwise.trace.launches import launches

PRODUCT = "aten::addmm"


@pytest.fixture
def kernels_of(tmp_path: Path) -> Callable[[Callable[[], Any]], Counter[tuple[str, bool]]]:
    """Returns a function that records a training step, gives each leaf operator a kernel, and counts by name what is run again."""

    def run(step: Callable[[], Any]) -> Counter[tuple[str, bool]]:
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
            step()
        path = tmp_path / "trace.json"
        recorded.export_chrome_trace(str(path))
        content = json.loads(path.read_text("utf-8"))
        ops = [e for e in content["traceEvents"] if e.get("cat") == "cpu_op"]
        at = max(e["ts"] + e["dur"] for e in ops)
        for n, op in enumerate(ops):
            call = {"External id": op["args"]["External id"], "correlation": n + 1}
            common = {"ph": "X", "dur": 1, "name": op["name"]}
            content["traceEvents"] += [
                {**common, "cat": "cuda_runtime", "pid": op["pid"], "tid": op["tid"],
                 "ts": op["ts"] + 0.4 * op["dur"], "args": call},
                {**common, "cat": "kernel", "pid": 0, "tid": 7, "ts": at + 2 * n,
                 "args": {**call, "device": 0, "stream": 7}},
            ]  # fmt: skip
        path.write_text(json.dumps(content), "utf-8")
        events = read(path).events
        work = launches(events, 0)
        again = recomputed(events, work)
        return Counter(
            (events.name_of(int(row)), bool(flag))
            for row, flag in zip(work.rows, again, strict=True)
        )

    return run


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))


def test_a_plain_step_runs_nothing_again(kernels_of: Any, net: nn.Module) -> None:
    found = kernels_of(lambda: net(torch.randn(4, 8)).sum().backward())
    assert found[PRODUCT, False] == 2
    assert found["aten::mm", False] > 0  # of the backward
    assert not [name for (name, again) in found if again]


@pytest.mark.parametrize("reentrant", [True, False])
def test_both_kinds_of_checkpoint(kernels_of: Any, net: nn.Module, reentrant: bool) -> None:
    def step() -> None:
        x = torch.randn(4, 8, requires_grad=True)
        checkpoint(net, x, use_reentrant=reentrant).sum().backward()

    found = kernels_of(step)
    # what runs again: the first layer and, unless it stops as soon as all is there, the last one
    assert found[PRODUCT, False] == 2
    assert found[PRODUCT, True] == 2
    assert found["aten::gelu", True] == 1
    # gradients are no forward
    assert found["aten::mm", True] == 0
    assert found["aten::mm", False] == 4
    assert found["aten::gelu_backward", True] == 0


def test_a_backward_that_is_differentiated_is_no_forward(kernels_of: Any) -> None:
    def step() -> None:
        x = torch.randn(4, 8, requires_grad=True)
        y = (x @ torch.randn(8, 8, requires_grad=True)).tanh().sum()
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        grad.square().sum().backward()

    found = kernels_of(step)
    assert not [name for (name, again) in found if again]


def test_a_trace_without_a_backward(timeline: Any) -> None:
    op = timeline.op("aten::linear", 10, 10)
    timeline.kernel("gemm", 30, 5, at=12, op=op)
    events = timeline.read().events
    assert recomputed(events, launches(events, 0)).tolist() == [False]
