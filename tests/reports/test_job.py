"""The report of a job: whole, damaged, of many ranks, at any width, in ASCII, with hostile names."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
from rich.cells import cell_len

from flopwise.records.job import CONCLUSIONS, Defect, Health, JobRecord, Links, Straggler
from flopwise.reports import job_words as words
from flopwise.reports.terminal import render

Make = Callable[..., JobRecord]

WHOLE = """\
flopwise analyze run                               2 of 2 ranks read · NVIDIA H200 · 4 steps of each

  MFU         40 % · mean over 2 ranks · of 989.5 TFLOP/s a device
  step        1 ms · mean over ranks, profiled · ranks 1 to 1.02 ms
  health      clean · looked for 3 defects · nothing is withheld

  where the step goes, mean over 2 ranks
                                               a step              95 %  share
  useful work                      ████████    400 µs  390 µs to 410 µs   40 %
  collectives: waiting and moving  ██████████  500 µs  400 µs to 600 µs   50 %
  idle: the host was late          ██          100 µs                     10 %
  step                                           1 ms                    100 %

  stragglers, by the waiting that they cause in a step, mean over ranks
  rank 1      70 µs (60 to 80 µs, 95 %) · 7 % of the step · 84 % of all waiting · its host is late
              train.py:88

  by rank, a step; waiting as a share of the time of all matched calls
  rank     step  communication  waiting  exposed  clock offset   matched
     0     1 ms         500 µs     70 %   250 µs     reference  56 of 76
     1  1.02 ms         500 µs     26 %   250 µs  20 µs ± 1 µs  56 of 76

  collectives, the longest first; times and calls a step and rank; bytes a call
  collective  dtype          bytes  calls    time  waiting  transfer  bus bandw.    of link
  all_reduce  bf16           25 MB     10  400 µs   300 µs    100 µs    225 GB/s       50 %
  broadcast   not known  not known    1.5  100 µs    50 µs     50 µs   not known  not known
      redundant: the same buffers in every step

  link        NVLink 4 · 450 GB/s in one direction of a device · over the step: 12 % used
              while bytes move: 50 % used
  redundant   4 % of all bytes move nothing new
              buffers broadcast in every step · 4 % of all bytes · 1 MB a step · 50 µs of transfer
              50 µs exposed · 1.5 calls
              64 buffers, unchanged
              do: broadcast_buffers=False

  findings, what is worth most first; their shares may overlap
  1           J101 straggler · 28 % of the mean step · predicted 20 % less time without it
              measured · train.py:88
              rank 1 is late
              do: pin its host

  note        4 steps show differences of 2 % and more

  saved       a.json
