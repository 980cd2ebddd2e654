"""The sections of `kit_memory.py`: each takes whether it is tiny and returns what it measured, with a text for people."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import kit_memory_workloads as workloads
import nets
import torch
import torch.nn.functional as F
from torch import nn

from flopwise.kit.memory import (
    CANDIDATES,
    audit_alignment,
    checkpoint_blocks,
    choose_channels_last,
    choose_cudnn_benchmark,
    compare_settings,
    empty_cache_cost,
    memory_timeline,
    own_settings,
    pad_dimensions,
    pinned_plan,
)

Found = dict[str, Any]
#: Seconds of steps on new sizes, at most, for each setting of cuDNN's search.
SEARCH_S = 4.0
NO_DEVICE = "needs a CUDA device"


def device_of(tiny: bool) -> torch.device:
    """Returns the device that a section runs on."""
    return torch.device("cpu" if tiny else "cuda")


def wait() -> None:
    """Waits for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def in_turns(arms: dict[str, Callable[[], object]], rounds: int, steps: int) -> Found:
    """Returns the step times of all arms, in blocks that take turns, by the median of blocks."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for index in range(rounds + 1):
        for name in list(arms) if index % 2 == 0 else reversed(arms):
            arms[name]()
            wait()
            start = time.perf_counter()
            for _ in range(steps):
                arms[name]()
            wait()
            if index:  # the first round warms up
                times[name].append((time.perf_counter() - start) / steps)
    return {
        name: {"step_s": statistics.median(found), "blocks_s": found}
        for name, found in times.items()
    }


def peak_bytes(step: Callable[[], object], device: torch.device) -> int | None:
    """Returns the allocator's peak over one step."""
    if device.type != "cuda":
        return None
    wait()
    torch.cuda.reset_peak_memory_stats()
    step()
    wait()
    return torch.cuda.max_memory_allocated()


def padding(tiny: bool) -> Found:
    """GPT-2 with its vocabulary as it is, padded in both ways, and with 50304 rows of its own (the ceiling)."""
    device = device_of(tiny)
    shape: Found = (
        {"vocab": 1001, "context": 32, "layers": 2, "width": 32, "heads": 2}
        if tiny
        else {"vocab": 50257}
    )
    rows, length = (2, 32) if tiny else (16, 1024)
    torch.manual_seed(0)
    with device:
        plain = nets.Gpt(by_hand=False, **shape)
        ids = torch.randint(shape["vocab"], (rows, length + 1))
    models = {"plain": plain, "padded": copy.deepcopy(plain), "view": copy.deepcopy(plain)}
    made = pad_dimensions(models["padded"], dtype=torch.bfloat16)
    pad_dimensions(models["view"], dtype=torch.bfloat16, contiguous=False)
    with device:
        ceiling = nets.Gpt(by_hand=False, **{**shape, "vocab": made.layers[0].padded[0]})
    tried = copy.deepcopy(plain)
    decision = str(pad_dimensions(tried, lambda: workloads.gpt_loss(tried, ids, device).backward()))
    equality = {name: agreement(plain, models[name], ids, device) for name in ("padded", "view")}
    equality["plain"] = agreement(
        plain, copy.deepcopy(plain), ids, device
    )  # what the device itself scatters
    losses = {
        name: workloads.losses(copy.deepcopy(models[name]), ids, device, 3 if tiny else 20)
        for name in ("plain", "padded")
    }
    arms = {
        name: workloads.train_step(model, ids, device)
        for name, model in {**models, "ceiling": ceiling}.items()
    }
    times = in_turns(arms, 2 if tiny else 5, 1 if tiny else 6)
    for name, step in arms.items():
        times[name]["peak_bytes"] = peak_bytes(step, device)
    profiles = {name: profile(step, device) for name, step in arms.items()}
    more = differences(profiles["padded"]["ops"], profiles["ceiling"]["ops"])
    text = ", ".join(f"{name} {found['step_s'] * 1e3:.1f} ms" for name, found in times.items())
    text += "; padded beside the ceiling, by op: "
    text += ", ".join(f"{op} {apart_s * 1e3:+.2f} ms" for op, apart_s in more.items())
    return {
        "text": text,
        "arms": times,
        "profiles": profiles,
        "over_ceiling_s": more,
        "equality": equality,
        "losses": losses,
        "decision": decision,
        "audit": str(
            audit_alignment(plain, lambda: workloads.gpt_loss(plain, ids, device).backward())
        ),
        "audit_padded": str(
            audit_alignment(
                models["padded"],
                lambda: workloads.gpt_loss(models["padded"], ids, device).backward(),
            )
        ),
    }


