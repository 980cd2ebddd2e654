"""Measures flopwise.kit.graph on a GPU: python kit_graph.py --out FILE [--only SECTION ... --model MODEL ...].

Sections: captured_equal (200 steps, captured against eager, to the bit), parts (step time and memory of each part
alone and together), fold (ResNet-50 in evaluation), optimizer_forms, fusion. One JSON is written, after every section;
a section that fails is in it with its error. --tiny runs everything small, on a CPU too.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(min(16, os.cpu_count() or 1)))
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:  # every compilation is a cold one
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="kit_graph_")
sys.path.insert(0, str(Path(__file__).parent / "jobs"))

import nets
import torch
import torch.nn.functional as F
from torch import nn

from flopwise.kit.graph import (
    CapturedStep,
    compile_in_place,
    compile_regions,
    fastest_optimizer_form,
    fold,
    fusion_report,
)

MODELS = ("resnet18", "resnet50", "efficientnet_b4", "bert_large", "gpt2", "llama_1b")
SECTIONS = ("captured_equal", "fold", "optimizer_forms", "fusion", "parts")


class Job:
    """One model with its batch, loss and optimizer, as in the ladders."""

    def __init__(self, name: str, device: torch.device, tiny: bool) -> None:
        torch.manual_seed(0)
        self.name, self.device, self.tiny = name, device, tiny
        self.images = name in ("resnet18", "resnet50", "efficientnet_b4")
        with device:  # random weights are drawn there, which takes seconds less
            self.model, self.source = _vision(name, tiny) if self.images else _text(name, tiny)
        if not self.images:
            self.model = Loss(self.model, self.source)
        self.model = self.model.to(device).train()
        self.batch = self._images() if self.images else self._tokens()
        self.optimizers: dict[bool, torch.optim.Optimizer] = {}
        self.compiled: dict[str, tuple[Any, dict[nn.Module, Any], float]] = {}  # shared by arms

    def _images(self) -> tuple[torch.Tensor, ...]:
        count, size = {"resnet18": (128, 32), "resnet50": (256, 224), "efficientnet_b4": (64, 380)}[
            self.name
        ]
        if self.tiny:
            count, size = 2, 32
        classes = 10 if self.name == "resnet18" or self.tiny else 1000
        x = torch.randn(count, 3, size, size, device=self.device)
        return x, torch.randint(0, classes, (count,), device=self.device)

    def _tokens(self) -> tuple[torch.Tensor, ...]:
        count, length, words = {
            "bert_large": (32, 512, 30522), "gpt2": (16, 1024, 50304), "llama_1b": (4, 2048, 32000),
        }[self.name]  # fmt: skip
        if self.tiny:
            count, length, words = 2, 16, 100
        ids = torch.randint(0, words, (count, length), device=self.device)
        labels = ids.clone()
        if self.name == "bert_large":
            labels[torch.rand(labels.shape, device=self.device) > 0.15] = -100
        return ids, labels

    def optimizer(self, **form: Any) -> torch.optim.Optimizer:
        if self.images:
            return torch.optim.SGD(
                self.model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4, **form
            )
        return torch.optim.AdamW(self.model.parameters(), lr=1e-4, **form)

    def shared(self, fused: bool) -> torch.optim.Optimizer:
        """Returns the one optimizer of each form, which all arms use that want it: several would not fit."""
        if fused not in self.optimizers:
            self.optimizers[fused] = self.optimizer(**({"fused": True} if fused else {}))
        return self.optimizers[fused]

    def step(
        self, optimizer: torch.optim.Optimizer, call: Any = None, bf16: bool = True
    ) -> Callable[..., torch.Tensor]:
        """Returns one whole step of training; `call` is the model as it is to be called."""
        model, images, kind = self.model, self.images, self.device.type
        run = model if call is None else call

        def train(*batch: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(kind, torch.bfloat16, enabled=bf16):
                out = run(batch[0]) if images else run(*batch)
                loss = F.cross_entropy(out, batch[1]) if images else out
            loss.backward()
            if not images:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return loss

        return train


class Loss(nn.Module):
    """A language model that returns nothing but its loss, as in the hand-tuned runs."""

    def __init__(self, model: nn.Module, source: str) -> None:
        super().__init__()
        self.model, self.source = model, source

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.source == "transformers":
            return self.model(input_ids=ids, labels=labels).loss
        out = self.model(ids, labels) if isinstance(self.model, nets.Gpt) else self.model(ids)
        return out[1] if isinstance(out, tuple) else out


def leave_masks_out() -> None:
    """Keeps transformers from making attention masks that say nothing, which it does while it is being traced.

    No token of these batches is padding. Without this, compiled attention has no fused kernel for BERT.
    """
    from transformers.masking_utils import AttentionMaskInterface

    AttentionMaskInterface.register("sdpa", lambda *_, **__: None)


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _vision(name: str, tiny: bool) -> tuple[nn.Module, str]:
    if name == "efficientnet_b4" and _has("timm") and not tiny:
        import timm

        return timm.create_model("efficientnet_b4"), "timm"
    if _has("torchvision"):
        import torchvision.models as models

        if name == "efficientnet_b4":
            return (models.efficientnet_b0() if tiny else models.efficientnet_b4()), "torchvision"
        if name == "resnet18":
            return models.resnet18(num_classes=10), "torchvision"
        return (models.resnet18() if tiny else models.resnet50()), "torchvision"
    if name == "efficientnet_b4":
        return (nets.efficientnet(0.2, 0.2) if tiny else nets.efficientnet()), "own"
    whole = nets.resnet50(10 if name == "resnet18" else 1000)
    if tiny:  # its first stage
        return nn.Sequential(
            *whole[:6], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10)
        ), "own"
    return whole, "own"


def _text(name: str, tiny: bool) -> tuple[nn.Module, str]:
    if name == "gpt2":
        small = {"vocab": 100, "context": 16, "layers": 2, "width": 32, "heads": 2}
        return nets.Gpt(by_hand=False, **(small if tiny else {"vocab": 50304})), "own"
    if not _has("transformers"):
        if name == "llama_1b":
            return nets.Llama(
                *((100, 16, 2, 32, 2, 64) if tiny else (32000, 2048, 24, 2048, 16, 5504))
            ), "own"
        raise RuntimeError(f"{name} needs transformers")
    import transformers

    leave_masks_out()
    if name == "bert_large":
        sizes = (64, 2, 4, 128, 100) if tiny else (1024, 24, 16, 4096, 30522)
        names = (
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
            "vocab_size",
        )
        return transformers.BertForMaskedLM(
            transformers.BertConfig(**dict(zip(names, sizes, strict=True)))
        ), "transformers"
    sizes = (64, 128, 2, 4, 4, 100) if tiny else (2048, 5504, 24, 16, 16, 32000)
    names = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
    )  # fmt: skip
    config = transformers.LlamaConfig(use_cache=False, **dict(zip(names, sizes, strict=True)))
    return transformers.LlamaForCausalLM(config), "transformers"


# Timing and memory.


def settle(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def block(run: Callable[[], object], device: torch.device, steps: int) -> float:
    """Returns the seconds of a step, over a block of them."""
    return block_of(run, device, steps)["step_s"]


def block_of(run: Callable[[], object], device: torch.device, steps: int) -> dict[str, float]:
    """Returns the seconds of a step, those after which the host had launched it, and what the driver had to allocate.

    Where the host takes nearly as long as the step, the device waited for launches.
    """
    settle(device)
    allocated, started = allocations(device), time.perf_counter()
    for _ in range(steps):
        run()
    launched = time.perf_counter()
    settle(device)
    return {
        "step_s": (time.perf_counter() - started) / steps,
        "host_s": (launched - started) / steps,
        "allocations": allocations(device) - allocated,
    }


def allocations(device: torch.device) -> int:
    """Returns how often the allocator has asked the driver for memory."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats(device).get("num_device_alloc", 0))


