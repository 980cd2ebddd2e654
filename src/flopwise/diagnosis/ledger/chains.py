"""Chains of pointwise and normalising operators, each of which reads what the one before it wrote.

Fused into one kernel, a chain reads its inputs and writes its result; what lies between stays in registers. From a trace it is
seen only that a result has the size and dtype of what the next operator on the stream reads, and whether autograd may keep it: what the
backward pass reads again is written in any case.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flopwise.diagnosis.ledger.products import bytes_ns
from flopwise.diagnosis.ledger.scene import Called, Scene
from flopwise.flops.call import Operand
from flopwise.flops.zero import POINTWISE


def _words(text: str) -> frozenset[str]:
    """Returns the words of a text."""
    return frozenset(text.split())


#: Normalisations read their input and write a result of its size; a compiler fuses with them on both sides.
_NORMALISING = _words("""
    native_layer_norm native_layer_norm_backward native_batch_norm native_batch_norm_backward
    cudnn_batch_norm cudnn_batch_norm_backward miopen_batch_norm miopen_batch_norm_backward
    native_group_norm native_group_norm_backward _fused_rms_norm _fused_rms_norm_backward
    _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data native_dropout
""")
_COPIES = _words("copy fill zero")  # write their first operand, and do not read it
_REDUCING = _words("sum mean amax var_mean")  # may end a chain
#: Operators whose backward reads neither their input nor what they overwrite. Source: tools/autograd/derivatives.yaml of
#: pytorch/pytorch.
_KEEP_NO_INPUT = _words("""
    add sub rsub neg copy masked_fill fill zero threshold relu clamp_min where native_dropout
    _softmax _log_softmax sigmoid tanh exp sqrt sum mean
""")
_SCALED = _words("mul div")  # keep their input only where the other factor is a tensor
#: Operators whose backward reads their result.
_KEEP_RESULT = _words("_softmax _log_softmax sigmoid tanh exp sqrt rsqrt reciprocal relu threshold")
#: Elementwise kernels take up to so many times what their bytes need. Source: measured on an H200, vectorised ones 1.1 and others
#: 1.9 times.
SLOW = 2.0
#: Smaller results stay in the device's cache, and save little.
LEAST_BYTES = 1 << 20


@dataclass(frozen=True, eq=False)
class Link:
    """A call of a chain: the bytes of its passes over memory, and of those that a fused chain leaves out."""

    call: Called
    passes_bytes: int
    saved_bytes: int
    saved_ns: float  # of what is left out


def chains(scene: Scene, without: frozenset[int] = frozenset()) -> list[list[Link]]:
    """Returns the chains of two calls or more, in the device's order; a copy within the device is a call, too.

    Args:
        scene: what is looked at.
        without: rows of calls that belong to something else.
    """
    found: list[list[Link]] = []
    for run in _runs(scene, without):
        reads_saved = [False] * len(run)
        write_saved = [False] * len(run)
        for i in range(1, len(run)):
            reads_saved[i] = True
            write_saved[i - 1] = not _kept(run[i - 1], run[i])
        links = []
        for call, read, write in zip(run, reads_saved, write_saved, strict=True):
            result = _result(call)
            between = result.n_bytes if result is not None else 0
            first = _read_before(run, call).n_bytes if read else 0
            saved = first + (between if write else 0)
            links.append(_link(scene, call, max(passes_bytes(call), saved, 1), saved))
        found.append(links)
    return found


def _link(scene: Scene, call: Called, passes: int, saved: int) -> Link:
    """Returns a link; each byte that is left out was as fast as the call's, but no slower than memory allows by far.

    A kernel that takes longer than its bytes do is held up by something else, which stays.
    """
    by_call = call.ns * saved / passes
    by_bytes = bytes_ns(saved, scene)
    return Link(call, passes, saved, by_call if by_bytes is None else min(by_call, SLOW * by_bytes))


def _runs(scene: Scene, without: frozenset[int]) -> Iterator[list[Called]]:
    """Yields runs of calls on one stream in which each reads the result of the one before."""
    current: dict[int, list[Called]] = {}
    for call in scene.calls:
        run = current.get(call.stream, [])
        if run and not _follows(run[-1], call):
            if len(run) > 1:
                yield run
            run = []
        fuses = fusible(call) and call.row not in without
        current[call.stream] = [*run, call] if fuses else []
        if run and not fuses and len(run) > 1:
            yield run
    yield from (run for run in current.values() if len(run) > 1)


def fusible(call: Called) -> bool:
    """Whether a compiler writes kernels for this operator itself."""
    if not call.name.startswith("aten::") or not call.tensors:
        return False
    if call.op == "copy":
        return _keeps_order(call)
    return call.op in POINTWISE or call.op in _NORMALISING or call.op in _REDUCING | _COPIES


def passes_bytes(call: Called) -> int:
    """Returns the bytes that a fusible call reads and writes; of one that reduces, those that it reads."""
    result = _result(call)
    return sum(one.n_bytes for one in _inputs(call)) + (result.n_bytes if result else 0)


def _follows(before: Called, call: Called) -> bool:
    """Whether a call can be taken to read the result of the one before it."""
    result = _result(before)
    if result is None or result.n_bytes < LEAST_BYTES or not fusible(call):
        return False
    if (before.name, before.operands) == (call.name, call.operands):
        return False  # a loop over like tensors
    return any(_same(result, one) for one in _inputs(call))


def _read_before(run: list[Called], call: Called) -> Operand:
    before = _result(run[run.index(call) - 1])
    assert before is not None
    return before


def _same(result: Operand, operand: Operand) -> bool:
    return result.numel == operand.numel and result.dtype == operand.dtype


def _result(call: Called) -> Operand | None:
    """Returns what a call writes; None where its size is not known from its operands."""
    first = call.tensors[0].operand
    if call.op in _REDUCING:
        return None
    if call.name.endswith("_") or call.op in _COPIES or call.op in _NORMALISING:
        return first
    return max((one.operand for one in call.tensors), key=lambda operand: operand.numel)


def _inputs(call: Called) -> list[Operand]:
    """Returns what a call reads."""
    skipped = 1 if call.op in _COPIES else 0
    return [one.operand for one in call.tensors[skipped:]]


def _kept(before: Called, after: Called) -> bool:
    """Whether the result between two calls is written in any case, for the backward pass."""
    if before.backward or after.name.endswith("_"):
        return False
    if before.op in _KEEP_RESULT:
        return True
    if after.op in _SCALED:
        return len(after.tensors) > 1
    return after.op not in _KEEP_NO_INPUT


def _keeps_order(call: Called) -> bool:
    """Whether a copy writes elements in the order in which it reads them."""
    strides = [one.strides for one in call.tensors[:2]]
    return len(strides) == 2 and (None in strides or strides[0] == strides[1])
