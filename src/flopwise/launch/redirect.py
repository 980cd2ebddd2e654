"""Has a process write into a folder of ours instead of the user's files, and read there what it has written.

Put in by the start-up hook of a trial, before the script: Python's functions that open, make, move, remove and list files are
replaced by ones that look at a `View` first. Libraries that open files by themselves: see `libraries`.
Standard library only, and only what Python has loaded by itself.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import stat
import sys

from flopwise.launch import libraries
from flopwise.launch import view as views
from flopwise.launch.entries import Entries

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from flopwise.launch.view import View

#: The view's folder and areas, for every process below a trial: the folder, then one a line, "+" free, "-" guarded.
APART = "FLOPWISE_APART"

_FOLLOWS = "follow_symlinks"
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_UNNAMED = getattr(os, "O_TMPFILE", 0) & ~getattr(os, "O_DIRECTORY", 0)


def value(folder: str, free: list[str], guarded: list[str]) -> str:
    """Returns what is to stand in the environment for `install`."""
    return "\n".join([folder, *(f"+{path}" for path in free), *(f"-{path}" for path in guarded)])


def install(given: str) -> None:
    """Puts everything in, for good."""
    folder, *areas = given.split("\n")
    free = [area[1:] for area in areas if area[:1] == "+"]
    guarded = [area[1:] for area in areas if area[:1] == "-"]
    _Redirect(views.View(folder, free, guarded)).install()


class _Put:
    """A function in the place of one of Python's. No function by itself: as an attribute of a class it must not become a method."""

    def __init__(self, original: Callable[..., Any], function: Callable[..., Any]) -> None:
        self.__name__ = self.__qualname__ = original.__name__
        self.__module__ = "io" if original is io.open else "os"  # where a pickle finds it
        self.__doc__ = getattr(original, "__doc__", None)
        self.__wrapped__ = original
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> str:
        return self.__name__


