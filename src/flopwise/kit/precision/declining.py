"""Why a dtype does not go with a module, its weights or its device."""

from __future__ import annotations

import torch
from torch import nn

from flopwise.kit.precision.master_weights import master_of

#: Dtypes of autocast by name.
AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def device_of(module: nn.Module) -> torch.device:
    """Returns the device of a module's first tensor; without any the CUDA device, else the CPU."""
    for tensor in (*module.parameters(), *module.buffers()):
        return tensor.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def weights_problem(module: nn.Module, dtype: str) -> str | None:
    """Returns why weights of these dtypes do not go with it, None if they do: float32, or with float32 masters."""
    alone = {
        p.dtype
        for p in module.parameters()
        if master_of(p) is None and (p.is_floating_point() or p.is_complex())
    }
    if alone - {torch.float32}:
        return (
            f"the weights are {_names(alone)}, not all float32. Model weights in 16 bits without a float32 master copy lose "
            "updates: keep them float32, or use MasterWeights"
        )
    halves = {p.dtype for p in module.parameters() if master_of(p) is not None}
    if halves - {AUTOCAST.get(dtype)}:
        return f"MasterWeights made the weights {_names(halves)}: ask for the same dtype"
    return None


def _names(dtypes: set[torch.dtype]) -> str:
    return ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))


def cuda_problem(device: torch.device, dtype: str) -> str | None:
    """Returns why a CUDA device does not have the dtype, None if it has."""
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    if dtype == "bfloat16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return f"{name} has no bfloat16: it would be emulated, slower than float32"
    if dtype == "tf32" and capability < (8, 0):
        return f"{name} (compute capability {capability[0]}.{capability[1]}) has no TF32: 8.0 is needed"
    return None


def cpu_note(dtype: str) -> str | None:
    """Returns what a CPU without instructions for the dtype means, None if it has them or that is not known."""
    flags = "_is_avx512_bf16_supported" if dtype == "bfloat16" else "_is_amx_fp16_supported"
    known = getattr(torch.cpu, flags, None)
    if known is None or known():
        return None
    return (
        f"this CPU has no {dtype} instructions: it computes in {dtype}, but slower than in float32"
    )
