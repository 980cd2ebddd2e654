"""flopwise: raises the MFU (Model FLOPs Utilization) of PyTorch training, and proves it.

The package is lazy: importing it loads neither torch nor any room.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from flopwise._version import __version__

if TYPE_CHECKING:
    from flopwise.meter.marks import step

__all__ = ["__version__", "step"]

_LAZY = {"step": "flopwise.meter.marks"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'flopwise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
