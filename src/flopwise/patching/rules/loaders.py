"""loader-workers: arguments of the DataLoader calls that the plan was measured with."""

from __future__ import annotations

import multiprocessing

import libcst as cst

from flopwise.patching.edits import given, has_star, with_keywords, with_positional
from flopwise.patching.outcome import Left, View, Written, only
from flopwise.patching.script import Scope, text

LOADER = ("torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader")
#: Places of a DataLoader's positional arguments. Source: torch.utils.data.DataLoader, torch 2.11 to 2.13.
PLACES = {
    "dataset": 0, "batch_size": 1, "shuffle": 2, "sampler": 3, "batch_sampler": 4, "num_workers": 5, "collate_fn": 6,
    "pin_memory": 7,
}  # fmt: skip
NUMBERS = ("num_workers", "prefetch_factor")
FLAGS = {"true": "True", "false": "False"}


def write(setting: dict[str, str], view: View) -> Written:
    """Writes the plan's workers into the calls that fit, and returns where.

    Raises:
        Left: there is none, or it cannot be told which.
    """
    only(setting, *NUMBERS, "pin_memory", "persistent_workers", "match", "had_workers")
    values = _values(setting)
    by_hand = f"DataLoader(..., {', '.join(f'{k}={v}' for k, v in values.items())})"
    calls = view.script.calls_of(*LOADER)
    if not calls:
        raise Left("no call of torch's DataLoader was found", by_hand)
    chosen = _chosen(calls, setting, view, by_hand)
    for call in chosen:
        problem = _problem(call, view)
        if problem:
            raise Left(f"line {view.script.line(call)}: {problem}", by_hand)
    replaced = list(dict.fromkeys(r for call in chosen for r in _replaced(call, values)))
    for call in chosen:
        _write(call, values, view)
    notes = [f"in place of {', '.join(replaced)}"] if replaced else []
    shuffled = any(_sampler_fits(c, "RandomSampler") is not False for c in chosen)
    if values.get("persistent_workers") == "True" and shuffled:
        notes.append(
            "with persistent_workers torch draws one random number less an epoch: a shuffled order is another one from "
            "the second epoch on"
        )
    return Written(tuple(view.script.line(c) for c in chosen), "; ".join(notes))


def _values(setting: dict[str, str]) -> dict[str, str]:
    """Returns the arguments as they are written, from the setting of a plan."""
    values: dict[str, str] = {}
    for name in NUMBERS:
        if name in setting:
            if not setting[name].isdigit():
                raise Left(f"{name} {setting[name][:40]!r} is not a number. Edited by hand?")
            values[name] = str(int(setting[name]))
    if not int(values.get("num_workers", "0")):
        raise Left("the plan gives no number of workers")
    for name in ("pin_memory", "persistent_workers"):
        if name in setting and setting[name] not in FLAGS:
            raise Left(f"{name} {setting[name][:40]!r} is neither true nor false. Edited by hand?")
        if setting.get(name) == "true":
            values[name] = "True"
    ways = multiprocessing.get_all_start_methods()
    if (
        "fork" in ways and ways[0] != "fork"
    ):  # as `run --plan` does: others would import the script again
        values["multiprocessing_context"] = '"fork"'
    return values


def _chosen(
    calls: list[cst.Call], setting: dict[str, str], view: View, by_hand: str
) -> list[cst.Call]:
    """Returns the calls that the plan means."""
    match, had = setting.get("match", ""), setting.get("had_workers", "0")
    answers = {id(c): _fits(c, match, had, view) for c in calls}
    sure = [c for c in calls if answers[id(c)] is True]
    left = [c for c in calls if answers[id(c)] is not False]
    said = f"{match or 'any data set'}, {had} workers"
    if not left:
        raise Left(f"no DataLoader call is that of the plan ({said})", by_hand)
    if len(sure) == len(left) or not match:
        return left  # without a match `run --plan` takes every loader with as few workers
    feeding = feeding_training(view)
    fed = [c for c in left if any(c is f for f in feeding)]
    if len(fed) == 1:
        return [c for c in left if c is fed[0] or c in sure]
    if len(left) == 1:
        return left
    lines = ", ".join(str(view.script.line(c)) for c in left)
    raise Left(
        f"the DataLoader calls in lines {lines} may all be that of the plan ({said})", by_hand
    )


def _fits(call: cst.Call, match: str, had: str, view: View) -> bool | None:
    """Whether a call builds the loader of this fingerprint and workers; None where the text does not tell."""
    if has_star(call):
        return None
    scope = view.script.scope(call)
    answers = [_workers_fit(call, had, scope, view)]
    wanted = match.rsplit(", ", 2)
    if match and len(wanted) != 3:
        return None
    if match:
        answers += [
            _dataset_fits(call, wanted[0], scope, view),
            _batch_fits(call, wanted[1], scope, view),
            _sampler_fits(call, wanted[2]),
        ]
    if False in answers:
        return False
    return True if all(answers) else None


def _workers_fit(call: cst.Call, had: str, scope: Scope, view: View) -> bool | None:
    """Whether a loader has as many workers as the one that was measured."""
    value = given(call, "num_workers", PLACES["num_workers"])
    if value is None:
        return None if _unpacks(call) else had == "0"
    number = _number(value, scope, view)
    return None if number is None else str(number) == had


