"""The page of a job: what is on it, what is withheld, many ranks, and any record at all."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flopwise.records.finding import Finding
from flopwise.records.job import CONCLUSIONS, Defect, Health, JobRecord
from flopwise.records.ledger import Line
from flopwise.reports.html import job_heat, render_job_html

Make = Callable[..., JobRecord]
Parsed = Callable[[str], Any]
HOSTILE = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(1)>&lt;\x00\x1b[31m\u202e\ud800]]>--><!--"
SHOWN = r"""</script><script>alert(1)</script>"'><img src=x onerror=alert(1)>&lt;\x00\x1b[31m\u202e\ud800]]>--><!--"""


def test_without_a_trace_nothing_is_called_clean(job: Make, parsed: Parsed) -> None:
    verdicts = parsed(render_job_html(job(ranks=[]))).all("section", "verdict")
    assert verdicts[0].text == "No traces : no trace was given"
    assert "good" not in verdicts[0].attributes["class"]


def test_a_job_in_its_order(job: Make, parsed: Parsed) -> None:
    root = parsed(render_job_html(job()))
    titles = [next(c for c in h.children if isinstance(c, str)) for h in root.all("h2")]
    assert titles == [
        "Where the step goes", "By family", "Stragglers", "Lines of each rank", "By rank", "Collectives",
        "Links and redundant traffic", "Findings", "Notes", "What was read",
    ]  # fmt: skip
    assert root.all("h1")[0].text == "flopwise analyze run"
    assert root.all("p", "facts")[0].text == "8 of 8 ranks read · NVIDIA H200 · 4 steps of each"
    cards = [card.text for card in root.all("div", "card")]
    assert cards == [
        "MFU 40 % mean over 8 ranks · of 989.5 TFLOP/s a device",
        "step 1 ms mean over ranks, profiled · ranks 1 to 1.01 ms",
        "link used 12 % of NVLink 4, over the step",
        "redundant traffic 4 % of all bytes move nothing new",
    ]
    (verdict,) = root.all("section", "verdict")
    assert verdict.text == (
        "Traces clean : looked for 3 defects · nothing is withheld "
        "Looked for: missing kernels, impossible durations, cut files"
    )
    assert root.section("Stragglers").all("article")[0].text == (
        "rank 1 70 µs (60 to 80 µs, 95 %) · 7 % of the step · 84 % of all waiting · its host is late train.py:88"
    )
    assert root.section("By rank").rows()[:3] == [
        ["rank", "step", "communication", "waiting", "exposed", "clock offset", "matched"],
        ["0", "1 ms", "500 µs", "70 %", "250 µs", "reference", "56 of 76"],
        ["1", "1 ms", "500 µs", "26 %", "250 µs", "20 µs ± 1 µs", "56 of 76"],
    ]
    assert root.section("Collectives").rows()[1:] == [
        ["all_reduce", "bf16", "25 MB", "0, 8 ranks", "10", "400 µs", "300 µs", "100 µs", "200 µs", "225 GB/s", "50 %", "", "ncclDevKernel"],
        ["broadcast", "not known", "not known", "not known", "1.5", "100 µs", "50 µs", "50 µs", "50 µs", "not known", "not known", "the same buffers in every step", ""],
    ]  # fmt: skip
    waterfall = root.section("Where the step goes")
    assert waterfall.all("small")[0].text == "mean over 8 ranks, in ms"
    assert [row[0] for row in waterfall.rows()[1:]] == [
        "useful work", "collectives: waiting and moving", "idle: the host was late", "step",
    ]  # fmt: skip
    assert root.section("Findings").all("p", "do")[0].text == "Do: pin its host"


def test_lines_of_ranks_are_coloured_by_their_difference(job: Make, parsed: Parsed) -> None:
    heat = parsed(render_job_html(job())).section("Lines of each rank")
    assert heat.rows()[:3] == [
        ["rank", "useful work", "collectives: waiting and moving", "idle: the host was late"],
        ["0", "0.400", "0.550", "0.050"],
        ["1", "0.400", "0.300", "0.300"],
    ]
    assert heat.rows()[-1] == ["mean", "0.400", "0.519", "0.081"]
    kinds = [[c.attributes["class"] for c in row.all("td")] for row in heat.all("tr")[1:3]]
    assert kinds == [
        ["num", "num", "num more1", "num less1"],
        ["num", "num", "num less4", "num more4"],
    ]
    assert "the strongest is 218.8 µs from it" in heat.text
    assert not heat.all("img")


