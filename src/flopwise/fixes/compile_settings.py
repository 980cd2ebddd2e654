"""What a compilation is given: time, worker processes, and the folder that keeps its results."""

from __future__ import annotations

import os
from collections.abc import Mapping

from flopwise.fixes.interface import Scene
from flopwise.kit.compiler import stop_compile_workers

#: A compilation that takes longer is abandoned. Where the time of the trials is known it may take the longer one: cold
#: compilations of large convolutional nets take two minutes and more.
DEADLINE_S, LONGEST_DEADLINE_S = 120.0, 240.0
#: Of the time that is left for trials a compilation may take this share.
TIME_FRAC = 0.6
#: No more is expected of compiled code than that it saves this share of a step.
MOST_GAIN_FRAC = 0.5
#: A compilation that has to be done sooner is not begun: it would not be paid back in the steps that are left.
SHORTEST_S = 10.0
#: The folder of a tune's compile cache, set by the parent. It is used where the user has chosen none.
CACHE = "FLOPWISE_COMPILE_CACHE"

_THREADS, _FOLDER = "TORCHINDUCTOR_COMPILE_THREADS", "TORCHINDUCTOR_CACHE_DIR"


def deadline_s(scene: Scene) -> float:
    """Returns how many seconds a compilation may take: what the time for trials and the steps left allow."""
    limits = [DEADLINE_S]
    if scene.time_left_s is not None:
        limits = [LONGEST_DEADLINE_S, TIME_FRAC * scene.time_left_s]
    if scene.steps_left is not None and scene.step_s is not None:
        limits.append(MOST_GAIN_FRAC * scene.steps_left * scene.step_s)
    return max(0.0, min(limits))


def time_problem(scene: Scene) -> str | None:
    """Returns why there is no time to compile, or None."""
    seconds = deadline_s(scene)
    if seconds >= SHORTEST_S:
        return None
    if scene.time_left_s is not None and TIME_FRAC * scene.time_left_s < SHORTEST_S:
        return f"{scene.time_left_s:.0f} s are left for trials: too few to compile in"
    return (
        f"{scene.steps_left} steps of {scene.step_s:.3g} s are left: a compilation of more than {seconds:.0f} s "
        "would not be paid back"
    )


def given_deadline_s(setting: Mapping[str, str] | None, scene: Scene) -> float:
    """Returns the deadline of an earlier trial's setting, else that of the scene."""
    try:
        seconds = float((setting or {}).get("deadline_s", ""))
    except ValueError:
        return deadline_s(scene)
    return min(max(seconds, SHORTEST_S), LONGEST_DEADLINE_S)


class Surroundings:
    """The compiler's worker processes and cache folder, chosen where the user has not; `restore` takes it back.

    Source: `decide_compile_threads` in torch/_inductor/config.py and torch/_inductor/runtime/cache_dir_utils.py, torch
    2.11 to 2.13.
    """

    def __init__(self, cores: int) -> None:
        self._folder: tuple[str | None, str] | None = None  # before and now
        self._threads: tuple[int | None, int] | None = None
        self._use_folder()
        self._use_threads(cores)

    def _use_folder(self) -> None:
        folder = os.environ.get(CACHE)
        now = os.environ.get(_FOLDER)
        if folder and (now is None or now == _default_folder()):
            self._folder = (now, folder)
            os.environ[_FOLDER] = folder

    def _use_threads(self, cores: int) -> None:
        if _THREADS in os.environ:
            return
        from torch._inductor import config

        before = config.compile_threads
        if before != cores:
            stop_compile_workers()  # those that wait are too many, or too few
            config.compile_threads = cores
            self._threads = (before, cores)

    def restore(self) -> None:
        """Puts back what has been changed, unless somebody else has changed it since."""
        if self._folder is not None and os.environ.get(_FOLDER) == self._folder[1]:
            if self._folder[0] is None:
                del os.environ[_FOLDER]
            else:
                os.environ[_FOLDER] = self._folder[0]
        if self._threads is not None:
            from torch._inductor import config

            if config.compile_threads == self._threads[1]:
                config.compile_threads = self._threads[0]
        self._folder = self._threads = None


def _default_folder() -> str:
    """Returns the folder that torch takes, and writes into the environment, where nobody has chosen one."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return default_cache_dir()
