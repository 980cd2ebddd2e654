"""A user's files as one process sees them that must not change them: what it writes lies in a folder of ours, on top.

Standard library only, and only what Python has loaded by itself at its start: it runs in every Python process below a
trial, before the script. All state is on disk, so that forked and spawned processes of one trial see the same files.
Below the folder:

- `files/` followed by a file's own absolute path: what was written (the upper layer);
- `gone/`, made beforehand, likewise, an empty file: what is no longer there of the user's files. A file in `gone/` hides all that the
  user has at and below that path; what the script makes there anew is in `files/`, which comes first.
"""

from __future__ import annotations

import errno
import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: As many symbolic links in one path are a loop, as for Linux.
MOST_LINKS = 40
#: Copied at once.
CHUNK_BYTES = 1 << 22
#: ioctl that shares the blocks of a file with another one, where the file system can. Source: linux/fs.h, FICLONE.
FICLONE = 0x40049409

# The functions as they are, before anything is put in their place.
_open, _close, _read, _write = os.open, os.close, os.read, os.write
_stat, _lstat, _readlink, _listdir = os.stat, os.lstat, os.readlink, os.listdir
_mkdir, _rmdir, _unlink, _rename, _symlink = os.mkdir, os.rmdir, os.unlink, os.rename, os.symlink
_chmod, _utime, _getcwd = os.chmod, os.utime, os.getcwd


