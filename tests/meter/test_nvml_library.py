"""NVML by ctypes against a small shared library with NVML's signatures, built on the spot."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from pathlib import Path

import pytest

from flopwise.meter import nvml, nvml_library
from flopwise.records.rank import DeviceMetrics

SOURCE = r"""
#include <string.h>
typedef struct { unsigned id; int ret; double value; const char *s, *l, *u; } Metric;
typedef struct { unsigned version, n; void *a, *b; Metric metrics[333]; } Request;
typedef struct { char legacy[16]; unsigned domain, bus, device, pci, sub; char id[32]; } Pci;
/* handles above 4 GiB: a cut pointer is noticed */
#define GPU ((void *)0x7f1234567890)
#define A ((void *)0x7fabcdef0010)
#define B ((void *)0x7fabcdef0020)
static unsigned long long millijoules = 1000;
static int taken, allocated;
#define OF(d) if ((d) != GPU) return 2
int nvmlInit_v2(void) { return 0; }
const char *nvmlErrorString(int code) { return code == 13 ? "Function Not Found" : code == 6 ? "Not Found" : "Not Supported"; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 3; return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **d) { if (strcmp(uuid, "GPU-5")) return 6; *d = GPU; return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **d) { if (strcmp(id, "00000000:1b:00.0")) return 6; *d = GPU; return 0; }
int nvmlDeviceGetMigMode(void *d, unsigned *now, unsigned *then) { OF(d); *now = 0; *then = 1; return 0; }
int nvmlDeviceGetTotalEnergyConsumption(void *d, unsigned long long *mj) { OF(d); *mj = millijoules += 8000000000ULL; return 0; }
int nvmlDeviceGetClockInfo(void *d, unsigned which, unsigned *mhz) { OF(d); *mhz = which == 1 ? 1980 : which == 2 ? 3201 : 0; return 0; }
int nvmlDeviceGetMaxClockInfo(void *d, unsigned which, unsigned *mhz) { OF(d); *mhz = 2000 + which; return 0; }
int nvmlDeviceGetTemperature(void *d, unsigned sensor, unsigned *c) { OF(d); *c = 61 + sensor; return 0; }
int nvmlDeviceGetEnforcedPowerLimit(void *d, unsigned *mw) { OF(d); *mw = 650000; return 0; }
int nvmlDeviceGetPowerManagementDefaultLimit(void *d, unsigned *mw) { OF(d); return 3; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *d, unsigned long long *bits) { OF(d); *bits = 4; return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned n) { strncpy(text, "580.1", n); return 0; }
int nvmlDeviceGetName(void *d, char *text, unsigned n) { OF(d); strncpy(text, "NVIDIA H200", n); return 0; }
int nvmlDeviceGetUUID(void *d, char *text, unsigned n) { OF(d); strncpy(text, "GPU-5", n); return 0; }
int nvmlDeviceGetPciInfo_v3(void *d, Pci *pci) { OF(d); pci->pci = 0x233510de; return 0; }
int nvmlDeviceGetMemoryInfo(void *d, unsigned long long *m) { OF(d); m[0] = 150754820096ULL; m[1] = m[2] = 1; return 0; }
int nvmlGpmQueryDeviceSupport(void *d, unsigned *support) { OF(d); if (support[0] != 1) return 25; support[1] = 1; return 0; }
int nvmlGpmSampleAlloc(void **s) { *s = allocated++ ? B : A; return 0; }
int nvmlGpmSampleGet(void *d, void *s) { OF(d); if (s != A && s != B) return 2; taken = taken * 10 + (s == A ? 1 : 2); return 0; }
int nvmlGpmSampleFree(void *s) { if (s != A && s != B) return 2; allocated--; return 0; }
int nvmlGpmMetricsGet(Request *r) {
    if (r->version != 1 || r->a != A || r->b != B) return 2;
    for (unsigned at = 0; at < r->n; at++) {
        Metric *m = &r->metrics[at];
        m->ret = m->id >= 60 ? 3 : 0;
        m->value = m->id == 20 ? 3.0 : m->id;
    }
    return 0;
}
int state(void) { return taken * 10 + allocated; }
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("nvml")
    (folder / "nvml.c").write_text(SOURCE)
    target = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", target, folder / "nvml.c"], check=True)
    return target


