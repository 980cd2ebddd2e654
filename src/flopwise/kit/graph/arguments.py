"""What users hand in, looked at before anything is done with it: one error that says what was seen and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from flopwise.errors import GraphError


def check_module(model: Any, where: str) -> None:
    """Checks that this is a module.

    Raises:
        GraphError: it is not.
    """
    if not isinstance(model, nn.Module):
        raise GraphError(f"{where} takes a torch.nn.Module first, not {_seen(model)}")


def check_optimizer(optimizer: Any, where: str) -> None:
    """Checks that this is one of torch's optimizers, or one that is made like them.

    Raises:
        GraphError: it is not.
    """
    if not isinstance(optimizer, Optimizer):
        raise GraphError(f"{where} takes a torch.optim.Optimizer, not {_seen(optimizer)}")


def listed(things: Any, kind: type, where: str) -> list[Any]:
    """Returns one thing or several of a kind as a list.

    Raises:
        GraphError: something else is there, or nothing.
    """
    found = [things] if isinstance(things, kind) else things
    if not isinstance(found, (list, tuple, set, nn.ModuleList)) and not hasattr(found, "__next__"):
        raise GraphError(f"{where} is {kind.__name__} or a list of them, not {_seen(things)}")
    found = list(found)
    wrong = next((t for t in found if not isinstance(t, kind)), None)
    if wrong is not None or not found:
        raise GraphError(
            f"{where} is {kind.__name__} or a list of them, and {_seen(wrong) if found else 'nothing'} is in the list"
        )
    return found


def check_whole(value: Any, name: str, least: int) -> None:
    """Checks that this is a whole number of at least `least`.

    Raises:
        GraphError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise GraphError(f"{name}={value!r}: it is a whole number of at least {least}")


def check_above_zero(value: Any, name: str) -> None:
    """Checks that this is a number above 0.

    Raises:
        GraphError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise GraphError(f"{name}={value!r}: it is a number above 0")


def _seen(thing: Any) -> str:
    kind = type(thing)
    return repr(thing) if thing is None or kind in (str, int, float) else f"a {kind.__qualname__}"


def several(things: Any, where: str) -> list[Any]:
    """Returns things that a step may change as a list; a single one need not be in one.

    Raises:
        GraphError: a plain value is among them, which nothing can put back.
    """
    single = isinstance(things, (torch.Tensor, torch.Generator, nn.Module, dict))
    if not single and not isinstance(things, Iterable):
        single = hasattr(things, "__dict__")
    if isinstance(things, (str, bytes)) or not (single or isinstance(things, Iterable)):
        raise GraphError(f"{where} is a list of modules, tensors and the like, not {_seen(things)}")
    found = [things] if single else list(things)
    for thing in found:
        if thing is None or isinstance(thing, (str, bytes, bool, int, float)):
            raise GraphError(f"{where} holds {_seen(thing)}, which is no module or tensor")
    return found
