"""What torch says about an op: its name, its formula, its arguments as shapes, the dtype it runs in."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import HigherOrderOperator

from flopwise.flops.call import WANTED, Call, Operand
from flopwise.flops.dtypes import Precision
from flopwise.flops.table import Rule, rule_of
from flopwise.flops.zero import is_view, is_zero

_BACKENDS = ("CPU", "CUDA", "MPS", "XPU", "PrivateUse1")


@dataclass(frozen=True)
class Op:
    """One overload, looked up once."""

    name: str  # "aten::mm"; "higher_order::flex_attention"
    rule: Rule | None
    zero: bool
    view: bool
    names: tuple[str, ...]  # of its arguments
    decomposes: bool  # without a formula or kernel of its own, but made of ops that may have one
    theirs: Callable[..., int] | None  # torch.utils.flop_counter's formula


def look_up(func: Any) -> Op:
    """Returns what is known about an overload or a higher-order op."""
    if isinstance(func, HigherOrderOperator):
        name = f"higher_order::{func.name()}"
        rule, names = rule_of(name), tuple(_HIGHER_ORDER_ARGS.get(name, "").split())
        return Op(name, rule, False, False, names, False, torch_formulas().get(func))
    name = func._schema.name
    rule, zero = rule_of(name), is_zero(name)
    return Op(
        name,
        rule,
        zero,
        is_view(name),
        tuple(a.name for a in func._schema.arguments),
        rule is None and not zero and _is_composite(func),
        torch_formulas().get(func.overloadpacket),
    )


def torch_formulas() -> Mapping[Any, Callable[..., int]]:
    """Returns the formulas of torch.utils.flop_counter by op; empty where this torch has none."""
    try:
        # Without Triton the import of a CUDA build logs a warning that is none of the user's business.
        logger = logging.getLogger("torch.utils.flop_counter")
        disabled, logger.disabled = logger.disabled, True
        try:
            from torch.utils.flop_counter import flop_registry
        finally:
            logger.disabled = disabled
        return flop_registry
    except Exception:
        return {}


def call_of(
    op: Op,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    out: Any,
    values: Mapping[str, tuple[int, ...]] | None = None,
) -> Call:
    """Returns the call as formulas read it.

    Raises:
        LookupError: an operand is sparse, packed or nested: its shape does not say what is computed.
    """
    found = named(op, args, kwargs)
    if op.name.startswith("higher_order::flex"):
        found.update(flex_blocks(found.get("block_mask")))
    if op.rule is not None and op.rule.wanted:
        found.update(wanted_gradients(op.name))
    values = values or {}
    converted = {name: _convert(value, values.get(name)) for name, value in found.items()}
    outs = out if isinstance(out, (tuple, list)) else (out,)
    return Call(op.name, converted, tuple(_operand(t) for t in outs if isinstance(t, torch.Tensor)))


def named(op: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments by the names of the schema."""
    return {**dict(zip(op.names, args, strict=False)), **kwargs}


def flex_blocks(block_mask: Any) -> dict[str, Any]:
    """Returns the counts of kept blocks and the block sizes of a flex_attention mask.

    The tuple holds two lengths, then tensors (the first is kv_num_blocks, the third full_kv_num_blocks, which may be
    None), then two block sizes: torch.nn.attention.flex_attention.BlockMask.as_tuple.
    """
    if not isinstance(block_mask, (tuple, list)):
        return {}
    start = next((i for i, v in enumerate(block_mask) if isinstance(v, torch.Tensor)), None)
    sizes = [v for v in block_mask if isinstance(v, int) and not isinstance(v, bool)]
    if start is None or len(sizes) < 2 or len(block_mask) < start + 3:
        return {}
    return {
        "kv_num_blocks": block_mask[start],
        "full_kv_num_blocks": block_mask[start + 2],
        "block_q": sizes[-2],
        "block_kv": sizes[-1],
    }


def wanted_gradients(name: str) -> dict[str, tuple[bool, ...]]:
    """Returns which operands' gradients autograd asks the running backward op for, nothing where it cannot be told.

    The node that runs has an edge for each differentiable argument of its forward op, in the order of the schema. It
    leads nowhere for an argument that needs no gradient, or to a node that this pass leaves out. Only nodes of torch's
    own ops are read: the edges of a function in Python follow its own signature.
    """
    node = torch._C._current_autograd_node()
    words = name.rpartition("::")[2].removesuffix("_backward").split("_")
    if node is None or not node.name().startswith("".join(w.title() for w in words) + "Backward"):
        return {}
    return {WANTED: tuple(_is_wanted(function) for function, _ in node.next_functions)}


def makes_differentiable(family: str) -> bool:
    """Returns whether a product belongs to the gradients of a oneDNN LSTM that are to be differentiated again."""
    if family != "matmul" or not torch.is_grad_enabled():
        return False
    node = torch._C._current_autograd_node()
    return node is not None and node.name().startswith("MkldnnRnnLayerBackward")


def _is_wanted(function: Any) -> bool:
    if function is None:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(function))
    except RuntimeError:  # a leaf that torch.autograd.grad was asked for
        return True


def precision_of(device_type: str) -> Precision:
    """Returns how 32-bit floats are multiplied right now on this kind of device.

    The settings are read below the Python properties, which raise when old and new names were mixed.
    """
    if device_type != "cuda":
        return Precision()
    get = getattr(torch._C, "_get_fp32_precision_getter", None)
    if get is None:
        matmul = torch.get_float32_matmul_precision() != "highest"
        conv = rnn = bool(torch.backends.cudnn.allow_tf32)
    else:
        matmul, conv, rnn = (get("cuda", op) == "tf32" for op in ("matmul", "conv", "rnn"))
    return Precision(matmul, conv, rnn, _has_tensor_cores_for_tf32())


def first_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Returns a tensor among the arguments, looking into lists too."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
            return value[0]
    return None


def touched_bytes(args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
    """Returns the bytes of all tensors that go in and come out."""
    total = 0
    pending = [*args, *kwargs.values(), out]
    while pending:
        value = pending.pop()
        if isinstance(value, torch.Tensor):
            total += value.numel() * value.element_size()
        elif isinstance(value, (list, tuple)):
            pending.extend(value)
    return total


_FLEX = "query key value"
_HIGHER_ORDER_ARGS = {
    "higher_order::flex_attention": f"{_FLEX} score_mod block_mask scale kernel_options",
    "higher_order::flex_attention_backward": (
        f"{_FLEX} out logsumexp grad_out grad_logsumexp fw_graph joint_graph block_mask scale"
    ),
}


def _is_composite(func: Any) -> bool:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    name = func.name()
    return has(name, "CompositeImplicitAutograd") and not any(has(name, b) for b in _BACKENDS)


def _has_tensor_cores_for_tf32() -> bool:
    try:
        ready = torch.cuda.is_initialized()
        return bool(ready) and torch.cuda.get_device_capability()[0] >= 8
    except Exception:
        return False


def _convert(value: Any, values: tuple[int, ...] | None) -> Any:
    if isinstance(value, torch.Tensor):
        return _operand(value, values)
    if isinstance(value, (list, tuple)):
        return tuple(_convert(v, None) for v in value)
    if isinstance(value, torch.SymInt):
        return int(value)
    return value


def _operand(tensor: torch.Tensor, values: tuple[int, ...] | None = None) -> Operand:
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise LookupError(f"a {kind} operand")
    return Operand(tuple(int(n) for n in tensor.shape), str(tensor.dtype)[6:], values)