class Memory:
    """Memory of a device as it was before any arm, and what of it is an arm's own."""

    def __init__(self, job: Job) -> None:
        self._device = job.device
        self._start = self._now()
        self._held = (0, 0)

    def _now(self) -> tuple[int, int]:
        if self._device.type != "cuda":
            return 0, 0
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        allocated = torch.cuda.memory_allocated(self._device)
        return allocated, torch.cuda.memory_reserved(self._device)

    def begin(self, own: torch.optim.Optimizer) -> None:
        """Takes what other arms hold now (graphs, another optimizer's state) out of what comes."""
        state = sum(
            v.numel() * v.element_size()
            for entry in own.state.values()
            for v in entry.values()
            if isinstance(v, torch.Tensor)
        )
        now = self._now()
        self._held = (now[0] - self._start[0] - state, now[1] - self._start[1] - state)

    def peaks(self, run: Callable[[], object]) -> dict[str, float]:
        """Returns the peaks of two steps in GB: allocated, and reserved by the allocator.

        What a graph needs is allocated when it is captured, and is among the reserved memory only.
        """
        if self._device.type != "cuda":
            run()
            return {}
        self._now()
        torch.cuda.reset_peak_memory_stats(self._device)
        run()
        run()
        settle(self._device)
        return {
            "allocated_gb": (torch.cuda.max_memory_allocated(self._device) - self._held[0]) / 1e9,
            "reserved_gb": (torch.cuda.max_memory_reserved(self._device) - self._held[1]) / 1e9,
        }


