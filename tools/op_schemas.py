"""Writes src/flopwise/flops/schemas.json: the argument names of every op with a formula, as torch declares them.

    python tools/op_schemas.py [--check]

A trace lists an op's operands by position; the formulas read them by name, and reading a trace needs no torch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch._C import _jit_get_all_schemas

from flopwise.flops.table import RULES

TARGET = Path(__file__).resolve().parents[1] / "src" / "flopwise" / "flops" / "schemas.json"

#: Ops of packages that are not installed here, as their own sources declare them.
#: Sources: Dao-AILab/flash-attention flash_attn/flash_attn_interface.py and hopper/flash_attn_interface.py.
ELSEWHERE = {
    "flash_attn::_flash_attn_forward": "q k v dropout_p softmax_scale causal window_size_left window_size_right",
    "flash_attn::_flash_attn_backward": "dout q k v out softmax_lse dq dk dv dropout_p softmax_scale causal",
    "flash_attn::_flash_attn_varlen_forward": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k",
    "flash_attn::_flash_attn_varlen_backward": (
        "dout q k v out softmax_lse dq dk dv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
    ),
}


def schemas() -> dict[str, list[str]]:
    """Returns the argument names of each op with a rule; of several overloads those of the first declared."""
    found: dict[str, list[str]] = {}
    for schema in _jit_get_all_schemas():
        if schema.name in RULES and (schema.name not in found or not schema.overload_name):
            found[schema.name] = [argument.name for argument in schema.arguments]
    for name, arguments in ELSEWHERE.items():
        found[name] = arguments.split()  # whatever stands in for the package here
    return dict(sorted(found.items()))


def main() -> int:
    """Writes the file, or says whether it is what this torch declares."""
    text = json.dumps(schemas(), indent=0) + "\n"
    if "--check" in sys.argv:
        same = TARGET.read_text("utf-8") == text
        print("up to date" if same else f"differs from torch {torch.__version__}")
        return 0 if same else 1
    TARGET.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
