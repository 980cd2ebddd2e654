"""Where memory is over a step, by category and by module: every storage followed from its making to its end.

A dispatch mode sees the results of every op, forward and backward; weak references tell when a storage is gone. No
tensor is kept alive by it. Works on any device, and counts what tensors hold, not what an allocator reserves.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from flopwise.kit.memory.arguments import need_module, need_optimizers
from flopwise.kit.memory.modules import BACKWARD, Modules, in_backward
from flopwise.kit.memory.undisturbed import device_of
from flopwise.kit.nested import tensors_in
from flopwise.units import size

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer state",
    "activations",
    "temporaries",
    "inputs",
    "unknown",
)
#: Of these the sum is all there is to say: they were there before, and no layer's forward made them.
_NO_LAYERS = ("parameters", "optimizer state", "inputs")


@dataclass
class Piece:
    """One storage. It is no reference to it."""

    n_bytes: int
    category: str
    module: str  # in whose forward it was made; "" outside of all
    op: str


@dataclass(frozen=True)
class Moment:
    """The memory at one point of the step, bytes by category."""

    op: str  # the op after which it was so
    module: str
    by_category: dict[str, int]

    @property
    def total_bytes(self) -> int:
        """Returns the sum over the categories."""
        return sum(self.by_category.values())


@dataclass
class Timeline:
    """What was made and freed, in order; read it after the `with`."""

    device: str
    events: list[tuple[Piece, int]] = field(default_factory=list)  # +bytes made, -bytes gone
    marks: list[tuple[int, str]] = field(default_factory=list)  # number of events at a named moment

    @property
    def peak(self) -> Moment:
        """Returns the moment with most memory."""
        return self._at(self._peak_index())

    def at_peak_by_module(self) -> list[tuple[str, str, int]]:
        """Returns module, category and bytes of what lived at the peak, the largest first."""
        held: Counter[tuple[str, str]] = Counter()
        for module, category, _, n_bytes in self.at_peak_by_op():
            held[module, category] += n_bytes
        return [(m, c, n) for (m, c), n in held.most_common()]

    def at_peak_by_op(self) -> list[tuple[str, str, str, int]]:
        """Returns module, category, the op that made it and bytes of what lived at the peak, the largest first."""
        held: Counter[tuple[str, str, str]] = Counter()
        for piece, change in self.events[: self._peak_index() + 1]:
            held[piece.module, piece.category, piece.op] += change
        return [(m, c, op, n) for (m, c, op), n in held.most_common() if n > 0]

    def at_mark(self, name: str) -> Moment:
        """Returns the memory at the last moment marked with this name.

        Raises:
            KeyError: there is no such mark.
        """
        index = next((n for n, mark in reversed(self.marks) if mark == name), None)
        if index is None:
            raise KeyError(name)
        return self._at(index - 1)

    def curve(self) -> Iterator[Moment]:
        """Yields the memory after every event."""
        held: Counter[str] = Counter()
        for piece, change in self.events:
            held[piece.category] += change
            yield Moment(piece.op, piece.module, dict(held))

    def __str__(self) -> str:
        """Returns the peak by category and its largest parts."""
        peak = self.peak
        lines = [f"peak {size(peak.total_bytes)} on {self.device} after {peak.op}"]
        lines += [f"  {c}: {size(n)}" for c in CATEGORIES if (n := peak.by_category.get(c, 0))]
        lines += [f"  {where}: {size(n)} of {c}" for where, c, n in self._largest()[:8]]
        return "\n".join(lines)

    def _largest(self) -> list[tuple[str, str, int]]:
        """Returns who holds what at the peak; outside of all layers, as in a loss, the ops that made it."""
        held: Counter[tuple[str, str]] = Counter()
        for module, category, op, n_bytes in self.at_peak_by_op():
            if module or category not in _NO_LAYERS:
                op = op.removeprefix("aten.").removesuffix(".default")
                held[module or f"outside of layers, {op}", category] += n_bytes
        return [(where, c, n) for (where, c), n in held.most_common()]

    def _peak_index(self) -> int:
        total = most = 0
        at = -1
        for index, (_, change) in enumerate(self.events):
            total += change
            if total > most:
                most, at = total, index
        return at

    def _at(self, index: int) -> Moment:
        held: Counter[str] = Counter()
        for piece, change in self.events[: index + 1]:
            held[piece.category] += change
        last = self.events[index][0] if 0 <= index < len(self.events) else Piece(0, "", "", "start")
        return Moment(last.op, last.module, {c: n for c, n in held.items() if n})


@contextlib.contextmanager
def memory_timeline(
    module: nn.Module,
    optimizers: Iterable[torch.optim.Optimizer] = (),
    inputs: Any = (),
    device: torch.device | str | None = None,
) -> Iterator[_Recorder]:
    """Records memory over what runs inside of the `with`: one step, best a second one, with optimizer state made.

    Args:
        module: its parameters and buffers are the parameters of the record.
        optimizers: whose state is told apart.
        inputs: the batch, nested as it likes. Default: what the module is called with.
        device: only tensors there are counted. Default: that of the parameters.
    """
    need_module("memory_timeline", module)
    optimizers = need_optimizers("memory_timeline", optimizers)
    where = torch.device(device) if device is not None else device_of(module)
    if where.type == "cuda" and where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    recorder = _Recorder(module, optimizers, inputs, where)
    with recorder:
        yield recorder


class _Recorder(TorchDispatchMode):
    """Follows storages; `timeline` is what it saw."""

    def __init__(
        self,
        module: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        inputs: Any,
        device: torch.device,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.timeline = Timeline(str(device))
        self._device = device
        self._module, self._optimizers = module, optimizers
        self._inputs = inputs
        self._pieces: dict[int, Piece] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        self._modules = Modules(module)
        self._exit: contextlib.ExitStack | None = None

    def mark(self, name: str) -> None:
        """Names the present moment."""
        self.timeline.marks.append((len(self.timeline.events), name))

    def __enter__(self) -> _Recorder:
        for tensor in (*self._module.parameters(), *self._module.buffers()):
            self._note(tensor, "parameters", "start")
            if tensor.grad is not None:
                self._note(tensor.grad, "gradients", "start")
        self._tag_optimizer_state("start")
        for tensor in tensors_in(self._inputs):
            self._note(tensor, "inputs", "start")
        self._inputs = None
        self._exit = contextlib.ExitStack()
        handle = self._module.register_forward_pre_hook(self._called, with_kwargs=True)
        self._exit.callback(handle.remove)
        self._modules = self._exit.enter_context(Modules(self._module))
        for parameter in self._module.parameters():
            if parameter.requires_grad and parameter.is_leaf:
                handle = parameter.register_post_accumulate_grad_hook(self._accumulated)
                self._exit.callback(handle.remove)
        for optimizer in self._optimizers:
            handle = optimizer.register_step_post_hook(
                lambda *_: self._tag_optimizer_state("optimizer step")
            )
            self._exit.callback(handle.remove)
        self._exit.enter_context(
            torch.autograd.graph.saved_tensors_hooks(self._saved, lambda tensor: tensor)
        )
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        assert self._exit is not None
        self._exit.close()
        self._tag_optimizer_state("end")
        self._references.clear()
        self._pieces.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        op = str(func)
        for value in args:
            if isinstance(value, torch.Tensor):
                self._note(value, "unknown", op)  # from before, or from somewhere else
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, torch.Tensor):
                self._note(value, "temporaries", op)
        return out

    def _note(self, tensor: torch.Tensor, category: str, op: str) -> Piece | None:
        """Follows the storage of a tensor from now on, unless it is followed already."""
        if tensor.device != self._device or tensor.layout != torch.strided:
            return None
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a wrapper without memory of its own
            return None
        key, n_bytes = storage._cdata, storage.nbytes()
        piece = self._pieces.get(key)
        if piece is not None or not n_bytes:
            return piece
        where = self._modules.now or (BACKWARD if in_backward() else "")
        piece = self._pieces[key] = Piece(n_bytes, category, where, op)
        events, pieces, references = self.timeline.events, self._pieces, self._references

        def gone(_: object) -> None:
            found = pieces.pop(key, None)
            references.pop(key, None)
            if found is not None:
                events.append((found, -found.n_bytes))

        self._references[key] = weakref.ref(storage, gone)
        events.append((piece, n_bytes))
        return piece

    def _called(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        for tensor in tensors_in((args, kwargs)):
            piece = self._note(tensor, "inputs", "call")
            if piece is not None and not tensor.requires_grad and piece.category != "parameters":
                piece.category = "inputs"

    def _saved(self, tensor: torch.Tensor) -> torch.Tensor:
        piece = self._note(tensor, "activations", "saved")
        if piece is not None and piece.category == "temporaries":
            piece.category = "activations"
        return tensor.detach() if not tensor.is_leaf else tensor

    def _accumulated(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            piece = self._note(parameter.grad, "gradients", "accumulate")
            if piece is not None and piece.category in ("temporaries", "activations"):
                piece.category = "gradients"

    def _tag_optimizer_state(self, op: str) -> None:
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                for tensor in tensors_in(state):
                    piece = self._note(tensor, "optimizer state", op)
                    if piece is not None and piece.category in ("temporaries", "unknown"):
                        piece.category = "optimizer state"
