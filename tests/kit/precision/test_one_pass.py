"""The check by one kernel: on a CPU with the kernel in Python, and with Triton's interpreter where that is there."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from flopwise.errors import PrecisionError
from flopwise.kit.precision import DynamicScaler, one_pass
from flopwise.kit.precision.checking import check
from flopwise.kit.precision.one_pass import OnePass

CPU = torch.device("cpu")
_TYPES = {0: (torch.float32, 4), 1: (torch.float16, 2), 2: (torch.bfloat16, 2)}


class Reader:
    """Does what the first kernel does, in Python: from addresses, as it does."""

    def __init__(self) -> None:
        self.launches = 0

    def __getitem__(self, grid: tuple[int]) -> Any:
        assert grid[0] >= 1
        return self._launch

    def _launch(
        self, places: Any, extents: Any, spans: Any, state: Any, found: Any, amax: Any,
        count: int, blocks: int, look: int, mixed: bool, block: int, num_warps: int,
    ) -> None:  # fmt: skip
        self.launches += 1
        assert state.tolist() == [0, 0]
        assert len(spans) == count
        top = torch.zeros(())
        for tensor, first in spans.tolist():
            low, high, code = extents[tensor].tolist()
            assert mixed or code == 0
            begin, end = max(low, first * block), min(high, (first + blocks) * block)
            if begin < end:
                dtype, size = _TYPES[code]
                raw = ctypes.string_at(places[tensor].item() + begin * size, (end - begin) * size)
                values = torch.frombuffer(bytearray(raw), dtype=dtype).float()
                top = torch.stack([top, values.abs().amax()]).amax()
        bad = not math.isfinite(top)
        found.fill_(float(bad))
        amax.copy_(top if look else torch.tensor(math.inf if bad else 0.0))


class Ender:
    """Does what the second kernel does, in Python."""

    def __getitem__(self, grid: tuple[int]) -> Any:
        assert grid == (1,)
        return self._launch

    def _launch(
        self, scale: Any, tracker: Any, found: Any, amax: Any, rows: Any, row: int,
        growth: float, backoff: float, least: float, interval: int, num_warps: int,
    ) -> None:  # fmt: skip
        rows[row] = torch.stack([amax, scale])
        torch._amp_update_scale_(scale, tracker, found, growth, backoff, interval)
        scale.clamp_(min=least)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Kernels in Python, for tensors of the CPU."""
    made = {"read": Reader(), "end_update": Ender()}
    monkeypatch.setattr(one_pass, "DEVICE", "cpu")
    monkeypatch.setattr(one_pass, "_capturing", lambda device: False)
    monkeypatch.setattr(one_pass, "_stream_id", lambda device: 0)
    monkeypatch.setattr(one_pass, "_most_programs", lambda device: 4)
    monkeypatch.setattr(one_pass, "_on", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(one_pass, "kernel_of", made.__getitem__)
    return made


def same(a: Any, b: Any) -> None:
    """Asserts that two checks say the same, NaN like NaN."""
    assert a[0].keys() == b[0].keys()
    for device in a[0]:
        assert torch.equal(a[0][device], b[0][device])
    for x, y in zip(a[1], b[1], strict=True):
        assert x.dtype is y.dtype is torch.float32
        assert x.shape == y.shape == ()
        assert torch.equal(x, y) or (bool(x.isnan()) and bool(y.isnan()))


@pytest.mark.parametrize("look", [True, False])
@pytest.mark.parametrize("bad", [None, math.inf, -math.inf, math.nan])
def test_it_says_what_torchs_kernels_say(kernels: dict[str, Any], bad: Any, look: bool) -> None:
    held = torch.randn(9001)
    grads = [held[1:], torch.randn(3, 5).t(), torch.empty(0), torch.randn(7).half() * 100]
    if bad is not None:
        held[4097] = bad
    found = OnePass().check(grads, CPU, look)
    assert found is not None
    same(found, check(grads, CPU, look))
    assert kernels["read"].launches == 1


def test_it_leaves_other_tensors_to_torch(kernels: dict[str, Any]) -> None:
    reader = OnePass()
    assert reader.check([torch.ones(3), torch.ones(3, dtype=torch.float64)], CPU, True) is None
    assert reader.check([], CPU, True) is None
    assert reader.largest([torch.ones(4)[::2]], CPU) is None
    assert reader.declined is None
    largest = reader.largest([torch.ones(4), torch.full((2,), -3.0)], CPU)
    assert largest is not None
    assert largest.item() == 3.0
    assert OnePass(wanted=False).check([torch.ones(3)], CPU, True) is None
    assert kernels["read"].launches == 1


def test_a_stream_has_tables_of_its_own(
    kernels: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, grads = OnePass(), [torch.ones(3)]
    for at in (1, 2, 1, 2):
        monkeypatch.setattr(one_pass, "_stream_id", lambda device, at=at: at)
        assert reader.check(grads, CPU, True) is not None
    held = list(reader._streams.values())
    assert [s.tables.uploads for s in held] == [3, 3]
    assert held[0].state.data_ptr() != held[1].state.data_ptr()
    for at in range(100):
        monkeypatch.setattr(one_pass, "_stream_id", lambda device, at=at: at)
        assert reader.check(grads, CPU, True) is not None
    assert len(reader._streams) == one_pass.STREAMS


def test_nothing_is_launched_while_a_graph_is_captured(
    kernels: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_pass, "_capturing", lambda device: True)
    reader = OnePass()
    assert reader.check([torch.ones(3)], CPU, True) is None
    assert not ended(reader, torch.tensor(4.0))
    assert reader.declined is None


def ended(reader: OnePass, scale: torch.Tensor, factors: Any = (2.0, 0.5, 0.25)) -> bool:
    tracker = torch.zeros((), dtype=torch.int32)
    ring = torch.zeros(4, 2)
    found, amax = torch.ones(()), torch.full((), math.inf)
    return reader.end_update(scale, tracker, found, amax, ring, 2, factors, 10)


def test_the_end_of_an_update_counts_as_a_change_of_the_scale(kernels: dict[str, Any]) -> None:
    scale = torch.tensor(4.0)
    assert ended(OnePass(), scale)
    assert scale.item() == 2.0
    assert scale._version >= 1  # autograd must know: products saved it
    for factors in ((2.0**127, 0.5, 1.0), (2.0, 2.0**-130, 1.0), (2.0, 0.5, 0.0)):
        assert not ended(OnePass(), scale, factors)
    assert not ended(OnePass(), torch.tensor(4.0, dtype=torch.float64))
    assert not ended(OnePass(wanted=False), scale)
    assert scale.item() == 2.0


def trained(scaler: DynamicScaler, kind: str) -> dict[str, Any]:
    """Returns all that a training with overflows leaves, of two optimizers if there are."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(9, 20), nn.ReLU(), nn.Linear(20, 3)) for _ in range(2)]
    used = models if kind == "two" else models[:1]
    made: list[torch.optim.Optimizer] = []
    for model in used:
        if kind == "sgd":
            made.append(torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9))
        else:
            made.append(torch.optim.AdamW(model.parameters(), 1e-2, fused=True))
    scales = []
    for i in range(45):
        x = torch.randn(4, 9) * (math.inf if i in (3, 17, 18) else 1.0)
        for model, optimizer in zip(used, made, strict=True):
            optimizer.zero_grad()
            scaler.scale(model(x).square().mean()).backward()
            if kind == "unscaled":
                scaler.unscale_(optimizer)
            if kind == "clipped":
                scaler.clip_grad_norm_(model.parameters(), 0.1)
        for optimizer in made:
            scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    state = [v for o in made for s in o.state.values() for v in s.values()]
    return {
        "scales": scales,
        "skipped": scaler.skipped,
        "reviews": [(r.update, r.amax, r.scale) for r in scaler.reviews],
        "own": scaler.state_dict(),
        "tensors": [*(p.detach() for m in used for p in m.parameters()), *state],
    }


@pytest.mark.filterwarnings("ignore::flopwise.errors.PrecisionWarning")
@pytest.mark.parametrize("schedule", ["magnitude", "growth"])
@pytest.mark.parametrize("kind", ["adamw", "unscaled", "clipped", "two", "sgd"])
def test_a_training_is_the_same_to_the_bit(
    kernels: dict[str, Any], kind: str, schedule: str
) -> None:
    def scaler(which: str) -> DynamicScaler:
        return DynamicScaler(
            "cpu", schedule=schedule, review_steps=20, growth_interval=6, alarm_skips=100,
            unfused="masked", kernels=which,
        )  # fmt: skip

    ours, theirs = trained(scaler("auto"), kind), trained(scaler("torch"), kind)
    launches = kernels["read"].launches
    assert launches > 0 or schedule == "growth"  # there nobody looks at what is unscaled
    if kind in ("adamw", "two"):
        assert launches == (90 if kind == "two" else 45)
    a, b = ours.pop("tensors"), theirs.pop("tensors")
    assert ours == theirs
    assert ours["skipped"] == 3
    assert len(a) == len(b) >= 8
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_gradients_of_a_skipped_step_stay_scaled_as_with_gradscaler(
    kernels: dict[str, Any],
) -> None:
    def left(scaler: GradScaler) -> list[float]:
        weight = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.AdamW([weight], 0.1, fused=True)
        scaler.scale((weight * torch.tensor([1.0, math.inf])).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert weight.grad is not None
        return [float(g) for g in weight.grad]

    assert left(GradScaler("cpu", 8.0)) == left(DynamicScaler("cpu", 8.0)) == [8.0, math.inf]
    assert left(DynamicScaler("cpu", 8.0, kernels="torch")) == [1.0, math.inf]


class Broken:
    """A kernel that no compiler is there for."""

    tries = 0

    def __getitem__(self, grid: Any) -> Any:
        type(self).tries += 1
        raise RuntimeError("a long story\nFailed to find C compiler.")


def test_a_kernel_that_fails_is_tried_once_and_reported(
    kernels: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Broken, "tries", 0)
    kernels["read"] = Broken()
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([weight], 0.1, fused=True)
    scaler = DynamicScaler("cpu")
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert Broken.tries == 1
    assert scaler.report().endswith(
        "gradients are checked by torch's kernels, not by one of Triton: RuntimeError: Failed to find C compiler."
    )
    assert weight.detach().amax() < 1


def test_without_triton_that_is_the_reason(
    kernels: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(one_pass, "DEVICE", "cpu")
    for name, value in (("_capturing", False), ("_stream_id", 0), ("_most_programs", 4)):
        monkeypatch.setattr(one_pass, name, lambda device, value=value: value)
    monkeypatch.setattr(one_pass, "_on", lambda device: contextlib.nullcontext())
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "flopwise.kit.precision.kernels", raising=False)
    reader = OnePass()
    assert reader.check([torch.ones(3)], CPU, True) is None
    assert reader.declined is not None
    assert reader.declined.startswith("ModuleNotFoundError: ")
    assert "triton" in reader.declined
    assert not reader.used


def test_on_a_cpu_nothing_is_tried_nor_said() -> None:
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([weight], 0.1, fused=True)
    scaler = DynamicScaler("cpu")
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert "Triton" not in scaler.report()
    assert not scaler._one_pass.used


def test_kernels_are_one_of_two_words() -> None:
    with pytest.raises(PrecisionError, match=r"kernels='cuda': it is 'auto' or 'torch'"):
        DynamicScaler("cpu", kernels="cuda")


INTERPRETED = """
import contextlib, math, random, sys, warnings
import torch
sys.path.insert(0, sys.argv[1])
warnings.simplefilter("ignore")
import test_one_pass as tests
from flopwise.kit.precision import DynamicScaler, one_pass
from flopwise.kit.precision.checking import check

torch.set_num_threads(1)
one_pass.DEVICE = "cpu"
one_pass._capturing = lambda device: False
one_pass._stream_id = lambda device: 0
one_pass._most_programs = lambda device: 3
one_pass._on = lambda device: contextlib.nullcontext()
CPU, DTYPES = torch.device("cpu"), [torch.float32, torch.float16, torch.bfloat16]
random.seed(0), torch.manual_seed(0)
reader = one_pass.OnePass()
for case in range(24):
    grads = []
    for _ in range(random.choice([1, 2, 5, 30])):
        n = random.choice([0, 1, 2, 3, 4, 5, 31, 4095, 4096, 4097, 9000]) if case % 3 else random.randint(1, 200)
        dtype = random.choice(DTYPES) if case % 2 else torch.float32
        shift = random.randint(0, 9)
        grads.append((torch.randn(n + shift) * 10 ** random.uniform(-9, 4)).to(dtype)[shift:])
    filled = [g for g in grads if g.numel()]
    if not filled:
        continue
    for bad in [b for b in (None, math.inf, -math.inf, math.nan) if b is None or case % 4 == 0]:
        if bad is not None:
            grad = random.choice(filled)
            grad[random.choice([0, -1, random.randrange(len(grad))])] = bad
        for look in (True, False):
            found = reader.check(grads, CPU, look)
            assert found is not None, reader.declined
            tests.same(found, check(grads, CPU, look))
def scaler(which):
    return DynamicScaler("cpu", schedule=sys.argv[2], review_steps=20, growth_interval=6, alarm_skips=100, kernels=which)
auto = scaler("auto")
ours, theirs = tests.trained(auto, "adamw"), tests.trained(scaler("torch"), "adamw")
assert auto._one_pass.used and auto._one_pass.declined is None, auto._one_pass.declined
a, b = ours.pop("tensors"), theirs.pop("tensors")
assert ours == theirs, (ours, theirs)
assert all(torch.equal(x, y) for x, y in zip(a, b))
print("equal")
"""


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton, which CPU builds lack"
)
@pytest.mark.parametrize("schedule", ["magnitude", "growth"])
def test_tritons_interpreter_says_what_torchs_kernels_say(schedule: str) -> None:
    here = os.path.dirname(__file__)
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED, here, schedule],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "equal"
