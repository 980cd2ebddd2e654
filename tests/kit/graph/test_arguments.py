"""Arguments that make no sense: one clear error each, before anything is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from flopwise.errors import GraphError
from flopwise.kit.graph import (
    Buckets,
    CapturedStep,
    compile_in_place,
    compile_regions,
    fastest_optimizer_form,
    fold,
    fusion_report,
    silent_compiles,
    suggest_buckets,
)

NET = nn.Linear(4, 2)
SGD = torch.optim.SGD(NET.parameters(), lr=0.1)
X = torch.ones(2, 4)


def captured(**wrong: Any) -> Callable[[], Any]:
    given = {"step": NET.forward, "model": NET, "optimizer": SGD, **wrong}
    return lambda: CapturedStep(**given)


WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: compile_in_place(None), "compile_in_place takes a torch.nn.Module first, not None"),  # type: ignore[arg-type]
    (lambda: compile_regions("net"), "compile_regions takes a torch.nn.Module first, not 'net'"),  # type: ignore[arg-type]
    (lambda: silent_compiles(SGD), "takes a torch.nn.Module first, not a SGD"),  # type: ignore[arg-type]
    (lambda: fold(None, X), "fold takes a torch.nn.Module first"),  # type: ignore[arg-type]
    (lambda: fusion_report(None, X), "fusion_report takes a torch.nn.Module"),  # type: ignore[arg-type]
    (lambda: fusion_report(NET, X, loss=3), "loss=3: it is a function"),  # type: ignore[arg-type]
    (lambda: fastest_optimizer_form(NET), "takes a torch.optim.Optimizer, not a Linear"),  # type: ignore[arg-type]
    (lambda: fastest_optimizer_form(SGD, rounds=0), "rounds=0: it is a whole number of at least 1"),
    (lambda: compile_in_place(NET, deadline=3), "no setting 'deadline'; there are mode, backend"),
    (lambda: compile_in_place(NET, deadline_s=0), "deadline_s=0: it is a number above 0"),
    (lambda: compile_in_place(NET, deadline_s="3"), "deadline_s='3': it is a number"),
    (lambda: compile_in_place(NET, most_breaks=-1), "most_breaks=-1: it is a whole number"),
    (lambda: compile_in_place(NET, steps_left=1.5), "steps_left=1.5: it is a whole number"),
    (lambda: compile_regions(NET, regions="Block"), "regions='Block': it is a class, several, or"),  # type: ignore[arg-type]
    (lambda: compile_regions(NET, regions=[NET]), "it is a class, several, or a function"),  # type: ignore[list-item]
    (captured(step=None), "step is a function that makes one training step, not None"),
    (captured(model=None), "model is Module or a list of them, not None"),
    (captured(model=SGD, optimizer=NET), "model is Module or a list of them, not a SGD"),
    (captured(model=["net"]), "model is Module or a list of them, and 'net' is in the list"),
    (captured(model=[]), "and nothing is in the list"),
    (captured(optimizer=NET.parameters()), "optimizer is Optimizer .* and a Parameter is in the"),
    (captured(scaler="s"), "scaler='s' has not the methods of torch.amp.GradScaler"),
    (captured(state=3), "state is a list of modules, tensors and the like, not 3"),
    (captured(state=["ema"]), "state holds 'ema', which is no module or tensor"),
    (captured(buckets=(8, 16)), r"buckets=\(8, 16\): it is a Buckets"),
    (captured(warm_up=1), "warm_up=1: it is a whole number of at least 2"),
    (captured(warm_up=2.5), "warm_up=2.5: it is a whole number"),
    (captured(verify=0), "verify=0: it is a whole number of at least 1"),
    (captured(recheck_every=-3), "recheck_every=-3"),
    (captured(most_graphs=0), "most_graphs=0"),
    (captured(patience=True), "patience=True"),
    (lambda: Buckets(8), "several sizes of 1 or more, not 8"),  # type: ignore[arg-type]
    (lambda: Buckets("abc"), "several sizes of 1 or more, not 'abc'"),  # type: ignore[arg-type]
    (lambda: Buckets((8.5,)), "whole sizes of 1 or more"),  # type: ignore[arg-type]
    (lambda: Buckets((8,), dim=-1), "dim=-1: it is a whole number of at least 0"),
    (lambda: Buckets((8,), fill="x"), "fill='x': it is a number"),  # type: ignore[arg-type]
    (lambda: suggest_buckets([1, 3], -1), "most_padding_frac=-1: it is a share"),
    (lambda: suggest_buckets([1, 3], multiple=0), "multiple=0: it is a whole number"),
    (lambda: suggest_buckets("abc"), "sizes of 1 or more, not 'abc'"),  # type: ignore[arg-type]
    (lambda: suggest_buckets({4: -1}), "size 4, seen -1 times"),
]


@pytest.mark.parametrize(("call", "match"), WRONG, ids=[match[:40] for _, match in WRONG])
def test_wrong_arguments_are_one_clear_error(call: Callable[[], Any], match: str) -> None:
    with pytest.raises(GraphError, match=match):
        call()


def test_single_things_need_no_list() -> None:
    average = nn.Linear(4, 2)
    step = CapturedStep(NET.forward, [NET], (SGD,), state=average)  # type: ignore[arg-type]
    assert average in step._parts.modules
    tensor = torch.ones(3)
    assert CapturedStep(NET.forward, NET, SGD, state=tensor)._parts.tensors == [tensor]
