"""TF32's switches: set inside, as they were outside, and the two sets of them never left disagreeing. On a CPU build the
switches are there, and what they do is not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flopwise.kit.precision.tf32 import Flags, in_backward_of, switch_on, tf32

CUDNN: Any = torch.backends.cudnn
MATMUL = torch.backends.cuda.matmul


@pytest.fixture(autouse=True)
def _as_found() -> Iterator[None]:
    found = Flags.read()
    yield
    found.restore()


def new() -> dict[str, str]:
    return Flags.read().new


@pytest.mark.parametrize("allowed", [False, True])
def test_the_switches_are_on_inside_and_as_they_were_afterwards(allowed: bool) -> None:
    MATMUL.allow_tf32 = allowed
    CUDNN.allow_tf32 = allowed
    found = Flags.read()
    with tf32():
        assert set(new().values()) == {"tf32"}
        assert MATMUL.allow_tf32
        assert CUDNN.allow_tf32
    assert Flags.read() == found


def test_an_error_inside_gives_them_back() -> None:
    MATMUL.allow_tf32 = False
    found = Flags.read()
    with pytest.raises(ValueError, match="inside"), tf32():
        raise ValueError("inside")
    assert Flags.read() == found


def test_new_switches_that_a_script_has_set_alone_are_kept_apart() -> None:
    MATMUL.allow_tf32 = False
    MATMUL.fp32_precision = "tf32"  # the old one now raises when read
    found = Flags.read()
    if found.matmul is not None:
        pytest.skip("this torch keeps the old and the new switch together")
    assert found.conflict() is not None
    with tf32():
        assert new()["matmul"] == "tf32"
    assert Flags.read() == found


def test_backward_has_them_until_it_ends() -> None:
    MATMUL.allow_tf32 = False
    CUDNN.allow_tf32 = False
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda g: seen.append(new()["matmul"]))
    out = y * 3
    in_backward_of([out])
    assert new()["matmul"] != "tf32"
    out.sum().backward()
    assert seen == ["tf32"]
    assert new()["matmul"] != "tf32"


def test_switching_on_what_is_on_changes_nothing() -> None:
    MATMUL.allow_tf32 = CUDNN.allow_tf32 = True
    found = switch_on()
    assert Flags.read() == found