def profile(step: Callable[[], object], device: torch.device, steps: int = 2) -> Found:
    """Returns the device's seconds a step by op, and by kernel with how often it ran (on a CPU by op only)."""
    from torch.profiler import ProfilerActivity

    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda
    step()
    wait()
    with torch.profiler.profile(activities=activities) as seen:
        for _ in range(steps):
            step()
        wait()
    ops: dict[str, float] = {}
    kernels: dict[str, list[float]] = {}
    for event in seen.key_averages():
        us = event.self_device_time_total if cuda else event.self_cpu_time_total
        if us <= 0 or getattr(event, "is_user_annotation", False):
            continue
        if event.device_type == torch.autograd.DeviceType.CPU:
            ops[event.key] = us * 1e-6 / steps
        else:
            kernels[event.key[:160]] = [us * 1e-6 / steps, event.count / steps]
    largest = sorted(kernels.items(), key=lambda found: -found[1][0])[:25]
    return {"ops": ops, "kernels": dict(largest)}


def differences(a: dict[str, float], b: dict[str, float], most: int = 8) -> dict[str, float]:
    """Returns by how many seconds ops take longer in `a` than in `b`, the largest differences first."""
    apart = {name: a.get(name, 0.0) - b.get(name, 0.0) for name in {**a, **b}}
    return dict(sorted(apart.items(), key=lambda found: -abs(found[1]))[:most])


def agreement(a: nn.Module, b: nn.Module, ids: torch.Tensor, device: torch.device) -> Found:
    """Returns how far losses, logits and gradients of two models with the same weights lie apart."""
    found: Found = {}
    results = []
    for model in (a, b):
        model.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            logits, loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        results.append((logits.detach(), float(loss.detach())))
    (logits_a, loss_a), (logits_b, loss_b) = results
    found["loss"] = [loss_a, loss_b]
    found["logits_frac"] = float(
        (logits_a.float() - logits_b.float()).norm() / logits_a.float().norm()
    )
    found["same_winner_frac"] = float((logits_a.argmax(-1) == logits_b.argmax(-1)).float().mean())
    found["shape"] = list(logits_b.shape)
    apart = size = 0.0
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        apart += float((p.grad - q.grad).double().square().sum())
        size += float(p.grad.double().square().sum())
    found["gradients_frac"] = (apart / size) ** 0.5
    for model in (a, b):
        model.zero_grad()
    return found


def layers(tiny: bool) -> Found:
    """Single layers with odd dimensions, measured padded and not by `pad_dimensions` itself."""
    device = device_of(tiny)
    cases: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
        "linear 1024 -> 30522 (BERT's vocabulary)": (nn.Linear(1024, 30522), (16384, 1024)),
        "linear 4099 -> 4099": (nn.Linear(4099, 4099), (8192, 4099)),
        "conv 3 -> 64, 7x7": (nn.Conv2d(3, 64, 7, 2, 3), (256, 3, 224, 224)),
        "conv 67 -> 131, 3x3": (nn.Conv2d(67, 131, 3), (256, 67, 56, 56)),
        "conv 67 -> 131, 3x3, channels_last": (
            nn.Conv2d(67, 131, 3).to(memory_format=torch.channels_last),
            (256, 67, 56, 56),
        ),
    }
    if tiny:
        cases = {
            "linear": (nn.Linear(13, 21), (4, 13)),
            "conv": (nn.Conv2d(3, 5, 3), (2, 3, 8, 8)),
        }
    found: Found = {}
    for name, (layer, shape) in cases.items():
        layer = layer.to(device)
        x = torch.randn(shape, device=device)
        if "channels_last" in name:
            x = x.contiguous(memory_format=torch.channels_last)
        x.requires_grad_(len(shape) == 2 or shape[1] > 3)

        def step(layer: nn.Module = layer, x: torch.Tensor = x) -> None:
            with torch.autocast(device.type, torch.bfloat16):
                layer(x)

        made = pad_dimensions(layer, step, rounds=3 if tiny else 5)
        found[name] = {
            "text": str(made),
            "layers": [asdict(p) for p in made.layers],
            "declined": made.declined,
        }
        print(f"  {name}: {made}", flush=True)
    return {"text": "; ".join(f"{n}: {f['text']}" for n, f in found.items()), "cases": found}


