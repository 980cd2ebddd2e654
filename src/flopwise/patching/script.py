"""A parsed script: what names stand for, where they come from, and who calls whom.

What is asked here is answered from the text alone, so an answer may be "unknown", and then nothing is found: callers take
that as a reason to leave a place alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import libcst as cst
from libcst.metadata import (
    MetadataWrapper,
    ParentNodeProvider,
    PositionProvider,
    QualifiedNameProvider,
    QualifiedNameSource,
)

from flopwise.errors import PatchError

Node = TypeVar("Node", bound=cst.CSTNode)
Scope = cst.FunctionDef | cst.Module
Block = cst.IndentedBlock | cst.Module
Statement = cst.BaseStatement
#: How far an origin is followed, in assignments and calls.
DEEPEST = 12


@dataclass(frozen=True)
class Binding:
    """A value that a name may hold: an expression, or an element of what it unpacks to."""

    value: cst.BaseExpression
    path: tuple[int, ...]
    scope: Scope


@dataclass
class Script:
    """A script with what its names stand for."""

    text: str
    module: cst.Module = field(init=False)

    def __post_init__(self) -> None:
        try:
            wrapper = MetadataWrapper(cst.parse_module(self.text))
        except (cst.ParserSyntaxError, RecursionError) as error:
            raise PatchError(
                f"the script cannot be parsed by this libcst ({str(error).splitlines()[0]}). Nothing was written"
            ) from error
        self.module = wrapper.module
        if self.module.code != self.text:
            raise PatchError(
                "this libcst does not give the script back as it is. Nothing was written"
            )
        self._parents = wrapper.resolve(ParentNodeProvider)
        self._names = wrapper.resolve(QualifiedNameProvider)
        self._positions = wrapper.resolve(PositionProvider)
        self.nodes: list[cst.CSTNode] = list(descendants(self.module))
        self.calls = [n for n in self.nodes if isinstance(n, cst.Call)]
        self.functions = [n for n in self.nodes if isinstance(n, cst.FunctionDef)]
        self.classes = [n for n in self.nodes if isinstance(n, cst.ClassDef)]
        self._bindings: dict[tuple[int, str], list[Binding]] = defaultdict(list)
        for node in self.nodes:
            self._bind(node)

    # ------------------------------------------------------------------ where

    def line(self, node: cst.CSTNode) -> int:
        """Returns the line on which a node starts, from 1."""
        return int(self._positions[node].start.line)

    def parent(self, node: cst.CSTNode) -> cst.CSTNode | None:
        """Returns the node around this one."""
        found = self._parents.get(node)
        return found if isinstance(found, cst.CSTNode) else None

    def around(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yields the nodes around this one, the nearest first."""
        at = self.parent(node)
        while at is not None:
            yield at
            at = self.parent(at)

    def scope(self, node: cst.CSTNode) -> Scope:
        """Returns the function around a node, or the module."""
        for at in self.around(node):
            if isinstance(at, (cst.FunctionDef, cst.Module)):
                return at
        return self.module

    def class_of(self, scope: Scope) -> cst.ClassDef | None:
        """Returns the class whose method a function is."""
        for at in self.around(scope):
            if isinstance(at, cst.ClassDef):
                return at
            if isinstance(at, cst.FunctionDef):
                return self.class_of(at)  # a function within a method: self is the method's
        return None

    def statement(self, node: cst.CSTNode) -> tuple[Block, Statement] | None:
        """Returns the statement that a node is in, and its block; None in a suite on one line."""
        at: cst.CSTNode = node
        for around in (node, *self.around(node)):
            if isinstance(around, (cst.IndentedBlock, cst.Module)) and isinstance(
                at, cst.BaseStatement
            ):
                return around, at
            if isinstance(around, cst.SimpleStatementSuite):
                return None
            at = around
        return None

    # ------------------------------------------------------------------ names

    def imported(self, node: cst.CSTNode) -> frozenset[str]:
        """Returns the full names that an expression may stand for by imports, e.g. torch.optim.AdamW.

        None where it may also stand for something of the script's own.
        """
        names = self._names.get(node) or ()
        names = list(names() if callable(names) else names)
        if any(n.source is QualifiedNameSource.LOCAL for n in names):
            return frozenset()
        return frozenset(n.name for n in names if n.source is QualifiedNameSource.IMPORT)

    def calls_of(self, *prefixes: str) -> list[cst.Call]:
        """Returns the calls of what is imported under a name, or below one that ends with a dot."""
        return [c for c in self.calls if any(matches(n, prefixes) for n in self.imported(c.func))]

    def owner(self, scope: Scope, dotted: str) -> cst.CSTNode:
        """Returns what a dotted name belongs to when used in `scope`: a function, a class (self.x) or the module."""
        base, _, rest = dotted.partition(".")
        at: Scope = scope
        while isinstance(at, cst.FunctionDef):
            if rest and base == self._self_of(at):
                return self.class_of(at) or at
            if (id(at), base) in self._bindings or base in parameters(at):
                return at
            at = self.scope(at)
        return self.module

    def bindings(self, scope: Scope, dotted: str) -> list[Binding]:
        """Returns the values that a dotted name may hold in `scope`, those handed in by callers included."""
        owner = self.owner(scope, dotted)
        found = list(self._bindings.get((id(owner), _in_class(owner, dotted)), ()))
        if isinstance(owner, cst.FunctionDef) and dotted in parameters(owner):
            for call, caller in self.callers(owner):
                value = argument(owner, call, dotted, bool(self._self_of(owner)))
                if value is not None:
                    found.append(Binding(value, (), caller))
            default = default_of(owner, dotted)
            if default is not None:
                found.append(Binding(default, (), self.scope(owner)))
        return found

    def bound(self, key: tuple[int, str]) -> list[Binding]:
        """Returns what is assigned to a name, given by its owner's id and by itself."""
        return list(self._bindings.get(key, ()))

    def callers(self, function: cst.FunctionDef) -> list[tuple[cst.Call, Scope]]:
        """Returns the calls of a function, method or (for `__init__`) class of this script."""
        holder = self.class_of(function)
        name = function.name.value
        if holder is not None and self.parent(self.parent(function) or function) is holder:
            if name == "__init__":
                found = [c for c in self.calls if text(c.func) == holder.name.value]
            else:
                found = [
                    c
                    for c in self.calls
                    if isinstance(c.func, cst.Attribute) and c.func.attr.value == name
                ]
        else:
            found = [c for c in self.calls if isinstance(c.func, cst.Name) and text(c.func) == name]
        return [(c, self.scope(c)) for c in found]

    def function_called(self, call: cst.Call) -> cst.FunctionDef | None:
        """Returns the function or method of this script that a call runs; None where that is not certain."""
        if isinstance(call.func, cst.Name) and not self.imported(call.func):
            name, methods = call.func.value, False
        elif isinstance(call.func, cst.Attribute) and not self.imported(call.func):
            name, methods = call.func.attr.value, True
        else:
            return None
        found = [
            f for f in self.functions if f.name.value == name and methods == bool(self.is_method(f))
        ]
        return found[0] if len(found) == 1 else None

    def returned(self, function: cst.FunctionDef) -> list[cst.BaseExpression]:
        """Returns what a function may return."""
        return [
            node.value
            for node in descendants(function.body)
            if isinstance(node, cst.Return)
            and node.value is not None
            and self.scope(node) is function
        ]

    def class_called(self, call: cst.Call) -> cst.ClassDef | None:
        """Returns the class of this script that a call makes an instance of."""
        if not isinstance(call.func, cst.Name):
            return None
        found = [c for c in self.classes if c.name.value == call.func.value]
        return found[0] if len(found) == 1 else None

    def origins(
        self,
        value: cst.BaseExpression,
        scope: Scope,
        path: tuple[int, ...] = (),
        depth: int = DEEPEST,
    ) -> list[tuple[cst.BaseExpression, Scope]]:
        """Returns the expressions that made a value, assignments and this script's functions followed."""
        if depth == 0:
            return []
        if isinstance(value, (cst.Tuple, cst.List)) and path:
            elements = [e.value for e in value.elements]
            if path[0] >= len(elements) or any(
                isinstance(e, cst.StarredElement) for e in value.elements
            ):
                return []
            return self.origins(elements[path[0]], scope, path[1:], depth - 1)
        if isinstance(value, cst.IfExp):
            return self.origins(value.body, scope, path, depth - 1) + self.origins(
                value.orelse, scope, path, depth - 1
            )
        dotted = text(value)
        if dotted is not None:
            return [
                origin
                for b in self.bindings(scope, dotted)
                for origin in self.origins(b.value, b.scope, b.path + path, depth - 1)
            ]
        if isinstance(value, cst.Call):
            function = self.function_called(value)
            if function is not None and function.name.value != "__init__":
                returned = self.returned(function)
                return [o for r in returned for o in self.origins(r, function, path, depth - 1)]
        return [(value, scope)] if not path else []

    # ------------------------------------------------------------------ making it

    def is_method(self, function: cst.FunctionDef) -> bool:
        """Whether a function lies right in a class."""
        block = self.parent(function)
        return block is not None and isinstance(self.parent(block), cst.ClassDef)

    def _self_of(self, function: cst.FunctionDef) -> str | None:
        """Returns the name of a method's first parameter."""
        names = parameters(function)
        static = any(text(d.decorator) == "staticmethod" for d in function.decorators)
        return names[0] if names and self.is_method(function) and not static else None

    def _bind(self, node: cst.CSTNode) -> None:
        if isinstance(node, cst.Assign):
            for target in node.targets:
                self._bind_target(target.target, node.value, ())
        elif (
            isinstance(node, (cst.AnnAssign, cst.AugAssign, cst.NamedExpr))
            and node.value is not None
        ):
            self._bind_target(node.target, node.value, ())
        elif isinstance(node, cst.WithItem) and node.asname is not None:
            self._bind_target(node.asname.name, node.item, ())
        elif isinstance(node, (cst.For, cst.CompFor)):
            # What an iteration gives is no element of the iterable's expression.
            self._bind_target(node.target, cst.Call(cst.Name("iter"), [cst.Arg(node.iter)]), (0,))

    def _bind_target(
        self, target: cst.CSTNode, value: cst.BaseExpression, path: tuple[int, ...]
    ) -> None:
        if isinstance(target, (cst.Tuple, cst.List)):
            for place, element in enumerate(target.elements):
                self._bind_target(element.value, value, (*path, place))
            return
        dotted = text(target)
        if dotted is None:
            return
        scope = self.scope(target)
        owner: cst.CSTNode = scope
        if isinstance(scope, cst.FunctionDef):
            base, _, rest = dotted.partition(".")
            if rest and base == self._self_of(scope):
                owner = self.class_of(scope) or scope
        elif isinstance(scope, cst.Module):
            for at in self.around(target):
                if isinstance(at, cst.ClassDef):
                    return
        self._bindings[id(owner), _in_class(owner, dotted)].append(Binding(value, path, scope))


