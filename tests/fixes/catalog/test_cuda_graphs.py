from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.utils.checkpoint import checkpoint

from flopwise.fixes.catalog import compile_model, cuda_graphs
from flopwise.fixes.catalog.cuda_graphs import CudaGraphs
from flopwise.fixes.interface import Declined, Eligible, Facts, Scene
from flopwise.fixes.slot import COMPILED, GRAPHED, Layers, Slot
from flopwise.meter.found import compiled_parts
from flopwise.meter.replay import Snapshot

# The time limit is the alarm signal, which the usual method of pytest-timeout takes for itself.
pytestmark = pytest.mark.timeout(200, method="thread")

REAL_COMPILE = torch.compile
CUDA = torch.device("cuda")
GB = 10**9


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str | None]]:
    """Gives the modes in which compiled code ran, call by call; Dynamo as ever, without code generation."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    ran: list[str | None] = []

    def compile_quickly(function: Any, backend: Any) -> Any:
        mode = None if backend.mode == "default" else backend.mode

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
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.sin(self.first(x)) * 2)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def x(rows: int = 8) -> torch.Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(rows))


def graphs(model: nn.Module) -> cuda_graphs._Applied:
    return cuda_graphs._Applied([model], 60.0, cores=1)


def scene(*roots: nn.Module, **more: Any) -> Scene:
    given = {"findings": {"L103": 0.4}, "step_s": 0.02, "compute_frac": 0.9, "device": CUDA}
    return Scene(roots=roots or (net(),), **{**given, **more})


class TestCheck:
    @pytest.fixture(autouse=True)
    def _card(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A GPU of 80 GB, of which a step holds 10 GB."""
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(cuda_graphs, "compiler_problem", lambda device: None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * GB, 80 * GB))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 12 * GB)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 10 * GB)

    def test_a_wait_for_launches_is_a_cause(self) -> None:
        assert isinstance(CudaGraphs().check(scene()), Eligible)
        assert isinstance(CudaGraphs().check(scene(step_s=5.0)), Eligible)

    def test_what_another_fix_has_compiled_is_no_reason_against_graphs(self) -> None:
        model = net()
        layers = Layers([model], COMPILED)
        layers.on([lambda call: call])
        assert compiled_parts(model) == 1
        assert isinstance(CudaGraphs().check(scene(model)), Eligible)
        layers.off()
        model._compiled_call_impl = lambda *args: None
        layers.on([lambda call: call])
        assert "compiles its model itself" in CudaGraphs().check(scene(model)).reason

    def test_so_is_a_short_step_that_compiling_makes_shorter(self) -> None:
        assert isinstance(
            CudaGraphs().check(scene(findings={"L107": None}, step_s=0.4, compute_frac=0.5)),
            Eligible,
        )

    @pytest.mark.parametrize(
        ("more", "reason"),
        [
            ({"device": torch.device("cpu")}, "need a CUDA device"),
            ({"facts": Facts(compiles=True)}, "compiles its model itself"),
            ({"findings": {}}, "was not seen to wait for launches"),
            ({"findings": {"L114": 0.1}}, "was not seen to wait for launches"),
            ({"findings": {"L107": 0.1}, "step_s": 0.8}, "computes for 0.72 s"),
            ({"compute_frac": 0.01}, "1.0 %"),
            ({"roots": (nn.DataParallel(net()),)}, "DataParallel"),
            ({"steps_left": 10}, "would not be paid back"),
        ],
    )
    def test_declines_with_a_reason(self, more: Any, reason: str) -> None:
        answer = CudaGraphs().check(Scene(**{**vars(scene()), **more}))
        assert isinstance(answer, Declined)
        assert reason in answer.reason

    @pytest.mark.parametrize(
        ("setting", "reason"),
        [
            ("max_split_size_mb:512,expandable_segments: True", "expandable segments"),
            ("backend:cudaMallocAsync", "native allocator"),
        ],
    )
    def test_declines_other_allocators(
        self, setting: str, reason: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", setting)
        assert reason in CudaGraphs().check(scene()).reason

    def test_declines_where_a_step_does_not_fit_twice(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 40 * GB)
        reason = CudaGraphs().check(scene()).reason
        assert reason == (
            "a step holds up to 40 GB, 0 GB of it for good: graphs would need up to 88 GB, and there are 72 GB"
        )

    def test_declines_gradients_that_are_parts_of_a_buffer(self) -> None:
        model = net()
        flat = torch.zeros(sum(p.numel() for p in model.parameters()))
        for p, part in zip(
            model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True
        ):
            p.grad = part.view_as(p)
        assert "larger buffer" in CudaGraphs().check(scene(model)).reason

    def test_declines_ddp(self) -> None:
        class Wrapper(nn.parallel.DistributedDataParallel):
            def __init__(self, module: nn.Module) -> None:
                nn.Module.__init__(self)
                self.module = module

        assert "DistributedDataParallel" in CudaGraphs().check(scene(Wrapper(net()))).reason


class TestEffect:
    def test_the_numbers_are_compared_once_graphs_are_recorded(
        self, runs: list[str | None]
    ) -> None:
        model = net()
        applied = graphs(model)
        parity = applied.verify(Snapshot(model, (x(),)))
        assert parity.passed, parity.detail
        assert set(runs) == {"reduce-overhead"}
        assert len(runs) == 2 * cuda_graphs.RUNS_UNTIL_REPLAYED
        assert applied.setting == {
            "mode": "reduce-overhead",
            "parts": "whole",
            "deadline_s": "60",
        }
        applied.undo()

    @pytest.mark.parametrize("first", ["compile", "graphs"])
    @pytest.mark.parametrize("off_first", ["compile", "graphs"])
    def test_it_stands_in_front_of_compiled_code_in_any_order(
        self, runs: list[str | None], first: str, off_first: str
    ) -> None:
        model = net()
        both = {"graphs": graphs(model), "compile": compile_model._Applied([model], 60.0)}
        for applied in both.values():
            assert applied.verify(Snapshot(model, (x(),))).passed
        both[first].enable()
        both["compile" if first == "graphs" else "graphs"].enable()
        assert Slot.of(model).composition == (COMPILED, GRAPHED)
        runs.clear()
        model(x())
        assert runs == ["reduce-overhead"]
        assert all(applied.settled() for applied in both.values())
        both[off_first].disable()
        model(x())
        assert runs[1:] == ["reduce-overhead" if off_first == "compile" else None]
        both[off_first].enable()
        model(x())
        assert runs[2:] == ["reduce-overhead"]
        for applied in both.values():
            applied.undo()
        assert "_compiled_call_impl" not in vars(model)

    def test_gradients_add_up_over_batches(self, runs: list[str | None]) -> None:
        model, twin = net(), net()
        applied = graphs(model)
        assert applied.verify(Snapshot(model, (x(),))).passed
        applied.enable()
        for k in range(12):
            loss, expected = model(x()).sum() / 3, twin(x()).sum() / 3
            loss.backward()
            expected.backward()
            if k % 3 == 2:
                for a, b in zip(model.parameters(), twin.parameters(), strict=True):
                    torch.testing.assert_close(a.grad, b.grad)
                    a.grad = b.grad = None
        assert applied.failure() is None
        assert applied.settled()
        applied.undo()

    def test_an_odd_batch_is_eager_and_no_reason(self, runs: list[str | None]) -> None:
        model = net()
        applied = graphs(model)
        compiled = compile_model._Applied([model], 60.0)
        for fix in (compiled, applied):
            assert fix.verify(Snapshot(model, (x(),))).passed
            fix.enable()
        runs.clear()
        for _ in range(10):
            for rows in (8, 8, 8, 8, 3):
                model(x(rows))
        assert runs == ["reduce-overhead"] * 40
        assert applied.failure() is None

    def test_changing_shapes_are_a_reason(self, runs: list[str | None]) -> None:
        model = net()
        applied = graphs(model)
        assert applied.verify(Snapshot(model, (x(),))).passed
        applied.enable()
        for k in range(20):
            model(x(5 + k % 7))
        assert "other shapes than were recorded" in applied.failure()
        assert torch.allclose(model(x(5)), model._call_impl(x(5)))
        applied.undo()


class TestFailures:
    def test_graphs_that_torch_passes_over(self, runs: list[str | None]) -> None:
        model = net()
        applied = graphs(model)
        torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] += 1
        parity = applied.verify(Snapshot(model, (x(),)))
        assert not parity.passed
        assert "passed over its CUDA graphs" in parity.detail

    def test_activation_checkpointing(self, runs: list[str | None]) -> None:
        model, twin = net(), net()
        applied = graphs(model)
        assert applied.verify(Snapshot(model, (x(),))).passed
        applied.enable()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(3):
                given = x()
                checkpoint(model, given, use_reentrant=False).sum().backward()
                checkpoint(twin, given, use_reentrant=False).sum().backward()
        assert "activation checkpointing" in applied.failure()
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)
        applied.undo()

    def test_it_is_taken_back_without_a_trace(self, runs: list[str | None]) -> None:
        model = net()
        names, state = [sorted(vars(m)) for m in model.modules()], copy.deepcopy(model.state_dict())
        rng = torch.get_rng_state()
        applied = graphs(model)
        applied.verify(Snapshot(model, (x(),)))
        applied.enable()
        model(x()).sum().backward()
        grads = [p.grad.clone() for p in model.parameters()]
        assert "_compiled_call_impl" not in vars(copy.deepcopy(model))
        applied.undo()
        assert [sorted(vars(m)) for m in model.modules()] == names
        assert all(
            torch.equal(a, b)
            for a, b in zip(state.values(), model.state_dict().values(), strict=True)
        )
        assert all(torch.equal(a, p.grad) for a, p in zip(grads, model.parameters(), strict=True))
        assert torch.equal(torch.get_rng_state(), rng)


def test_compile_model_beside_it_is_no_reason_and_the_scripts_own_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_graphs, "compiler_problem", lambda device: None)
    monkeypatch.setattr(cuda_graphs, "_memory_problem", lambda scene: None)
    model = net()
    compiled = compile_model._Applied([model], 60.0)
    compiled.enable()
    assert isinstance(CudaGraphs().check(scene(model)), Eligible)
    compiled.undo()
    model.last.compile(backend="eager")
    answer = CudaGraphs().check(scene(model))
    assert isinstance(answer, Declined)
    assert "compiles its model itself" in answer.reason