class View:
    """What a process sees: its own writes over the user's files."""

    def __init__(self, folder: str, free: Sequence[str], guarded: Sequence[str]) -> None:
        """Makes a view.

        Args:
            folder: for what is written; absolute, without symbolic links.
            free: folders in which writes stay as they are (temporary files, caches, the run folder).
            guarded: folders of the user inside of these that are not; everything outside of `free` is guarded anyway.
        """
        self.folder = folder
        self.files = os.path.join(folder, "files")
        self.gone = os.path.join(folder, "gone")
        areas = [(path.rstrip("/") + "/", True) for path in free]
        areas += [(path.rstrip("/") + "/", False) for path in guarded]
        # The longest that fits decides, and of two of one length the guarded one.
        self._areas = sorted(areas, key=lambda area: (-len(area[0]), area[1]))
        self._resolved: dict[str, str] = {}
        self._touched = self._hides = False

    # ------------------------------------------------------------------ names

    def touched(self) -> bool:
        """Returns whether any process has written or removed anything: until then all files are the user's.

        The folder and `gone` in it are made with a time of 0, which whoever first puts something into them changes.
        """
        if not self._touched:
            self._touched = _stat(self.folder).st_mtime_ns != 0
        return self._touched

    def is_free(self, path: str) -> bool:
        """Returns whether writes to a path (absolute, normalised) stay as they are."""
        path += "/"
        for prefix, free in self._areas:
            if path.startswith(prefix):
                return free
        return False

    def getcwd(self) -> str:
        """Returns the working folder by its own name, also where it is one that the script has made."""
        return self.own_name(_getcwd())

    def own_name(self, path: str) -> str:
        """Returns a path below `files` by the name that the script knows it by; any other path as it is."""
        if path.startswith(self.files + "/"):
            return path[len(self.files) :]
        return "/" if path == self.files else path

    def absolute(self, path: str) -> str:
        """Returns a path from the root, normalised by its words alone but for `..`, which may lead through a link."""
        if not path.startswith("/"):
            path = os.path.join(self.getcwd(), path)
        return self.own_name(path)

    def resolve(self, path: str, follow: bool = True) -> str:
        """Returns the absolute path of a file without symbolic links, the last word's too if `follow`.

        Raises:
            OSError: a folder on the way is not there or is none, or a loop of links.
        """
        return self.find(path, follow)[0]

    def find(self, path: str, follow: bool = True) -> tuple[str, str]:
        """Returns a path as `resolve` does, and the file behind it: see `real`.

        Raises:
            OSError: a folder on the way is not there or is none, or a loop of links.
        """
        path = self.absolute(path)
        head, slash, tail = path.rpartition("/")
        if tail in ("", ".", "..") or not slash:
            whole = self._walk(path, follow)
            return whole, self.real(whole)
        folder = self._resolved.get(head)
        if folder is None:
            folder = self._walk(head, True)
            at = self._lstat(folder)
            if at is None or not stat.S_ISDIR(at.st_mode):
                raise _error(errno.ENOENT if at is None else errno.ENOTDIR, path)
            if len(self._resolved) > 10_000:
                self._resolved.clear()
            self._resolved[head] = folder
        name = f"{folder.rstrip('/')}/{tail}"
        real = self.real(name)
        if not follow or not real:
            return name, real
        try:
            if not stat.S_ISLNK(_lstat(real).st_mode):
                return name, real
        except OSError:
            return name, real
        whole = self._walk(name, True)
        return whole, self.real(whole)

    def forget(self) -> None:
        """Forgets where folders lead: one of them has been moved, removed, or become a link."""
        self._resolved.clear()

    def _walk(self, path: str, follow: bool) -> str:
        words = [word for word in path.split("/") if word]
        words.reverse()
        done, links = "", 0
        while words:
            word = words.pop()
            if word == ".":
                continue
            if word == "..":
                done = done.rpartition("/")[0]
                continue
            here = f"{done}/{word}"
            seen = self._lstat(here) if words or follow else None
            if words and seen is None:
                raise _error(errno.ENOENT, path)
            if seen is None or stat.S_ISDIR(seen.st_mode):
                done = here
                continue
            if not stat.S_ISLNK(seen.st_mode):
                if words:
                    raise _error(errno.ENOTDIR, path)
                done = here
                continue
            links += 1
            if links > MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            target = self.own_name(_readlink(self.real(here)))
            if target.startswith("/"):
                done = ""
            words += [w for w in reversed(target.split("/")) if w]
        return done or "/"

    # ------------------------------------------------------------------ what is there

    def upper(self, path: str) -> str:
        """Returns where a resolved path lies once it is written."""
        return self.files + path

    def hidden(self, path: str) -> bool:
        """Returns whether what the user has at a resolved path is removed."""
        if not self._hides:
            self._hides = _stat(self.gone).st_mtime_ns != 0
            if not self._hides:
                return False
        try:
            return not stat.S_ISDIR(_lstat(self.gone + path).st_mode)
        except NotADirectoryError:
            return True
        except OSError:
            return False

    def real(self, path: str) -> str:
        """Returns the file behind a resolved path, which may be there or not; "" where it is removed."""
        if not self.touched():
            return path
        upper = self.files + path
        if _is_there(upper):
            return upper
        return "" if self.hidden(path) else path

    def _lstat(self, path: str) -> os.stat_result | None:
        real = self.real(path)
        try:
            return _lstat(real) if real else None
        except OSError:
            return None

    def exists(self, path: str) -> os.stat_result | None:
        """Returns the status of what is at a resolved path, links not followed; None: nothing."""
        return self._lstat(path)

    def merged(self, path: str) -> bool:
        """Returns whether a folder's list is not simply the user's."""
        return self.touched() and (_is_there(self.files + path) or _is_there(self.gone + path))

    def names(self, path: str) -> list[str]:
        """Returns the names in a folder.

        Raises:
            OSError: it is none, or cannot be read.
        """
        names: list[str] = []
        upper = self.files + path
        own = _is_there(upper)
        if own:
            names += _listdir(upper)
        if not self.hidden(path):
            try:
                lower = _listdir(path)
            except OSError:
                if not own:
                    raise
                lower = []
            seen = set(names)
            base = path.rstrip("/")
            names += [n for n in lower if n not in seen and not self.hidden(f"{base}/{n}")]
        elif not own:
            raise _error(errno.ENOENT, path)
        return names

    # ------------------------------------------------------------------ writing

    def make_room(self, path: str) -> str:
        """Makes the folders above a resolved path in the upper layer; returns where the file is to lie.

        Raises:
            OSError: the folder above is none.
        """
        parent = os.path.dirname(path)
        seen = self._lstat(parent)
        if seen is None:
            raise _error(errno.ENOENT, path)
        if not stat.S_ISDIR(seen.st_mode):
            raise _error(errno.ENOTDIR, path)
        self._own_folder(parent)
        return self.files + path

    def _own_folder(self, path: str) -> None:
        upper = self.files + path.rstrip("/")
        if _is_there(upper):
            return
        if path != "/":
            self._own_folder(os.path.dirname(path))
        try:
            _mkdir(upper, 0o777)
        except FileExistsError:
            return
        self._touched = True
        if not self.hidden(path):
            try:  # noqa: SIM105 - contextlib is not loaded yet
                _chmod(upper, stat.S_IMODE(_stat(path).st_mode) | 0o700)
            except OSError:
                pass

    def own(self, path: str, *, empty: bool = False) -> str:
        """Brings what is at a resolved path, if anything, into the upper layer; returns where it is to lie.

        Args:
            path: of a file, a link, or a folder (of which only itself, not what is in it).
            empty: its content is not wanted.
        """
        upper = self.make_room(path)
        if _is_there(upper) or self.hidden(path):
            return upper
        try:
            seen = _lstat(path)
        except OSError:
            return upper
        if stat.S_ISLNK(seen.st_mode):
            _symlink(_readlink(path), upper)
        elif stat.S_ISDIR(seen.st_mode):
            self._own_folder(path)
        elif stat.S_ISREG(seen.st_mode):
            _copy(path, upper, seen, empty)
        else:
            return path  # a pipe, a socket or a device keeps nothing
        return upper

    def own_tree(self, path: str) -> str:
        """Brings a folder with all that is in it into the upper layer."""
        upper = self.own(path)
        seen = self._lstat(path)
        if seen is not None and stat.S_ISDIR(seen.st_mode):
            base = path.rstrip("/")
            for name in self.names(path):
                self.own_tree(f"{base}/{name}")
        return upper

    def hide(self, path: str) -> None:
        """Marks what the user has at a resolved path as removed, if there is anything."""
        if not _is_there(path) or self.hidden(path):
            return
        if not _is_there(self.files):
            _make_folders(self.files)
        mark = self.gone + path
        if _is_there(mark):
            _remove_tree(mark)
        _make_folders(os.path.dirname(mark))
        _close(_open(mark, os.O_CREAT | os.O_WRONLY, 0o600))
        self._touched = self._hides = True

    def remove(self, path: str) -> None:
        """Removes what is at a resolved path: a file, a link, or an empty folder.

        Raises:
            OSError: nothing is there, or the folder is not empty.
        """
        seen = self._lstat(path)
        if seen is None:
            raise _error(errno.ENOENT, path)
        upper = self.files + path
        if stat.S_ISDIR(seen.st_mode):
            if self.names(path):
                raise _error(errno.ENOTEMPTY, path)
            self.forget()
            if _is_there(upper):
                _rmdir(upper)
        else:
            if stat.S_ISLNK(seen.st_mode):
                self.forget()
            if _is_there(upper):
                _unlink(upper)
        self.hide(path)

    def rename(self, source: str, target: str) -> None:
        """Moves what is at one resolved path to another, as rename(2); either may be in a free folder.

        Raises:
            OSError: as rename(2) does.
        """
        seen, there = self._lstat(source), self._lstat(target)
        if seen is None:
            raise _error(errno.ENOENT, source)
        if source == target:
            return
        folder = stat.S_ISDIR(seen.st_mode)
        if folder and target.startswith(source + "/"):
            raise _error(errno.EINVAL, target)
        if there is not None and source.startswith(target + "/"):
            raise _error(errno.ENOTEMPTY, target)
        if there is not None:
            into = stat.S_ISDIR(there.st_mode)
            if folder and not into:
                raise _error(errno.ENOTDIR, target)
            if into and not folder:
                raise _error(errno.EISDIR, target)
            if into and self.names(target):
                raise _error(errno.ENOTEMPTY, target)
        self.forget()
        leaves = not self.is_free(source)
        at = (self.own_tree(source) if folder else self.own(source)) if leaves else source
        to = target
        if not self.is_free(target):
            to = self.make_room(target)
            if folder:
                self.hide(target)
        _move(at, to, seen)
        if leaves:
            self.hide(source)


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)


