"""Traces that are broken, odd or misleading: one test a case, from the file to the report."""

from __future__ import annotations

import contextlib
import gzip
import json
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from flopwise.cli import main
from flopwise.records import store
from flopwise.records.ledger import SCHEMA, LedgerRecord
from flopwise.trace.chrome import read

HOST = 5_000_000.0  # us: realistic times are far from 0


@dataclass
class Analysed:
    """What a user gets."""

    code: int
    record: LedgerRecord
    report: str  # without its line breaks

    @property
    def us(self) -> dict[str, float]:
        return {line.name: round(line.s * 1e6, 3) for line in self.record.lines}

    @property
    def doubts(self) -> str:
        return "\n".join(self.record.untrusted_because)


@pytest.fixture
def analyse(capsys: pytest.CaptureFixture[str]) -> Callable[[Path], Analysed]:
    """Returns a function that runs `flopwise analyze` on a file."""

    def run(path: Path) -> Analysed:
        code = main(["analyze", str(path), "--json", "-"])
        record = store.decode(capsys.readouterr().out.encode(), LedgerRecord, SCHEMA, "stdout")
        assert main(["analyze", str(path), "--width", "120"]) == code
        report = " ".join(capsys.readouterr().out.split())
        assert sum(line.s for line in record.lines) == pytest.approx(record.step_s)
        return Analysed(code, record, report)

    return run


def busy_kernels(timeline: Any, n: int, dur: float = 100.0, name: str = "k") -> None:
    """Adds kernels back to back, each with a launch partner that is far ahead."""
    for i in range(n):
        op = timeline.op("aten::relu", HOST + i, 0.9, ([8], "float"))
        timeline.kernel(name, HOST + 1000 + dur * i, dur, at=HOST + i + 0.1, took=0.2, op=op)


class TestTR01:
    def test_kernels_without_start_and_duration(self, timeline: Any, analyse: Any) -> None:
        busy_kernels(timeline, 200)
        for i in range(50):
            timeline.kernel("k", 0, 0, at=HOST + 300 + i)
        for i in range(5):
            timeline.kernel("k", HOST + 2000 + i, -40, at=HOST + 400 + i)
        found = analyse(timeline.write())
        assert found.record.step_s == pytest.approx(200 * 100e-6)  # not stretched back to 0
        assert found.record.partition.span_s == pytest.approx(200 * 100e-6)
        assert "55 of 255 kernels and copies are unusable (21.6%)" in found.doubts
        assert "50 of no duration" in found.report
        assert "5 ending before it starts" in found.report
        assert found.record.busy_most_frac == pytest.approx(1.0)
        assert not found.record.trusted

    def test_busy_time_as_a_range(self, timeline: Any, analyse: Any) -> None:
        busy_kernels(timeline, 200)
        for event in timeline.events:
            if event["cat"] == "kernel":
                event["dur"] = 50
        timeline.kernel("k", 0, 0, at=HOST + 300)
        timeline.kernel("k", 0, 0, at=HOST + 301)
        found = analyse(timeline.write())
        # 10 of 19.95 ms are seen, and 0.1 ms may be missing
        assert found.record.busy_frac == pytest.approx(10 / 19.95)
        assert found.record.busy_most_frac == pytest.approx(10.1 / 19.95)
        assert "device busy 50.1 % to 50.6 %" in found.report


class TestTR02:
    def test_rounding_on_one_stream_is_let_pass_and_true_overlap_is_kept(
        self, timeline: Any, analyse: Any
    ) -> None:
        op = timeline.op("aten::relu", HOST - 50, 40, ([8], "float"))
        for ts, dur, stream in ((0, 100, 7), (99.973, 100.027, 7), (150, 0, 7), (150, 100, 8)):
            timeline.kernel("k", HOST + ts, dur, at=HOST - 45, stream=stream, op=op)
        found = analyse(timeline.write())
        assert found.record.step_s == pytest.approx(250e-6)
        assert found.record.busy_frac == pytest.approx(1.0)
        assert found.record.partition.compute_frac == pytest.approx(1.0)
        assert "overlap" not in found.doubts


