from __future__ import annotations

import dataclasses

import pytest

from flopwise.records.rank import DeviceMetrics
from flopwise.records.run import RankSummary, Stratum
from flopwise.reports.run import command_line, device
from flopwise.reports.terminal import render


def lines(record, **more):
    return render(record, width=160, color=False, **more).splitlines()


def line(record, label, **more):
    """Returns the line with this label, without it."""
    return next(text[14:] for text in lines(record, **more) if text[2:14].rstrip() == label)


def with_mfu(record, **changes):
    return dataclasses.replace(record, mfu=dataclasses.replace(record.mfu, **changes))


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["train.py"], "flopwise run train.py"),
        (["flopwise", "run", "train.py"], "flopwise run train.py"),
        (["/opt/venv/bin/flopwise", "run", "a b.py"], "flopwise run 'a b.py'"),
        ([], "flopwise run"),
    ],
)
def test_command_is_shown_as_typed(words, shown):
    assert command_line(words, "run") == shown


def test_no_peak_means_no_mfu_and_the_reason_and_the_ceiling_instead(sample):
    text = lines(sample("unknown_gpu"))
    at = next(n for n, row in enumerate(text) if row.startswith("  MFU"))
    assert text[at] == (
        '  MFU         not given: no bfloat16 peak is known for "NVIDIA X100"; add a row with its '
        "source to accelerators.toml, or give --peak"
    )
    assert text[at + 1] == (
        "              achieved 377.9 TFLOP/s a device · 62.1 % of the measured ceiling, 608.5 TFLOP/s"
    )


def test_mfu_line_names_what_differs_and_only_that(sample):
    record = sample("cpu")
    assert line(record, "MFU") == "44.1 % · attention counted full · 43.9 % mask-aware"
    same = with_mfu(record, value_causal=record.mfu.value)
    assert line(same, "MFU") == "44.1 % · attention counted full · mask-aware the same"
    recomputed = with_mfu(record, hfu=0.5512, dtype_weighted=0.5, value_causal=None)
    assert line(recomputed, "MFU") == (
        "44.1 % · attention counted full · HFU 55.1 % (recomputation included)"
        " · 50 % of the peaks of the dtypes that ran"
    )


def test_padding_is_named_beside_the_value(sample):
    record = sample("cpu")
    work = dataclasses.replace(record.throughput, padding_frac=0.25)
    padded = dataclasses.replace(record, throughput=work)
    assert line(padded, "MFU").startswith(
        "44.1 % · attention counted full · padding counted (25 %)"
    )
    assert "padding" not in line(record, "MFU")


def test_sums_that_lack_ranks_are_not_given_and_say_why(sample):
    record = sample("unknown_gpu")
    none = dict.fromkeys(["samples_per_s", "tokens_per_s", "real_tokens_per_s", "padding_frac"])
    work = dataclasses.replace(
        record.throughput, **none, samples_per_step=None, reason="1 of 2 ranks have no record"
    )
    cost = dataclasses.replace(
        record.cost, usd_per_m_tokens=None, usd_per_m_samples=None, usd_per_1k_steps=None,
        reason="1 of 2 ranks have no record",
    )  # fmt: skip
    record = dataclasses.replace(record, throughput=work, cost=cost)
    assert line(record, "throughput") == (
        "27 steps/s · samples and tokens are not given: 1 of 2 ranks have no record"
    )
    assert line(record, "cost") == (
        "not given: 1 of 2 ranks have no record · at $2.50 a device hour (--price)"
    )


def test_cost_says_how_many_devices_were_paid_for(sample):
    record = sample("unknown_gpu")
    cost = dataclasses.replace(record.cost, devices=2)
    assert line(dataclasses.replace(record, cost=cost), "cost").endswith(
        "at 2 x $2.50 a device hour (--price)"
    )