def _is_there(path: str) -> bool:
    try:
        _lstat(path)
    except OSError:
        return False
    return True


def _copy(source: str, target: str, seen: os.stat_result, empty: bool) -> None:
    """Copies a file with its times and permissions, its blocks shared where the file system can."""
    reader = _open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        writer = _open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            if not empty and not _shared(reader, writer):
                while data := _read(reader, CHUNK_BYTES):
                    rest = memoryview(data)
                    while rest:
                        rest = rest[_write(writer, rest) :]
        except BaseException:
            _unlink(target)
            raise
        finally:
            _close(writer)
    finally:
        _close(reader)
    _chmod(target, stat.S_IMODE(seen.st_mode) | 0o200)
    _utime(target, ns=(seen.st_atime_ns, seen.st_mtime_ns))


def _shared(reader: int, writer: int) -> bool:
    try:
        import fcntl

        fcntl.ioctl(writer, FICLONE, reader)
    except (ImportError, OSError):
        return False
    return True


def _move(source: str, target: str, seen: os.stat_result) -> None:
    """Moves a file or a folder, also to another file system."""
    try:
        _rename(source, target)
        return
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
    if stat.S_ISDIR(seen.st_mode):
        _mkdir(target)
        for name in _listdir(source):
            inner = f"{source}/{name}"
            _move(inner, f"{target}/{name}", _lstat(inner))
        _rmdir(source)
        return
    if _is_there(target):
        _unlink(target)
    if stat.S_ISLNK(seen.st_mode):
        _symlink(_readlink(source), target)
    else:
        _copy(source, target, seen, False)
    _unlink(source)


def _make_folders(path: str) -> None:
    if not _is_there(path):
        _make_folders(os.path.dirname(path))
        try:  # noqa: SIM105
            _mkdir(path)
        except FileExistsError:
            pass


def _remove_tree(path: str) -> None:
    if stat.S_ISDIR(_lstat(path).st_mode):
        for name in _listdir(path):
            _remove_tree(f"{path}/{name}")
        _rmdir(path)
    else:
        _unlink(path)


def prepare(folder: str) -> None:
    """Makes the folder of a view, before any process uses it."""
    gone = os.path.join(folder, "gone")
    _mkdir(folder)
    _mkdir(gone)
    for path in (gone, folder):
        _utime(path, ns=(0, 0))


def written(folder: str) -> Iterator[tuple[str, str, int]]:
    """Yields what lies in a view's folder: (path by the script's own name, "written" | "removed", bytes).

    Folders are left out, but those that were removed.
    """
    for name, what in (("files", "written"), ("gone", "removed")):
        top = os.path.join(folder, name)
        for where, _, names in os.walk(top):
            for one in sorted(names):
                path = os.path.join(where, one)
                own = path[len(top) :]
                if what == "removed" and _is_there(os.path.join(folder, "files") + own):
                    continue  # removed and written anew
                try:
                    size = _lstat(path).st_size
                except OSError:
                    continue
                yield own, what, size
