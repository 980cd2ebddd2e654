"""What the room exports."""

from __future__ import annotations

import subprocess
import sys

from flopwise.kit import graph


def test_every_name_is_there_and_documented() -> None:
    assert graph.__all__ == sorted(graph.__all__, key=lambda n: (n[0].islower(), n))
    for name in graph.__all__:
        assert (getattr(graph, name).__doc__ or "").strip(), name


def test_importing_it_loads_no_compiler_and_touches_no_device() -> None:
    code = (
        "import sys, flopwise.kit.graph, torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "print([m for m in ('torch._inductor.graph', 'torch._inductor.compile_fx', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True
    )
    assert "torch._inductor.graph" not in done.stdout
