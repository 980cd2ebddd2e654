"""Linux's Landlock: a process and all that it starts may write below given folders only. Needs no rights, Linux 5.19 or newer.

It is the net below `redirect`: what writes past Python's functions (a library in C++, a program that the script starts) gets
"Permission denied" instead of the user's files.

Source: https://docs.kernel.org/userspace-api/landlock.html, include/uapi/linux/landlock.h.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Callable, Sequence

#: System calls; the numbers are the same on all architectures that were there when they came.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
CREATE_RULESET_VERSION = 1
RULE_PATH_BENEATH = 1
PR_SET_NO_NEW_PRIVS = 38
#: Rights that change files: LANDLOCK_ACCESS_FS_*. Moving between folders and cutting files short came later.
WRITE_FILE, REFER, TRUNCATE = 1 << 1, 1 << 13, 1 << 14
REMOVE_DIR, REMOVE_FILE = 1 << 4, 1 << 5
MAKES = 0b1111111 << 6  # char, dir, reg, sock, fifo, block, sym
OF_FILES = WRITE_FILE | TRUNCATE
#: Before, nothing could be moved from one folder to another under it, and that ends programs which do nothing wrong.
OLDEST_ABI = 2
TRUNCATE_ABI = 3


def abi() -> int:
    """Returns the version of Landlock in this kernel, 0 where there is none."""
    if sys.platform != "linux":
        return 0
    try:
        return max(0, int(_call(CREATE_RULESET, None, 0, CREATE_RULESET_VERSION)))
    except (OSError, AttributeError):
        return 0


def restriction(folders: Sequence[str]) -> tuple[int, Callable[[], None]] | None:
    """Returns what lets a new process write below `folders` only: a descriptor to close once it runs, and what the process calls first.

    None where the kernel has none, or it is switched off.
    """
    version = abi()
    if version < OLDEST_ABI:
        return None
    rights = WRITE_FILE | REMOVE_DIR | REMOVE_FILE | MAKES | REFER
    rights |= TRUNCATE if version >= TRUNCATE_ABI else 0
    try:
        ruleset = _call(CREATE_RULESET, struct.pack("=Q", rights), 8, 0)
    except OSError:
        return None
    try:
        for folder in dict.fromkeys(folders):
            _allow(ruleset, folder, rights)
    except OSError:
        os.close(ruleset)
        return None
    library = ctypes.CDLL(None, use_errno=True)  # looked up before the fork
    prctl, syscall = library.prctl, library.syscall

    def restrict() -> None:
        if prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or syscall(RESTRICT_SELF, ruleset, 0):
            raise OSError(ctypes.get_errno(), "Landlock")

    if not _works(restrict):
        os.close(ruleset)
        return None
    return ruleset, restrict


def _works(restrict: Callable[[], None]) -> bool:
    """Tries it in a process of its own: a sandbox around us may let the rules be made and not be used."""
    child = os.fork()
    if child == 0:
        try:
            restrict()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # what is not there needs no right
    try:
        allowed = rights if os.path.isdir(path) else rights & OF_FILES
        _call(ADD_RULE, ruleset, RULE_PATH_BENEATH, struct.pack("=Qi", allowed, handle), 0)
    finally:
        os.close(handle)


def _call(number: int, *arguments: object) -> int:
    """Makes a system call.

    Raises:
        OSError: it failed.
    """
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    result = int(syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
