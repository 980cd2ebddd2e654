"""Sets up the virtual environment of a checkout: what `make` calls before anything else. Standard library only.

python tools/set_up.py --venv .venv --torch cpu     the pinned CPU build of torch, and everything development needs
python tools/set_up.py --venv .venv-any --torch any this machine's own torch if it has one, else what pip chooses

Says what it does, mends a half-made environment, and leaves `.installed` in it only when all went well.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STAMP = ".installed"
#: Where PyTorch publishes CPU builds. Source: https://pytorch.org/get-started/locally (2026-11).
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
#: The first pip that tells what it would install (`--report`). Source: pip's changelog.
OLDEST_PIP = (22, 2)
#: Seconds between two signs of life while pip works.
SIGN_OF_LIFE_S = 20.0
PIP = ("-m", "pip", "--disable-pip-version-check", "--retries", "2")
#: What pip prints when nothing answers, lower case.
NO_NETWORK = (
    "failed to establish a new connection",
    "name resolution",
    "name or service not known",
    "network is unreachable",
    "connection refused",
    "connecttimeouterror",
    "read timed out",
    "proxyerror",
    "max retries exceeded",
    "connection broken",
)


class SetUpError(Exception):
    """The environment could not be made; the message says what to do."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 once the environment is complete, 1 after saying what is in the way."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--venv", type=Path, required=True, help="folder of the environment")
    parser.add_argument("--torch", choices=("cpu", "any"), default="cpu")
    args = parser.parse_args(argv)
    started = time.monotonic()
    try:
        python = make_environment(args.venv)
        if args.torch == "cpu":
            install_cpu(python)
        else:
            install_any(python)
    except SetUpError as error:
        say(f"The set-up failed: {error}")
        return 1
    (args.venv / STAMP).touch()
    say(f"{args.venv} is ready ({time.monotonic() - started:.0f} s)")
    return 0


def say(text: str) -> None:
    """Prints one line of progress."""
    print(f"== {text}", flush=True)


def make_environment(venv: Path) -> Path:
    """Returns the Python of a working environment in `venv`, made or mended if need be.

    Raises:
        SetUpError: it cannot be made.
    """
    python = venv / "bin" / "python"
    if venv.exists() or venv.is_symlink():
        if works(python):
            return python
        say(
            f"{venv} is there but does not work (an earlier set-up was interrupted?): making it anew"
        )
        try:
            if venv.is_symlink() or not venv.is_dir():
                venv.unlink()
            else:
                shutil.rmtree(venv)
        except OSError as error:
            raise SetUpError(
                f"{venv} cannot be removed ({error.strerror}). Remove it by hand"
            ) from error
    version = ".".join(map(str, sys.version_info[:3]))
    say(f"Making {venv} with Python {version}")
    done = subprocess.run(
        [sys.executable, "-m", "venv", str(venv)], capture_output=True, text=True, check=False
    )
    if done.returncode or not works(python):
        said = (done.stdout + done.stderr).strip()
        shutil.rmtree(venv, ignore_errors=True)
        if "ensurepip" in said:
            raise SetUpError(
                "this Python comes without venv. On Debian and Ubuntu: apt install python3-venv. "
                "Or name another Python: make PYTHON=..."
            )
        raise SetUpError(f"{sys.executable} -m venv {venv} failed:\n{tail(said)}")
    return python


def works(python: Path) -> bool:
    """Returns whether an environment's Python starts, is new enough and has pip (given to it, if it has none)."""
    question = "import sys, pip; sys.exit(sys.version_info < (3, 10))"
    try:
        if run([str(python), "-c", question]).returncode == 0:
            return True
        return (
            run([str(python), "-m", "ensurepip"]).returncode == 0
            and run([str(python), "-c", question]).returncode == 0
        )
    except OSError:
        return False


def install_cpu(python: Path) -> None:
    """Installs the pinned CPU build of torch, then this project with all that development needs.

    Raises:
        SetUpError: pip failed, or what came is not a CPU build.
    """
    pinned = ("-c", str(ROOT / "constraints.txt"))
    renew_old_pip(python)
    source: tuple[str, ...] = ()
    if not has_torch(python):
        found = would_install(python, (*pinned, "torch"))
        if found is not None and is_cuda_build(found):
            say(
                "The package index has only a CUDA build of torch: taking the CPU build from PyTorch's own"
            )
            source = ("--index-url", CPU_INDEX)
        say("Installing torch, CPU build (about 200 MB to load, 900 MB on disk)")
        pip(python, ("install", *pinned, *source, "torch"))
    say("Installing flopwise and what its development needs")
    pip(python, ("install", "--no-compile", *pinned, "-e", f"{ROOT}[dev]"))
    if subprocess.run(
        [str(python), str(ROOT / "tools" / "guard_cpu_build.py")], check=False
    ).returncode:
        raise SetUpError("torch is not the CPU build; see above. `make clean` and try again")


