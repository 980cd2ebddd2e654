"""The run folder: made once, never shared by two runs, never left in a state that a later command trips on."""

from __future__ import annotations

import json
import os
import re
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from flopwise.errors import RunFolderError

LAUNCH = "launch.json"


def create(out: str | None, name: str, options: dict[str, Any]) -> Path:
    """Returns a new run folder with the options of the launch in it.

    Args:
        out: the folder the user asked for; None: flopwise-runs/<time>-<name> below the working folder.
        name: what is run, for the name.
        options: what the meter is to do; written to launch.json.

    Raises:
        RunFolderError: it holds a run already, is in use, or cannot be written.
    """
    folder = Path(out) if out is not None else _default(name)
    folder = Path(os.path.abspath(folder))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # "x": of two runs that start at the same moment, one gets the folder.
        with open(folder / LAUNCH, "x", encoding="utf-8") as stream:
            json.dump(options, stream, indent=1)
            stream.write("\n")
        (folder / "ranks").mkdir()
    except FileExistsError as error:
        if not folder.is_dir():
            raise RunFolderError(
                f"{folder}: is a file, not a folder. Nothing was started"
            ) from error
        raise RunFolderError(
            f"{folder}: already holds a run. It is left as it is and nothing was started; "
            "give another --out, or remove that folder"
        ) from error
    except OSError as error:
        raise RunFolderError(
            f"{folder}: cannot be written ({error.strerror}). Nothing was started; choose another --out"
        ) from error
    return folder


def _default(name: str) -> Path:
    stamp = datetime.now(timezone.utc).astimezone().strftime("%Y-%m-%d-%H%M%S")
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(name).stem or "run").strip("-.")[:40] or "run"
    base = Path("flopwise-runs") / f"{stamp}-{stem}"
    folder, n = base, 1
    while folder.exists():
        n += 1
        folder = base.with_name(f"{base.name}-{n}")
    return folder
