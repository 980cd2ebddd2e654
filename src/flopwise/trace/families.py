"""What a kernel does, as far as its name tells: communication, and the kinds of compute that have a formula."""

from __future__ import annotations

import re
from functools import lru_cache

#: Kernels that move data between devices. Sources: nccl and rccl name theirs `ncclDevKernel_*` or `ncclKernel_*`;
#: deepseek-ai/DeepEP `deep_ep::`; NVSHMEM `nvshmem*`; torch's symmetric memory `*symm_mem*`, `multimem_*`, `one_shot_*`
#: and `two_shot_*` all-reduces; vLLM/FlashInfer custom all-reduces `cross_device_reduce*`.
_COMMUNICATION = re.compile(
    r"nccl|rccl|hccl|oneccl|msccl|mscclpp|nvshmem|deep_ep::|symm_mem|multimem_"
    r"|(?:one|two)_shot_all_reduce|cross_device_reduce|all_?reduce_(?:1|2)stage",
    re.IGNORECASE,
)
#: The local part of a collective on one rank is a copy, not communication.
_LOCAL = re.compile(r"symm_mem.*(?:memset|barrier_init)", re.IGNORECASE)


#: Ranges of host threads that move data. Source: the profiling titles of torch/csrc/distributed/c10d/ProcessGroup{Gloo,MPI,UCC}.cpp.
_BY_HOST = re.compile(r"(?:gloo|mpi|ucc):")


def communicates_on_host(name: str) -> bool:
    """Whether a range of this name is a collective that threads of the host carry out."""
    return _BY_HOST.match(name) is not None


@lru_cache(maxsize=1 << 14)
def communicates(kernel: str) -> bool:
    """Whether a kernel of this name moves data between devices."""
    return _COMMUNICATION.search(kernel) is not None and _LOCAL.search(kernel) is None
