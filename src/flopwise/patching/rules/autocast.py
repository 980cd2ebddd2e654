"""bf16-autocast: `with torch.autocast(...)` around the statements that call the model.

Where a statement gives a tensor that the loss is made of, only the statement goes under autocast and the tensor is cast to
float32 behind it: that is what `run --plan` does. Where the loss comes out of the model, or is made in the same
expression, everything from the call of the model to the loss does: losses are computed in float32 under autocast, too.
"""

from __future__ import annotations

import libcst as cst

from flopwise.patching.outcome import Left, View, Written, only
from flopwise.patching.script import (
    Scope,
    Script,
    Statement,
    descendants,
    matches,
    parameters,
    text,
)
from flopwise.patching.training import Forward

#: Methods that tensors have and what else models return has not.
TENSOR = {
    "view", "reshape", "squeeze", "unsqueeze", "flatten", "argmax", "max", "topk", "size", "softmax", "log_softmax",
    "transpose", "permute", "detach", "sigmoid", "mean", "sum", "contiguous", "cpu", "dim", "backward",
}  # fmt: skip
#: Attributes that tensors have, too.
TENSOR_ATTRIBUTES = {"shape", "data", "dtype", "device", "ndim", "T"}
#: Methods that do no products, of tensors and of Python's own objects.
PLAIN_METHODS = {
    "float", "item", "items", "keys", "values", "append", "update", "get", "clone", "to", "zero_grad", "mul", "div",
    "add", "sub", "pow", "exp", "log", "square", "abs", "clamp", "masked_fill", "gather", "numel", "train", "long",
    "type", "expand", "repeat", "chunk", "split", "unbind", "format", "step", "time", "no_grad",
}  # fmt: skip
PLAIN_FUNCTIONS = (
    "time.", "logging.", "torch.mean", "torch.sum", "torch.stack", "torch.cat", "torch.max", "torch.min", "torch.argmax",
    "torch.zeros", "torch.ones", "torch.full", "torch.randn", "torch.rand", "torch.arange", "torch.tensor",
    "torch.no_grad", "torch.enable_grad", "torch.exp", "torch.log", "torch.abs", "torch.square", "torch.where",
    "torch.flatten", "torch.squeeze", "torch.isnan", "torch.zeros_like", "torch.ones_like", "torch.randn_like",
)  # fmt: skip
BUILTINS = {
    "isinstance", "len", "range", "zip", "enumerate", "sum", "tuple", "list", "dict", "float", "int", "print", "getattr",
    "hasattr", "min", "max", "abs", "str", "bool", "iter", "next", "reversed", "sorted", "type", "super",
}  # fmt: skip
#: Functions of torch.nn.functional that multiply matrices: no losses.
PRODUCTS = (
    "linear",
    "bilinear",
    "conv",
    "scaled_dot_product_attention",
    "multi_head_attention_forward",
    "embedding_bag",
)

#: Losses that refuse to run under autocast on a GPU. Source: "Autocast Op Reference", docs of torch.amp, torch 2.11.
UNSAFE = ("BCELoss", "binary_cross_entropy")


def write(setting: dict[str, str], view: View) -> Written:
    """Puts the forwards under autocast, and returns where.

    Raises:
        Left: there is none that is certain, or the script has autocast itself.
    """
    only(setting, "dtype")
    dtype = setting.get("dtype", "bfloat16")
    if dtype != "bfloat16":
        raise Left(f"dtype {dtype[:40]!r} has no form in a script")
    by_hand = (
        "with torch.autocast(device_type, dtype=torch.bfloat16):  # around the forward and the loss, not backward()",
    )
    for call in view.script.calls:
        if (text(call.func) or "").rpartition(".")[2] in ("autocast", "GradScaler"):
            raise Left(f"line {view.script.line(call)}: the script has mixed precision itself")
    training = view.training
    if training.problems or not training.forwards:
        raise Left("; ".join(training.problems[:3]) or "no backward() was found", *by_hand)
    pieces: list[tuple[tuple[Statement, ...], str | None, Forward]] = []
    for forward in training.forwards:
        for span, tensor in _pieces(forward, view, by_hand):
            if not any(_same(span, other) and tensor == t for other, t, _ in pieces):
                pieces.append((span, tensor, forward))
    taken: set[int] = set()
    for span, _, forward in pieces:
        if taken & {id(s) for s in span}:
            line = view.script.line(forward.calling[0])
            raise Left(f"line {line}: two losses share parts of their forward", *by_hand)
        taken |= {id(s) for s in span}
    for span, tensor, forward in pieces:
        torch = view.edits.torch()
        device = _device(forward, span, view)
        view.edits.wrap(span, f"{torch}.autocast({device}, dtype={torch}.bfloat16)")
        if tensor is not None:
            view.edits.after(span[-1], f"{tensor} = {tensor}.float()")
    return Written(tuple(view.script.line(span[0]) for span, _, _ in pieces))


