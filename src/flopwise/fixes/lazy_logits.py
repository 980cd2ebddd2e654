"""Logits that are computed only if somebody reads them, and then exactly, gradient included.

To autograd they are the output of the head; to everything else a tensor of its shape and dtype. Reading shapes, casting and
detaching computes nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map_only

#: What gives the same values, so that nothing has to be computed for it.
_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
_CAST = torch.ops.aten._to_copy.default
#: What needs a tensor with memory of its own.
_ASK_FOR_MEMORY = {
    getattr(torch.Tensor, name)
    for name in (
        "tolist", "numpy", "__array__", "__dlpack__", "data_ptr", "untyped_storage", "storage",
        "_typed_storage", "share_memory_", "is_shared", "__reduce_ex__", "__deepcopy__", "__repr__", "__format__",
    )
    if hasattr(torch.Tensor, name)
} | {torch.Tensor.data.__get__, torch.Tensor.__cuda_array_interface__.__get__}  # type: ignore[attr-defined]  # fmt: skip


class Source:
    """What logits are computed from, once, when they are read.

    The weight is kept as it was when the step used it: logits may be read after the optimizer has moved it.
    """

    def __init__(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        device = hidden.device.type
        self.autocast = (
            torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        )
        self.dtype = self.autocast or hidden.dtype
        self.shape = (*hidden.shape[:-1], weight.shape[0])
        self.device = hidden.device
        self.reads: list[str] = []  # the operators that read values
        self.watched = True  # whether reads are noted
        self._hidden = hidden.detach()
        self._weight = weight.detach().to(self.dtype, copy=True)
        self._bias = None if bias is None else bias.detach().to(self.dtype, copy=True)
        self._value: torch.Tensor | None = None

    def value(self, reader: str) -> torch.Tensor:
        """Returns the logits, without a graph."""
        if self.watched:
            self.reads.append(reader)
        if self._value is None:
            with torch.no_grad():
                self._value = F.linear(self._hidden.to(self.dtype), self._weight, self._bias)
        return self._value


class Known(Source):
    """Logits that have been computed already, and are only watched."""

    def __init__(self, value: torch.Tensor) -> None:
        self.autocast, self.dtype, self.shape = None, value.dtype, tuple(value.shape)
        self.device, self.reads, self.watched = value.device, [], True
        self._value = value.detach()


class LazyLogits(torch.Tensor):
    """A tensor without values, until they are asked for."""

    source: Source

    @staticmethod
    def __new__(cls, source: Source, dtype: torch.dtype) -> LazyLogits:
        """Returns the tensor, in this dtype."""
        made: LazyLogits = torch.Tensor._make_wrapper_subclass(
            cls, source.shape, dtype=dtype, device=source.device
        )
        made.source = source
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Gives what asks for memory, not for an operator, an ordinary tensor."""
        kwargs = kwargs or {}
        if func in _ASK_FOR_MEMORY:
            reader = getattr(func, "__name__", "memory")
            args, kwargs = tree_map_only(LazyLogits, lambda t: t.ordinary(reader), (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def ordinary(self, reader: str) -> torch.Tensor:
        """Returns the values as a tensor that is a leaf, in this dtype."""
        value = self.source.value(reader).to(self.dtype)
        return value.detach().requires_grad_(self.requires_grad)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Runs an operator on the values; casts and detaches without them."""
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, LazyLogits):
            if func in _SAME:
                return LazyLogits(first.source, first.dtype)
            wanted = {name for name, value in kwargs.items() if value is not None}
            dtype = kwargs.get("dtype")
            cast = func is _CAST and wanted <= {"dtype", "non_blocking"}
            if cast and dtype is not None and dtype.is_floating_point:
                return LazyLogits(first.source, dtype)
        args, kwargs = tree_map_only(
            LazyLogits, lambda lazy: lazy.source.value(str(func)).to(lazy.dtype), (args, kwargs)
        )
        return func(*args, **kwargs)


class _Later(torch.autograd.Function):
    """Gives lazy logits the gradient of the product that they stand for."""

    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, bias: Any, source: Source) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, bias)
        ctx.dtype = source.dtype
        return LazyLogits(source, source.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        found = ctx.saved_tensors
        with torch.enable_grad(), torch.autocast(grad.device.type, enabled=False):
            leaves = [None if t is None else t.detach().requires_grad_() for t in found]
            cast = [None if t is None else t.to(ctx.dtype) for t in leaves]
            product = F.linear(*cast)  # type: ignore[arg-type]
            wanted = [t for t in leaves if t is not None]
            grads = iter(torch.autograd.grad(product, wanted, grad.to(ctx.dtype)))
        return (*(None if t is None else next(grads) for t in leaves), None)


class _Watched(torch.autograd.Function):
    """Gives logits that are computed already a tensor that tells whether they are read."""

    @staticmethod
    def forward(ctx: Any, logits: Any, source: Source) -> torch.Tensor:
        return LazyLogits(source, logits.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


def later(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> LazyLogits:
    """Returns the logits of a head, not computed."""
    source = Source(hidden, weight, bias)
    made: LazyLogits = _Later.apply(hidden, weight, bias, source)  # type: ignore[no-untyped-call]
    return made


def watched(logits: torch.Tensor) -> LazyLogits:
    """Returns logits that tell whether they are read."""
    made: LazyLogits = _Watched.apply(logits, Known(logits))  # type: ignore[no-untyped-call]
    return made
