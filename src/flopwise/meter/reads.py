"""Counts what makes the host wait for the device, in the step in which FLOPs are counted, with the line that asks.

A read of a value, an index by a mask or a copy to the host drains the device's queue. Each is known by its op; on a
CPU the same ops run and cost nothing, so that they can be counted there and not timed. Timed steps are not touched.
Source of the list: torch's own warnings under torch.cuda.set_sync_debug_mode, aten/src/ATen/native/cuda.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from flopwise.meter.where import caller, frames, is_installed, is_ours, is_torch, is_users, place
from flopwise.records.surroundings import HostRead

if TYPE_CHECKING:
    from flopwise.meter.session import Session

SCALAR, PRINTED, MASK_READ, MASK_WRITE = "scalar read", "printed tensor", "mask read", "mask write"
SIZE, TO_HOST, PAGEABLE, SMALL_COPY = (
    "size that depends on the data",
    "copy to the host",
    "copy from pageable memory",
    "small copy to the device",
)
#: A copy up to this size in the middle of a forward pass is a value parked on the CPU, not a batch.
SMALL_BYTES = 1 << 16
#: Ops whose result or its size the host has to know.
_KINDS = {
    "aten::_local_scalar_dense": SCALAR,
    "aten::equal": SCALAR,
    "aten::allclose": SCALAR,
    "aten::is_nonzero": SCALAR,
    "aten::nonzero": SIZE,
    "aten::masked_select": MASK_READ,
    "aten::_unique": SIZE,
    "aten::_unique2": SIZE,
    "aten::unique_dim": SIZE,
    "aten::unique_consecutive": SIZE,
    "aten::unique_dim_consecutive": SIZE,
    "aten::bincount": SIZE,
}
_COPIES = {"aten::_to_copy", "aten::copy_"}
_INDEX = {"aten::index": MASK_READ, "aten::_unsafe_index": MASK_READ}
_INDEX_PUT = {"aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
#: Sites kept apart in one run.
MOST_SITES = 256


class Wait(NamedTuple):
    """One op that makes the host wait."""

    kind: str
    device: str  # type of the device that is waited for
    elements: int
    bytes: int


def wait_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Wait | None:
    """Returns whether an op makes the host wait for a device, or would if its tensors were on one; None if not."""
    if name in _COPIES:
        return _copy(name, args, kwargs, out)
    kind = _KINDS.get(name)
    tensor = args[0] if args else None
    if name == "aten::repeat_interleave" and kwargs.get("output_size") is None:
        kind = SIZE
    elif name in _INDEX or name in _INDEX_PUT:
        masks = [i for i in args[1] or () if i is not None and i.dtype in (torch.bool, torch.uint8)]
        if not masks or (name in _INDEX_PUT and _is_masked_fill(args)):
            return None
        kind = _INDEX.get(name, MASK_WRITE)
        tensor = masks[0]
    if kind is None or not isinstance(tensor, torch.Tensor):
        return None
    if kind == MASK_READ and name == "aten::masked_select":
        tensor = args[1]
    return Wait(kind, tensor.device.type, tensor.numel(), _bytes(tensor))


def _is_masked_fill(args: Sequence[Any]) -> bool:
    """Returns whether a write by one mask takes one number from the host: torch makes a masked fill of it."""
    indices, value = args[1], args[2]
    accumulate = len(args) > 3 and args[3]
    alone = sum(i is not None for i in indices) == 1
    return alone and not accumulate and value.numel() == 1 and value.device.type == "cpu"


def _copy(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Wait | None:
    """Returns the wait of a copy between the host and a device."""
    source = args[1] if name == "aten::copy_" else args[0]
    target = args[0] if name == "aten::copy_" else out
    if name == "aten::copy_":
        eager = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    else:
        eager = not kwargs.get("non_blocking", False)
    here, there = source.device.type, target.device.type
    n_bytes = _bytes(source)
    if here != "cpu" and there == "cpu":
        if not eager and target.is_pinned():
            return None
        return Wait(TO_HOST, here, source.numel(), n_bytes)
    if here == "cpu" and there not in ("cpu", "meta"):
        if not eager and not source.is_pinned() and n_bytes > SMALL_BYTES:
            return Wait(PAGEABLE, there, source.numel(), n_bytes)
        if n_bytes <= SMALL_BYTES and not source.is_pinned():
            return Wait(SMALL_COPY, there, source.numel(), n_bytes)
    return None


def _bytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


class Site(NamedTuple):
    """Where an op was asked for."""

    where: str | None
    caller: str | None
    via: str
    metric: str | None
    on_host: bool  # the optimizer's own count of steps, which lives on the host
    ignored: bool  # ours, or in a data loader
    in_forward: bool  # inside the call of a module


_CALL = torch.nn.Module._call_impl.__code__
#: Torch's own files by the part of torch that reads in them, as users know it.
_VIA = {"clip_grad.py": "clip_grad_norm_", "grad_scaler.py": "GradScaler"}


def site_of(start: FrameType | None) -> Site:
    """Returns where an op was asked for, by the frames that led to it."""
    via, on_host, ignored, in_engine = "", False, False, False
    innermost: FrameType | None = None
    in_forward = False
    for frame in frames(start):
        file = frame.f_code.co_filename
        ignored = ignored or (is_torch(file) and "/utils/data/" in file)
        in_forward = in_forward or frame.f_code is _CALL
        if innermost is not None:
            continue
        if is_torch(file):
            base, function = file.rpartition("/")[2], frame.f_code.co_name
            if base in _VIA:
                via = _VIA[base] if base == "clip_grad.py" else f"GradScaler.{function}"
            on_host = on_host or (not via and "/optim/" in file and function == "_get_value")
            in_engine = in_engine or function == "_engine_run_backward"
        elif is_ours(file):
            ignored = ignored or _is_own_work(file)
        elif is_users(file):
            innermost = frame
    # Anomaly detection searches every gradient for NaN; that it is on is a finding of its own.
    if torch.is_anomaly_enabled() and (in_engine or innermost is None):
        ignored = True
    if innermost is None:
        return Site(None, None, via, None, on_host, ignored, in_forward)
    where = place(innermost)
    metric, outside = _metric(innermost)
    script = caller(outside or innermost)
    script = script if script != where else None
    return Site(where, script, via, metric, on_host, ignored, in_forward)


#: Files of ours whose wrappers stand between the script and torch, and only pass its calls on.
_PASS_ON = (
    "hooks.py",
    "session.py",
    "roots.py",
    "graphs.py",
    "reads.py",
    "count_mode.py",
    "count_roles.py",
    "surroundings.py",
    "worker_loads.py",
    "late_reads/reading.py",
)


def _is_own_work(file: str) -> bool:
    """Returns whether a file of ours asks for values itself; the others only pass calls on."""
    return not file.endswith(_PASS_ON)


def _metric(start: FrameType) -> tuple[str | None, FrameType | None]:
    """Returns the class of the metric whose method `start` runs in, and the frame that called into it.

    A metric is what libraries of metrics make it: an object with `update`, `compute` and `reset`.
    """
    found, outside = None, None
    for count, frame in enumerate(frames(start)):
        if count > 16:
            break
        code = frame.f_code
        if code.co_argcount and code.co_varnames[0] == "self":
            owner = frame.f_locals.get("self")
            kind = type(owner)
            if all(callable(getattr(kind, name, None)) for name in ("update", "compute", "reset")):
                found, outside = kind.__qualname__, frame.f_back
                continue
        if (
            found is not None
            and not is_installed(code.co_filename)
            and not is_torch(code.co_filename)
        ):
            break
    return found, outside


@dataclass
class _Count:
    count: int = 0
    elements: int = 0
    bytes: int = 0
    steps: int = 0
    last_step: int = -1


class Reads:
    """Counts for one session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._steps = 0
        self._all: dict[tuple[str, str, Site], _Count] = {}
        self._now: list[tuple[str, Wait, Site, bool]] | None = None
        self._undo: Callable[[], None] | None = None

    def begin(self) -> None:
        """Starts to look: the step that begins is the one that is counted."""
        self._now = []
        self._watch_printing()

    def saw(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Takes one op of the step."""
        if self._now is None:
            return
        wait = wait_of(name, args, kwargs, out)
        if wait is not None:
            self._note(name, wait, sys._getframe(1))

    def end(self, evaluated: bool) -> None:
        """Ends the look. `evaluated`: the interval held an evaluation, whose reads are not the step's."""
        found, self._now = self._now, None
        self._stop_watching()
        if found is None:
            return
        on_device = self._session.device.type != "cpu"
        self._steps += 1
        for name, wait, site, has_grad in found:
            if evaluated and not has_grad and not site.via and not site.on_host:
                continue
            if on_device and wait.device == "cpu":
                continue  # nothing is waited for
            key = (name, wait.kind, site)
            count = self._all.get(key)
            if count is None:
                if len(self._all) >= MOST_SITES:
                    continue
                count = self._all[key] = _Count()
            count.count += 1
            count.bytes += wait.bytes
            count.elements = max(count.elements, wait.elements)
            count.steps += count.last_step != self._steps
            count.last_step = self._steps

    def abandon(self) -> None:
        """Forgets a look that is under way."""
        self._now = None
        self._stop_watching()

    def seen(self) -> tuple[list[HostRead], int]:
        """Returns what was seen, and in how many steps was looked."""
        reads = [
            HostRead(
                op=name,
                kind=kind,
                where=site.where,
                caller=site.caller,
                via=site.via,
                metric=site.metric,
                count=c.count,
                steps=c.steps,
                elements=c.elements,
                bytes=c.bytes,
                on_host=site.on_host,
            )
            for (name, kind, site), c in self._all.items()
        ]
        return sorted(reads, key=lambda r: -r.count), self._steps

    def _note(self, name: str, wait: Wait, frame: FrameType | None) -> None:
        site = site_of(frame)
        if wait.kind == SMALL_COPY and not site.in_forward:
            return  # a part of the batch
        if not site.ignored and self._now is not None:
            self._now.append((name, wait, site, torch.is_grad_enabled()))

    def _watch_printing(self) -> None:
        """Has tensors that are turned into text seen, which torch does with all modes off."""
        module: Any = torch._tensor_str
        original = module._str

        def text(tensor: Any, *args: Any, **kwargs: Any) -> str:
            if self._now is not None and tensor.device.type != "meta":
                n = tensor.numel()
                self._note(
                    "str", Wait(PRINTED, tensor.device.type, n, _bytes(tensor)), sys._getframe(1)
                )
            return str(original(tensor, *args, **kwargs))

        def undo() -> None:
            if module._str is text:
                module._str = original

        module._str = text
        self._undo = undo

    def _stop_watching(self) -> None:
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()
