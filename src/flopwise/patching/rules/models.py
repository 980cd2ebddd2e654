"""Fixes of a whole model, written before its optimizer is made: channels-last layout, compilation."""

from __future__ import annotations

import libcst as cst

from flopwise.patching.outcome import Left, View, Written, only
from flopwise.patching.rules.optimizers import optimizer_calls
from flopwise.patching.script import (
    Block,
    Scope,
    Statement,
    descendants,
    given_names,
    matches,
    text,
)
from flopwise.patching.training import PARAMETERS, WRAPPERS

Identity = tuple[int, str]
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
LAYOUT_BY_HAND = (
    "model = model.to(memory_format=torch.channels_last)  # before the optimizer is made",
    "images = images.to(memory_format=torch.channels_last)  # in the loop",
)


def write_channels_last(setting: dict[str, str], view: View) -> Written:
    """Writes the layout of weights and, where they are images for sure, of inputs.

    Raises:
        Left: no model with a place of its own was found.
    """
    only(setting, "memory_format")
    torch = view.edits.torch
    places = _places(view, LAYOUT_BY_HAND)
    for name, statement, _ in places:
        view.edits.before(statement, f"{name} = {name}.to(memory_format={torch()}.channels_last)")
    images = _images(view)
    for name, statement in images:
        view.edits.before(statement, f"{name} = {name}.to(memory_format={torch()}.channels_last)")
    note = "" if images else "the first convolution lays images out by itself"
    lines = [view.script.line(s) for _, s, _ in places] + [view.script.line(s) for _, s in images]
    return Written(tuple(lines), note)


def write_compile(setting: dict[str, str], view: View) -> Written:
    """Writes `model.compile()`.

    Raises:
        Left: no model with a place of its own was found, or torch would leave it uncompiled.
    """
    only(setting, "mode", "parts", "deadline_s")
    if setting.get("parts", "whole") != "whole":
        raise Left(
            "its blocks are compiled one by one, and which these are is not in the plan",
            "for block in model.blocks: block.compile()  # under the name that the blocks have",
        )
    mode = setting.get("mode", "default")
    if mode not in MODES:
        raise Left(f"mode {mode[:40]!r} has no form in a script")
    said = "" if mode == "default" else f'mode="{mode}"'
    by_hand = (f"model.compile({said})  # before the training loop",)
    for call in view.script.calls:
        if "torch.compile" in view.script.imported(call.func):
            raise Left(f"line {view.script.line(call)}: the script compiles by itself")
    places = _places(view, by_hand)
    wrapped = bool(view.script.calls_of(*WRAPPERS))
    for _, _, identity in places:
        if _is_container(identity, view):
            raise Left(
                "the model is an nn.Sequential, which Module.compile() leaves uncompiled",
                f"compiled = torch.compile(model{', ' + said if said else ''})  # and call `compiled` in the loop",
            )
    for name, statement, _ in places:
        inner = f'getattr({name}, "module", {name})' if wrapped else name
        view.edits.before(statement, f"{inner}.compile({said})")
    note = "evaluation is compiled, too, at its first call" if _evaluates(view) else ""
    return Written(tuple(view.script.line(s) for _, s, _ in places), note)


def _places(view: View, by_hand: tuple[str, ...]) -> list[tuple[str, Statement, Identity]]:
    """Returns, for each model, its name and the statement that its optimizer is made in.

    Raises:
        Left: a model has no such place, or several.
    """
    if not view.training.models():
        problems = "; ".join(view.training.problems[:3])
        raise Left(problems or "no call of a trained model was found", *by_hand)
    found = []
    for identity, calls in view.training.models():
        name = text(calls[0].func)
        candidates = _makers(identity, view)
        if not candidates:
            raise Left(f"it cannot be told where the optimizer of {name} is made", *by_hand)
        place = _common(candidates, view)
        if place is None:
            raise Left(f"the optimizer of {name} is made in several places", *by_hand)
        found.append((*place, identity))
    return found


def _makers(identity: Identity, view: View) -> list[tuple[str, cst.CSTNode, Scope]]:
    """Returns the calls that make an optimizer of this model, with its name there."""
    script, training = view.script, view.training
    optimizers = optimizer_calls(view)
    found: list[tuple[str, cst.CSTNode, Scope]] = []
    for call in script.calls:
        if not isinstance(call.func, cst.Attribute):
            continue
        scope = script.scope(call)
        name = _name_of(call.func.value, identity, scope, view)
        if name is None:
            continue
        makes = training._makes_optimizer(call)
        if makes or call.func.attr.value in PARAMETERS:
            place: cst.CSTNode = call
            if not makes:
                inside = [o for o in optimizers if any(o is a for a in script.around(call))]
                later = [
                    o
                    for o in optimizers
                    if script.scope(o) is scope and script.line(o) >= script.line(call)
                ]
                if not inside and (not later or training._of_gradients(call)):
                    continue
                place = inside[0] if inside else later[0]
            found.append((name, place, scope))
    return [lifted for f in found for lifted in _lifted(f, view)]


def _name_of(value: cst.BaseExpression, identity: Identity, scope: Scope, view: View) -> str | None:
    """Returns the name of the model that an expression is, or a part of."""
    dotted = text(value)
    while dotted:
        if view.training.identity(scope, dotted) == identity:
            return dotted
        dotted = dotted.rpartition(".")[0]
    return None


