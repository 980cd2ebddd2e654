"""A device with graphs that a CPU can be: operations are recorded and run again on the same memory, without Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


class _Recorder(TorchDispatchMode):
    """Runs operations and writes down each with the very tensors that it read and made."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        written, aliased = [], False
        for k, argument in enumerate(func._schema.arguments):
            info = argument.alias_info
            value = args[k] if k < len(args) else kwargs.get(argument.name)
            if info is not None and info.is_write:
                written += [t for t in tree_flatten(value)[0] if isinstance(t, torch.Tensor)]
            elif info is not None:
                aliased = True
        for tensor in written:
            place = tensor.untyped_storage()._cdata
            if place not in self._made and place not in self.before:
                base = tensor.detach().as_strided(
                    (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0
                )
                self.before[place] = (base, base.clone())
        out = func(*args, **kwargs)
        outs = [t for t in tree_flatten(out)[0] if isinstance(t, torch.Tensor)]
        if written:
            self.calls.append((func, args, kwargs, []))
        elif not aliased:
            self._made |= {t.untyped_storage()._cdata for t in outs}
            self.calls.append((func, args, kwargs, outs))
        self.keep = [*getattr(self, "keep", []), *outs]  # so that no storage is used twice
        return out


class RecordedGraph:
    """What a recorder wrote down."""

    def __init__(self, surface: RecordedGraphs, calls: list[Any], keep: Any) -> None:
        self._surface, self._calls, self._keep = surface, calls, keep
        self.replays, self.was_reset = 0, False

    def replay(self) -> None:
        assert not self.was_reset
        self.replays += 1
        with torch.no_grad():
            for k, (func, args, kwargs, outs) in enumerate(self._calls):
                if self._surface.broken is not None and self._surface.broken(k, func):
                    continue
                again = func(*args, **kwargs)
                again = [t for t in tree_flatten(again)[0] if isinstance(t, torch.Tensor)]
                for old, new in zip(outs, again, strict=bool(outs)) if outs else ():
                    old.detach().copy_(new)

    def reset(self) -> None:
        self.was_reset = True


class RecordedGraphs:
    """Stands in for CudaSurface: static memory, frozen Python, nothing executed by a capture."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.graphs: list[RecordedGraph] = []
        self.asides = 0
        self.fail: BaseException | None = None  # raised amid the next captures
        self.fail_after = 20  # operations
        self.broken: Callable[[int, Any], bool] | None = None  # which operations replays leave out
        self.waits: list[str] = []
        self.room = 1 << 40

    def problem(self) -> str | None:
        return None

    @contextmanager
    def aside(self) -> Iterator[None]:
        self.asides += 1
        yield

    def capture(self, run: Any, generators: Sequence[torch.Generator]) -> Any:
        rng = torch.get_rng_state()
        recorder = _Recorder()
        try:
            with recorder if self.fail is None else _Failing(recorder, self.fail, self.fail_after):
                result = run()
        finally:
            with torch.no_grad():
                for tensor, value in recorder.before.values():
                    tensor.copy_(value)
            torch.set_rng_state(rng)
        graph = RecordedGraph(self, recorder.calls, recorder.keep)
        self.graphs.append(graph)
        return graph, result

    def syncs(self, run: Any) -> Any:
        return run(), list(self.waits)

    def free_bytes(self) -> int:
        return self.room

    def reserved_bytes(self) -> int:
        return 0


class _Failing(TorchDispatchMode):
    def __init__(self, recorder: _Recorder, error: BaseException, after: int) -> None:
        super().__init__()
        self._recorder, self._error, self._left = recorder, error, after

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._left -= 1
        if self._left < 0:
            raise self._error
        return self._recorder.__torch_dispatch__(func, types, args, kwargs)
