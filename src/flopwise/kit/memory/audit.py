"""Tensors that enter products, or leave them, with a size, stride or pointer that defeats vector loads or tensor cores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from flopwise.flops.call import Call, Operand
from flopwise.flops.dtypes import Precision, executed, real_operations
from flopwise.flops.table import Rule, rule_of
from flopwise.kit.memory.arguments import need_module, need_step
from flopwise.kit.memory.modules import Modules, in_backward
from flopwise.kit.memory.operands import EDGE, SLOW, Defect, defects
from flopwise.kit.memory.undisturbed import undisturbed
from flopwise.kit.memory.where import place, user_frame

FAMILIES = ("matmul", "convolution", "attention")
#: Arguments that are no operands of a product: they are added, or say which values are left out.
NO_OPERANDS = ("attn_", "logsumexp", "philox", "bias", "cum_seq", "rng_state", "unused")


@dataclass
class Misaligned:
    """One defect of one operand of one op in one place, over all the calls that had it."""

    module: str  # in whose forward; "backward" for ops of a backward pass
    op: str
    where: str | None  # file:line of the script; None in backward
    operand: str  # the argument's name; "result"
    shape: tuple[int, ...]
    dtype: str
    defect: Defect
    calls: int = 0
    flops: int = 0

    def __str__(self) -> str:
        """Returns what is wrong, where, and what cures it."""
        at = f" at {self.where}" if self.where else ""
        return (
            f"{self.module or '-'}  {self.op} {self.operand} {list(self.shape)} {self.dtype}{at}: "
            f"{self.defect.what}; cure: {self.defect.cure}"
        )


@dataclass
class Audit:
    """What an audited run showed."""

    findings: list[Misaligned] = field(default_factory=list)
    flops: int = 0  # of all products and attention that were seen
    products: int = 0  # calls that were seen
    uncounted: int = 0  # calls of which the FLOPs are not known

    def share(self, finding: Misaligned) -> float:
        """Returns the share of the counted FLOPs that a finding touches."""
        return finding.flops / self.flops if self.flops else 0.0

    def worst(self, grade: str = SLOW) -> list[Misaligned]:
        """Returns the findings of a grade, those that touch most FLOPs first."""
        found = [f for f in self.findings if f.defect.grade == grade]
        return sorted(found, key=lambda f: -f.flops)

    def __str__(self) -> str:
        """Returns one line for each finding that keeps a product off the fast kernels, the largest first."""
        lines = [f"{self.share(f):6.1%} of FLOPs  {f}" for f in self.worst()]
        edges = self.worst(EDGE)
        if edges:
            lines.append(f"{len(edges)} operands fill their tiles only partly")
        if self.uncounted:
            lines.append(f"FLOPs of {self.uncounted} calls are not known: they are in no share")
        if not lines and not self.products:
            return "no product was seen: what is compiled, or runs in another process, is not looked at"
        return "\n".join(lines) or "every operand is aligned"


def audit_alignment(module: nn.Module, step: Callable[[], object]) -> Audit:
    """Runs a step and returns the operands that defeat vector loads or tensor cores.

    Args:
        step: runs the model forward, or forward and backward, once and for real; gradients, buffers and random numbers
            are put back.

    Source: the rules and where they are from: `kit.memory.operands`.
    Ignores: compiled regions (their ops are not seen; compilers pad by themselves) and what a library does to an operand
    before its kernel.
    """
    need_module("audit_alignment", module)
    need_step("audit_alignment", step)
    with undisturbed(module), _Audit(module) as mode:
        step()
    return mode.result


class _Audit(TorchDispatchMode):
    """Looks at the operands of each product."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.result = Audit()
        self._found: dict[tuple[Any, ...], Misaligned] = {}
        self._modules = Modules(module)

    def __enter__(self) -> _Audit:
        self._modules.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._modules.__exit__(*error)
        self.result.findings = list(self._found.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        rule = rule_of(func._schema.name)
        if rule is not None and rule.family in FAMILIES:
            names = [a.name for a in func._schema.arguments]
            named = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
            self._look(func._schema.name, rule, named, out)
        return out

    def _look(self, op: str, rule: Rule, named: dict[str, Any], out: Any) -> None:
        flops = _flops(op, rule, named, out)
        self.result.products += 1
        self.result.uncounted += flops is None
        self.result.flops += flops or 0
        module = "backward" if in_backward() else self._modules.now
        where = None if in_backward() else place(user_frame())
        for name, tensor in _operands(op, named, out):
            if tensor.layout != torch.strided or not tensor.dtype.is_floating_point:
                continue
            grouped = named.get("groups", 1) != 1
            is_image = rule.family != "convolution" or (name != "weight" and not grouped)
            for defect in defects(tensor, rule.family if is_image else "other"):
                key = (module, op, where, name, tuple(tensor.shape), defect)
                if key not in self._found:
                    dtype = str(tensor.dtype).removeprefix("torch.")
                    self._found[key] = Misaligned(
                        module,
                        op.removeprefix("aten::"),
                        where,
                        name,
                        tuple(tensor.shape),
                        dtype,
                        defect,
                    )
                self._found[key].calls += 1
                self._found[key].flops += flops or 0


def _operands(op: str, named: dict[str, Any], out: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors that a product reads and its first result, by the names of the arguments."""
    for name, value in named.items():
        is_added = name == "self" and op.startswith(
            ("aten::addmm", "aten::baddbmm", "aten::addbmm")
        )
        if isinstance(value, torch.Tensor) and not is_added and not name.startswith(NO_OPERANDS):
            yield name, value
    first = out[0] if isinstance(out, (tuple, list)) and out else out
    if isinstance(first, torch.Tensor):
        yield "result", first


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
