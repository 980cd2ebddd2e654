"""The loss scaler on a device: what it waits for, what it costs, and whether it equals GradScaler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from precision.stacks import (
    Stack,
    batch,
    change,
    device,
    interleaved,
    loss_of,
    medians_ms,
    sequences_for,
)
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.profiler import ProfilerActivity, profile

from flopwise.kit.precision import DynamicScaler

#: Calls of the CUDA runtime that wait, and copies to memory that is not page-locked, which do too.
WAITS = (
    "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy",
    "Memcpy DtoH (Device -> Pageable)", "aten::_local_scalar_dense",
)  # fmt: skip
#: A power of two, as a scaler would have it.
FACTOR = 1024.0


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """Returns an optimizer by the name of its kind."""
    params = model.parameters()
    if kind == "adamw fused":
        return torch.optim.AdamW(params, 1e-5, fused=True)
    if kind == "adamw foreach":
        return torch.optim.AdamW(params, 1e-5, foreach=True)
    if kind == "sgd fused":
        return torch.optim.SGD(params, 1e-5, momentum=0.9, fused=True)
    return torch.optim.SGD(params, 1e-5, momentum=0.9, foreach=True)


KINDS = ("adamw fused", "sgd fused", "sgd foreach", "adamw foreach")


def scaled_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    x: torch.Tensor,
    dtype: torch.dtype,
    scaler: GradScaler | None,
    clip: bool = False,
) -> Callable[[], None]:
    """Returns a training step; without a scaler the loss is multiplied by a constant of the same size."""
    factor = FACTOR if scaler is None and dtype is torch.float16 else 1.0

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device().type, dtype=dtype):
            loss = loss_of(model, x, factor)
        if scaler is None:
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return step


def waits(step: Callable[[], None], steps: int) -> dict[str, float]:
    """Returns how often a step waits for the device, by call, from a profile of `steps` steps."""
    for _ in range(5):
        step()
    activities = [ProfilerActivity.CPU]
    if device().type == "cuda":
        torch.cuda.synchronize()
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiled:
        for _ in range(steps):
            step()
    counts = Counter(event.name for event in profiled.events())
    return {name: counts[name] / steps for name in WAITS if counts[name]}


def sync(tiny: bool, deadline: float) -> dict[str, Any]:
    """Waits a step: without a scaler, with GradScaler, with DynamicScaler; reviews included (every 10 steps)."""
    width, layers, steps = (16, 1, 12) if tiny else (256, 4, 20)
    x = batch(2, 16 if tiny else 256, width)
    kinds = [("adamw fused", False), ("sgd foreach", True)]
    if not tiny:
        kinds += [
            ("adamw fused", True),
            ("sgd fused", False),
            ("sgd foreach", False),
            ("adamw foreach", False),
        ]
    rows = []
    with profile(activities=[ProfilerActivity.CPU]):
        pass  # what the first profile of a process does is no step's
    for kind, clip in kinds:
        for arm in ("no scaler", "GradScaler", "DynamicScaler"):
            model = Stack(width, layers).to(device())
            scaler: GradScaler | None = None
            if arm == "GradScaler":
                scaler = GradScaler(device().type)
            elif arm == "DynamicScaler":
                scaler = DynamicScaler(review_steps=10, unfused="masked")
            step = scaled_step(model, optimizer_of(kind, model), x, torch.float16, scaler, clip)
            rows.append(
                {"optimizer": kind, "clip": clip, "arm": arm, "waits_per_step": waits(step, steps)}
            )
    base = {
        (r["optimizer"], r["clip"]): r["waits_per_step"] for r in rows if r["arm"] == "no scaler"
    }
    for row in rows:
        without = base[row["optimizer"], row["clip"]]
        row["more_than_without"] = {
            name: n - without.get(name, 0.0)
            for name, n in row["waits_per_step"].items()
            if n - without.get(name, 0.0) > 0
        }
    ours = [r for r in rows if r["arm"] == "DynamicScaler" and r["optimizer"] != "adamw foreach"]
    return {
        "rows": rows,
        "profiled_steps": steps,
        "ok": not any(row["more_than_without"] for row in ours),
        "note": "AdamW without fused keeps its count of steps on the host: it waits, as with GradScaler, and says so",
    }


def overhead(tiny: bool, deadline: float) -> dict[str, Any]:
    """Time of a step of about 10 ms with a scaler against one without, by number of parameters."""
    sizes = [(16, 1)] if tiny else [(512, 3), (512, 8), (768, 12)]
    length, target, steps, rounds = (8, 1e-3, 3, 3) if tiny else (512, 0.010, 10, 60)
    found = []
    for width, layers in sizes:
        model = Stack(width, layers).to(device())
        optimizer = optimizer_of("adamw fused", model)
        count = sequences_for(
            target,
            lambda n, m=model, o=optimizer, w=width: scaled_step(
                m, o, batch(n, length, w), torch.bfloat16, None
            ),
        )
        x = batch(count, length, width)
        arms: dict[str, Callable[[], None]] = {
            "float16, no scaler": scaled_step(model, optimizer, x, torch.float16, None),
            "float16, DynamicScaler": scaled_step(
                model, optimizer, x, torch.float16, DynamicScaler()
            ),
            "float16, GradScaler": scaled_step(
                model, optimizer, x, torch.float16, GradScaler(device().type, FACTOR)
            ),
            "bfloat16": scaled_step(model, optimizer, x, torch.bfloat16, None),
        }
        # A size takes at most its part of what is left.
        times = interleaved(arms, steps, rounds, deadline)
        ours = change(times, "float16, DynamicScaler", "float16, no scaler")
        found.append(
            {
                "parameters": sum(p.numel() for p in model.parameters()),
                "sequences": count,
                "step_ms": medians_ms(times),
                "against_no_scaler": ours,
                "gradscaler_against_no_scaler": change(
                    times, "float16, GradScaler", "float16, no scaler"
                ),
                "against_bfloat16": change(times, "float16, DynamicScaler", "bfloat16"),
                "ok": ours["high_frac"] < 0.005,
            }
        )
        del model, optimizer, x, arms
    masked = [] if tiny else [_masked(deadline)]
    # What a scaler costs grows with the parameters, not with the step: the limit is one for a size.
    return {
        "sizes": found,
        "unfused": masked,
        "limit_frac": 0.005,
        "under_limit_at_parameters": [size["parameters"] for size in found if size["ok"]],
        "ok": found[0]["ok"],
    }


def _masked(deadline: float) -> dict[str, Any]:
    """SGD that is not fused: taken back on the device against waiting for it."""
    model = Stack(512, 3).to(device())
    optimizer = optimizer_of("sgd foreach", model)
    x = batch(32, 512, 512)
    arms = {
        name: scaled_step(model, optimizer, x, torch.float16, scaler)
        for name, scaler in (
            ("no scaler", None),
            ("masked", DynamicScaler()),
            ("waits", DynamicScaler(unfused="wait")),
            ("GradScaler", GradScaler(device().type, FACTOR)),
        )
    }
    times = interleaved(arms, 10, 30, deadline)
    return {
        "optimizer": "sgd foreach",
        "step_ms": medians_ms(times),
        **{n: change(times, n, "no scaler") for n in ("masked", "waits", "GradScaler")},
    }


def equal(tiny: bool, deadline: float) -> dict[str, Any]:
    """Weights, optimizer state and scales after a training with overflows, against GradScaler, to the bit."""
    width, layers, steps = (16, 1, 20) if tiny else (128, 2, 200)
    rows = []
    for kind in KINDS:
        for clip in (False, True):
            ours = DynamicScaler(
                schedule="growth", init_scale=2.0**16, growth_interval=7, alarm_skips=steps
            )
            theirs = GradScaler(device().type, 2.0**16, growth_interval=7)
            same = [
                torch.equal(a, b)
                for a, b in zip(
                    _trained(kind, ours, width, layers, steps, clip),
                    _trained(kind, theirs, width, layers, steps, clip),
                    strict=True,
                )
            ]
            rows.append({"optimizer": kind, "clip": clip, "tensors": len(same), "equal": sum(same)})
    return {"rows": rows, "steps": steps, "ok": all(r["equal"] == r["tensors"] for r in rows)}


def _trained(
    kind: str, scaler: GradScaler, width: int, layers: int, steps: int, clip: bool
) -> list[torch.Tensor]:
    model = Stack(width, layers).to(device())
    optimizer = optimizer_of(kind, model)
    scales = []
    for i in range(steps):
        x = batch(2, 16, width) * (1 + i % 3)
        if i % 17 == 5:
            x = x * float("inf")
        scaled_step(model, optimizer, x, torch.float16, scaler, clip)()
        scales.append(scaler.get_scale())
    state = [
        v for per in optimizer.state.values() for v in per.values() if isinstance(v, torch.Tensor)
    ]
    return [*(p.detach() for p in model.parameters()), *state, torch.tensor(scales)]
