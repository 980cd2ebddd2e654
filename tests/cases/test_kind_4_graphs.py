"""torch.compile and CUDA graphs: one test a case. What needs a GPU is in test_kind_4_graphs_on_a_gpu.py."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn

from flopwise.errors import GraphWarning
from flopwise.kit.compiler import compiler_problem
from flopwise.kit.graph import CapturedStep, compile_in_place, suggest_buckets

#: Dynamo's part is the same with every backend; this one generates no code.
QUICK: dict[str, Any] = {"backend": "eager", "measure": False}
INDUCTOR = pytest.mark.skipif(
    compiler_problem(torch.device("cpu")) is not None, reason="needs a C++ compiler"
)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def graphs() -> Any:
    """Graphs of recorded operations, in the place of a GPU's."""
    path = Path(__file__).parents[1] / "kit" / "graph" / "recorded.py"
    spec = importlib.util.spec_from_file_location("recorded", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.RecordedGraphs()


def call(model: nn.Module, times: int, *rest: Any, sizes: Any = (4,)) -> None:
    for k in range(times):
        model(torch.ones(sizes[k % len(sizes)], 8), *rest).sum().backward()


# TC-01: guards on changing Python state recompile until the limit.


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(8, 8), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x) * self.calls


def test_tc01_a_counter_in_the_module_is_named_with_its_line_and_the_run_goes_on_eagerly() -> None:
    model = Counts()
    handle = compile_in_place(model, most_recompiles=5, **QUICK)
    with pytest.warns(GraphWarning, match=r"compiled 6 times more: .*calls.*Now running eager"):
        call(model, 40)
    report = handle.report()
    assert "Now running eager" in (report.reason or "")
    told = [r for r in report.recompiles if "calls" in r.guard]
    assert len(told) == 1
    assert told[0].times >= 6
    assert told[0].seconds > 0
    assert "test_kind_4_graphs.py" in told[0].where
    assert "recompiles" in str(report)
    assert model.calls == 40  # nothing was called twice, and nothing left out


def test_tc01_the_limit_of_recompiles_itself_is_told() -> None:
    model = Counts()
    handle = compile_in_place(model, most_recompiles=100, **QUICK)
    with pytest.warns(GraphWarning, match="the limit of recompiles was met"):
        call(model, 40)
    assert "now running eager there" in str(handle.report()) or handle.report().limits > 0


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, what: Any) -> torch.Tensor:
        return self.layer(x) * (len(what) if isinstance(what, (str, list)) else what)


@pytest.mark.parametrize("kind", ["string", "list"])
def test_tc01_a_changing_string_or_list_is_named_too(kind: str) -> None:
    model = Named()
    handle = compile_in_place(model, most_recompiles=5, **QUICK)

    def train() -> None:
        for k in range(20):
            what = "b" * k if kind == "string" else [0] * k
            model(torch.ones(4, 8), what).sum().backward()

    with pytest.warns(GraphWarning, match="what|args"):
        train()
    assert "Now running eager" in (handle.report().reason or "")


def test_tc01_no_false_alarm_for_an_integer_argument() -> None:
    model = Named()
    handle = compile_in_place(model, **QUICK)
    for k in range(40):
        model(torch.ones(4, 8), k + 2).sum().backward()
    report = handle.report()
    assert report.reason is None
    assert sum(r.times for r in report.recompiles) <= 2


# TC-02: schedules change optimizer constants under compile.


