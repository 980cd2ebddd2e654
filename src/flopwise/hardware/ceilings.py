"""Measured ceilings: their cache, and the subprocess that measures what is not cached.

Torch-free: measuring takes torch and runs as `python -m flopwise.meter.ceilings`. The cache is one
JSON file a device, CPU thread count and torch version, under $XDG_CACHE_HOME/flopwise/ceilings; a
file that cannot be used is measured again, and a folder that cannot be written is no error.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from flopwise.errors import HardwareError, RecordError, RunFolderError
from flopwise.hardware import host
from flopwise.hardware.accelerators import Peak
from flopwise.records import store
from flopwise.records.ceilings import SCHEMA, CeilingsRecord, GemmCeiling

MODULE = "flopwise.meter.ceilings"
_TIMEOUT_S = {"cpu": 120.0, "cuda": 600.0}
_QUIET = "Run `flopwise ceilings` when it is quiet, or give --peak"
# They would make a dtype compute in another one than its name says.
_DTYPE_OVERRIDES = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")


@dataclass(frozen=True)
class Key:
    """What a measurement is good for."""

    device_type: str  # "cpu" | "cuda"
    device_name: str
    threads: int  # 0 for a CUDA device
    cores: int  # 0 for a CUDA device
    torch: str


def key_of(record: CeilingsRecord) -> Key:
    """Returns the key that a record is cached under."""
    return Key(record.device_type, record.device_name, record.threads, record.cores, record.torch)


def cpu_key(threads: int, torch: str) -> Key:
    """Returns the key of this host's CPU with `threads` threads under this version of torch."""
    return Key("cpu", host.cpu_model(), threads, host.usable_cores(), torch)


def measured_peak(
    record: CeilingsRecord, dtype: str | None = None, *, sustained: bool = False
) -> Peak | None:
    """Returns the fastest measured rate as a peak; None: no such dtype was measured undisturbed.

    A disturbed dtype that might be the fastest leaves the fastest unknown, so none is returned.

    Args:
        record: of the device.
        dtype: of this dtype alone. By default, on a CPU the fastest dtype; on a GPU the fastest
            16-bit one, which is what data sheet peaks refer to.
        sustained: what the device holds for seconds, not what it reaches for an instant. A step
            with pauses between its matrix products may pass this one, but not the burst rate.
    """
    rates: list[tuple[float, GemmCeiling]] = []
    for gemm in record.gemm:
        rate = gemm.sustained_flops_per_s if sustained else gemm.burst_flops_per_s
        wanted = (dtype,) if dtype else ("bf16", "fp16") if record.device_type == "cuda" else None
        if rate is not None and (wanted is None or gemm.dtype in wanted):
            rates.append((rate, gemm))
    if not rates:
        return None
    rate, gemm = max(rates, key=lambda pair: pair[0])
    if dtype is None and max(record.disturbed.values(), default=0.0) > rate:
        return None
    threads = f", {record.threads} thread(s)" if record.device_type == "cpu" else ""
    source = (
        f"measured here on {record.created[:10]}: {gemm.dtype} {_what(gemm)}, "
        f"{'sustained' if sustained else 'best'}, torch {record.torch}{threads}"
    )
    return Peak(rate, gemm.dtype, source, "measured")


def _what(gemm: GemmCeiling) -> str:
    return gemm.shape if gemm.shape.startswith("convolution") else f"matrix product {gemm.shape}"