def test_mask_aware_value_can_stand_alone(sample):
    record = with_mfu(sample("cpu"), value=None, reason="above 1", achieved_flops_per_s=None)
    text = lines(record)
    at = text.index("  MFU         not given: above 1")
    assert text[at + 1] == "              mask-aware 43.9 %"


def test_low_coverage_is_said_beside_the_value(sample):
    low = with_mfu(sample("cpu"), coverage_frac=0.912, uncovered=["my::op"])
    assert "only 91.2 % of the work is covered" in line(low, "MFU")
    assert line(low, "coverage") == "91.2 % of operator time · no rule for my::op"
    assert "covered" not in line(with_mfu(low, coverage_frac=0.98), "MFU")
    said = with_mfu(low, reason="coverage is 91.2 %")
    assert line(said, "MFU").endswith("43.9 % mask-aware · coverage is 91.2 %")


def test_energy_that_was_not_measured_is_never_zero(sample):
    record = sample("cpu")
    assert line(record, "energy") == "not measured: no NVML on a CPU"
    bare = dataclasses.replace(record, energy=dataclasses.replace(record.energy, reason=None))
    assert line(bare, "energy") == "not measured: the record has no reason"


def test_cost_needs_a_price(sample):
    assert not any("cost" in text for text in lines(sample("cpu")))
    assert line(sample("unknown_gpu"), "cost") == (
        "$0.0016 a million tokens · $1.61 a million samples · $0.026 a thousand steps"
        " · at $2.50 a device hour (--price)"
    )


def test_issue_times_carry_their_caveat_on_a_device_only(sample):
    caveat = "  times to issue the work to the device, not to do it"
    assert caveat not in lines(sample("cpu"))
    assert caveat in lines(sample("unknown_gpu"))


def test_verdict_stands_alone(sample):
    assert line(sample("unknown_gpu"), "verdict") == "input-bound: 61 % of the step waits for data"
    assert not any("verdict" in text for text in lines(sample("cpu")))


@pytest.mark.parametrize(
    ("complete", "exit_code", "shown"),
    [
        (True, 0, []),
        (True, None, []),
        (False, None, ["  first report: the script still runs"]),
        (False, 0, ["  partial: the run ended before all steps were timed"]),
        (True, 3, ["  the script ended with exit code 3"]),
        (True, -15, ["  the script was ended by signal 15 (SIGTERM)"]),
        (True, -250, ["  the script was ended by signal 250"]),
    ],
)
def test_how_the_run_ended(sample, complete, exit_code, shown):
    record = dataclasses.replace(sample("cpu"), complete=complete, exit_code=exit_code)
    text = lines(record)
    ending = text[2 : text.index("")] if text[0].count("·") == 0 else text[1 : text.index("")]
    assert [row for row in ending if row.startswith("  ")] == shown
    state = "(still in place)" if exit_code is None else "(whether they were undone is not known"
    hooks = [row for row in text if ("(all undone)" if complete else state) in row]
    assert len(hooks) == 1


def test_hooks_that_could_not_be_taken_out_are_not_called_undone(sample):
    record = sample("cpu")
    for note in (
        "a patch could not be undone: KeyError: 'x'",
        "could not be taken out: OSError: y",
    ):
        shown = "\n".join(lines(dataclasses.replace(record, notes=[note])))
        assert "(not all undone, see the notes)" in shown
        assert "all undone)" not in shown


def test_next_and_saved_paths_are_printed(sample):
    record = sample("cpu")
    more = {"next_command": "flopwise tune train.py", "saved": ["runs/a", "runs/a/run.json"]}
    assert line(record, "next", **more) == "flopwise tune train.py"
    assert line(record, "saved", **more) == "runs/a · runs/a/run.json"


def test_long_tables_are_cut_and_troubled_ranks_are_kept(sample):
    record = sample("cpu")
    ranks = [RankSummary(n, "h", "cpu", n, 5, 0.1, 0.0, "complete") for n in range(99)]
    ranks.append(RankSummary(99, "h", "cpu", 0, 0, 0.0, 0.0, "missing"))
    text = lines(dataclasses.replace(record, ranks=ranks))
    at = text.index("  by rank")
    assert text[at + 8 : at + 11] == [
        "     6  h     cpu       6      5     100 ms       0 ns  complete",
        "    99  h     cpu       0      0          -          -  missing",
        "  92 more ranks in the JSON",
    ]


