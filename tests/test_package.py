"""The package itself: lazy, typed, and with no more in it than it says."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import flopwise

LOADED = """
import json, sys
before = set(sys.modules)
exec(sys.argv[1])
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def loaded(code: str) -> set[str]:
    done = subprocess.run([sys.executable, "-c", LOADED, code], capture_output=True, check=True)
    return set(json.loads(done.stdout))


def test_importing_it_loads_nothing_else() -> None:
    new = loaded("import flopwise; flopwise.__version__; dir(flopwise)")
    assert {name for name in new if name.startswith("flopwise")} == {
        "flopwise",
        "flopwise._version",
    }
    assert "torch" not in new


def test_step_can_be_called_without_a_meter_and_loads_no_torch() -> None:
    assert "torch" not in loaded("import flopwise; flopwise.step()")


def test_what_it_offers() -> None:
    assert dir(flopwise) == ["__version__", "step"]
    assert callable(flopwise.step)


def test_what_it_does_not_offer() -> None:
    with pytest.raises(AttributeError, match="module 'flopwise' has no attribute 'measure'"):
        flopwise.measure  # noqa: B018


def test_as_a_module_it_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flopwise", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"flopwise {flopwise.__version__}\n"


def test_it_is_typed_and_brings_its_tables_and_its_hook() -> None:
    folder = Path(flopwise.__file__).parent
    for name in ("py.typed", "hardware/accelerators.toml", "launch/site/sitecustomize.py"):
        assert (folder / name).is_file(), name


ROOMS = ("meter", "fixes", "flops", "records", "trials", "bootstrap.py", "errors.py", "units.py")


def top_level_imports(file: Path) -> set[str]:
    """Returns the packages that a module imports as soon as it is loaded, type checking apart."""
    found = set()
    for node in ast.parse(file.read_text("utf-8")).body:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module).partition(".")[0])
    return found


def test_what_runs_in_the_users_process_needs_only_torch() -> None:
    package = Path(flopwise.__file__).parent
    allowed = {*sys.stdlib_module_names, "torch", "flopwise"}
    files = [f for room in ROOMS for f in [package / room, *(package / room).rglob("*.py")]]
    foreign = {f.name: top_level_imports(f) - allowed for f in files if f.is_file()}
    assert len(foreign) > 50
    assert {name: names for name, names in foreign.items() if names} == {}


def test_the_start_up_hook_loads_nothing_that_python_has_not_loaded() -> None:
    site = Path(flopwise.__file__).with_name("launch") / "site" / "sitecustomize.py"
    assert top_level_imports(site) == {"__future__", "os", "sys"}
