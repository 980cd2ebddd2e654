"""What os.scandir gives for a folder that is partly the user's and partly a trial's own: see `view`."""

from __future__ import annotations

import errno
import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from flopwise.launch.view import View


class Entry:
    """An os.DirEntry of a folder that is partly the script's."""

    def __init__(self, view: View, name: Any, path: Any, resolved: str) -> None:
        self.name, self.path = name, path
        self._view, self._resolved = view, resolved

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        view = self._view
        resolved = view.resolve(self._resolved) if follow_symlinks else self._resolved
        seen = view.exists(resolved)
        if seen is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.path)
        return seen

    def inode(self) -> int:
        return self.stat(follow_symlinks=False).st_ino

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_ISDIR, follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_ISREG, follow_symlinks)

    def is_symlink(self) -> bool:
        return self._is(stat.S_ISLNK, False)

    def is_junction(self) -> bool:
        return False

    def _is(self, kind: Callable[[int], bool], follow: bool) -> bool:
        try:
            return kind(self.stat(follow_symlinks=follow).st_mode)
        except OSError:
            return False


class Entries:
    """An iterator over them, as os.scandir gives it."""

    def __init__(self, view: View, path: Any, resolved: str) -> None:
        as_bytes = isinstance(path, bytes)
        given = os.fspath(path) if not isinstance(path, int) else ""
        base = resolved.rstrip("/")

        def entries() -> Iterator[Entry]:
            for name in view.names(resolved):
                word: Any = os.fsencode(name) if as_bytes else name
                whole = word if isinstance(path, int) else os.path.join(given, word)
                yield Entry(view, word, whole, f"{base}/{name}")

        view.names(resolved)  # raises what it has to now
        self._entries = entries()

    def __iter__(self) -> Entries:
        return self

    def __next__(self) -> Entry:
        return next(self._entries)

    def __enter__(self) -> Entries:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends it."""
        self._entries = iter(())
