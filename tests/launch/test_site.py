"""The start-up hook, on a torch and a flopwise that only leave a word: what comes in, and what stays as it was."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flopwise.launch.command import SITE, environment

Python = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def python(tmp_path: Path) -> Python:
    """Runs code in a fresh Python below the hook. Attaching prints `attached`; torch prints `torch` when loaded."""
    package = tmp_path / "flopwise-copy"
    shutil.copytree(SITE, package / "launch" / "site", ignore=lambda *_: ["__pycache__"])
    (package / "__init__.py").touch()
    (package / "bootstrap.py").write_text("def attach(): print('attached', flush=True)\n")
    (tmp_path / "lib" / "torch").mkdir(parents=True)
    (tmp_path / "lib" / "torch" / "__init__.py").write_text("print('torch', flush=True)\n")

    def run(
        code: str, *options: str, path: str | None = None, **extra: str
    ) -> subprocess.CompletedProcess[str]:
        theirs = os.pathsep.join([str(tmp_path / "lib"), *([path] if path else [])])
        clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        env = {
            **clean,
            "PYTHONPATH": os.pathsep.join([str(package / "launch" / "site"), theirs]),
            "FLOPWISE_RUN": str(tmp_path),
            **extra,
        }
        return subprocess.run(
            [sys.executable, *options, "-c", code],
            env=env, cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip

    return run


def test_it_attaches_once_when_torch_has_been_imported(python: Python) -> None:
    done = python("import os; print('before'); import torch; import torch; print('after')")
    assert done.stdout == "before\ntorch\nattached\nafter\n"
    assert done.stderr == ""


@pytest.mark.parametrize(
    "ask",
    [
        "import importlib.util as u; assert u.find_spec('torch'); u.find_spec('torch')",
        "import pkgutil; assert pkgutil.get_loader('torch')"
        if sys.version_info < (3, 12)
        else "import importlib.util as u; assert u.find_spec('torch')",
    ],
)
def test_a_script_may_ask_for_torch_before_it_imports_it(python: Python, ask: str) -> None:
    assert python(f"{ask}; print('asked'); import torch").stdout == "asked\ntorch\nattached\n"


def test_a_torch_that_fails_and_works_the_second_time(python: Python, tmp_path: Path) -> None:
    (tmp_path / "lib/torch/__init__.py").write_text(
        "import os, sys\n"
        "if not hasattr(sys, 'second'): sys.second = 1; raise ImportError('libcudart')\n"
        "print('torch')"
    )
    done = python("try: import torch\nexcept ImportError as e: print(e)\nimport torch")
    assert done.stdout == "libcudart\ntorch\nattached\n"


def test_a_lazy_loader_of_the_users(python: Python) -> None:
    done = python(
        "import importlib.util as u, sys\n"
        "spec = u.find_spec('torch')\n"
        "loader = u.LazyLoader(spec.loader); spec.loader = loader\n"
        "torch = u.module_from_spec(spec); sys.modules['torch'] = torch; loader.exec_module(torch)\n"
        "print('lazy'); torch.anything_at_all = 1; torch.__dict__.get('x')\n"
        "print('used')"
    )
    assert done.stdout == "lazy\ntorch\nattached\nused\n"


@pytest.mark.parametrize("name", ["FLOPWISE_DISABLE", "FLOPWISE_RUN"])
def test_without_a_run_or_disabled_nothing_happens(python: Python, name: str) -> None:
    value = "1" if name == "FLOPWISE_DISABLE" else ""
    done = python(
        "import sys, torch; print(len(sys.meta_path), 'flopwise' in sys.modules)", **{name: value}
    )
    plain = subprocess.run(
        [sys.executable, "-c", "import sys; print(len(sys.meta_path))"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == f"torch\n{plain.stdout.strip()} False\n"


def test_disable_0_means_not_disabled(python: Python) -> None:
    assert "attached" in python("import torch", FLOPWISE_DISABLE="0").stdout


SEEN = """
import json, sys
print(json.dumps([sys.path, sorted(sys.modules), sys.flags.__repr__(), sys.argv, sys.warnoptions]))
"""


@pytest.mark.parametrize("path", [None, "", "relative", "/a:/b", ":/a"])
def test_path_and_modules_are_as_without_us(tmp_path: Path, path: str | None) -> None:
    (tmp_path / "x.py").write_text(SEEN)
    base = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    base |= {} if path is None else {"PYTHONPATH": path}
    seen = []
    for env in (base, environment(tmp_path, base)):
        done = subprocess.run(
            [sys.executable, "x.py", "-a"],
            env=env, cwd=tmp_path, capture_output=True, text=True, check=True,
        )  # fmt: skip
        seen.append(json.loads(done.stdout))
    assert seen[1][0] == seen[0][0]
    assert set(seen[1][1]) - set(seen[0][1]) <= {"sitecustomize", "__future__"}
    assert seen[1][2:] == seen[0][2:]


# ---------------------------------------------------------------------- a sitecustomize of the user's


def test_theirs_runs_as_a_module_and_ours_is_gone(python: Python, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/sitecustomize.py").write_text(
        "print('mine', __name__, __file__)\nvalue = 3\n"
    )
    done = python("import sitecustomize; print(sitecustomize.value); import torch", path="mine")
    where = tmp_path / "mine" / "sitecustomize.py"
    assert done.stdout == f"mine sitecustomize {where}\n3\ntorch\nattached\n"


def test_theirs_runs_as_a_package(python: Python, tmp_path: Path) -> None:
    package = tmp_path / "mine" / "sitecustomize"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "from . import part\nfrom sitecustomize.part import word\n"
    )
    (package / "part.py").write_text("print('part'); word = 1\n")
    done = python("import sitecustomize.part; import torch", path="mine")
    assert (done.stdout, done.stderr) == ("part\ntorch\nattached\n", "")


@pytest.mark.parametrize(
    ("error", "code"), [("ValueError('x')", 0), ("ImportError('x')", 0), ("SystemExit(9)", 1)]
)
def test_theirs_may_raise_as_it_does_without_us(
    python: Python, tmp_path: Path, error: str, code: int
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/sitecustomize.py").write_text(f"raise {error}\n")
    plain = subprocess.run(
        [sys.executable, "-c", "import sys; print('sitecustomize' in sys.modules)"],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "mine")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    done = python("import sys; print('sitecustomize' in sys.modules)", path=str(tmp_path / "mine"))
    assert done.stdout == plain.stdout
    assert done.stderr.splitlines()[:2] == plain.stderr.splitlines()[:2]
    assert done.returncode == plain.returncode
    assert (done.returncode != 0) == (code != 0)
    if code == 0:
        assert "attached" in python("import torch", path=str(tmp_path / "mine")).stdout


@pytest.mark.parametrize(
    "search",
    ["importlib.util.find_spec(name)", "importlib.machinery.PathFinder.find_spec(name, sys.path)"],
)
def test_theirs_patches_the_import_of_torch_itself(
    python: Python, tmp_path: Path, search: str
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/sitecustomize.py").write_text(
        "import importlib.machinery, importlib.util, sys\n"
        "class Finder:\n"
        "    busy = False\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name != 'torch' or self.busy: return None\n"
        "        self.busy = True\n"
        f"        spec = {search}\n"
        "        self.busy = False\n"
        "        run = spec.loader.exec_module\n"
        "        def exec_module(module):\n"
        "            run(module); print('theirs')\n"
        "        spec.loader.exec_module = exec_module\n"
        "        return spec\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    words = python("import torch; print('after')", path="mine").stdout.split()
    assert sorted(words) == ["after", "attached", "theirs", "torch"]
    assert words[0] == "torch"
    assert words[-1] == "after"


def test_theirs_imports_torch(python: Python, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/sitecustomize.py").write_text("import torch\n")
    assert python("import torch; print('after')", path="mine").stdout == "torch\nattached\nafter\n"


# ---------------------------------------------------------------------- failures of ours


def test_a_failure_to_load_is_one_line_and_the_script_goes_on(
    python: Python, tmp_path: Path
) -> None:
    (tmp_path / "flopwise-copy" / "bootstrap.py").write_text("raise RuntimeError('broken')\n")
    done = python("import torch; print('after')")
    assert done.stdout == "torch\nafter\n"
    assert done.stderr == (
        "flopwise: could not attach to torch (RuntimeError: broken); the script runs unmeasured\n"
    )


def test_a_module_of_theirs_with_our_name_keeps_it(python: Python, tmp_path: Path) -> None:
    (tmp_path / "lib" / "flopwise.py").write_text("mine = True\n")
    done = python("import flopwise, torch; print(flopwise.mine)")
    assert done.stdout == "torch\nTrue\n"
    assert done.stderr.startswith("flopwise: could not attach to torch (ImportError")
    assert len(done.stderr.splitlines()) == 1
