"""A stand-in for a module whose tensors hold no data: same structure, same code, nothing shared that can be written.

The copy follows modules, tensors, plain containers, bound methods and closures; any other object is shared with the
original, so that no data set, lock or process group is copied. Hooks of the user are left behind.
"""

from __future__ import annotations

import functools
import types
from collections import OrderedDict, deque
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from flopwise.errors import AttachError
from flopwise.meter.watch import SLOT, Watch

_HOOKS = (
    "_backward_pre_hooks",
    "_backward_hooks",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
_COMPILED = "_torchdynamo_orig_callable"
_LARGE = 10_000  # a container with more elements is data, not structure


class _LocalBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch norm of one process, in place of SyncBatchNorm, whose collectives must not run for a count."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        pass


class Cloner:
    """Copies one module tree, or its arguments, onto fake tensors."""

    def __init__(self, mode: FakeTensorMode, root: nn.Module | None = None) -> None:
        self._mode = mode
        self._memo: dict[int, Any] = {}
        self._alive: list[Any] = []  # the memo goes by id: what it names must not be freed
        self._inside = {id(m) for m in root.modules()} if root is not None else set()
        self._keeps_lengths = False

    def arguments(self, value: Any) -> Any:
        """Returns the stand-in of the arguments of a call.

        Short rows of integers stay as they are, since they may be the lengths of packed sequences, which decide how
        much attention there is. Nothing is computed with them: under the fake mode they turn fake where they are used.
        """
        self._keeps_lengths = True
        return self(value)

    def __call__(self, value: Any) -> Any:
        """Returns the stand-in of a value, the value itself where it holds no module and no tensor."""
        known = self._memo.get(id(value), self)
        if known is not self:
            return known
        made = self._make(value)
        return self._remember(value, made)

    def _remember(self, value: Any, made: Any) -> Any:
        self._memo[id(value)] = made
        self._alive.append(value)
        return made

    def _make(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, types.MethodType) and isinstance(value.__self__, nn.Module):
            return types.MethodType(value.__func__, self(value.__self__))
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, functools.partial):
            func, args, kwargs = self(value.func), self(value.args), self(value.keywords)
            return functools.partial(func, *args, **kwargs)
        return self._container(value)

    def _container(self, value: Any) -> Any:
        kind = type(value)
        if kind in (dict, OrderedDict) and len(value) <= _LARGE:
            made = self._remember(value, kind())
            made.update((key, self(item)) for key, item in value.items())
            return made
        if kind in (list, deque) and len(value) <= _LARGE:
            made = self._remember(value, kind())
            made.extend(self(item) for item in value)
            return made
        if kind is set and len(value) <= _LARGE:
            return {self(item) for item in value}
        if isinstance(value, tuple) and len(value) <= _LARGE:
            items = [self(item) for item in value]
            return (
                kind(*items)
                if hasattr(value, "_fields")
                else kind(items)
                if kind is tuple
                else value
            )
        return value

    def _tensor(self, real: torch.Tensor) -> torch.Tensor:
        short = real.ndim == 1 and real.numel() <= _LARGE and not real.is_floating_point()
        if self._keeps_lengths and short:
            return real
        if type(real) not in (torch.Tensor, nn.Parameter, nn.Buffer, FakeTensor):
            if _is_distributed(real):
                raise AttachError("its parameters are sharded (DTensor), and their compute is not")
            return self._mode.from_tensor(real)
        if real.layout is not torch.strided or real.is_nested or real.is_quantized:
            return self._mode.from_tensor(real)
        with self._mode, torch.no_grad():
            fake = torch.empty_strided(
                real.size(), real.stride(), dtype=real.dtype, device=real.device
            )
        if isinstance(real, nn.Parameter):
            return nn.Parameter(fake, requires_grad=real.requires_grad)
        return fake.requires_grad_(real.requires_grad)

    def _module(self, real: nn.Module) -> nn.Module:
        inner = unwrapped(real)
        if inner is not real:
            return self(inner)  # type: ignore[no-any-return]
        if isinstance(real, torch.jit.ScriptModule):
            raise AttachError(
                "it is a TorchScript module, whose code and weights Python cannot see"
            )
        kind: type = type(real)
        if any(k.__name__ in ("FullyShardedDataParallel", "FSDPModule") for k in kind.__mro__):
            raise AttachError("it is sharded by FSDP, which gathers the weights in hooks")
        if isinstance(real, nn.SyncBatchNorm):
            kind = _LocalBatchNorm
        copy: nn.Module = object.__new__(kind)
        self._remember(real, copy)
        for name, value in list(real.__dict__.items()):
            while isinstance(value, Watch):  # the meter looks at the real module only
                value = value.compiled
            copy.__dict__[name] = OrderedDict() if name in _HOOKS else self(value)
        if hasattr(copy.__dict__.get(SLOT), _COMPILED) or hasattr(
            real._compiled_call_impl, _COMPILED
        ):
            copy.__dict__["_compiled_call_impl"] = None
        return copy

    def _function(self, function: types.FunctionType) -> Any:
        """Returns the function with its closure bound to the copies, where the closure reaches into the tree."""
        original = getattr(function, _COMPILED, None)
        if original is not None:
            return self(original)
        if not self._reaches(function, set()):
            return function
        # Cells may be shared among functions and refer back to this one: they are copied once, filled later.
        cells = tuple(self._cell(cell) for cell in function.__closure__ or ())
        copy = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
        )
        copy.__kwdefaults__ = function.__kwdefaults__
        self._remember(function, copy)
        copy.__dict__.update(function.__dict__)
        for old, new in zip(function.__closure__ or (), cells, strict=True):
            if not _is_empty(old):
                new.cell_contents = self(old.cell_contents)
        return copy

    def _cell(self, cell: types.CellType) -> types.CellType:
        known = self._memo.get(id(cell))
        made: types.CellType = (
            known if known is not None else self._remember(cell, types.CellType())
        )
        return made

    def _reaches(self, value: Any, seen: set[int]) -> bool:
        """Returns whether a function or method holds a module of the tree, however deep in closures."""
        if id(value) in seen:
            return False
        seen.add(id(value))
        if isinstance(value, nn.Module):
            return id(value) in self._inside
        if isinstance(value, types.MethodType):
            return self._reaches(value.__self__, seen)
        if isinstance(value, functools.partial):
            return any(self._reaches(v, seen) for v in (value.func, *value.args))
        if isinstance(value, types.FunctionType):
            original = getattr(value, _COMPILED, None)
            cells = [c.cell_contents for c in value.__closure__ or () if not _is_empty(c)]
            return any(self._reaches(v, seen) for v in (original, *cells) if v is not None)
        return False


def unwrapped(module: nn.Module) -> nn.Module:
    """Returns the module inside wrappers that only compile it or reduce its gradients."""
    while True:
        inner = module.__dict__.get("_modules", {})
        if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            module = inner["module"]
        elif type(module).__name__ == "OptimizedModule" and "_orig_mod" in inner:
            module = inner["_orig_mod"]
        else:
            return module


def _is_empty(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return True
    return False


def _is_distributed(tensor: torch.Tensor) -> bool:
    return any(kind.__name__ == "DTensor" for kind in type(tensor).__mro__)
