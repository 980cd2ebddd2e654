"""The measured ceilings that a run is held against: those of the very device it ran on, or none."""

from __future__ import annotations

import socket
from dataclasses import replace

from flopwise.errors import FlopwiseError
from flopwise.flops.mfu import IMPOSSIBLE
from flopwise.measurement.words import say
from flopwise.records.ceilings import CeilingsRecord
from flopwise.records.rank import RankRecord
from flopwise.records.run import RunRecord


def of_rank(
    lead: RankRecord, notes: list[str], *, may_measure: bool, quiet: bool
) -> CeilingsRecord | None:
    """Returns the measured ceilings of the device a rank ran on, from the cache, or measured now.

    A CPU's peak is always the measured one. Of a GPU they are only looked up, unless nothing else is known of it.
    """
    from flopwise import plans, summary
    from flopwise.hardware import accelerators, ceilings

    threads = None
    if lead.host != socket.gethostname():
        return None  # the cache, and whatever could be measured, is this host's
    if lead.device_type == "cuda":
        key = ceilings.Key("cuda", lead.device_name or "", 0, 0, lead.torch)
        known = accelerators.reference_peak(summary.device_match(lead)) is not None
        may_measure = may_measure and not known and lead.world_size == 1
    elif lead.device_type == "cpu":
        threads = lead.cpu_threads
        key = ceilings.cpu_key(threads, lead.torch)
    else:
        return None
    record, note = ceilings.load(key)
    if record is None and may_measure:
        own = plans.torch_version()
        if own is not None and own != lead.torch:
            key = replace(key, torch=own)
            notes.append(f"ceilings are measured with torch {own}; the script used {lead.torch}")
        if not quiet:
            say("flopwise: measuring what this device reaches; the result is kept")
        try:
            record, note = ceilings.obtain(threads, key=key)
        except FlopwiseError as error:
            note = f"the ceilings of this device could not be measured: {error}"
        except KeyboardInterrupt:
            note = "the ceilings of this device were not measured: interrupted"
    if note and not note.startswith("from the cache"):
        notes.append(note)
    if record is not None and lead.device_type == "cuda":
        other = _of_another_device(record, lead)
        if other:
            notes.append(f"the cached ceilings are left out: they were measured with {other}")
            return None
    return record


def passed(record: RunRecord, measured: CeilingsRecord | None) -> bool:
    """Whether a run was faster than what its CPU was measured to reach: then that was measured too low."""
    if measured is None or measured.device_type != "cpu" or record.mfu.peak_kind != "measured":
        return False
    return IMPOSSIBLE in (record.mfu.reason or "")


def again(measured: CeilingsRecord, notes: list[str], *, quiet: bool) -> CeilingsRecord | None:
    """Returns higher ceilings of a CPU, measured again, or None; says so."""
    from flopwise.hardware import ceilings

    if not quiet:
        say("flopwise: the run beats what this CPU was measured to reach; measuring it again")
    try:
        found = ceilings.better(measured)
    except (FlopwiseError, KeyboardInterrupt) as error:
        notes.append(f"the ceilings of this CPU could not be measured again: {error}")
        return None
    if found is not None:
        notes.append(
            f"this CPU was measured again: the figures of {measured.created[:16]} were too low (a busy machine)"
        )
    return found


def _of_another_device(record: CeilingsRecord, lead: RankRecord) -> str | None:
    """Returns by what a GPU of the same name differs from the one that the ceilings were measured on."""
    telemetry = lead.telemetry
    for what, theirs, ours, slack in (
        ("bytes of memory", record.memory_bytes, lead.device_total_bytes, 0.0),
        ("SMs", record.sm_count, telemetry.sm_count, 0.0),
        ("W power limit", record.power_limit_w, telemetry.power_limit_w, 1.0),
    ):
        if theirs is not None and ours is not None and abs(theirs - ours) > slack:
            return f"{theirs:g} {what}, this device has {ours:g}"
    if record.mig != telemetry.mig and telemetry.name is not None:
        return "MIG on, it is off here" if record.mig else "MIG off, it is on here"
    return None
