"""What the compiler stumbled over, with the line of the user's code: graph breaks and recompiles."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_TORCH = os.sep + os.path.join("torch", "")
#: The guard, and the source line that a recompile's reason names: "0/7: L['self'].n == 7   # self.n += 1  # m.py:11 in f".
#: Source: `get_guard_fail_reason` in torch/_dynamo/guards.py, torch 2.11 to 2.13.
_GUARD = re.compile(
    r"^(?:\d+/\d+: )?(?P<guard>.*?)\s*(?:#\s*(?P<code>.*?)\s*#\s*(?P<where>\S+:\d+)\s+in\s+\S+.*)?$",
    re.DOTALL,
)


@dataclass(frozen=True)
class GraphBreak:
    """A place where the compiler had to stop a graph and go on eagerly."""

    reason: str
    where: str  # file:line of the user's code; "" if torch does not say
    times: int = 1  # that the compiler came upon it: for every frame around it, too

    def __str__(self) -> str:
        return f"{self.where or 'somewhere'}: {self.reason}"


@dataclass(frozen=True)
class Recompile:
    """A guard that did not hold, so that a frame was compiled anew."""

    guard: str  # the expression, as torch states it
    where: str  # file:line of the line that it comes from; "" if torch does not say
    times: int
    seconds: float  # that compiling took, all times together

    def __str__(self) -> str:
        at = f" ({self.where})" if self.where else ""
        return f"{self.guard}{at}: {self.times} recompiles, {self.seconds:.1f} s"

    @property
    def of_shape(self) -> bool:
        """Whether it was the size of a tensor that had changed."""
        return "size mismatch at index" in self.guard or ".size()" in self.guard


class Mark:
    """A moment in the compiler's history; `breaks` and `recompiles` tell what came after it."""

    def __init__(self) -> None:
        self._breaks = len(_reasons())
        # Metrics are kept in a ring: what was there is known by identity, not by place.
        self._seen = {id(m): m for m in _metrics()}

    def breaks(self) -> list[GraphBreak]:
        """Returns the graph breaks since, equal ones together, in order of appearance."""
        reasons = _reasons()
        since = reasons[self._breaks :] if len(reasons) >= self._breaks else reasons
        found = Counter((_first_line(r.reason), _user_line(r.user_stack)) for r in since)
        return [GraphBreak(reason, where, times) for (reason, where), times in found.items()]

    def recompiles(self) -> list[Recompile]:
        """Returns the recompiles since by guard; the values compared with do not tell guards apart. At most what torch keeps (64)."""
        found: dict[tuple[str, str], tuple[str, str, int, float]] = {}
        for metrics in _metrics():
            reason = getattr(metrics, "recompile_reason", None)
            if id(metrics) in self._seen or not reason:
                continue
            guard, where = guard_of(str(reason))
            where = whole(where)
            key = (re.sub(r"== (['\"]).*\1", "== S", re.sub(r"\d+", "N", guard)), where)
            _, _, times, seconds = found.get(key, (guard, where, 0, 0.0))
            spent_s = float(getattr(metrics, "duration_us", None) or 0) / 1e6
            found[key] = (guard, where, times + 1, seconds + spent_s)
        return [Recompile(*entry) for entry in found.values()]


def guard_of(reason: str) -> tuple[str, str]:
    """Returns the guard expression and the file:line of a recompile's reason."""
    first = reason.splitlines()[0] if reason else ""
    match = _GUARD.match(first)
    if match is None:
        return first.strip(), ""
    return match["guard"].strip(), match["where"] or ""


def whole(where: str) -> str:
    """Returns file:line with the whole path of the file where one that is loaded is meant.

    torch leaves out what a path has in common with its own, and one character more where that is nothing.
    Source: `shorten_filename` in torch/utils/_traceback.py, torch 2.11 to 2.13.
    """
    name, _, line = where.rpartition(":")
    shorten = getattr(sys.modules.get("torch.utils._traceback"), "shorten_filename", None)
    if not name or os.path.isabs(name) or shorten is None:
        return where
    files = {str(getattr(m, "__file__", None) or os.sep) for m in list(sys.modules.values())}
    found = [f for f in files if f.endswith(name) and shorten(f) == name]
    return f"{found[0]}:{line}" if len(found) == 1 else where


def _reasons() -> list[Any]:
    utils = sys.modules.get("torch._dynamo.utils")
    return list(getattr(utils, "graph_break_reasons", ()))


def _metrics() -> list[Any]:
    utils = sys.modules.get("torch._dynamo.utils")
    get = getattr(utils, "get_compilation_metrics", None)
    return list(get()) if get is not None else []


def _first_line(text: str) -> str:
    """Returns what a graph break is called, with its explanation where torch gives one."""
    lines = [line.strip() for line in str(text).splitlines() if line.strip()]
    if not lines:
        return "no reason given"
    explained = next(
        (w.partition(":")[2].strip() for w in lines if w.startswith("Explanation:")), ""
    )
    return f"{lines[0]}: {explained}" if explained else lines[0]


def _user_line(stack: Iterable[Any]) -> str:
    """Returns file:line of the innermost frame outside torch, else of the innermost."""
    frames = list(stack or ())
    for frame in reversed(frames):
        if _TORCH not in frame.filename:
            return f"{frame.filename}:{frame.lineno}"
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