class _Redirect:
    """Python's file functions over a view."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.was: dict[str, Any] = {
            name: getattr(os, name) for name in (*READS, *CHANGES, *OTHERS) if hasattr(os, name)
        }
        self.real_open = io.open

    def install(self) -> None:
        """Replaces the functions, in modules that have taken them already, too."""
        new: dict[int, Any] = {}
        for name, original in self.was.items():
            if name in READS:
                put = _Put(original, self._reads(original, follows=READS[name]))
            elif name in CHANGES:
                put = _Put(original, self._changes(original))
            else:
                put = _Put(original, getattr(self, name))
            for known in (os.supports_follow_symlinks, os.supports_effective_ids):
                if original in known:
                    known.add(put)
            setattr(os, name, put)
            new[id(original)] = put
        opened = _Put(self.real_open, self.open_file)
        new[id(self.real_open)] = opened
        builtins.open = io.open = opened
        io.FileIO = _file_io(self)  # type: ignore[misc]
        _rebind(new)
        libraries.watch(libraries.Places(self.view))

    # ------------------------------------------------------------------ names

    def name(self, path: Any, dir_fd: int | None = None) -> str:
        """Returns a path of any kind as an absolute one."""
        if isinstance(path, int):
            return self.view.own_name(self.was["readlink"](f"/proc/self/fd/{path}"))
        text = os.fsdecode(path)
        if not text:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if dir_fd is not None and not text.startswith("/"):
            text = os.path.join(self.name(dir_fd), text)
        return self.view.absolute(text)

    def real(self, path: Any, dir_fd: int | None = None, follow: bool = True) -> str:
        """Returns the file to read instead of `path`.

        Raises:
            FileNotFoundError: the script has removed it.
        """
        name = self.name(path, dir_fd)
        if self.view.is_free(name):
            return name
        found = self.view.find(name, follow)[1]
        if not found:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return found

    def resolved(self, path: Any, dir_fd: int | None = None, follow: bool = True) -> str:
        """Returns a path to change: absolute, and without links."""
        return self.view.resolve(self.name(path, dir_fd), follow)

    def _reads(self, original: Any, *, follows: bool) -> Callable[..., Any]:
        """Returns a function that reads something of a path."""
        view = self.view
        names = original.__name__ == "listdir"

        def reads(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            if not view.touched() or path is None or (isinstance(path, int) and not names):
                return original(path, *args, **kwargs)
            dir_fd = kwargs.pop("dir_fd", None)
            try:
                if names and view.merged(resolved := self.resolved(path)):
                    found = view.names(resolved)
                    return [os.fsencode(n) for n in found] if isinstance(path, bytes) else found
                real = self.real(path, dir_fd, follows and kwargs.get(_FOLLOWS, True))
                if isinstance(path, bytes) and original.__name__ == "readlink":
                    return original(os.fsencode(real), *args, **kwargs)
                return original(real, *args, **kwargs)
            except OSError as error:
                raise _of(error, path) from None

        return reads

    def _changes(self, original: Any) -> Callable[..., Any]:
        """Returns a function that changes a file's times, permissions, owner or length."""

        def changes(path: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                resolved = self.resolved(path, kwargs.get("dir_fd"), kwargs.get(_FOLLOWS, True))
                if self.view.is_free(resolved):
                    return original(path, *args, **kwargs)
                kwargs.pop("dir_fd", None)
                if self.view.exists(resolved) is None:
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
                return original(self.view.own(resolved), *args, **kwargs)
            except OSError as error:
                raise _of(error, path) from None

        return changes

    # ------------------------------------------------------------------ opening

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        """os.open."""
        original = self.was["open"]
        writes = flags & _WRITES or (_UNNAMED and flags & _UNNAMED == _UNNAMED)
        if not writes and not self.view.touched():
            return int(original(path, flags, mode, dir_fd=dir_fd))
        try:
            if writes:
                return self._open_to_write(path, flags, mode, dir_fd)
            real = self.real(path, dir_fd, not flags & getattr(os, "O_NOFOLLOW", 0))
            return int(original(real, flags, mode))
        except OSError as error:
            raise _of(error, path) from None

    def _open_to_write(self, path: Any, flags: int, mode: int, dir_fd: int | None) -> int:
        original, view = self.was["open"], self.view
        makes, fresh = flags & os.O_CREAT, flags & os.O_EXCL
        follow = not (flags & getattr(os, "O_NOFOLLOW", 0) or (makes and fresh))
        resolved = self.resolved(path, dir_fd, follow)
        if view.is_free(resolved):
            return int(original(resolved, flags, mode))
        seen = view.exists(resolved)
        if seen is None:
            if not makes:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            self._may_write(os.path.dirname(resolved))
            return int(original(view.make_room(resolved), flags, mode))
        if makes and fresh:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        if stat.S_ISDIR(seen.st_mode):
            if _UNNAMED and flags & _UNNAMED == _UNNAMED:
                return int(original(view.own(resolved), flags, mode))
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        self._may_write(resolved)
        return int(original(view.own(resolved, empty=bool(flags & os.O_TRUNC)), flags, mode))

    def _may_write(self, resolved: str) -> None:
        """Raises what the script would have met without us where it may not write."""
        real = self.view.real(resolved)
        if real and self.view.exists(resolved) and not self.was["access"](real, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), resolved)

    def opener(self, path: Any, flags: int) -> int:
        """Opens a file for Python's own open()."""
        return self.open(path, flags, 0o666)

    def open_file(
        self,
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        """The built-in open()."""
        if opener is None and not isinstance(file, int):
            reads = isinstance(mode, str) and not set(mode) & set("wax+")
            if not reads or self.view.touched():
                opener = self.opener
        return self.real_open(file, mode, buffering, encoding, errors, newline, closefd, opener)

    # ------------------------------------------------------------------ folders

    def getcwd(self) -> str:
        """os.getcwd."""
        return self.view.getcwd()

    def getcwdb(self) -> bytes:
        """os.getcwdb."""
        return os.fsencode(self.view.getcwd())

    def chdir(self, path: Any) -> None:
        """os.chdir: into the user's folder where there is one, for children that know nothing of us."""
        if isinstance(path, int) or not self.view.touched():
            self.was["chdir"](path)
            return
        try:
            resolved = self.resolved(path)
            there = not self.view.hidden(resolved) and os.path.isdir(resolved)
            try:
                self.was["chdir"](resolved if there else self.real(path))
            except FileNotFoundError:
                self.was["chdir"](self.real(path))  # it is there only since the script made it
        except OSError as error:
            raise _of(error, path) from None

    def scandir(self, path: Any = ".") -> Any:
        """os.scandir."""
        if path is None:
            path = "."
        if not self.view.touched():
            return self.was["scandir"](path)
        try:
            resolved, real = self.view.find(self.name(path))
            if not real:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            # The entries of a folder that is reached by a link have the names that lead there.
            if self.view.merged(resolved) or resolved != self.name(path):
                return Entries(self.view, path, resolved)
            return self.was["scandir"](path)
        except OSError as error:
            raise _of(error, path) from None

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        """os.mkdir."""
        try:
            resolved = self.resolved(path, dir_fd, False)
            if self.view.is_free(resolved):
                self.was["mkdir"](resolved, mode)
                return
            if self.view.exists(resolved) is not None:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            room = self.view.make_room(resolved)
            self._may_write(os.path.dirname(resolved))
            self.was["mkdir"](room, mode)
        except OSError as error:
            raise _of(error, path) from None

    # ------------------------------------------------------------------ removing, moving

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        """os.unlink."""
        self._remove(path, dir_fd, folder=False)

    def remove(self, path: Any, *, dir_fd: int | None = None) -> None:
        """os.remove."""
        self._remove(path, dir_fd, folder=False)

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        """os.rmdir."""
        self._remove(path, dir_fd, folder=True)

    def _remove(self, path: Any, dir_fd: int | None, *, folder: bool) -> None:
        try:
            resolved = self.resolved(path, dir_fd, False)
            if self.view.is_free(resolved):
                self.was["rmdir" if folder else "unlink"](resolved)
                return
            seen = self.view.exists(resolved)
            if seen is not None and stat.S_ISDIR(seen.st_mode) != folder:
                number = errno.ENOTDIR if folder else errno.EISDIR
                raise OSError(number, os.strerror(number), path)
            self.view.remove(resolved)
        except OSError as error:
            raise _of(error, path) from None

    def rename(
        self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        """os.rename."""
        try:
            source = self.resolved(src, src_dir_fd, False)
            target = self.resolved(dst, dst_dir_fd, False)
            if self.view.is_free(source) and self.view.is_free(target):
                self.was["rename"](source, target)
            else:
                self.view.rename(source, target)
        except OSError as error:
            raise _of(error, src, dst) from None

    def replace(
        self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        """os.replace, which is the same as os.rename where there is no Windows."""
        self.rename(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    def link(self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None, follow_symlinks: bool = True) -> None:  # fmt: skip
        """os.link: the user's file is copied, or a write to the new name would change it."""
        try:
            # Without descriptors Python calls link(2), which on Linux follows no link.
            follow = follow_symlinks and (src_dir_fd is not None or dst_dir_fd is not None)
            source, view = self.resolved(src, src_dir_fd, follow), self.view
            seen = view.exists(source)
            if seen is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), src)
            target = self.resolved(dst, dst_dir_fd, False)
            if view.exists(target) is not None:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), dst)
            if stat.S_ISDIR(seen.st_mode):
                raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), src)
            at = source if view.is_free(source) else view.own(source)
            to = target if view.is_free(target) else view.make_room(target)
            self.was["link"](at, to)
        except OSError as error:
            raise _of(error, src, dst) from None

    def symlink(
        self, src: Any, dst: Any, target_is_directory: bool = False, *, dir_fd: int | None = None
    ) -> None:
        """os.symlink."""
        try:
            resolved = self.resolved(dst, dir_fd, False)
            if self.view.is_free(resolved):
                self.was["symlink"](src, resolved)
                return
            if self.view.exists(resolved) is not None:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), dst)
            self.was["symlink"](os.fspath(src), self.view.make_room(resolved))
            self.view.forget()
        except OSError as error:
            raise _of(error, src, dst) from None

    def mkfifo(self, path: Any, mode: int = 0o666, *, dir_fd: int | None = None) -> None:
        """os.mkfifo."""
        resolved = self.resolved(path, dir_fd, False)
        if self.view.is_free(resolved):
            self.was["mkfifo"](resolved, mode)
            return
        if self.view.exists(resolved) is not None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        self.was["mkfifo"](self.view.make_room(resolved), mode)


