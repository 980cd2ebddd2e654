"""NVML readings against a fake pynvml whose counters are exact."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from flopwise.meter import nvml
from flopwise.records.rank import Telemetry

UUID = "737e2423-874a-23a4-1126-dfbe3e77c294"


class FakeError(Exception):
    pass


class FakeNvml:
    """Stands in for the module pynvml: one H200 at a known bus, a known number of joules a reading."""

    def __init__(self, energy_mj: Iterator[int] | None = None) -> None:
        self.energy_mj = energy_mj if energy_mj is not None else itertools.count(0, 1_234_500)
        self.handles = {f"GPU-{UUID}": "gpu", "00000000:1b:00.0": "gpu", 0: "gpu", 1: "other"}
        self.absent: set[str] = set()
        self.sm_mhz = itertools.chain([1980, 1400, 1410], itertools.repeat(1410))
        self.reasons = itertools.chain([0x1, 0x4, 0x24], itertools.repeat(0x4))
        self.mig_mode = [0, 0]
        self.threads: list[str] = []
        self.calls: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml"):
            if name in self.absent:
                raise AttributeError(name)
            self.threads.append(threading.current_thread().name)
            self.calls.append(name)
        return super().__getattribute__(name)

    def _find(self, key: Any) -> str:
        if key not in self.handles:
            raise FakeError("Not Found")
        return self.handles[key]

    nvmlDeviceGetHandleByUUID = _find
    nvmlDeviceGetHandleByPciBusId = _find
    nvmlDeviceGetHandleByIndex = _find

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: str) -> str:
        assert handle == "slice"
        return "gpu"

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:
        return self.mig_mode

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        assert handle == "gpu"
        return next(self.energy_mj)

    def nvmlDeviceGetClockInfo(self, handle: str, clock: int) -> int:
        return next(self.sm_mhz) if clock == 1 else 3201

    def nvmlDeviceGetMaxClockInfo(self, handle: str, clock: int) -> int:
        assert clock == 1
        return 1980

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        return 61

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:
        return 700_000

    def nvmlDeviceGetPowerManagementDefaultLimit(self, handle: str) -> int:
        return 700_000

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        return next(self.reasons)

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.159.04"

    def nvmlDeviceGetName(self, handle: str) -> bytes:
        return b"NVIDIA H200"  # as older pynvml gives it

    def nvmlDeviceGetPciInfo(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(pciDeviceId=0x233510DE)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(total=150_754_820_096)

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return f"GPU-{UUID}"


def window(fake: FakeNvml, seconds: float = 2.0) -> nvml.Window:
    """Returns a window without a thread whose clock moves `seconds` a reading."""
    ticks = itertools.count(100.0, seconds)
    return nvml.Window(
        nvml.find(uuid=UUID, nvml=fake, sm_count=132), period_s=None, clock=lambda: next(ticks)
    )


class TestWindow:
    def test_every_joule_is_counted(self) -> None:
        subject = window(FakeNvml())
        subject.open()
        subject.sample()
        assert subject.close() == Telemetry(
            name="NVIDIA H200",
            driver="580.159.04",
            energy_j=1234.5,
            window_s=4.0,
            sm_mhz=1410,  # the median of 1980, 1400, 1410
            sm_max_mhz=1980,
            memory_mhz=3201,
            temperature_c=61,
            power_limit_w=700.0,
            power_limit_default_w=700.0,
            throttle=["sw_power_cap", "sw_thermal_slowdown"],
            mig=False,
            pci_device_id="10de:2335",
            sm_count=132,
            memory_bytes=150_754_820_096,
            reason=None,
            uuid=UUID,
        )

    def test_the_counter_is_read_at_the_two_ends_only(self) -> None:
        fake = FakeNvml()
        subject = window(fake)
        subject.open()
        for _ in range(5):
            subject.sample()
        subject.close()
        assert fake.calls.count("nvmlDeviceGetTotalEnergyConsumption") == 2

    def test_two_seconds_are_the_least(self) -> None:
        at_limit, below = window(FakeNvml(), nvml.MIN_WINDOW_S), window(FakeNvml(), 1.99)
        at_limit.open()
        below.open()
        assert at_limit.close().energy_j == 1234.5
        telemetry = below.close()
        assert telemetry.energy_j is None
        assert telemetry.window_s == pytest.approx(1.99)
        assert telemetry.reason == (
            "the window was 1.99 s; the energy counter steps every 0.1 s, so it takes at least 2 s"
        )
        assert telemetry.sm_mhz is not None

    @pytest.mark.parametrize(
        ("readings", "says"),
        [
            ([5_000, 3_000], "went back by 2 J"),
            ([5_000, 5_000], "stood still for 2.0 s"),
            ([0, 2_000_000], "says 1000 W, the limit is 700 W"),
        ],
    )
    def test_a_counter_that_lies_gives_no_joules(self, readings: list[int], says: str) -> None:
        subject = window(FakeNvml(iter(readings)))
        subject.open()
        telemetry = subject.close()
        assert telemetry.energy_j is None
        assert telemetry.reason is not None
        assert says in telemetry.reason

    def test_no_counter_is_no_joules_with_the_reason(self) -> None:
        fake = FakeNvml()
        fake.absent = {"nvmlDeviceGetTotalEnergyConsumption"}
        subject = window(fake)
        subject.open()
        telemetry = subject.close()
        assert telemetry.energy_j is None
        assert telemetry.reason is not None
        assert "no energy counter" in telemetry.reason
        assert telemetry.power_limit_w == 700.0

    def test_a_mig_slice_does_not_get_the_whole_devices_joules(self) -> None:
        fake = FakeNvml()
        fake.mig_mode = [1, 1]
        subject = window(fake)
        subject.open()
        telemetry = subject.close()
        assert (telemetry.energy_j, telemetry.mig) == (None, True)
        assert telemetry.reason is not None
        assert "MIG" in telemetry.reason

    def test_never_opened(self) -> None:
        telemetry = window(FakeNvml()).close()
        assert telemetry.energy_j is None
        assert telemetry.reason == "the window was never opened"

    def test_opened_again_forgets_the_first_window(self) -> None:
        subject = window(FakeNvml())
        for _ in range(2):
            subject.open()
            assert subject.close().energy_j == 1234.5

    @pytest.mark.parametrize(
        "function",
        [n for n in vars(FakeNvml) if n.startswith("nvmlDeviceGet") and "Handle" not in n],
    )
    def test_each_function_may_be_missing(self, function: str) -> None:
        fake = FakeNvml()
        fake.absent = {function}
        subject = window(fake)
        subject.open()
        telemetry = subject.close()
        assert 0 not in [v for v in vars(telemetry).values() if not isinstance(v, bool)]

    def test_the_older_name_of_the_reasons_is_known(self) -> None:
        fake = FakeNvml()
        fake.absent = {"nvmlDeviceGetCurrentClocksEventReasons"}
        fake.nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: 0x40  # type: ignore[attr-defined]
        assert nvml.find(uuid=UUID, nvml=fake).read_throttle() == ["hw_thermal_slowdown"]


class TestThread:
    def test_reads_on_a_thread_of_its_own(self) -> None:
        fake = FakeNvml()
        device = nvml.find(uuid=UUID, nvml=fake)
        begun = threading.Event()
        original = fake.nvmlDeviceGetTemperature
        fake.nvmlDeviceGetTemperature = lambda *a: begun.set() or original(*a)  # type: ignore[method-assign,func-returns-value]
        ticks = itertools.count(0.0, 3.0)
        subject = nvml.Window(device, period_s=0.001, clock=lambda: next(ticks))
        fake.threads.clear()
        subject.open()
        assert begun.wait(5)
        assert set(fake.threads) == {"flopwise-nvml"}
        telemetry = subject.close()
        assert telemetry.energy_j == 1234.5
        assert not [t for t in threading.enumerate() if t.name == "flopwise-nvml"]

    def test_closed_at_once_still_reads_both_ends(self) -> None:
        ticks = itertools.count(0.0, 2.5)
        subject = nvml.Window(
            nvml.find(uuid=UUID, nvml=FakeNvml()), period_s=60, clock=lambda: next(ticks)
        )
        subject.open()
        telemetry = subject.close()
        assert (telemetry.energy_j, telemetry.window_s) == (1234.5, 2.5)

    def test_a_driver_that_hangs_is_left_behind(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(nvml, "_JOIN_S", 0.05)
        fake = FakeNvml()
        release = threading.Event()
        fake.nvmlDeviceGetTotalEnergyConsumption = lambda h: release.wait(10) and 0  # type: ignore[method-assign]
        subject = nvml.Window(nvml.find(uuid=UUID, nvml=fake), period_s=1)
        subject.open()
        telemetry = subject.close()
        release.set()
        assert telemetry.energy_j is None
        assert telemetry.reason == "NVML did not answer within 0.05 s"


class TestFinding:
    @pytest.mark.parametrize("uuid", [UUID, f"GPU-{UUID}"])
    def test_by_uuid(self, uuid: str) -> None:
        assert nvml.find(uuid=uuid, nvml=FakeNvml()).reason is None

    def test_by_pci_bus(self) -> None:
        device = nvml.find(uuid="unknown", pci_bus_id="00000000:1b:00.0", nvml=FakeNvml())
        assert device.reason is None

    def test_an_index_is_no_identity(self) -> None:
        device = nvml.find(uuid="unknown", pci_bus_id="00000000:ff:00.0", nvml=FakeNvml())
        assert device.reason == "NVML: none of its devices is the one that CUDA uses"
        assert device.read_energy_j() is None

    def test_the_only_device_is_the_one(self) -> None:
        fake = FakeNvml()
        fake.nvmlDeviceGetCount = lambda: 1  # type: ignore[method-assign]
        assert nvml.find(nvml=fake).reason is None

    def test_its_uuid_is_the_one_it_was_found_by_or_the_drivers(self) -> None:
        fake = FakeNvml()
        assert nvml.find(uuid=f"GPU-{UUID}", nvml=fake).read_uuid() == UUID
        assert nvml.find(pci_bus_id="00000000:1b:00.0", nvml=fake).read_uuid() == UUID
        fake.absent = {"nvmlDeviceGetUUID"}
        assert nvml.find(pci_bus_id="00000000:1b:00.0", nvml=fake).read_uuid() is None
        lost = nvml.find(uuid="GPU-5", pci_bus_id="00000000:ff:00.0", nvml=fake)
        assert (lost.reason is None, lost.read_uuid()) == (False, "5")

    def test_a_mig_slice_is_found_by_its_uuid_and_read_through_its_device(self) -> None:
        fake = FakeNvml()
        fake.handles = {"MIG-5": "slice"}
        device = nvml.find(uuid="MIG-5", nvml=fake)
        assert (device.mig, device.reason) == (True, None)
        assert device.read_power_limit_w() == 700.0

    def test_no_driver(self) -> None:
        class Broken(FakeNvml):
            def nvmlInit(self) -> None:
                raise FakeError("Driver Not Loaded")

        device = nvml.find(uuid=UUID, nvml=Broken(), sm_count=132)
        assert device.reason == "NVML: Driver Not Loaded"
        subject = nvml.Window(device)
        subject.open()
        telemetry = subject.close()
        assert telemetry.reason == "NVML: Driver Not Loaded"
        assert (telemetry.energy_j, telemetry.sm_mhz, telemetry.sm_count) == (None, None, 132)

    def test_no_pynvml_and_no_library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def no_library() -> None:
            raise OSError("libnvidia-ml.so.1: cannot open shared object file")

        monkeypatch.setitem(sys.modules, "pynvml", None)
        monkeypatch.setattr(nvml, "Library", no_library)
        assert "nor libnvidia-ml.so.1 is installed" in str(nvml.find(uuid=UUID).reason)

    def test_importing_it_loads_neither_pynvml_nor_torch(self) -> None:
        code = (
            "import sys, flopwise.meter.nvml; "
            "sys.exit(bool({'torch', 'pynvml'} & set(sys.modules)))"
        )
        assert subprocess.run([sys.executable, "-c", code]).returncode == 0


class TestTorchDevice:
    def properties(self, **extra: Any) -> SimpleNamespace:
        return SimpleNamespace(
            name="NVIDIA H200", multi_processor_count=132, total_memory=150_109_880_320, **extra
        )

    @pytest.mark.parametrize(
        "extra",
        [
            {"uuid": UUID},
            {"pci_domain_id": 0, "pci_bus_id": 0x1B, "pci_device_id": 0},
            {"uuid": "unknown", "pci_domain_id": 0, "pci_bus_id": 0x1B, "pci_device_id": 0},
        ],
    )
    def test_the_device_is_the_one_that_torch_uses(
        self, extra: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import torch

        monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda index: self.properties(**extra)
        )
        device = nvml.of_torch_device(3)
        assert device.reason is None
        assert (device.sm_count, device.read_memory_bytes()) == (132, 150_109_880_320)
        assert isinstance(nvml.Window.of_torch_device(3), nvml.Window)

    def test_torch_that_tells_no_identity_gets_no_guess(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import torch

        monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: self.properties())
        assert nvml.of_torch_device(0).reason is not None

    def test_amd_is_not_asked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch

        monkeypatch.setattr(torch.version, "hip", "6.4")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: self.properties())
        assert nvml.of_torch_device(0).reason == "NVML reads NVIDIA devices only"


@pytest.mark.parametrize(
    ("bits", "names"),
    [
        (0x0, []),
        (0x4, ["sw_power_cap"]),
        (0x1E1, ["gpu_idle", "sw_thermal_slowdown", "hw_thermal_slowdown",
                 "hw_power_brake_slowdown", "display_clock_setting"]),
        (0x1000, ["reason_0x1000"]),
    ],
)  # fmt: skip
def test_throttle_names(bits: int, names: list[str]) -> None:
    assert nvml.throttle_names(bits) == names


def test_throttle_names_are_those_of_the_driver() -> None:
    pynvml = pytest.importorskip("pynvml")
    for bit, name in nvml.THROTTLE_NAMES.items():
        camel = "".join(part.capitalize() for part in name.split("_"))
        assert getattr(pynvml, f"nvmlClocksEventReason{camel}") == bit


@pytest.mark.gpu
def test_a_real_device_gives_joules() -> None:
    import time

    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    subject = nvml.Window.of_torch_device(torch.cuda.current_device(), period_s=0.5)
    subject.open()
    a = torch.randn(4096, 4096, device="cuda")
    end = time.perf_counter() + 2.5
    while time.perf_counter() < end:
        torch.mm(a, a)
        torch.cuda.synchronize()
    telemetry = subject.close()
    assert telemetry.reason is None
    assert telemetry.energy_j is not None
    assert telemetry.window_s is not None
    assert telemetry.power_limit_w is not None
    assert 20 < telemetry.energy_j / telemetry.window_s < 1.3 * telemetry.power_limit_w
    assert telemetry.name == torch.cuda.get_device_name()
