"""Did it take effect? The dtypes that one step really computes in, by class of op, by count and by FLOPs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from flopwise.errors import PrecisionError
from flopwise.flops.call import Call
from flopwise.flops.table import cost, rule_of
from flopwise.flops.zero import POINTWISE, is_view
from flopwise.kit.precision.arguments import dtype_name, module_of
from flopwise.kit.precision.mixed import DTYPES, MixedPrecision
from flopwise.kit.precision.saying import users_line
from flopwise.kit.precision.watching import Where, call_of, current_node, modules_of
from flopwise.units import size

#: From this share of FLOPs on a dtype has taken effect: what is left are heads and gates that are kept on purpose.
EFFECT_FRAC = 0.95
_FAMILIES = {
    "matmul": "matmul",
    "convolution": "convolution",
    "recurrent": "matmul",
    "attention": "attention",
}
_NORMS = ("norm",)
_REDUCTIONS = {
    "sum", "mean", "amax", "amin", "prod", "var", "var_mean", "std", "logsumexp", "_softmax", "_log_softmax",
    "_softmax_backward_data", "_log_softmax_backward_data", "nll_loss_forward", "nll_loss_backward", "mse_loss",
    "mse_loss_backward", "cumsum", "linalg_vector_norm", "embedding_dense_backward", "nll_loss2d_forward",
    "nll_loss2d_backward", "_fused_rms_norm",
}  # fmt: skip
_SHOWN = 5


@dataclass(frozen=True)
class Row:
    """One class of op in one dtype."""

    op_class: str  # "matmul" | "convolution" | "attention" | "norm" | "reduction" | "elementwise" | "cast"
    dtype: str
    count: int
    flops: int  # executed ones; 0 for classes without a formula


@dataclass(frozen=True)
class EffectiveDtypes:
    """What one step computed in, and whether the dtype that was asked for took effect."""

    rows: tuple[Row, ...]
    asked: str | None
    reasons: tuple[str, ...]  # why products ran in another dtype, most FLOPs first
    weight_casts: int  # casts of weights to 16 bits in the step
    weight_cast_bytes: int  # read and written by them
    uncounted: tuple[str, ...]  # products whose FLOPs could not be told

    def share(self, dtype: str | None = None) -> float:
        """Returns the share of FLOPs in a dtype, by default the one asked for; 0 if nothing was counted."""
        total = sum(row.flops for row in self.rows)
        name = dtype or self.asked
        return sum(row.flops for row in self.rows if row.dtype == name) / total if total else 0.0

    @property
    def took_effect(self) -> bool:
        """Whether at least 95 % of the FLOPs ran in the dtype that was asked for; for float8, in it or bfloat16."""
        if self.asked == "float8":  # layers that it does not suit run in bfloat16
            return self.share() > 0 and self.share() + self.share("bfloat16") >= EFFECT_FRAC
        return self.asked is not None and self.share() >= EFFECT_FRAC

    @property
    def verdict(self) -> str:
        """One sentence: whether it took effect, and why not."""
        if self.asked is None:
            return "no dtype was asked for"
        if not any(row.flops for row in self.rows):
            return "no product was counted in this step: nothing can be said"
        head = f"{self.share():.1%} of the FLOPs ran in {self.asked}"
        if self.took_effect:
            return f"{self.asked} took effect: {head}"
        why = "; ".join(self.reasons[:_SHOWN]) or "no reason was found"
        return f"{self.asked} did not take effect{'' if self.share() == 0 else ' everywhere'}: {head}; {why}"

    def __str__(self) -> str:
        lines = [f"{'ops':<12} {'dtype':<10} {'count':>7} {'GFLOP':>12} {'of FLOPs':>9}"]
        total = sum(row.flops for row in self.rows)
        for row in self.rows:
            work = (
                f"{row.flops / 1e9:12.3f} {row.flops / total:9.1%}"
                if row.flops
                else f"{'-':>12} {'-':>9}"
            )
            lines.append(f"{row.op_class:<12} {row.dtype:<10} {row.count:>7} {work}")
        if self.weight_casts:
            lines.append(
                f"weights are cast {self.weight_casts} times a step, {size(self.weight_cast_bytes)} read and written"
            )
        if self.uncounted:
            lines.append(f"FLOPs not told: {', '.join(self.uncounted)}")
        return "\n".join([*lines, self.verdict])


def effective_dtypes(
    step: Callable[[], Any],
    module: nn.Module | None = None,
    asked: str | torch.dtype | MixedPrecision | None = None,
) -> EffectiveDtypes:
    """Runs one step and returns the dtypes it computed in.

    Compiled modules run eagerly meanwhile: what they compute in is the same, how it is fused is not seen.

    Args:
        step: forward and backward, at will with the optimizer; it is really run, once.
        module: for the names of modules in reasons, and for casts of its weights.
        asked: the dtype that should have taken effect, or the `MixedPrecision` that should.

    Raises:
        PrecisionError: the step cannot be called, or there is no such dtype.
    """
    mixed = asked if isinstance(asked, MixedPrecision) else None
    if mixed is not None and module is None:
        module = mixed.module
    name = mixed.dtype if mixed is not None else dtype_name(asked)
    if not callable(step):
        raise PrecisionError(
            f"effective_dtypes: a function that makes one step is needed, not {type(step).__name__}"
        )
    if module is not None:
        module_of("effective_dtypes: module", module)
    if name not in (None, "float32", *DTYPES):
        raise PrecisionError(
            f"asked={asked!r}: it is one of float32, {', '.join(DTYPES)}, or a MixedPrecision"
        )
    params = list(module.parameters()) if module is not None else []
    weights = {p.data_ptr() for p in params if not is_lazy(p)}
    with torch.compiler.set_stance("force_eager"), modules_of(module) as where:
        tally = _Tally(where, weights, str(name) if name else None)
        with tally:
            step()
    reasons = [words for words, _ in tally.reasons.most_common()]
    if mixed is not None and mixed.declined is not None:
        reasons.insert(0, mixed.declined)
    elif mixed is not None and not mixed.active:
        reasons.insert(
            0,
            "MixedPrecision is not around the module: undone, or the module's call was replaced since",
        )
    elif mixed is not None:
        reasons[:0] = [
            f"{n or 'the model'} is kept in float32: {why}" for n, why in mixed.kept.items()
        ]
    rows = tuple(
        Row(c, d, n, tally.flops[c, d]) for (c, d), n in sorted(tally.counts.items(), key=_order)
    )
    return EffectiveDtypes(
        rows,
        str(name) if name else None,
        tuple(reasons),
        tally.casts,
        tally.cast_bytes,
        tuple(sorted(tally.uncounted)),
    )


_CLASSES = ("matmul", "convolution", "attention", "norm", "reduction", "elementwise", "cast")


def _order(item: tuple[tuple[str, str], int]) -> tuple[int, str]:
    return _CLASSES.index(item[0][0]), item[0][1]


class _Tally(TorchDispatchMode):
    def __init__(self, where: Where, weights: set[int], asked: str | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._where, self._weights, self._asked = where, weights, asked
        self.counts: Counter[tuple[str, str]] = Counter()
        self.flops: Counter[tuple[str, str]] = Counter()
        self.reasons: Counter[str] = Counter()
        self.uncounted: set[str] = set()
        self.casts = self.cast_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name
        if not is_view(name):
            self._count(func, name, args, kwargs, out)
        return out

    def _count(self, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> None:
        rule = rule_of(name)
        if rule is not None and rule.family in _FAMILIES:
            call = call_of(func, args, kwargs, out)
            operand = call.maybe(*rule.operand)
            if operand is not None:
                short = name.rpartition("::")[2]
                self._product(short, call, operand.dtype, _FAMILIES[rule.family], args)
        else:
            made = next((t for t in _tensors(out) if t.is_floating_point()), None)
            if made is not None:
                self._other(name.rpartition("::")[2], args, made)

    def _product(self, short: str, call: Call, stored: str, op_class: str, args: Any) -> None:
        dtype = self._computed_in(stored, op_class, args)
        found = cost(call)
        if found is None:
            self.uncounted.add(short)
        flops = 0 if found is None else found.executed
        self._add(op_class, dtype, flops)
        if self._asked is not None and dtype != self._asked:
            self.reasons[self._reason(short, dtype, stored)] += flops or 1

    def _other(self, short: str, args: Any, made: torch.Tensor) -> None:
        plain = short.rstrip("_")
        if short in ("_to_copy", "copy_"):
            source = next(_tensors(args[1:] if short == "copy_" else args), None)
            if source is not None and source.is_floating_point() and source.dtype != made.dtype:
                self._cast(source, made)
        elif any(part in short for part in _NORMS) and short != "linalg_vector_norm":
            self._add("norm", _name(made.dtype), 0)
        elif short in _REDUCTIONS or plain in _REDUCTIONS:
            self._add("reduction", _name(made.dtype), 0)
        elif short in POINTWISE or plain in POINTWISE or short.startswith("_foreach"):
            self._add("elementwise", _name(made.dtype), 0)

    def _cast(self, source: torch.Tensor, made: torch.Tensor) -> None:
        self._add("cast", f"to {_name(made.dtype)}", 0)
        if source.data_ptr() in self._weights and source.data_ptr():
            self.casts += 1
            self.cast_bytes += source.nbytes + made.nbytes

    def _add(self, op_class: str, dtype: str, flops: int) -> None:
        self.counts[op_class, dtype] += 1
        self.flops[op_class, dtype] += flops

    def _computed_in(self, dtype: str, op_class: str, args: Any) -> str:
        if dtype.startswith("float8"):
            return "float8"
        if dtype != "float32" or not any(isinstance(a, torch.Tensor) and a.is_cuda for a in args):
            return dtype
        if torch.cuda.get_device_capability() < (8, 0):
            return dtype
        cudnn: Any = torch.backends.cudnn
        backend = cudnn.conv if op_class == "convolution" else torch.backends.cuda.matmul
        return "tf32" if backend.fp32_precision == "tf32" else dtype

    def _reason(self, op: str, dtype: str, stored: str) -> str:
        node, module = current_node(), self._where.module()
        named = module or ("the model itself" if module == "" else None)
        whose = f"in {named}" if named else "outside of the module"
        when = (
            whose
            if node is None
            else (f"in the backward of {named}" if named else f"in backward, {whose}")
        )
        if self._asked == "tf32":
            return f"{op} {when} ran in {dtype}: the switches did not allow TF32 there"
        if stored == "float64":
            return f"{op} {when} has float64 operands, which autocast leaves alone"
        if node is None and not self._where.in_autocast():
            line = users_line()
            return f"{op} {whose} ran outside of autocast, in {dtype}{f' ({line})' if line else ''}"
        if node is not None:
            return f"{op} {when} ran in {dtype}, as its forward did"
        return f"{op} {whose} ran in {dtype} although autocast was on there"


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors among an op's arguments or results."""
    for value in values if isinstance(values, (tuple, list)) else (values,):
        if isinstance(value, torch.Tensor):
            yield value


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