def laid_out(tensor: torch.Tensor, channels_last: bool) -> torch.Tensor:
    """Returns images in channels last where that is wanted."""
    wanted = channels_last and tensor.dim() == 4
    return tensor.contiguous(memory_format=torch.channels_last) if wanted else tensor


class How(NamedTuple):
    """What of the parts an arm has."""

    fused: bool = False
    channels_last: bool = False
    compiled: str | None = (
        None  # "in place", "regional", or "by hand": torch.compile as an expert calls it
    )
    captured: bool = False
    bf16: bool = True
    by_hand: bool = False  # attention written out
    base: str = "eager"  # the arm that it is compared with


#: Where torch keeps a module's compiled call.
SLOT = "_compiled_call_impl"


@contextlib.contextmanager
def no_cache() -> Iterator[None]:
    """Lets a block compile with nothing in the caches, whatever was compiled before."""
    from torch._inductor.utils import fresh_cache

    with fresh_cache(delete=False):
        yield


class Arm:
    """One way of running the step of a job; the model's switches are put in place for every block."""

    def __init__(self, job: Job, how: How, deadline_s: float) -> None:
        self.job, self.how = job, how
        self.handle: Any = None
        self._slots: dict[nn.Module, Any] = {}
        self.optimizer = job.shared(how.fused)
        self.batch = tuple(laid_out(t, how.channels_last) for t in job.batch)
        call = None
        self.first_s = 0.0
        if how.compiled == "by hand":
            if how.compiled not in job.compiled:
                job.compiled[how.compiled] = (torch.compile(job.model), {}, 0.0)
            call = job.compiled[how.compiled][0]
        self._step: Any = job.step(self.optimizer, call, how.bf16)
        if how.compiled in ("in place", "regional"):
            if how.compiled not in job.compiled:
                job.compiled[how.compiled] = self._compile(deadline_s)
            self.handle, self._slots, self.first_s = job.compiled[how.compiled]
        self.captured = (
            CapturedStep(self._step, job.model, self.optimizer) if how.captured else None
        )
        if self.captured is not None:
            self._step = self.captured

    def _compile(self, deadline_s: float) -> tuple[Any, dict[nn.Module, Any], float]:
        """Returns the handle, the calls that it has put into the model (taken out again), and the first step's time."""
        model = self.job.model
        make = compile_in_place if self.how.compiled == "in place" else compile_regions
        handle = make(model, measure=False, deadline_s=deadline_s, evaluation=False)
        with no_cache() if self.how.compiled == "regional" else contextlib.nullcontext():
            started = time.perf_counter()
            self._step(*self.batch)
            settle(self.job.device)
            first_s = time.perf_counter() - started
        # Others are left without a slot of their own: compiled code checks that they have none.
        slots = {m: vars(m).pop(SLOT) for m in model.modules() if SLOT in vars(m)}
        if handle.report().reason is not None:
            raise RuntimeError(f"not compiled after {first_s:.0f} s: {handle.report().reason}")
        return handle, slots, first_s

    @contextlib.contextmanager
    def switched(self) -> Iterator[None]:
        """Puts the compiled calls of this arm, and the kind of attention, in place for a block."""
        for module, call in self._slots.items():
            vars(module)[SLOT] = call
        attention = [m for m in self.job.model.modules() if isinstance(m, nets.CausalAttention)]
        try:
            for m in attention:
                m.by_hand = self.how.by_hand
            yield
        finally:
            for m in attention:
                m.by_hand = False
            for module in self._slots:
                vars(module).pop(SLOT, None)

    def run(self) -> object:
        return self._step(*self.batch)

    def facts(self) -> dict[str, Any]:
        found: dict[str, Any] = {"first_s": self.first_s} if self.first_s else {}
        if self.handle is not None:
            report = self.handle.report()
            found |= {
                "compile_s": report.compile_s, "frames": report.frames, "modules": report.modules,
                "breaks": [str(b) for b in report.breaks], "reason": report.reason,
                "recompiles": [str(r) for r in report.recompiles], "cold": True,
            }  # fmt: skip
        if self.captured is not None:
            step = self.captured.report()
            found |= {
                "capture_s": step.capture_s, "graphs": step.graphs, "replays": step.replays, "captured_reason": step.reason,
                "graph_gb": step.graph_bytes / 1e9, "noise": step.noise,
            }  # fmt: skip
        return found


