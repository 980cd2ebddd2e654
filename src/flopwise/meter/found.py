"""What is found in the training process: the root modules, and what a batch is made of."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

#: A mask or padding count is taken from CPU tensors up to this many elements: above, it would cost too much a step.
LARGEST_MASK = 1 << 20


class Batch(NamedTuple):
    """What one batch (or the inputs of one forward) holds."""

    signature: str  # e.g. "16x1024 int64"; "" if there is no tensor
    samples: int | None  # leading dimension of the first tensor
    ids: torch.Tensor | None  # the token ids, if the first tensor is a 2-d integer tensor
    mask: torch.Tensor | None  # an attention mask beside it


def find_roots(parameters: Iterable[nn.Parameter]) -> list[nn.Module]:
    """Returns the outermost modules that own any of `parameters`.

    Wrappers (DDP, a compiled module, a LightningModule) count as outermost. One pass over the garbage collector's
    objects, some 0.1 s in a process with a million of them.
    """
    wanted = {id(p) for p in parameters}
    modules = [o for o in gc.get_objects() if _is_module(o)]
    parents: dict[int, list[nn.Module]] = {}
    owners: list[nn.Module] = []
    for module in modules:
        own = vars(module)
        for child in own.get("_modules", {}).values():
            if child is not None:
                parents.setdefault(id(child), []).append(module)
        if any(id(p) in wanted for p in own.get("_parameters", {}).values()):
            owners.append(module)
    tops: dict[int, nn.Module] = {}
    seen: set[int] = set()
    todo = owners
    while todo:
        module = todo.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        above = parents.get(id(module))
        if above:
            todo.extend(above)
        else:
            tops[id(module)] = module
    return list(tops.values())


def _is_module(thing: object) -> bool:
    """Whether `thing` is a live module; asks its type alone, since proxies may run code for isinstance."""
    return issubclass(type(thing), nn.Module) and "_modules" in getattr(thing, "__dict__", {})


def is_optimized_module(module: nn.Module) -> bool:
    """Whether `module` is the wrapper that torch.compile(model) returns."""
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    kind = getattr(eval_frame, "OptimizedModule", None)
    return kind is not None and isinstance(module, kind)


def compiled_parts(module: nn.Module, by_script: bool = False) -> int:
    """Returns how many modules in the tree of `module` are compiled, by wrapper or in place.

    A fix's layers sit in the same place as in-place compiled code; their owner says what they are: by `compiles` whether
    a call runs compiled code, by `found_compiled` whether it did before any fix.

    Args:
        by_script: whether what fixes have compiled is left out.
    """
    said = "found_compiled" if by_script else "compiles"
    return sum(
        is_optimized_module(m) or _is_compiled_call(getattr(m, "_compiled_call_impl", None), said)
        for m in module.modules()
    )


def _is_compiled_call(call: Any, said: str) -> bool:
    while type(call).__name__ == "Watch":  # the meter's own, around whatever stood there
        call = call.compiled
    return call is not None and bool(getattr(getattr(call, "__self__", None), said, True))


def frames_compiled() -> int:
    """Returns how many frames Dynamo has tried to compile in this process; 0 while it is not even imported."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return 0
    return int(utils.counters["frames"]["total"]) if "frames" in utils.counters else 0


def compiles_own_code() -> bool:
    """Whether Dynamo has compiled code that is neither torch's nor Python's own (a compiled optimizer step is)."""
    convert_frame = sys.modules.get("torch._dynamo.convert_frame")
    if convert_frame is None:
        return False
    of_torch, of_python = (
        os.path.dirname(torch.__file__) + os.sep,
        os.path.dirname(os.__file__) + os.sep,
    )
    try:
        codes = [reference() for reference in convert_frame.input_codes.seen]
    except (AttributeError, TypeError):
        return frames_compiled() > 0
    files = {code.co_filename for code in codes if code is not None}
    return any(
        not file.startswith(of_torch) and (not file.startswith(of_python) or "-packages" in file)
        for file in files
    )


def describe_batch(batch: Any) -> Batch:
    """Returns what a batch holds, from the shapes of its first tensors; reads no data.

    It runs once or twice in every timed step, so the common containers are told by their type alone.
    """
    tensors: list[torch.Tensor] = []
    ids = mask = None
    kind = type(batch)
    if kind is tuple or kind is list:
        for item in batch[:4]:
            if isinstance(item, torch.Tensor):
                tensors.append(item)
            else:
                _collect(item, tensors, 1)
    elif kind is dict or isinstance(batch, Mapping):
        ids, mask = _two_dimensional(batch, "input_ids"), _two_dimensional(batch, "attention_mask")
        if ids is not None:
            tensors.append(ids)
        _collect(batch, tensors, 0)
    else:
        _collect(batch, tensors, 0)
    if not tensors:
        return NOTHING
    first = tensors[0]
    shape = first.shape
    if ids is None and len(shape) == 2 and first.dtype in _INTEGERS:
        ids = first
    signature = " ".join([_shape(t) for t in tensors[:3]])
    return Batch(signature, shape[0] if shape else None, ids, mask)


NOTHING = Batch("", None, None, None)
_INTEGERS = frozenset((torch.int64, torch.int32))


def _two_dimensional(batch: Mapping[str, Any], name: str) -> torch.Tensor | None:
    found = batch.get(name)
    return found if isinstance(found, torch.Tensor) and found.dim() == 2 else None


def _collect(thing: Any, tensors: list[torch.Tensor], depth: int) -> None:
    if isinstance(thing, torch.Tensor):
        tensors.append(thing)
    elif depth < 3 and len(tensors) < 3:
        if isinstance(thing, Mapping):
            for value in list(thing.values())[:8]:
                _collect(value, tensors, depth + 1)
        elif isinstance(thing, Sequence) and not isinstance(thing, (str, bytes)):
            for value in thing[:8]:
                _collect(value, tensors, depth + 1)


_SHAPES: dict[tuple[Any, Any], str] = {}


def _shape(tensor: torch.Tensor) -> str:
    key = (tensor.shape, tensor.dtype)
    known = _SHAPES.get(key)
    if known is None:
        sizes = "x".join(map(str, tensor.shape)) or "scalar"
        known = f"{sizes} {str(tensor.dtype).removeprefix('torch.')}"
        if len(_SHAPES) < 10_000:
            _SHAPES[key] = known
    return known


def real_tokens(batch: Batch, padding_idx: int | None) -> int | None:
    """Returns how many positions are real tokens, where a mask or a padding id on the CPU shows it."""
    if batch.mask is not None and batch.mask.device.type == "cpu":
        if batch.mask.numel() <= LARGEST_MASK:
            return int((batch.mask != 0).sum())
        return None
    ids = batch.ids
    if ids is None or padding_idx is None or ids.device.type != "cpu" or ids.numel() > LARGEST_MASK:
        return None
    return int((ids != padding_idx).sum())


class Reading(NamedTuple):
    """How to read a batch of these roots."""

    has_embedding: bool  # 2-d integer inputs are tokens
    padding_idx: int | None
    batch_first: bool  # False: a recurrent or attention module of the root wants (time, batch)


def read_roots(roots: Iterable[nn.Module]) -> Reading:
    """Returns how a batch is to be read, from what the roots are made of."""
    embedding, padding, batch_first = False, None, True
    for root in roots:
        for module in root.modules():
            if isinstance(module, nn.Embedding):
                embedding = True
                padding = module.padding_idx if padding is None else padding
            elif isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) and not module.batch_first:
                batch_first = False
    return Reading(embedding, padding, batch_first)
