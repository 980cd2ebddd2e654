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

from flopwise.kit.memory.interleaved import synchronize
from flopwise.kit.nested import tensors_in


@dataclass
class BlockCost:
    """One block in one step."""

    name: str
    kind: str
    kept_bytes: int = (
        0  # made in its forward and kept for backward; its inputs and parameters left out
    )
    input_bytes: int = 0  # kept in any case once it is checkpointed
    forward_s: float = 0.0  # the time to do it again
    calls: int = 0


def repeated_blocks(module: nn.Module) -> dict[str, nn.Module]:
    """Returns the outermost blocks of which a container holds at least two of the same class, by name.

    Blocks are children with parameters of a ModuleList, Sequential or ModuleDict.
    """
    found: dict[str, nn.Module] = {}

    def walk(parent: nn.Module, prefix: str) -> None:
        children = dict(parent.named_children())
        kinds = Counter(type(c) for c in children.values() if _is_block(c))
        container = isinstance(parent, (nn.ModuleList, nn.Sequential, nn.ModuleDict))
        for name, child in children.items():
            full = f"{prefix}{name}"
            if container and _is_block(child) and kinds[type(child)] >= 2:
                found[full] = child
            else:
                walk(child, f"{full}.")

    walk(module, "")
    return found


def measure_blocks(
    module: nn.Module, step: Callable[[], object], blocks: Sequence[str] | None = None
) -> list[BlockCost]:
    """Runs the step twice and returns what each block keeps and costs; the state of random numbers is put back.

    The step runs forward and backward; what else it does, it does for real. The first run warms up.

    Args:
        blocks: names of modules; default: `repeated_blocks`.

    Raises:
        ValueError: a name is no module's, or no block was called.
    """
    modules = dict(module.named_modules())
    names = list(repeated_blocks(module)) if blocks is None else list(blocks)
    unknown = [name for name in names if name not in modules]
    if unknown:
        raise ValueError(f"no modules named {unknown}")
    costs = [BlockCost(name, type(modules[name]).__name__) for name in names]
    first = next(module.parameters(), None)
    device = first.device if first is not None else torch.device("cpu")
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        step()
    with (
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        contextlib.ExitStack() as stack,
    ):
        for cost in costs:
            stack.enter_context(_watched(modules[cost.name], cost, device))
        step()
    if not any(cost.calls for cost in costs):
        raise ValueError("none of the blocks was called in the step")
    return [cost for cost in costs if cost.calls]


@contextlib.contextmanager
def _watched(block: nn.Module, cost: BlockCost, device: torch.device) -> Iterator[None]:
    """Counts what is saved while the block runs."""
    open_calls: list[tuple[contextlib.ExitStack, float]] = []

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        outside = {
            _key(t) for t in (*tensors_in((args, kwargs)), *block.parameters(), *block.buffers())
        }
        seen: set[int] = set()
        cost.input_bytes += sum(
            {_key(t): t.untyped_storage().nbytes() for t in tensors_in((args, kwargs))}.values()
        )
        cost.calls += 1

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            with contextlib.suppress(RuntimeError, NotImplementedError):
                key = _key(tensor)
                if key not in outside and key not in seen and tensor.device.type == device.type:
                    seen.add(key)
                    cost.kept_bytes += tensor.untyped_storage().nbytes()
            return tensor if tensor.is_leaf else tensor.detach()

        stack = contextlib.ExitStack()
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t))
        synchronize(device)
        open_calls.append((stack, time.perf_counter()))

    def leave(*_: Any) -> None:
        if open_calls:
            stack, start = open_calls.pop()
            synchronize(device)
            cost.forward_s += time.perf_counter() - start
            stack.close()

    hooks = [
        block.register_forward_pre_hook(enter, with_kwargs=True),
        block.register_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _is_block(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