def test_strata_need_two_shapes(sample):
    record = sample("cpu")
    assert "  by input shape" not in lines(record)
    strata = [Stratum(f"{n}x8 int64", 1, 0.1, 0.1, None) for n in range(9)]
    steps = dataclasses.replace(record.steps, strata=strata)
    text = lines(dataclasses.replace(record, steps=steps))
    at = text.index("  by input shape")
    assert text[at + 10] == "  1 more shape in the JSON"


def test_a_lowered_power_limit_is_named(sample):
    assert "limit 500 W (default 700 W)" in line(sample("unknown_gpu"), "clocks")
    assert "limit 700 W · first device of 2" in line(sample("two_ranks"), "clocks")


def test_a_cpu_has_no_line_for_device_clocks(sample):
    record = sample("cpu")
    clocks = dataclasses.replace(record.clocks, note="not measured")
    assert not any("clocks" in text for text in lines(dataclasses.replace(record, clocks=clocks)))


READ = DeviceMetrics(
    window_s=5.2,
    sm_busy_frac=0.931,
    sm_occupancy_frac=0.25,
    tensor_frac=0.412,
    fp64_frac=0.0,
    fp32_frac=0.065,
    fp16_frac=0.0049,
    dram_bandwidth_frac=0.37,
    pcie_rx_bytes_per_s=3.2e9,
    pcie_tx_bytes_per_s=1e6,
    nvlink_rx_bytes_per_s=0.0,
    nvlink_tx_bytes_per_s=0.0,
)


def test_the_devices_own_counters_are_shown_beside_the_clocks(sample):
    record = dataclasses.replace(sample("unknown_gpu"), device_metrics=READ)
    assert device(record) == [
        "SM busy 93.1 %",
        "SM occupancy 25 %",
        "tensor cores 41.2 %",
        "FP32 6.50 %",
        "memory bandwidth 37 %",
        "PCIe 3.20 GB/s in, 1 MB/s out",
        "NVML GPM, over 5.20 s",
    ]
    text = lines(record)
    at = next(n for n, row in enumerate(text) if row.startswith("  device "))
    assert text[at - 1].startswith("  clocks ")
    assert text[at][14:].startswith("SM busy 93.1 % · SM occupancy 25 % · tensor cores 41.2 %")


def test_a_counter_that_was_not_read_is_left_out(sample):
    one = DeviceMetrics(window_s=5.2, sm_busy_frac=0.0, pcie_rx_bytes_per_s=1e9)
    record = dataclasses.replace(sample("unknown_gpu"), device_metrics=one)
    assert line(record, "device") == "SM busy 0 % · NVML GPM, over 5.20 s"


def test_counters_that_cannot_be_read_give_their_reason(sample):
    none = DeviceMetrics(reason="NVML GPM: Insufficient Permissions")
    record = dataclasses.replace(sample("unknown_gpu"), device_metrics=none)
    assert line(record, "device") == "not read: NVML GPM: Insufficient Permissions"


def test_a_record_without_counters_has_no_line_for_them(sample):
    text = lines(sample("unknown_gpu"))
    assert not any(row[2:14].rstrip() == "device" for row in text)


def test_nothing_is_said_twice(sample):
    record = with_mfu(sample("cpu"), peak_source="measured here on 2026-11-30")
    assert line(record, "peak").endswith(" a device · measured here on 2026-11-30")
    rule = dataclasses.replace(record.steps, warmup_rule="warm-up ends after 5 steps")
    text = line(dataclasses.replace(record, steps=rule), "steps")
    assert text == "a step ends with: optimizer · warm-up ends after 5 steps"
