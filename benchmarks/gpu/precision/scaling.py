"""The loss scaler on a device: what it waits for, what it costs, and whether it equals GradScaler."""

from __future__ import annotations

import statistics
import time
import warnings
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from precision.stacks import (
    Stack,
    Wide,
    batch,
    change,
    device,
    host_seconds,
    interleaved,
    loss_of,
    median_of,
    medians_ms,
)
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.profiler import ProfilerActivity, profile, record_function

from flopwise.kit.precision import DynamicScaler

#: Calls of the CUDA runtime that wait, and copies to memory that is not page-locked, which do too.
WAITS = (
    "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy",
    "Memcpy DtoH (Device -> Pageable)", "aten::_local_scalar_dense",
)  # fmt: skip
#: A power of two, as a scaler would have it.
FACTOR = 1024.0
#: Of a gradient of the model's output, before the scale: float16 holds it and what comes of it at a scale of 1024.
OUTPUT_GRADIENT = 2.0**-14


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """Returns an optimizer by the name of its kind."""
    params = model.parameters()
    if kind == "adamw fused":
        return torch.optim.AdamW(params, 1e-5, fused=True)
    if kind == "adamw foreach":
        return torch.optim.AdamW(params, 1e-5, foreach=True)
    if kind == "adam fused, decay":
        return torch.optim.Adam(params, 1e-5, weight_decay=0.1, fused=True)
    if kind == "sgd fused":
        return torch.optim.SGD(params, 1e-5, momentum=0.9, fused=True)
    if kind == "sgd fused, nesterov, decay":
        return torch.optim.SGD(
            params, 1e-5, momentum=0.9, weight_decay=0.1, nesterov=True, fused=True
        )
    return torch.optim.SGD(params, 1e-5, momentum=0.9, foreach=True)


KINDS = ("adamw fused", "sgd fused", "sgd foreach", "adamw foreach")
DECAYED = ("adam fused, decay", "sgd fused, nesterov, decay")


def scaled_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    x: torch.Tensor,
    dtype: torch.dtype,
    scaler: GradScaler | None,
    clip: bool = False,
    part: float = 1.0,
    fill: Callable[[], None] | None = None,
) -> Callable[[], None]:
    """Returns a training step; without a scaler the loss is multiplied by a constant of the same size.

    Args:
        part: of the loss that is taken.
        fill: other work of the step, done before the forward.
    """
    factor = part * (FACTOR if scaler is None and dtype is torch.float16 else 1.0)

    def step() -> None:
        optimizer.zero_grad()
        if fill is not None:
            fill()
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


def waits(steps_of: list[Callable[[], None]], steps: int) -> list[dict[str, float]]:
    """Returns how often a step waits for the device, by call, for each kind of step, from one profile of all."""
    for step in steps_of:
        for _ in range(5):
            step()
    activities = [ProfilerActivity.CPU]
    if device().type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    # With `acc_events` all events would be made into objects of Python at the end.
    warnings.filterwarnings("ignore", "Warning: Profiler clears events")
    with profile(activities=activities) as profiled:
        for i, step in enumerate(steps_of):
            _settle()
            with record_function(f"steps {i}"):
                for _ in range(steps):
                    step()
        _settle()
    found = _waits(profiled, len(steps_of))
    return [{name: n / steps for name in WAITS if (n := counts[name])} for counts in found]


def _settle() -> None:
    if device().type == "cuda":
        torch.cuda.synchronize()


def _waits(profiled: profile, kinds: int) -> list[Counter[str]]:
    """Returns the waits by the range of steps that they fall into.

    Reads the raw events: making the profiler's own objects of them takes several times as long as the steps.
    """
    assert profiled.profiler is not None
    raw: Any = profiled.profiler.kineto_results
    on_host = torch.autograd.DeviceType.CPU
    spans, seen = {}, []
    for event in raw.events():
        name, host = event.name(), event.device_type() == on_host
        if host and name.startswith("steps "):
            spans[int(name.split()[1])] = (event.start_ns(), event.end_ns())
        elif name in WAITS:
            seen.append((event.start_ns(), host, name))
    assert sorted(spans) == list(range(kinds)), spans
    starts = [spans[i][0] for i in range(kinds)]
    counts: list[Counter[str]] = [Counter() for _ in range(kinds)]
    for at, host, name in seen:
        i = bisect_right(starts, at) - 1
        # What the host does after its last launch is the wait between two kinds; the device is still at work then.
        if i >= 0 and (not host or at <= spans[i][1]):
            counts[i][name] += 1
    return counts


