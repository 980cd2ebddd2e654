"""The documented schema and the dataclasses are the same thing."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from pathlib import Path

import pytest

from flopwise.records import finding, ledger, run

DOCUMENT = Path(__file__).parents[2] / "docs" / "run-record.md"
CLASSES = {
    name: kind
    for name, kind in {**vars(run), **vars(ledger), **vars(finding)}.items()
    if isinstance(kind, type) and dataclasses.is_dataclass(kind)
}
SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean"}
UNITS = {  # end of the name -> unit that the document must give
    "_s": "s",
    "_frac": "share",
    "_bytes": "bytes",
    "_mhz": "MHz",
    "_w": "W",
    "_c": "°C",
    "_flops_per_s": "FLOP/s",
    "flops_per_step": "FLOP",
}


def documented() -> dict[str, list[list[str]]]:
    """Returns the rows of the table of each class: field, type, unit, null when, meaning."""
    tables: dict[str, list[list[str]]] = {}
    for part in re.split(r"^## ", DOCUMENT.read_text(encoding="utf-8"), flags=re.MULTILINE):
        name = re.match(r"`(\w+)`\n", part)
        if name:
            rows = re.findall(r"^\| `.*\|$", part, flags=re.MULTILINE)
            tables[name.group(1)] = [
                [cell.strip().strip("`") for cell in row[1:-1].split("|")] for row in rows
            ]
    return tables


TABLES = documented()


def json_type(hint: object) -> str:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        return " or ".join(json_type(part) for part in parts)
    if origin is list:
        return f"array of {json_type(parts[0])}"
    if origin is dict:
        return f"object of {json_type(parts[0])} to {json_type(parts[1])}"
    if origin is tuple:
        return f"[{', '.join(map(json_type, parts))}]"
    if hint is type(None):
        return "null"
    assert isinstance(hint, type)
    return SCALARS.get(hint) or hint.__name__


def test_every_class_is_documented_and_nothing_else():
    assert set(TABLES) == set(CLASSES)
    assert run.SCHEMA in DOCUMENT.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", CLASSES)
def test_every_field_is_documented_with_its_type_in_order(name):
    hints = typing.get_type_hints(CLASSES[name])
    assert [row[:2] for row in TABLES[name]] == [
        [field, json_type(hint)] for field, hint in hints.items()
    ]


@pytest.mark.parametrize("name", CLASSES)
def test_null_has_its_reason_and_only_where_it_may_occur(name):
    for field, kind, unit, null_when, meaning in TABLES[name]:
        assert meaning, field
        assert null_when, field
        assert (null_when == "never") == (not kind.endswith("or null")), field
        if kind.startswith("number"):
            assert unit, field


@pytest.mark.parametrize("name", CLASSES)
def test_units_agree_with_the_ends_of_the_names(name):
    for field, kind, unit, *_ in TABLES[name]:
        if kind.split(" ")[0] in ("number", "integer"):
            for end, wanted in UNITS.items():
                if field.endswith(end) and not field.endswith("per_s"):
                    assert unit == wanted, field


def test_the_comparison_can_fail():
    @dataclasses.dataclass(frozen=True)
    class Changed(run.Pause):
        added: int | None = None

    shown = [[field, json_type(hint)] for field, hint in typing.get_type_hints(Changed).items()]
    assert shown[-1] == ["added", "integer or null"]
    assert shown[:-1] == [row[:2] for row in TABLES["Pause"]]
    assert json_type(dict[str, tuple[float, float]]) == "object of string to [number, number]"