#: Functions that read something of a path, and whether they follow a link at its end.
READS = {
    "stat": True, "lstat": False, "access": True, "readlink": False, "listdir": True, "statvfs": True,
    "getxattr": True, "listxattr": True,
}  # fmt: skip
#: Functions that change something of a file that is there.
CHANGES = ("truncate", "utime", "chmod", "chown", "lchown", "setxattr", "removexattr")
OTHERS = (
    "open", "getcwd", "getcwdb", "chdir", "scandir", "mkdir", "unlink", "remove", "rmdir", "rename", "replace",
    "link", "symlink", "mkfifo",
)  # fmt: skip


def _file_io(redirect: _Redirect) -> Any:
    """Returns io.FileIO, opening where the view says; files that Python has opened by itself are instances, too."""
    original: Any = io.FileIO

    class Kind(type(original)):  # type: ignore[misc]
        def __instancecheck__(cls, thing: object) -> bool:
            return isinstance(thing, original)

        def __subclasscheck__(cls, kind: type) -> bool:
            return issubclass(kind, original)

    class FileIO(original, metaclass=Kind):  # type: ignore[misc]
        def __init__(
            self, file: Any, mode: str = "r", closefd: bool = True, opener: Any = None
        ) -> None:
            if opener is None and not isinstance(file, int):
                opener = redirect.opener
            super().__init__(file, mode, closefd, opener)

    FileIO.__module__ = "_io"
    return FileIO


def _rebind(new: dict[int, Any]) -> None:
    """Puts the new functions where modules that are loaded already, or their classes, have kept the old ones."""
    for name, module in list(sys.modules.items()):
        if name in ("posix", "_io", __name__, views.__name__) or not hasattr(module, "__dict__"):
            continue
        if name.startswith(("_frozen_importlib", "importlib")):
            continue
        space = vars(module)
        for key, value in list(space.items()):
            if id(value) in new:
                space[key] = new[id(value)]
            elif isinstance(value, type) and value.__module__ == name:
                _rebind_class(value, new)
    shutil: Any = sys.modules.get("shutil")
    if shutil is not None:  # its removal of trees by file descriptors passes by the names
        shutil._use_fd_functions = False


def _rebind_class(kind: type, new: dict[int, Any]) -> None:
    for key, value in list(vars(kind).items()):
        inner = value.__func__ if isinstance(value, staticmethod) else value
        if id(inner) in new:
            try:
                setattr(kind, key, staticmethod(new[id(inner)]))
            except (AttributeError, TypeError):
                continue


def _of(error: OSError, path: Any, other: Any = None) -> OSError:
    """Returns an error with the paths that the script gave."""
    if error.filename is not None:
        error.filename = path if isinstance(path, int) else os.fspath(path)
    if other is not None:
        error.filename2 = os.fspath(other)
    return error
