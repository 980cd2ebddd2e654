"""Where a script trains: the statements that lead to each `backward()`, and the models that they call.

A model is an expression whose `.parameters()` somewhere goes into an optimizer, under whatever name functions and classes
hand it around. The forward of a step is found backwards: from the loss that `backward()` is called on, through the
assignments in the same block that it depends on, to the calls of such a model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import libcst as cst

from flopwise.patching.script import (
    Block,
    Scope,
    Script,
    Statement,
    descendants,
    matches,
    names_in,
    parameters,
    text,
)

#: Calls that give the same model back, or one that wraps it.
SAME = ("to", "cuda", "cpu", "train", "eval", "float", "requires_grad_", "apply")
WRAPPERS = (
    "torch.nn.parallel.DistributedDataParallel",
    "torch.nn.parallel.distributed.DistributedDataParallel",
    "torch.nn.DataParallel",
    "torch.nn.parallel.DataParallel",
    "torch.compile",
)
PARAMETERS = ("parameters", "named_parameters")
#: Methods that put what they are given into their object.
GROWING = ("append", "extend", "update", "add_")
#: How many functions a loss is followed out of.
DEEPEST = 4


@dataclass(frozen=True, eq=False)
class Forward:
    """The statements of one block from the first call of the model to the loss."""

    block: Block
    scope: Scope
    calling: tuple[Statement, ...]  # those that call the model
    feeding: tuple[Statement, ...]  # those that the loss depends on, in order, `calling` among them
    backward: cst.Call

    def same(self, other: Forward) -> bool:
        """Whether this is the way from the same calls of a model to the same backward."""
        pairs = zip(self.calling, other.calling, strict=False)
        return self.backward is other.backward and all(a is b for a, b in pairs)

    def span(self) -> tuple[Statement, ...]:
        """Returns all statements of the block from the first call of the model to the loss."""
        body = list(self.block.body)
        first = next(i for i, s in enumerate(body) if s is self.calling[0])
        last = max(i for i, s in enumerate(body) if any(s is f for f in self.feeding))
        return tuple(s for s in body[first : last + 1] if isinstance(s, cst.BaseStatement))


@dataclass
class Training:
    """What trains in a script."""

    script: Script
    forwards: list[Forward] = field(default_factory=list)
    problems: list[str] = field(
        default_factory=list
    )  # why a backward has no forward that is certain
    _same: dict[tuple[int, str], tuple[int, str]] = field(default_factory=dict)
    _trained: set[tuple[int, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._join_names()
        self._find_trained()
        for call in self.script.calls:
            if self._is_backward(call):
                for found in self._forward_of(call, call, None, DEEPEST):
                    if not any(found.same(other) for other in self.forwards):
                        self.forwards.append(found)

    # ------------------------------------------------------------------ models

    def model_calls(self, node: cst.CSTNode) -> list[cst.Call]:
        """Returns the calls within a statement that are calls of a trained model."""
        scope = self.script.scope(node)
        return [
            n
            for n in descendants(node)
            if isinstance(n, cst.Call) and self.is_trained(n.func, scope)
        ]

    def is_trained(self, node: cst.CSTNode, scope: Scope) -> bool:
        """Whether an expression is a model whose parameters are trained, by whatever name."""
        dotted = text(node)
        return dotted is not None and self.identity(scope, dotted) in self._trained

    def identity(self, scope: Scope, dotted: str) -> tuple[int, str]:
        """Returns what all names of one model have in common."""
        return self._root((id(self.script.owner(scope, dotted)), self._key(scope, dotted)))

    def models(self) -> list[tuple[tuple[int, str], list[cst.Call]]]:
        """Returns the trained models that forwards call: the identity and the calls of each."""
        found: dict[tuple[int, str], list[cst.Call]] = {}
        for forward in self.forwards:
            for statement in forward.calling:
                for call in self._calls_below(statement, forward.scope):
                    dotted = text(call.func) or ""
                    identity = self.identity(self.script.scope(call), dotted)
                    found.setdefault(identity, []).append(call)
        return list(found.items())

    def made_by(self, identity: tuple[int, str]) -> list[tuple[cst.BaseExpression, Scope]]:
        """Returns the expressions that make this model, where they can be told."""
        found: list[tuple[cst.BaseExpression, Scope]] = []
        for key in self._same:
            if self._root(key) == identity:
                for binding in self.script.bound(key):
                    found += self.script.origins(binding.value, binding.scope, binding.path)
        return [(_without_moves(e, self), s) for e, s in found if not self._renames(e, s)]

    # ------------------------------------------------------------------ the forward

    def _forward_of(
        self, backward: cst.Call, at: cst.CSTNode, need: set[str] | None, depth: int
    ) -> Iterator[Forward]:
        """Yields the forwards that lead to a backward; says in `problems` why there is none."""
        line = self.script.line(backward)
        place = self.script.statement(at)
        if place is None or depth == 0:
            self.problems.append(f"line {line}: backward() stands in a suite on one line")
            return
        if need is None:
            assert isinstance(backward.func, cst.Attribute)
            need = names_in(backward.func.value)
            if self.model_calls(backward.func.value):
                self.problems.append(
                    f"line {line}: the model is called and backward() is, in one expression"
                )
                return
        block, statement = place
        while True:
            scope = self.script.scope(statement)
            feeding = self._feeding(block, statement, need)
            calling = tuple(s for s in feeding if list(self._calls_below(s, scope)))
            if calling:
                yield Forward(block, scope, calling, feeding, backward)
                return
            around = self.script.parent(block)
            if (
                isinstance(around, cst.FunctionDef) or around is None or isinstance(around, cst.For)
            ) or (isinstance(around, cst.While)):
                break
            above = self.script.statement(around)
            if above is None:
                break
            block, statement = above
        function = self.script.parent(block)
        given = set(parameters(function)) & need if isinstance(function, cst.FunctionDef) else set()
        if isinstance(function, cst.FunctionDef) and given:
            callers = self.script.callers(function)
            for call, _ in callers:
                handed = (
                    set().union(*(names_in(a.value) for a in call.args)) if call.args else set()
                )
                yield from self._forward_of(backward, call, handed, depth - 1)
            if callers:
                return
        self.problems.append(
            f"line {line}: no call of a trained model was found that leads to this backward()"
        )

    def _feeding(self, block: Block, statement: Statement, need: set[str]) -> tuple[Statement, ...]:
        """Returns the statements of a block before this one that its names depend on; `need` grows by theirs."""
        found: list[Statement] = []
        body = list(block.body)
        place = next(i for i, s in enumerate(body) if s is statement)
        for earlier in reversed(body[:place]):
            if not isinstance(earlier, cst.BaseStatement):
                continue
            if isinstance(earlier, (cst.FunctionDef, cst.ClassDef)):
                continue
            if assigned_in(earlier) & need:
                found.insert(0, earlier)
                need -= _given_anew(earlier)
                need |= _read_in(earlier)
        return tuple(found)

    def _calls_below(
        self, node: cst.CSTNode, scope: Scope, depth: int = DEEPEST
    ) -> Iterator[cst.Call]:
        """Yields the calls of trained models that a statement leads to: in it, and in this script's functions it calls."""
        for inside in descendants(node):
            if not isinstance(inside, cst.Call):
                continue
            if self.is_trained(inside.func, scope):
                yield inside
                continue
            function = self.script.function_called(inside) if depth else None
            if function is not None and function is not scope:
                if any(self._is_backward(c) for c in descendants(function.body)):
                    continue  # a step of its own, with a backward of its own
                yield from self._calls_below(function.body, function, depth - 1)

    @staticmethod
    def _is_backward(node: cst.CSTNode) -> bool:
        return (
            isinstance(node, cst.Call)
            and isinstance(node.func, cst.Attribute)
            and node.func.attr.value == "backward"
            and not any(a.keyword is None for a in node.args)  # accelerator.backward(loss)
        )

    # ------------------------------------------------------------------ names of one model

    def _key(self, scope: Scope, dotted: str) -> str:
        owner = self.script.owner(scope, dotted)
        return dotted.partition(".")[2] if isinstance(owner, cst.ClassDef) else dotted

    def _root(self, key: tuple[int, str]) -> tuple[int, str]:
        while self._same.get(key, key) != key:
            key = self._same[key]
        return key

    def _join(self, one: tuple[Scope, str], other: tuple[Scope, str]) -> None:
        keys = [
            (id(self.script.owner(scope, dotted)), self._key(scope, dotted))
            for scope, dotted in (one, other)
        ]
        for key in keys:
            self._same.setdefault(key, key)
        roots = [self._root(key) for key in keys]
        self._same[roots[0]] = roots[1]

    def _join_names(self) -> None:
        for node in self.script.nodes:
            if isinstance(node, (cst.Assign, cst.AnnAssign)) and node.value is not None:
                targets = (
                    [t.target for t in node.targets]
                    if isinstance(node, cst.Assign)
                    else [node.target]
                )
                scope = self.script.scope(node)
                source = self._renames(node.value, scope)
                for target in targets:
                    dotted = text(target)
                    if dotted is not None:
                        self._join((scope, dotted), (scope, source or dotted))
                    self._join_returned(target, node.value, scope)
        for function in self.script.functions:
            for name in parameters(function):
                for binding in self.script.bindings(function, name):
                    dotted = text(binding.value)
                    if dotted is not None and binding.scope is not function:
                        self._join((function, name), (binding.scope, dotted))

    def _join_returned(self, target: cst.CSTNode, value: cst.BaseExpression, scope: Scope) -> None:
        """Joins what a call is assigned to with what this script's function returns, element by element."""
        function = self.script.function_called(value) if isinstance(value, cst.Call) else None
        if function is None:
            return
        for returned in self.script.returned(function):
            for one, other in zip(_elements(target), _elements(returned), strict=False):
                dotted = text(one)
                name = (
                    self._renames(other, function)
                    if isinstance(other, cst.BaseExpression)
                    else None
                )
                if dotted is not None and name is not None:
                    self._join((scope, dotted), (function, name))

    def _renames(self, value: cst.BaseExpression, scope: Scope) -> str | None:
        """Returns the name whose model an expression is, as it is, moved or wrapped."""
        dotted = text(value)
        if dotted is not None:
            return dotted
        if not isinstance(value, cst.Call):
            return None
        if isinstance(value.func, cst.Attribute) and value.func.attr.value in SAME:
            return self._renames(value.func.value, scope)
        wraps = any(matches(n, WRAPPERS) for n in self.script.imported(value.func))
        return self._renames(value.args[0].value, scope) if wraps and value.args else None

    def _find_trained(self) -> None:
        for call in self.script.calls:
            if not isinstance(call.func, cst.Attribute):
                continue
            scope = self.script.scope(call)
            trains = call.func.attr.value in PARAMETERS or self._makes_optimizer(call)
            if trains and self._of_gradients(call):
                continue
            dotted = text(call.func.value)
            while trains and dotted:
                self._trained.add(self.identity(scope, dotted))
                dotted = dotted.rpartition(".")[0]

    def _of_gradients(self, call: cst.Call) -> bool:
        """Whether parameters are asked for to count, freeze or clip them, which trains nothing by itself."""
        for around in self.script.around(call):
            if isinstance(around, cst.Call) and text(around.func) in ("sum", "next", "print"):
                return True
            if isinstance(around, cst.BaseStatement):
                return isinstance(around, cst.For)
        return False

    def _makes_optimizer(self, call: cst.Call) -> bool:
        """Whether a method of this script makes an optimizer of its object's own parameters."""
        function = self.script.function_called(call)
        return function is not None and any(
            isinstance(n, cst.Call)
            and any(name.startswith("torch.optim.") for name in self.script.imported(n.func))
            for n in descendants(function.body)
        )


