"""Measures what this device reaches: `python -m flopwise.meter.ceilings --json PATH`, a subprocess.

The parent process has no torch and reads the JSON (hardware/ceilings.py). Operands are random
numbers: zeros switch fewer transistors, draw less power and run faster.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

import torch

from flopwise._version import __version__
from flopwise.hardware import host
from flopwise.meter import ceilings_cpu, ceilings_cuda, nvml
from flopwise.records import store
from flopwise.records.ceilings import SCHEMA, CeilingsRecord

# More than the CUDA context of this process takes.
_OWN_BYTES = 2e9


def measure(device_type: str) -> CeilingsRecord:
    """Returns the ceilings of the CPU with torch's current threads, or of the current CUDA device."""
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    load_1m = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    begin = time.perf_counter()
    with torch.no_grad():
        record = _cuda() if device_type == "cuda" else _cpu(load_1m)
    wall_s = time.perf_counter() - begin
    return dataclasses.replace(record, created=created, load_1m=load_1m, wall_s=wall_s)


def _cpu(load_1m: float | None) -> CeilingsRecord:
    threads, cores = torch.get_num_threads(), host.usable_cores()
    notes = []
    if load_1m is not None and load_1m > 0.5 * cores:
        notes.append(
            f"the load average was {load_1m:.1f} on {cores} cores before measuring: other work may "
            "have lowered these rates"
        )
    quota = host.cpu_quota()
    if quota is not None and quota < threads:
        notes.append(f"the control group allows {quota:g} CPUs, fewer than {threads} threads")
    found = ceilings_cpu.gemms()
    copy = ceilings_cpu.copy_bytes_per_s()
    return CeilingsRecord(
        schema=SCHEMA,
        flopwise=__version__,
        created="",
        device_type="cpu",
        device_name=host.cpu_model(),
        torch=torch.__version__,
        cuda=None,
        driver=None,
        threads=threads,
        cores=cores,
        wall_s=0.0,
        gemm=found.gemm,
        copy_bytes_per_s=copy,
        copy_size_bytes=ceilings_cpu.COPY_BYTES,
        dispatch_s=ceilings_cpu.dispatch_s(),
        launch_s=None,
        link=None,
        disturbed=found.disturbed,
        not_measured=found.not_measured,
        notes=notes,
    )


def _cuda() -> CeilingsRecord:
    index = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(index)
    device = nvml.of_torch_device(index)
    notes = [device.reason] if device.reason else []
    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    if total_bytes - free_bytes > _OWN_BYTES:
        notes.append(
            f"{(total_bytes - free_bytes) / 1e9:.1f} GB of the device were in use before measuring: "
            "another process may have lowered these rates"
        )
    found = ceilings_cuda.measure(index, device)
    if device.mig:
        notes.append("a MIG slice: the rates are the slice's, clocks and power the whole device's")
    return CeilingsRecord(
        schema=SCHEMA,
        flopwise=__version__,
        created="",
        device_type="cuda",
        device_name=properties.name,
        torch=torch.__version__,
        cuda=torch.version.cuda,
        driver=device.read_driver(),
        threads=0,
        cores=0,
        wall_s=0.0,
        gemm=found.gemm,
        copy_bytes_per_s=found.copy_bytes_per_s,
        copy_size_bytes=found.copy_size_bytes,
        dispatch_s=found.dispatch_s,
        launch_s=found.launch_s,
        link=found.link,
        memory_bytes=properties.total_memory,
        sm_count=properties.multi_processor_count,
        mig=device.mig,
        sm_max_mhz=device.read_sm_max_mhz(),
        power_limit_w=device.read_power_limit_w(),
        power_limit_default_w=device.read_power_limit_default_w(),
        not_measured=found.not_measured,
        notes=notes,
    )


def _identity(device_type: str) -> dict[str, str | int]:
    """Returns the fields of `hardware.ceilings.Key`."""
    if device_type == "cuda":
        name = torch.cuda.get_device_properties(torch.cuda.current_device()).name
        threads = cores = 0
    else:
        name, threads, cores = host.cpu_model(), torch.get_num_threads(), host.usable_cores()
    return {
        "device_type": device_type,
        "device_name": name,
        "threads": threads,
        "cores": cores,
        "torch": torch.__version__,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 after writing the record, or the device's identity, to the path of --json."""
    parser = argparse.ArgumentParser(prog="python -m flopwise.meter.ceilings")
    parser.add_argument("--json", type=Path, required=True, metavar="PATH")
    parser.add_argument("--threads", type=int, metavar="N", help="torch's threads on a CPU")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="by default CUDA where there is")
    parser.add_argument("--identify", action="store_true", help="say which device, do not measure")
    options = parser.parse_args(arguments)
    if options.threads is not None:
        if options.threads < 1:
            parser.error("--threads takes 1 or more")
        torch.set_num_threads(options.threads)
    device_type = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.identify:
        store.write_text(options.json, json.dumps(_identity(device_type)) + "\n")
    else:
        store.write(options.json, measure(device_type))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
