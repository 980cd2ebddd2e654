"""What runs inside the user's process: attaches the meter once torch has been imported there.

Called by the start-up hook (`launch/site`) in every interpreter below `flopwise run`. It must be quick, silent in
processes that never train, and harmless when anything in it fails.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

#: The run folder; its presence says that this process runs below `flopwise run`.
FOLDER = "FLOPWISE_RUN"
DISABLE = "FLOPWISE_DISABLE"


def attach() -> None:
    """Attaches the meter to this process, as the run folder's launch.json says. Never raises."""
    folder = os.environ.get(FOLDER)
    if not folder or os.environ.get(DISABLE, "") not in ("", "0"):
        return
    try:
        with _imports_apart():
            _attach(folder)
        _leave_sign(folder)
    except Exception as error:
        _report(folder, error)


def _attach(folder: str) -> None:
    from flopwise.errors import AttachError
    from flopwise.meter import finish, session
    from flopwise.meter.config import Config

    try:
        options = finish.read_launch(folder)
    except FileNotFoundError:
        raise AttachError(
            f"the run folder {folder} is not here; this process is not measured"
        ) from None
    trial: dict[str, Any] | None = options.get("trial")
    survey: dict[str, Any] | None = options.get("survey")
    quality: dict[str, Any] | None = options.get("quality")
    longer = bool(trial or survey or quality)  # and nothing of it is a measurement
    meter = session.Session(
        Config(
            folder=folder,
            # These end the script themselves; until then the meter stays.
            steps=sys.maxsize if longer else options.get("steps"),
            warmup=options.get("warmup"),
            stop_after=bool(options.get("stop_after")),
            count=not longer,
            telemetry=not longer,
            profile=bool(options.get("profile")) and not longer,
        )
    )
    if options.get("apply"):
        from flopwise.fixes import application

        application.install(meter, options["apply"], options.get("expected"))
    if trial:
        from flopwise.fixes import driver

        driver.install(meter, trial)
    if survey:
        from flopwise.fixes import survey as surveys

        surveys.install(meter, survey)
    if quality:
        from flopwise.meter import curve

        curve.install(meter, quality)
    meter.attach()


@contextlib.contextmanager
def _imports_apart() -> Iterator[None]:
    """Has our imports find the standard library, whatever files the script's folder holds, and leaves no trace of them.

    A script with a statistics.py of its own must get that one when it asks for it, and we must not run it.
    """
    library = os.path.dirname(os.__file__)
    path, modules = list(sys.path), set(sys.modules)
    sys.path.sort(key=lambda entry: not _belongs_to(entry, library))
    try:
        yield
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            if name.partition(".")[0] in sys.stdlib_module_names:
                del sys.modules[name]


def _belongs_to(entry: str, library: str) -> bool:
    inside = entry == library or entry.startswith(library + os.sep)
    return inside and "-packages" not in entry[len(library) :]


def _leave_sign(folder: str) -> None:
    """Tells the parent that torch was imported and the meter attached here."""
    try:
        with open(os.path.join(folder, f"attached-{os.getpid()}"), "w", encoding="utf-8") as sign:
            sign.write(" ".join(sys.argv)[:500])
    except (OSError, ValueError):
        pass


def _report(folder: str, error: Exception) -> None:
    text = (
        str(error) if type(error).__name__ == "AttachError" else f"{type(error).__name__}: {error}"
    )
    try:
        print(f"flopwise: {text}", file=sys.stderr, flush=True)
        path = os.path.join(folder, f"failed-{os.getpid()}.txt")
        with open(path, "w", encoding="utf-8") as stream:
            stream.write(text + "\n")
    except Exception:
        pass
