"""Libraries that open files by their paths themselves, in C++ or Rust: they are given the path of a trial's own copy.

Standard library only, and only what Python has loaded by itself.
"""

from __future__ import annotations

import os
import stat
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from flopwise.launch.view import View

#: Functions of libraries that open a file by its path themselves: module, name in it, position of the path, and how.
LIBRARIES = (
    ("_sqlite3", "connect", 0, "database"),
    ("torch", "_C.PyTorchFileWriter", 0, "new"),
    ("torch", "_C.PyTorchFileReader", 0, "read"),
    ("torch", "UntypedStorage.from_file", 0, "shared"),
    ("torch", "_C.ScriptModule.save", 1, "new"),
    ("torch", "_C.import_ir_module", 1, "read"),
    ("torch", "_C._autograd._ProfilerResult.save", 1, "new"),
    ("safetensors._safetensors_rust", "serialize_file", 1, "new"),
    ("safetensors._safetensors_rust", "safe_open", 0, "read"),
    ("pyarrow", "memory_map", 0, "mode"),
    ("pyarrow", "OSFile", 0, "mode"),
    ("cv2", "imwrite", 0, "new"),
    ("cv2", "imread", 0, "read"),
)


def watch(places: Places) -> None:
    """Puts ours into each library that is loaded, and into the others once they are."""
    finder = _Finder(places)
    for name in {library[0] for library in LIBRARIES} & set(sys.modules):
        finder.loaded(name)
    sys.meta_path.insert(0, finder)


class Places:
    """Where libraries are to open files."""

    def __init__(self, view: View) -> None:
        self.view = view

    def place(self, path: Any, how: str) -> Any:
        """Returns the path that a library is to open instead of `path`.

        Args:
            path: as it was given; what is no path is returned as it is.
            how: "read", "new" (its content is not wanted) or "keep".
        """
        if not isinstance(path, (str, bytes, os.PathLike)):
            return path
        if how == "read":
            return self._to_read(path) if self.view.touched() else path
        resolved = self._resolved(path)
        if self.view.is_free(resolved):
            return path
        seen = self.view.exists(resolved)
        if seen is not None and stat.S_ISDIR(seen.st_mode):
            return path
        return self.view.own(resolved, empty=how == "new")

    def _to_read(self, path: Any) -> Any:
        name = self.view.absolute(os.fsdecode(path))
        if self.view.is_free(name):
            return path
        resolved, real = self.view.find(name)
        return real or self.view.upper(
            resolved
        )  # where nothing is: the library says so in its own words

    def _resolved(self, path: Any) -> str:
        return self.view.resolve(os.fsdecode(path))

    def database(self, path: Any) -> Any:
        """Returns where a database of SQLite is to be opened, with the files that it keeps beside it."""
        text = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""
        if not text or text == ":memory:":
            return path
        if not text.startswith("file:"):
            return self._database(text)
        name, mark, options = text[5:].partition("?")
        if not name or name == ":memory:" or "mode=memory" in options or name.startswith("//"):
            return path
        if "mode=ro" in options or "immutable=1" in options:
            return f"file:{self.place(name, 'read')}{mark}{options}"
        return f"file:{self._database(name)}{mark}{options}"

    def _database(self, path: str) -> str:
        for end in ("-wal", "-shm", "-journal"):
            if self.view.exists(self._resolved(path + end)) is not None:
                self.place(path + end, "keep")
        return os.fsdecode(self.place(path, "keep"))

    def patched(self, original: Any, position: int, how: str) -> Callable[..., Any]:
        """Returns a library's function that opens where `place` says."""

        def placed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
            if len(args) <= position:
                return args
            path = args[position]
            if how == "database":
                path = self.database(path)
            elif how == "mode":
                mode = str(args[position + 1] if len(args) > position + 1 else kwargs.get("mode"))
                reads = mode in ("None", "r", "rb")
                path = self.place(path, "read" if reads else "keep")
            elif how == "shared":
                shared = args[position + 1] if len(args) > position + 1 else kwargs.get("shared")
                path = self.place(path, "keep" if shared else "read")
            else:
                path = self.place(path, how)
            return (*args[:position], path, *args[position + 1 :])

        if isinstance(original, type):
            try:
                return _kind(original, placed)
            except TypeError:  # it has no subclasses
                pass

        def opens(*args: Any, **kwargs: Any) -> Any:
            return original(*placed(args, kwargs), **kwargs)

        opens.__name__ = getattr(original, "__name__", "opens")
        opens.__doc__ = getattr(original, "__doc__", None)
        return opens


class _Finder:
    """A finder that finds nothing itself: it learns when one of `LIBRARIES` has been imported."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._names = {library[0] for library in LIBRARIES}
        self._asking: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self._names or name in self._asking:
            return None  # another finder that asks the rest, as ours does, is asking ours
        self._asking.add(name)
        try:
            spec = self._found(name, path, target)
        finally:
            self._asking.discard(name)
        loader: Any = getattr(spec, "loader", None)
        run = getattr(loader, "exec_module", None)
        if run is None:
            return spec
        given = vars(loader).get("exec_module") if hasattr(loader, "__dict__") else None

        def exec_module(module: Any) -> None:
            if vars(loader).get("exec_module") is exec_module:
                if given is not None:
                    loader.exec_module = given
                else:
                    del loader.exec_module
            run(module)
            self.loaded(name)

        try:  # noqa: SIM105 - contextlib is not loaded yet
            loader.exec_module = exec_module
        except Exception:
            pass
        return spec

    def _found(self, name: str, path: Any, target: Any) -> Any:
        """Returns the spec that the finders after ours give; one before it that asks the rest would be asked twice."""
        finders = list(sys.meta_path)
        for finder in finders[finders.index(self) + 1 :] if self in finders else finders:
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find is not None else None
            if spec is not None:
                return spec
        return None

    def loaded(self, name: str) -> None:
        """Puts ours into a library that has been imported; what it does not have is left alone."""
        for module, inner, position, how in LIBRARIES:
            if module != name:
                continue
            *outer, last = inner.split(".")
            owner: Any = sys.modules.get(module)
            for part in outer:
                owner = getattr(owner, part, None)
            original = getattr(owner, last, None)
            if original is None:
                continue
            patched: Any = self._places.patched(original, position, how)
            try:
                setattr(owner, last, staticmethod(patched) if how == "shared" else patched)
            except (AttributeError, TypeError):
                continue


def _kind(original: Any, placed: Callable[..., tuple[Any, ...]]) -> type:
    """Returns a class in the place of a library's, which opens where `placed` says."""

    class Placed(original):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*placed(args, kwargs), **kwargs)

    Placed.__name__, Placed.__qualname__ = original.__name__, original.__qualname__
    Placed.__module__, Placed.__doc__ = original.__module__, original.__doc__
    return Placed
