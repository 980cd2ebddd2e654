"""From a plan to a unified diff: the fixes that have a form in a script, written into it where the place is certain.

Nothing is guessed. A fix whose place cannot be told from the text is named with the reason and, where there are some, the
lines to add by hand; a fix that works inside the running process only is named as one for `flopwise run --plan`. The script
itself is never written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from flopwise.errors import PatchError, PlanError
from flopwise.patching import source as sources
from flopwise.patching.edits import Edits
from flopwise.patching.frameworks import flags, frameworks
from flopwise.patching.outcome import Left, Outcome, View, Written
from flopwise.patching.rules import autocast, loaders, models, optimizers, switches
from flopwise.patching.script import Script
from flopwise.patching.training import Training
from flopwise.records.plan import Plan, PlannedFix

Rule = Callable[[dict[str, str], View], Written]

#: By the first words of a fix's name: what writes it. Those of the loop need a loop that is the script's own.
RULES: dict[str, Rule] = {
    "loader-workers": loaders.write,
    "fused-optimizer": optimizers.write,
    "channels-last": models.write_channels_last,
    "bf16-autocast": autocast.write,
    "compile-model": models.write_compile,
    "tf32": switches.write_tf32,
    "cudnn-benchmark": switches.write_cudnn_benchmark,
}
OF_THE_LOOP = ("channels-last", "bf16-autocast", "compile-model")
BEFORE = "it is set before the process starts, not in the script"
ONLY_RUNNING = "it changes what happens inside the running process: flopwise run --plan applies it"


@dataclass(frozen=True)
class Patch:
    """A plan written into a script."""

    diff: bytes  # for patch -p1 and git apply; empty where nothing was written
    outcomes: tuple[Outcome, ...]  # in the order of the plan
    notes: tuple[str, ...]  # in what the plan was not made for this script


def patch(plan: Plan, script: str, *, force: bool = False) -> Patch:
    """Returns the diff that writes a plan into a script.

    Args:
        plan: as `flopwise tune` wrote it.
        script: path of the script; it is read only.
        force: go on although the plan was made for another script, or for this one before it changed.

    Raises:
        PlanError: the plan is another script's, and `force` was not given.
        PatchError: the script cannot be read, or is not Python.
    """
    source = sources.read(script)
    notes = _check(plan, source, script, force)
    parsed = Script(source.text)
    edits = Edits(parsed)
    view = View(plan, parsed, Training(parsed), edits, frameworks(parsed))
    outcomes = tuple(_outcome(fix, view) for fix in plan.fixes)
    text = edits.applied() if any(o.written for o in outcomes) else source.text
    sources.check_compiles(
        script, sources.encoded(source, text), "would not be Python any more once patched"
    )
    return Patch(sources.unified_diff(source, text), outcomes, tuple(notes))


def _check(plan: Plan, source: sources.Source, script: str, force: bool) -> list[str]:
    """Returns how the plan does not fit the script; torch and the device need not be those of the plan here."""
    if not plan.fixes:
        raise PlanError("the plan holds no fix: there is nothing to write")
    sha = hashlib.sha256(source.data).hexdigest()
    if plan.script_sha256 == sha:
        return []
    if plan.script_sha256:
        problem = f"{script} has changed since (or is another script than {plan.script})"
    else:
        problem = f"it was made for {plan.script[:80]}, of which no file is known"
    if not force:
        raise PlanError(
            f"the plan does not fit: {problem}. Nothing was written; tune again, or give --force-plan"
        )
    return [f"forced: {problem}"]


def rule_of(name: str) -> str | None:
    """Returns the rule that writes a fix of this name, None where there is none."""
    return next((r for r in RULES if name == r or name.startswith(f"{r}-")), None)


def _outcome(fix: PlannedFix, view: View) -> Outcome:
    rule = rule_of(fix.name)
    variables: dict[str, str] = getattr(fix, "environment", {})
    if variables:
        lines = tuple(f"export {name}={value}" for name, value in variables.items())
        return Outcome(fix.code, fix.name, False, note=BEFORE, by_hand=lines)
    if rule is None:
        return Outcome(fix.code, fix.name, False, note=ONLY_RUNNING)
    setting = dict(fix.setting)
    for library in view.frameworks:
        if rule in OF_THE_LOOP or (rule, library) == ("fused-optimizer", "Transformers' Trainer"):
            return _left_to(library, rule, fix, view)
    try:
        written = RULES[rule](setting, view)
    except Left as left:
        for library in view.frameworks:
            return _left_to(library, rule, fix, view)
        return Outcome(fix.code, fix.name, False, note=left.reason, by_hand=left.by_hand)
    return Outcome(fix.code, fix.name, True, tuple(sorted(set(written.lines))), written.note)


def _left_to(library: str, rule: str, fix: PlannedFix, view: View) -> Outcome:
    line = flags(library, rule, dict(fix.setting))
    if line is None:
        return Outcome(fix.code, fix.name, False, note=f"{library} trains, and has no flag for it")
    return Outcome(
        fix.code, fix.name, False, note=f"{library} trains: it has a flag", by_hand=(line,)
    )


__all__ = ["Patch", "PatchError", "patch"]