"""


def rendered(record: JobRecord, width: int = 160) -> str:
    return " ".join(render(record, width=width, color=False).split())


def test_the_whole_report(job: Make) -> None:
    ranks = job(2).ranks
    slow = dataclasses.replace(ranks[1], step_s=1.02e-3)
    assert render(job(2, ranks=[ranks[0], slow]), width=100, color=False, saved=["a.json"]) == WHOLE


def test_every_conclusion_has_words() -> None:
    assert tuple(words.CONCLUSIONS) == CONCLUSIONS


def test_each_defect_says_what_it_withholds(damaged: JobRecord) -> None:
    text = rendered(damaged)
    assert "8 of 16 ranks read" in text
    assert (
        "health defects · looked for 3 defects · "
        "withheld for the whole job: waiting told from transfer, stragglers "
        "H101 missing-kernels · ranks 2-3 · 500 launches, up to 30 % of those of a rank "
        "withholds the ledger, MFU, idle time and its causes of ranks 2-3 · "
        "rank 2: 300 of 1000 launches have none "
        "H120 clocks · the whole job · 8 seen "
        "withholds waiting told from transfer, stragglers · ends lie 5 ms apart "
        "H130 legal-overlaps · rank 0 · 30 of 30000 kernels and copies (0.10 %) withholds nothing · 30 of 2 us "
    ) in text
    assert "where the step goes, mean over 6 of 8 ranks" in text
    assert "MFU 40 % · mean over 6 ranks" in text


def test_what_is_withheld_is_said_where_it_would_stand(damaged: JobRecord) -> None:
    lines = render(damaged, width=160, color=False).splitlines()
    text = "\n".join(lines)
    assert "  stragglers  withheld · by H120 · clocks differ by 5 ms\n" in text
    row = next(line for line in lines if line.startswith("     2  "))
    assert re.split(r"\s{2,}", row.strip()) == [
        "2", "1 ms", "500 µs", "withheld", "250 µs", "not known", "56 of 76",
        "no ledger: kernels are missing (H101)",
    ]  # fmt: skip
    assert text.count("  withheld    waiting told from transfer, by H120\n") == 2
    row = next(line for line in lines if line.startswith("  all_reduce"))
    assert re.split(r"\s{2,}", row.strip()) == [
        "all_reduce", "bf16", "25 MB", "0, 8 ranks", "10", "400 µs", "withheld", "withheld", "200 µs",
        "not known", "not known",
    ]  # fmt: skip
    assert "while bytes move: not known · no transfer time is known\n" in text


def test_a_defect_of_one_rank_withholds_its_cells_only(job: Make) -> None:
    made = job(3)
    defect = Defect("H110", "impossible-durations", 1, None, 1, 0.01, "2 s", ["waits"])
    ranks = [
        dataclasses.replace(one, wait_s=None if one.rank else one.wait_s) for one in made.ranks
    ]
    health = Health(False, ["durations"], [defect], {})
    lines = render(
        dataclasses.replace(made, ranks=ranks, health=health), width=100, color=False
    ).splitlines()
    cells = [line.split()[5:7] for line in lines if re.match(r"     [012]  ", line)]
    assert cells == [["70", "%"], ["withheld", "250"], ["not", "known"]]
    assert "  withheld    waiting told from transfer, by H110" in lines


def test_everything_withheld_leaves_no_blank(job: Make) -> None:
    names = list(CONCLUSIONS)
    defect = Defect("H100", "cut-file", None, "run/rank0.json.gz", 1, None, "cut at 60 %", names)
    made = job(1)
    ranks = [
        dataclasses.replace(
            made.ranks[0], step_s=None, communication_s=None, exposed_s=None, wait_s=None, ledger=None,
            ledger_reason="the file is cut", clock_offset_s=None, clock_error_s=None,
        )
    ]  # fmt: skip
    record = job(
        1, ranks=ranks, health=Health(False, ["cuts"], [defect], {name: ["H100"] for name in names}),
        step_s=None, lines=[], families={}, lines_reason="no rank has one", stragglers=[],
        stragglers_reason=None, redundant=[], redundant_bytes_frac=None, collectives=[], findings=[],
        links=Links(None, None, None, None, None, None), notes=[],
    )  # fmt: skip
    text = rendered(record)
    for said in (
        "MFU withheld · by H100",
        "step withheld · by H100",
        "ledger withheld · by H100 · no rank has one",
        "stragglers withheld · by H100",
        "collectives none",
        "link not used: no call between ranks is in these steps",
        "redundant withheld · by H100",
        "0 withheld withheld withheld withheld withheld 56 of 76 no ledger: the file is cut",
        "H100 cut-file · run/rank0.json.gz withholds every conclusion",
    ):
        assert said in text


def test_what_is_withheld_whole_is_said_in_two_words(job: Make) -> None:
    names = list(CONCLUSIONS)
    defect = Defect("H207", "jobs-differ", None, None, 1, 0.5, "two jobs", names, what="files")
    text = rendered(
        job(2, health=Health(False, ["a"], [defect], {name: ["H207"] for name in names}))
    )
    assert "withheld for the whole job: every conclusion H207 jobs-differ" in text
    assert "the whole job · 1 of 2 files (50 %) withholds every conclusion" in text


@pytest.mark.parametrize(
    ("count", "share", "what", "said"),
    [
        (5, 0.625, "ranks", ["5 of 8 ranks (62.5 %)"]),
        (1, None, "launches", ["1 launch"]),
        (1, None, "kernels and copies", ["1 kernel or copy"]),
        (3, None, "calls", ["3 calls"]),
        (1, None, "", []),  # the defect is one thing
        (4, 0.5, "", ["4 seen"]),  # a record that does not say of what
        (2, 1e-300, "events", ["2 events"]),
    ],
)
def test_how_many_of_what(count: int, share: float | None, what: str, said: list[str]) -> None:
    (group,) = words.groups([Defect("H1", "gone", 0, None, count, share, "", [], what=what)])
    assert words.defect(group)[2:] == said


def test_a_step_that_is_alike_on_all_ranks_is_said_once(job: Make) -> None:
    same = [dataclasses.replace(one, step_s=1e-3) for one in job(2).ranks]
    assert "mean over ranks, profiled · the same on all" in rendered(job(2, ranks=same))


def test_a_ledger_that_was_not_asked_for_is_not_missed(job: Make) -> None:
    bare = [
        dataclasses.replace(one, ledger=None, ledger_reason="not asked for") for one in job(2).ranks
    ]
    text = rendered(
        job(2, ranks=bare, lines=[], lines_reason="2 of 2 ranks have no ledger", mfu=None)
    )
    assert "ledger none · not asked for (--no-ledger)" in text
    assert "MFU none · it needs the ledger, which was not asked for (--no-ledger)" in text
    assert "no ledger:" not in text


def test_lines_of_a_step_that_is_not_known_are_withheld(job: Make) -> None:
    defect = Defect("H113", "unmarked-steps", 0, None, 1, None, "no step is marked", ["steps"])
    health = Health(False, ["steps"], [defect], {"steps": ["H113"]})
    text = rendered(job(2, step_s=None, health=health))
    assert "ledger withheld · by H113 · without steps nothing can be divided" in text
    unknown = rendered(job(2, step_s=None))
    assert "ledger none · without steps nothing can be divided" in unknown


def test_a_link_that_nobody_knows_is_said_once(job: Make) -> None:
    none = Links(None, None, None, None, None, "the link of this device is not known")
    assert "link not known · the link of this device is not known redundant" in rendered(
        job(2, links=none)
    )


def test_a_straggler_in_no_step_that_counts_has_its_share_of_the_waiting(job: Make) -> None:
    late = dataclasses.replace(job(2).stragglers[0], per_step_s=None, per_step_ci95=None)
    assert "rank 1 84 % of all waiting · its host is late" in rendered(job(2, stragglers=[late]))


def test_a_straggler_of_a_live_run_has_its_share_of_the_steps_with_its_calls(job: Make) -> None:
    text = rendered(job(2, profiled=False, recorded_step_s=1.4e-3))
    assert "70 µs (60 to 80 µs, 95 %) · 5 % of the step" in text


def test_without_a_trace_nothing_is_called_clean(job: Make) -> None:
    text = rendered(job(2, ranks=[]))
    assert "health not judged · no trace was given" in text
    assert "clean" not in text


def test_shares_are_of_the_time_where_the_step_is_withheld(job: Make) -> None:
    assert "28 % of the mean step" in rendered(job(2))
    assert "28 % of the time" in rendered(job(2, step_s=None))


def test_no_straggler_gives_the_reason(job: Make) -> None:
    none = job(2, stragglers=[], stragglers_reason="1 of 8 ranks was read")
    assert "stragglers none is named · 1 of 8 ranks was read" in rendered(none)


def test_no_mfu_gives_the_reason_of_the_rank(job: Make) -> None:
    made = dataclasses.replace(job(2), mfu=None, mfu_reason="rank 1: no shapes")
    assert "MFU none · rank 1: no shapes" in rendered(made)


def test_mfu_counts_attention_in_full_and_says_what_it_is_without(job: Make) -> None:
    text = rendered(dataclasses.replace(job(2), mfu=0.44))
    assert "MFU 44 % · mean over 2 ranks" in text
    assert "40 % without what attention masks hide" in text


def test_why_ledgers_are_not_trusted_is_said(job: Make) -> None:
    doubt = "rank 1 and 3 more: unattributed and idle_other are 7.3 % of the step"
    assert f"not trusted {doubt}" in rendered(
        dataclasses.replace(job(2), untrusted_because=[doubt])
    )
    live = rendered(dataclasses.replace(job(2), profiled=False, recorded_step_s=1.5e-3))
    assert "mean over ranks, undisturbed" in live
    assert "calls, waiting and links are those of profiled steps of 1.50 ms" in live


def test_of_many_ranks_the_telling_ones(job: Make) -> None:
    made = job(1024)
    late = [
        Straggler(rank, 1e-3, None, 0.1, 0.1, "host", {}, "", []) for rank in (700, 900, 300, 5)
    ]
    broken = Defect("H1", "gone", 512, None, 1, None, "", ["waits"])
    ranks = list(made.ranks)
    ranks[77] = dataclasses.replace(ranks[77], exposed_s=0.9e-3)
    record = dataclasses.replace(
        made, stragglers=late, ranks=ranks, health=Health(False, [], [broken], {})
    )
    shown = [one.rank for one in words.telling(record, 16)]
    assert len(shown) == 16
    assert shown == sorted(shown)
    assert {700, 900, 300, 5, 512, 77, 0, 1023} <= set(shown)
    text = render(record, width=100, color=False)
    assert "  1008 ranks that are less telling: in the JSON\n" in text
    assert len(text.splitlines()) < 90


def test_defects_of_many_ranks_are_one(job: Make) -> None:
    defects = [
        Defect("H1", "late-start", rank, None, 2, 0.5, f"seen on {rank}", ["waits"], what="calls")
        for rank in range(0, 1024, 2)
    ]
    record = job(2, health=Health(False, ["starts"], defects, {}))
    text = rendered(record)
    assert (
        "H1 late-start · ranks 0, 2, 4, 6, 8, 10 and 506 more · 1024 calls, up to 50 % of those of a rank"
        in text
    )
    assert "rank 0: seen on 0" in text


@pytest.mark.parametrize(
    ("ranks", "said"),
    [([3], "rank 3"), ([0, 1, 2, 7], "ranks 0-2, 7"), ([1, 2], "ranks 1-2"), (range(0, 18, 2), "ranks 0, 2, 4, 6, 8, 10 and 3 more")],
)  # fmt: skip
def test_ranks_as_people_write_them(ranks: Any, said: str) -> None:
    assert words.spans(ranks) == said


@pytest.mark.parametrize("width", [40, 70, 100, 200])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_never_wider_than_it_was_told(damaged: JobRecord, width: int, ascii_only: bool) -> None:
    text = render(damaged, width=width, color=False, ascii_only=ascii_only, saved=["x.json"])
    assert max(len(line) for line in text.splitlines()) <= width
    assert text.isascii() is ascii_only
    flat = " ".join(text.split())
    for said in ("useful work", "all_redu", "H120", "withheld", "x.json", "do: pin its host"):
        assert said in flat


def test_colour_adds_only_colour(damaged: JobRecord) -> None:
    coloured = render(damaged, width=100, color=True)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    assert coloured != plain
    expected = render(damaged, width=100, color=False)
    assert [line.rstrip() for line in plain.splitlines()] == expected.splitlines()


@pytest.mark.parametrize("seed", range(10))
def test_any_record_can_be_drawn(any_job: Callable[[int], JobRecord], seed: int) -> None:
    draw = random.Random(seed)
    for one in range(20):
        width, ascii_only = draw.randint(40, 200), draw.random() < 0.5
        record = any_job(20 * seed + one)
        text = render(record, width=width, color=False, ascii_only=ascii_only)
        assert max(cell_len(line) for line in text.split("\n")) <= width
        assert not re.search(
            r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\ud800-\udfff]", text
        )
        assert text.isascii() or not ascii_only
