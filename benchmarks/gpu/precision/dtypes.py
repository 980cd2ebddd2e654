"""Dtypes on a device: time and effect of each, TF32's gain and error, memory of master weights."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from precision.stacks import (
    Stack,
    batch,
    change,
    device,
    host_seconds,
    interleaved,
    loss_of,
    medians_ms,
)
from torch import nn

from flopwise.kit.precision import (
    DynamicScaler,
    MasterWeights,
    MixedPrecision,
    effective_dtypes,
    weight_memory,
)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, scaler: Any = None
) -> Callable[[], None]:
    """Returns a training step."""

    def step() -> None:
        optimizer.zero_grad()
        loss = loss_of(model, x)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    return step


def made(width: int, layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Returns a stack of blocks and its optimizer."""
    with device():
        model = Stack(width, layers)
    return model, torch.optim.AdamW(model.parameters(), 1e-5, fused=True)


def mixed(tiny: bool, deadline: float) -> dict[str, Any]:
    """Time of a training step in each dtype, and the share of FLOPs that really ran in it."""
    # Few layers, and wide: the host launches a step in less time than the device takes for it.
    width, layers, sequences, length = (16, 1, 2, 8) if tiny else (2048, 2, 16, 1024)
    x = batch(sequences, length, width)
    arms: dict[str, Callable[[], None]] = {}
    effects: dict[str, Any] = {}
    for dtype in ("float32", "tf32", "bfloat16", "float16"):
        model, optimizer = made(width, layers)
        asked = None if dtype == "float32" else MixedPrecision(model, dtype)
        if asked is not None and asked.declined is not None:
            effects[dtype] = {"declined": asked.declined}
            continue
        scaler = DynamicScaler() if dtype == "float16" else None
        arms[dtype] = train_step(model, optimizer, x, scaler)
        seen = effective_dtypes(arms[dtype], model, asked or dtype)
        effects[dtype] = {
            "verdict": seen.verdict,
            "share": seen.share(),
            "rows": [[r.op_class, r.dtype, r.count, r.flops] for r in seen.rows],
            "weight_casts": seen.weight_casts,
            "weight_cast_bytes": seen.weight_cast_bytes,
        }
    times = interleaved(arms, 3, 6 if tiny else 12, deadline)
    return {
        "step_ms": medians_ms(times),
        "host_ms": {name: round(host_seconds(arm) * 1e3, 3) for name, arm in arms.items()},
        "against_float32": {n: change(times, n, "float32") for n in times if n != "float32"},
        "effects": effects,
        "ok": all("declined" in e or e["share"] >= 0.95 for e in effects.values()),
    }


def tf32(tiny: bool, deadline: float) -> dict[str, Any]:
    """A product of 4096 x 4096 with and without TF32, and the error of both against float64."""
    size = 64 if tiny else 4096
    torch.manual_seed(0)
    layer = nn.Linear(size, size, bias=False).to(device())
    x = torch.randn(size, size, device=device())
    with torch.no_grad():
        exact = x.double() @ layer.weight.double().t()
    twin = nn.Linear(size, size, bias=False).to(device())
    twin.load_state_dict(layer.state_dict())
    asked = MixedPrecision(twin, "tf32")
    if asked.declined is not None:
        return {"skipped": asked.declined}

    def error(module: nn.Module) -> float:
        with torch.no_grad():
            return float(((module(x).double() - exact).norm() / exact.norm()).item())

    def step(module: nn.Module) -> Callable[[], None]:
        def run() -> None:
            module.zero_grad()
            module(x).square().mean().backward()

        return run

    times = interleaved({"float32": step(layer), "tf32": step(twin)}, 10, 20, deadline)
    return {
        "step_ms": medians_ms(times),
        "against_float32": change(times, "tf32", "float32"),
        "relative_error": {"float32": error(layer), "tf32": error(twin)},
        "switches_outside": torch.backends.cuda.matmul.fp32_precision,
    }


def master_weights(tiny: bool, deadline: float) -> dict[str, Any]:
    """Memory and time with float32 weights under autocast against 16-bit weights with masters, and equality."""
    width, layers, sequences, length = (16, 1, 2, 8) if tiny else (4096, 2, 8, 512)
    x = batch(sequences, length, width)
    rows: dict[str, Any] = {}
    arms: dict[str, Callable[[], None]] = {}
    states = []
    for arm in ("autocast", "masters"):
        _empty()
        start = _allocated()
        model, optimizer = made(width, layers)
        held = MasterWeights(model, optimizer) if arm == "masters" else None
        MixedPrecision(model, "bfloat16")
        step = train_step(model, optimizer, x)
        # Attention's backward adds up in no fixed order otherwise.
        torch.use_deterministic_algorithms(True)
        try:
            for _ in range(4):
                step()
        finally:
            torch.use_deterministic_algorithms(False)
        states.append({k: v.to("cpu", copy=True) for k, v in model.state_dict().items()})
        if device().type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        step()
        memory = held.memory() if held is not None else weight_memory(model, optimizer)
        rows[arm] = {
            "categories": vars(memory),
            "total_bytes": memory.total_bytes,
            "allocated_bytes": _allocated() - start,
            "peak_bytes": (torch.cuda.max_memory_allocated() - start)
            if device().type == "cuda"
            else None,
        }
        arms[arm] = step
    equal = [torch.equal(a, b) for a, b in zip(states[0].values(), states[1].values(), strict=True)]
    states.clear()
    times = interleaved(arms, 3 if tiny else 5, 6 if tiny else 12, deadline)
    return {
        "parameters": sum(t.numel() for t in model.parameters()),
        "memory": rows,
        "step_ms": medians_ms(times),
        "host_ms": {name: round(host_seconds(arm) * 1e3, 3) for name, arm in arms.items()},
        "masters_against_autocast": change(times, "masters", "autocast"),
        "equal_state_dicts_after_4_steps": all(equal),
        "ok": all(equal),
    }


def float8(tiny: bool, deadline: float) -> dict[str, Any]:
    """A training step with float8 products against bfloat16, compiled, where torchao is there; else that it is declined."""
    width, layers, sequences, length = (16, 1, 2, 8) if tiny else (4096, 4, 8, 2048)
    probe = nn.Linear(2048, 2048).to(device())
    x = torch.randn(16, 2048, device=device())
    with torch.no_grad():
        before = probe(x)
        asked = MixedPrecision(probe, "float8")
        if asked.declined is not None:
            return {"declined": asked.declined, "ok": torch.equal(probe(x), before)}
    x = batch(sequences, length, width)
    arms: dict[str, Callable[[], None]] = {}
    notes = {}
    for dtype in ("bfloat16", "float8"):
        model, optimizer = made(width, layers)
        asked = MixedPrecision(model, dtype)
        notes[dtype] = str(asked)
        for block in model.blocks:  # type: ignore[union-attr]
            block.compile()
        arms[dtype] = train_step(model, optimizer, x)
    times = interleaved(arms, 5, 15, deadline)
    return {
        "step_ms": medians_ms(times),
        "against_bfloat16": change(times, "float8", "bfloat16"),
        "notes": notes,
    }


def _empty() -> None:
    gc.collect()
    if device().type == "cuda":
        torch.cuda.empty_cache()


def _allocated() -> int:
    return torch.cuda.memory_allocated() if device().type == "cuda" else 0
