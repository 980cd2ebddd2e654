"""What each repeated block of a model keeps for its backward pass, and what its forward pass costs to do again."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flopwise.kit.memory.arguments import ArgumentError
from flopwise.kit.memory.interleaved import synchronize
from flopwise.kit.memory.undisturbed import device_of, undisturbed
from flopwise.kit.nested import tensors_in


@dataclass
class BlockCost:
    """One block in one step. What is called more than once counts for what its smallest call keeps."""

    name: str
    kind: str
    kept_bytes: int = (
        0  # made in its forward and kept for backward; inputs, outputs and parameters left out
    )
    input_bytes: int = (
        0  # inputs that it does not keep as it is, but has to once it is checkpointed
    )
    cast_bytes: int = (
        0  # parameters in 16 bits, which autocast keeps until its `with` ends, checkpoint or not
    )
    forward_s: float = 0.0  # the time of all its calls
    calls: int = 0

    @property
    def freed_bytes(self) -> int:
        """Returns what is kept less once the block is checkpointed; more, if others keep its inputs anyway."""
        return max(0, self.kept_bytes - self.input_bytes)


def repeated_blocks(module: nn.Module) -> dict[str, nn.Module]:
    """Returns the outermost blocks of which a container holds at least two of the same class, by name.

    Blocks are children with parameters of a ModuleList, Sequential or ModuleDict.
    """
    found: dict[str, nn.Module] = {}
    seen: set[nn.Module] = set()  # one that is held in two places counts in the first

    def walk(parent: nn.Module, prefix: str) -> None:
        children = dict(parent.named_children())
        kinds = Counter(type(c) for c in children.values() if _is_block(c))
        container = isinstance(parent, (nn.ModuleList, nn.Sequential, nn.ModuleDict))
        for name, child in children.items():
            full = f"{prefix}{name}"
            if child in seen:
                continue
            seen.add(child)
            if container and _is_block(child) and kinds[type(child)] >= 2:
                found[full] = child
            else:
                walk(child, f"{full}.")

    walk(module, "")
    return found


def call_order(module: nn.Module, step: Callable[[], object], names: Sequence[str]) -> list[str]:
    """Runs the step and returns the names of the blocks that it calls, in the order of their first calls.

    Raises:
        ArgumentError: a name is no module's, or no block was called.
    """
    modules = dict(module.named_modules())
    unknown = [name for name in names if name not in modules]
    if unknown:
        raise ArgumentError(f"no modules named {unknown}")
    order: dict[str, None] = {}
    with undisturbed(module), contextlib.ExitStack() as stack:
        for name in names:
            note = modules[name].register_forward_pre_hook(
                lambda *_, name=name: order.setdefault(name)
            )
            stack.callback(note.remove)
        step()
    if not order:
        raise ArgumentError(
            f"the step called none of the blocks {names}"
            if names
            else "there are no repeated blocks: name some"
        )
    return list(order)


def block_costs(
    module: nn.Module, step: Callable[[], object], names: Sequence[str]
) -> list[BlockCost]:
    """Runs the step three times and returns what each block keeps and costs, of those that it calls, as they are called.

    The first run warms up, the second is timed, in the third it is seen what is kept.

    Args:
        step: forward and backward; gradients, buffers and random numbers are put back.
        names: of modules, as from `repeated_blocks`.

    Raises:
        ArgumentError: a name is no module's, or no block was called.
    """
    modules = dict(module.named_modules())
    device = device_of(module)
    order = call_order(module, step, names)
    costs = [BlockCost(name, type(modules[name]).__name__) for name in order]
    for watched in (_timed, _kept):
        with contextlib.ExitStack() as stack:
            stack.enter_context(undisturbed(module))
            for cost in costs:
                stack.enter_context(watched(modules[cost.name], cost, device))
            step()
    return costs


@contextlib.contextmanager
def _hooked(
    block: nn.Module, enter: Callable[..., None], leave: Callable[..., None]
) -> Iterator[None]:
    hooks = [
        block.register_forward_pre_hook(enter, with_kwargs=True),
        block.register_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _timed(block: nn.Module, cost: BlockCost, device: torch.device) -> Iterator[None]:
    """Adds up the time of the block's forward passes."""
    starts: list[float] = []

    def enter(*_: Any) -> None:
        synchronize(device)
        starts.append(time.perf_counter())

    def leave(*_: Any) -> None:
        if starts:
            synchronize(device)
            cost.forward_s += time.perf_counter() - starts.pop()

    with _hooked(block, enter, leave):
        yield


@contextlib.contextmanager
def _kept(block: nn.Module, cost: BlockCost, device: torch.device) -> Iterator[None]:
    """Notes what autograd saves while the block runs."""
    calls: list[tuple[contextlib.ExitStack, dict[int, int], dict[int, int], dict[int, int]]] = []

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = {_key(t): _bytes(t) for t in tensors_in((args, kwargs)) if t.device == device}
        saved: dict[int, int] = {}
        casts: dict[int, int] = {}
        # Asked here: inside of an op autocast is off.
        cached = torch.is_autocast_enabled(device.type) and torch.is_autocast_cache_enabled()

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            with contextlib.suppress(RuntimeError, NotImplementedError):
                if tensor.device == device:
                    into = casts if cached and _is_cast_weight(tensor) else saved
                    into[_key(tensor)] = _bytes(tensor)
            return tensor if tensor.is_leaf else tensor.detach()

        stack = contextlib.ExitStack()
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t))
        calls.append((stack, inputs, saved, casts))

    def leave(_: nn.Module, args: Any, out: Any) -> None:
        if not calls:
            return
        stack, inputs, saved, casts = calls.pop()
        stack.close()
        outside = {_key(t) for t in (*tensors_in(out), *block.parameters(), *block.buffers())}
        kept = sum(n for key, n in saved.items() if key not in outside | inputs.keys())
        more = sum(n for key, n in inputs.items() if key not in saved.keys() | outside)
        cast = sum(casts.values())
        cost.kept_bytes = min(cost.kept_bytes, kept) if cost.calls else kept
        cost.cast_bytes = min(cost.cast_bytes, cast) if cost.calls else cast
        cost.input_bytes = max(cost.input_bytes, more)
        cost.calls += 1

    with _hooked(block, enter, leave):
        yield


def _is_cast_weight(tensor: torch.Tensor) -> bool:
    """Returns whether this is a parameter in 16 bits, cast by autocast."""
    node: Any = tensor.grad_fn
    while node is not None and node.name() in _CASTS_AND_VIEWS:
        node = node.next_functions[0][0]
    return isinstance(getattr(node, "variable", None), nn.Parameter)


_CASTS_AND_VIEWS = (
    "ToCopyBackward0",
    "TBackward0",
    "TransposeBackward0",
    "ViewBackward0",
    "PermuteBackward0",
)


def _is_block(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _bytes(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().nbytes())
