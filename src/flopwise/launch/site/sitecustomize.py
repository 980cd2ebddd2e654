"""Start-up hook of every Python process below `flopwise run`: first on PYTHONPATH, standard library only.

It hands over to the sitecustomize that it hides, takes its own folder off sys.path again, and waits for torch to be
imported; only then is any other part of flopwise loaded. Without FLOPWISE_RUN in the environment it does nothing.
Most processes never import torch: so nothing is imported here that Python has not loaded by itself.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def _hand_over(here: str) -> None:
    """Runs the sitecustomize that ours hides, as Python itself would have, and puts it in our place."""
    sys.path[:] = [p for p in sys.path if not p or os.path.abspath(p) != here]
    spec = _find("sitecustomize", None, None, None)
    if spec is None or spec.loader is None:
        return  # sys.modules keeps ours, which the import system still asks for
    from importlib.util import module_from_spec

    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop("sitecustomize", None)
        raise


def _find(name: str, path: Any, target: Any, but: Any) -> Any:
    """Returns the spec that the finders on sys.meta_path give for a module, `but` one of them not asked."""
    for finder in list(sys.meta_path):
        find_spec = getattr(finder, "find_spec", None)
        if finder is but or find_spec is None:
            continue
        spec = find_spec(name, path, target)
        if spec is not None:
            return spec
    return None


class _AfterTorch:
    """A finder that finds nothing itself: it has others find torch, and learns when torch has been imported.

    It stays until then: a script may ask for torch's spec many times before it imports torch, or never import it.
    """

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        spec = _find(name, path, target, self)
        loader: Any = getattr(spec, "loader", None)
        run = getattr(loader, "exec_module", None)
        if run is None:
            return spec

        def exec_module(module: Any) -> None:
            if vars(loader).get("exec_module") is exec_module:
                del loader.exec_module
            run(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                _attach(self._package)

        try:
            loader.exec_module = exec_module
        except Exception:
            _complain("its import cannot be watched here")
        return spec


def _load(package: str) -> None:
    """Loads flopwise from the folder that started this run, unless it is there."""
    if "flopwise" in sys.modules:
        return
    from importlib.util import module_from_spec, spec_from_file_location

    spec: Any = spec_from_file_location(
        "flopwise", os.path.join(package, "__init__.py"), submodule_search_locations=[package]
    )
    module = module_from_spec(spec)
    sys.modules["flopwise"] = module
    spec.loader.exec_module(module)


def _attach(package: str) -> None:
    """Loads flopwise from the folder that started this run, and attaches. Never raises."""
    try:
        _load(package)
        from flopwise import bootstrap

        bootstrap.attach()
    except Exception as error:
        _complain(f"{type(error).__name__}: {error}")


def _redirect(package: str, apart: str) -> None:
    """Has this process of a trial write into the trial's own folder. If that fails it ends: it would write elsewhere."""
    try:
        _load(package)
        from flopwise.launch import redirect

        redirect.install(apart)
    except BaseException as error:
        sys.stderr.write(f"flopwise: cannot redirect what this process writes ({error!r})\n")
        sys.stderr.flush()
        os._exit(70)


def _complain(why: str) -> None:
    try:  # noqa: SIM105 - contextlib is not loaded yet
        sys.stderr.write(
            f"flopwise: could not attach to torch ({why}); the script runs unmeasured\n"
        )
    except Exception:
        pass


def _main() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    package = os.path.dirname(os.path.dirname(here))
    apart = os.environ.get("FLOPWISE_APART")
    if apart:
        _redirect(package, apart)
    if not os.environ.get("FLOPWISE_RUN") or os.environ.get("FLOPWISE_DISABLE", "") not in (
        "",
        "0",
    ):
        _hand_over(here)
    elif "torch" in sys.modules:  # a .pth file has imported it
        _attach(package)
        _hand_over(here)
    else:
        ours = _AfterTorch(package)
        sys.meta_path.insert(0, ours)
        try:
            _hand_over(here)
        finally:
            # A hook of the user's may have come before ours: put ours first again, to see what theirs finds.
            if ours in sys.meta_path:
                sys.meta_path.remove(ours)
                sys.meta_path.insert(0, ours)


_main()