def sync(tiny: bool, deadline: float) -> dict[str, Any]:
    """Waits a step: without a scaler, with GradScaler, with DynamicScaler; reviews included (every 10 steps)."""
    width, layers, steps = (16, 1, 12) if tiny else (64, 1, 20)
    x = batch(2, 16 if tiny else 64, width)
    kinds = [("adamw fused", False), ("sgd foreach", True)]
    if not tiny:
        kinds += [
            ("adamw fused", True),
            ("sgd fused", False),
            ("sgd fused", True),
            ("sgd foreach", False),
            ("adamw foreach", False),
        ]
    rows: list[dict[str, Any]] = []
    steps_of = []
    for kind, clip in kinds:
        for arm in ("no scaler", "GradScaler", "DynamicScaler"):
            model = Stack(width, layers).to(device())
            scaler: GradScaler | None = None
            if arm == "GradScaler":
                scaler = GradScaler(device().type)
            elif arm == "DynamicScaler":
                scaler = DynamicScaler(review_steps=10, unfused="masked")
            optimizer = optimizer_of(kind, model)
            steps_of.append(scaled_step(model, optimizer, x, torch.float16, scaler, clip))
            rows.append({"optimizer": kind, "clip": clip, "arm": arm})
    for row, found in zip(rows, waits(steps_of, steps), strict=True):
        row["waits_per_step"] = found
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
    """Time of a step of about 10 ms with a scaler against one without, by number of parameters.

    What a scaler does is the same whatever else the step does. So forward and backward are short here, and the rest of
    the 10 ms is a kernel that spins for a fixed number of clock cycles: products that fill the step would draw all the
    power that the card may draw, and its clock would then wander by more than the scaler costs. The cost is the
    difference to the same step with a constant in the scaler's place, as a share of the bfloat16 step. One arm is
    there twice: what those two differ by is what cannot be told apart.
    """
    widths = [16] if tiny else [1792, 2944, 5376]  # 10, 26 and 87 million parameters
    shares = [1.0] if tiny else [0.5, 0.35, 0.5]  # of the time that is left then
    rounds = [6] if tiny else [30, 12, 12]
    found = []
    for width, share, most in zip(widths, shares, rounds, strict=True):
        now = time.monotonic()
        found.append(_size(width, most, tiny, now + share * (deadline - now)))
    first = found[0]
    return {
        "sizes": found,
        "unfused": [] if tiny else [_masked(deadline)],
        "limit_frac": LIMIT,
        # What a scaler costs grows with the parameters, not with the step: the limit is one for a size.
        "under_limit_at_parameters": [size["parameters"] for size in found if size["ok"]],
        "ok": first["ok"] and first["resolved"] and first["device_bound"],
    }


def spinning(target: float, step: Callable[[], None]) -> Callable[[], None] | None:
    """Returns device work that makes a step take about `target` seconds; None without a device to spin on."""
    if device().type != "cuda":
        return None
    cycles = 20_000_000

    def seconds(work: Callable[[], None]) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(2 * cycles)  # the host gets ahead
        begin.record()
        for _ in range(3):
            work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 3e3

    for _ in range(3):
        step()
    per_cycle = seconds(lambda: torch.cuda._sleep(cycles)) / cycles
    count = max(0, int((target - seconds(step)) / per_cycle))
    return lambda: torch.cuda._sleep(count)


#: Of a step of 10 ms.
LIMIT = 0.005


def _size(width: int, rounds: int, tiny: bool, deadline: float) -> dict[str, Any]:
    """Measures the overhead for one size of model."""
    length, target, steps = (8, 1e-3, 2) if tiny else (512, 0.010, 20)
    with device():
        model = Wide(width, 3)
    optimizer = optimizer_of("adamw fused", model)

    def made(
        x: torch.Tensor, dtype: torch.dtype, scaler: GradScaler | None = None
    ) -> Callable[[], None]:
        part = x.numel() * OUTPUT_GRADIENT
        return scaled_step(model, optimizer, x, dtype, scaler, part=part, fill=fill)

    fill: Callable[[], None] | None = None
    x = batch(1, length, width)
    fill = spinning(target, made(x, torch.bfloat16))
    scaler = DynamicScaler()
    arms = {
        "float16, no scaler": made(x, torch.float16),
        "float16, DynamicScaler": made(x, torch.float16, scaler),
        "float16, DynamicScaler, torch's kernels": made(
            x, torch.float16, DynamicScaler(kernels="torch")
        ),
        "float16, GradScaler": made(x, torch.float16, GradScaler(device().type, FACTOR)),
        "bfloat16": made(x, torch.bfloat16),
        "float16, no scaler again": made(x, torch.float16),
    }
    times = interleaved(arms, steps, rounds, deadline)

    def cost(arm: str) -> dict[str, float]:
        of = zip(times[arm], times["float16, no scaler"], times["bfloat16"], strict=True)
        return median_of([(a - b) / bf16 for a, b, bf16 in of])

    def microseconds(arm: str) -> float:
        pairs = zip(times[arm], times["float16, no scaler"], strict=True)
        return round(statistics.median((a - b) * 1e6 for a, b in pairs), 1)

    host_ms = {name: round(host_seconds(arm) * 1e3, 3) for name, arm in arms.items()}
    step_ms = medians_ms(times)
    ours, null = cost("float16, DynamicScaler"), cost("float16, no scaler again")
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "step_ms": step_ms,
        "host_ms": host_ms,
        "device_bound": all(host_ms[name] < 0.8 * step_ms[name] for name in arms),
        "one_kernel": scaler._one_pass.used,
        "one_kernel_declined": scaler._one_pass.declined,
        "cost": ours,
        "cost_us": microseconds("float16, DynamicScaler"),
        "torchs_kernels_cost": cost("float16, DynamicScaler, torch's kernels"),
        "torchs_kernels_cost_us": microseconds("float16, DynamicScaler, torch's kernels"),
        "gradscaler_cost": cost("float16, GradScaler"),
        "gradscaler_cost_us": microseconds("float16, GradScaler"),
        "same_twice": null,
        "resolved": max(-null["low_frac"], null["high_frac"]) < LIMIT / 2,
        "against_bfloat16": change(times, "float16, DynamicScaler", "bfloat16"),
        "no_scaler_against_bfloat16": change(times, "float16, no scaler", "bfloat16"),
        "ok": ours["high_frac"] < LIMIT,
    }


