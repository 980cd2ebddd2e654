"""What is said of a job in words, for the terminal and for the page: facts, verdicts, and why a figure is not there."""

from __future__ import annotations

import itertools
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
#: The order of a job's findings, and what their shares are of.
FINDINGS = "what is worth most first; their shares may overlap"
SHARE_OF = "the mean step"
NOT_ASKED = "not asked for"  # of a rank without a ledger, where none was wanted
NOT_KNOWN = "not known"
WITHHELD = "withheld"

#: One of what defects count, where that is not the word less its last letter.
_ONE = {
    "launches": "launch",
    "kernels and copies": "kernel or copy",
    "events of the host": "event of the host",
}
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
        read = f"{n} of {figures.counted(n, 'rank')} read" if n > 1 else "1 rank"
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
        low, high = figures.duration(min(each)), figures.duration(max(each))
        said.append(
            "the same on all" if low == high else f"ranks {between((min(each), max(each)))}"
        )
    if not record.profiled and record.recorded_step_s is not None:
        recorded = figures.duration(record.recorded_step_s)
        said.append(f"calls, waiting and links are those of profiled steps of {recorded}")
    return said


def mfu(record: JobRecord) -> list[Piece]:
    """Returns MFU, or why there is none."""
    reason = because(record, "mfu")
    if reason:
        return [(absent(record, "mfu"), WARN), *reason]
    if record.mfu is None and any(one.ledger_reason == NOT_ASKED for one in record.ranks):
        return [("none", WARN), "it needs the ledger, which was not asked for (--no-ledger)"]
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


def share_of(record: JobRecord) -> str:
    """Returns what the shares of findings are of, where it is known how long a step is and where not."""
    return SHARE_OF if record.step_s is not None else "the time"


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
    if not record.ranks:
        return [("not judged", WARN), "no trace was given"]
    looked = f"looked for {figures.counted(len(found.checked), 'defect')}"
    if found.clean:
        harmless = f"{figures.counted(len(groups(found.defects)), 'remark')}"
        return [
            ("clean", "bold green"),
            looked,
            f"nothing is withheld{f', {harmless}' if found.defects else ''}",
        ]
    said: list[Piece] = [("defects", WARN), looked]
    return [*said, f"withheld for the whole job: {_held(found.withheld) or 'nothing'}"]


def _held(names: Iterable[str]) -> str:
    """Returns conclusions in words; "" for none."""
    names = list(names)
    if len(names) > 1 and set(CONCLUSIONS) <= set(names):
        return "every conclusion"
    return ", ".join(CONCLUSIONS.get(name, name) for name in names)


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
    count = _count(group)
    return [*said, count] if count else said


def _count(group: Group) -> str:
    """Returns how many of what are so: `5 of 8 ranks (62.5 %)`; "" where the defect is one thing."""
    n, share, what = group.count, group.share_frac, group.first.what
    if not what:
        return f"{n} seen" if n > group.n else ""
    said = f"{n} {what if n != 1 else _ONE.get(what, what.removesuffix('s'))}"
    if share is None or not 1e-9 < share <= 1 or not 0 < n < 1e12:
        return said
    if group.n > 1:
        return f"{said}, up to {percent(share)} of those of a rank"
    return f"{n} of {round(n / share)} {what} ({percent(share)})"


def withholds(group: Group) -> str:
    """Returns what a defect withholds."""
    held = _held(group.first.withholds)
    of = f" of {spans(group.ranks)}" if group.ranks else ""
    return f"withholds {held}{of}" if held else "withholds nothing"


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


#: What a straggler's figures are.
STRAGGLERS = "by the waiting that they cause in a step, mean over ranks"


def straggler(record: JobRecord, one: Straggler) -> list[Piece]:
    """Returns what a rank costs a step, how sure that is, and why."""
    said: list[Piece] = []
    s, step_s = one.per_step_s, record.step_of_calls_s
    if s is not None:
        within = f" ({between(one.per_step_ci95)}, 95 %)" if one.per_step_ci95 else ""
        said.append((f"{figures.duration(s)}{within}", WARN))
        if step_s:
            said.append(f"{percent(s / step_s)} of the step")
    said.append(f"{percent(one.share_frac)} of all waiting")
    said.append((REASONS.get(one.reason, one.reason), "bold"))
    return said


def between(ends_s: tuple[float, float]) -> str:
    """Returns an interval of times, its unit once where both ends have it: `250 to 310 µs`."""
    low, high = map(figures.duration, ends_s)
    shown, _, unit = low.rpartition(" ")
    return f"{shown} to {high}" if unit == high.rpartition(" ")[2] else f"{low} to {high}"


def no_straggler(record: JobRecord) -> list[Piece]:
    """Returns why no rank is named."""
    reason = because(record, "stragglers")
    if reason:
        return [(WITHHELD, WARN), *reason, *further(record.stragglers_reason)]
    return ["none is named", record.stragglers_reason or "the record has no reason"]


def further(reason: str | None) -> list[Piece]:
    """Returns a reason that says more than that something is withheld."""
    return [] if not reason or reason.startswith("withheld: ") else [reason]


def links(record: JobRecord, *, source: bool = True) -> list[Piece]:
    """Returns what of the link between the devices is used; with `source` also where its rate is from."""
    found: Links = record.links
    used = (found.step_average_frac, found.in_collectives_frac)
    if not record.collectives and used == (None, None):
        return ["not used: no call between ranks is in these steps"]
    if found.name is None and used == (None, None) and not because(record, "bandwidth"):
        return [(NOT_KNOWN, WARN), *([found.reason] if found.reason else [])]
    said: list[Piece] = [found.name or "link not known"]
    if found.bytes_per_s is not None:
        said.append(f"{figures.quantity(found.bytes_per_s, 'B/s')} in one direction of a device")
    if found.source and source:
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
        why = because(record, "bandwidth")
        said += why
        if found.name is not None or not why:
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


def no_ledger(record: JobRecord) -> list[Piece]:
    """Returns why there are no lines of the job."""
    why = because(record, "ledger")
    if why:
        return [(WITHHELD, WARN), *why, *further(record.lines_reason)]
    if record.lines and record.step_s is None:
        step = because(record, "steps")
        return [(WITHHELD if step else "none", WARN), *step, "without steps nothing can be divided"]
    if record.ranks and all(one.ledger_reason == NOT_ASKED for one in record.ranks):
        return [("none", WARN), "not asked for (--no-ledger)"]
    return [("none", WARN), record.lines_reason or "the record has no reason"]


def of_ranks(record: JobRecord) -> str:
    """Returns how many ranks a ledger is the mean of; "" for one of one."""
    n, total = sum(one.ledger is not None for one in record.ranks), len(record.ranks)
    if n == total:
        return f"mean over {figures.counted(n, 'rank')}" if n > 1 else ""
    return f"mean over {n} of {figures.counted(total, 'rank')}"
