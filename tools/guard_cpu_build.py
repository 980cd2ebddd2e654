"""Fails when the environment holds a CUDA build of torch: gigabytes that development and CI do not need."""

from __future__ import annotations

import sys
import warnings
from importlib import metadata


def main() -> int:
    """Returns 0 if torch is a CPU build and nothing of CUDA came with it."""
    names = sorted(
        {d.metadata["Name"].lower() for d in metadata.distributions() if d.metadata["Name"]}
    )
    cuda = [n for n in names if n.startswith(("nvidia-cu", "nvidia-nccl", "triton"))]
    version = metadata.version("torch")
    warnings.simplefilter("ignore")  # torch misses numpy, which nothing here needs
    import torch

    if torch.version.cuda is not None or cuda:
        print(
            f"torch {version} is a CUDA build, or CUDA packages slipped in ({', '.join(cuda) or 'none listed'}). "
            "Development uses the CPU build: remove .venv and install with -c constraints.txt",
            file=sys.stderr,
        )
        return 1
    print(f"== torch {version}: CPU build, no CUDA packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
