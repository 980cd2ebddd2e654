"""fused-optimizer: `fused=True` at the constructors of torch's optimizers."""

from __future__ import annotations

import libcst as cst

from flopwise.patching.edits import given, has_star, with_keywords
from flopwise.patching.outcome import Left, View, Written, only
from flopwise.patching.script import text

#: Optimizers with a fused form. Source: torch.optim, torch 2.11 to 2.13.
FUSED = ("Adam", "AdamW", "SGD")
#: Fused on a CPU only, so written only where it is the one that was measured.
FUSED_ON_CPU = ("Adagrad",)
BY_HAND = "torch.optim.X(..., fused=True)"


def optimizer_calls(view: View) -> list[cst.Call]:
    """Returns the calls that make an optimizer of torch."""
    return [
        call
        for call in view.script.calls_of("torch.optim.")
        if any(kind_of(n) for n in view.script.imported(call.func))
    ]


def kind_of(name: str) -> str | None:
    """Returns the class that a full name below torch.optim stands for, None where it is no optimizer."""
    parts = name.split(".")
    kind = parts[-1]
    if "lr_scheduler" in parts or "swa_utils" in parts or not kind[:1].isupper():
        return None
    return kind


def write(setting: dict[str, str], view: View) -> Written:
    """Writes `fused=True` where it fits, and returns where.

    Raises:
        Left: no optimizer of torch is made by name, or one that has other flags against it.
    """
    only(setting, "fused")
    calls = optimizer_calls(view)
    if not calls:
        raise Left("no optimizer of torch is made by name", BY_HAND)
    fusable = [c for c in calls if _kind(c, view) in FUSED]
    if not fusable and len(calls) == 1 and _kind(calls[0], view) in FUSED_ON_CPU:
        fusable = calls
    if not fusable:
        kinds = ", ".join(sorted({_kind(c, view) for c in calls}))
        raise Left(f"{kinds}: no fused form that is sure to work", BY_HAND)
    fusable = [c for c in fusable if text(given(c, "fused") or c) != "True"]
    if not fusable:
        raise Left("the script's optimizers are fused already")
    for call in fusable:
        problem = _problem(call)
        if problem:
            raise Left(f"line {view.script.line(call)}: {problem}", BY_HAND)
    for call in fusable:
        unpacks = any(a.star == "**" for a in call.args)
        values = {"fused": "True", "foreach": "False"} if unpacks else {"fused": "True"}
        view.edits.change(call, with_keywords(values, () if unpacks else ("foreach",)))
    return Written(tuple(view.script.line(c) for c in fusable))


def _kind(call: cst.Call, view: View) -> str:
    return next(k for n in view.script.imported(call.func) if (k := kind_of(n)))


def _problem(call: cst.Call) -> str | None:
    if has_star(call):
        return "it unpacks its positional arguments"
    for flag in ("capturable", "differentiable"):
        value = given(call, flag)
        if value is not None and text(value) != "False":
            return f"{flag} is set, which a fused optimizer was not measured with"
    return None
