"""What runs inside the user's process: attaches the meter once torch has been imported there.

Called by the start-up hook (`launch/site`) in every interpreter below `flopwise run`. It must be quick, silent in
processes that never train, and harmless when anything in it fails.
"""

from __future__ import annotations

import os
import sys

#: The run folder; its presence says that this process runs below `flopwise run`.
FOLDER = "FLOPWISE_RUN"
DISABLE = "FLOPWISE_DISABLE"


def attach() -> None:
    """Attaches the meter to this process, as the run folder's launch.json says. Never raises."""
    folder = os.environ.get(FOLDER)
    if not folder or os.environ.get(DISABLE, "") not in ("", "0"):
        return
    try:
        from flopwise.meter import finish, session

        options = finish.read_launch(folder)
        config = session.Config(
            folder=folder,
            # Trials end the script themselves; until then the meter stays.
            steps=sys.maxsize if options.get("trial") else options.get("steps"),
            warmup=options.get("warmup"),
            stop_after=bool(options.get("stop_after")),
            count=not options.get("trial"),
            telemetry=not options.get("trial"),
        )
        meter = session.Session(config)
        if options.get("apply"):
            from flopwise.fixes import application

            application.install(meter, options["apply"])
        if options.get("trial"):
            from flopwise.fixes import driver

            driver.install(meter, options["trial"])
        meter.attach()
        _leave_sign(folder)
    except Exception as error:
        _report(folder, error)


def _leave_sign(folder: str) -> None:
    """Tells the parent that torch was imported and the meter attached here."""
    try:
        with open(os.path.join(folder, f"attached-{os.getpid()}"), "w", encoding="utf-8") as sign:
            sign.write(" ".join(sys.argv)[:500])
    except OSError:
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
