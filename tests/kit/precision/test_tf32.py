"""TF32's switches: set inside, as they were outside, and the two sets of them never left disagreeing. On a CPU build the
switches are there, and what they do is not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

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


def test_two_calls_in_one_backward_give_them_back() -> None:
    MATMUL.allow_tf32 = False
    CUDNN.allow_tf32 = False
    found = Flags.read()
    x = torch.ones(2, requires_grad=True)
    first, second = x * 2, x * 3
    in_backward_of([first])
    in_backward_of([second])
    (first + second).sum().backward()
    assert Flags.read() == found


def test_a_backward_that_fails_is_made_good_by_the_next_call() -> None:
    MATMUL.allow_tf32 = False
    CUDNN.allow_tf32 = False
    found = Flags.read()

    def fails(grad: torch.Tensor) -> None:
        raise ValueError("out of memory, say")

    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(fails)
    out = y * 3
    in_backward_of([out])
    with pytest.raises(ValueError, match="out of memory"):
        out.sum().backward()
    with tf32():
        pass
    assert Flags.read() == found


def test_a_checkpointed_part_keeps_them_in_the_rest_of_backward() -> None:
    MATMUL.allow_tf32 = False
    CUDNN.allow_tf32 = False
    found, seen = Flags.read(), []

    def part(x: torch.Tensor) -> torch.Tensor:
        with tf32():
            out = x * 2
        in_backward_of([out])
        return out

    x = torch.ones(2, requires_grad=True)
    y = x * 1
    y.register_hook(lambda g: seen.append(new()["matmul"]))
    out = torch.utils.checkpoint.checkpoint(part, y, use_reentrant=False) * 3
    in_backward_of([out])
    out.sum().backward()
    assert seen == ["tf32"]
    assert Flags.read() == found


def test_switching_on_what_is_on_changes_nothing() -> None:
    MATMUL.allow_tf32 = CUDNN.allow_tf32 = True
    found = switch_on()
    assert Flags.read() == found