def install_any(python: Path) -> None:
    """Installs this project beside the torch that this Python has, else beside the one that pip chooses.

    Raises:
        SetUpError: pip failed.
    """
    spec = find_spec("torch")
    if spec is not None and spec.origin is not None and not has_torch(python):
        outer = Path(spec.origin).parent.parent
        say(f"Using the torch that is installed for {sys.executable}")
        site = run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"])
        # A path file: packages installed in the environment itself come first.
        (Path(site.stdout.strip()) / "outer-torch.pth").write_text(f"{outer}\n", encoding="utf-8")
    say(
        "Installing flopwise"
        + (
            ""
            if has_torch(python)
            else ", with the torch that pip chooses (gigabytes, if it is a CUDA build)"
        )
    )
    pip(python, ("install", "--no-compile", "-e", f"{ROOT}[dev]"))


def has_torch(python: Path) -> bool:
    """Returns whether torch is installed for that Python."""
    return (
        run([str(python), "-c", "import importlib.metadata as m; m.version('torch')"]).returncode
        == 0
    )


def renew_old_pip(python: Path) -> None:
    """Updates a pip that is too old to be asked what it would install.

    Raises:
        SetUpError: it cannot be updated.
    """
    told = run([str(python), "-c", "import pip; print(pip.__version__)"]).stdout.split(".")
    if tuple(int(part) for part in told[:2]) < OLDEST_PIP:
        say("Updating pip")
        pip(python, ("install", "--upgrade", "pip"))


def would_install(python: Path, what: Sequence[str]) -> dict[str, Any] | None:
    """Returns what pip says of the one package it would install; None if it does not say.

    Raises:
        SetUpError: pip finds nothing to install.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        pip(
            python,
            (
                "install",
                "--dry-run",
                "--no-deps",
                "--ignore-installed",
                "--report",
                str(report),
                *what,
            ),
        )
        try:
            item: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))["install"][0]
        except (OSError, ValueError, LookupError):
            return None
    return item


def is_cuda_build(item: dict[str, Any]) -> bool:
    """Returns whether an entry of pip's report is a build of torch that brings CUDA along."""
    metadata = item.get("metadata", {})
    version = str(metadata.get("version", ""))
    if "+" in version:
        return not version.endswith("+cpu")
    needs = [str(text).lower() for text in metadata.get("requires_dist") or ()]
    return sys.platform == "linux" and any(
        need.startswith(("nvidia-", "cuda-", "triton")) for need in needs
    )


def pip(python: Path, words: Sequence[str]) -> None:
    """Runs pip quietly, with a sign of life now and then.

    Raises:
        SetUpError: it failed; the message says why in the words that fit.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        with subprocess.Popen(
            [str(python), *PIP, *words],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        ) as child:
            started = time.monotonic()
            try:
                while True:
                    try:
                        child.wait(timeout=SIGN_OF_LIFE_S)
                        break
                    except subprocess.TimeoutExpired:
                        say(f"  still at it ({time.monotonic() - started:.0f} s)")
            except KeyboardInterrupt:
                child.terminate()
                raise
        if child.returncode == 0:
            return
        log.seek(0)
        raise SetUpError(explain(log.read()))


def explain(output: str) -> str:
    """Returns why pip failed, and what to do."""
    low = output.lower()
    lines = f"The last lines of pip:\n{tail(output)}"
    if "no space left on device" in low:
        return f"the disk is full. torch and the rest need 1.5 GB. {lines}"
    silent = [
        line for line in output.splitlines() if any(sign in line.lower() for sign in NO_NETWORK)
    ]
    if silent:
        return (
            "no package index could be reached; the first set-up needs one. Behind a proxy or with a mirror, set "
            "pip's own variables (HTTPS_PROXY, PIP_INDEX_URL). Run the same command again then. pip says:\n"
            f"{tail(silent[-1])}"
        )
    if "no matching distribution" in low:
        version = ".".join(map(str, sys.version_info[:2]))
        return (
            f"there is no build of a package for Python {version} on this platform. With another Python: "
            f"make clean, and make PYTHON=python3.12 ... {lines}"
        )
    return lines


def tail(text: str, lines: int = 12) -> str:
    """Returns the last lines of a text, indented."""
    return "\n".join(f"   {line}" for line in text.strip().splitlines()[-lines:])


def run(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Returns a finished process with its output; nothing is raised for its exit code."""
    return subprocess.run(words, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        say("Interrupted. Run the same command again: it goes on from here")
        sys.exit(130)
