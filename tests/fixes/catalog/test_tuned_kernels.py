"""Code with tuned kernels, in front of compiled code; Dynamo as ever, without code generation and without a search."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from flopwise.fixes.candidates import clashes
from flopwise.fixes.catalog import compile_model, tuned_kernels
from flopwise.fixes.catalog.cuda_graphs import CudaGraphs
from flopwise.fixes.catalog.tuned_kernels import TunedKernels
from flopwise.fixes.interface import Declined, Eligible, Facts, Scene
from flopwise.fixes.slot import AUTOTUNED, COMPILED, Slot
from flopwise.meter.replay import Snapshot

REAL_COMPILE = torch.compile


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The modes in which compiled code ran, call by call."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    ran: list[str] = []

    def compile_quickly(function: Any, backend: Any) -> Any:
        mode = backend.mode

        def plainly(graph: Any, inputs: Any) -> Any:
            def run(*args: Any) -> Any:
                ran.append(mode)
                return graph(*args)

            return run

        return REAL_COMPILE(function, backend=plainly)

    monkeypatch.setattr(torch, "compile", compile_quickly)
    yield ran
    torch._dynamo.reset()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.sin(self.first(x)) * 2)


def x(rows: int = 8) -> torch.Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(rows))


def scene(*roots: nn.Module, **more: Any) -> Scene:
    given = {"step_s": 0.02, "compute_frac": 0.9, "device": torch.device("cuda")}
    return Scene(roots=roots or (Net(),), **{**given, **more})


class TestCheck:
    @pytest.fixture(autouse=True)
    def card(self, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
        it = SimpleNamespace(multi_processor_count=132)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: it)
        monkeypatch.setattr(tuned_kernels, "compiler_problem", lambda device: None)
        monkeypatch.setattr(tuned_kernels, "alarm_problem", lambda: None)
        return it

    def test_on_a_large_gpu(self) -> None:
        assert isinstance(TunedKernels().check(scene()), Eligible)

    @pytest.mark.parametrize(
        ("more", "reason"),
        [
            ({"device": torch.device("cpu")}, "on a CUDA device"),
            ({"facts": Facts(compiles=True)}, "compiles its model itself"),
            ({"compute_frac": 0.01}, "1.0 %"),
            ({"steps_left": 10}, "would not be paid back"),
        ],
    )
    def test_declines_with_a_reason(self, more: Any, reason: str) -> None:
        answer = TunedKernels().check(scene(**more))
        assert isinstance(answer, Declined)
        assert reason in answer.reason

    def test_declines_on_a_small_gpu(self, card: SimpleNamespace) -> None:
        card.multi_processor_count = 40
        answer = TunedKernels().check(scene())
        assert isinstance(answer, Declined)
        assert "40 multiprocessors" in answer.reason

    def test_beside_compiled_blocks_and_beside_the_compiled_whole(self) -> None:
        model = nn.Sequential(Net(), Net())
        applied = compile_model._Applied([model[0]], 60.0)
        applied.enable()
        answer = TunedKernels().check(scene(model))
        assert isinstance(answer, Declined)
        assert "block by block" in answer.reason
        applied.undo()
        applied = compile_model._Applied([model], 60.0)
        applied.enable()
        assert isinstance(TunedKernels().check(scene(model)), Eligible)
        applied.undo()

    def test_not_together_with_graphs(self) -> None:
        assert clashes(TunedKernels(), CudaGraphs())


@pytest.mark.parametrize("off_first", ["tuned", "compiled"])
def test_tuned_code_stands_in_front_of_compiled_code(runs: list[str], off_first: str) -> None:
    model = Net()
    compiled: Any = compile_model._Applied([model], 60.0)
    tuned: Any = tuned_kernels._Applied([model], 60.0, cores=1)
    expected = model(x())
    for fix in (compiled, tuned):
        parity = fix.verify(Snapshot(model, (x(),)))
        assert parity.passed, parity.detail
        fix.enable()
    assert Slot.of(model).composition == (COMPILED, AUTOTUNED)
    runs.clear()
    torch.testing.assert_close(model(x()), expected)
    assert runs == [tuned_kernels.MODE]
    assert compiled.settled()
    assert tuned.settled()
    model(x(3))  # an odd call goes to compiled code, which lets it run eagerly
    assert runs == [tuned_kernels.MODE]
    both = {"tuned": tuned, "compiled": compiled}
    both[off_first].disable()
    runs.clear()
    model(x())
    assert runs == ["default" if off_first == "tuned" else tuned_kernels.MODE]
    both[off_first].enable()
    model(x())
    assert runs[1:] == [tuned_kernels.MODE]
    for fix in both.values():
        fix.undo()
    assert "_compiled_call_impl" not in vars(model)


def test_what_it_does_is_told(runs: list[str]) -> None:
    applied = tuned_kernels._Applied([Net()], 60.0, cores=1)
    assert applied.setting["mode"] == "max-autotune-no-cudagraphs"
    assert set(torch._inductor.list_mode_options(applied.setting["mode"])) >= {"max_autotune"}
    applied.undo()
