"""A cache of ceilings that holds what a test puts into it, and a measurement that only notes what it is asked for."""

from __future__ import annotations

from typing import Any

import pytest

from flopwise.hardware import ceilings


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A cache that holds `record` for any key, and a measurement that notes what it was asked for."""
    held: dict[str, Any] = {"record": None, "asked": []}

    def obtain(threads: int | None, **options: Any) -> Any:
        held["asked"].append((threads, options["key"]))
        error = held.get("error")
        if error is not None:
            raise error
        return held["record"], None

    monkeypatch.setattr(ceilings, "load", lambda key: (held["record"], None))
    monkeypatch.setattr(ceilings, "obtain", obtain)
    return held
