"""From a script to its ledger, and what comes of windows that are missing, damaged or not what they say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Go = Callable[..., Any]


def test_try(go: Go) -> None:
    done = go("train(400); print('end')", profile=True, steps=30, warmup=5)
    print(done.err)
    print(done.record.ledger_reason)
    assert 0
