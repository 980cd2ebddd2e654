"""What can be told of the compiler from outside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn

from flopwise.kit import compiler
from flopwise.kit.compiler import (
    break_even_steps,
    call_problem,
    compiler_problem,
    forget,
    frame,
    frames_compiled,
    frames_tried,
    tally,
)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_a_tally_counts_frames_and_breaks() -> None:
    def two(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    before, compiled, tried = tally(), frames_compiled(), frames_tried()
    torch.compile(two, backend="eager")(torch.ones(2))
    made = tally() - before
    assert (made.frames, made.graph_breaks, made.limits) == (2, 1, 0)
    assert made.compile_s > 0
    assert frames_compiled() - compiled == 2
    assert frames_tried() - tried == 2


def test_frames_keep_code_of_their_own_until_they_are_forgotten() -> None:
    layer = nn.Linear(2, 2)
    first, second = frame(layer._call_impl), frame(layer._call_impl)
    assert first.__code__ is not second.__code__
    x = torch.ones(1, 2)
    assert torch.equal(first(x), layer(x))
    before = tally()
    for function in (first, first, second):
        torch.compile(function, backend="eager")(x)
    assert (tally() - before).frames == 2
    forget(first)
    torch.compile(first, backend="eager")(x)
    assert (tally() - before).frames == 3


def test_no_compiler_no_code(monkeypatch: Any) -> None:
    monkeypatch.setattr(compiler.shutil, "which", lambda _: None)
    assert compiler_problem(torch.device("cpu")) == "there is no C++ compiler"
    assert compiler_problem(torch.device("meta")) == "not tested on devices of type meta"


class Calls(nn.Module):
    def __call__(self, x: Any) -> Any:
        return x


def test_a_call_that_passes_on_to_the_modules_own_can_be_compiled() -> None:
    """As transformers' layers have one, for activation checkpointing."""

    def passes_on(self: Any, *args: Any) -> Any:
        return nn.Module.__call__(self, *args)

    own = {"__call__": passes_on, "__module__": "transformers.modeling_layers"}
    base = type("GradientCheckpointingLayer", (nn.Module,), own)
    layer = type("LlamaDecoderLayer", (base,), {"forward": lambda self, x: x + 1})
    assert call_problem(layer()) is None
    other = type("Layer", (layer,), {"__call__": passes_on})
    assert "defines its own __call__" in (call_problem(other()) or "")


def test_whose_call_cannot_be_replaced() -> None:
    compiled = nn.Linear(2, 2)
    compiled.compile(backend="eager")
    reasons = {
        "defines its own __call__": Calls(),
        "was compiled by torch.compile()": torch.compile(nn.Linear(2, 2)),
        "compiled already": compiled,
        "is TorchScript": torch.jit.script(nn.Linear(2, 2)),
        "DataParallel copies": nn.DataParallel(nn.Linear(2, 2)),
    }
    for words, module in reasons.items():
        assert words in (call_problem(module) or ""), words
    assert call_problem(nn.Linear(2, 2)) is None
    kind = type("DistributedDataParallel", (nn.Module,), {})
    assert "compile the module in it" in (call_problem(kind()) or "")


def test_break_even() -> None:
    assert break_even_steps(10.0, 0.5, 0.25) == 40
    assert break_even_steps(10.1, 0.5, 0.25) == 41
    assert break_even_steps(10.0, 0.5, 0.5) is None


@pytest.mark.parametrize(
    "times", [(-1.0, 2.0, 1.0), (1.0, float("nan"), 1.0), (float("inf"), 2.0, 1.0)]
)
def test_times_that_are_none_are_refused(times: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="finite seconds"):
        break_even_steps(*times)
