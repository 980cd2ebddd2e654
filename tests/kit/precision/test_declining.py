"""Why a dtype is declined: by weights, by the device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flopwise.kit.precision import MasterWeights, MixedPrecision
from flopwise.kit.precision.declining import cuda_problem, device_of, weights_problem


def test_float32_weights_go_with_all() -> None:
    for dtype in ("bfloat16", "float16", "tf32", "float8"):
        assert weights_problem(nn.Linear(2, 2), dtype) is None
    assert weights_problem(nn.ReLU(), "bfloat16") is None


def test_16_bit_weights_go_with_their_dtype_if_they_have_masters() -> None:
    alone, held = nn.Linear(2, 2).bfloat16(), nn.Linear(2, 2)
    MasterWeights(held, torch.optim.SGD(held.parameters(), 0.1))
    told = weights_problem(alone, "bfloat16")
    assert told is not None
    assert told.startswith("the weights are bfloat16, not all float32")
    assert weights_problem(held, "bfloat16") is None
    assert (
        weights_problem(held, "float16")
        == "MasterWeights made the weights bfloat16: ask for the same dtype"
    )
    assert weights_problem(held, "tf32") is not None


def test_the_device_is_that_of_any_tensor() -> None:
    assert device_of(nn.Linear(1, 1, device="meta")).type == "meta"
    module = nn.Module()
    module.register_buffer("b", torch.ones(1))
    assert device_of(module).type == "cpu"


class Cuda:
    """What is asked of a device, with made-up answers."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], bf16: bool
    ) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda d=None: "Device X")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d=None: capability)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: bf16)


@pytest.mark.parametrize(
    ("capability", "bf16", "dtype", "reason"),
    [
        ((7, 5), False, "bfloat16", "Device X has no bfloat16: it would be emulated"),
        ((7, 5), False, "tf32", "Device X (compute capability 7.5) has no TF32: 8.0 is needed"),
        ((7, 5), False, "float16", None),
        ((8, 0), True, "bfloat16", None),
        ((8, 0), True, "tf32", None),
    ],
)
def test_old_devices_are_told(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    bf16: bool,
    dtype: str,
    reason: str | None,
) -> None:
    Cuda(monkeypatch, capability, bf16)
    told = cuda_problem(torch.device("cuda"), dtype)
    assert (told or "").startswith(reason or "")
    assert (told is None) == (reason is None)


def test_a_cpu_without_the_instructions_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False, raising=False)
    assert MixedPrecision(nn.Linear(2, 2)).notes == [
        "this CPU has no bfloat16 instructions: it computes in bfloat16, but slower than in float32"
    ]
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert MixedPrecision(nn.Linear(2, 2)).notes == []
