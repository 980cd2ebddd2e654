"""Stored sample records, and records with anything in them."""

from __future__ import annotations

import dataclasses
import types
import typing
from pathlib import Path

import pytest
from hypothesis import strategies as st

from flopwise.records import run, store, verdict

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def sample():
    """A function from the name of a stored record to the record."""

    def load(name: str) -> run.RunRecord | verdict.TuneRecord:
        data = (DATA / f"{name}.json").read_bytes()
        tuned = name.startswith("tune")
        kind, schema = (
            (verdict.TuneRecord, verdict.SCHEMA) if tuned else (run.RunRecord, run.SCHEMA)
        )
        return store.decode(data, kind, schema, name)

    return load


@pytest.fixture(scope="session")
def any_record():
    """A function from a class of records to a strategy that fills every field, hostile text included."""
    hostile = st.one_of(
        st.text(st.characters(), max_size=12),  # every category, lone surrogates too
        st.text("a漢é\u0301👩\u200d🚀\u202e\x1b[]/\\\n\t\r\x07\x9b\u2028 ·█", max_size=200),
        st.sampled_from(
            [
                "[red]x[/]",
                "[link=http://a]b[/link]",
                "\x1b[2J\x1b]0;owned\x07",
                "a" * 300,
                "漢" * 150,
                "x " * 150,
                "complete",
                "cpu",
                ":warning:",
            ]
        ),
    )
    leaves = {
        str: hostile,
        int: st.integers(-(10**25), 10**25),
        float: st.floats(),
        bool: st.booleans(),
        type(None): st.none(),
    }

    def strategy(hint):
        if dataclasses.is_dataclass(hint):
            hints = typing.get_type_hints(hint)
            return st.builds(hint, **{name: strategy(part) for name, part in hints.items()})
        if hint in leaves:
            return leaves[hint]
        origin, parts = typing.get_origin(hint), typing.get_args(hint)
        if origin is list:
            return st.lists(strategy(parts[0]), max_size=3)
        if origin is dict:
            return st.dictionaries(strategy(parts[0]), strategy(parts[1]), max_size=3)
        if origin is tuple:
            return st.tuples(*map(strategy, parts))
        assert origin is types.UnionType, hint
        return st.one_of(*map(strategy, parts))

    return strategy
