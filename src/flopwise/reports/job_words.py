"""What is said of a job in words, for the terminal and for the page: facts, verdicts, and why a figure is not there."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from flopwise.records.job import Defect, JobRecord, Links, RankRecord, Redundant, Straggler
from flopwise.reports import figures
from flopwise.reports.figures import percent
from flopwise.reports.screen import WARN, Piece

#: What can be withheld, in words.
CONCLUSIONS = {
    "ledger": "the ledger",
    "mfu": "MFU",
    "steps": "step times",
    "idle": "idle time and its causes",
    "overlap": "overlap with compute",
    "matching": "which calls belong together",
    "waits": "waiting told from transfer",
    "bandwidth": "bandwidth",
    "redundancy": "redundant traffic",
    "stragglers": "stragglers",
}
#: Why a rank is late, in words.
REASONS = {
    "host": "its host is late",
    "input": "it waits for data",
    "kernels": "its kernels are slower",
    "clock": "its clock is lower",
    "work": "it has more work",
    "not known": "reason not known",
}
#: Traffic that moves nothing new, in words.
REDUNDANT = {
    "accumulation": "reduced in every micro-batch of an accumulation",
    "repeated": "the same bytes moved again",
    "buffers": "buffers broadcast in every step",
    "wide-gradients": "gradients wider than their parameters",
}
NOT_KNOWN = "not known"
WITHHELD = "withheld"

SPANS = 6  # of ranks that are listed


def title(record: JobRecord) -> str:
    """Returns the command that would show this again, with the folder of its sources where they have one in common."""
    sources = list(dict.fromkeys(record.sources))
    if len(sources) > 1:
        folders = {path.rpartition("/")[0] for path in sources}
        if len(folders) == 1 and (folder := folders.pop()):
            return f"flopwise analyze {folder}"
    return f"flopwise analyze {figures.few(sources, 2)}".rstrip()


def facts(record: JobRecord) -> list[Piece]:
    """Returns what was read: ranks, device and steps."""
    n, world = len(record.ranks), record.world_size
    if world is None:
        read: Piece = f"{figures.counted(n, 'rank')} read, world size not known"
    elif n == world:
        read = f"all {figures.counted(n, 'rank')} read" if n > 1 else "1 rank"
    else:
        read = (f"{n} of {figures.counted(world, 'rank')} read", WARN)
    return [
        read,
        record.device_name or "device not named",
        f"{figures.counted(record.steps, 'step')}{' of each' if n > 1 else ''}",
    ]


def step(record: JobRecord) -> list[Piece]:
    """Returns the step time and how far the ranks lie apart."""
    if record.step_s is None:
        return [(absent(record, "steps"), WARN), *because(record, "steps")]
    how = "profiled" if record.profiled else "undisturbed"
    each = [one.step_s for one in record.ranks if one.step_s is not None]
    said: list[Piece] = [
        (figures.duration(record.step_s), "bold"),
        how if len(record.ranks) == 1 else f"mean over ranks, {how}",
    ]
    if len(each) > 1:
        said.append(f"ranks {figures.duration(min(each))} to {figures.duration(max(each))}")
    if not record.profiled and record.recorded_step_s is not None:
        recorded = figures.duration(record.recorded_step_s)
        said.append(f"calls, waiting and links are those of profiled steps of {recorded}")
    return said


def mfu(record: JobRecord) -> list[Piece]:
    """Returns MFU, or why there is none."""
    reason = because(record, "mfu")
    if reason:
        return [(absent(record, "mfu"), WARN), *reason]
    if record.mfu is None:
        return [("none", WARN), record.mfu_reason or "no rank has a ledger"]
    ledgers = [one.ledger for one in record.ranks if one.ledger is not None]
    of = ledgers[0].peak_flops_per_s if ledgers else None
    said: list[Piece] = [(percent(record.mfu), "bold green")]
    if len(ledgers) > 1:
        said.append(f"mean over {figures.counted(len(ledgers), 'rank')}")
    if of is not None:
        said += [f"of {figures.quantity(of, 'FLOP/s')} a device"]
    useful = next((line.share_frac for line in record.lines if line.name == "ideal"), None)
    if useful is not None and abs(useful - record.mfu) > 1e-3 * record.mfu:
        said.append(f"{percent(useful)} without what attention masks hide")
    return said


def codes(record: JobRecord, conclusion: str, rank: int | None = None) -> list[str]:
    """Returns the codes of the defects that withhold a conclusion, of the whole job or of one rank too."""
    found = dict.fromkeys(record.health.withheld.get(conclusion, ()))
    if rank is not None:
        for defect in record.health.defects:
            if defect.rank == rank and conclusion in defect.withholds:
                found[defect.code] = None
    return list(found)


def absent(record: JobRecord, conclusion: str, rank: int | None = None) -> str:
    """Returns what stands where a figure would: that it is withheld, or not known."""
    return WITHHELD if codes(record, conclusion, rank) else NOT_KNOWN


def because(record: JobRecord, conclusion: str) -> list[Piece]:
    """Returns by which defects a conclusion is withheld for the whole job; nothing where it is not."""
    found = codes(record, conclusion)
    return [f"by {figures.few(found, 4)}"] if found else []


def health(record: JobRecord) -> list[Piece]:
    """Returns the verdict on the traces."""
    found = record.health
    looked = f"looked for {figures.counted(len(found.checked), 'defect')}"
    if found.clean:
        harmless = f"{figures.counted(len(groups(found.defects)), 'remark')}"
        return [
            ("clean", "bold green"),
            looked,
            f"nothing is withheld{f', {harmless}' if found.defects else ''}",
        ]
    held = [CONCLUSIONS.get(name, name) for name in found.withheld]
    said: list[Piece] = [("defects", WARN), looked]
    return [*said, f"withheld for the whole job: {', '.join(held) if held else 'nothing'}"]


@dataclass(frozen=True)
class Group:
    """Defects of one kind that withhold the same; the first of them is shown."""

    first: Defect
    ranks: list[int]
    n: int  # defects
    count: int  # events, calls or files, of all of them
    share_frac: float | None  # the largest


def groups(defects: Sequence[Defect]) -> list[Group]:
    """Returns the defects in their order, those of one kind on several ranks as one."""
    kinds: dict[tuple[str, str, tuple[str, ...]], list[Defect]] = {}
    for defect in defects:
        key = (defect.code, defect.defect, tuple(defect.withholds))
        kinds.setdefault(key, []).append(defect)
    out = []
    for same in kinds.values():
        ranks = sorted({one.rank for one in same if one.rank is not None})
        shares = [one.share_frac for one in same if one.share_frac is not None]
        count = sum(one.count for one in same)
        out.append(Group(same[0], ranks, len(same), count, max(shares, default=None)))
    return out


def defect(group: Group) -> list[Piece]:
    """Returns what is wrong, where, and how much of it."""
    first = group.first
    said: list[Piece] = [(f"{first.code} {first.defect}", WARN if first.withholds else "")]
    if group.ranks:
        said.append(spans(group.ranks))
    elif first.path:
        said.append(
            first.path if group.n == 1 else f"{first.path} and {group.n - 1} more of its kind"
        )
    else:
        said.append("the whole job")
    said.append(f"{group.count} seen")
    if group.share_frac is not None:
        most = " at most" if group.n > 1 else ""
        said.append(f"{percent(group.share_frac)} of them{most}")
    return said


def withholds(group: Group) -> str:
    """Returns what a defect withholds."""
    held = [CONCLUSIONS.get(name, name) for name in group.first.withholds]
    of = f" of {spans(group.ranks)}" if group.ranks else ""
    return f"withholds {', '.join(held)}{of}" if held else "withholds nothing"


def evidence(group: Group) -> str:
    """Returns what was seen; of several ranks, on the first of them."""
    first = group.first
    if group.n > 1 and first.rank is not None and first.evidence:
        return f"rank {first.rank}: {first.evidence}"
    return first.evidence


def spans(ranks: Iterable[int]) -> str:
    """Returns ranks as people write them: `rank 3`, `ranks 0-2, 7`."""
    found: list[tuple[int, int]] = []
    n = 0
    for rank in ranks:
        n += 1
        if found and rank == found[-1][1] + 1:
            found[-1] = (found[-1][0], rank)
        else:
            found.append((rank, rank))
    texts = [str(low) if low == high else f"{low}-{high}" for low, high in found[:SPANS]]
    rest = n - sum(high - low + 1 for low, high in found[:SPANS])
    more = f" and {rest} more" if rest else ""
    return f"{'rank' if n == 1 else 'ranks'} {', '.join(texts)}{more}"


def straggler(one: Straggler) -> list[Piece]:
    """Returns what a rank costs the others, and how sure that is."""
    said: list[Piece] = [(f"{figures.duration(one.delay_s)} a step for each other rank", WARN)]
    said.append(f"{percent(one.share_frac)} of all waiting that a rank caused")
    caused = f"{figures.duration(one.caused_s)} in these traces, mean over all ranks"
    if one.ci95 is not None:
        low, high = map(figures.duration, one.ci95)
        caused += f" ({low} to {high}, 95 %)"
    said.append(caused)
    said.append((REASONS.get(one.reason, one.reason), "bold"))
    return said


def parts(one: Straggler) -> str:
    """Returns what a straggler causes by reason, the largest first; "" where there is one reason at most."""
    found = [(name, s) for name, s in one.reasons_s.items() if s]
    if len(found) < 2:
        return ""
    found.sort(key=lambda pair: -pair[1] if math.isfinite(pair[1]) else 0.0)
    return "by reason: " + ", ".join(f"{name} {figures.duration(s)}" for name, s in found[:6])


def no_straggler(record: JobRecord) -> list[Piece]:
    """Returns why no rank is named."""
    reason = because(record, "stragglers")
    if reason:
        said: list[Piece] = [(WITHHELD, WARN), *reason]
        return [*said, record.stragglers_reason] if record.stragglers_reason else said
    return ["none is named", record.stragglers_reason or "the record has no reason"]


def links(record: JobRecord) -> list[Piece]:
    """Returns what of the link between the devices is used."""
    found: Links = record.links
    said: list[Piece] = [found.name or "link not known"]
    if found.bytes_per_s is not None:
        said.append(f"{figures.quantity(found.bytes_per_s, 'B/s')} in one direction of a device")
    if found.source:
        said.append(found.source)
    missing = False
    for words, frac in (
        ("over the step", found.step_average_frac),
        ("while bytes move", found.in_collectives_frac),
    ):
        if frac is None:
            missing = True
            said.append((f"{words}: {absent(record, 'bandwidth')}", WARN))
        else:
            said.append((f"{words}: {percent(frac)} used", "bold"))
    if missing:
        said += because(record, "bandwidth")
        said.append(found.reason or "the record has no reason")
    return said


def redundancy(record: JobRecord) -> list[Piece]:
    """Returns how much of the traffic moves nothing new."""
    frac = record.redundant_bytes_frac
    if frac is None:
        why = because(record, "redundancy")
        return [(WITHHELD, WARN), *why] if why else ["no share: no bytes of traffic are known"]
    if not record.redundant:
        return [f"{percent(frac)} of all bytes", "no known kind of it was found"]
    return [(f"{percent(frac)} of all bytes move nothing new", WARN)]


def redundant(one: Redundant) -> list[Piece]:
    """Returns what one kind of redundant traffic costs a step."""
    said: list[Piece] = [
        (REDUNDANT.get(one.kind, one.kind), "bold"),
        f"{percent(one.frac)} of all bytes",
        f"{figures.size(one.nbytes)} a step",
        f"{figures.duration(one.s)} of transfer",
    ]
    if one.exposed_s is not None:
        said.append(f"{figures.duration(one.exposed_s)} exposed")
    return [*said, f"{number(one.calls)} calls"]


def number(value: float) -> str:
    """Returns how often something is called a step."""
    return f"{value:.4g}" if abs(value) < 1e9 else figures.ABSURD


def telling(record: JobRecord, limit: int) -> list[RankRecord]:
    """Returns at most `limit` ranks in their order: stragglers, those with defects, and the ends of each column."""
    ranks = record.ranks
    if len(ranks) <= limit:
        return list(ranks)
    at = {one.rank: i for i, one in enumerate(ranks)}
    late = [at[one.rank] for one in record.stragglers if one.rank in at]
    broken = [at[d.rank] for d in record.health.defects if d.withholds and d.rank in at]
    chosen = dict.fromkeys([*late[: limit // 2], *dict.fromkeys(broken)][: 3 * limit // 4])
    for i in itertools.chain.from_iterable(itertools.zip_longest(*_by_column(ranks))):
        if len(chosen) >= limit:
            break
        if i is not None:
            chosen[i] = None
    return [ranks[i] for i in sorted(chosen)]


def _by_column(ranks: Sequence[RankRecord]) -> list[list[int]]:
    """Returns the ranks by each column, the most first, and again with the least first."""
    columns: list[Callable[[RankRecord], float | None]] = [
        lambda one: one.step_s,
        wait_frac,
        lambda one: one.exposed_s,
        lambda one: one.clock_offset_s,
    ]
    orders = []
    for value in columns:
        known = [(found, i) for i, one in enumerate(ranks) if (found := value(one)) is not None]
        if known and min(known)[0] < max(known)[0]:
            by_value = [i for _, i in sorted(known)]
            orders += [by_value[::-1], by_value]
    return orders or [list(range(len(ranks)))]


def wait_frac(one: RankRecord) -> float | None:
    """Returns the share of a rank's communication that is waiting: of all its matched calls."""
    if one.wait_frac is not None:
        return one.wait_frac
    if one.wait_s is None or one.communication_s is None or not one.communication_s > 0:
        return None
    return one.wait_s / one.communication_s


def others(record: JobRecord, shown: int) -> str:
    """Returns how many ranks are not in a table; "" for none."""
    rest = len(record.ranks) - shown
    if rest <= 0:
        return ""
    return f"{figures.counted(rest, 'rank')} that {'is' if rest == 1 else 'are'} less telling: in the JSON"


def of_ranks(record: JobRecord) -> str:
    """Returns how many ranks a ledger is the mean of; "" for one of one."""
    n, total = sum(one.ledger is not None for one in record.ranks), len(record.ranks)
    if n == total:
        return f"mean over {figures.counted(n, 'rank')}" if n > 1 else ""
    return f"mean over {n} of {figures.counted(total, 'rank')}"
