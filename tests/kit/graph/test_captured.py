"""Steps from graphs: equal to eager ones, and eager again whenever that cannot be."""

from __future__ import annotations

import copy
import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flopwise.errors import GraphWarning
from flopwise.kit.graph.buckets import Buckets
from flopwise.kit.graph.captured import CapturedStep

OPTIMIZER = sys.modules[torch.optim.ASGD.__module__].__file__


class Net(nn.Module):
    """Dropout, batch statistics, an embedding-like lookup: state of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 16), nn.BatchNorm1d(16)
        self.drop, self.last = nn.Dropout(0.3), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(F.gelu(self.norm(self.first(x)))))


def training(make: Callable[..., Any], **options: Any) -> tuple[Net, torch.optim.Optimizer, Any]:
    torch.manual_seed(3)
    net = Net()
    optimizer = make(net.parameters(), **options)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return net, optimizer, step


def batches(count: int, size: Any = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    source = torch.Generator().manual_seed(11)
    sizes = [size] * count if isinstance(size, int) else [size[k % len(size)] for k in range(count)]
    return [
        (torch.randn(n, 6, generator=source), torch.randint(0, 3, (n,), generator=source))
        for n in sizes
    ]


def run(step: Any, data: Any, schedule: Any = None) -> list[float]:
    torch.manual_seed(7)
    losses = []
    for batch in data:
        losses.append(step(*batch).item())
        if schedule is not None:
            schedule.step()
    return losses


def run_all(step: Any, data: Any) -> None:
    for batch in data:
        step(*batch)


def assert_same(a: nn.Module, b: nn.Module) -> None:
    for (name, x), y in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert torch.equal(x, y), name


FUSED = [
    (torch.optim.SGD, {"lr": 0.125, "momentum": 0.9, "weight_decay": 0.01, "fused": True}),
    (torch.optim.SGD, {"lr": 0.125, "fused": True}),
    (torch.optim.AdamW, {"lr": 2.0**-9, "fused": True}),
    (torch.optim.Adam, {"lr": 2.0**-9, "fused": True, "amsgrad": True}),
]


@pytest.mark.parametrize(("make", "options"), FUSED)
def test_two_hundred_steps_are_equal_to_the_last_bit_with_dropout(
    graphs: Any, make: Any, options: Any
) -> None:
    net, _, step = training(make, **options)
    twin, _, plain = training(make, **options)
    captured = CapturedStep(step, net, training_optimizer(step), surface=graphs)
    data = batches(200)
    assert run(captured, data) == run(plain, data)
    assert_same(net, twin)
    report = captured.report()
    assert (report.graphs, report.captures, report.reason) == (1, 1, None)
    assert report.replays >= 190


def training_optimizer(step: Any) -> Any:
    return next(
        c.cell_contents
        for c in step.__closure__
        if isinstance(c.cell_contents, torch.optim.Optimizer)
    )


def test_learning_rates_that_a_schedule_sets_reach_the_graph(graphs: Any) -> None:
    def pair(captured: bool) -> tuple[nn.Module, list[float]]:
        net, optimizer, step = training(torch.optim.SGD, lr=0.5, momentum=0.9, fused=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 2.0 ** -(k // 5))
        run_step = CapturedStep(step, net, optimizer, surface=graphs) if captured else step
        losses = run(run_step, batches(40), schedule)
        assert optimizer.param_groups[0]["lr"] == 0.5 * 2.0**-8  # a plain number still
        return net, losses

    (net, losses), (twin, expected) = pair(True), pair(False)
    assert losses == expected
    assert_same(net, twin)
    assert graphs.graphs[0].replays > 30


def test_an_unfused_optimizer_is_captured_fused_and_differs_by_rounding(graphs: Any) -> None:
    net, optimizer, step = training(torch.optim.AdamW, lr=1e-3, weight_decay=0.1)
    twin, _, plain = training(torch.optim.AdamW, lr=1e-3, weight_decay=0.1)
    for each in (net, twin):  # a bias in front of a batch norm is trained by rounding errors alone
        each.first.bias.requires_grad_(False)
    captured = CapturedStep(step, net, optimizer, surface=graphs)
    data = batches(60)
    assert run(captured, data) == pytest.approx(run(plain, data), rel=1e-4)
    for x, y in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6)
    assert captured.report().graphs == 1
    group = optimizer.param_groups[0]
    assert (group["lr"], group["fused"], group["capturable"]) == (1e-3, None, False)
    assert not hasattr(optimizer, "_step_supports_amp_scaling")


def test_every_shape_has_a_graph_of_its_own(graphs: Any) -> None:
    net, optimizer, step = training(torch.optim.SGD, lr=0.125, momentum=0.5, fused=True)
    twin, _, plain = training(torch.optim.SGD, lr=0.125, momentum=0.5, fused=True)
    captured = CapturedStep(step, net, optimizer, surface=graphs)
    data = batches(60, [8, 8, 5])
    assert run(captured, data) == run(plain, data)
    assert_same(net, twin)
    report = captured.report()
    assert report.graphs == 2
    assert report.shapes == {((8, 6), (8,)): 40, ((5, 6), (5,)): 20}


def test_buckets_make_lengths_few(graphs: Any) -> None:
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.125, fused=True)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(batch["x"]).flatten(0, 1), batch["y"].flatten())
        loss.backward()
        optimizer.step()
        return loss

    buckets = Buckets((4, 8), dim=1, fill={"y": -100})
    captured = CapturedStep(step, net, optimizer, buckets=buckets, surface=graphs)
    twin = copy.deepcopy(net)
    for k in range(40):
        length = 1 + k % 8
        data = {"x": torch.randn(3, length, 4), "y": torch.randint(0, 2, (3, length))}
        expected = F.cross_entropy(twin(data["x"]).flatten(0, 1), data["y"].flatten())
        twin.zero_grad()
        expected.backward()
        with torch.no_grad():
            for p in twin.parameters():
                p -= 0.125 * p.grad
        assert captured(data).item() == pytest.approx(expected.item(), rel=1e-5)
    assert captured.report().graphs == 2
    assert len(captured.report().shapes) == 2


def fallback(
    graphs: Any, make: Any, options: dict[str, Any], data: Any, match: str, **more: Any
) -> Any:
    """Runs to a fall-back and asserts that it was as if there had never been a graph, with one message."""
    net, optimizer, step = training(make, **options)
    twin, reference, plain = training(make, **options)
    captured = CapturedStep(step, net, optimizer, surface=graphs, **more)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = run(captured, data)
    assert losses == run(plain, data)
    assert_same(net, twin)
    assert str(optimizer.state_dict()) == str(reference.state_dict())
    messages = [str(w.message) for w in caught if issubclass(w.category, GraphWarning)]
    assert len(messages) == 1, messages
    assert match in messages[0]
    assert match in (captured.report().reason or "")
    return captured


@pytest.mark.parametrize(("make", "options"), [*FUSED, (torch.optim.AdamW, {"lr": 1e-3})])
def test_out_of_memory_amid_a_capture_leaves_the_run_as_it_was(
    graphs: Any, make: Any, options: Any
) -> None:
    graphs.fail = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    if make is torch.optim.AdamW and "fused" not in options:
        # Its first steps are compared with the capturable form, and are its own.
        fallback(graphs, make, options, batches(30), "OutOfMemoryError")
        return
    fallback(
        graphs, make, options, batches(30), "could not be captured (OutOfMemoryError: CUDA out"
    )


def test_an_optimizer_that_cannot_be_captured(graphs: Any) -> None:
    captured = fallback(
        graphs,
        torch.optim.Adagrad,
        {"lr": 0.1},
        batches(12),
        "Adagrad has no form that can be captured",
    )
    assert captured.report().captures == 0


def test_shapes_that_never_repeat_name_the_buckets(graphs: Any) -> None:
    sizes = list(range(2, 60))
    captured = fallback(
        graphs, torch.optim.SGD, {"lr": 0.125, "fused": True}, batches(58, sizes),
        "no shapes came back often enough in 32 steps; 32 sizes of dimension 0", patience=32,
    )  # fmt: skip
    assert "buckets=(8, " in captured.report().reason


def test_a_replay_that_leaves_out_the_update_is_not_trusted(graphs: Any) -> None:
    graphs.broken = lambda k, func: func is torch.ops.aten._fused_sgd_.tensor_lr
    options = {"lr": 0.125, "momentum": 0.9, "fused": True}
    fallback(
        graphs,
        torch.optim.SGD,
        options,
        batches(30),
        "a replay does not do what the eager step does",
    )


def test_a_replay_that_goes_wrong_later_is_found_by_rechecking(graphs: Any) -> None:
    net, optimizer, step = training(torch.optim.SGD, lr=0.125, fused=True)
    captured = CapturedStep(step, net, optimizer, surface=graphs, recheck_every=5)
    data = batches(60)
    run(captured, data[:20])
    assert captured.report().graphs == 1
    graphs.broken = lambda k, func: func is torch.ops.aten._fused_sgd_.tensor_lr
    with pytest.warns(GraphWarning, match="a replay does not do what the eager step does"):
        run(captured, data[20:])


def test_a_step_that_waits_for_the_device(graphs: Any) -> None:
    graphs.waits = ["train.py:31"]
    options = {"lr": 0.125, "fused": True}
    fallback(graphs, torch.optim.SGD, options, batches(9), "wait for the device, at train.py:31")


def test_what_waits_only_in_the_optimizers_own_form(graphs: Any) -> None:
    """ASGD reads its step count on the host, but not in the form that is captured."""
    net, optimizer, step = training(torch.optim.Adam, lr=0.125)
    captured = CapturedStep(step, net, optimizer, surface=graphs)
    graphs.waits = [f"{OPTIMIZER}:417"]
    data = batches(12)
    for batch in data[:4]:  # as far as the look
        captured(*batch)
    graphs.waits = []
    for batch in data[4:]:
        captured(*batch)
    assert captured.report().reason is None
    assert captured.report().graphs == 1


def test_a_capturable_form_that_waits(graphs: Any) -> None:
    graphs.waits = [f"{OPTIMIZER}:417"]
    fallback(graphs, torch.optim.Adam, {"lr": 0.125}, batches(9), "asgd.py:417")


def test_a_step_with_item_in_it_that_no_look_found(graphs: Any) -> None:
    net, optimizer, inner = training(torch.optim.SGD, lr=0.125, fused=True)
    twin, _, plain = training(torch.optim.SGD, lr=0.125, fused=True)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = inner(x, y)
        assert loss.item() < 1e6
        return loss

    captured = CapturedStep(step, net, optimizer, surface=graphs)
    with pytest.warns(GraphWarning, match="not permitted when stream is capturing"):
        losses = run(captured, batches(20))
    assert losses == run(plain, batches(20))
    assert_same(net, twin)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(6, 3), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x) / self.calls


@pytest.mark.parametrize("what", ["module", "random", "schedule", "list", "host"])
def test_a_step_that_does_in_python_what_no_replay_would(graphs: Any, what: str) -> None:
    torch.manual_seed(1)
    net: nn.Module = Counts() if what == "module" else nn.Linear(6, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.125, fused=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
    seen: list[float] = []

    def by_chance(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return once(x * 2 if what == "random" and random.random() < 0.5 else x, y)

    def once(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss

    def with_schedule(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = once(x, y)
        schedule.step()
        return loss

    def with_list(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = once(x, y)
        seen.append(0.0)
        return loss

    step = {"schedule": with_schedule, "list": with_list}.get(what, by_chance)
    if what == "host":  # on a GPU, drawing from the host's generator is no part of the graph
        graphs.device = torch.device("meta")

        def from_host(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return once(x + torch.rand(()), y)

        step = from_host
    captured = CapturedStep(step, net, optimizer, surface=graphs)
    expected = {
        "module": "Counts.calls",
        "random": "Python's random numbers",
        "schedule": "StepLR.last_epoch",
        "list": "the length of seen",
        "host": "the host's random numbers",
    }
    with pytest.warns(GraphWarning, match=expected[what]):
        run_all(captured, batches(12))
    assert captured.report().captures == 0
    if what == "list":
        assert len(seen) == 12


@pytest.mark.parametrize("what", ["python", "numpy", "module", "private", "host"])
def test_numbers_drawn_from_other_generators(graphs: Any, what: str) -> None:
    torch.manual_seed(1)
    net = nn.Linear(6, 3)
    net.source, net._seen = numpy.random.default_rng(0), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.125, fused=True)
    of_python, of_numpy = random.Random(0), numpy.random.default_rng(0)
    of_host = torch.Generator().manual_seed(0)
    draws: dict[str, Callable[[], float]] = {
        "python": lambda: of_python.random(),
        "numpy": lambda: float(of_numpy.random()),
        "module": lambda: float(net.source.random()),
        "private": lambda: float(net._seen.append(0) or 1.0),
        "host": lambda: float(torch.rand((), generator=of_host)),
    }
    draw = draws[what]
    if what == "host":
        graphs.device = torch.device("meta")

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x * draw()), y)
        loss.backward()
        optimizer.step()
        return loss

    captured = CapturedStep(step, net, optimizer, surface=graphs)
    expected = {
        "python": "the random numbers of of_python",
        "numpy": "the random numbers of of_numpy",
        "module": "the random numbers of Linear.source",
        "private": "the length of Linear._seen",
        "host": "a generator of the host",
    }
    with pytest.warns(GraphWarning, match=expected[what]):
        run_all(captured, batches(12))
    assert captured.report().captures == 0


def test_what_differs_by_more_than_rounding_is_no_noise(graphs: Any) -> None:
    class Hidden:  # draws where nobody looks
        __slots__ = ("state",)

        def __init__(self) -> None:
            self.state = 1

        def draw(self) -> float:
            self.state = self.state * 75 % 65537
            return self.state / 65537

    net = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.125, fused=True)
    hidden = Hidden()

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x * hidden.draw()), y)
        loss.backward()
        optimizer.step()
        return loss

    captured = CapturedStep(step, net, optimizer, surface=graphs)
    with pytest.warns(GraphWarning, match="two eager runs of a step from the same state differ"):
        run_all(captured, batches(20))
    assert captured.report().replays == 0


def test_a_number_that_the_step_reads_and_the_loop_changes(graphs: Any) -> None:
    net, optimizer, inner = training(torch.optim.SGD, lr=0.125, fused=True)
    progress = 0.0

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return inner(x * (1 + progress), y)

    captured = CapturedStep(step, net, optimizer, surface=graphs, patience=10)

    def loop() -> None:
        nonlocal progress
        for k, batch in enumerate(batches(12)):
            progress = k / 12
            captured(*batch)

    with pytest.warns(
        GraphWarning, match="the step reads progress, which changes from step to step"
    ):
        loop()


def test_gradients_accumulated_over_several_calls(graphs: Any) -> None:
    def pair(captured: bool) -> list[list[torch.Tensor]]:
        torch.manual_seed(3)
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.125, fused=True)

        def part(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = F.cross_entropy(net(x), y) / 2
            loss.backward()
            return loss

        micro = CapturedStep(part, net, optimizer, surface=graphs) if captured else part
        torch.manual_seed(7)
        seen = []
        for k, batch in enumerate(batches(60)):
            micro(*batch)
            if k % 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            else:
                seen.append([p.grad.clone() for p in net.parameters()])
        return [[p.detach() for p in net.parameters()], *seen]

    for mine, expected in zip(pair(True), pair(False), strict=True):
        for x, y in zip(mine, expected, strict=True):
            assert torch.equal(x, y)
    assert sum(g.replays for g in graphs.graphs) > 40


def test_loading_the_state_of_an_optimizer_captures_anew(graphs: Any) -> None:
    def trained(captured: bool) -> nn.Module:
        net, optimizer, step = training(torch.optim.AdamW, lr=2.0**-9, fused=True)
        run_step = CapturedStep(step, net, optimizer, surface=graphs) if captured else step
        run(run_step, batches(20))
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        run(run_step, batches(20))
        return net

    assert_same(trained(True), trained(False))
    assert len(graphs.graphs) == 2
    assert graphs.graphs[0].was_reset


def test_numbers_other_than_learning_rates_are_part_of_the_graph(graphs: Any) -> None:
    def trained(captured: bool) -> nn.Module:
        net, optimizer, step = training(torch.optim.SGD, lr=0.125, momentum=0.5, fused=True)
        run_step = CapturedStep(step, net, optimizer, surface=graphs) if captured else step
        for k, batch in enumerate(batches(40)):
            if k % 5 == 0:
                optimizer.param_groups[0]["momentum"] = 0.5 + k / 100
            run_step(*batch)
        return net

    torch.manual_seed(0)
    with pytest.warns(GraphWarning, match="keeps changing: numbers of the optimizer"):
        mine = trained(True)
    torch.manual_seed(0)
    # Same weights in the end, dropout drawn alike.
    expected = trained(False)
    assert_same(mine, expected)


def test_modes_and_frozen_layers_are_another_graph(graphs: Any) -> None:
    def trained(captured: bool) -> nn.Module:
        net, optimizer, step = training(torch.optim.SGD, lr=0.125, fused=True)
        run_step = CapturedStep(step, net, optimizer, surface=graphs) if captured else step
        run(run_step, batches(12))
        net.norm.eval()
        run(run_step, batches(12))
        net.first.requires_grad_(False)
        run(run_step, batches(12))
        return net

    assert_same(trained(True), trained(False))
    assert len(graphs.graphs) == 3


def test_a_scaler_is_part_of_the_step(graphs: Any) -> None:
    def trained(captured: bool) -> tuple[nn.Module, dict[str, Any]]:
        torch.manual_seed(3)
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.125, momentum=0.5, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=7)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss

        run_step: Any = step
        if captured:
            run_step = CapturedStep(step, net, optimizer, scaler=scaler, surface=graphs)
        data = batches(40)
        data[25] = (data[25][0] * float("inf"), data[25][1])  # a step that has to be skipped
        net.norm.eval()
        run(run_step, data)
        return net, scaler.state_dict()

    (net, state), (twin, expected) = trained(True), trained(False)
    assert_same(net, twin)
    assert state == expected
    assert graphs.graphs[0].replays > 30


def test_steps_that_are_not_deterministic_are_held_to_their_own_noise(graphs: Any) -> None:
    net, optimizer, inner = training(torch.optim.SGD, lr=0.125, fused=True)
    source = torch.Generator().manual_seed(5)
    noises = iter(torch.rand(400, generator=source))

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return inner(x * (1 + 1e-6 * next(noises)), y)

    captured = CapturedStep(step, net, optimizer, surface=graphs)
    run(captured, batches(40))
    report = captured.report()
    assert report.graphs == 1
    assert report.noise is not None
    assert 0 < report.noise < 1e-4


def test_outputs_are_copies_and_gradients_those_of_the_last_replay(graphs: Any) -> None:
    net, optimizer, step = training(torch.optim.SGD, lr=0.125, fused=True)
    twin, _, plain = training(torch.optim.SGD, lr=0.125, fused=True)
    captured = CapturedStep(step, net, optimizer, surface=graphs)
    data = batches(15)
    torch.manual_seed(7)
    kept = [captured(*batch) for batch in data]
    torch.manual_seed(7)
    assert [k.item() for k in kept] == [plain(*batch).item() for batch in data]
    assert not any(k.requires_grad for k in kept)
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_a_prefetcher_may_write_the_buffers_itself(graphs: Any) -> None:
    net, optimizer, step = training(torch.optim.SGD, lr=0.125, fused=True)
    captured = CapturedStep(step, net, optimizer, surface=graphs)
    data = batches(12)
    assert captured.inputs(*data[0]) is None
    run(captured, data)
    (x, y), _ = captured.inputs(*data[0])
    x.fill_(0.5)
    y.fill_(1)
    torch.manual_seed(0)
    before = captured.report().replays
    captured(x, y)
    assert captured.report().replays == before + 1


def test_more_shapes_than_graphs_run_eagerly_with_one_message(graphs: Any) -> None:
    net, optimizer, step = training(torch.optim.SGD, lr=0.125, fused=True)
    twin, _, plain = training(torch.optim.SGD, lr=0.125, fused=True)
    captured = CapturedStep(step, net, optimizer, surface=graphs, most_graphs=2)
    data = batches(60, [8, 5, 6])
    with pytest.warns(GraphWarning, match="more than 2 shapes") as caught:
        losses = run(captured, data)
    assert len(caught) == 1
    assert losses == run(plain, data)
    assert_same(net, twin)
    assert captured.report().graphs == 2
    assert captured.report().reason is None


def test_a_batch_that_cannot_be_looked_into(graphs: Any) -> None:
    class Opaque:
        def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
            self.x, self.y = x, y

    net, optimizer, inner = training(torch.optim.SGD, lr=0.125, fused=True)
    captured = CapturedStep(lambda b: inner(b.x, b.y), net, optimizer, surface=graphs)
    with pytest.warns(GraphWarning, match=r"an object of type .*Opaque"):
        captured(Opaque(*batches(1)[0]))
    captured(Opaque(*batches(1)[0]))


def test_an_error_of_the_step_itself_comes_through(graphs: Any) -> None:
    net, optimizer, inner = training(torch.optim.SGD, lr=0.125, fused=True)
    captured = CapturedStep(inner, net, optimizer, surface=graphs)
    x, y = batches(1)[0]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        captured(x[:, :5], y)


def test_a_cpu_runs_the_step_as_it_is_without_a_message() -> None:
    net, optimizer, step = training(torch.optim.AdamW, lr=1e-3)
    twin, _, plain = training(torch.optim.AdamW, lr=1e-3)
    captured = CapturedStep(step, net, optimizer)
    assert run(captured, batches(10)) == run(plain, batches(10))
    assert_same(net, twin)
    assert captured.report().reason == "devices of type cpu have no graphs"
    assert "eager: devices of type cpu have no graphs; 0 steps replayed, 10 eager" in str(
        captured.report()
    )


def test_closing_puts_the_optimizer_back_and_goes_on_eagerly(graphs: Any) -> None:
    net, optimizer, step = training(torch.optim.AdamW, lr=1e-3)
    captured = CapturedStep(step, net, optimizer, surface=graphs)
    run(captured, batches(12))
    captured.close()
    assert graphs.graphs[0].was_reset
    captured(*batches(1)[0])
    assert captured.report().reason == "closed"
    assert optimizer.state[net.last.bias]["step"].item() == 13


def test_state_is_kept_on_the_host_where_the_device_is_full(graphs: Any) -> None:
    graphs.room = 0
    net, optimizer, step = training(torch.optim.SGD, lr=0.125, fused=True)
    captured = CapturedStep(step, net, optimizer, surface=graphs)
    run(captured, batches(12))
    assert captured.report().graphs == 1


def test_out_of_memory_between_unscaling_and_the_step_leaves_the_scaler_usable(graphs: Any) -> None:
    def trained(captured: bool) -> nn.Module:
        torch.manual_seed(3)
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.125, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        calls = torch.zeros(())

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            calls.add_(1)
            if any(
                m is not None
                for m in torch.utils._python_dispatch._get_current_dispatch_mode_stack()
            ):
                raise torch.OutOfMemoryError("CUDA out of memory")
            scaler.step(optimizer)
            scaler.update()
            return loss

        run(CapturedStep(step, net, optimizer, surface=graphs) if captured else step, batches(20))
        assert calls.item() == 20
        return net

    with pytest.warns(GraphWarning, match="OutOfMemoryError"):
        mine = trained(True)
    assert_same(mine, trained(False))


def test_parameters_on_several_devices_are_told() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    optimizer = torch.optim.SGD(net[0].parameters(), lr=0.1)
    with pytest.warns(GraphWarning, match="parameters are on several devices"):
        CapturedStep(lambda: None, net, optimizer)


def test_resident_data_is_not_kept_but_averages_are(graphs: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("flopwise.kit.graph.saved.LARGE_BYTES", 64)
    net, optimizer, inner = training(torch.optim.SGD, lr=0.125, fused=True)
    data, average = torch.randn(64, 6), torch.zeros(16, 6)

    def step(index: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = inner(data[index], y)
        with torch.no_grad():
            average.lerp_(net.first.weight, 0.5)
        return loss

    captured = CapturedStep(step, net, optimizer, surface=graphs)
    for _, y in batches(12):
        captured(torch.arange(8), y)
    tensors = [id(t) for t in captured._parts.tensors]
    assert id(average) in tensors
    assert id(data) not in tensors
    assert captured.report().graphs == 1
    assert average.abs().sum() > 0


def test_no_memory_for_the_comparison_leaves_the_run_as_it_was(graphs: Any) -> None:
    """The first of two runs fails for lack of memory, which the step alone would have had."""

    def trained(captured: bool) -> nn.Module:
        net, optimizer, inner = training(torch.optim.SGD, lr=0.125, fused=True)
        handle: list[Any] = []

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = F.cross_entropy(net(x), y)
            if handle and handle[0]._captures and handle[0].report().reason is None:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return inner(x, y) + 0 * loss.detach()

        if captured:
            handle.append(CapturedStep(step, net, optimizer, surface=graphs))
        run(handle[0] if captured else step, batches(20))
        return net

    with pytest.warns(GraphWarning, match="no memory to check a graph beside the step itself"):
        mine = trained(True)
    assert_same(mine, trained(False))


def test_a_replay_that_fails_leaves_the_eager_result(graphs: Any) -> None:
    def broken(k: int, func: Any) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access")

    graphs.broken = broken
    options = {"lr": 0.125, "momentum": 0.9, "fused": True}
    fallback(
        graphs, torch.optim.SGD, options, batches(20), "a replay fails (RuntimeError: CUDA error"
    )


@pytest.mark.parametrize("seed", range(12))
def test_whatever_a_script_does_between_steps_the_end_is_the_same(graphs: Any, seed: int) -> None:
    """Random programs of what scripts do between steps, run with graphs and without."""

    def play(captured: bool) -> tuple[Net, list[float], Any]:
        net, optimizer, whole = training(torch.optim.SGD, lr=0.125, momentum=0.5, fused=True)

        def part(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = F.cross_entropy(net(x), y) / 4
            loss.backward()
            return loss

        steps: list[Any] = [whole, part]
        if captured:
            steps = [
                CapturedStep(s, net, optimizer, surface=graphs, warm_up=2, verify=1) for s in steps
            ]
        choice = random.Random(seed)
        saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
        losses = []
        torch.manual_seed(7)
        for x, y in batches(120, [8, 8, 8, 5]):
            losses.append(steps[choice.random() < 0.3](x, y).item())
            event = choice.randrange(16)
            group = optimizer.param_groups[0]
            if event < 3:
                group["lr"] = 2.0 ** -choice.randrange(3, 6)
            elif event == 3:
                optimizer.zero_grad(set_to_none=choice.random() < 0.5)
            elif event == 4:
                net.norm.train(not net.norm.training)
            elif event == 5:
                torch.rand(3)
            elif event == 6 and choice.random() < 0.3:
                saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
            elif event == 7 and choice.random() < 0.3:
                net.load_state_dict(saved[0])
                optimizer.load_state_dict(copy.deepcopy(saved[1]))
            elif event == 8 and choice.random() < 0.3:
                group["weight_decay"] = choice.choice([0.0, 0.25])
            elif event == 9:
                with torch.no_grad():
                    for p in net.parameters():
                        p.mul_(0.875)
            elif event == 10:
                optimizer.step()
        return net, losses, [s.report() for s in steps] if captured else None

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphWarning)  # some programs change too much
        net, losses, reports = play(True)
    twin, expected, _ = play(False)
    assert losses == expected
    assert_same(net, twin)
    assert sum(r.replays for r in reports) > 10, [str(r) for r in reports]


def test_parameters_added_to_the_optimizer_are_trained(graphs: Any) -> None:
    def trained(captured: bool) -> nn.Module:
        torch.manual_seed(3)
        net = Net()
        optimizer = torch.optim.SGD(
            [*net.first.parameters(), *net.norm.parameters()], lr=0.125, momentum=0.5, fused=True
        )

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            return loss

        run_step = CapturedStep(step, net, optimizer, surface=graphs) if captured else step
        run(run_step, batches(14))
        net.last.zero_grad()
        optimizer.add_param_group({"params": list(net.last.parameters()), "lr": 0.25})
        run(run_step, batches(14))
        return net

    assert_same(trained(True), trained(False))
    assert len(graphs.graphs) == 2


def test_no_memory_for_the_static_buffers(graphs: Any, monkeypatch: Any) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("flopwise.kit.graph.captured.static_copy", full)
    fallback(graphs, torch.optim.SGD, {"lr": 0.125, "fused": True}, batches(12), "OutOfMemoryError")


def test_a_part_that_is_added_to_the_model_is_trained(graphs: Any) -> None:
    def trained(captured: bool) -> nn.Module:
        net, optimizer, step = training(torch.optim.SGD, lr=0.125, momentum=0.5, fused=True)
        run_step = CapturedStep(step, net, optimizer, surface=graphs) if captured else step
        run(run_step, batches(14))
        extra = nn.Linear(3, 3)
        net.last = nn.Sequential(net.last, extra)
        optimizer.add_param_group({"params": list(extra.parameters())})
        run(run_step, batches(20))
        return net

    assert_same(trained(True), trained(False))
    assert graphs.graphs[-1].replays > 5


def test_a_result_that_cannot_be_built_anew_is_handed_on() -> None:
    class Result(dict):  # type: ignore[type-arg]
        def __init__(self, loss: torch.Tensor) -> None:
            super().__init__(loss=loss)
            self.loss = loss

        def __setitem__(self, key: Any, value: Any) -> None:
            raise TypeError("read only")

    net, optimizer, inner = training(torch.optim.SGD, lr=0.125)
    captured = CapturedStep(lambda x, y: Result(inner(x, y)), net, optimizer)
    assert captured(*batches(1)[0]).loss.item() > 0


def test_a_step_that_writes_to_its_batch(graphs: Any) -> None:
    def trained(captured: bool) -> nn.Module:
        net, optimizer, inner = training(torch.optim.SGD, lr=0.125, fused=True)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            x.sub_(x.mean())
            x.mul_(1.5)
            return inner(x, y)

        run(CapturedStep(step, net, optimizer, surface=graphs) if captured else step, batches(20))
        return net

    assert_same(trained(True), trained(False))
    assert graphs.graphs[0].replays > 10


def test_optimizers_that_are_named_count_if_they_step(graphs: Any) -> None:
    """One that is given, one that the step names and steps, one that it reaches and does not step."""

    def trained(captured: bool) -> nn.Module:
        torch.manual_seed(3)
        net = Net()

        class Holder:
            def __init__(self) -> None:
                body = [*net.first.parameters(), *net.norm.parameters()]
                self.body = torch.optim.SGD(body, lr=0.125, momentum=0.5, fused=True)
                self.head = torch.optim.SGD(
                    net.last.parameters(), lr=0.25, momentum=0.5, fused=True
                )
                self.unused = torch.optim.Adagrad(net.parameters())

            def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
                net.zero_grad()
                loss = F.cross_entropy(net(x), y)
                loss.backward()
                self.body.step()
                self.head.step()
                return loss

        holder = Holder()
        step = (
            CapturedStep(holder.step, net, holder.body, surface=graphs) if captured else holder.step
        )
        losses = run(step, batches(12))
        holder.head.param_groups[0]["lr"] = 0.5
        run(step, batches(20))
        assert len(losses) == 12
        return net

    assert_same(trained(True), trained(False))
    assert graphs.graphs[0].replays > 20


def test_moving_a_batch_from_the_host_is_no_wait_of_the_step(graphs: Any) -> None:
    """The surface is taken for another device than the batch's; only the look is of interest."""
    net, optimizer, inner = training(torch.optim.SGD, lr=0.125, fused=True)
    here = [
        k
        for k, line in enumerate(Path(__file__).read_text("utf-8").splitlines(), 1)
        if line.endswith("# move")
    ]
    graphs.waits = [f"{__file__}:{here[0]}"]

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return inner(x.to("cpu"), y)  # move

    captured = CapturedStep(step, net, optimizer, surface=graphs)
    graphs.device = torch.device("cpu", 0)
    run(captured, batches(12))
    assert captured.report().reason is None
    graphs.device = torch.device("cpu")
    captured = CapturedStep(step, net, optimizer, surface=graphs)
    with pytest.warns(GraphWarning, match="makes the host wait"):
        run(captured, batches(12))
