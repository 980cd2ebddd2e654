"""What is said: once, and at the user's line."""

from __future__ import annotations

import warnings

import torch

from flopwise.errors import PrecisionWarning
from flopwise.kit.precision.saying import Once, users_line, warn


def test_each_key_is_said_once() -> None:
    once = Once()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        once.say("a", "first")
        once.say("a", "again")
        once.say("b", "second")
    assert [str(w.message) for w in said] == ["first", "second"]


def test_a_warning_is_at_the_users_line() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        warn("here")
    assert said[0].filename == __file__
    assert said[0].category is PrecisionWarning


def test_the_line_is_found_through_torch() -> None:
    class Own(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    lines = []
    module = torch.nn.Sequential(Own())
    module[0].register_forward_hook(lambda *a: lines.append(users_line()))
    module(torch.ones(1))
    assert lines[0] is not None
    assert lines[0].startswith(f"{__file__}:")
