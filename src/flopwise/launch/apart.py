"""Runs a process apart from the user's files: what it writes goes to a folder of its own, and is listed and removed afterwards.

Two layers. `redirect` has Python's own functions write there, so that the script finds again what it wrote. Below it
`landlock`, where the kernel has it, refuses whatever writes past them. Where it has not, the user's folder is looked
through before and after, and what has changed is said.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from flopwise.launch import landlock, redirect, view
from flopwise.records.verdict import Write

#: In the folder of a process: what it writes, and what its experiment trackers do.
FOLDER, TRACKER_FOLDER = "apart", "trackers"
#: System folders, and variables that name caches, in which a process writes as ever.
SYSTEM = ("/dev", "/proc", "/sys", "/run", "/tmp", "/var/tmp", "/var/cache")
CACHES = (
    "XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "TMPDIR", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_DATASETS_CACHE",
    "HF_MODULES_CACHE", "TRANSFORMERS_CACHE", "TORCH_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR",
    "TRITON_HOME", "CUDA_CACHE_PATH", "TORCH_EXTENSIONS_DIR", "MPLCONFIGDIR", "NUMBA_CACHE_DIR",
)  # fmt: skip
HOME_CACHES = (".cache", ".triton", ".nv")
#: Trackers and hubs stay at home, and what they note for later goes to the folder: a trial is no experiment.
OFFLINE = {
    "WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1", "COMET_START_OFFLINE": "1", "NEPTUNE_MODE": "offline",
    "CLEARML_OFFLINE_MODE": "1", "SWANLAB_MODE": "offline", "TRACKIO_OFFLINE": "1", "DO_NOT_TRACK": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}  # fmt: skip
TRACKERS = {
    "WANDB_DIR": "wandb", "COMET_OFFLINE_DIRECTORY": "comet", "MLFLOW_TRACKING_URI": "mlruns",
    "SWANLAB_LOG_DIR": "swanlog", "CLEARML_CACHE_DIR": "clearml",
}  # fmt: skip
#: So many files are looked at, where the kernel holds nothing back.
MOST_LOOKED_AT = 20_000
#: So many paths are kept of what was written.
MOST_WRITES = 200


@dataclass
class Apart:
    """One process apart from the user's files."""

    folder: Path  # of the process; ours
    out: Path  # of the whole tune
    allowed: Sequence[str] = ()  # folders of the user's in which it may write as ever
    guarded: Sequence[
        str
    ] = ()  # folders of the user's that are none of the free ones, wherever they lie
    writes: list[Write] = field(default_factory=list)
    held: bool = False  # the kernel refuses what is not redirected
    _seen: dict[str, tuple[int, int]] = field(default_factory=dict)
    _made: list[Path] = field(default_factory=list)

    @property
    def everywhere(self) -> bool:
        """Whether the process may write wherever it likes."""
        return "/" in {os.path.realpath(path) for path in self.allowed}

    @contextmanager
    def process(
        self, env: dict[str, str]
    ) -> Iterator[tuple[dict[str, str], Callable[[], None] | None]]:
        """Yields the environment of a process that writes apart, and what it has to call first; then notes what it wrote."""
        env = {**env, **OFFLINE}
        if self.everywhere:
            yield env, None
            return
        place = Path(os.path.realpath(self.folder)) / FOLDER
        trackers = place.with_name(TRACKER_FOLDER)
        trackers.mkdir()
        for name, part in TRACKERS.items():
            (trackers / part).mkdir()
            env[name] = str(trackers / part)
        view.prepare(str(place))
        free = self._free()
        guarded = [path for path in self._guarded() if path not in _both(self.allowed)]
        env[redirect.APART] = redirect.value(str(place), free, guarded)
        self._make_caches()
        restriction = landlock.restriction(free)
        self.held = restriction is not None
        # A rule of the kernel's cannot take out an inner folder: a project in /tmp, say, is looked through, too.
        looked_at = [path for path in guarded if restriction is None or _inside(path, free)]
        self._seen = dict(self._look(looked_at))
        try:
            yield env, restriction[1] if restriction is not None else None
        finally:
            if restriction is not None:
                os.close(restriction[0])
            self._conclude(place, trackers, looked_at)

    def _free(self) -> list[str]:
        """Returns the folders in which writes stay as they are, the allowed ones first."""
        home = os.path.expanduser("~")
        caches = [value for name in CACHES if (value := os.environ.get(name))]
        paths = [
            *self.allowed,
            str(self.out),
            *SYSTEM,
            tempfile.gettempdir(),
            *caches,
            *(os.path.join(home, name) for name in HOME_CACHES),
        ]
        return _both(paths)

    def _guarded(self) -> list[str]:
        return _both([os.getcwd(), *self.guarded])

    def _make_caches(self) -> None:
        """Makes folders of caches that are not there: later the process may not."""
        for name in HOME_CACHES:
            path = Path.home() / name
            with contextlib.suppress(OSError):
                path.mkdir()
                self._made.append(path)

    def _conclude(self, place: Path, trackers: Path, looked_at: Sequence[str]) -> None:
        for path, what, size in view.written(str(place)):
            self.writes.append(Write(path, what, size))
        now = dict(self._look(looked_at))
        for path in sorted({*now, *self._seen}):
            if self._seen.get(path) != now.get(path):
                size = now.get(path, (0, 0))[1]
                self.writes.append(Write(path, "changed in spite of it", size))
        for folder in (place, trackers):
            shutil.rmtree(folder, ignore_errors=True)
        for made in self._made:
            with contextlib.suppress(OSError):
                made.rmdir()  # if nothing has been put into it

    def _look(self, folders: Sequence[str]) -> Iterator[tuple[str, tuple[int, int]]]:
        """Yields the files below some folders, the first so many, each with its time and size."""
        left = MOST_LOOKED_AT
        but = {os.path.realpath(path) for path in (str(self.out), *self.allowed)}
        for folder in dict.fromkeys(os.path.realpath(folder) for folder in folders):
            for where, inner, names in os.walk(folder):
                inner[:] = [name for name in sorted(inner) if os.path.join(where, name) not in but]
                for path in (os.path.join(where, name) for name in sorted(names)):
                    with contextlib.suppress(OSError):
                        at = os.lstat(path)
                        yield path, (at.st_mtime_ns, at.st_size)
                    left -= 1
                    if left <= 0:
                        return


