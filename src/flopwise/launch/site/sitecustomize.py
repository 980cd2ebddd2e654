"""Start-up hook of every Python process below `flopwise run`: first on PYTHONPATH, standard library only.

It hands over to the sitecustomize that it hides, takes its own folder off sys.path again, and waits for torch to be
imported; only then is any other part of flopwise loaded. Without FLOPWISE_RUN in the environment it does nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any


def _hand_over(here: str) -> None:
    """Runs the sitecustomize that ours hides, as Python itself would have, and puts it in our place."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    sys.path[:] = [p for p in sys.path if not _same(p, here)]
    ours = sys.modules.pop("sitecustomize", None)
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        if ours is not None:
            sys.modules["sitecustomize"] = ours
        return
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop("sitecustomize", None)
        raise


def _same(path: str, here: str) -> bool:
    return bool(path) and os.path.abspath(path) == here


class _AfterTorch:
    """A finder that finds nothing itself: it only learns when torch has been imported."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        from importlib.util import find_spec

        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        spec = find_spec("torch")
        if spec is None or spec.loader is None or not hasattr(spec.loader, "exec_module"):
            return spec
        loader: Any = spec.loader
        run, package = loader.exec_module, self._package

        def exec_module(module: Any) -> None:
            with contextlib.suppress(AttributeError):
                del loader.exec_module
            run(module)
            _attach(package)

        with contextlib.suppress(Exception):
            loader.exec_module = exec_module
        return spec


def _attach(package: str) -> None:
    """Loads flopwise from the folder that started this run, and attaches. Never raises."""
    try:
        if "flopwise" not in sys.modules:
            from importlib.util import module_from_spec, spec_from_file_location

            spec: Any = spec_from_file_location(
                "flopwise",
                os.path.join(package, "__init__.py"),
                submodule_search_locations=[package],
            )
            module = module_from_spec(spec)
            sys.modules["flopwise"] = module
            spec.loader.exec_module(module)
        from flopwise import bootstrap

        bootstrap.attach()
    except Exception as error:
        with contextlib.suppress(Exception):
            sys.stderr.write(
                f"flopwise: could not attach ({type(error).__name__}: {error}); the script runs unmeasured\n"
            )


def _main() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    if os.environ.get("FLOPWISE_RUN") and os.environ.get("FLOPWISE_DISABLE", "") in ("", "0"):
        sys.meta_path.insert(0, _AfterTorch(os.path.dirname(os.path.dirname(here))))
    _hand_over(here)


_main()