def arms_of(images: bool, by_hand: bool = False) -> dict[str, How]:
    """Returns the arms by name, most wanted first; those called "together" have all that an expert's best run has.

    Args:
        images: there is a layout to choose.
        by_hand: the attention can also be written out.
    """
    last = images
    base = "eager together" if images else "fused"
    found = {"eager": How(), "TF32": How(bf16=False)}
    if by_hand:
        found["attention by hand"] = How(by_hand=True)
    found["fused"] = How(fused=True)
    if images:
        found["channels last"] = How(channels_last=True)
        found["eager together"] = How(True, True)
    found["in place together"] = How(True, last, "in place", base=base)
    if not images:
        found["in place"] = How(
            compiled="in place"
        )  # the same code: the optimizer is no part of it
    found["by hand"] = How(True, last, "by hand", base=base)
    found["captured together" if images else "captured"] = How(True, last, None, True, base=base)
    found["in place captured"] = How(True, last, "in place", True, base=base)
    found["regional together"] = How(True, last, "regional", base=base)
    if images:
        found["in place"] = How(compiled="in place")
    return found


#: Seconds that are kept for the rounds in which all arms are timed.
ROUNDS_S = 30.0
#: Seconds of steps that are timed of an arm in a round, and steps before them: the allocator has other sizes from the
#: arm before.
BLOCK_S, WARM_STEPS = 0.4, 3


def parts(
    job: Job,
    until: float,
    say: Callable[[str], None],
    keep: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Returns step time and memory of every arm that the time allowed, measured in turns."""
    device = job.device
    last = copy.copy(job)  # a model of its own: graphs need weights that stay where they are
    if job.images:
        last.model, last.optimizers, last.compiled = copy.deepcopy(job.model), {}, {}
        last.model.to(memory_format=torch.channels_last)
    held = Memory(job)
    arms: dict[str, Arm] = {}
    rows: dict[str, dict[str, Any]] = {}
    found = {"source": job.source, "batch": [list(t.shape) for t in job.batch], "arms": rows}
    chosen = arms_of(job.images, isinstance(getattr(job.model, "model", None), nets.Gpt))
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    for name, how in chosen.items():
        left = until - ROUNDS_S - time.monotonic()
        if left < 0 and not job.tiny:
            rows[name] = {"left_out": "no time left"}
            continue
        begun = time.monotonic()
        try:
            own = last if how.channels_last else job
            for p in (*job.model.parameters(), *last.model.parameters()):
                p.grad = None
            if not any(a.captured for a in arms.values()):
                job.shared(not how.fused).state.clear()
            held.begin(own.shared(how.fused))
            arm = Arm(own, how, max(20.0, left))
            with arm.switched():
                first = 16 if arm.captured is not None else 2
                for _ in range(first):
                    arm.run()
                settle(device)
                if how.compiled == "by hand":
                    arm.first_s = time.monotonic() - begun
                rows[name] = held.peaks(arm.run) | arm.facts() | {"set_up_steps": first + 2}
            arms[name] = arm
        except Exception as error:
            rows[name] = {"error": f"{type(error).__name__}: {error}"[:600]}
        rows[name]["set_up_s"] = time.monotonic() - begun
        say(f"  {name}: {rows[name]}")
        keep(found)
    for turn in range(2 if job.tiny else 5):
        for name in list(arms) if turn % 2 == 0 else list(arms)[::-1]:
            arm, row = arms[name], rows[name]
            step_s = row["step_s"][-1] if "step_s" in row else 0.1
            steps = 1 if job.tiny else max(2, min(60, int(BLOCK_S / step_s)))
            with arm.switched():
                block(arm.run, device, 1 if job.tiny else WARM_STEPS)
                for what, value in block_of(arm.run, device, steps).items():
                    row.setdefault(what, []).append(value)
        if time.monotonic() > until and turn >= 1:
            break
    if device.type == "cuda":
        torch.set_float32_matmul_precision("highest")
    for name, arm in arms.items():
        row = rows[name]
        row |= {"step_ms": 1e3 * statistics.median(row["step_s"]), "rounds": len(row["step_s"])}
        row["host_ms"] = 1e3 * statistics.median(row["host_s"])
        row |= arm.facts()
        if chosen[name].base in arms and (arm.handle is not None or arm.captured is not None):
            row["base"] = chosen[name].base
    return found


# Sections.


class Small(nn.Module):
    """Convolution, batch norm, dropout, attention by hand: kernels that are deterministic."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.drop = nn.Dropout(0.2)
        self.blocks = nn.ModuleList(nets.GptBlock(32, 4, 64, True) for _ in range(3))
        self.last = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm(self.conv(x))).flatten(2).transpose(1, 2)
        for part in self.blocks:
            y = self.drop(part(y))
        return self.last(y.mean(1))