def abandoned(folder: Path) -> list[Write]:
    """Returns what a process wrote that nobody has concluded, and removes it.

    Args:
        folder: of the process.
    """
    place = folder / FOLDER
    found = [Write(*one) for one in view.written(str(place))] if place.is_dir() else []
    for path in (place, folder / TRACKER_FOLDER):
        shutil.rmtree(path, ignore_errors=True)
    return found


def together(writes: Sequence[Sequence[Write]]) -> tuple[list[Write], int]:
    """Returns what several processes wrote, each path once with the number of processes and the largest size, and how many more there are."""
    found: dict[tuple[str, str], Write] = {}
    for of_process in writes:
        for one in of_process:
            before = found.get((one.path, one.what))
            size = max(one.n_bytes, before.n_bytes if before else 0)
            found[one.path, one.what] = Write(
                one.path, one.what, size, 1 + (before.processes if before else 0)
            )
    # What happened in spite of everything first.
    everything = sorted(found.values(), key=lambda w: (w.what in ("written", "removed"), w.path))
    return everything[:MOST_WRITES], max(0, len(everything) - MOST_WRITES)


def _both(paths: Sequence[str]) -> list[str]:
    """Returns paths as they are written and as they are without links."""
    found = [name for path in paths for name in (os.path.abspath(path), os.path.realpath(path))]
    return list(dict.fromkeys(found))


def _inside(path: str, folders: Sequence[str]) -> bool:
    return any((path + "/").startswith(folder.rstrip("/") + "/") for folder in folders)
