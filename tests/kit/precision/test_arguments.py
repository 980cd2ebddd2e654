"""One clear error for what arguments must not be."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from flopwise.errors import PrecisionError
from flopwise.kit.precision import (
    DynamicScaler,
    MasterWeights,
    MixedPrecision,
    arguments,
    check_step,
    effective_dtypes,
    find_nonfinite,
    weight_memory,
)

HOSTILE: Any = {
    "review_steps": (0, -1, 2.5, True, "a", None),
    "headroom": (3, 0.5, "x", None, math.inf, math.nan),
    "init_scale": (0, -1, math.nan, math.inf, "1", 2.0**127),
    "min_scale": (0, 3.0, math.nan, "x", 2.0**25, 2.0**-200),
    "max_scale": (0, 3.0, math.inf, None),
    "growth_factor": (1.0, math.inf, "x"),
    "backoff_factor": (0, 1, 2, math.nan),
    "growth_interval": (0, 1.5),
    "alarm_skips": (0, "x"),
    "alarm_frac": (0, 1.1, math.nan, "x"),
    "schedule": ("x", None),
    "unfused": ("x", None),
    "model": (3, "net"),
    "device": ("gpu", 3.5, object()),
    "process_group": (5, "world", False),
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in HOSTILE.items() for value in values]
)
def test_arguments_of_the_scaler(name: str, value: Any) -> None:
    with pytest.raises(PrecisionError, match=name):
        DynamicScaler(**{"device": "cpu", name: value})


@pytest.mark.parametrize("device", [torch.device("cpu"), "cpu:0", "cpu"])
def test_a_device_is_one_in_any_form(device: Any) -> None:
    assert DynamicScaler(device)._device == "cpu"


@pytest.mark.parametrize("scale", [math.nan, math.inf, -4.0, "a", None])
def test_a_checkpoint_without_a_scale_is_refused(scale: Any) -> None:
    scaler = DynamicScaler("cpu")
    with pytest.raises(PrecisionError, match="scale in the checkpoint"):
        scaler.load_state_dict({**DynamicScaler("cpu").state_dict(), "scale": scale})
    assert scaler.get_scale() == 1024.0


def test_other_states() -> None:
    state = DynamicScaler("cpu").state_dict()
    scaler = DynamicScaler("cpu")
    with pytest.raises(PrecisionError, match="'flopwise' in it is int"):
        scaler.load_state_dict({**state, "flopwise": 3})
    with pytest.raises(PrecisionError, match="a dict is needed"):
        scaler.load_state_dict(None)  # type: ignore[arg-type]
    scaler.load_state_dict({**state, "scale": torch.tensor(8.0)})
    assert scaler.get_scale() == 8.0


NET = nn.Linear(4, 4)
SGD = torch.optim.SGD(NET.parameters(), 0.1)
ANY: Any = None


def scaling() -> DynamicScaler:
    scaler = DynamicScaler("cpu")
    scaler.scale(torch.ones(()))
    return scaler


LINEAR: Any = nn.Linear(2, 2)
CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "step": (lambda: scaling().step(ANY), "an optimizer is needed, not NoneType"),
    "unscale_": (lambda: scaling().unscale_(ANY), "an optimizer is needed"),
    "update nan": (lambda: scaling().update(math.nan), "new_scale=nan"),
    "update 0": (lambda: scaling().update(0), "new_scale=0"),
    "clip None": (lambda: scaling().clip_grad_norm_([], ANY), "max_norm=None"),
    "clip -1": (lambda: scaling().clip_grad_norm_([], -1.0), "max_norm=-1.0"),
    "clip nan": (lambda: scaling().clip_grad_norm_([], math.nan), "max_norm=nan"),
    "mixed": (lambda: MixedPrecision(ANY), "Module is needed, not NoneType"),
    "mixed keep": (lambda: MixedPrecision(NET, keep_float32=ANY), "keep_float32=None"),
    "mixed keep 3": (lambda: MixedPrecision(NET, keep_float32=[ANY]), "must be names"),
    "mixed name": (lambda: MixedPrecision(NET, keep_float32="head"), "no submodule 'head'"),
    "masters": (lambda: MasterWeights(NET, ANY), "an optimizer is needed, not NoneType"),
    "masters model": (lambda: MasterWeights(ANY, SGD), "Module is needed"),
    "masters swapped": (lambda: MasterWeights(SGD, NET), "Module is needed, not SGD"),  # type: ignore[arg-type]
    "masters twice": (lambda: MasterWeights(NET, NET), "an optimizer is needed, not Linear"),  # type: ignore[arg-type]
    "masters also": (lambda: MasterWeights(NET, SGD, also=ANY), "also=None"),
    "effective": (lambda: effective_dtypes(ANY), "a function that makes one step"),
    "effective name": (lambda: effective_dtypes(dict, asked="bf16"), "asked='bf16'"),
    "effective module": (lambda: effective_dtypes(dict, ANY or 3), "Module is needed"),
    "nonfinite": (lambda: find_nonfinite(ANY), "not NoneType"),
    "check_step": (lambda: check_step(ANY), "an optimizer is needed"),
    "memory": (lambda: weight_memory(ANY), "Module is needed"),
    "memory of no optimizer": (lambda: weight_memory(LINEAR, 5), "optimizer is needed"),
    "memory of no optimizers": (lambda: weight_memory(LINEAR, [5]), "optimizer is needed"),
    "check_step of no model": (
        lambda: check_step(torch.optim.SGD(LINEAR.parameters()), 5),
        "not int",
    ),
    "tolerance": (
        lambda: MixedPrecision(nn.Linear(2, 2), "bfloat16").verify(tolerance="a"),
        "above 0",
    ),
    "tolerance nan": (
        lambda: MixedPrecision(nn.Linear(2, 2), "bfloat16").verify(tolerance=math.nan),
        "above 0",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str) -> None:
    call, words = CALLS[name]
    with pytest.raises(PrecisionError, match=words):
        call()


def test_dtypes_of_torch_are_taken_by_their_name() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    masters = MasterWeights(model, optimizer, torch.bfloat16)
    assert masters.dtype == "bfloat16"
    mixed = MixedPrecision(model, torch.bfloat16)
    assert mixed.dtype == "bfloat16"
    seen = effective_dtypes(lambda: model(torch.ones(1, 4)).sum().backward(), asked=torch.bfloat16)
    assert seen.took_effect


@pytest.mark.parametrize(
    ("value", "is_one"), [(1, True), (0.5, True), (2.0**24, True), (3, False), (0, False), (-2, False),
                          (math.inf, False), (math.nan, False), ("2", False), (None, False)]
)  # fmt: skip
def test_powers_of_two(value: Any, is_one: bool) -> None:
    assert arguments.power_of_two(value) is is_one


def test_a_scale_that_is_no_number_is_refused_and_the_step_can_still_end() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler: Any = DynamicScaler("cpu")
    scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    scaler.step(optimizer)
    with pytest.raises(PrecisionError, match="new_scale='a'"):
        scaler.update("a")
    scaler.update()
    assert scaler.get_scale() == 1024.0