def _elements(value: cst.CSTNode) -> list[cst.CSTNode]:
    """Returns the elements of a tuple, or the one expression."""
    if isinstance(value, (cst.Tuple, cst.List)):
        return [e.value for e in value.elements]
    return [value]


def _given_anew(statement: cst.CSTNode) -> set[str]:
    """Returns the names whose former values a statement does away with."""
    if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
        return set()
    assign = statement.body[0]
    if not isinstance(assign, cst.Assign):
        return set()
    found: set[str] = set()
    for target in assign.targets:
        parts = (
            [e.value for e in target.target.elements]
            if isinstance(target.target, (cst.Tuple, cst.List))
            else [target.target]
        )
        found |= {p.value for p in parts if isinstance(p, cst.Name)}
    return found


def _read_in(statement: cst.CSTNode) -> set[str]:
    """Returns the names that a statement reads."""
    if _given_anew(statement):
        assert isinstance(statement, cst.SimpleStatementLine)
        assign = statement.body[0]
        assert isinstance(assign, cst.Assign)
        return names_in(assign.value)
    return names_in(statement)


def assigned_in(statement: cst.CSTNode) -> set[str]:
    """Returns the names that a statement gives a value to, in any of its parts."""
    found: set[str] = set()
    for node in descendants(statement):
        if isinstance(
            node, (cst.AssignTarget, cst.AugAssign, cst.AnnAssign, cst.NamedExpr, cst.For)
        ):
            found |= names_in(node.target)
        elif isinstance(node, cst.AsName):
            found |= names_in(node.name)
        elif (
            isinstance(node, cst.Call)
            and isinstance(node.func, cst.Attribute)
            and node.func.attr.value in GROWING
        ):
            found |= names_in(node.func.value)
    return found


def _without_moves(value: cst.BaseExpression, training: Training) -> cst.BaseExpression:
    """Returns what is moved or wrapped in an expression: the call that makes a model."""
    while isinstance(value, cst.Call):
        if isinstance(value.func, cst.Attribute) and value.func.attr.value in SAME:
            if training.script.imported(value.func):
                return value
            value = value.func.value
        elif value.args and any(matches(n, WRAPPERS) for n in training.script.imported(value.func)):
            value = value.args[0].value
        else:
            return value
    return value
