"""The table of accelerators: exact matching, dense peaks, refusals."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.errors import HardwareError, UsageError
from flopwise.hardware.accelerators import (
    lookup,
    normalised,
    parse_peak,
    parse_table,
    peak_of,
    reference_peak,
    rows,
)

#: Figures that data sheets headline and that are not the dense rate: sparse, or another dtype's.
WRONG = {
    ("h100-sxm", "bf16"): {1979, 3958, 1513, 756},
    ("h100-sxm", "fp8"): {3958},
    ("h100-sxm", "tf32"): {989, 989.5},
    ("h100-pcie", "bf16"): {1513, 989.5, 1979},
    ("h100-nvl", "bf16"): {1671, 1670.5, 989.5, 3341},
    ("h200-sxm", "bf16"): {1979, 3958},
    ("h200-nvl", "bf16"): {1671, 989.5},
    ("a100-sxm-80", "tf32"): {19.5, 312},
    ("a100-sxm-80", "bf16"): {624, 156},
    ("a100-pcie-40", "bf16"): {624},
    ("a10", "bf16"): {250, 31.2},
    ("l4", "bf16"): {242},
    ("l40s", "bf16"): {733, 181, 366},
    ("a6000", "bf16"): {38.7, 309.7},
    ("b200-hgx", "bf16"): {4500, 5000},
    ("b200-hgx", "fp8"): {9000},
    ("gb200", "bf16"): {5000},
    ("rtx3090", "bf16"): {35.6, 142},
    ("rtx4090", "bf16"): {82.6, 330.3, 660.6},
    ("rtx5090", "bf16"): {838, 419, 104.8},
    ("mi300x", "bf16"): {2614.9, 2615, 330.6},
    ("mi250x", "bf16"): {383},
}

KNOWN = {normalised(n) for r in rows() for n in (*r.device_names, *r.aliases)}


def peak(name: str) -> float:
    found = reference_peak(lookup(name))
    assert found is not None
    return found.flops_per_s


class TestFigures:
    @pytest.mark.parametrize(
        ("name", "tflops", "dtype"),
        [
            ("NVIDIA H200", 989.5, "bf16"),
            ("NVIDIA H100 80GB HBM3", 989.5, "bf16"),
            ("NVIDIA H100 PCIe", 756, "bf16"),
            ("NVIDIA H100 NVL", 835.5, "bf16"),
            ("NVIDIA A100-SXM4-40GB", 312, "bf16"),
            ("NVIDIA A100-PCIE-40GB", 312, "bf16"),
            ("NVIDIA A100 80GB PCIe", 312, "bf16"),
            ("NVIDIA L4", 121, "bf16"),
            ("NVIDIA L40S", 362, "bf16"),
            ("NVIDIA H20", 148, "bf16"),
            ("NVIDIA B200", 2250, "bf16"),
            ("NVIDIA GB200", 2500, "bf16"),
            ("AMD Instinct MI300X", 1307.4, "bf16"),
            ("AMD Instinct MI250X", 191.5, "bf16"),  # one die of two, as torch shows it
            ("Tesla V100-SXM2-16GB", 125, "fp16"),  # no bf16 in hardware
            ("Tesla T4", 65, "fp16"),
        ],
    )
    def test_reference_peak_is_the_dense_16_bit_one(
        self, name: str, tflops: float, dtype: str
    ) -> None:
        found = reference_peak(lookup(name))
        assert found is not None
        assert found.flops_per_s == pytest.approx(tflops * 1e12, rel=1e-12)
        assert (found.dtype, found.kind) == (dtype, "datasheet")
        assert "data sheet" in found.source

    @pytest.mark.parametrize(("row_id", "dtype"), WRONG)
    def test_no_dense_rate_is_a_sparse_or_foreign_one(self, row_id: str, dtype: str) -> None:
        (row,) = (r for r in rows() if r.id == row_id)
        assert row.dense_tflops[dtype] not in WRONG[row_id, dtype]

    def test_a100_tf32_and_fp64(self) -> None:
        row = lookup("NVIDIA A100-SXM4-80GB").row
        assert row is not None
        assert peak_of(row, "tf32") == 156e12
        assert peak_of(row, "fp32") == 19.5e12
        assert peak_of(row, "fp64") == 19.5e12  # matrix units, twice the vector units' 9.7
        assert peak_of(row, "fp8") is None

    def test_wider_dtypes_are_never_faster(self) -> None:
        for row in rows():
            rates = [row.dense_tflops[d] for d in ("fp8", "bf16", "tf32") if d in row.dense_tflops]
            assert rates == sorted(rates, reverse=True), row.id

    def test_sm_count_times_clock_gives_the_peak(self) -> None:
        checked = 0
        for row in rows():
            if row.flop_per_sm_clk is None:
                continue
            assert row.sm_count is not None
            assert row.peak_clock_mhz is not None
            computed = row.sm_count * row.flop_per_sm_clk * row.peak_clock_mhz * 1e6
            stated = row.dense_tflops.get("bf16", row.dense_tflops.get("fp16", math.nan))
            assert computed == pytest.approx(stated * 1e12, rel=0.01), row.id
            checked += 1
        assert checked >= 25

    def test_every_row_has_its_source_and_date(self) -> None:
        for row in rows():
            assert len(row.source) > 10, row.id
            assert row.date.startswith("20"), row.id
            assert row.confidence in {"high", "medium", "low"}, row.id
            assert row.disputed or row.confidence != "low", row.id
            assert row.disputed or row.dense_tflops, row.id

    def test_ids_are_unique(self) -> None:
        ids = [row.id for row in rows()]
        assert len(ids) == len(set(ids))


class TestCases:
    """The same achieved rate on several devices, and one rate against the right variant."""

    def test_324_tflops_is_a_third_of_an_h100(self) -> None:
        assert 324e12 / peak("H100 80GB HBM3") == pytest.approx(0.327, abs=5e-4)

    @pytest.mark.parametrize("name", ["A100-SXM4-80GB", "RTX 4090"])
    def test_324_tflops_is_over_the_peak_of_smaller_devices(self, name: str) -> None:
        assert 324e12 / peak(name) > 1

    def test_unknown_device_has_no_peak_and_says_so(self) -> None:
        match = lookup("Foo9000")
        assert match.row is None
        assert reference_peak(match) is None
        assert match.reason == (
            'no bf16 peak known for "Foo9000": MFU is left out; step time and throughput stand. '
            "Add a row with its source (docs/hardware.md) or give --peak"
        )

    def test_h200_at_420(self) -> None:
        assert round(100 * 420e12 / peak("NVIDIA H200"), 1) == 42.4

    def test_h100_nvl_at_400(self) -> None:
        assert round(100 * 400e12 / peak("NVIDIA H100 NVL"), 1) == 47.9

    def test_fp32_and_bf16_are_weighed_by_their_own_peaks(self) -> None:
        row = lookup("NVIDIA H200").row
        assert row is not None
        fp32, bf16 = peak_of(row, "fp32"), peak_of(row, "bf16")
        assert (fp32, bf16) == (67e12, 989.5e12)
        assert 6.7e12 / fp32 + 98.95e12 / bf16 == pytest.approx(0.2)


class TestMatching:
    @pytest.mark.parametrize(
        ("name", "row_id"),
        [
            ("NVIDIA A10", "a10"),
            ("NVIDIA A10G", "a10g"),
            ("NVIDIA A100-SXM4-40GB", "a100-sxm-40"),
            ("NVIDIA H20", "h20"),
            ("NVIDIA H200", "h200-sxm"),
            ("NVIDIA H200 NVL", "h200-nvl"),
            ("NVIDIA L4", "l4"),
            ("NVIDIA L40", "l40"),
            ("NVIDIA L40S", "l40s"),
            ("NVIDIA B200", "b200-hgx"),
            ("NVIDIA GB200", "gb200"),
            ("NVIDIA GH200 480GB", "gh200-96"),
            ("NVIDIA GH200 144G HBM3e", "gh200-144"),
            ("nvidia h100 80gb  hbm3", "h100-sxm"),
            ("A100-SXM4-80GB", "a100-sxm-80"),  # as drivers before 465 name it
            ("RTX 4090", "rtx4090"),
            ("GeForce RTX 4090", "rtx4090"),
        ],
    )
    def test_each_name_means_one_row(self, name: str, row_id: str) -> None:
        row = lookup(name).row
        assert row is not None
        assert row.id == row_id

    @pytest.mark.parametrize(
        "name",
        [
            "",
            "NVIDIA",
            "NVIDIA H100",  # a part of several names, and a device of its own
            "NVIDIA A100",
            "NVIDIA A100-SXM-64GB",
            "NVIDIA H800",
            "NVIDIA H20-3e",
            "NVIDIA H2000",
            "NVIDIA L40S-48Q",
            "GRID A100X-40C",
            "NVIDIA GeForce RTX 4090 Laptop GPU",
            "NVIDIA GeForce RTX 4090 D",
            "NVIDIA RTX PRO 6000 Blackwell Server Edition",
            "Tesla V100-SXM3-32GB",
            "AMD Instinct MI250X/MI250",
            "AMD Instinct MI250",
            "my H200",
        ],
    )
    def test_a_part_of_a_name_is_not_enough(self, name: str) -> None:
        match = lookup(name)
        assert match.row is None
        assert f'"{name}"' in match.reason

    @given(
        name=st.sampled_from([n for r in rows() for n in r.device_names]),
        tail=st.text("SX40gbPCIe-", min_size=1, max_size=6),
    )
    def test_text_around_a_name_matches_only_as_a_name_of_its_own(
        self, name: str, tail: str
    ) -> None:
        for longer in (name + tail, tail + name):
            assert (lookup(longer).row is not None) == (normalised(longer) in KNOWN)

    @pytest.mark.parametrize(
        "name", ["NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA H100 80GB HBM3 MIG 3g.40gb"]
    )
    def test_a_mig_slice_is_refused_by_name(self, name: str) -> None:
        match = lookup(name)
        assert match.row is None
        assert "MIG slice" in match.reason
        assert "--peak" in match.reason

    def test_a_mig_slice_is_refused_by_flag(self) -> None:
        assert lookup("NVIDIA H200", mig=True).row is None

    @pytest.mark.parametrize("name", ["NVIDIA A10G", "Ascend910B", "Ascend910B2C", "HL-325"])
    def test_a_disputed_row_gives_no_peak(self, name: str) -> None:
        match = lookup(name)
        assert match.row is not None
        assert reference_peak(match) is None
        assert peak_of(match.row, "bf16") is None
        assert "disputed" in match.reason
        assert "flopwise ceilings" in match.reason


class TestContradictions:
    @pytest.mark.parametrize(
        ("name", "memory_bytes"),
        [
            ("NVIDIA H200", 150_109_880_320),
            ("NVIDIA H100 80GB HBM3", 85_017_493_504),
            ("NVIDIA A100-SXM4-40GB", 42_298_834_944),
            ("Tesla T4", 15_843_721_216),
            ("NVIDIA L4", 23_600_000_000),
            ("NVIDIA B200", 192_265_846_784),
            ("AMD Instinct MI250X", 65_520 * 2**20),
            ("AMD Instinct MI300X", 196_592 * 2**20),
            ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 97_250 * 2**20),
        ],
    )
    def test_memory_as_drivers_report_it_is_accepted(self, name: str, memory_bytes: int) -> None:
        assert lookup(name, memory_bytes=memory_bytes).row is not None

    def test_memory_of_another_variant_is_refused(self) -> None:
        match = lookup("NVIDIA A100-SXM4-40GB", memory_bytes=85_000_000_000)
        assert match.row is None
        assert "85.0 GB of memory where a100-sxm-40 has 40 GB" in match.reason

    def test_sm_count_of_another_variant_is_refused(self) -> None:
        match = lookup("NVIDIA H100 80GB HBM3", sm_count=114)
        assert match.row is None
        assert "114 SMs where h100-sxm has 132" in match.reason

    def test_matching_sm_count_is_accepted(self) -> None:
        assert lookup("NVIDIA H200", sm_count=132, memory_bytes=150_109_880_320).row is not None

    def test_a_power_cap_is_named_with_its_figures(self) -> None:
        match = lookup("NVIDIA H200", power_limit_w=500.0, power_limit_default_w=700.0)
        assert match.row is not None
        (warning,) = match.warnings
        assert "500 W" in warning
        assert "700 W" in warning

    @pytest.mark.parametrize(
        ("limit_w", "default_w"), [(700.0, 700.0), (None, 700.0), (500.0, None), (750.0, 700.0)]
    )
    def test_no_cap_no_warning(self, limit_w: float | None, default_w: float | None) -> None:
        match = lookup("NVIDIA H200", power_limit_w=limit_w, power_limit_default_w=default_w)
        assert match.warnings == []


class TestGivenPeak:
    @pytest.mark.parametrize(
        ("text", "flops_per_s", "dtype"),
        [
            ("989.5e12", 989.5e12, "unstated"),
            ("989.5T", 989.5e12, "unstated"),
            (" 989.5 TFLOP/s ", 989.5e12, "unstated"),
            ("989.5 tflops", 989.5e12, "unstated"),
            ("bf16=989.5T", 989.5e12, "bf16"),
            ("BF16 = 1.979P", 1.979e15, "bf16"),
            ("fp32=67e12", 67e12, "fp32"),
            ("150G", 150e9, "unstated"),
            ("1E", 1e18, "unstated"),
            ("5e3T", 5e15, "unstated"),
        ],
    )
    def test_accepted(self, text: str, flops_per_s: float, dtype: str) -> None:
        found = parse_peak(text)
        assert found.flops_per_s == pytest.approx(flops_per_s, rel=1e-12)
        assert (found.dtype, found.kind) == (dtype, "given")
        assert text.strip() in found.source

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("", "not a rate"),
            ("fast", "not a rate"),
            ("nan", "not a rate"),
            ("inf", "not a rate"),
            ("T", "not a rate"),
            ("=1T", "not a rate"),
            ("1T 2T", "not a rate"),
            ("bf16=", "not a rate"),
            ("0", "is 0 FLOP/s"),
            ("-1T", "is -1e+12 FLOP/s"),
            ("989.5", "is 989.5 FLOP/s"),  # meant in TFLOP/s
            ("2e18", "is 2e+18 FLOP/s"),
            ("989.5e12T", "FLOP/s; a device has 1e8 to 1e18"),
            ("1e400", "is inf FLOP/s"),
            ("fp7=1T", "unknown dtype"),
        ],
    )
    def test_refused(self, text: str, says: str) -> None:
        with pytest.raises(UsageError) as error:
            parse_peak(text)
        assert says in str(error.value)
        assert repr(text) in str(error.value)

    @given(st.text(max_size=20))
    def test_any_text_is_a_rate_or_one_clear_error(self, text: str) -> None:
        try:
            found = parse_peak(text)
        except UsageError:
            return
        assert 1e8 <= found.flops_per_s <= 1e18


class TestTable:
    ROW = (
        '[[accelerator]]\nid = "x"\nvendor = "V"\nname = "X"\ndevice_names = ["V X"]\n'
        'dense_tflops = { bf16 = 1 }\nsource = "s"\ndate = "2026-01-01"\nconfidence = "high"\n'
    )

    def test_a_row_is_read(self) -> None:
        (row,) = parse_table(self.ROW)
        assert row.dense_tflops == {"bf16": 1}

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("[[accelerator", "cannot be read"),
            ("x = 1", "cannot be read"),
            (ROW.replace('source = "s"\n', ""), "source"),
            (ROW + 'colour = "red"\n', "unknown field 'colour'"),
            (ROW.replace("bf16", "bf17"), "unknown field 'bf17'"),
            (ROW.replace("= 1 }", '= "1" }'), "cannot be read"),
            (ROW + ROW.replace('"x"', '"y"'), "'v x' is in rows x and y"),
        ],
    )
    def test_a_broken_table_is_one_clear_error(self, text: str, says: str) -> None:
        with pytest.raises(HardwareError) as error:
            parse_table(text)
        assert says in str(error.value)
