from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from flopwise.errors import FlopwiseError
from flopwise.kit.memory import (
    ArgumentError,
    audit_alignment,
    checkpoint_blocks,
    choose_channels_last,
    choose_cudnn_benchmark,
    copied_objects,
    empty_cache_cost,
    held_back,
    memory_timeline,
    pad_dimensions,
    pinned_plan,
)
from flopwise.kit.memory.arguments import need_optimizers


def net() -> Any:
    return nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 6))


def never() -> None:
    raise AssertionError("nothing is run with wrong arguments")


def enter(context: Any) -> None:
    with context:
        never()


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: pad_dimensions("net"), "pad_dimensions: module is a str; a torch.nn.Module is"),  # type: ignore[arg-type]
        (lambda: pad_dimensions(net(), net()), "step is a Sequential; a function without arg"),
        (lambda: pad_dimensions(net(), torch.ones(1)), "step is a Tensor; a function without"),  # type: ignore[arg-type]
        (lambda: pad_dimensions(net(), multiple=64.0), "multiple=64.0; a whole number from 1"),  # type: ignore[arg-type]
        (lambda: pad_dimensions(net(), multiple=True), "multiple=True; a whole number from 1"),
        (lambda: pad_dimensions(net(), multiple=48), "multiple=48; a power of two is meant"),
        (lambda: pad_dimensions(net(), multiple=0), "multiple=0; a whole number from 1 on"),
        (lambda: pad_dimensions(net(), most_extra_frac=-1), "most_extra_frac=-1; a number from 0"),
        (lambda: pad_dimensions(net(), most_extra_frac=math.nan), "most_extra_frac=nan; a number"),
        (lambda: pad_dimensions(net(), dtype=torch.int8), "dtype=torch.int8; one that products"),
        (lambda: pad_dimensions(net(), dtype="bfloat16"), "dtype='bfloat16'; one that products"),  # type: ignore[arg-type]
        (lambda: pad_dimensions(net(), never, rounds=-1), "rounds=-1; a whole number from 0"),
        (lambda: checkpoint_blocks(net(), never, "60 GB"), "target_bytes='60 GB'; a number"),  # type: ignore[arg-type]
        (lambda: checkpoint_blocks(net(), never, math.nan), "target_bytes=nan; a number from 0"),
        (lambda: checkpoint_blocks(net(), never, -1), "target_bytes=-1; a number from 0 on"),
        (lambda: checkpoint_blocks(net(), never, 1, blocks="0"), "blocks='0'; a list of names"),
        (lambda: checkpoint_blocks(net(), never, 1, blocks=[0]), r"blocks=\[0\]; a list of names"),  # type: ignore[list-item]
        (lambda: checkpoint_blocks(net(), never, 1, blocks=["0", "0.l"]), '"0.l" lies in "0"'),
        (lambda: checkpoint_blocks(net(), never, 1, blocks=["", "0"]), '"0" lies in ""'),
        (lambda: checkpoint_blocks(net(), never, 1, blocks=["x"]), r"no modules named \['x'\]"),
        (
            lambda: checkpoint_blocks(torch.compile(net(), backend="eager"), never, 1),
            "checkpoint_blocks: the module is compiled: choose on the module that it was made from",
        ),
        (
            lambda: audit_alignment(nn.LazyLinear(3), never),
            "weight has no size yet: run the module",
        ),
        (lambda: audit_alignment(nn.LazyBatchNorm1d(affine=False), never), "running_mean has no s"),
        (lambda: audit_alignment(net, never), "audit_alignment: module is a function"),  # type: ignore[arg-type]
        (lambda: audit_alignment(net(), None), "audit_alignment: step is a NoneType"),  # type: ignore[arg-type]
        (lambda: enter(memory_timeline(net(), net())), "memory_timeline: a Linear among the op"),
        (lambda: enter(memory_timeline(net(), 3)), "memory_timeline: a int among the optimizers"),  # type: ignore[arg-type]
        (lambda: choose_channels_last(net(), never, optimizers=[1]), "a int among the optimizers"),  # type: ignore[list-item]
        (lambda: choose_cudnn_benchmark(net(), never, steps=0), "steps=0; a whole number from 2"),
        (lambda: empty_cache_cost(net()), "empty_cache_cost: step is a Sequential"),
        (lambda: enter(held_back(math.nan)), "held_back: free_frac=nan; a number from 0 on"),
        (lambda: pinned_plan([1, -1]), "a size in sizes_bytes=-1; a whole number from 0 on"),
        (lambda: copied_objects([], -1), "copied_objects: workers=-1; a whole number from 0 on"),
    ],
)
def test_there_is_one_clear_error_and_nothing_has_run(
    call: Callable[[], object], told: str
) -> None:
    with pytest.raises(ArgumentError, match=told) as raised:
        call()
    assert isinstance(raised.value, FlopwiseError)
    assert isinstance(raised.value, ValueError)


def test_one_optimizer_is_as_good_as_a_list_of_one() -> None:
    optimizer = torch.optim.SGD(net().parameters(), 0.1)
    assert need_optimizers("", optimizer) == need_optimizers("", [optimizer]) == [optimizer]
    assert need_optimizers("", ()) == []
