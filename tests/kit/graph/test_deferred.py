"""Scalers with work for the host: it is done once for every step, and outside of the graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flopwise.kit.graph.captured import CapturedStep
from flopwise.kit.graph.deferred import Deferred
from flopwise.kit.precision import DynamicScaler


def training(clip: bool = False, **options: Any) -> tuple[nn.Module, DynamicScaler, Any, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(net.parameters(), lr=2.0**-9, fused=True)
    scaler = DynamicScaler("cpu", **{"review_steps": 10, **options})

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        return loss

    return net, scaler, optimizer, step


def batches(count: int, bad: Any = ()) -> list[tuple[torch.Tensor, torch.Tensor]]:
    source = torch.Generator().manual_seed(5)
    found = []
    for k in range(count):
        x = torch.randn(8, 6, generator=source) * (1 + k / 10)  # gradients grow: the scale follows
        x[0, 0] = float("inf") if k in bad else x[0, 0]
        found.append((x, torch.randint(0, 3, (8,), generator=source)))
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"review_steps": 40},  # only some steps' gradients are looked at
        {"clip": True, "review_steps": 40},
        {"schedule": "growth", "growth_interval": 7},
    ],
)
def test_reviews_go_on_between_replays(graphs: Any, options: Any) -> None:
    def run(captured: bool) -> tuple[Any, ...]:
        net, scaler, optimizer, step = training(**options)
        once: Any = step
        if captured:
            once = CapturedStep(step, net, optimizer, surface=graphs, recheck_every=30)
        torch.manual_seed(1)
        losses, scales = [], []
        for batch in batches(120, bad=(4, 33, 34, 90)):
            losses.append(str(once(*batch).item()))  # NaN is equal to NaN
            scales.append(scaler.get_scale())
        reviews = [(r.update, r.amax, r.scale) for r in scaler.reviews]
        if captured:
            report = once.report()
            assert (report.graphs, report.reason) == (1, None)
            assert report.replays > 100
        state = scaler.state_dict()
        return (
            losses,
            scales,
            reviews,
            scaler.skipped,
            state,
            [p.tolist() for p in net.parameters()],
        )

    found, expected = run(True), run(False)
    assert found == expected
    assert found[3] == 4
    assert len(set(found[1])) > 3  # the scale has moved
    reviews = 120 // options.get("review_steps", 10)
    assert len(found[2]) == (0 if "schedule" in options else reviews)


def test_a_graph_that_is_given_up_leaves_the_scaler_as_it_would_be(graphs: Any) -> None:
    graphs.fail = torch.OutOfMemoryError("CUDA out of memory")

    def run(captured: bool) -> Any:
        net, scaler, optimizer, step = training()
        once: Any = CapturedStep(step, net, optimizer, surface=graphs) if captured else step
        torch.manual_seed(1)
        losses = [str(once(*batch).item()) for batch in batches(40, bad=(20,))]
        return losses, scaler.state_dict(), [r.scale for r in scaler.reviews]

    with pytest.warns(match="OutOfMemoryError"):
        found = run(True)
    assert found == run(False)


def test_the_work_of_the_run_that_stands_is_made_up_for_once() -> None:
    class Scaler:
        def __init__(self) -> None:
            self.made: list[Any] = []

        @contextmanager
        def deferring(self) -> Iterator[list[int]]:
            left: list[int] = []
            self.now = left
            yield left

        def make_up(self, left: list[int]) -> None:
            self.made.append(left)

    scaler = Scaler()
    deferred = Deferred([object(), scaler])
    with deferred.run():
        scaler.now.append(1)

    def fails() -> None:
        with deferred.run():
            scaler.now.append(2)
            raise ValueError("amid the step")

    with pytest.raises(ValueError, match="amid"):
        fails()
    deferred.make_up()
    deferred.make_up()
    assert scaler.made == [[1]]