@pytest.mark.parametrize("kind", ["lambda", "one-cycle"])
def test_tc02_a_schedule_beside_a_compiled_model_raises_no_alarm(kind: str) -> None:
    """The optimizer is not in the compiled graph, so no schedule can make it compile anew."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedules: dict[str, Any] = {
        "lambda": lambda: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 0.9**k),
        "one-cycle": lambda: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=40),
    }
    schedule = schedules[kind]()
    handle = compile_in_place(model, **QUICK)
    for _ in range(30):
        optimizer.zero_grad()
        call(model, 1)
        optimizer.step()
        schedule.step()
    report = handle.report()
    assert (report.reason, report.recompiles) == (None, ())


# TC-03: fixed-shape compile with varying lengths.


def test_tc03_static_shapes_tell_sizes_recompiles_and_buckets() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    handle = compile_in_place(model, dynamic=False, most_recompiles=6, **QUICK)
    with pytest.warns(GraphWarning, match="compiled 7 times more"):
        call(model, 30, sizes=range(2, 32))
    report = handle.report()
    assert any(r.of_shape for r in report.recompiles)
    ((dim, counts),) = report.sizes
    assert dim == 0
    assert sorted(counts) == list(range(2, 10))
    assert "sizes of dimension 0: padded to" in str(report)


def test_tc03_dynamic_shapes_and_a_ragged_last_batch_are_fine() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    handle = compile_in_place(model, **QUICK)
    call(model, 30, sizes=range(2, 32))
    assert handle.report().reason is None
    assert sum(r.times for r in handle.report().recompiles) <= 2
    torch._dynamo.reset()
    ragged = nn.Sequential(nn.Linear(8, 8))
    handle = compile_in_place(ragged, **QUICK)
    call(ragged, 20, sizes=[16] * 9 + [5])
    assert sum(r.times for r in handle.report().recompiles) == 1


def test_tc03_buckets_keep_padding_below_the_share_asked_for() -> None:
    sizes = range(2, 32)
    for share in (0.05, 0.1, 0.25):
        chosen = suggest_buckets(sizes, share)
        padded = sum(min(b for b in chosen if b >= n) for n in sizes)
        assert 1 - sum(sizes) / padded <= share
    assert len(suggest_buckets(sizes, 0.25)) < len(suggest_buckets(sizes, 0.05)) < 30


# TC-04: compiled run slower than eager.


@INDUCTOR
def test_tc04_tiny_work_is_rejected_or_its_break_even_told() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    twin = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    twin.load_state_dict(model.state_dict())
    handle = compile_in_place(model, steps_left=100)
    x = torch.randn(4, 16)
    with pytest.warns(
        GraphWarning, match=r"slower by \d+ %|paid back after .* steps, and 100 are left"
    ):
        out = model(x)
    assert torch.equal(out, twin(x))  # eager, to the bit
    report = handle.report()
    assert report.eager_s is not None
    assert report.compiled_s is not None
    assert report.compile_s > 0.1


# TC-05: CUDA graph recorded again for every input size.


def test_tc05_sizes_get_a_graph_each_up_to_a_limit_and_buckets_are_named(graphs: Any) -> None:
    torch.manual_seed(0)
    net = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.125, fused=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    captured = CapturedStep(step, net, optimizer, most_graphs=3, surface=graphs)

    def train() -> None:
        for k in range(60):
            captured(torch.ones((10, 13, 16, 19, 22)[k % 5], 8))

    with pytest.warns(
        GraphWarning, match=r"more than 3 shapes; 5 sizes of dimension 0 .* buckets=\(16, 24\)"
    ):
        train()
    report = captured.report()
    assert report.graphs == report.captures == 3  # no size was recorded twice
    assert {shape[0][0]: times for shape, times in report.shapes.items()} == dict.fromkeys(
        (10, 13, 16, 19, 22), 12
    )


# TC-06: compiled bf16 differs from eager bf16.


class Rotary(nn.Module):
    """A chain like a rotary embedding, in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(32, 32, bias=False).to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.proj(x).chunk(2, -1)
        angle = torch.linspace(0, 3, a.shape[-1]).to(x.dtype)
        return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1)


@INDUCTOR
def test_tc06_fused_bf16_is_accepted_against_float64() -> None:
    torch.manual_seed(0)
    model = Rotary()
    handle = compile_in_place(model, measure=False)
    result = handle.verify(torch.randn(64, 32, dtype=torch.bfloat16))
    assert result.passed
    assert "float64" in result.reason
    assert result.error_compiled is not None
    assert result.error_eager is not None
    assert handle.report().reason is None


def test_tc06_a_wrong_operator_is_rejected_with_its_module() -> None:
    def wrong(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            return [out * 1.5 if isinstance(out, torch.Tensor) else out for out in graph(*args)]

        return run

    torch.manual_seed(0)
    model = Rotary()
    handle = compile_in_place(model, backend=wrong, measure=False)
    with pytest.warns(GraphWarning, match="the numbers differ: error against float64"):
        result = handle.verify(torch.randn(64, 32, dtype=torch.bfloat16))
    assert not result.passed
    assert result.worst == "proj"
    assert vars(model).get("_compiled_call_impl") is None


# TC-07: dropout masks differ between eager and compiled.


class Drops(nn.Module):
    def __init__(self, functional: bool) -> None:
        super().__init__()
        self.layer, self.drop, self.functional = nn.Linear(8, 8), nn.Dropout(0.5), functional

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return nn.functional.dropout(y, 0.5, True) if self.functional else self.drop(y)


@INDUCTOR
@pytest.mark.parametrize("functional", [False, True])
def test_tc07_other_dropout_masks_are_no_change_of_the_loss(functional: bool) -> None:
    torch.manual_seed(0)
    model = Drops(functional)
    handle = compile_in_place(model, measure=False)
    result = handle.verify(torch.ones(64, 8))
    assert result.passed, result.reason
    expected = "random numbers are drawn" if functional else "float64"
    assert expected in result.reason
    assert model.drop.training


# TC-08: compilation time explodes.


# The stop may arrive in a finalizer, where Python prints and drops it; it is sent again.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_tc08_a_compilation_past_its_deadline_is_abandoned_and_the_run_does_not_hang() -> None:
    """A backend that never ends stands for the chain whose code doubles with each repetition."""

    def endless(graph: Any, inputs: Any) -> Any:
        while True:
            sum(range(1000))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8))
    twin = nn.Sequential(nn.Linear(8, 8))
    twin.load_state_dict(model.state_dict())
    handle = compile_in_place(model, backend=endless, measure=False, deadline_s=0.5)
    x = torch.randn(4, 8)
    with pytest.warns(GraphWarning, match=r"compilation abandoned after \d+ s, continuing eager"):
        out = model(x)
    assert torch.equal(out, twin(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error", GraphWarning)  # said once
        model(x)
    assert "continuing eager" in str(handle.report())
