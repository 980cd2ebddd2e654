"""The cache of ceilings, its faults, and the measuring subprocess as the parent sees it."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flopwise.errors import HardwareError
from flopwise.hardware import ceilings
from flopwise.records import store
from flopwise.records.ceilings import SCHEMA, CeilingsRecord, GemmCeiling

CPU = CeilingsRecord(
    schema=SCHEMA,
    flopwise="0",
    created="2026-11-29T12:00:00+00:00",
    device_type="cpu",
    device_name="AMD EPYC 9654",
    torch="2.13.0+cpu",
    cuda=None,
    driver=None,
    threads=2,
    cores=4,
    wall_s=3.0,
    gemm=[
        GemmCeiling("fp32", 100e9, "1024x1024x1024 nn"),
        GemmCeiling("bf16", 400e9, "512x512x512 nt"),
        GemmCeiling("fp64", 50e9, "1024x1024x1024 nn"),
    ],
    copy_bytes_per_s=20e9,
    copy_size_bytes=1 << 28,
    dispatch_s=2e-6,
    launch_s=None,
    link=None,
)
GPU = dataclasses.replace(
    CPU,
    device_type="cuda",
    device_name="NVIDIA H200",
    torch="2.11.0+cu130",
    threads=0,
    cores=0,
    gemm=[
        GemmCeiling("bf16", 794e12, "16384x16384x16384 nn", sustained_flops_per_s=671e12),
        GemmCeiling("fp16", 753e12, "8192x8192x8192 nn", sustained_flops_per_s=646e12),
        GemmCeiling("fp8", 1496e12, "16384x16384x16384 nt", sustained_flops_per_s=1301e12),
    ],
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "flopwise" / "ceilings"


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


class TestPeak:
    def test_cpu_reference_is_the_fastest_dtype(self) -> None:
        peak = ceilings.measured_peak(CPU)
        assert peak is not None
        assert (peak.flops_per_s, peak.dtype, peak.kind) == (400e9, "bf16", "measured")
        for part in ("2026-11-29", "bf16", "512x512x512 nt", "2.13.0+cpu", "2 thread"):
            assert part in peak.source

    def test_gpu_reference_is_the_fastest_16_bit_dtype(self) -> None:
        burst = ceilings.measured_peak(GPU)
        held = ceilings.measured_peak(GPU, sustained=True)
        assert burst is not None
        assert held is not None
        assert (burst.flops_per_s, held.flops_per_s) == (794e12, 671e12)

    def test_one_dtype(self) -> None:
        peak = ceilings.measured_peak(CPU, "fp64")
        assert peak is not None
        assert peak.flops_per_s == 50e9

    @pytest.mark.parametrize(("dtype", "sustained"), [("fp8", False), ("fp32", True)])
    def test_what_was_not_measured_is_none(self, dtype: str, sustained: bool) -> None:
        assert ceilings.measured_peak(CPU, dtype, sustained=sustained) is None

    def test_a_disturbed_dtype_that_cannot_be_the_fastest_does_no_harm(self) -> None:
        record = dataclasses.replace(CPU, disturbed={"fp16": 399e9})
        peak = ceilings.measured_peak(record)
        assert peak is not None
        assert peak.dtype == "bf16"

    def test_a_disturbed_dtype_that_may_be_the_fastest_leaves_no_peak(self) -> None:
        record = dataclasses.replace(CPU, disturbed={"fp16": 401e9})
        assert ceilings.measured_peak(record) is None
        assert ceilings.measured_peak(record, "bf16") is not None


class TestCache:
    def test_absent_is_none_without_a_word(self) -> None:
        assert ceilings.load(ceilings.key_of(CPU)) == (None, None)

    def test_what_was_saved_is_loaded(self) -> None:
        assert ceilings.save(CPU) is None
        assert ceilings.load(ceilings.key_of(CPU)) == (CPU, None)

    @pytest.mark.parametrize(
        "other",
        [
            {"threads": 1},
            {"cores": 2},
            {"torch": "2.14.0+cpu"},
            {"device_name": "AMD EPYC 9654P"},
            {"device_type": "cuda"},
        ],
    )
    def test_each_part_of_the_key_counts(self, other: dict[str, object]) -> None:
        ceilings.save(CPU)
        key = dataclasses.replace(ceilings.key_of(CPU), **other)  # type: ignore[arg-type]
        assert ceilings.load(key) == (None, None)

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda text: "",
            lambda text: text[: len(text) // 2],
            lambda text: "\x00\xff",
            lambda text: "[]",
            lambda text: text.replace(SCHEMA, "other/9"),
            lambda text: text.replace('"threads": 2', '"threads": "two"'),
            lambda text: text.replace("400000000000.0", "-1.0"),
            lambda text: text.replace("400000000000.0", "4e99"),
            lambda text: text.replace("AMD EPYC 9654", "Intel Xeon"),
            *(
                lambda text, value=value: text.replace(
                    '"flops_per_clock": null', f'"flops_per_clock": {value}', 1
                )
                for value in ('"many"', "-1.0", "0.0", "1e300", "1e999", "NaN")
            ),
        ],
        ids=[
            "empty",
            "truncated",
            "binary",
            "a list",
            "other schema",
            "wrong type",
            "negative",
            "absurd",
            "another device's",
            *(
                f"{what} a clock"
                for what in ("text", "negative", "none", "absurd", "infinite", "nan")
            ),
        ],
    )
    def test_a_file_of_no_use_is_ignored_in_one_line(self, cache: Path, spoil: object) -> None:
        ceilings.save(CPU)
        path = only_file(cache)
        spoiled = spoil(path.read_text())  # type: ignore[operator]
        assert spoiled != path.read_text()
        path.write_text(spoiled, encoding="latin-1")
        record, note = ceilings.load(ceilings.key_of(CPU))
        assert record is None
        assert note is not None
        assert note.startswith("cached ceilings ignored, measured again: ")
        assert "\n" not in note

    def test_a_folder_in_place_of_the_file_is_ignored(self, cache: Path) -> None:
        ceilings.save(CPU)
        path = only_file(cache)
        path.unlink()
        path.mkdir()
        record, note = ceilings.load(ceilings.key_of(CPU))
        assert (record, note is None) == (None, False)

    def test_an_unwritable_folder_is_a_note_not_an_error(self, cache: Path) -> None:
        cache.parent.mkdir(parents=True)
        cache.write_text("a file where the folder should be")
        note = ceilings.save(CPU)
        assert note is not None
        assert "not cached" in note
        assert ceilings.load(ceilings.key_of(CPU))[0] is None

    def test_nothing_but_the_record_is_left_in_the_folder(self, cache: Path) -> None:
        ceilings.save(CPU)
        ceilings.save(dataclasses.replace(CPU, created="2026-11-30T00:00:00+00:00"))
        assert len(list(cache.iterdir())) == 1

    def test_a_relative_cache_home_is_ignored(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", "here")
        monkeypatch.setenv("HOME", "/home/someone")
        assert ceilings.folder() == Path("/home/someone/.cache/flopwise/ceilings")


def fake_python(folder: Path, body: str) -> str:
    """Returns a program that stands in for the interpreter; `body` is shell, $JSON the path."""
    program = folder / "fake-python"
    program.write_text(
        "#!/bin/sh\n"
        f'echo "$@" >> {folder}/calls\n'
        'while [ $# -gt 0 ]; do [ "$1" = --json ] && JSON=$2; shift; done\n' + body
    )
    program.chmod(0o755)
    return str(program)


class TestObtain:
    KEY = ceilings.key_of(CPU)

    def answer(self, folder: Path, record: CeilingsRecord = CPU) -> str:
        answer = folder / "answer.json"
        answer.write_text(store.encode(record))
        return fake_python(folder, f'cp {answer} "$JSON"\n')

    def calls(self, folder: Path) -> list[str]:
        return (folder / "calls").read_text().splitlines()

    def test_measures_once_then_reads_the_cache(self, tmp_path: Path) -> None:
        python = self.answer(tmp_path)
        record, note = ceilings.obtain(2, python, key=self.KEY)
        assert (record, note) == (CPU, None)
        again, note = ceilings.obtain(2, python, key=self.KEY)
        assert again == CPU
        assert note is not None
        assert "from the cache" in note
        (call,) = self.calls(tmp_path)
        assert call.startswith("-m flopwise.meter.ceilings --json ")
        assert call.endswith("--device cpu --threads 2")

    def test_refresh_measures_again(self, tmp_path: Path) -> None:
        python = self.answer(tmp_path)
        ceilings.obtain(2, python, key=self.KEY)
        ceilings.obtain(2, python, refresh=True, key=self.KEY)
        assert len(self.calls(tmp_path)) == 2

    def test_a_corrupt_cache_is_measured_again_and_mended(
        self, tmp_path: Path, cache: Path
    ) -> None:
        ceilings.save(CPU)
        only_file(cache).write_text("{")
        python = self.answer(tmp_path)
        record, note = ceilings.obtain(2, python, key=self.KEY)
        assert record == CPU
        assert note is not None
        assert note.startswith("cached ceilings ignored")
        assert ceilings.load(self.KEY) == (CPU, None)

    def test_an_unwritable_cache_still_gives_the_record(self, tmp_path: Path, cache: Path) -> None:
        cache.parent.mkdir(parents=True)
        cache.write_text("")
        record, note = ceilings.obtain(2, self.answer(tmp_path), key=self.KEY)
        assert record == CPU
        assert note is not None
        assert "not cached" in note

    def test_the_environment_of_the_measurement(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
        monkeypatch.setenv("PYTHONPATH", f"src{os.pathsep}/abs")
        monkeypatch.chdir(tmp_path)
        (tmp_path / "answer.json").write_text(store.encode(CPU))
        python = fake_python(
            tmp_path, f'cp {tmp_path}/answer.json "$JSON"; env > {tmp_path}/env; pwd >> calls\n'
        )
        ceilings.obtain(3, python, key=self.KEY)
        lines = (tmp_path / "env").read_text().splitlines()
        assert "OMP_NUM_THREADS=3" in lines
        assert "FLOPWISE_DISABLE=1" in lines
        assert f"PYTHONPATH={tmp_path}/src{os.pathsep}/abs" in lines
        assert not any(line.startswith("NVIDIA_TF32_OVERRIDE") for line in lines)
        assert len(self.calls(tmp_path)) == 1  # the working folder is another one

    @pytest.mark.parametrize(
        ("body", "says"),
        [
            ("echo Traceback >&2; echo ModuleNotFoundError: torch >&2; exit 1\n", "Error: torch"),
            ("exit 3\n", "exit code 3"),
            ("exit 0\n", "exit code 0"),
            ('echo "{" > "$JSON"\n', "not a readable record"),
        ],
    )
    def test_a_failed_measurement_is_one_clear_error(
        self, tmp_path: Path, body: str, says: str
    ) -> None:
        with pytest.raises(HardwareError) as error:
            ceilings.obtain(2, fake_python(tmp_path, body), key=self.KEY)
        assert says in str(error.value)

    def test_rates_of_nothing_are_an_error(self, tmp_path: Path) -> None:
        python = self.answer(tmp_path, dataclasses.replace(CPU, gemm=[]))
        with pytest.raises(HardwareError, match="no usable rate"):
            ceilings.obtain(2, python, key=self.KEY)

    def test_a_disturbed_measurement_is_used_but_not_kept(
        self, tmp_path: Path, cache: Path
    ) -> None:
        record = dataclasses.replace(CPU, disturbed={"fp16": 30e9})
        python = self.answer(tmp_path, record)
        found, note = ceilings.obtain(2, python, key=self.KEY)
        assert found == record
        assert note is not None
        assert note.startswith("the machine was too busy to measure what it reaches in fp16.")
        assert not cache.exists()

    def test_nothing_but_disturbed_is_an_error(self, tmp_path: Path) -> None:
        record = dataclasses.replace(CPU, gemm=[], disturbed={"fp32": 30e9})
        with pytest.raises(HardwareError, match="the machine is too busy"):
            ceilings.obtain(2, self.answer(tmp_path, record), key=self.KEY)

    def test_another_device_than_the_wanted_one_is_an_error(self, tmp_path: Path) -> None:
        key = dataclasses.replace(self.KEY, device_name="Intel Xeon")
        with pytest.raises(HardwareError, match=r"wanted .* Intel Xeon, but torch uses AMD EPYC"):
            ceilings.obtain(2, self.answer(tmp_path), key=key)

    def test_a_hanging_measurement_is_stopped(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(ceilings._TIMEOUT_S, "cpu", 0.2)
        with pytest.raises(HardwareError, match=r"did not end within 0\.2 s"):
            ceilings.obtain(2, fake_python(tmp_path, "exec sleep 30\n"), key=self.KEY)

    def test_an_interpreter_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(HardwareError, match="cannot be run"):
            ceilings.obtain(2, str(tmp_path / "no-python"), key=self.KEY)

    def test_an_unknown_device_is_asked_for_first(self, tmp_path: Path) -> None:
        (tmp_path / "key.json").write_text(json.dumps(dataclasses.asdict(self.KEY)))
        (tmp_path / "answer.json").write_text(store.encode(CPU))
        body = (
            f'if grep -q identify {tmp_path}/calls && [ "$(wc -l < {tmp_path}/calls)" = 1 ]; '
            f'then cp {tmp_path}/key.json "$JSON"; else cp {tmp_path}/answer.json "$JSON"; fi\n'
        )
        record, _ = ceilings.obtain(None, fake_python(tmp_path, body))
        assert record == CPU
        first, second = self.calls(tmp_path)
        assert first.endswith("--identify")
        assert second.endswith("--device cpu --threads 2")


def test_reading_the_cache_needs_no_torch() -> None:
    code = (
        "import sys; from flopwise.hardware import ceilings, accelerators; "
        "ceilings.load(ceilings.cpu_key(1, '2.13.0')); accelerators.lookup('NVIDIA H200'); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
