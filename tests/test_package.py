"""What a wheel of the package holds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "flopwise"


def data_files() -> list[Path]:
    """Files of the package that are no modules."""
    found = [path for path in PACKAGE.rglob("*") if path.is_file()]
    return [p for p in found if p.suffix not in (".py", ".pyc") and "__pycache__" not in p.parts]


@pytest.mark.parametrize("path", data_files(), ids=lambda path: path.name)
def test_every_data_file_is_packed(path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["flopwise"]
    assert any(path in PACKAGE.glob(pattern) for pattern in patterns), path
