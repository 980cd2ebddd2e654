"""docs/command-line.md is what the parsers say, and every command and option says what it does."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from types import ModuleType

import pytest

from flopwise.cli import COMMANDS, build_parser

Tool = Callable[[str], ModuleType]


def test_the_page_is_current(tool: Tool) -> None:
    page = tool("command_line_page")
    assert page.PAGE.read_text("utf-8") == page.render(), "run tools/command_line_page.py"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_has_help(name: str, tool: Tool) -> None:
    (commands,) = [
        a for a in build_parser()[0]._actions if isinstance(a, argparse._SubParsersAction)
    ]
    assert {a.dest: a.help for a in commands._choices_actions}[name]
    parser = tool("command_line_page").parser_of(name)
    assert parser.description
    assert [a.option_strings or a.dest for a in parser._actions if not a.help] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_on_the_page(name: str, tool: Tool) -> None:
    page = tool("command_line_page")
    text = page.render().split(f"## flopwise {name}\n")[1].split("\n## ")[0]
    shown = [
        option
        for action in page.parser_of(name)._actions
        if action.help != argparse.SUPPRESS and not isinstance(action, argparse._HelpAction)
        for option in action.option_strings
    ]
    assert shown
    assert [
        option for option in shown if f"`{option}" not in text and f", {option}" not in text
    ] == []
