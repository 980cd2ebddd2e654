"""What a script does with a value that it reads: shown and summed up, or something that decides.

Told from the script's source, read at the place of the instruction that asks for the value. Everything that is not known to be
showing counts as deciding: a comparison, a return, an attribute, a call of a function that is not on the list.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterator
from types import CodeType

#: Functions and methods that show or keep a value and give nothing back that depends on it.
SHOWING = frozenset((
    "print", "echo", "write", "writerow", "log", "debug", "info", "warning", "error", "critical", "log_dict", "log_metric",
    "log_metrics", "add_scalar", "add_scalars", "set_postfix", "set_postfix_str", "set_description",
    "set_description_str", "plot", "scatter", "dump",
))  # fmt: skip
#: Methods that keep a value in their object, which is followed from there on.
KEEPING = frozenset(("append", "update", "add"))
#: Methods of such an object that take nothing out of it.
HARMLESS = frozenset(("reset", "clear"))
#: Functions and methods whose result is the value in another form.
FORMING = frozenset((
    "round", "float", "int", "abs", "str", "repr", "format", "sum", "len", "list", "tuple", "dict", "exp", "mean", "item",
    "dumps",
))  # fmt: skip
#: With one of these a scope can be read in ways that are not seen.
_BLIND = frozenset(("exec", "eval", "locals", "globals", "vars"))

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)
#: Expressions that a value may be part of.
_PARTS = (
    ast.BinOp, ast.UnaryOp, ast.JoinedStr, ast.FormattedValue, ast.Tuple, ast.List, ast.Dict, ast.keyword, ast.Starred,
    ast.Attribute, ast.NamedExpr,
)  # fmt: skip


def uses_problem(code: CodeType, instruction: int) -> str | None:
    """Returns why the value read by an instruction may do more than be shown, or None.

    Args:
        code: of the script's function or module.
        instruction: its offset in it (`frame.f_lasti`).
    """
    if sys.version_info < (3, 11):
        return "this Python does not tell where in a line a value is read"
    span = list(code.co_positions())[instruction // 2]
    if None in span:
        return "the place of the read is not known"
    linecache.checkcache(code.co_filename)
    source = "".join(linecache.getlines(code.co_filename))
    try:
        tree = ast.parse(source)
        whole = compile(source, code.co_filename, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return "its source is not there"
    if not any(part.co_code == code.co_code and part == code for part in _codes(whole)):
        return "its source has changed since it was started"
    script = _Script(tree)
    node = script.at(span)
    return "the place of the read is not known" if node is None else script.problem(node)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


class _Script:
    """One parsed file."""

    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree
        self._parents = {
            child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)
        }

    def at(self, span: tuple[int | None, ...]) -> ast.expr | None:
        """Returns the outermost expression with this span: (first line, last line, first column, last column)."""
        for node in ast.walk(self._tree):  # outer nodes first
            if not isinstance(node, ast.expr):
                continue
            place = (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset)
            if place == span:
                return node
        return None

    def problem(self, node: ast.expr) -> str | None:
        """Returns why what this expression gives may do more than be shown, or None."""
        scope = self._scope(node)
        if scope is None:
            return "it is read in a class or a lambda"
        names: set[str] = set()
        todo: list[ast.expr] = [node]
        while todo:
            problem, found = self._follow(todo.pop())
            if problem is not None:
                return problem
            for name in found - names:
                names.add(name)
                scope = self._scope_of_name(scope, name)
                todo += [
                    n
                    for n in ast.walk(scope)
                    if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load)
                ]
        blind = next((n for n in _called(scope) if n in _BLIND), None)
        return None if blind is None else f"{blind}() may read what it is kept in"

    def _scope(self, node: ast.AST) -> ast.AST | None:
        while not isinstance(node, _SCOPES):
            node = self._parents[node]
            if isinstance(node, (ast.ClassDef, ast.Lambda)):
                return None
        return node

    def _scope_of_name(self, scope: ast.AST, name: str) -> ast.AST:
        """Returns the part of the file in which a name may mean this variable."""
        for node in ast.walk(scope):
            if isinstance(node, (ast.Global, ast.Nonlocal)) and name in node.names:
                return self._tree
        return scope

    def _follow(self, node: ast.expr) -> tuple[str | None, set[str]]:
        """Follows a value out of an expression; returns what it may decide, or the names that keep it."""
        here: ast.AST = node
        while True:
            parent = self._parents[here]
            if isinstance(parent, ast.Call):
                problem, kept, ends = self._in_call(here, parent)
                if problem is not None or ends:
                    return problem, kept
            elif isinstance(parent, ast.Subscript) and here is parent.value:
                pass
            elif isinstance(parent, ast.Expr):
                return None, set()
            elif isinstance(parent, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
                return _assigned(parent)
            elif isinstance(parent, ast.NamedExpr):
                return f"line {parent.lineno} names it within an expression", set()
            elif not isinstance(parent, _PARTS):
                return f"line {_line(parent, here)} decides by it, or gives it on", set()
            here = parent

    def _in_call(self, here: ast.AST, call: ast.Call) -> tuple[str | None, set[str], bool]:
        """Returns what a call does with a value: a problem, the name that keeps it, and whether that is its end."""
        function = call.func
        name = (
            function.attr
            if isinstance(function, ast.Attribute)
            else getattr(function, "id", "an expression")
        )
        if here is function:  # a method of the value, or of what keeps it
            harmless = name in HARMLESS | KEEPING | FORMING | SHOWING
            return (None if harmless else f"line {call.lineno} calls its {name}"), set(), False
        if name in SHOWING:
            return None, set(), True
        if name in KEEPING and isinstance(function, ast.Attribute):
            if isinstance(function.value, ast.Name):
                return None, {function.value.id}, True
            return f"line {call.lineno} keeps it where it cannot be followed", set(), True
        if name in FORMING:
            return None, set(), False
        return f"line {call.lineno} gives it to {name}", set(), True


def _assigned(statement: ast.Assign | ast.AugAssign | ast.AnnAssign) -> tuple[str | None, set[str]]:
    """Returns the names that a value is given to, or why it cannot be followed there."""
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    names = set()
    for target in targets:
        if not isinstance(target, ast.Name):
            return f"line {statement.lineno} keeps it where it cannot be followed", set()
        names.add(target.id)
    return None, names


def _called(scope: ast.AST) -> Iterator[str]:
    for node in ast.walk(scope):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id


def _line(parent: ast.AST, here: ast.AST) -> int:
    return int(getattr(parent, "lineno", getattr(here, "lineno", 0)))
