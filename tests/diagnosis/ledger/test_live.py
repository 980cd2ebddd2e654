"""The ledger of a live run: its lines sum to the undisturbed step, and what does not fit costs trust."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flopwise.diagnosis.ledger import live
from flopwise.diagnosis.ledger.build import Given, LedgerError
from flopwise.diagnosis.ledger.live import Undisturbed, live_ledger
from flopwise.diagnosis.ledger.windows import Window
from flopwise.hardware.accelerators import Peak
from flopwise.records.ceilings import CeilingsRecord, GemmCeiling
from flopwise.records.ledger import LedgerRecord, Line, Live
from flopwise.records.rank import ProfiledWindow
from flopwise.records.run import Clocks
from flopwise.trace.chrome import read

Write = Callable[..., tuple[Path, ProfiledWindow]]
LIVE = Live(1e-3, None, 20, [], "", None, None, None, None)


def opened(written: tuple[Path, ProfiledWindow]) -> Window:
    return Window.of(read(written[0]), written[1])


def reconciled(
    heavy: Window,
    light: Window | None,
    *,
    step_s: float = 1e-3,
    input_s: float | None = None,
    each_s: list[float] | None = None,
    given: Given | None = None,
    device: int | None = 0,
    preempted: float | None = None,
    clocks: Clocks | None = None,
) -> LedgerRecord:
    return live_ledger(
        heavy,
        light,
        None,
        Undisturbed(each_s or [step_s] * 20, input_s, clocks, preempted_frac=preempted),
        LIVE,
        given or Given(),
        device,
    )


def us(record: LedgerRecord) -> dict[str, float]:
    return {line.name: round(line.s * 1e6, 3) for line in record.lines}


@pytest.fixture
def made(window: Write) -> Callable[..., LedgerRecord]:
    """The ledger of a light and a heavy window, each with options of its own."""

    def make(
        light: dict[str, Any] | None = None, heavy: dict[str, Any] | None = None, **more: Any
    ) -> LedgerRecord:
        return reconciled(
            opened(window("heavy", **(heavy or {}))),
            opened(window("light", **(light or {}))),
            **more,
        )

    return make


def sums(record: LedgerRecord) -> None:
    assert sum(line.s for line in record.lines) == pytest.approx(record.step_s, rel=1e-12)
    assert sum(line.share_frac for line in record.lines) == pytest.approx(1, rel=1e-12)
    assert sum(line.mfu_points for line in record.lines) == pytest.approx(100, rel=1e-12)
    assert sum(record.families.values()) == pytest.approx(record.step_s, rel=1e-12)


def test_every_microsecond_has_a_line(made: Any) -> None:
    record = made()
    sums(record)
    lines = us(record)
    assert lines["idle_launch"] == 100
    assert lines["idle_device"] == 200
    assert lines["residual"] == 0
    assert lines["optimizer"] == 100
    assert lines["memory_bound"] + lines["memory_excess"] == 200
    # 2 * 1024^3 FLOPs at 989.5 TFLOP/s dense bf16 (NVIDIA H200 data sheet).
    assert lines["ideal"] == pytest.approx(2 * 1024**3 / 989.5e12 * 1e6, rel=1e-3)
    products = {
        "ideal",
        "hardware",
        "ceiling",
        "clock",
        "gemm_bytes",
        "gemm_excess",
        "gemm_unsplit",
    }
    assert sum(s for name, s in lines.items() if name in products) == pytest.approx(400)
    assert (record.steps, record.profiled) == (20, False)
    assert record.step_s == pytest.approx(1e-3, rel=1e-12)
    assert record.residual_frac == 0
    assert record.busy_frac == pytest.approx(0.7)
    assert record.trusted, record.untrusted_because
    assert record.live is not None
    assert record.live.idle_from == "the light window"
    assert not any("the steps were profiled" in note for note in record.notes)


def test_a_residual_is_what_the_light_window_took_less(made: Any) -> None:
    record = made(step_s=1.015e-3)
    sums(record)
    assert us(record)["residual"] == 15
    assert record.residual_frac == pytest.approx(15 / 1015)
    assert record.trusted
    record = made(step_s=0.985e-3)
    assert us(record)["residual"] == -15
    sums(record)


def test_a_stretched_light_window_makes_idle_time_an_estimate(made: Any) -> None:
    record = made(light={"step_us": 1300}, step_s=1e-3)
    sums(record)
    # Busy for 700, and so idle for 300 of the 1000: by itself as long as it may be, which is 500.
    assert us(record)["residual"] == 0
    assert us(record)["idle_device"] == 300
    assert record.live is not None
    assert "causes are estimates" in record.live.idle_from
    by_name = {line.name: line for line in record.lines}
    assert by_name["idle_device"].ci95 == pytest.approx((0, 600e-6))  # +- what it was stretched by
    assert record.busy_frac == pytest.approx(0.7)
    assert record.trusted, record.untrusted_because


def test_the_heavy_windows_length_does_not_matter(made: Any) -> None:
    assert us(made(heavy={"step_us": 1900})) == us(made())


def test_durations_are_the_light_windows(made: Any) -> None:
    slow = made(heavy={"stretch": 1.12})
    assert us(slow) == us(made())
    sums(slow)
    shorter = made(light={"stretch": 0.5})
    sums(shorter)
    assert us(shorter)["optimizer"] == 50
    assert shorter.busy_frac == pytest.approx(0.35)


def test_a_device_busy_for_longer_than_the_step_costs_trust(made: Any) -> None:
    record = made(step_s=0.690e-3)
    sums(record)
    assert us(record)["residual"] == -10
    assert not record.trusted
    assert record.untrusted_because == [
        "the device was busy for 101.4% of an undisturbed step while it was profiled: the windows are not of the same "
        "steps, or the profiler slows them"
    ]
    much = made(step_s=0.6e-3)
    assert any("the residual is 16.7%" in doubt for doubt in much.untrusted_because)
    sums(much)
    assert made(step_s=0.694e-3).trusted


def extra_kernel(name: str, us_: float, op: str | None = None) -> Callable[[Any, float], None]:
    def add(timeline: Any, at: float) -> None:
        number = timeline.op(op, at + 84, 8, ([1000, 1000], "float")) if op else 0
        timeline.kernel(name, at + 720, us_, at=at + 86, op=number)

    return add


def test_kernels_of_one_window_alone_are_said(made: Any) -> None:
    record = made(light={"extra": extra_kernel("only_here", 60)})
    sums(record)
    assert not record.trusted
    assert "the windows ran different kernels, 7.9% of their time (at most 2%)" in (
        record.untrusted_because
    )
    record = made(heavy={"extra": extra_kernel("only_here", 60, "aten::relu")})
    sums(record)
    assert any("the windows ran different kernels, 8.6%" in one for one in record.untrusted_because)
    assert record.busy_frac == pytest.approx(0.7)
    record = made(light={"extra": extra_kernel("only_here", 10)})
    assert record.trusted, record.untrusted_because


def test_work_of_a_class_that_the_heavy_window_lacks(made: Any) -> None:
    def copy(timeline: Any, at: float) -> None:
        timeline.kernel(
            "Memcpy HtoD (Pageable -> Device)", at + 720, 50, at=at + 86, cat="gpu_memcpy",
            by="cudaMemcpyAsync", bytes=1000,
        )  # fmt: skip

    record = made(light={"extra": copy})
    sums(record)
    assert us(record)["exposed_copy"] == 50
    record = made(heavy={"extra": copy})
    sums(record)
    assert us(record).get("exposed_copy", 0.0) == 0


def test_input_is_capped_by_the_undisturbed_wait_where_idle_is_estimated(made: Any) -> None:
    light = {"step_us": 1100, "waits": [(0, 40)]}
    record = made(light=light, input_s=15e-6)
    sums(record)
    assert us(record)["idle_input"] == 15
    assert us(made(light=light, input_s=1e-3))["idle_input"] == 40
    assert us(made(light=light, input_s=0.0)).get("idle_input", 0.0) == 0
    assert us(made(light=light | {"step_us": 1000}))["idle_input"] == 40


def test_flagged_steps_are_left_out(made: Any) -> None:
    def busier(timeline: Any, at: float) -> None:
        if at >= 15_000:
            extra_kernel("evaluate", 70)(timeline, at)

    record = made(light={"extra": busier, "flags": {5: 1, 6: 1, 7: 1}})
    assert us(record) == us(made())


def test_error_bars_hold_the_line_and_are_none_where_nothing_varies(made: Any) -> None:
    for line in made().lines:
        assert line.ci95 == pytest.approx((line.s, line.s), abs=1e-12)
    varied = made(each_s=[0.99e-3, 1.01e-3, 1.0e-3] * 20)
    for line in varied.lines:
        low, high = line.ci95
        assert low <= line.s + 1e-12
        assert high >= line.s - 1e-12
    residual = next(line for line in varied.lines if line.name == "residual")
    assert residual.ci95[1] - residual.ci95[0] > 1e-6
    sums(varied)


def test_a_clock_that_is_kept_below_its_highest_is_not_known_to_the_percent(made: Any) -> None:
    ceilings = CeilingsRecord(
        schema="", flopwise="", created="2026-11-30", device_type="cuda", device_name="NVIDIA H200", torch="", cuda=None,
        driver=None, threads=0, cores=0, wall_s=0.0, gemm=[GemmCeiling("bf16", 792e12, "", flops_per_clock=466_000.0)],
        copy_bytes_per_s=None, copy_size_bytes=None, dispatch_s=None, launch_s=None, link=None,
    )  # fmt: skip

    def lines(sm_mhz: float) -> dict[str, Line]:
        clocks = Clocks(sm_mhz, 1980.0, None, None, None, None, [])
        record = made(given=Given(ceilings=ceilings, sm_mhz=sm_mhz), clocks=clocks)
        sums(record)
        return {line.name: line for line in record.lines}

    found = lines(1500.0)
    at_stated = 2 * 1024**3 / (466_000 * 1830e6)  # seconds
    slack = 0.02 * at_stated / (1500 / 1830)
    clock, excess = found["clock"], found["gemm_excess"]
    assert clock.s == pytest.approx(at_stated * (1830 / 1500 - 1))
    assert clock.ci95 == pytest.approx((clock.s - slack, clock.s + slack))
    assert excess.ci95 == pytest.approx((excess.s - slack, excess.s + slack))
    found = lines(1980.0)  # nothing keeps it down: it is what is read
    assert found["clock"].ci95 == pytest.approx((found["clock"].s,) * 2)
    # No line hangs on the clock where what the device does a clock is not known
    clocks = Clocks(1500.0, 1980.0, None, None, None, None, [])
    found = {one.name: one for one in made(given=Given(sm_mhz=1500.0), clocks=clocks).lines}
    assert "clock" not in found
    assert found["gemm_excess"].ci95 == pytest.approx((found["gemm_excess"].s,) * 2)


def test_a_cpus_operators_stand_for_both_windows(window: Write) -> None:
    heavy = opened(window("heavy", cpu=True))
    given_ = Given(peak=Peak(1e12, "fp32", "given", "given"))
    record = reconciled(heavy, None, given=given_, device=None)
    sums(record)
    lines = us(record)
    assert record.busy_frac == pytest.approx(0.7)
    assert lines["idle_launch"] == 300
    assert lines["optimizer"] == 100
    assert record.device == -1
    assert record.live is not None
    assert record.live.idle_from == "the window of operators"
    waited = reconciled(
        opened(
            window(
                "heavy",
                cpu=True,
                extra=lambda t, at: t.op(
                    "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", at + 2, 40
                ),
            )
        ),
        None,
        given=given_,
        device=None,
    )
    assert us(waited)["idle_input"] == 40


def test_time_without_a_core_has_a_line_and_useful_work_stays_what_flops_need(
    window: Write,
) -> None:
    path, noted = window("heavy", cpu=True)
    ns = [0]
    for low, high in pairwise(noted.marks_ns):
        ns.append(ns[-1] + (high - low) // 5)  # a fifth of each step
    heavy = opened((path, dataclasses.replace(noted, delays_ns=ns)))
    given_ = Given(peak=Peak(1e12, "fp32", "given", "given"))
    plain = us(reconciled(heavy, None, given=given_, device=None))
    record = reconciled(heavy, None, step_s=0.9e-3, given=given_, device=None, preempted=0.1)
    sums(record)
    lines = us(record)
    assert lines["preempted"] == 90
    assert lines["ideal"] == plain["ideal"] > 0
    assert (lines["idle_launch"], lines["residual"]) == (240, 10)
    products = sum(lines.get(name, 0.0) for name in ("ideal", "gemm_excess"))
    assert products == pytest.approx(0.8 * 400, abs=0.01)
    # What is said of kernels and operators agrees with the lines: four fifths of what was recorded.
    recorded = reconciled(heavy, None, given=given_, device=None)
    for now, before in zip(record.operators, recorded.operators, strict=True):
        assert now.s == pytest.approx(0.8 * before.s)
        assert now.share_frac == pytest.approx(now.s / record.step_s)
    assert not reconciled(
        heavy, None, step_s=1.1e-3, given=given_, device=None, preempted=0.2
    ).trusted


@pytest.mark.parametrize(("step_s", "doubted"), [(0.92e-3, False), (0.9e-3, True), (1.2e-3, True)])
def test_on_a_cpu_profiled_steps_far_off_cost_trust(
    window: Write, step_s: float, doubted: bool
) -> None:
    record = reconciled(opened(window("heavy", cpu=True)), None, step_s=step_s, device=None)
    assert any("differ by" in doubt for doubt in record.untrusted_because) is doubted
    sums(record)


def test_what_the_trace_is_doubted_for_stays(made: Any) -> None:
    def broken(timeline: Any, at: float) -> None:
        timeline.kernel("broken", at + 720, -500, at=at + 86)
        timeline.kernel("broken", at + 730, 20, at=at + 88)

    record = made(light={"extra": broken}, heavy={"extra": broken})
    assert not record.trusted


@pytest.mark.parametrize("which", ["light", "heavy"])
def test_a_window_that_belongs_to_another_time_is_refused(window: Write, which: str) -> None:
    written = {kind: window(kind) for kind in ("light", "heavy")}
    path, noted = written[which]
    later = dataclasses.replace(noted, marks_ns=[ns + 10**12 for ns in noted.marks_ns])
    written[which] = (path, later)
    with pytest.raises(LedgerError, match=f"{which}.json: nothing ran in the steps of this window"):
        reconciled(opened(written["heavy"]), opened(written["light"]))


def test_another_device_than_that_of_the_rank(made: Any) -> None:
    with pytest.raises(LedgerError, match="no work of device 3"):
        made(device=3)


lengths = st.floats(0.3, 1.0)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    light_step=st.floats(900, 1500),
    heavy_step=st.floats(900, 2500),
    light_stretch=lengths,
    heavy_stretch=lengths,
    steps=st.lists(st.floats(1e-4, 3e-3), min_size=1, max_size=12),
    waited=st.none() | st.floats(0, 1e-3),
    wait=st.floats(1, 200),
    copies=st.booleans(),
)
def test_lines_sum_for_any_mixture(
    window: Write,
    light_step: float,
    heavy_step: float,
    light_stretch: float,
    heavy_stretch: float,
    steps: list[float],
    waited: float | None,
    wait: float,
    copies: bool,
) -> None:
    def copy(timeline: Any, at: float) -> None:
        if copies:
            timeline.kernel("Memcpy DtoH", at + 705, 30, at=at + 86, cat="gpu_memcpy")

    light = opened(
        window("light", step_us=light_step, stretch=light_stretch, waits=[(0, wait)], extra=copy)
    )
    heavy = opened(window("heavy", step_us=heavy_step, stretch=heavy_stretch))
    record = reconciled(heavy, light, each_s=steps, input_s=waited)
    sums(record)
    assert record.trusted or record.untrusted_because
    for line in record.lines:
        assert line.s >= -1e-12 or line.name in ("residual", "gemm_excess", "hardware", "ceiling")


@pytest.mark.parametrize(("python_us", "pace"), [(0.0, 1.0), (400.0, 450 / 850)])
def test_the_hosts_pace_is_of_recorded_times_not_of_stretched_ones(
    made: Any, monkeypatch: pytest.MonkeyPatch, python_us: float, pace: float
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(live, "findings", lambda scene: seen.append(scene) or [])

    def queued(t: Any, at: float) -> None:  # for 150, until the ReLU before has ended
        t.kernel("late", at + 720, 20, at=at + 560, took=150)

    def waits(t: Any, at: float) -> None:
        queued(t, at)
        if python_us:
            t.call("cudaDeviceSynchronize", at + 100, python_us)

    # Kernels that are half as long without operators: stretched to them, none would end in that call
    made(light={"stretch": 0.5, "extra": waits}, heavy={"extra": queued})
    assert seen[0].host_pace == pytest.approx(pace)
