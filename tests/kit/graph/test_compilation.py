"""Models compiled in place and by regions: what is compiled, what is counted, and when eager it is."""

from __future__ import annotations

import copy
import pickle
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import nn

from flopwise.errors import GraphWarning
from flopwise.kit.graph import compilation, rehearsal
from flopwise.kit.graph.compilation import compile_in_place, compile_regions
from flopwise.kit.graph.regions import likeness, regions_of, silent_compiles

QUICK: dict[str, Any] = {"backend": "aot_eager", "measure": False}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Stack(nn.Module):
    def __init__(self, blocks: int = 6, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def train(model: nn.Module, steps: int = 3, size: int = 4) -> list[float]:
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(size, 8)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def built(kind: Any, *args: Any) -> Any:
    torch.manual_seed(0)
    return kind(*args)


def test_in_place_the_model_stays_what_it_was() -> None:
    model, twin = built(Stack), built(Stack)
    keys = list(model.state_dict())
    handle = compile_in_place(model, **QUICK)
    assert train(model) == pytest.approx(train(twin), rel=1e-5)
    assert type(model) is Stack
    assert list(model.state_dict()) == keys
    assert model.norm.num_batches_tracked.item() == 3  # the rehearsal left no trace
    report = handle.report()
    assert (report.modules, report.frames, report.recompiles, report.reason) == (1, 1, (), None)
    assert report.compile_s > 0
    assert str(report).startswith("compiled: 1 modules, 1 frames")
    assert vars(pickle.loads(pickle.dumps(model))).get("_compiled_call_impl") is None
    assert vars(copy.deepcopy(model)).get("_compiled_call_impl") is None
    handle.remove()
    assert vars(model).get("_compiled_call_impl") is None
    assert handle.report().reason == "removed"


def test_regions_that_are_alike_are_compiled_once() -> None:
    model, twin = built(Stack, 6), built(Stack, 6)
    handle = compile_regions(model, **QUICK)
    assert train(model) == pytest.approx(train(twin), rel=1e-5)
    report = handle.report()
    assert (report.modules, report.shared, report.reason) == (6, 1, None)
    assert report.frames == 2  # the first block's input needs no gradient, the others' does
    handle.remove()
    assert all(vars(m).get("_compiled_call_impl") is None for m in model.modules())
    assert train(model) == pytest.approx(train(twin), rel=1e-5)


def test_the_outermost_repeated_blocks_are_the_regions() -> None:
    model = nn.Sequential(
        nn.Sequential(Block(), Block()), nn.Sequential(Block(16)), nn.Linear(2, 2)
    )
    assert [n for n, _ in regions_of(model)] == ["0.0", "0.1", "1.0"]
    assert [n for n, _ in regions_of(model, nn.Linear)][:2] == ["0.0.up", "0.0.down"]
    assert [n for n, _ in regions_of(model, lambda name, _: name == "1")] == ["1"]
    assert likeness(model[0][0]) == likeness(model[0][1])
    assert likeness(model[0][0]) != likeness(model[1][0])


def test_evaluation_and_training_are_compiled_apart() -> None:
    model = built(Stack)
    handle = compile_in_place(model, **QUICK)
    train(model)
    model.eval()
    with torch.no_grad():
        first = model(torch.ones(4, 8))
    model.train()
    train(model)
    report = handle.report()
    assert (report.frames, report.evaluation_frames, report.recompiles) == (1, 1, ())
    handle.remove()
    model.eval()
    assert first.shape == model(torch.ones(4, 8)).shape


def test_evaluation_may_be_left_eager() -> None:
    model = built(Stack)
    handle = compile_in_place(model, evaluation=False, **QUICK)
    train(model)
    model.eval()
    with torch.no_grad():
        out = model(torch.ones(4, 8))
    assert handle.report().evaluation_frames == 0
    handle.remove()
    with torch.no_grad():
        assert torch.equal(out, model(torch.ones(4, 8)))


def library() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def test_a_container_of_library_layers_is_compiled_where_torch_compiles_nothing() -> None:
    model = library()
    model.compile(backend="aot_eager")
    before = compilation.tally()
    train(model)
    assert (compilation.tally() - before).frames == 0  # the silent no-op
    assert silent_compiles(model) == [""]
    handle = compile_in_place(model, **QUICK)
    train(model)
    report = handle.report()
    assert (report.frames, report.cured, report.reason) == (1, ("",), None)
    assert "module.compile() had had no effect on the model" in str(report)
    handle.remove()
    assert silent_compiles(model) == [""]  # as it was found


def test_a_library_block_is_compiled_as_a_region() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    for part in model.layers:
        part.compile(backend="aot_eager")
    assert silent_compiles(model) == ["layers.0", "layers.1", "layers.2"]
    handle = compile_regions(model, **QUICK)
    loss = model(torch.randn(2, 5, 8)).square().mean()
    loss.backward()
    report = handle.report()
    assert report.cured == ("layers.0", "layers.1", "layers.2")
    assert report.frames == 2


def test_torchscript_is_left_with_the_reason() -> None:
    script = torch.jit.script(nn.Linear(8, 8))
    with pytest.warns(GraphWarning, match="is not compiled: the module is TorchScript"):
        handle = compile_in_place(script, **QUICK)
    assert script(torch.ones(1, 8)).shape == (1, 8)
    model = nn.Sequential(Block(), Block(), script)
    with pytest.warns(GraphWarning, match="a part of the module is TorchScript"):
        compile_in_place(model, **QUICK)
    handle = compile_regions(model, **QUICK)
    model(torch.ones(2, 8)).sum().backward()
    assert handle.report().modules == 2


def test_what_is_compiled_already_is_left() -> None:
    model = built(Stack)
    model.compile(backend="aot_eager")
    with pytest.warns(GraphWarning, match="compiled already"):
        compile_in_place(model, **QUICK)
    with pytest.warns(GraphWarning, match="no block of the model is repeated"):
        compile_regions(nn.Linear(2, 2), **QUICK)


class Slow:
    """A backend that takes its time."""

    def __call__(self, graph: Any, inputs: Any) -> Any:
        for _ in range(1000):
            time.sleep(0.01)
        return graph.forward


# The stop may arrive in a finalizer, where Python prints and drops it; it is sent again.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_compilation_past_its_deadline_is_abandoned_and_the_run_goes_on() -> None:
    model, twin = built(Stack), built(Stack)
    handle = compile_in_place(model, backend=Slow(), measure=False, deadline_s=0.5)
    started = time.monotonic()
    with pytest.warns(GraphWarning, match=r"compilation abandoned after \d s, continuing eager"):
        losses = train(model)
    assert time.monotonic() - started < 8
    assert losses == train(twin)
    assert "continuing eager" in str(handle.report())


def test_a_compiler_that_fails_leaves_the_model_eager() -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no such instruction")

    model, twin = built(Stack), built(Stack)
    compile_in_place(model, backend=backend, measure=False)
    with pytest.warns(GraphWarning, match="compiling failed .*no such instruction"):
        losses = train(model)
    assert losses == train(twin)


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        torch._dynamo.graph_break()
        x = self.layer(x)
        torch._dynamo.graph_break()
        return self.layer(x)


def test_graph_breaks_are_counted_with_their_lines() -> None:
    model = built(Breaks)
    handle = compile_in_place(model, **QUICK)
    train(model)
    report = handle.report()
    assert len(report.breaks) == 2
    assert "test_compilation.py:" in str(report)
    assert report.reason is None


def test_too_many_graph_breaks_take_it_back() -> None:
    model, twin = built(Breaks), built(Breaks)
    compile_in_place(model, most_breaks=1, **QUICK)
    with pytest.warns(
        GraphWarning, match=r"2 graph breaks, more than 1, first at .*test_compilation.py"
    ):
        losses = train(model)
    assert losses == train(twin)


def test_slower_code_is_taken_back_and_the_break_even_is_told(monkeypatch: Any) -> None:
    times = {"eager": 0.010, "compiled": 0.017}
    monkeypatch.setattr(rehearsal, "interleaved", lambda *_, **__: times)
    options = {"backend": "aot_eager"}
    model = built(Stack)
    compile_in_place(model, **options)
    with pytest.warns(GraphWarning, match="slower by 70 %"):
        train(model)
    times.update(compiled=0.004)
    handle = compile_in_place(built(Stack), **options)
    model = handle._model
    train(model)
    report = handle.report()
    assert report.break_even_steps == -(-report.compile_s // 0.006)
    assert f"paid back after {report.break_even_steps} steps" in str(report)
    compile_in_place(model := built(Stack), steps_left=1, **options)
    with pytest.warns(GraphWarning, match=r"paid back after \d+ steps, and 1 are left"):
        train(model)


def test_timing_leaves_the_training_as_it_was() -> None:
    model, twin = built(Stack), built(Stack)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphWarning)  # which way is faster is not the point
        compile_in_place(model, backend="aot_eager")
        losses = train(model)
    assert losses == pytest.approx(train(twin), rel=1e-5)
    assert model.norm.num_batches_tracked.item() == 3


def test_random_numbers_are_where_they_would_be() -> None:
    model = built(Stack)
    compile_in_place(model, **QUICK)
    torch.manual_seed(1)
    x = torch.randn(4, 8)
    model(x).sum().backward()
    after = torch.rand(())
    torch.manual_seed(1)
    torch.randn(4, 8)
    assert after == torch.rand(())


def test_numbers_held_against_float64() -> None:
    model = built(Stack)
    handle = compile_in_place(model, **QUICK)
    x = torch.randn(16, 8)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    result = handle.verify(x)
    assert result.passed
    assert "float64" in result.reason
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    handle = compile_regions(built(Stack), **QUICK)
    assert handle.verify(x).passed


class Placed(nn.Module):
    """Knows its place in the stack, which Dynamo takes for a constant."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.layer, self.index = nn.Linear(8, 8), index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(x) / (1 + self.index)


def test_blocks_that_differ_in_a_number_get_code_of_their_own() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(Placed(k)) for k in range(12)])
    twin = copy.deepcopy(model)
    handle = compile_regions(model, Placed, **QUICK)
    assert train(model) == pytest.approx(train(twin), rel=1e-5)
    report = handle.report()
    assert report.reason is None
    assert report.frames == 12


def test_evaluation_that_fails_leaves_training_compiled() -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            raise RuntimeError("not for evaluation")
        return graph.forward

    model = built(Stack)
    handle = compile_in_place(model, backend=backend, measure=False)
    train(model)
    model.eval()
    with (
        torch.no_grad(),
        pytest.warns(GraphWarning, match="is not compiled in evaluation: compiling failed"),
    ):
        model(torch.ones(4, 8))
    with torch.no_grad():
        model(torch.ones(4, 8))
    model.train()
    before = compilation.tally()
    train(model)
    assert (compilation.tally() - before).frames == 0
    assert handle.report().reason is None
    assert "eager in evaluation: compiling failed (BackendCompilerFailed" in str(handle.report())


def test_a_forward_that_writes_to_its_input_does_so_once() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.add_(1)
            return self.layer(x)

    model = Writes()
    compile_in_place(model, backend="eager", measure=False)
    x = torch.zeros(4, 8)
    model(x).sum().backward()
    assert torch.equal(x, torch.ones(4, 8))


def test_one_tensor_given_twice_is_compiled_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * y

    model = Twice()
    handle = compile_in_place(model, **QUICK)
    x = torch.ones(4, 8)
    for _ in range(3):
        model(x, x).sum().backward()
    assert handle.report().recompiles == ()
    assert handle.report().frames == 1


def test_an_interrupt_while_compiling_leaves_the_model_eager() -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        raise KeyboardInterrupt

    model, twin = built(Stack), built(Stack)
    handle = compile_in_place(model, backend=backend, measure=False)
    with (
        pytest.warns(GraphWarning, match=r"compiling was interrupted \(KeyboardInterrupt\)"),
        pytest.raises(KeyboardInterrupt),
    ):
        train(model)
    twin.load_state_dict(model.state_dict())
    assert train(model) == train(twin)
    assert handle.report().reason == "compiling was interrupted (KeyboardInterrupt)"