def folder() -> Path:
    """Returns the folder of the cache; it need not exist.

    Raises:
        RuntimeError: neither XDG_CACHE_HOME nor a home is known.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "flopwise" / "ceilings"


def load(key: Key) -> tuple[CeilingsRecord | None, str | None]:
    """Returns the cached record of a key, or None; and a note where a file was there but no use."""
    try:
        path = _path(key)
        if not path.exists():
            return None, None
        record = store.read(path, CeilingsRecord, SCHEMA)
    except (RecordError, RuntimeError, OSError) as error:
        return None, f"cached ceilings ignored, measured again: {error}"
    if key_of(record) != key or not _plausible(record):
        what = "holds another device's" if key_of(record) != key else "holds impossible"
        return None, f"cached ceilings ignored, measured again: {path}: {what} figures"
    return record, None


def save(record: CeilingsRecord) -> str | None:
    """Stores a record atomically. Returns None, or why it could not be kept."""
    try:
        path = _path(key_of(record))
        path.parent.mkdir(parents=True, exist_ok=True)
        store.write(path, record)
    except (RunFolderError, RuntimeError, OSError) as error:
        return f"the ceilings are not cached, they will be measured again ({error})"
    return None


def obtain(
    threads: int | None,
    python: str = sys.executable,
    refresh: bool = False,
    *,
    key: Key | None = None,
) -> tuple[CeilingsRecord, str | None]:
    """Returns the ceilings of the device that torch uses here, and a note on where they are from.

    Args:
        threads: torch's CPU threads; None: torch's own choice.
        python: the interpreter that has torch.
        refresh: measure even where the cache has a record.
        key: what is wanted, if known, e.g. from a run's record; else a subprocess finds out.

    Raises:
        HardwareError: the measurement failed or did not end in time.
    """
    notes: list[str] = []
    key = key or _identify(threads, python)
    if not refresh:
        record, note = load(key)
        if record is not None:
            return record, f"from the cache, measured {record.created}; --refresh measures again"
        notes += [note] if note else []
    arguments = ["--device", key.device_type]
    threads = threads or key.threads or None
    data = _run(python, arguments, threads, _TIMEOUT_S[key.device_type])
    try:
        record = store.decode(data, CeilingsRecord, SCHEMA, f"{python} -m {MODULE}")
    except RecordError as error:
        raise HardwareError(f"the ceilings were not measured: {error}") from error
    if not record.gemm and record.disturbed:
        raise HardwareError(f"the machine is too busy to measure what it reaches. {_QUIET}")
    if not _plausible(record):
        raise HardwareError(f"measuring the ceilings of {record.device_name} gave no usable rate")
    if (record.device_type, record.device_name) != (key.device_type, key.device_name):
        raise HardwareError(
            f"wanted the ceilings of {key.device_name}, but torch uses {record.device_name} here. "
            "Make the device visible first in CUDA_VISIBLE_DEVICES"
        )
    if record.disturbed:
        dtypes = ", ".join(record.disturbed)
        note = f"the machine was too busy to measure what it reaches in {dtypes}. {_QUIET}"
    else:
        note = save(record)
    return record, "; ".join([*notes, *([note] if note else [])]) or None


def better(old: CeilingsRecord, python: str = sys.executable) -> CeilingsRecord | None:
    """Returns a device's ceilings measured again, of each dtype the faster of both; None: nothing was faster.

    Other work only ever lowers a rate: a machine that was busy the first time has higher ceilings than it showed. What
    is faster is kept in the cache.

    Raises:
        HardwareError: the measurement failed or did not end in time.
    """
    new, _ = obtain(old.threads or None, python, refresh=True, key=key_of(old))
    fastest = {gemm.dtype: gemm for gemm in old.gemm}
    gained = False
    for gemm in new.gemm:
        before = fastest.get(gemm.dtype)
        if before is None or gemm.burst_flops_per_s > before.burst_flops_per_s:
            fastest[gemm.dtype] = gemm
            gained = True
    disturbed = {d: rate for d, rate in new.disturbed.items() if d not in fastest}
    merged = dataclasses.replace(new, gemm=list(fastest.values()), disturbed=disturbed)
    save(merged)
    return merged if gained else None


def _identify(threads: int | None, python: str) -> Key:
    """Returns the key of the device that torch would use."""
    if python == sys.executable and threads:
        try:
            version = importlib.metadata.version("torch")
        except importlib.metadata.PackageNotFoundError:
            version = ""
        if version.endswith("+cpu"):  # a CPU build: no need to load torch to know the device
            return cpu_key(threads, version)
    data = _run(python, ["--identify"], threads, timeout_s=120.0)
    try:
        return Key(**json.loads(data))
    except (ValueError, TypeError) as error:
        raise HardwareError(f"{python} -m {MODULE} --identify: unreadable answer") from error


def _run(python: str, arguments: list[str], threads: int | None, timeout_s: float) -> bytes:
    """Returns what the measuring subprocess wrote.

    It runs in an empty folder, so that no file of the user's shadows a module.
    """
    environment = {k: v for k, v in os.environ.items() if k not in _DTYPE_OVERRIDES}
    environment |= {"FLOPWISE_DISABLE": "1", "PYTHONSAFEPATH": "1"}
    if "PYTHONPATH" in environment:
        entries = environment["PYTHONPATH"].split(os.pathsep)
        environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(e) for e in entries if e)
    if threads:
        environment |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        arguments = [*arguments, "--threads", str(threads)]
    try:
        temporary = tempfile.TemporaryDirectory(prefix="flopwise-")
    except OSError as error:
        raise HardwareError(f"no temporary folder can be made ({error}); set TMPDIR") from error
    with temporary as empty:
        path = Path(empty) / "out.json"
        command = [python, "-m", MODULE, "--json", str(path), *arguments]
        try:
            done = subprocess.run(
                command,
                env=environment,
                cwd=empty,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired as error:
            raise HardwareError(
                f"measuring the ceilings did not end within {timeout_s:g} s and was stopped. "
                "The machine may be overloaded; MFU needs --peak meanwhile"
            ) from error
        except OSError as error:
            raise HardwareError(f"{python} cannot be run ({error.strerror or error})") from error
        if done.returncode != 0 or not path.exists():
            told = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise HardwareError(f"measuring the ceilings failed: {told[-1]}")
        return path.read_bytes()


def _path(key: Key) -> Path:
    text = json.dumps([key.device_type, key.device_name, key.threads, key.cores, key.torch])
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    plain = re.sub(r"[^a-z0-9]+", "-", key.device_name.lower()).strip("-")[:60]
    return folder() / f"{plain or 'device'}-{digest}.json"


def _plausible(record: CeilingsRecord) -> bool:
    rates = [g.burst_flops_per_s for g in record.gemm]
    rates += [g.sustained_flops_per_s for g in record.gemm if g.sustained_flops_per_s is not None]
    rates += [g.flops_per_clock * 1e9 for g in record.gemm if g.flops_per_clock is not None]
    return bool(rates) and all(1e6 < rate < 1e18 for rate in rates)