def checkpointing(tiny: bool) -> Found:
    """A Llama-like model against several targets: predicted and achieved peak, and the time that it takes."""
    device = device_of(tiny)
    shape = (
        {"vocab": 100, "context": 32, "layers": 4, "width": 32, "heads": 2, "hidden": 64}
        if tiny
        else {
            "vocab": 32000,
            "context": 2048,
            "layers": 24,
            "width": 2048,
            "heads": 16,
            "hidden": 5504,
        }
    )
    torch.manual_seed(0)
    with device:
        model = nets.Llama(**shape)
        ids = torch.randint(shape["vocab"], (2, 32) if tiny else (4, 2048))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(ids)
        loss.backward()

    step()
    optimizer.step()  # its state is there from now on, as in training
    optimizer.zero_grad()
    rounds = 3 if tiny else 5
    floor = checkpoint_blocks(model, step, 0, rounds=rounds)
    floor.undo()
    before, least = floor.choice.peak_before_bytes, floor.choice.peak_bytes
    rows = [{"share": 0.0, **checkpoint_row(floor)}]
    for share in (0.25, 0.5, 0.75):
        target = int(least + share * (before - least))
        if not tiny:
            target = math.ceil(target / 1e9) * 10**9  # as people give it
        made = checkpoint_blocks(model, step, target, rounds=rounds)
        rows.append({"share": share, **checkpoint_row(made)})
        print(f"  {made}", flush=True)
        made.undo()
    return {
        "text": "; ".join(r["text"] for r in rows),
        "rows": rows,
        "costs": [asdict(c) for c in floor.costs],
        "allocator_peak_bytes": peak_bytes(step, device),
    }


def checkpoint_row(made: Any) -> Found:
    """Returns one choice as plain data."""
    return {
        "text": str(made),
        "fits": made.fits,
        "choice": asdict(made.choice),
        "achieved_bytes": made.peak_bytes,
        "step": asdict(made.step) if made.step else None,
    }


