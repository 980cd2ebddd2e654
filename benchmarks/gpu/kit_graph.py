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
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
sys.path.insert(0, str(Path(__file__).parent / "jobs"))

import nets
import torch
import torch.nn.functional as F
from torch import nn

from flopwise.kit.graph import (
    CapturedStep,
    break_even_steps,
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
        self.model, self.source = _vision(name, tiny) if self.images else _text(name, tiny)
        self.model = self.model.to(device).train()
        self.batch = self._images() if self.images else self._tokens()
        self.optimizers: dict[bool, torch.optim.Optimizer] = {}

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

    def loss(self, *batch: torch.Tensor) -> torch.Tensor:
        """Returns the loss of a batch, in bf16."""
        with torch.autocast(self.device.type, torch.bfloat16):
            if self.images:
                return F.cross_entropy(self.model(batch[0]), batch[1])
            if self.source == "own":
                out = self.model(*batch) if self.name == "gpt2" else self.model(batch[0])
                return out[1] if isinstance(out, tuple) else out
            return self.model(input_ids=batch[0], labels=batch[1]).loss

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

    def step(self, optimizer: torch.optim.Optimizer) -> Callable[..., torch.Tensor]:
        """Returns one whole step of training."""

        def train(*batch: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad(set_to_none=True)
            loss = self.loss(*batch)
            loss.backward()
            if not self.images:
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            return loss

        return train


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
    settle(device)
    started = time.perf_counter()
    for _ in range(steps):
        run()
    settle(device)
    return (time.perf_counter() - started) / steps


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


class Arm:
    """One way of running the step of a job; the model's switches are put in place for every block."""

    def __init__(
        self, job: Job, fused: bool, channels_last: bool, compiled: str | None, captured: bool
    ) -> None:
        self.job = job
        self.handle: Any = None
        self._slots: dict[nn.Module, Any] = {}
        self.optimizer = job.shared(fused)
        self.batch = tuple(laid_out(t, channels_last) for t in job.batch)
        self._step: Any = job.step(self.optimizer)
        self.first_s = 0.0
        if compiled is not None:
            make = compile_in_place if compiled == "in place" else compile_regions
            self.handle = make(job.model, measure=False, deadline_s=240.0, evaluation=False)
            self._warm()
            self._slots = {m: vars(m).get("_compiled_call_impl") for m in job.model.modules()}
            for m in job.model.modules():
                vars(m)["_compiled_call_impl"] = None
        self.captured = CapturedStep(self._step, job.model, self.optimizer) if captured else None
        if self.captured is not None:
            self._step = self.captured

    def _warm(self) -> None:
        started = time.perf_counter()
        self._step(*self.batch)
        settle(self.job.device)
        self.first_s = time.perf_counter() - started

    @contextlib.contextmanager
    def switched(self) -> Iterator[None]:
        """Puts the compiled calls of this arm in place for a block."""
        for module, call in self._slots.items():
            vars(module)["_compiled_call_impl"] = call
        try:
            yield
        finally:
            for module in self._slots:
                vars(module)["_compiled_call_impl"] = None

    def run(self) -> object:
        return self._step(*self.batch)

    def facts(self) -> dict[str, Any]:
        found: dict[str, Any] = {"first_s": self.first_s}
        if self.handle is not None:
            report = self.handle.report()
            found |= {
                "compile_s": report.compile_s, "frames": report.frames, "modules": report.modules,
                "breaks": [str(b) for b in report.breaks], "reason": report.reason,
                "recompiles": [str(r) for r in report.recompiles],
            }  # fmt: skip
        if self.captured is not None:
            step = self.captured.report()
            found |= {
                "capture_s": step.capture_s, "graphs": step.graphs, "replays": step.replays, "captured_reason": step.reason,
                "graph_gb": step.graph_bytes / 1e9, "noise": step.noise,
            }  # fmt: skip
        return found


def arms_of(images: bool) -> dict[str, tuple[bool, bool, str | None, bool]]:
    """Returns the arms by name, most wanted first: fused, channels last, compiled, captured."""
    last = images
    found: dict[str, tuple[bool, bool, str | None, bool]] = {
        "eager": (False, False, None, False),
        "fused": (True, False, None, False),
        "captured": (True, False, None, True),  # graphs take the fused form of an optimizer
    }
    if images:
        found["channels_last"] = (False, True, None, False)
        found["eager together"] = (True, True, None, False)
        found["captured together"] = (True, True, None, True)
    return found | {
        "in place together": (True, last, "in place", False),
        "in place captured": (True, last, "in place", True),
        "regional together": (True, last, "regional", False),
        "in place": (False, False, "in place", False),
    }


def parts(job: Job, until: float, say: Callable[[str], None]) -> dict[str, Any]:
    """Returns step time and memory of every arm that the time allowed, measured in turns."""
    device = job.device
    last = copy.copy(job)  # a model of its own: graphs need weights that stay where they are
    if job.images:
        last.model, last.optimizers = copy.deepcopy(job.model), {}
        last.model.to(memory_format=torch.channels_last)
    held = Memory(job)
    arms: dict[str, Arm] = {}
    rows: dict[str, dict[str, Any]] = {}
    for name, how in arms_of(job.images).items():
        if time.monotonic() > until:
            rows[name] = {"left_out": "no time left"}
            continue
        try:
            own = last if how[1] else job
            for p in (*job.model.parameters(), *last.model.parameters()):
                p.grad = None
            if not any(a.captured for a in arms.values()):
                job.shared(not how[0]).state.clear()
            held.begin(own.shared(how[0]))
            arm = Arm(own, *how)
            with arm.switched():
                for _ in range(16 if arm.captured is not None else 3):
                    arm.run()
                rows[name] = held.peaks(arm.run) | arm.facts()
            arms[name] = arm
        except Exception as error:
            rows[name] = {"error": f"{type(error).__name__}: {error}"[:600]}
        say(f"  {name}: {rows[name]}")
    rounds = 2 if job.tiny else 6
    for turn in range(rounds):
        for name in list(arms) if turn % 2 == 0 else list(arms)[::-1]:
            arm = arms[name]
            with arm.switched():
                steps = (
                    1
                    if job.tiny
                    else max(3, int(0.25 / max(rows[name].get("step_s", [0.05])[-1], 1e-4)))
                )
                block(arm.run, device, 1 if job.tiny else 2)
                rows[name].setdefault("step_s", []).append(block(arm.run, device, steps))
        if time.monotonic() > until + 30:
            break
    base = _median(rows, "eager together" if job.images else "fused")
    for name, row in rows.items():
        if "step_s" in row:
            row |= {
                "step_ms": 1e3 * statistics.median(row["step_s"]),
                "rounds": len(row["step_s"]),
            } | arms[name].facts()
            # What was compiled before in this run came from the compiler's cache: the first time counts.
            alike = [
                n
                for n, how in arms_of(job.images).items()
                if how[1:3] == arms_of(job.images)[name][1:3]
            ]
            row["cold_compile_s"] = max(rows.get(n, {}).get("compile_s", 0.0) for n in alike)
            spent_s = row["cold_compile_s"] + row.get("capture_s", 0.0)
            row["break_even_steps"] = break_even_steps(spent_s, base, row["step_ms"] / 1e3)
    return {"source": job.source, "batch": [list(t.shape) for t in job.batch], "arms": rows}


def _median(rows: dict[str, dict[str, Any]], name: str) -> float:
    times = rows.get(name, {}).get("step_s") or rows["eager"].get("step_s") or [0.0]
    return statistics.median(times)


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
    for dtype in (torch.float32, torch.bfloat16):
        for last in (False, True):
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
        report = fusion_report(job.model, *job.batch, loss=lambda out: out[1])
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
        "tiny": flags.tiny,
        "sections": {},
    }
    if device.type == "cuda":
        result["gpu"] = torch.cuda.get_device_name(device)

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:6.1f} s] {text}", flush=True)

    def section(name: str, run: Callable[[], Any]) -> None:
        if time.monotonic() - started > flags.budget_s:
            result["sections"][name] = {"left_out": "no time left"}
        else:
            say(name)
            begun = time.monotonic()
            try:
                result["sections"][name] = run()
            except Exception:
                result["sections"][name] = {"error": traceback.format_exc()[-3000:]}
            say(
                f"{name}: {json.dumps(result['sections'][name], default=str)[:1500]} ({time.monotonic() - begun:.0f} s)"
            )
        clean(device)
        flags.out.parent.mkdir(parents=True, exist_ok=True)
        flags.out.write_text(json.dumps(result, indent=1, default=str) + "\n", encoding="utf-8")

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
                lambda name=name, until=until: parts(Job(name, device, flags.tiny), until, say),
            )


if __name__ == "__main__":
    main()