def test_small_differences_have_no_colour(job: Make, parsed: Parsed) -> None:
    made = job(2)
    ledger = made.ranks[0].ledger
    assert ledger is not None
    ranks = []
    for one, s in zip(made.ranks, (1e-3, 1.001e-3), strict=True):
        lines = [Line("ideal", "useful", s, (s, s), 1.0)]
        ranks.append(dataclasses.replace(one, ledger=dataclasses.replace(ledger, lines=lines)))
    page = parsed(render_job_html(dataclasses.replace(made, ranks=ranks)))
    cells = page.section("Lines of each rank").all("td", "num")
    assert {cell.attributes["class"] for cell in cells} == {"num"}


def test_defects_say_what_they_withhold(damaged: JobRecord, parsed: Parsed) -> None:
    root = parsed(render_job_html(damaged))
    (verdict,) = root.all("section", "verdict")
    assert [item.text for item in verdict.all("li")] == [
        "H101 missing-kernels · ranks 2-3 · 500 launches, up to 30 % of those of a rank "
        "withholds the ledger, MFU, idle time and its causes of ranks 2-3 · rank 2: 300 of 1000 launches have none",
        "H120 clocks · the whole job · 8 seen withholds waiting told from transfer, stragglers · ends lie 5 ms apart",
        "H130 legal-overlaps · rank 0 · 30 of 30000 kernels and copies (0.10 %) withholds nothing · 30 of 2 us",
    ]
    assert root.section("Stragglers").text.endswith("withheld · by H120 · clocks differ by 5 ms")
    heat = root.section("Lines of each rank")
    assert heat.rows()[3] == ["2", "no ledger: kernels are missing (H101)"]
    assert root.section("By rank").rows()[3][3:] == [
        "withheld", "250 µs", "not known", "56 of 76", "no ledger: kernels are missing (H101)",
    ]  # fmt: skip
    assert "withheld · waiting told from transfer, by H120" in root.section("Collectives").text


def test_a_withheld_ledger_leaves_no_blank(job: Make, parsed: Parsed) -> None:
    names = list(CONCLUSIONS)
    defect = Defect("H100", "cut-file", 0, "a", 1, None, "cut", names)
    health = Health(False, ["cuts"], [defect], {name: ["H100"] for name in names})
    none = job(
        2, health=health, lines=[], step_s=None, lines_reason="no rank has one", stragglers=[],
        redundant_bytes_frac=None, redundant=[],
    )  # fmt: skip
    root = parsed(render_job_html(none))
    cards = [card.text for card in root.all("div", "card")]
    assert cards[0] == "MFU withheld by H100"
    assert cards[1] == "step withheld by H100"
    assert cards[3] == "redundant traffic withheld by H100"
    assert root.all("section", "verdict")[1].text == "Ledger withheld : by H100 · no rank has one"


def test_of_many_ranks_a_picture_and_the_telling_ones(job: Make, parsed: Parsed) -> None:
    page = render_job_html(job(1024))
    assert len(page) < 100_000
    heat = parsed(page).section("Lines of each rank")
    assert len(heat.all("img")) == 1
    assert len(heat.rows()) == 34
    assert "992 ranks that are less telling: in the JSON" in heat.text
    assert ["1", "0.400", "0.300", "0.300"] in heat.rows()