def channels_last(tiny: bool) -> Found:
    """ResNet-50 and EfficientNet-B4 in bfloat16, each in the layout that it is measured to be faster in."""
    device = device_of(tiny)
    cases = {
        "resnet50": (nets.resnet50, 2 if tiny else 256, 32 if tiny else 224),
        "efficientnet_b4": (nets.efficientnet, 2 if tiny else 64, 32 if tiny else 380),
    }
    found: Found = {}
    for name, (build, batch, size) in cases.items():
        torch.manual_seed(0)
        with device:
            model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        x = torch.randn(batch, 3, size, size, device=device)
        y = torch.arange(batch, device=device)

        def step(model: nn.Module = model, x: torch.Tensor = x, y: torch.Tensor = y) -> None:
            with torch.autocast(device.type, torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            loss.backward()

        before = peak_bytes(step, device)
        model.zero_grad()
        made = choose_channels_last(model, step, optimizers=[optimizer], rounds=3 if tiny else 7)
        found[name] = {
            "text": str(made),
            "adopted": made.adopted,
            "measured": asdict(made.measured) if made.measured else None,
            "peak_before_bytes": before,
            "peak_after_bytes": peak_bytes(step, device),
        }
        print(f"  {name}: {made}", flush=True)
        del model, optimizer, step, x, made
    return {"text": "; ".join(f"{n} {f['text']}" for n, f in found.items()), "models": found}


def timeline(tiny: bool) -> Found:
    """GPT-2's memory by category, its peak beside the allocator's, and what following it costs."""
    device = device_of(tiny)
    model, ids = workloads.gpt(tiny, device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=not tiny)
    step = workloads.train_step(model, ids, device, optimizer)
    for _ in range(2):
        step()
    optimizer.zero_grad()
    peak = peak_bytes(step, device)
    optimizer.zero_grad()
    with memory_timeline(model, [optimizer], ids) as recorder:
        step()
    line = recorder.timeline

    def followed() -> None:
        with memory_timeline(model, [optimizer], ids):
            step()

    times = in_turns({"plain": step, "followed": followed}, 1 if tiny else 3, 1 if tiny else 3)
    text = str(line)
    if peak is not None:
        more = peak / line.peak.total_bytes - 1
        text += f"\nallocator {peak / 1e9:.3f} GB, {more:.2%} more: it rounds, and has workspaces of libraries"
    return {
        "text": text,
        "peak": asdict(line.peak),
        "peak_bytes": line.peak.total_bytes,
        "allocator_peak_bytes": peak,
        "by_module": line.at_peak_by_module()[:20],
        "by_op": line.at_peak_by_op()[:20],
        "events": len(line.events),
        "times": times,
    }


def search(tiny: bool) -> Found:
    """A convolutional net on sizes that vary and on one: what cuDNN's search is set to, and its price."""
    device = device_of(tiny)
    torch.manual_seed(0)
    width, batch = (4, 1) if tiny else (64, 4)
    net = nn.Sequential(
        nn.Conv2d(3, width, 3),
        nn.ReLU(),
        nn.Conv2d(width, width, 3),
        nn.ReLU(),
        nn.Conv2d(width, width, 3),
    ).to(device)
    sizes = (
        torch.randint(40, 60, (1000,)).tolist()
        if tiny
        else torch.randint(400, 601, (1000,)).tolist()
    )
    order = iter(sizes)

    def on(size: int) -> None:
        net(torch.randn(batch, 3, size, size, device=device)).square().mean().backward()

    varying = choose_cudnn_benchmark(net, lambda: on(next(order)))
    fixed = choose_cudnn_benchmark(net, lambda: on(60 if tiny else 600), rounds=3 if tiny else 7)
    found: Found = {"varying": str(varying), "fixed": str(fixed)}
    for flag in (False, True):
        torch.backends.cudnn.benchmark = flag
        # Other sizes each time: what was chosen for one once is kept.
        order = iter([n for n in dict.fromkeys(sizes) if n % 2 == flag])
        on(next(order))
        times: list[float] = []
        while len(times) < 3 or (sum(times) < SEARCH_S and len(times) < (3 if tiny else 15)):
            wait()
            start = time.perf_counter()
            on(next(order))
            wait()
            times.append(time.perf_counter() - start)
        found[f"varying_steps_s_{'on' if flag else 'off'}"] = times
        found[f"varying_step_s_{'on' if flag else 'off'}"] = statistics.median(times)
    text = f"{varying}; {fixed}; a step on a new size {found['varying_step_s_off'] * 1e3:.1f} ms without the search, "
    return {"text": f"{text}{found['varying_step_s_on'] * 1e3:.1f} ms with it", **found}


def emptied(tiny: bool) -> Found:
    """Eight layers whose step empties the cache, and the same without."""
    device = device_of(tiny)
    width = 64 if tiny else 2048
    net = nn.Sequential(*[nn.Linear(width, width) for _ in range(8)]).to(device)
    x = torch.randn(width, width, device=device)

    def step() -> None:
        net(x).square().mean().backward()
        net.zero_grad()
        torch.cuda.empty_cache()

    cost = empty_cache_cost(step, rounds=3 if tiny else 7, device=device)
    return {"text": str(cost), "cost": asdict(cost)}


def pinned(tiny: bool) -> Found:
    """Pinned buffers as planned, and as torch's host allocator has them."""
    sizes = [int(s * 2**30) for s in (2.25, 1.125, 0.563)]
    plan = pinned_plan(sizes)
    found: Found = {"text": str(plan), "planned_bytes": plan.given_bytes}
    if not tiny:
        torch.cuda.init()  # before it there are no statistics
        key = "active_bytes.current"
        before = torch.cuda.host_memory_stats().get(key, 0)
        buffers = [torch.empty(n, dtype=torch.uint8, pin_memory=True) for n in sizes]
        found["active_bytes"] = torch.cuda.host_memory_stats()[key] - before
        del buffers
    return found


def settings(tiny: bool, function: str, chosen: dict[str, str], steps: int) -> Found:
    """Returns a comparison of settings on one of the workloads."""
    made = compare_settings(
        f"{workloads.__file__}:{function}",
        chosen,
        steps=2 if tiny else steps,
        warmup=1 if tiny else 3,
        cuda=True,
    )
    return {"text": str(made), "comparison": made.as_json()}


def allocator(tiny: bool) -> Found:
    """Lengths that change in every step: each setting of torch's allocator in processes of its own."""
    chosen = dict(list(CANDIDATES.items())[:1]) if tiny else dict(CANDIDATES)
    return settings(tiny, "varying_tiny" if tiny else "varying", chosen, 20)


def tight(tiny: bool) -> Found:
    """The same where memory is a tenth more than what is allocated at the peak: who retries, and who fails."""
    if tiny:
        return {"text": NO_DEVICE, "skipped": NO_DEVICE}
    chosen = {n: s for n, s in CANDIDATES.items() if n != "round up"}
    return settings(tiny, "tight", chosen, 20)


def pointer(tiny: bool) -> Found:
    """The 256-byte allocator and a pool by pointer beside torch's, on changing lengths."""
    if tiny:
        return {"text": NO_DEVICE, "skipped": NO_DEVICE}
    return settings(tiny, "varying", own_settings(64 << 30), 20)


def pointer_fixed(tiny: bool) -> Found:
    """The same on rows of one length."""
    if tiny:
        return {"text": NO_DEVICE, "skipped": NO_DEVICE}
    return settings(tiny, "fixed", own_settings(64 << 30), 10)