class TestTR03:
    def test_absurd_durations_change_no_total_and_are_listed(
        self, timeline: Any, analyse: Any
    ) -> None:
        busy_kernels(timeline, 1000)
        before = analyse(timeline.write())
        timeline.kernel("centuries", HOST + 1200, 7.4e15, at=HOST + 600)
        for i in range(3):
            timeline.kernel("negative", HOST + 1200, -1 - i, at=HOST + 601 + i)
        after = analyse(timeline.write())
        assert after.us == before.us
        assert after.record.partition == before.record.partition
        assert (
            "4 of 1004 kernels and copies are unusable (0.4%) and left out: 3 ending before it starts, "
            "1 longer than the trace (centuries, negative)"
        ) in after.report


class TestTR04:
    def lost(self, timeline: Any, steps: int) -> Any:
        """50 launches in steps of 10; the first 12 have no kernel."""
        for i in range(50):
            if i % 10 == 0 and steps:
                timeline.mark(i // 10, HOST + 100 * i, 1000)
            host = HOST + 100 * i + 10
            op = timeline.op("aten::relu", host, 40, ([8], "float"))
            if i < 12:
                timeline.call("cudaLaunchKernel", host + 5, 5, **{"External id": op})
            else:
                timeline.kernel("k", host + 30, 50, at=host + 5, took=5, op=op)
        return timeline.write()

    def test_the_steps_that_lost_kernels_are_left_out(self, timeline: Any, analyse: Any) -> None:
        found = analyse(self.lost(timeline, steps=5))
        assert (
            "12 launches have no kernel: the first work of the recording is missing" in found.report
        )
        assert "steps 1 to 2 are left out" in found.report
        assert (found.record.steps, found.record.steps_in_trace) == (3, 5)
        assert found.record.busy_frac == pytest.approx(0.5)  # 50 of each 100 us

    def test_without_steps_it_is_said(self, timeline: Any, analyse: Any) -> None:
        found = analyse(self.lost(timeline, steps=0))
        assert "12 launches have no kernel" in found.report


class TestTR05:
    def test_an_amd_trace_divides_as_its_cuda_twin(
        self, training: Callable[..., Any], analyse: Any
    ) -> None:
        t = training(4)
        cuda = analyse(t.write())
        for event in t.events:
            if event["cat"] == "cuda_runtime":
                event["cat"], event["name"] = "hip_runtime", "hipLaunchKernel"
            elif event["cat"] == "kernel":
                event["args"]["stream"] = event["tid"] = 0
        assert analyse(t.write()).us == cuda.us
        for i in range(100):  # ten seconds of warm-up that an old profiler kept
            t.kernel("warm-up", -10e6 + 100_000 * i, 90_000, stream=0)
        early = analyse(t.write())
        assert early.us == cuda.us
        assert "100 kernels and copies before the first step" in early.report


class TestTR06:
    def test_a_quote_in_a_name_costs_its_event_alone(self, training: Any, analyse: Any) -> None:
        t = training(4)
        t.add("user_annotation", "HERE", 10_395, 1)
        whole = analyse(t.write())
        path = t.write()
        text = t.text.replace("HERE", 'q"uote')
        path.write_text(text, "utf-8")
        found = analyse(path)
        assert found.us == whole.us
        assert "1 damaged event was left out (byte " in found.report
        at = int(found.report.partition("left out (byte ")[2].partition(":")[0])
        assert abs(at - text.encode().index(b'q"uote')) < 300

    def test_a_real_export_with_a_quote_in_a_range(self, tmp_path: Path) -> None:
        """torch 2.13 does not escape it; one that does writes a file without damage."""
        path = tmp_path / "trace.json"
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            for name in ('q"uote', "back\\slash", "new\nline", "plain"):
                with record_function(name):
                    torch.ones(3).exp()
        recorded.export_chrome_trace(str(path))
        trace = read(path)
        names = [trace.events.name_of(row) for row in range(len(trace.events))]
        assert names.count("aten::exp") == 4
        assert "plain" in names
        assert trace.damage.ends_early is None
        try:
            json.loads(path.read_text("utf-8"))
        except ValueError:
            assert (trace.damage.events, 'q"uote' in names) == (1, False)
        else:
            assert (trace.damage.events, 'q"uote' in names) == (0, True)

    @pytest.mark.parametrize("bad", ["\x01", "C:\\path\\x", "line\nbreak"])
    def test_control_characters_and_bad_escapes(
        self, training: Any, analyse: Any, bad: str
    ) -> None:
        t = training(4)
        t.add("user_annotation", "HERE", 10_395, 1)
        whole = analyse(t.write())
        path = t.write()
        path.write_text(t.text.replace("HERE", bad), "utf-8")
        assert analyse(path).us == whole.us


class TestTR07:
    @pytest.mark.parametrize("kept", [0.5, 0.99])
    @pytest.mark.parametrize("packed", [False, True])
    def test_a_file_that_was_cut(
        self, training: Any, analyse: Any, kept: float, packed: bool
    ) -> None:
        t = training(60)
        path = t.write()
        content = t.text.encode()
        content = gzip.compress(content) if packed else content
        path.write_bytes(content[: int(len(content) * kept)])
        found = analyse(path)
        assert found.code == 1  # in part
        assert "the file ends early, after " in found.report
        assert found.record.steps > 10
        assert found.record.step_s == pytest.approx(1e-3)

    def test_counters_that_are_no_numbers(self, training: Any, analyse: Any) -> None:
        t = training(4)
        whole = analyse(t.write())
        for event in t.events:
            if event["cat"] == "kernel":
                event["args"]["est. achieved occupancy %"] = float("nan")
        assert "NaN" in t.text
        found = analyse(t.write())
        assert (found.code, found.us) == (0, whole.us)


class TestTR08:
    MS = (8, 20, 44, 11, 30)

    def reduces(self, timeline: Any, over: bool) -> Path:
        """All-reduces back to back, all launched early; `over`: a converter wrote the launch's start on them."""
        at = HOST + 1000.0
        for i, ms in enumerate(self.MS):
            launch = HOST + 10 * i
            start = launch if over else at
            timeline.kernel("ncclDevKernel_AllReduce", start, 1000.0 * ms, at=launch, stream=20)
            at += 1000.0 * ms
        path: Path = timeline.write()
        return path

    def test_true_times_give_the_exposed_time(self, timeline: Any, analyse: Any) -> None:
        found = analyse(self.reduces(timeline, over=False))
        assert found.us["comm_unsplit"] == 1000 * sum(self.MS)
        assert "equals the launch's start" not in found.doubts

    def test_written_over_times_are_not_trusted(self, timeline: Any, analyse: Any) -> None:
        found = analyse(self.reduces(timeline, over=True))
        assert "the device's start equals the launch's start for 5/5" in found.doubts
        assert not found.record.trusted


class TestTR09:
    def test_one_graph_launch_and_many_kernels(self, timeline: Any, analyse: Any) -> None:
        timeline.call("cudaGraphLaunch", HOST, 5, correlation=77)
        for i in range(40):
            timeline.kernel(f"node{i % 4}", HOST + 20 + 12 * i, 10, correlation=77)
        timeline.kernel("graph", HOST + 20, 12 * 39 + 10, correlation=77)
        found = analyse(timeline.write())
        assert "graph replay: 1 launch of CUDA graphs started 40 kernels" in found.report
        assert "1 row stands for a whole CUDA graph beside the kernels of it" in found.report
        assert found.record.busy_frac == pytest.approx(400 / 478)  # once
        assert found.us["idle_device"] == 78


def nsys(path: Path, *, suffix: str = "", inline: bool = False, ranges: bool = True) -> Path:
    """An export of Nsight Systems: four steps of a kernel of 400 us, a millisecond each."""
    kind = "TEXT" if inline else "INTEGER"
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)")
        database.execute("INSERT INTO StringIds VALUES (1, 'gemm')")
        database.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER, "
            f"correlationId INTEGER, demangledName {kind})"
        )
        for i in range(4):
            at = 1_000_000 * (i + 1)
            database.execute(
                "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, 0, 7, 0, ?)",
                (at + 100_000, at + 500_000, "gemm" if inline else 1),
            )
        if ranges:
            database.execute(
                f"CREATE TABLE NVTX_EVENTS{suffix} (start INTEGER, end INTEGER, eventType INTEGER, text TEXT, globalTid INTEGER, "
                "textId INTEGER)"
            )
            for i in range(4):
                at = 1_000_000 * (i + 1)
                database.execute(
                    f"INSERT INTO NVTX_EVENTS{suffix} VALUES (?, ?, 59, ?, 281479271677953, NULL)",
                    (at, at + 900_000, f"step {i}"),
                )
        database.commit()
    return path


