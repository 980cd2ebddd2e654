"""What the tests of the input kit share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from flopwise.kit.input import notices


@pytest.fixture(autouse=True)
def _everything_is_said_again() -> Iterator[None]:
    torch.set_num_threads(1)
    notices.forget()
    yield
    notices.forget()