def _number(value: cst.BaseExpression, scope: Scope, view: View) -> int | None:
    """Returns the one whole number that an expression is, None where the text does not tell."""
    found = [made for made, _ in view.script.origins(value, scope)] or [value]
    numbers = {made.evaluated_value for made in found if isinstance(made, cst.Integer)}
    sure = len(numbers) == 1 and all(isinstance(made, cst.Integer) for made in found)
    return numbers.pop() if sure else None


def _dataset_fits(call: cst.Call, wanted: str, scope: Scope, view: View) -> bool | None:
    value = given(call, "dataset", PLACES["dataset"])
    if value is None:
        return None
    found = set()
    for made, _ in view.script.origins(value, scope):
        name = text(made.func) if isinstance(made, cst.Call) else None
        if name is None or (
            isinstance(made, cst.Call) and not _is_class(made, view)
        ):  # a function of others may return anything
            return None
        found.add(name.rpartition(".")[2])
    if len(found) != 1:
        return None
    return found.pop() == wanted.rpartition(".")[2]


def _is_class(call: cst.Call, view: View) -> bool:
    if view.script.class_called(call) is not None:
        return True
    names = view.script.imported(call.func)
    return bool(names) and all(n.rpartition(".")[2][:1].isupper() for n in names)


def _batch_fits(call: cst.Call, wanted: str, scope: Scope, view: View) -> bool | None:
    if given(call, "batch_sampler", PLACES["batch_sampler"]) is not None:
        return wanted == "batch None"
    value = given(call, "batch_size", PLACES["batch_size"])
    if value is None:
        return None if _unpacks(call) else wanted == "batch 1"
    number = _number(value, scope, view)
    return None if number is None else f"batch {number}" == wanted


def _sampler_fits(call: cst.Call, wanted: str) -> bool | None:
    if given(call, "batch_sampler", PLACES["batch_sampler"]) is not None:
        return None
    sampler = given(call, "sampler", PLACES["sampler"])
    if sampler is not None and text(sampler) != "None":
        return None
    shuffle = given(call, "shuffle", PLACES["shuffle"])
    if shuffle is None and _unpacks(call):
        return None
    said = "False" if shuffle is None else text(shuffle)
    if said not in ("True", "False", "None"):
        return None
    return wanted == ("RandomSampler" if said == "True" else "SequentialSampler")


def _unpacks(call: cst.Call) -> bool:
    return any(a.star == "**" for a in call.args)


def feeding_training(view: View) -> list[cst.Call]:
    """Returns the DataLoader calls whose batches reach a loop that calls `backward()`."""
    found: list[cst.Call] = []
    loaders = view.script.calls_of(*LOADER)
    for forward in view.training.forwards:
        at: cst.CSTNode = forward.calling[0]
        todo: list[tuple[cst.CSTNode, Scope]] = [
            (loop.iter, view.script.scope(loop))
            for node in (at, forward.backward)
            for loop in view.script.around(node)
            if isinstance(loop, cst.For)
        ]
        todo += [(s, forward.scope) for s in forward.feeding]
        seen: set[tuple[int, str]] = set()
        while todo:
            node, scope = todo.pop()
            for inside in [node, *_inside(node)]:
                is_loader = any(inside is c for c in loaders)
                if (
                    is_loader
                    and isinstance(inside, cst.Call)
                    and all(inside is not f for f in found)
                ):
                    found.append(inside)
                dotted = text(inside)
                key = (id(view.script.owner(scope, dotted)), dotted) if dotted else None
                if dotted is None or key is None or key in seen:
                    continue
                seen.add(key)
                for binding in view.script.bindings(scope, dotted):
                    made = view.script.origins(binding.value, binding.scope, binding.path)
                    todo += made or [(binding.value, binding.scope)]
    return found


def _inside(node: cst.CSTNode) -> list[cst.CSTNode]:
    """Returns what an iterable is made of: names and calls, attribute names and functions left out."""
    found: list[cst.CSTNode] = []
    todo = list(node.children)
    while todo:
        at = todo.pop()
        found.append(at)
        if isinstance(at, cst.Attribute):
            continue
        todo.extend(at.children)
    return found


def _problem(call: cst.Call, view: View) -> str | None:
    if has_star(call):
        return "it unpacks its positional arguments"
    size = given(call, "batch_size", PLACES["batch_size"])
    if size is not None and text(size) == "None":
        return "the loader does not batch (batch_size=None)"
    return None


def _replaced(call: cst.Call, values: dict[str, str]) -> list[str]:
    """Returns arguments of the script that others take the place of, where they were more than a constant."""
    found = []
    for name, value in values.items():
        old = given(call, name, PLACES.get(name))
        if old is None:
            continue
        said = cst.Module([]).code_for_node(old)
        if said not in (value, "0", "False", "None"):
            found.append(f"{name}={said}")
    return found


def _write(call: cst.Call, values: dict[str, str], view: View) -> None:
    plain = sum(1 for a in call.args if a.keyword is None and not a.star)
    left = dict(values)
    for name in list(left):
        place = PLACES.get(name)
        if place is not None and place < plain:
            view.edits.change(call, with_positional(place, left.pop(name)))
    view.edits.change(call, with_keywords(left))