def _masked(deadline: float) -> dict[str, Any]:
    """SGD that is not fused: taken back on the device against waiting for it."""
    with device():
        model = Wide(1792, 3)
    optimizer = optimizer_of("sgd foreach", model)
    x = batch(128, 512, 1792)
    part = x.numel() * OUTPUT_GRADIENT
    arms = {
        name: scaled_step(model, optimizer, x, torch.float16, scaler, part=part)
        for name, scaler in (
            ("no scaler", None),
            ("masked", DynamicScaler()),
            ("waits", DynamicScaler(unfused="wait")),
            ("GradScaler", GradScaler(device().type, FACTOR)),
        )
    }
    times = interleaved(arms, 10, 12, deadline)
    return {
        "optimizer": "sgd foreach",
        "step_ms": medians_ms(times),
        **{n: change(times, n, "no scaler") for n in ("masked", "waits", "GradScaler")},
    }


def equal(tiny: bool, deadline: float) -> dict[str, Any]:
    """Weights, optimizer state and scales after a training with overflows, against GradScaler, to the bit.

    GradScaler is run twice: where it does not equal itself, the model is what differs.
    """
    width, layers, steps = (16, 1, 20) if tiny else (128, 1, 40)
    rows = []
    for kind in (*KINDS, *DECAYED):
        for clip in (False, True):
            ours = DynamicScaler(
                schedule="growth", init_scale=2.0**16, growth_interval=7, alarm_skips=steps
            )
            theirs, again = (GradScaler(device().type, 2.0**16, growth_interval=7) for _ in "12")
            ours_, theirs_, again_ = (
                _trained(kind, scaler, width, layers, steps, clip)
                for scaler in (ours, theirs, again)
            )
            differ = _differences(ours_, theirs_)
            rows.append(
                {
                    "optimizer": kind,
                    "clip": clip,
                    "tensors": len(theirs_),
                    "equal": len(theirs_) - len(differ),
                    "gradscaler_equals_itself": not _differences(again_, theirs_),
                    "differ": differ,
                }
            )
    return {"rows": rows, "steps": steps, "ok": all(r["equal"] == r["tensors"] for r in rows)}


def _differences(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> dict[str, float]:
    """Returns the largest relative difference of each tensor that is not the same to the bit."""
    assert a.keys() == b.keys()
    return {
        name: ((a[name] - b[name]).abs() / b[name].abs().clamp(min=1e-30)).amax().item()
        for name in a
        if not torch.equal(a[name], b[name])
    }


def _trained(
    kind: str, scaler: GradScaler, width: int, layers: int, steps: int, clip: bool
) -> dict[str, torch.Tensor]:
    model = Stack(width, layers).to(device())
    optimizer = optimizer_of(kind, model)
    x = batch(2, 16, width)
    inputs = [x, x * 2, x * 3]
    takes = [scaled_step(model, optimizer, i, torch.float16, scaler, clip) for i in inputs]
    overflows = scaled_step(model, optimizer, x * float("inf"), torch.float16, scaler, clip)
    scales = []
    for i in range(steps):
        (overflows if i % 17 == 5 else takes[i % 3])()
        scales.append(scaler.get_scale())
    found = {"scales": torch.tensor(scales)}
    for name, param in model.named_parameters():
        found[name] = param.detach()
        for key, value in optimizer.state[param].items():
            if isinstance(value, torch.Tensor):
                found[f"{name}: {key}"] = value.float()
    return found