def _same(one: tuple[Statement, ...], other: tuple[Statement, ...]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _pieces(
    forward: Forward, view: View, by_hand: tuple[str, ...]
) -> list[tuple[tuple[Statement, ...], str | None]]:
    """Returns the statements to be wrapped, and the tensor to be cast behind each."""
    tensors = [_tensor(s, forward, view) for s in forward.calling]
    if all(tensors):
        return [((s,), t) for s, t in zip(forward.calling, tensors, strict=True)]
    span = forward.span()
    line = view.script.line(span[0])
    if any(n for s in span for n in descendants(s) if _is(n, "backward")):
        raise Left(
            f"line {line}: another backward() lies between the forward and its loss", *by_hand
        )
    strange = next((s for part in span if (s := _strange(part, forward.scope, view))), None)
    if strange is not None:
        raise Left(
            f"line {view.script.line(strange)}: what is computed there, between the model and its loss, is in float32 under "
            "the plan, and would not be under autocast",
            *by_hand,
        )
    words = view.script.text
    if any(f"{name}(" in words for name in UNSAFE):
        raise Left(
            f"line {line}: the loss is made where the model is called, and a loss of this script does not run under "
            "autocast on a GPU (binary_cross_entropy_with_logits does)",
            *by_hand,
        )
    return [(span, None)]


def _strange(
    node: cst.CSTNode, scope: Scope, view: View, seen: tuple[cst.FunctionDef, ...] = ()
) -> cst.CSTNode | None:
    """Returns what in a statement autocast might round that the model and its loss are not; None where all is plain."""
    script = view.script
    for inside in descendants(node):
        if isinstance(inside, (cst.MatrixMultiply, cst.MatrixMultiplyAssign)):
            return node
        if not isinstance(inside, cst.Call):
            continue
        if view.training.is_trained(inside.func, scope) or is_loss(inside, script):
            continue
        names = script.imported(inside.func)
        if names:
            if all(matches(n, PLAIN_FUNCTIONS) for n in names):
                continue
            return inside
        function = script.function_called(inside)
        if function is not None:
            if any(function is s for s in seen):
                continue
            found = _strange(function.body, function, view, (*seen, function))
            if found is not None:
                return found
        elif isinstance(inside.func, cst.Attribute):
            if inside.func.attr.value not in TENSOR | PLAIN_METHODS:
                return inside
        elif text(inside.func) not in BUILTINS and script.class_called(inside) is None:
            return inside
    return None


def _tensor(statement: Statement, forward: Forward, view: View) -> str | None:
    """Returns the name that a statement gives the model's output, where that is a tensor for sure."""
    if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
        return None
    assign = statement.body[0]
    if not isinstance(assign, cst.Assign) or len(assign.targets) != 1:
        return None
    target = assign.targets[0].target
    value = assign.value
    if not isinstance(target, cst.Name):
        return None
    sure = False
    while isinstance(value, cst.Call) and not view.training.is_trained(value.func, forward.scope):
        if not isinstance(value.func, cst.Attribute) or value.func.attr.value not in TENSOR:
            return None
        sure, value = True, value.func.value
    if not isinstance(value, cst.Call):
        return None
    body = list(forward.block.body)
    place = next(i for i, s in enumerate(body) if s is statement)
    uses = [n for s in body[place + 1 :] for n in descendants(s) if text(n) == target.value]
    kinds = {k for use in uses if (k := _use(use, view)) is not None}
    return target.value if "other" not in kinds and (sure or "tensor" in kinds) else None


def _use(name: cst.CSTNode, view: View) -> str | None:
    """Returns "tensor" or "other" where a use of a name tells what it holds."""
    script = view.script
    parent = script.parent(name)
    if isinstance(parent, cst.Attribute) and parent.value is name:
        word = parent.attr.value
        if word in TENSOR_ATTRIBUTES:
            return None
        called = isinstance(around := script.parent(parent), cst.Call) and around.func is parent
        return "tensor" if called and word in TENSOR else "other"
    if isinstance(parent, cst.Subscript):
        return (
            "other" if any(isinstance(n, cst.SimpleString) for n in descendants(parent)) else None
        )
    if isinstance(parent, cst.Arg) and parent.keyword is None and not parent.star:
        call = script.parent(parent)
        return "tensor" if isinstance(call, cst.Call) and is_loss(call, script) else None
    if isinstance(parent, cst.Assign) and isinstance(
        parent.targets[0].target, (cst.Tuple, cst.List)
    ):
        return "other"
    return None


def is_loss(call: cst.Call, script: Script) -> bool:
    """Whether a call is one of a loss of torch: a function, or an instance of its classes."""
    names = {n.removeprefix("torch.nn.functional.") for n in script.imported(call.func)}
    if names and names != script.imported(call.func):
        return not any(n.startswith(PRODUCTS) for n in names)
    dotted = text(call.func)
    if dotted is None:
        return False
    scope = script.scope(call)
    made = [
        o
        for b in script.bindings(scope, dotted)
        for o, _ in script.origins(b.value, b.scope, b.path)
    ]
    made = [_unmoved(m) for m in made if text(m) != "None"]
    return bool(made) and all(
        isinstance(m, cst.Call)
        and any(n.startswith("torch.nn.") and n.endswith("Loss") for n in script.imported(m.func))
        for m in made
    )


def _unmoved(value: cst.BaseExpression) -> cst.BaseExpression:
    """Returns what is moved to a device in an expression: nn.CrossEntropyLoss().to(device)."""
    while (
        isinstance(value, cst.Call)
        and isinstance(value.func, cst.Attribute)
        and value.func.attr.value in ("to", "cuda")
        and isinstance(value.func.value, cst.Call)
    ):
        value = value.func.value
    return value


def _device(forward: Forward, span: tuple[Statement, ...], view: View) -> str:
    """Returns an expression for the type of the device that the forward runs on."""
    script = view.script
    here = {id(n) for around in script.around(span[0]) for n in [around]}
    for call in script.calls:
        if (
            not isinstance(call.func, cst.Attribute)
            or call.func.attr.value != "to"
            or not call.args
        ):
            continue
        scope = script.scope(call)
        place = script.statement(call)
        if scope is not forward.scope or place is None or id(place[0]) not in here:
            continue
        if script.line(call) > script.line(span[-1]):
            continue
        dotted = text(call.args[0].value)
        if dotted is None or call.args[0].keyword is not None or call.args[0].star:
            continue
        expression = _type_of(dotted, forward, view)
        if expression is not None:
            return expression
    called = [c for s in span for c in view.training.model_calls(s)]
    dotted = text(called[0].func) if called else None
    if dotted is None:
        names = [
            text(a.value)
            for s in span
            for c in descendants(s)
            if isinstance(c, cst.Call)
            for a in c.args
            if view.training.is_trained(a.value, forward.scope)
        ]
        dotted = next((n for n in names if n), None)
    if dotted is None:
        raise Left(
            f"line {script.line(span[0])}: the device of the forward cannot be told",
            "with torch.autocast(device_type, dtype=torch.bfloat16):  # around the forward and the loss, not backward()",
        )
    return f"next({dotted}.parameters()).device.type"


def _type_of(dotted: str, forward: Forward, view: View) -> str | None:
    """Returns the type of a device that `.to()` is given, as an expression; None where it may be no device."""
    script = view.script
    made = [
        o
        for b in script.bindings(forward.scope, dotted)
        for o, _ in script.origins(b.value, b.scope, b.path)
    ]
    if made and all(
        isinstance(m, cst.Call) and "torch.device" in script.imported(m.func) for m in made
    ):
        return f"{dotted}.type"
    word = dotted.rpartition(".")[2]
    owner = script.owner(forward.scope, dotted)
    known = bool(made) or (isinstance(owner, cst.FunctionDef) and dotted in parameters(owner))
    if "device" in word and (known or "." in dotted):
        return f"{view.edits.torch()}.device({dotted}).type"
    return None


def _is(node: cst.CSTNode, method: str) -> bool:
    return (
        isinstance(node, cst.Call)
        and isinstance(node.func, cst.Attribute)
        and node.func.attr.value == method
    )
