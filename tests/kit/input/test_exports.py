"""What `flopwise.kit.input` shows, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys

import flopwise.kit.input as room


def test_every_name_is_there_documented() -> None:
    assert len(set(room.__all__)) == len(room.__all__)
    for name in room.__all__:
        assert getattr(room, name).__doc__ or name == "IMAGENET", name


def test_importing_loads_nothing_else_and_does_not_touch_cuda() -> None:
    code = (
        "import sys, torch, flopwise.kit.input\n"
        "assert not torch.cuda.is_initialized()\n"
        "mine = {m for m in sys.modules if m.startswith(('flopwise.meter', 'flopwise.fixes', 'torchvision', 'msgspec', 'rich'))}\n"
        "mine |= {m for m in sys.modules if m.startswith('flopwise.kit.') and m.split('.')[2] not in ('input', 'nested', 'worker_count')}\n"
        "assert not mine, mine\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)
