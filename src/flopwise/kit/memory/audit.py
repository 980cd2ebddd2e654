"""Tensors that enter products with a size, stride or pointer that defeats vector loads or tensor cores."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from flopwise.flops.call import Call, Operand
from flopwise.flops.dtypes import Precision, executed, real_operations
from flopwise.flops.table import Rule, rule_of
from flopwise.kit.memory.alignment import (
    FULL_BYTES,
    VECTOR_BYTES,
    aligned_bytes,
    needed_multiple,
    round_up,
)
from flopwise.kit.memory.where import place, user_frame

FAMILIES = ("matmul", "convolution", "attention")


@dataclass
class Misaligned:
    """One defect of one operand of one op in one place, over all the calls that had it."""

    module: str  # in whose forward; "backward" for ops of a backward pass
    op: str
    where: str | None  # file:line of the script; None in backward
    operand: str
    shape: tuple[int, ...]
    dtype: str
    defect: str
    cure: str
    grade: str  # "slow": off the fast kernels; "edge": fast, but with partly filled tiles
    calls: int = 0
    flops: int = 0


@dataclass
class Audit:
    """What an audited run showed."""

    findings: list[Misaligned] = field(default_factory=list)
    flops: int = 0  # of all products and attention that were seen
    uncounted: int = 0  # calls of which the FLOPs are not known

    def share(self, finding: Misaligned) -> float:
        """Returns the share of the counted FLOPs that a finding touches."""
        return finding.flops / self.flops if self.flops else 0.0

    def worst(self, grade: str = "slow") -> list[Misaligned]:
        """Returns the findings of a grade, those that touch most FLOPs first."""
        return sorted((f for f in self.findings if f.grade == grade), key=lambda f: -f.flops)

    def __str__(self) -> str:
        """Returns one line for each finding that keeps a product off the fast kernels, the largest first."""
        lines = [
            f"{self.share(f):6.1%} of FLOPs  {f.module or '-'}  {f.op} {f.operand} {list(f.shape)} {f.dtype}"
            f"{f' at {f.where}' if f.where else ''}: {f.defect}; cure: {f.cure}"
            for f in self.worst()
        ]
        edges = self.worst("edge")
        if edges:
            lines.append(f"{len(edges)} operands fill their tiles only partly")
        return "\n".join(lines) or "every operand is aligned"


def audit(module: nn.Module, step: Any) -> Audit:
    """Runs a step, or the model on a batch, and returns the operands that defeat vector loads or tensor cores.

    Args:
        step: a function that runs forward, or forward and backward; or a batch: a tensor, or a tuple or mapping of
            arguments, on which the model is run forward. It runs once, for real.

    Source: the rules and where they are from: `kit.memory.alignment`.
    Ignores: compiled regions (their ops are not seen; compilers pad by themselves) and what a library does to an operand
    before its kernel.
    """
    run: Callable[[], object] = step if callable(step) else lambda: _call(module, step)
    mode = _Audit(module)
    with mode:
        run()
    return mode.result


def _call(module: nn.Module, batch: Any) -> Any:
    if isinstance(batch, dict):
        return module(**batch)
    return module(*batch) if isinstance(batch, (tuple, list)) else module(batch)


class _Audit(TorchDispatchMode):
    """Looks at the operands of each product."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.result = Audit()
        self._found: dict[tuple[Any, ...], Misaligned] = {}
        self._stack: list[str] = []
        self._handles: list[Any] = []
        self._module = weakref.ref(module)

    def __enter__(self) -> _Audit:
        module = self._module()
        assert module is not None
        for name, child in module.named_modules():
            self._handles += [
                child.register_forward_pre_hook(lambda *_, name=name: self._stack.append(name)),
                child.register_forward_hook(
                    lambda *_: self._stack.pop() and None if self._stack else None, always_call=True
                ),
            ]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self._handles:
            handle.remove()
        self.result.findings = list(self._found.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        rule = rule_of(func._schema.name)
        if rule is not None and rule.family in FAMILIES:
            self._look(func, rule, args, kwargs or {}, out)
        return out

    def _look(self, func: Any, rule: Rule, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        names = [a.name for a in func._schema.arguments]
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        flops = _flops(func._schema.name, rule, named, out)
        if flops is None:
            self.result.uncounted += 1
        self.result.flops += flops or 0
        backward = torch._C._current_graph_task_id() != -1
        module = self._stack[-1] if self._stack and not backward else "backward" if backward else ""
        where = None if backward else place(user_frame())
        for name, tensor in named.items():
            if not isinstance(tensor, torch.Tensor) or tensor.dim() < 2 or not tensor.numel():
                continue
            if tensor.layout != torch.strided or not tensor.dtype.is_floating_point:
                continue
            if name.startswith(("attn_", "logsumexp", "philox", "bias")):
                continue
            for defect, cure, grade in defects(tensor, rule.family):
                key = (module, func._schema.name, where, name, tuple(tensor.shape), defect)
                found = self._found.setdefault(
                    key,
                    Misaligned(
                        module,
                        func._schema.name.removeprefix("aten::"),
                        where,
                        name,
                        tuple(tensor.shape),
                        str(tensor.dtype).removeprefix("torch."),
                        defect,
                        cure,
                        grade,
                    ),
                )
                found.calls += 1
                found.flops += flops or 0


def defects(tensor: torch.Tensor, family: str) -> list[tuple[str, str, str]]:
    """Returns what is wrong with an operand as (defect, cure, grade), the worst first.

    A product reads two dimensions (the last two; of a convolution, channels and batch): the one that lies innermost
    in memory has to hold whole vectors, and the stride of the other a multiple of 16 bytes.
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    item, multiple = tensor.element_size(), needed_multiple(dtype)
    found: list[tuple[str, str, str]] = []
    try:
        pointer = tensor.data_ptr()
    except RuntimeError:
        pointer = 0
    if pointer % VECTOR_BYTES:
        offset = tensor.storage_offset()
        found.append((
            f"its pointer is a multiple of {aligned_bytes(pointer, ())} bytes only"
            + (f" (it begins {offset} elements into its storage)" if offset else ""),
            "copy it once (`.clone()`), or slice at a multiple of "
            f"{max(1, VECTOR_BYTES // item)} elements",
            "slow",
        ))  # fmt: skip
    if family == "convolution":
        sizes = {"channels": tensor.shape[1]} if tensor.dim() > 2 else {}
    else:
        sizes = {"rows": tensor.shape[-2], "columns": tensor.shape[-1]}
        inner, outer = (-1, -2) if tensor.stride(-1) <= tensor.stride(-2) else (-2, -1)
        if tensor.shape[inner] > 1 and tensor.stride(inner) != 1:
            found.append((
                f"neither of its last two dimensions is contiguous (strides {tuple(tensor.stride())})",
                "`.contiguous()` before it is used more than once, or another order of dimensions",
                "slow",
            ))  # fmt: skip
        elif tensor.shape[outer] > 1 and tensor.stride(outer) * item % VECTOR_BYTES:
            if tensor.shape[inner] % multiple == 0:
                found.append((
                    f"its rows are {tensor.stride(outer)} elements apart, no multiple of {VECTOR_BYTES} bytes",
                    f"a buffer whose rows are {round_up(tensor.stride(outer), multiple)} apart",
                    "slow",
                ))  # fmt: skip
        if outer == -1:
            sizes = {"columns": tensor.shape[-1], "rows": tensor.shape[-2]}
    for name, size in sizes.items():
        full = max(multiple, FULL_BYTES // item)
        if size < multiple and name != "channels":
            continue  # a vector: no tile is filled whatever is added
        if size % multiple:
            to = round_up(size, full) if size >= full else round_up(size, multiple)
            found.append(
                (f"{size} {name} are no multiple of {multiple}", f"{name} {size} -> {to}", "slow")
            )
        elif size % full and size > full:
            found.append((
                f"{size} {name} are no multiple of {full} (128 bytes)",
                f"{name} {size} -> {round_up(size, full)}",
                "edge",
            ))  # fmt: skip
    return found


def _flops(name: str, rule: Rule, named: dict[str, Any], out: Any) -> int | None:
    """Returns what the call computes; None where its shapes do not say."""
    try:
        outs = out if isinstance(out, (tuple, list)) else (out,)
        call = Call(
            name,
            {key: _plain(value) for key, value in named.items()},
            tuple(_operand(t) for t in outs if isinstance(t, torch.Tensor)),
        )
        operand = call.tensor(*rule.operand)
        if executed(operand.dtype, rule.family, Precision()) is None:
            return 0
        return rule.formula(call).executed * real_operations(operand.dtype, rule.family)
    except (LookupError, TypeError, ValueError, AttributeError):
        return None


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _operand(value)
    if isinstance(value, (list, tuple)):
        return tuple(_plain(v) for v in value)
    return value


def _operand(tensor: torch.Tensor) -> Operand:
    return Operand(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
