"""Writes docs/command-line.md from the parsers themselves, so that the page cannot say anything else.

python tools/command_line_page.py            writes the page
python tools/command_line_page.py --check    exit code 1 if the page is not current
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from flopwise.cli import COMMANDS, build_parser

PAGE = Path(__file__).resolve().parent.parent / "docs" / "command-line.md"
HEAD = """# Command line

<!-- Written by tools/command_line_page.py from the parsers. Change the help texts there, and run it again. -->

`flopwise COMMAND --help` says the same in the terminal. Options of flopwise stand before the script; everything from the
script on is the script's own, also where it looks like one of ours.

Exit codes: `run` returns the script's own (128 + n if signal n ended it). Whatever is the user's to solve is one
message and exit code 2. `tune` returns 0 also when nothing was proven faster. `analyze` returns 1 where a trace could be read in
part only, `compare` where a limit of `--fail-above` was passed.

`FLOPWISE_DISABLE=1` in the environment keeps the meter out: the script runs as if it had been started without flopwise.
`XDG_CACHE_HOME` moves the cache of measured ceilings.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 once the page is written, or with --check if it is current."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--check", action="store_true", help="write nothing; 1 if not current")
    check = options.parse_args(argv).check
    page = render()
    if not check:
        PAGE.write_text(page, encoding="utf-8")
        return 0
    if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page:
        print(f"{PAGE.name} is not current: run tools/command_line_page.py", file=sys.stderr)
        return 1
    return 0


def render() -> str:
    """Returns the page as Markdown."""
    parts = [HEAD]
    for name in COMMANDS:
        parser = parser_of(name)
        parts.append(
            f"## flopwise {name}\n\n{parser.description}\n\n```text\n{usage(parser)}\n```\n"
        )
        parts += tables(parser)
    return "\n".join(parts)


def parser_of(name: str) -> argparse.ArgumentParser:
    """Returns the parser of one command."""
    for action in build_parser()[0]._actions:
        if isinstance(action, argparse._SubParsersAction):
            parser: argparse.ArgumentParser = action.choices[name]
            return parser
    raise LookupError(name)


def tables(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yields a table of the words and options of a command, and one of each named group."""
    own = {parser._positionals, parser._optionals}
    titled = [g for g in parser._action_groups if g not in own]
    for title, groups in (("", own), *((g.title or "", {g}) for g in titled)):
        actions = [a for a in parser._actions if any(a in g._group_actions for g in groups)]
        lines = list(rows(actions, parser))
        if lines:
            lead = [f"{title}:", ""] if title else []
            yield "\n".join([*lead, "| option | meaning |", "|---|---|", *lines]) + "\n"


def usage(parser: argparse.ArgumentParser) -> str:
    """Returns how the command is called, the same on every Python."""
    if parser.usage is not None:
        return parser.usage.replace("       ", "")
    words = [a.metavar for a in parser._actions if not a.option_strings]
    return " ".join([parser.prog, "[options]", *map(str, words)])


def rows(actions: Sequence[argparse.Action], parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yields one line of the table an option."""
    for action in actions:
        if isinstance(action, argparse._HelpAction) or action.help == argparse.SUPPRESS:
            continue
        value = action.metavar if action.nargs != 0 else None
        shown = ", ".join(f"{o} {value}" if value else o for o in action.option_strings)
        said = (action.help or "") % {"prog": parser.prog, "default": action.default}
        yield f"| `{shown or value}` | {said} |".replace("<", "&lt;")


if __name__ == "__main__":
    sys.exit(main())