def _lifted(
    found: tuple[str, cst.CSTNode, Scope], view: View, depth: int = 3
) -> list[tuple[str, cst.CSTNode, Scope]]:
    """Returns where a function that makes an optimizer of its parameter is called."""
    name, _, scope = found
    if not isinstance(scope, cst.FunctionDef) or depth == 0 or "." in name:
        return [found]
    callers = view.script.callers(scope)
    handed = [(given_names(scope, call, name, view.script), call, s) for call, s in callers]
    if name not in [p.name.value for p in scope.params.params] or not handed:
        return [found]
    if any(h is None for h, _, _ in handed):
        return [found]
    return [
        lifted for h, call, s in handed for lifted in _lifted((h or "", call, s), view, depth - 1)
    ]


def _common(
    candidates: list[tuple[str, cst.CSTNode, Scope]], view: View
) -> tuple[str, Statement] | None:
    """Returns the one statement that holds all candidates: itself, or the branches they lie in."""
    names = {name for name, _, _ in candidates}
    scopes = {id(scope) for _, _, scope in candidates}
    if len(names) != 1 or len(scopes) != 1:
        return None
    chains = [_chain(node, view) for _, node, _ in candidates]
    for block, _ in chains[0]:
        if all(any(b is block for b, _ in chain) for chain in chains):
            firsts = [next(s for b, s in chain if b is block) for chain in chains]
            order = [i for i, s in enumerate(block.body) if any(s is f for f in firsts)]
            first = block.body[order[0]]
            assert isinstance(first, cst.BaseStatement)
            return names.pop(), first
        if isinstance(view.script.parent(block), (cst.FunctionDef, cst.Module)):
            break
    return None


def _chain(node: cst.CSTNode, view: View) -> list[tuple[Block, Statement]]:
    """Returns the statements around a node, the nearest first, each with its block."""
    found = []
    place = view.script.statement(node)
    while place is not None:
        found.append(place)
        around = view.script.parent(place[0])
        if around is None or isinstance(around, (cst.FunctionDef, cst.ClassDef)):
            break
        place = view.script.statement(around)
    return found


def _images(view: View) -> list[tuple[str, Statement]]:
    """Returns the names that models which begin with a convolution are called with, and where."""
    found = []
    for forward in view.training.forwards:
        for statement in forward.calling:
            for call in view.training.model_calls(statement):
                scope = view.script.scope(call)
                identity = view.training.identity(scope, text(call.func) or "")
                first = call.args[0].value if call.args else None
                if not isinstance(first, cst.Name) or call.args[0].keyword or call.args[0].star:
                    continue
                if begins_with_images(identity, view) and (first.value, statement) not in found:
                    found.append((first.value, statement))
    return found


def begins_with_images(identity: Identity, view: View) -> bool:
    """Whether a model's first step is a convolution of its input, so that the input is a batch of images."""
    made = view.training.made_by(identity)
    return bool(made) and all(_begins_with_images(m, s, view) for m, s in made)


def _begins_with_images(made: cst.BaseExpression, scope: Scope, view: View, depth: int = 8) -> bool:
    script = view.script
    if not isinstance(made, cst.Call) or depth == 0:
        return False
    names = script.imported(made.func)
    if any(matches(n, ("torchvision.models.", "timm.create_model")) for n in names):
        return not any("video" in n or "segmentation" in n or "detection" in n for n in names)
    if "torch.nn.Sequential" in names and made.args:
        if made.args[0].star:
            return False
        firsts = script.origins(made.args[0].value, scope)
        return bool(firsts) and all(_begins_with_images(f, s, view, depth - 1) for f, s in firsts)
    if "torch.nn.Conv2d" in names:
        return True
    kind = script.class_called(made)
    forward = _method(kind, "forward") if kind is not None else None
    if kind is None or forward is None or len(forward.params.params) < 2:
        return False
    image = forward.params.params[1].name.value
    uses = [n for n in descendants(forward.body) if isinstance(n, cst.Name) and n.value == image]
    if not uses:
        return False
    arg = script.parent(uses[0])
    if isinstance(arg, cst.AssignTarget):  # x = self.conv(x): the value is evaluated first
        arg = script.parent(uses[1]) if len(uses) > 1 else None
    call = script.parent(arg) if isinstance(arg, cst.Arg) else None
    dotted = text(call.func) if isinstance(call, cst.Call) else None
    if dotted is None or not isinstance(call, cst.Call) or call.args[0] is not arg:
        return False
    layers = [
        origin
        for b in script.bindings(forward, dotted)
        for origin in script.origins(b.value, b.scope, b.path)
    ]
    return bool(layers) and all(_begins_with_images(m, s, view, depth - 1) for m, s in layers)


def _method(kind: cst.ClassDef, name: str) -> cst.FunctionDef | None:
    return next(
        (s for s in kind.body.body if isinstance(s, cst.FunctionDef) and s.name.value == name), None
    )


def _is_container(identity: Identity, view: View) -> bool:
    """Whether a model is a container of torch's own, without a forward of its own."""
    for made, _ in view.training.made_by(identity):
        if not isinstance(made, cst.Call):
            continue
        if "torch.nn.Sequential" in view.script.imported(made.func):
            return True
        kind = view.script.class_called(made)
        if kind is not None and _method(kind, "forward") is None:
            bases = {n for b in kind.bases for n in view.script.imported(b.value)}
            if "torch.nn.Sequential" in bases:
                return True
    return False


def _evaluates(view: View) -> bool:
    return any(
        isinstance(c.func, cst.Attribute)
        and c.func.attr.value in ("eval", "no_grad", "inference_mode")
        for c in view.script.calls
    )