class TestTR10:
    @pytest.mark.parametrize(
        ("how", "steps"),
        [
            ({"ranges": False}, 1),  # the whole trace
            ({"suffix": "_V2"}, 3),  # the begin of the first one is not known
            ({"inline": True}, 3),
            ({}, 3),
        ],
    )
    def test_exports_of_all_kinds_give_the_figures_of_their_kernels(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], how: Any, steps: int
    ) -> None:
        path = nsys(tmp_path / "report.sqlite", **how)
        main(["analyze", str(path), "--json", "-"])
        out, err = capsys.readouterr()
        assert err == ""
        record = json.loads(out)
        (rank,) = record["ranks"]
        assert rank["steps"] == steps
        busy_s = rank["ledger"]["busy_frac"] * rank["ledger"]["step_s"] * steps
        assert busy_s == pytest.approx(400e-6 * (4 if steps == 1 else 3))
        notes = " ".join(record["notes"])
        assert ("no NVTX ranges are in the export" in notes) == (how.get("ranges") is False)

    def test_a_damaged_export_is_one_clear_error(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "report.sqlite"
        path.write_bytes(b"SQLite format 3\x00" + bytes(4096))
        assert main(["analyze", str(path)]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert str(path) in err
        assert err.count("\n") == 1


class TestTR11:
    def test_that_the_profiler_slows_is_said_beside_every_figure(
        self, training: Any, analyse: Any
    ) -> None:
        found = analyse(training(4).write())
        assert found.record.profiled
        assert found.record.residual_frac is None
        assert "the steps were profiled" in found.report
        assert "step 1 ms · profiled" in found.report

    def test_time_that_only_the_profiler_may_have_made_is_no_finding(
        self, timeline: Any, analyse: Any
    ) -> None:
        for i in range(20):  # a host that needs 100 us for a kernel of 10
            op = timeline.op("aten::relu", HOST + 100 * i, 99, ([8], "float"))
            timeline.kernel("relu", HOST + 100 * i + 60, 10, at=HOST + 100 * i + 50, op=op)
        found = analyse(timeline.write())
        assert found.us["idle_launch"] == 19 * 90
        line = next(one for one in found.record.lines if one.name == "idle_launch")
        assert line.ci95[0] == 0
        assert "the profiler slows the host" in found.doubts
        assert not found.record.trusted


class TestTR12:
    def test_a_file_without_a_rank(self, training: Any, analyse: Any) -> None:
        found = analyse(training(4).write("rank0.json"))
        assert found.record.rank is None
        assert found.record.trusted
        assert "· rank" not in found.report

    def test_a_file_with_one(self, training: Any, analyse: Any) -> None:
        t = training(4)
        t.header["distributedInfo"] = {"backend": "nccl", "rank": 1, "world_size": 2}
        found = analyse(t.write())
        assert (found.record.rank, found.record.world_size) == (1, 2)
        assert "rank 1 of 2" in found.report

    def test_two_files_that_claim_one_rank(
        self, training: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        t = training(4)
        t.header["distributedInfo"] = {"backend": "nccl", "rank": 0, "world_size": 2}
        files = [t.write("one.json"), t.write("other.json")]
        assert main(["analyze", *map(str, files)]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert "one.json" in err
        assert "other.json" in err
        assert "rank 0" in err

    def test_three_files_whose_names_give_the_rank(
        self, training: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        t = training(4)
        files = [t.write(f"rank{rank}.json") for rank in (2, 0, 1)]
        assert main(["analyze", *map(str, files), "--json", "-"]) == 0
        ranks = json.loads(capsys.readouterr().out)["ranks"]
        assert [(one["rank"], Path(one["path"]).name) for one in ranks] == [
            (0, "rank0.json"),
            (1, "rank1.json"),
            (2, "rank2.json"),
        ]
