"""Settings of torch for the whole process, written behind the imports: TF32 products, cuDNN's benchmark."""

from __future__ import annotations

import libcst as cst

from flopwise.patching.outcome import Left, View, Written, only
from flopwise.patching.script import text


def write_tf32(setting: dict[str, str], view: View) -> Written:
    """Writes TF32 for float32 matrix products.

    Raises:
        Left: the script sets the precision of products itself.
    """
    only(setting, "precision")
    precision = {"tf32": "high"}.get(word := setting.get("precision", "high"), word)
    if precision not in ("high", "medium"):
        raise Left(f"precision {precision[:40]!r} has no form in a script")
    line = f'set_float32_matmul_precision("{precision}")'
    _alone(
        view,
        f"torch.{line}",
        calls=("set_float32_matmul_precision",),
        attributes=("allow_tf32", "fp32_precision"),
        within=("matmul",),
    )
    view.edits.at_top(f"{view.edits.torch()}.{line}")
    return Written(())


def write_cudnn_benchmark(setting: dict[str, str], view: View) -> Written:
    """Writes that cuDNN measures its kernels.

    Raises:
        Left: the script sets it itself.
    """
    only(setting, "benchmark")
    line = "backends.cudnn.benchmark = True"
    _alone(view, f"torch.{line}", attributes=("benchmark",), within=("cudnn",))
    view.edits.at_top(f"{view.edits.torch()}.{line}")
    return Written(())


def _alone(
    view: View,
    by_hand: str,
    calls: tuple[str, ...] = (),
    attributes: tuple[str, ...] = (),
    within: tuple[str, ...] = (),
) -> None:
    """Does nothing where the script does not set the same itself.

    Raises:
        Left: it does.
    """
    for call in view.script.calls:
        if (text(call.func) or "").rpartition(".")[2] in calls:
            raise Left(f"line {view.script.line(call)} sets it already: change it there", by_hand)
    for node in view.script.nodes:
        if isinstance(node, cst.AssignTarget):
            parts = (text(node.target) or "").split(".")
            if parts[-1] in attributes and set(parts[:-1]) & set(within):
                raise Left(
                    f"line {view.script.line(node)} sets it already: change it there", by_hand
                )