def test_a_whole_window(built: Path) -> None:
    driver = ctypes.CDLL(str(built))
    device = nvml.find(uuid="5", nvml=nvml_library.Library(driver))
    assert (device.reason, device.mig) == (None, False)
    ticks = itertools.count(0.0, 10e6)
    clock = lambda: next(ticks)  # noqa: E731
    window = nvml.Window(device, period_s=None, clock=clock, samples=device.samples(clock))
    window.open()
    telemetry = window.close()
    assert telemetry.energy_j == 8e6
    assert (telemetry.name, telemetry.driver) == ("NVIDIA H200", "580.1")
    assert (telemetry.sm_mhz, telemetry.sm_max_mhz) == (1980, 2001)
    assert (telemetry.memory_mhz, telemetry.temperature_c) == (3201, 61)
    assert (telemetry.power_limit_w, telemetry.power_limit_default_w) == (650.0, None)
    assert telemetry.throttle == ["sw_power_cap"]
    assert telemetry.pci_device_id == "10de:2335"
    assert (telemetry.memory_bytes, telemetry.uuid) == (150_754_820_096, "5")
    assert telemetry.device_metrics == DeviceMetrics(
        window_s=20e6,
        sm_busy_frac=0.02,
        sm_occupancy_frac=0.03,
        tensor_frac=0.05,
        tensor_dfma_frac=0.06,
        tensor_hmma_frac=0.07,
        tensor_imma_frac=0.09,
        dram_bandwidth_frac=0.10,
        fp64_frac=0.11,
        fp32_frac=0.12,
        fp16_frac=0.13,
        pcie_tx_bytes_per_s=3.0 * 2**20,
        pcie_rx_bytes_per_s=21.0 * 2**20,
    )
    assert driver.state() == 1120  # set up, begin, end; nothing is left allocated


def test_what_nvml_answers_is_the_reason(built: Path) -> None:
    device = nvml.find(pci_bus_id="00000000:1b:00.0", nvml=nvml_library.Library(ctypes.CDLL(built)))
    assert device.read_power_limit_default_w() is None
    assert device.read_throttle() == ["sw_power_cap"]
    assert device.missing == {
        "nvmlDeviceGetPowerManagementDefaultLimit": "Not Supported",
        "nvmlDeviceGetCurrentClocksEventReasons": "Function Not Found",
    }


def test_an_unknown_device_is_none_of_them(built: Path) -> None:
    device = nvml.find(uuid="6", nvml=nvml_library.Library(ctypes.CDLL(built)))
    assert device.reason == "NVML: none of its devices is the one that CUDA uses"


def test_it_stands_in_where_pynvml_is_not_installed(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    library = nvml_library.Library(ctypes.CDLL(built))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(nvml, "Library", lambda: library)
    assert nvml.find(uuid="5").read_name() == "NVIDIA H200"


def test_a_name_that_nvml_lacks_is_an_error() -> None:
    with pytest.raises(AttributeError):
        nvml_library.Library(object()).nvmlDeviceGetNothing  # noqa: B018


def test_layouts_are_those_of_pynvml() -> None:
    pynvml = pytest.importorskip("pynvml")
    for ours, theirs in (
        (nvml_library.PciInfo, pynvml.nvmlPciInfo_t),
        (nvml_library.Memory, pynvml.c_nvmlMemory_t),
        (nvml_library.GpmSupport, pynvml.c_nvmlGpmSupport_t),
    ):
        assert ctypes.sizeof(ours) == ctypes.sizeof(theirs)
        for name, *_ in ours._fields_:
            assert getattr(ours, name).offset == getattr(theirs, name).offset