def test_in_the_picture_a_line_that_a_ledger_lacks_is_less_than_the_mean(
    job: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[list[list[float]]] = []

    def picture(rows: list[list[float]], color: object) -> str:
        drawn.append(rows)
        return "data:image/png;base64,"

    monkeypatch.setattr(job_heat, "data_uri", picture)
    ranks = job(3).ranks
    first = ranks[0].ledger
    assert first is not None
    lines = [line for line in first.lines if line.name != "ideal"]
    none = dataclasses.replace(ranks[1], ledger=None, ledger_reason="withheld")
    lacking = dataclasses.replace(ranks[0], ledger=dataclasses.replace(first, lines=lines))
    job_heat.draw(job(3, ranks=[lacking, none, ranks[2]]), 1)
    ((ideal, *_),) = drawn  # of 0, not known and 0.4 ms
    assert ideal == pytest.approx([-1.0, 0.0, 1.0])


def test_names_that_a_page_would_obey(job: Make, parsed: Parsed) -> None:
    made = job(2)
    ledger = made.ranks[0].ledger
    assert ledger is not None
    lines = [Line(HOSTILE, HOSTILE, 1e-3, (1e-3, 1e-3), 1.0)]
    rank = dataclasses.replace(
        made.ranks[0],
        path=HOSTILE,
        device_name=HOSTILE,
        ledger=dataclasses.replace(ledger, lines=lines),
    )
    without = dataclasses.replace(made.ranks[1], ledger=None, ledger_reason=HOSTILE)
    kind = dataclasses.replace(
        made.collectives[0],
        op=HOSTILE,
        group=HOSTILE,
        dtype=HOSTILE,
        kernels=[HOSTILE],
        redundant=HOSTILE,
    )
    defect = Defect(HOSTILE, HOSTILE, None, HOSTILE, 1, 0.5, HOSTILE, [HOSTILE])
    late = dataclasses.replace(
        made.stragglers[0],
        reason=HOSTILE,
        reasons_s={HOSTILE: 1.0, "b": 2.0},
        evidence=HOSTILE,
        where=[HOSTILE],
    )
    record = dataclasses.replace(
        made, sources=[HOSTILE], device_name=HOSTILE, ranks=[rank, without], lines=lines,
        families={HOSTILE: 1e-3}, collectives=[kind], stragglers=[late], notes=[HOSTILE],
        health=Health(False, [HOSTILE], [defect], {HOSTILE: [HOSTILE]}),
        links=dataclasses.replace(made.links, name=HOSTILE, source=HOSTILE, reason=HOSTILE),
        redundant=[dataclasses.replace(made.redundant[0], kind=HOSTILE, evidence=HOSTILE, advice=HOSTILE)],
        findings=[Finding(HOSTILE, HOSTILE, 0.1, [HOSTILE], HOSTILE, HOSTILE, 0.1, HOSTILE)],
    )  # fmt: skip
    root = parsed(render_job_html(record))
    assert root.section("Notes").all("li")[0].text == SHOWN
    for title in (
        "Lines of each rank",
        "By rank",
        "Collectives",
        "Stragglers",
        "Links",
        "Findings",
    ):
        assert SHOWN in root.section(title).text


def test_endless_names_and_lists_are_cut(job: Make, parsed: Parsed) -> None:
    long = "<" * 100_000
    made = job(2)
    record = dataclasses.replace(
        made,
        sources=[long] * 300,
        notes=[long] * 300,
        collectives=[dataclasses.replace(made.collectives[0], op=long, group=long, kernels=[long])] * 300,
        stragglers=[dataclasses.replace(made.stragglers[0], evidence=long)] * 300,
        redundant=[dataclasses.replace(made.redundant[0], evidence=long)] * 300,
        health=Health(False, [long] * 300, [Defect(str(i), long, None, long, 1, None, long, [long]) for i in range(300)], {}),
    )  # fmt: skip
    page = render_job_html(record)
    assert len(page) < 3_000_000
    parsed(page)


@pytest.mark.parametrize("seed", range(10))
def test_any_job_is_a_page(any_job: Callable[[int], JobRecord], parsed: Parsed, seed: int) -> None:
    for one in range(20):
        parsed(render_job_html(any_job(20 * seed + one)))


CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_a_browser_has_nothing_to_complain_about(
    damaged: JobRecord, job: Make, tmp_path: Path
) -> None:
    long = "averyveryverylongnamewithoutanyplacetobreak" * 12
    kind = dataclasses.replace(damaged.collectives[0], op=long, group=long, kernels=[long])
    wide = dataclasses.replace(damaged, notes=[long], collectives=[kind], sources=[long])
    pages = {"wide": render_job_html(wide), "many": render_job_html(job(200))}
    for name, page in pages.items():
        (tmp_path / f"{name}.html").write_text(page, "utf-8")
    frames = "".join(
        f'<iframe src="{name}.html" style="width:390px;height:200px"></iframe>' for name in pages
    )
    # the pages run no script: one around them tells by how much they are wider than a phone
    measure = (
        "onload=()=>{document.title=[...document.querySelectorAll('iframe')].map(f=>{"
        "const d=f.contentDocument.documentElement;return d.scrollWidth-d.clientWidth}).join(' ');}"
    )
    (tmp_path / "around.html").write_text(
        f"<!doctype html><title></title>{frames}<script>{measure}</script>", "utf-8"
    )
    done = subprocess.run(
        [
            str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
            "--allow-file-access-from-files", f"--user-data-dir={tmp_path / 'profile'}", "--window-size=900,500",
            "--virtual-time-budget=2000", "--dump-dom", (tmp_path / "around.html").as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    over = done.stdout.partition("<title>")[2].partition("</title>")[0].split()
    assert over == ["0", "0"]
    assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line]
