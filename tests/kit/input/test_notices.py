from __future__ import annotations

import warnings

import pytest

from flopwise.errors import FlopwiseWarning
from flopwise.kit.input.notices import forget, say_once


def test_everything_is_said_once() -> None:
    with pytest.warns(FlopwiseWarning, match="flopwise: slow because of x"):
        say_once("slow because of x")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        say_once("slow because of x")
    with pytest.warns(FlopwiseWarning, match="of y"):
        say_once("slow because of y")
    forget()
    with pytest.warns(FlopwiseWarning, match="of x"):
        say_once("slow because of x")