def captured_equal(device: torch.device, tiny: bool) -> dict[str, Any]:
    """Returns, for each optimizer, whether 200 captured steps are equal to eager ones to the bit, and their times."""
    steps = 20 if tiny else 200
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    source = torch.Generator().manual_seed(1)
    data = [
        (
            torch.randn(8, 3, 8, 8, generator=source).to(device),
            torch.randint(0, 10, (8,), generator=source).to(device),
        )
        for _ in range(steps)
    ]
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "SGD momentum": (torch.optim.SGD, {"lr": 2.0**-5, "momentum": 0.9, "fused": True}),
        "AdamW": (torch.optim.AdamW, {"lr": 2.0**-10, "fused": True}),
    }
    found: dict[str, Any] = {
        "steps": steps,
        "dropout": 0.2,
        "deterministic": True,
        "dtype": "float32",
    }
    try:
        for name, (kind, options) in kinds.items():
            found[name] = _equal(kind, options, data, device)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.allow_tf32 = True
    return found


def _equal(kind: Any, options: dict[str, Any], data: Any, device: torch.device) -> dict[str, Any]:
    results: list[Any] = []
    for captured in (True, False):
        torch.manual_seed(0)
        net = Small().to(device)
        optimizer = kind(net.parameters(), **options)

        def step(
            x: torch.Tensor, y: torch.Tensor, net: Any = net, optimizer: Any = optimizer
        ) -> torch.Tensor:
            optimizer.zero_grad(set_to_none=True)
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            return loss

        run: Any = (
            CapturedStep(lambda x, y, step=step: step(x, y), net, optimizer) if captured else step
        )
        torch.manual_seed(7)
        losses = [run(*batch).detach().clone() for batch in data]
        rng = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
        state = [t.clone() for t in net.state_dict().values()]
        half = max(1, len(data) // 2)
        times = [block(lambda run=run: run(*data[0]), device, half) for _ in range(5)]
        results.append((torch.stack(losses).cpu(), state, rng, statistics.median(times), run))
    mine, other = results
    report = mine[4].report()
    return {
        "losses_equal": bool(torch.equal(mine[0], other[0])),
        "state_equal": all(torch.equal(a, b) for a, b in zip(mine[1], other[1], strict=True)),
        "generators_equal": bool(torch.equal(mine[2], other[2])),
        "replays": report.replays, "graphs": report.graphs, "reason": report.reason,
        "captured_ms": 1e3 * mine[3], "eager_ms": 1e3 * other[3],
    }  # fmt: skip


def folding(device: torch.device, tiny: bool) -> dict[str, Any]:
    """Returns what folding ResNet-50 in evaluation comes to, in float32 (no TF32) and bfloat16, both layouts."""
    found: dict[str, Any] = {}
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    model, source = _vision("resnet50", tiny)
    model = model.to(device)
    batch = torch.randn(
        2 if tiny else 64, 3, 32 if tiny else 224, 32 if tiny else 224, device=device
    )
    with torch.no_grad():
        for _ in range(3):  # statistics of their own
            model.train()(batch)
    model.eval()
    for dtype, layouts in ((torch.float32, (False,)), (torch.bfloat16, (False, True))):
        for last in layouts:
            twin = copy.deepcopy(model).to(dtype)
            if last:
                twin.to(memory_format=torch.channels_last)
            x = laid_out(batch.to(dtype), last)
            report = fold(twin, x, measure=True).report
            name = (
                f"{str(dtype).removeprefix('torch.')} {'channels last' if last else 'contiguous'}"
            )
            found[name] = vars(report) | {"text": str(report)}
    torch.backends.cudnn.allow_tf32 = True
    return {"source": source, "batch": list(batch.shape)} | found


def optimizer_forms(device: torch.device, tiny: bool, models: tuple[str, ...]) -> dict[str, Any]:
    """Returns the times of the forms of each model's optimizer."""
    found: dict[str, Any] = {}
    for name in models:
        try:
            job = Job(name, device, tiny)
            optimizer = job.optimizer()
            for p in job.model.parameters():
                p.grad = torch.randn_like(p) * 1e-3
            optimizer.step()
            result = fastest_optimizer_form(optimizer, rounds=5 if tiny else 15)
            found[name] = vars(result) | {
                "parameters": sum(p.numel() for p in job.model.parameters())
            }
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
        clean(device)
    return found


def fusion(device: torch.device, tiny: bool) -> dict[str, Any]:
    """Returns what the compiler fuses in forward and backward of GPT-2."""
    job = Job("gpt2", device, tiny)
    with torch.autocast(device.type, torch.bfloat16):
        report = fusion_report(job.model, *job.batch, measure=True)
    largest = [{"operations": k.operations, "bytes": k.moved_bytes} for k in report.kernels[:10]]
    return {n: v for n, v in vars(report).items() if n != "kernels"} | {
        "largest": largest,
        "text": str(report),
    }


def clean(device: torch.device) -> None:
    """Gives memory and compiled code back."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def main() -> None:
    """Runs the chosen sections and writes what they found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--budget-s", type=float, default=540.0, help="no new section or arm is begun after this"
    )
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--per-model-s", type=float, default=170.0, help="no new arm of a model is begun after this"
    )
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    flags = parser.parse_args()
    device = torch.device(flags.device)
    started = time.monotonic()
    result: dict[str, Any] = {
        "torch": torch.__version__,
        "device": flags.device,
        "compile_threads": os.environ["TORCHINDUCTOR_COMPILE_THREADS"],
        "tiny": flags.tiny,
        "sections": {},
    }
    if device.type == "cuda":
        result["gpu"] = torch.cuda.get_device_name(device)

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:6.1f} s] {text}", flush=True)

    def write() -> None:
        flags.out.parent.mkdir(parents=True, exist_ok=True)
        flags.out.write_text(json.dumps(result, indent=1, default=str) + "\n", encoding="utf-8")

    def keep(name: str, found: dict[str, Any]) -> None:
        result["sections"][name] = found
        write()

    def section(name: str, run: Callable[[], Any]) -> None:
        begun = time.monotonic()
        if begun - started > flags.budget_s:
            result["sections"][name] = {"left_out": "no time left"}
        else:
            say(name)
            try:
                result["sections"][name] = run()
            except Exception:
                so_far = result["sections"].get(name, {})
                result["sections"][name] = {**so_far, "error": traceback.format_exc()[-3000:]}
            say(
                f"{name}: {json.dumps(result['sections'][name], default=str)[:1500]} ({time.monotonic() - begun:.0f} s)"
            )
        result["sections"][name]["section_s"] = time.monotonic() - begun
        clean(device)
        write()

    if "captured_equal" in flags.only:
        section("captured_equal", lambda: captured_equal(device, flags.tiny))
    if "fold" in flags.only:
        section("fold", lambda: folding(device, flags.tiny))
    if "optimizer_forms" in flags.only:
        section("optimizer_forms", lambda: optimizer_forms(device, flags.tiny, tuple(flags.model)))
    if "fusion" in flags.only:
        section("fusion", lambda: fusion(device, flags.tiny))
    if "parts" in flags.only:
        for name in flags.model:
            until = min(started + flags.budget_s, time.monotonic() + flags.per_model_s)
            section(
                f"parts {name}",
                lambda name=name, until=until: parts(
                    Job(name, device, flags.tiny),
                    until,
                    say,
                    lambda found, name=name: keep(f"parts {name}", found),
                ),
            )


if __name__ == "__main__":
    main()
