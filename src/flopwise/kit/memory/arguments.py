"""What the functions of this room are called with, looked at before anything runs: one clear error, and nothing changed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from flopwise.errors import FlopwiseError


class ArgumentError(FlopwiseError, ValueError):
    """A function was called with something that it cannot use; nothing was run and nothing changed."""


def need_module(where: str, module: Any) -> None:
    """Checks that it is a module whose parameters have a size.

    Raises:
        ArgumentError: it is not.
    """
    if not isinstance(module, nn.Module):
        raise ArgumentError(f"{where}: module is a {_kind(module)}; a torch.nn.Module is meant")
    lazy = next((n for n, p in module.named_parameters() if is_lazy(p)), None)
    if lazy is None:
        lazy = next((n for n, b in module.named_buffers() if is_lazy(b)), None)
    if lazy is not None:
        raise ArgumentError(
            f"{where}: {lazy} has no size yet: run the module once on a batch first"
        )


def need_step(where: str, step: Any) -> None:
    """Checks that it is a function that can be called again and again.

    Raises:
        ArgumentError: it is not.
    """
    if not callable(step) or isinstance(step, nn.Module):
        raise ArgumentError(
            f"{where}: step is a {_kind(step)}; a function without arguments is meant, which runs the model on a batch: "
            "`lambda: loss(model(x)).backward()`"
        )


def need_whole(where: str, name: str, value: Any, least: int = 0) -> None:
    """Checks that it is a whole number that is not below the least.

    Raises:
        ArgumentError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise ArgumentError(f"{where}: {name}={value!r}; a whole number from {least} on is meant")


def need_number(where: str, name: str, value: Any, least: float = 0) -> None:
    """Checks that it is a finite number that is not below the least.

    Raises:
        ArgumentError: it is not.
    """
    good = isinstance(value, Real) and not isinstance(value, bool)
    if not good or not math.isfinite(value) or value < least:
        raise ArgumentError(f"{where}: {name}={value!r}; a number from {least:g} on is meant")


def need_iterable(where: str, name: str, value: Any, meant: str) -> None:
    """Checks that several things were given.

    Raises:
        ArgumentError: they were not.
    """
    if not isinstance(value, Iterable):
        raise ArgumentError(f"{where}: {name} is a {_kind(value)}; {meant} is meant")


def need_optimizers(where: str, optimizers: Any) -> list[torch.optim.Optimizer]:
    """Returns the optimizers as a list; one alone is taken too.

    Raises:
        ArgumentError: they are something else.
    """
    if isinstance(optimizers, torch.optim.Optimizer):
        return [optimizers]
    found = list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]
    wrong = next((o for o in found if not isinstance(o, torch.optim.Optimizer)), None)
    if wrong is not None or not isinstance(optimizers, Iterable):
        raise ArgumentError(
            f"{where}: a {_kind(wrong)} among the optimizers; a list of torch.optim.Optimizer is meant"
        )
    return found


def _kind(value: Any) -> str:
    return type(value).__name__
