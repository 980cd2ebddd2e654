"""The devices that ranks ran on, each counted once: several ranks may share one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flopwise.records.rank import RankRecord


@dataclass(frozen=True)
class Devices:
    """The devices that some ranks ran on, each counted once."""

    shared_by: list[list[RankRecord]]  # the ranks by device; on a CPU each rank for itself
    count: float  # for MFU: on a CPU one is what the peak was measured on, the threads of one rank
    priced: int  # for cost: on a CPU one is a host
    notes: list[str]

    @classmethod
    def of(cls, ranks: Sequence[RankRecord]) -> Devices:
        """Returns the devices of these ranks, told apart by host and UUID; where that is unknown, each has its own."""
        by_host: dict[str, list[RankRecord]] = {}
        for r in ranks:
            by_host.setdefault(r.host, []).append(r)
        if all(r.device_type == "cpu" for r in ranks):
            count = sum(_cpus(here) for here in by_host.values())
            return cls([[r] for r in ranks], count, len(by_host), _crowding(by_host))
        found: dict[tuple[str, str], list[RankRecord]] = {}
        for r in ranks:
            found.setdefault((r.host, r.telemetry.uuid or f"of rank {r.rank}"), []).append(r)
        notes = [
            f"ranks {', '.join(str(r.rank) for r in group)} share one device of {host}: it counts once"
            for (host, _), group in found.items()
            if len(group) > 1
        ]
        notes += [
            f"which device each of the {len(here)} ranks on {host} used is not known, so each counts as one of its own: "
            "if ranks share a device, MFU is higher, and energy and cost are lower than given"
            for host, here in by_host.items()
            if len(here) > 1 and any(r.telemetry.uuid is None for r in here)
        ]
        return cls(list(found.values()), len(found), len(found), notes)


def _cpus(here: Sequence[RankRecord]) -> float:
    """Returns how many ranks' worth of threads the cores of one host hold, at most one a rank."""
    cores = _cores(here)
    wanted = sum(r.cpu_threads for r in here)
    if cores is None or wanted <= cores:
        return len(here)
    return min(len(here), max(1.0, cores / here[0].cpu_threads))


def _cores(here: Sequence[RankRecord]) -> int | None:
    """Returns the cores that ranks on one host may use together, None if not known of all of them."""
    facts = [r.surroundings for r in here if r.surroundings is not None and r.surroundings.masks]
    if len(facts) < len(here):
        return None
    together = {core for f in facts for core in f.masks[-1].cores}
    quotas = [f.usable_cores for f in facts if f.usable_cores < len(f.masks[-1].cores)]
    return min([len(together), *([max(quotas)] if quotas else [])])


def _crowding(by_host: dict[str, list[RankRecord]]) -> list[str]:
    """Returns what is to be said where ranks on one host want more cores than there are."""
    notes = []
    for host, here in sorted(by_host.items()):
        wanted, known = sum(r.cpu_threads for r in here), _cores(here)
        cores = here[0].cpu_cores if known is None else known
        if len(here) == 1 or wanted <= cores:
            continue
        shared = f"{len(here)} ranks with {wanted} threads share {cores} cores of {host}: "
        if known is None:
            shared += "the peak is what one rank reaches alone, so that MFU cannot come near 100 %"
        else:
            shared += f"they count as {_cpus(here):.3g} times what one rank reaches alone"
        notes.append(shared)
    return notes
