"""The run folder: made once, never shared by two runs, never left in a state that a later command trips on."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from flopwise.errors import RunFolderError

LAUNCH = "launch.json"
RANKS = "ranks"
#: Signs that a script goes on that was to be ended.
GOES_ON = "goes-on-*.txt"


def create(out: str | None, name: str, options: dict[str, Any]) -> Path:
    """Returns a new run folder with the options of the launch in it.

    Args:
        out: the folder the user asked for; None: flopwise-runs/<time>-<name> below the working folder.
        name: what is run, for the name.
        options: what the meter is to do; written to launch.json.

    Raises:
        RunFolderError: it holds a run already, is in use, or cannot be written.
    """
    text = json.dumps(options, indent=1) + "\n"
    if out is not None:
        folder = Path(os.path.abspath(out))
        if not _claim(folder, text):
            raise RunFolderError(
                f"{folder}: already holds a run. It is left as it is and nothing was started; "
                "give another --out, or remove that folder"
            )
        return folder
    # Of two runs that start in the same second one gets the next name.
    return next(folder for folder in _names(name) if _claim(folder, text))


def discard(folder: Path) -> None:
    """Takes a run folder away again when its job could not be started. What others have put into it stays."""
    for remove in ((folder / LAUNCH).unlink, (folder / RANKS).rmdir, folder.rmdir):
        with contextlib.suppress(OSError):
            remove()


def gone(folder: Path) -> bool:
    """Returns whether a run folder is no longer there, or nothing of the run is left in it."""
    return not (folder / LAUNCH).exists() and not any((folder / RANKS).glob("*.json"))


def _claim(folder: Path, text: str) -> bool:
    """Makes `folder` a run folder; returns False if it is one already. Of two at the same moment one gets it."""
    launch = folder / LAUNCH
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(launch, "x", encoding="utf-8"):
            pass
    except FileExistsError as error:
        if folder.is_dir():
            return False
        raise RunFolderError(f"{folder}: is a file, not a folder. Nothing was started") from error
    except OSError as error:
        raise _unwritable(folder, error) from error
    try:
        launch.write_text(text, encoding="utf-8")
        (folder / RANKS).mkdir(exist_ok=True)
    except OSError as error:
        discard(folder)
        raise _unwritable(folder, error) from error
    return True


def _unwritable(folder: Path, error: OSError) -> RunFolderError:
    return RunFolderError(
        f"{folder}: cannot be written ({error.strerror or error}). Nothing was started; choose another --out"
    )


def _names(name: str) -> Iterator[Path]:
    stamp = datetime.now(timezone.utc).astimezone().strftime("%Y-%m-%d-%H%M%S")
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(name).stem or "run").strip("-.")[:40] or "run"
    base = Path("flopwise-runs").absolute() / f"{stamp}-{stem}"
    yield base
    for n in range(2, 1000):
        yield base.with_name(f"{base.name}-{n}")
    raise RunFolderError(f"{base}: a thousand runs in one second. Nothing was started; give --out")
