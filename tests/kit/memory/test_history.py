from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from flopwise.kit.memory.history import HistoryWatch, KeptHistory, graph_size

ROWS, WIDTH = 16, 32


@pytest.fixture
def layer() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def test_a_sum_of_losses_with_their_history(layer: nn.Linear) -> None:
    watch, running = HistoryWatch(), torch.zeros(())
    for _ in range(40):
        running = running + layer(torch.randn(ROWS, WIDTH)).exp().mean()
        watch.step()
    assert len(watch.found) == 1
    found = watch.found[0]
    assert found.name == "running"
    assert found.where is not None
    assert "test_history.py:" in found.where
    assert (
        found.bytes_per_step == 2 * ROWS * WIDTH * 4
    )  # what went into the layer, and what came out of exp
    assert "running += loss.detach()" in str(found)


@pytest.mark.parametrize("kind", ["list", "dict", "attribute", "dict of an attribute", "module"])
def test_other_ways_to_keep_it(layer: nn.Linear, kind: str) -> None:
    class Meter:
        def __init__(self) -> None:
            self.total: Any = torch.zeros(())
            self.by_name: dict[str, Any] = {"loss": torch.zeros(())}

    watch, losses, meter = HistoryWatch(), [], Meter()
    totals = {"loss": torch.zeros(())}
    for _ in range(20):
        loss = layer(torch.randn(ROWS, WIDTH)).mean()
        if kind == "list":
            losses.append(loss)
        elif kind == "dict":
            totals["loss"] = totals["loss"] + loss
        elif kind == "module":
            layer.seen = [*getattr(layer, "seen", []), loss]
        elif kind == "attribute":
            meter.total = meter.total + loss
        else:
            meter.by_name["loss"] = meter.by_name["loss"] + loss
        watch.step()
    names = {
        "list": "losses[...]",
        "dict": "totals[...]",
        "attribute": "meter.total",
        "module": "layer.seen[...]",
        "dict of an attribute": "meter.by_name[...]",
    }
    assert [f.name for f in watch.found] == [names[kind]]


@pytest.mark.parametrize("kind", ["detached", "micro-batches", "deep model"])
def test_loops_without_the_defect(layer: nn.Linear, kind: str) -> None:
    watch, running, step = HistoryWatch(), torch.zeros(()), 0
    for step in range(40):
        loss = layer(torch.randn(ROWS, WIDTH)).mean()
        if kind == "detached":
            running += loss.detach()
        elif kind == "micro-batches":  # the sum of eight is run backward, and begun anew
            running = loss if step % 8 == 0 else running + loss
            if step % 8 == 7:
                running.backward()
                running = torch.zeros(())
        elif kind == "deep model":
            for _ in range(step % 3):
                loss = loss.exp()
        watch.step()
    assert watch.found == []


def test_each_variable_is_told_once(layer: nn.Linear) -> None:
    watch, running, news = HistoryWatch(), torch.zeros(()), []
    for _ in range(40):
        running = running + layer(torch.randn(2, WIDTH)).mean()
        news.append(watch.step())
    assert len([n for n in news if n is not None]) == 1


def test_a_graph_that_was_run_backward_has_saved_nothing_any_more(layer: nn.Linear) -> None:
    loss = layer(torch.randn(ROWS, WIDTH)).exp().sum()
    nodes, n_bytes = graph_size([loss])
    loss.backward()
    assert graph_size([loss]) == (nodes, 0)
    assert n_bytes > 0
    assert graph_size([torch.zeros(())]) == (0, 0)


def test_it_is_told_in_words() -> None:
    assert str(KeptHistory("self.losses[...]", "train.py:7", 4, 2_000_000, 3)) == (
        "self.losses[...] (train.py:7) keeps the graph of every step: 2 MB and 3 nodes more each step over 4 "
        "steps. Detach what is added to it (`self.losses += loss.detach()`) and read it at the end: `.item()` "
        "in each step would wait for the device"
    )


def test_a_checkpoint_is_not_computed_again_by_looking(layer: nn.Linear) -> None:
    runs: list[int] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return layer(x).tanh()  # type: ignore[no-any-return]

    watch, running = HistoryWatch(), torch.zeros(())
    for _ in range(20):
        x = torch.randn(ROWS, WIDTH)
        running = running + checkpoint(block, x, use_reentrant=False).mean()
        watch.step()
    assert len(runs) == 20
    assert [f.name for f in watch.found] == ["running"]
    assert watch.found[0].bytes_per_step == 0  # what the checkpoint itself keeps is not seen


def test_an_object_that_refuses_to_be_looked_at_is_passed_over(layer: nn.Linear) -> None:
    class Here:
        pass

    here = Here()
    gone, losses, watch = weakref.proxy(here), [], HistoryWatch()
    del here
    for _ in range(20):
        losses.append(layer(torch.ones(1, layer.in_features)).sum())
        watch.step()
    assert watch.found[0].name == "losses[...]"
    del gone
