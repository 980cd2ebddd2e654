"""Counts a module's forward and backward on fake tensors: shapes and dtypes flow, nothing is computed.

For compiled models, whose ops cannot be watched without changing the run. Nothing of the user's is touched: not the
weights, gradients and buffers, not the random state, not the compiler's caches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from flopwise.errors import AttachError
from flopwise.meter import count_stack
from flopwise.meter.count_clone import Cloner, unwrapped
from flopwise.meter.count_mode import OpCounter
from flopwise.meter.count_roles import Roles
from flopwise.records.rank import FlopCount

_GLOBAL_HOOKS = (
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_forward_hooks_always_called",
    "_global_forward_hooks_with_kwargs",
)
#: Collectives with a process group behind them would wait for the other ranks, which are not counting.
_COLLECTIVES = ("c10d::", "fsdp::")


class _NoCollectives(OpCounter):
    """An op counter that stops at a collective instead of running it."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if str(func).replace(".", "::", 1).startswith(_COLLECTIVES):
            raise AttachError(f"it runs a collective ({func}) of its own")
        return super().__torch_dispatch__(func, types, args, kwargs)


def count_fake(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], shape: str
) -> FlopCount:
    """Returns the FLOPs of one forward and backward of the module: one micro-batch, without the optimizer.

    The gradient starts at the output's loss if it has one, else at the sum of its floating outputs; FLOPs of a loss
    outside of the module are not seen (a cross-entropy has none by convention). Autocast is taken as it is now.

    Args:
        module: compiled, DDP-wrapped or plain, in its present train or eval state.
        args, kwargs: as the module is called; of tensors only shape, dtype, device and requires_grad are used.
        shape: kept in the record.

    Raises:
        AttachError: it cannot be done, with the reason: values of tensors decide what is computed, the weights are
            sharded, the module runs collectives or kernels that know no fake tensors, nothing requires a gradient.
    """
    inner = unwrapped(module)
    try:
        with _undisturbed():
            return _count(inner, args, kwargs, shape)
    except AttachError as error:
        raise AttachError(_refusal(inner, str(error))) from error
    except Exception as error:
        text = str(error).strip().partition("\n")[0]
        raise AttachError(_refusal(inner, f"{type(error).__name__}: {text}")) from error


def _refusal(module: nn.Module, why: str) -> str:
    return f"{type(module).__name__} cannot be counted on fake tensors: {why}"


def _count(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], shape: str
) -> FlopCount:
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    clone = Cloner(fake_mode, module)
    stand_in = clone(module)
    fake_args, fake_kwargs = clone.arguments(tuple(args)), clone.arguments(dict(kwargs))
    roles = Roles()
    counter = _NoCollectives(roles, timed=False, in_place=True, fake=True)
    roles.install()
    try:
        with fake_mode, counter, _autocast_without_cache():
            loss = _loss(stand_in(*fake_args, **fake_kwargs))
            _backward(loss, module)
    finally:
        counter.active = False
        roles.remove()
    return counter.tally.count(shape, "fake tensors")


def _loss(output: Any) -> torch.Tensor:
    """Returns the scalar that training would start its backward pass from.

    Raises:
        AttachError: no output requires a gradient.
    """
    named = output if isinstance(output, Mapping) else getattr(output, "__dict__", {})
    given = named.get("loss") if isinstance(named, Mapping) else None
    first = output[0] if isinstance(output, (tuple, list)) and output else output
    for candidate in (given, first):
        if isinstance(candidate, torch.Tensor) and candidate.ndim == 0 and candidate.requires_grad:
            return candidate
    outputs = [t for t in _tensors(output, 0) if t.requires_grad and t.is_floating_point()]
    if not outputs:
        raise AttachError("none of its outputs requires a gradient")
    device = outputs[0].device
    return torch.stack([t.sum().float().to(device) for t in outputs]).sum()


def _tensors(value: Any, depth: int) -> Iterator[torch.Tensor]:
    """Yields the tensors of an output: containers, data classes and objects with attributes."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < 6:
        if isinstance(value, Mapping):
            inner: Any = value.values()
        elif isinstance(value, (tuple, list)):
            inner = value
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            inner = [getattr(value, f.name, None) for f in dataclasses.fields(value)]
        else:
            inner = ()
        for item in inner:
            yield from _tensors(item, depth + 1)


def _backward(loss: torch.Tensor, real: nn.Module) -> None:
    """Runs the backward pass of the fake loss, leaving every real gradient as it was.

    A reentrant checkpoint refuses `torch.autograd.grad`; then gradients are accumulated, and those of real
    parameters that the copy still reached are put back.
    """
    leaves, reentrant = _graph(loss)
    if not leaves and not reentrant:
        raise AttachError("none of its parameters requires a gradient")
    if not reentrant:
        torch.autograd.grad(loss, leaves, allow_unused=True)
        return
    before = [(p, p.grad) for p in (*real.parameters(), *leaves)]
    try:
        loss.backward()
    finally:
        for parameter, grad in before:
            parameter.grad = grad


def _graph(loss: torch.Tensor) -> tuple[list[torch.Tensor], bool]:
    """Returns the leaves that the loss depends on, and whether a reentrant checkpoint lies on the way."""
    leaves: dict[int, torch.Tensor] = {}
    reentrant = False
    seen, pending = set(), [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            leaves[id(leaf)] = leaf
        reentrant = reentrant or node.name() == "CheckpointFunctionBackward"
        pending.extend(following for following, _ in node.next_functions)
    return list(leaves.values()), reentrant


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Keeps the random states, the compiler, the user's modes and the global module hooks out of the count."""
    states = _random_states()
    stance = count_stack.force_eager()
    try:
        with contextlib.ExitStack() as stack:
            if torch._C._len_torch_dispatch_stack():
                from torch.utils._python_dispatch import _disable_current_modes

                stack.enter_context(_disable_current_modes())
            stack.enter_context(_no_global_hooks())
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            yield
    finally:
        count_stack.restore(stance)
        _restore_random(states)


@contextlib.contextmanager
def _no_global_hooks() -> Iterator[None]:
    from torch.nn.modules import module as registry

    kept = []
    for name in _GLOBAL_HOOKS:
        hooks = getattr(registry, name, None)
        if hooks:
            kept.append((hooks, dict(hooks)))
            hooks.clear()
    try:
        yield
    finally:
        for hooks, content in kept:
            hooks.clear()
            hooks.update(content)


@contextlib.contextmanager
def _autocast_without_cache() -> Iterator[None]:
    """Enters autocast again as it stands, with a cache that keeps no fake weight for the real run to find."""
    kept = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(kept)


def _random_states() -> tuple[Any, ...]:
    ready = torch.cuda.is_available() and torch.cuda.is_initialized()
    cuda = torch.cuda.get_rng_state_all() if ready else None
    numpy_random = sys.modules.get("numpy.random")
    numpy_state = numpy_random.get_state() if numpy_random is not None else None
    return torch.get_rng_state(), cuda, random.getstate(), numpy_state


def _restore_random(states: tuple[Any, ...]) -> None:
    cpu, cuda, python, numpy_state = states
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state_all(cuda)
    random.setstate(python)
    if numpy_state is not None:
        sys.modules["numpy.random"].set_state(numpy_state)
