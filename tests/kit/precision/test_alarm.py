"""The alarm: raised once a run of skips, naming parameters, then the module of the next forward."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from torch import nn

from flopwise.errors import PrecisionWarning
from flopwise.kit.precision.alarm import Alarm, ForwardTrace
from flopwise.kit.precision.late import Known


def known(in_a_row: int, skipped: int = 9, scale: float = 64.0) -> Known:
    return Known(updates=20, skipped=skipped, in_a_row=in_a_row, scale=scale)


def broken(model: nn.Module, *names: str) -> torch.optim.Optimizer:
    """Returns an optimizer of a model whose gradients of these names are not finite."""
    for name, p in model.named_parameters():
        p.grad = torch.full_like(p, float("inf") if name in names else 1.0)
    return torch.optim.SGD(model.parameters(), 0.1)


def heard(alarm: Alarm, state: Known, *optimizers: torch.optim.Optimizer) -> None:
    alarm.heard(state, optimizers, 2.0**-24, 0.5)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))


def test_it_is_raised_once_until_a_step_took_place() -> None:
    alarm, optimizer = Alarm(3), broken(model(), "2.weight")
    heard(alarm, known(2), optimizer)
    with pytest.warns(PrecisionWarning, match="3 optimizer steps in a row were skipped"):
        heard(alarm, known(3), optimizer)
    heard(alarm, known(4), optimizer)
    heard(alarm, known(0), optimizer)
    with pytest.warns(PrecisionWarning):
        heard(alarm, known(3), optimizer)


def test_it_names_parameters_from_the_loss_on() -> None:
    net = model()
    alarm = Alarm(1, model=net)
    with pytest.warns(PrecisionWarning) as said:
        heard(alarm, known(1), broken(net, "0.weight", "2.weight"))
    assert str(said[0].message) == (
        "1 optimizer steps in a row were skipped (9 of 20 in all), the scale fell to 32. Not finite: the gradients of "
        "2.weight, 0.weight; backward reaches 2.weight first. The next forward is looked at, and what is first not finite in "
        "it will be said. The scale is a symptom: keep the operation that overflows in float32, or use bfloat16."
    )


def test_without_a_model_it_numbers_parameters_and_says_how_to_name_them() -> None:
    net = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(5)))
    with pytest.warns(PrecisionWarning) as said:
        heard(Alarm(1), known(1), broken(net, *(f"{i}.weight" for i in range(5))))
    words = str(said[0].message)
    assert (
        "gradients of parameter 4 of SGD, parameter 3 of SGD, parameter 2 of SGD and 2 more"
        in words
    )
    assert "With DynamicScaler(model=...) the module is named, too." in words


def test_gradients_that_are_gone_and_a_scale_at_its_floor_are_said() -> None:
    with pytest.warns(PrecisionWarning) as said:
        heard(Alarm(1), known(1, scale=2.0**-24), torch.optim.SGD(model().parameters(), 0.1))
    words = str(said[0].message)
    assert "The gradients of this step are gone already" in words
    assert "The scale is at its floor: a smaller one would not help." in words
    assert "fell to 5.96046e-08" in words


class TestTheRate:
    @staticmethod
    def with_skips(*at: int, updates: int = 100) -> Known:
        return Known(updates, len(at), recent=deque((i in at for i in range(updates)), maxlen=100))

    def test_many_skips_that_are_not_in_a_row_are_said_once(self) -> None:
        alarm = Alarm(5, 0.1)
        heard(alarm, self.with_skips(*range(0, 90, 10)))
        with pytest.warns(PrecisionWarning, match="10 of the last 100 optimizer steps were"):
            heard(alarm, self.with_skips(*range(0, 100, 10)))
        for stride in (9, 12, 10):
            heard(alarm, self.with_skips(*range(0, 100, stride)))

    def test_it_is_said_again_after_better_times(self) -> None:
        alarm = Alarm(5, 0.1)
        for _ in range(2):
            with pytest.warns(PrecisionWarning):
                heard(alarm, self.with_skips(*range(0, 100, 10)))
            heard(alarm, self.with_skips(1, 2))

    def test_a_few_updates_say_nothing(self) -> None:
        heard(Alarm(5, 0.1), self.with_skips(*range(0, 60, 2), updates=60))

    def test_a_run_of_skips_is_said_by_its_own_words_alone(self) -> None:
        state = self.with_skips(*range(80, 100))
        state.in_a_row = 20
        with pytest.warns(PrecisionWarning, match="20 optimizer steps in a row") as said:
            heard(Alarm(5, 0.1), state)
        assert len(said) == 1


class Root(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.a, self.b, self.factor = nn.Linear(2, 2), nn.Linear(2, 2), factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x)) * self.factor


class TestTheNextForward:
    def test_the_first_module_whose_output_is_not_finite(self) -> None:
        root = Root(float("inf"))
        trace = ForwardTrace(root)
        root(torch.full((1, 2), 3.0))
        assert trace.done
        assert trace.words() == (
            "First non-finite in forward: the output of the model (Root); its inputs are finite, up to 3."
        )

    def test_a_gradient_where_forward_is_finite(self) -> None:
        root = Root(1.0)
        trace = ForwardTrace(root)
        (root(torch.ones(1, 2)).sum() * float("inf")).backward()
        assert trace.words().startswith(
            "Forward is finite in every module; first non-finite in backward: the gradient of the output of the model."
        )

    def test_nothing_found_is_said(self) -> None:
        root = Root(1.0)
        trace = ForwardTrace(root)
        root(torch.ones(1, 2)).sum().backward()
        assert (
            trace.words()
            == "In the step that was looked at, outputs and gradients of all modules were finite."
        )

    def test_a_model_that_cannot_be_watched_is_said(self) -> None:
        root = Root(float("inf"))
        root.compile(backend="eager")
        alarm, optimizer = Alarm(1, model=root), broken(root, "b.bias")
        with pytest.warns(PrecisionWarning, match="in a row"):
            heard(alarm, known(1), optimizer)
        for n in range(2, 5):
            root(torch.ones(1, 2))
            heard(alarm, known(n), optimizer)
        with pytest.warns(PrecisionWarning, match="could not be watched"):
            heard(alarm, known(5), optimizer)
        assert all(not m._forward_hooks for m in root.modules())

    def test_hooks_are_gone_after_one_forward(self) -> None:
        root = Root(1.0)
        ForwardTrace(root)
        root(torch.ones(1, 2))
        assert all(not m._forward_hooks for m in root.modules())

    def test_the_alarm_tells_it_once(self) -> None:
        root = Root(float("inf"))
        alarm, optimizer = Alarm(1, model=root), broken(root, "b.bias")
        with pytest.warns(PrecisionWarning, match="in a row"):
            heard(alarm, known(1), optimizer)
        root(torch.ones(1, 2))
        with pytest.warns(PrecisionWarning, match="First non-finite in forward"):
            heard(alarm, known(2), optimizer)
        heard(alarm, known(0), optimizer)
        with pytest.warns(PrecisionWarning, match="in a row") as said:
            heard(alarm, known(1), optimizer)
        root(torch.ones(1, 2))
        heard(alarm, known(2), optimizer)
        assert len(said) == 1
