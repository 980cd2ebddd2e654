from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import flopwise.kit.memory as memory


def test_every_public_name_is_there() -> None:
    assert all(hasattr(memory, name) for name in memory.__all__)


def test_no_public_name_hides_a_file() -> None:
    files = {path.stem for path in Path(memory.__file__).parent.glob("*.py")}
    assert files.isdisjoint(memory.__all__)


def test_it_needs_nothing_but_torch_and_leaves_cuda_alone() -> None:
    code = (
        "import sys\n"
        "for name in ('msgspec', 'rich', 'pynvml'): sys.modules[name] = None\n"
        "import flopwise.kit.memory, torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "print([n for n in sys.modules if n.startswith('flopwise.') and n.split('.')[1] not in"
        " ('kit', 'errors', 'flops', 'trace', 'units', '_version', 'hardware', 'records')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