def descendants(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Yields a node and all nodes in it, in the order of the text."""
    todo: list[cst.CSTNode] = [node]
    while todo:
        at = todo.pop()
        yield at
        todo.extend(reversed(at.children))


def text(node: cst.CSTNode) -> str | None:
    """Returns a name or attribute chain as it is written (model, self.model.net), None for anything else."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        inside = text(node.value)
        return f"{inside}.{node.attr.value}" if inside is not None else None
    return None


def names_in(node: cst.CSTNode) -> set[str]:
    """Returns the names that an expression or statement mentions, attribute names and keywords left out."""
    found: set[str] = set()
    todo = [node]
    while todo:
        at = todo.pop()
        if isinstance(at, cst.Name):
            found.add(at.value)
        elif isinstance(at, (cst.Attribute, cst.Arg)):
            todo.append(at.value)
        else:
            todo.extend(at.children)
    return found


def parameters(function: cst.FunctionDef) -> list[str]:
    """Returns the names of a function's parameters, positional ones first."""
    given = function.params
    return [p.name.value for p in (*given.posonly_params, *given.params, *given.kwonly_params)]


def default_of(function: cst.FunctionDef, name: str) -> cst.BaseExpression | None:
    """Returns what a parameter is where callers do not say."""
    given = function.params
    for parameter in (*given.posonly_params, *given.params, *given.kwonly_params):
        if parameter.name.value == name:
            return parameter.default
    return None


def argument(
    function: cst.FunctionDef, call: cst.Call, name: str, method: bool
) -> cst.BaseExpression | None:
    """Returns what a call hands over as the parameter `name`; None where that is not certain."""
    for arg in call.args:
        if arg.keyword is not None and arg.keyword.value == name:
            return arg.value
    if any(arg.star for arg in call.args):
        return None
    given = function.params
    positional = [p.name.value for p in (*given.posonly_params, *given.params)]
    if name not in positional:
        return None
    place = positional.index(name) - (1 if method else 0)
    plain = [arg.value for arg in call.args if arg.keyword is None]
    return plain[place] if 0 <= place < len(plain) else None


def keyword(call: cst.Call, name: str) -> cst.Arg | None:
    """Returns the argument that a call hands over by this keyword."""
    return next((a for a in call.args if a.keyword is not None and a.keyword.value == name), None)


def matches(name: str, prefixes: Sequence[str]) -> bool:
    """Whether a full name is one of these, or lies below one that ends with a dot."""
    return any(name == p or (p.endswith(".") and name.startswith(p)) for p in prefixes)


def _in_class(owner: cst.CSTNode, dotted: str) -> str:
    """Returns the key of a name: in a class whatever its methods call themselves is left out."""
    return dotted.partition(".")[2] if isinstance(owner, cst.ClassDef) else dotted


def given_names(function: cst.FunctionDef, call: cst.Call, name: str, script: Script) -> str | None:
    """Returns the name that a caller hands over as the parameter `name`; None where it is no plain name."""
    value = argument(function, call, name, script.is_method(function))
    return text(value) if value is not None else None
