"""Clipping of scaled gradients, and listening for torch's clips that come too early."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from flopwise.kit.precision import clipping
from flopwise.kit.precision.clipping import ClipWatch, Heard, clip_scaled, words


@pytest.fixture(autouse=True)
def _profile_as_found() -> Iterator[None]:
    found = sys.getprofile()
    yield
    assert sys.getprofile() is found


def weight() -> nn.Parameter:
    made = nn.Parameter(torch.zeros(3))
    made.grad = torch.tensor([30.0, 40.0, 0.0]) * 1024
    return made


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_scaled_gradients_clip_as_unscaled_ones(norm_type: float) -> None:
    scaled, plain = weight(), weight()
    plain.grad.mul_(1 / 1024)  # type: ignore[union-attr]
    norm = clip_scaled([scaled], 2.0, norm_type, torch.tensor(1024.0))
    assert torch.equal(norm, clip_grad_norm_([plain], 2.0, norm_type))
    assert torch.equal(scaled.grad / 1024, plain.grad)  # type: ignore[operator,arg-type]


class TestListening:
    def test_a_clip_is_heard_with_its_bound_and_norm(self) -> None:
        watch, param = ClipWatch(), weight()
        watch.start()
        clip_grad_norm_([param], 1.5)
        heard = watch.stop()
        assert heard is not None
        assert (heard.function, heard.bound) == ("clip_grad_norm_", 1.5)
        assert heard.norm.item() == 50.0 * 1024
        assert heard.line is not None
        assert "test_clipping.py" in heard.line
        assert watch.stop() is None

    def test_a_clip_of_values_is_heard(self) -> None:
        watch, param = ClipWatch(), weight()
        watch.start()
        clip_grad_value_([param], 0.25)
        heard = watch.stop()
        assert heard is not None
        assert (heard.function, heard.bound, heard.norm) == ("clip_grad_value_", 0.25, None)

    def test_it_ends_after_some_windows(self) -> None:
        watch = ClipWatch(windows=2)
        for _ in range(2):
            watch.start()
            watch.end_of_window()
        watch.start()
        assert sys.getprofile() is None

    def test_another_profile_function_is_left_alone(self) -> None:
        def other(frame: Any, event: str, value: Any) -> None:
            pass

        sys.setprofile(other)
        try:
            watch = ClipWatch()
            watch.start()
            assert sys.getprofile() is other
            watch.stop()
            assert sys.getprofile() is other
        finally:
            sys.setprofile(None)

    def test_a_loop_that_never_steps_is_not_slowed_down_for_ever(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(clipping, "MOST_EVENTS", 10)
        watch = ClipWatch()
        watch.start()
        for _ in range(20):
            len("a")
        assert sys.getprofile() is None
        watch.start()
        assert sys.getprofile() is None

    def test_a_compiled_function_runs_meanwhile(self) -> None:
        compiled = torch.compile(lambda x: x * 2 + 1, backend="eager")
        watch = ClipWatch()
        watch.start()
        assert compiled(torch.ones(2)).tolist() == [3.0, 3.0]
        assert watch.stop() is None


class TestWords:
    def test_what_the_order_costs_is_told(self) -> None:
        said = words(Heard("clip_grad_norm_", 1.0, torch.tensor(51200.0), "train.py:9"), 1024.0)
        # the true norm is 50: the step should have been cut by 50 and was by 51,200
        assert said is not None
        assert said.startswith(
            "Clip runs on scaled gradients: clip_grad_norm_ at train.py:9 compares max_norm 1 with a norm of 5.12e+04, which is "
            "1024 times the true one; effective lr cut by about 1024x."
        )

    def test_a_clip_that_would_not_bind_cuts_what_should_be_whole(self) -> None:
        said = words(Heard("clip_grad_norm_", 1.0, torch.tensor(560.9), None), 1024.0)
        assert said is not None
        assert "between backward and unscale_" in said
        assert "cut by about 561x" in said

    def test_values_are_cut_at_the_bound_over_the_scale(self) -> None:
        said = words(Heard("clip_grad_value_", 1.0, None, "a.py:1"), 1024.0)
        assert said is not None
        assert "it cuts them at 0.000977 instead of 1." in said

    @pytest.mark.parametrize(
        ("bound", "norm", "scale"),
        [(1e9, 512.0, 1024.0), (1.0, float("inf"), 1024.0), (1.0, 5.0, 1.0), (1.0, 0.0, 1024.0)],
        ids=["binds nothing", "not finite", "scale of 1", "no gradient"],
    )
    def test_a_clip_that_changes_nothing_is_not_said(
        self, bound: float, norm: float, scale: float
    ) -> None:
        assert words(Heard("clip_grad_norm_", bound, torch.tensor(norm), None), scale) is None
