"""Edits of a parsed script: arguments of calls, statements before and after others, blocks around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import libcst as cst

from flopwise.patching.script import Block, Script, Statement, keyword

Change = Callable[[cst.Call], cst.Call]


@dataclass
class Edits:
    """What is to be changed in one script, all at once."""

    script: Script
    _calls: dict[int, list[Change]] = field(default_factory=dict)
    _before: dict[int, list[str]] = field(default_factory=dict)
    _after: dict[int, list[str]] = field(default_factory=dict)
    _wraps: dict[int, tuple[int, str]] = field(default_factory=dict)  # first statement: last, with
    _top: list[str] = field(default_factory=list)

    def change(self, call: cst.Call, change: Change) -> None:
        """Changes a call."""
        self._calls.setdefault(id(call), []).append(change)

    def before(self, statement: Statement, line: str) -> None:
        """Puts a line of code before a statement, once."""
        lines = self._before.setdefault(id(statement), [])
        if line not in lines:
            lines.append(line)

    def after(self, statement: Statement, line: str) -> None:
        """Puts a line of code behind a statement."""
        self._after.setdefault(id(statement), []).append(line)

    def wrap(self, statements: Sequence[Statement], header: str) -> None:
        """Puts neighbouring statements of one block into a `with`; `header` is what stands between `with` and the colon."""
        self._wraps[id(statements[0])] = (id(statements[-1]), header)

    def at_top(self, line: str) -> None:
        """Puts a line behind the imports at the top of the script, once."""
        if line not in self._top:
            self._top.append(line)

    def torch(self) -> str:
        """Returns the name that torch has all over the script; imports it where it has none."""
        for statement in self.script.module.body:
            for node in getattr(statement, "body", ()):
                if not isinstance(node, cst.Import):
                    continue
                for alias in node.names:
                    whole = cst.Module([]).code_for_node(alias.name)
                    if whole == "torch" and alias.asname is not None:
                        return cst.Module([]).code_for_node(alias.asname.name)
                    if whole.partition(".")[0] == "torch" and alias.asname is None:
                        return "torch"
        if "import torch" not in self._top:
            self._top.insert(0, "import torch")
        return "torch"

    def applied(self) -> str:
        """Returns the text of the script with all edits."""
        changed = self.script.module.visit(_Apply(self))
        assert isinstance(changed, cst.Module)
        return changed.code

    # ------------------------------------------------------------------ blocks

    def block(self, original: Block, updated: Block) -> list[Any]:
        """Returns the statements of a block after the edits that concern it."""
        body: list[Any] = []
        pairs = list(zip(original.body, updated.body, strict=True))
        while pairs:
            old, new = pairs.pop(0)
            inserted = [self._parsed(line) for line in self._before.get(id(old), ())]
            after = [self._parsed(line) for line in self._after.get(id(old), ())]
            if id(old) in self._wraps:
                last, header = self._wraps[id(old)]
                inside = [new]
                while id(old) != last:
                    old, new = pairs.pop(0)
                    inside.append(new)
                    after += [self._parsed(line) for line in self._after.get(id(old), ())]
                new = self._with(original, inside, header)
            if inserted:
                inserted[0], new = _share_blanks(inserted[0], new)
            body += [*inserted, new, *after]
        return body

    def top(self, module: cst.Module, body: list[Any]) -> cst.Module:
        """Returns the module with the lines that belong behind its imports."""
        if not self._top:
            return module.with_changes(body=body)
        place = _behind_imports(self.script.module)
        imports = [line for line in self._top if line.startswith("import ")]
        body = [*body[:place], *(self._parsed(line) for line in imports), *body[place:]]
        place += len(imports)
        lines = [self._parsed(line) for line in self._top if line not in imports]
        if not lines:
            return module.with_changes(body=body)
        if place < len(body):
            lines[0] = lines[0].with_changes(leading_lines=())
            following = body[place]
            if not _blank_first(following):
                blank = cst.EmptyLine(indent=False)
                body[place] = following.with_changes(
                    leading_lines=(blank, *following.leading_lines)
                )
        if place:
            first = lines[0]
            lines[0] = first.with_changes(leading_lines=(cst.EmptyLine(indent=False),))
        return module.with_changes(body=[*body[:place], *lines, *body[place:]])

    def _parsed(self, line: str) -> Any:
        return cst.parse_statement(line, self.script.module.config_for_parsing)

    def _with(self, around: Block, inside: list[Any], header: str) -> cst.With:
        indent = around.indent if isinstance(around, cst.IndentedBlock) else None
        leading = inside[0].leading_lines
        inside[0] = inside[0].with_changes(leading_lines=())
        shell = self._parsed(f"with {header}:\n    pass\n")
        assert isinstance(shell, cst.With)
        return shell.with_changes(
            body=cst.IndentedBlock(inside, indent=indent), leading_lines=leading
        )


class _Apply(cst.CSTTransformer):
    """Carries edits out. Nodes are told by identity, so the script's own module must be visited."""

    def __init__(self, edits: Edits) -> None:
        super().__init__()
        self._edits = edits

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        for change in self._edits._calls.get(id(original_node), ()):
            updated_node = change(updated_node)
        return updated_node

    def leave_IndentedBlock(
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> cst.BaseSuite:
        return updated_node.with_changes(body=self._edits.block(original_node, updated_node))

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:
        return self._edits.top(updated_node, self._edits.block(original_node, updated_node))


def with_keywords(values: dict[str, str], drop: Sequence[str] = ()) -> Change:
    """Returns the change that hands these values over by keyword, whatever stood there.

    Where the call unpacks a mapping (`**kwargs`), they go into it, so that none is handed over twice.
    """

    def change(call: cst.Call) -> cst.Call:
        args = [a for a in call.args if a.keyword is None or a.keyword.value not in drop or a.star]
        if args and args[-1] is not call.args[-1]:  # the last one is left out: end as it did
            args[-1] = args[-1].with_changes(comma=call.args[-1].comma)
        left = dict(values)
        for place, arg in enumerate(args):
            if arg.keyword is not None and arg.keyword.value in left:
                value = cst.parse_expression(left.pop(arg.keyword.value))
                args[place] = arg.with_changes(value=value)
        unpacked = [i for i, a in enumerate(args) if a.star == "**"]
        if unpacked and left:
            at = unpacked[-1]
            inside = cst.Module([]).code_for_node(args[at].value)
            given = ", ".join(f'"{name}": {value}' for name, value in left.items())
            args[at] = args[at].with_changes(value=cst.parse_expression(f"{{**{inside}, {given}}}"))
            left = {}
        return call.with_changes(args=_appended(args, left))

    return change


def with_positional(place: int, value: str) -> Change:
    """Returns the change that replaces the argument at this place."""

    def change(call: cst.Call) -> cst.Call:
        args = list(call.args)
        args[place] = args[place].with_changes(value=cst.parse_expression(value))
        return call.with_changes(args=args)

    return change


def _appended(args: list[cst.Arg], values: dict[str, str]) -> list[cst.Arg]:
    """Returns the arguments with more behind them, laid out as the ones that are there."""
    if not values:
        return args
    made = [cst.parse_expression(f"f({name}={value})") for name, value in values.items()]
    new = [call.args[0] for call in made if isinstance(call, cst.Call)]
    if not args:
        return _separated(new, cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")), None, [])
    last = args[-1]
    comma: Any = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    between = [a.comma for a in args[:-1] if isinstance(a.comma, cst.Comma)]
    if between and all(_breaks(c) for c in between):
        comma = between[-1].with_changes(
            whitespace_after=_without_comment(between[-1].whitespace_after)
        )
    if isinstance(last.comma, cst.Comma):  # a trailing comma stays one
        own = last.comma.whitespace_after
        tail: Any = last.comma.with_changes(whitespace_after=_without_comment(own))
        space = comma.whitespace_after
        if isinstance(space, cst.ParenthesizedWhitespace) and isinstance(
            own, cst.ParenthesizedWhitespace
        ):  # the comment on the last line stays on it
            kept = space.with_changes(first_line=own.first_line)
            last = last.with_changes(comma=comma.with_changes(whitespace_after=kept))
        else:
            last, tail = last.with_changes(comma=comma), last.comma
        return _separated(new, comma, tail, [*args[:-1], last])
    tail = last.whitespace_after_arg
    last = last.with_changes(comma=comma, whitespace_after_arg=cst.SimpleWhitespace(""))
    done = _separated(new, comma, None, [*args[:-1], last])
    done[-1] = done[-1].with_changes(whitespace_after_arg=tail)
    return done


def _separated(new: list[cst.Arg], comma: Any, tail: Any, before: list[cst.Arg]) -> list[cst.Arg]:
    plain = [arg.with_changes(whitespace_after_arg=cst.SimpleWhitespace("")) for arg in new]
    done = [*before, *(arg.with_changes(comma=comma) for arg in plain[:-1])]
    done.append(
        plain[-1].with_changes(comma=tail if tail is not None else cst.MaybeSentinel.DEFAULT)
    )
    return done


def _breaks(comma: cst.Comma) -> bool:
    return isinstance(comma.whitespace_after, cst.ParenthesizedWhitespace)


def _without_comment(space: Any) -> Any:
    """Returns a line break without the comment that belongs to the argument before it."""
    if not isinstance(space, cst.ParenthesizedWhitespace):
        return space
    plain = space.first_line.with_changes(comment=None, whitespace=cst.SimpleWhitespace(""))
    return space.with_changes(first_line=plain, empty_lines=())


def _share_blanks(inserted: Any, following: Any) -> tuple[Any, Any]:
    """Gives the blank lines before a statement to the line put before it, and leaves it its comments."""
    lines = list(following.leading_lines)
    count = 0
    while count < len(lines) and lines[count].comment is None:
        count += 1
    return (
        inserted.with_changes(leading_lines=lines[:count]),
        following.with_changes(leading_lines=lines[count:]),
    )


def _blank_first(statement: Any) -> bool:
    lines = statement.leading_lines
    return bool(lines) and lines[0].comment is None


def _behind_imports(module: cst.Module) -> int:
    """Returns the number of statements up to the last import at the top of a module."""
    place = 1 if module.get_docstring(clean=False) is not None else 0
    for number, statement in enumerate(module.body):
        if isinstance(statement, (cst.Try, cst.If)) and _imports(statement):
            place = number + 1
        elif isinstance(statement, cst.SimpleStatementLine):
            first = statement.body[0]
            if isinstance(first, (cst.Import, cst.ImportFrom)):
                place = number + 1
            elif not isinstance(first, (cst.Expr, cst.Assign)):
                break
        else:
            break
    return place


def _imports(statement: cst.CSTNode) -> bool:
    """Whether a compound statement holds imports and little else."""
    from flopwise.patching.script import descendants

    return any(
        isinstance(n, (cst.Import, cst.ImportFrom)) for n in descendants(statement)
    ) and not any(
        isinstance(n, (cst.FunctionDef, cst.For, cst.While)) for n in descendants(statement)
    )


def has_star(call: cst.Call) -> bool:
    """Whether a call unpacks positional arguments, whose places are then not known."""
    return any(a.star == "*" for a in call.args)


def given(call: cst.Call, name: str, place: int | None = None) -> cst.BaseExpression | None:
    """Returns what a call hands over by keyword, or at a place."""
    found = keyword(call, name)
    if found is not None:
        return found.value
    plain = [a for a in call.args if a.keyword is None and not a.star]
    return plain[place].value if place is not None and place < len(plain) else None
