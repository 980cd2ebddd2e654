"""Reads a loader ahead of the loop, in a thread or in the loop's own, and hands batches out in the loader's order."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import torch

from flopwise.errors import InputError
from flopwise.kit.input.notices import say_once
from flopwise.kit.input.sent import Times
from flopwise.kit.nested import NotRebuiltError

#: A thread that is stuck inside the loader is left behind after so long.
PATIENCE_S = 10.0
#: The loop's thread looks for signals so often while it waits.
SLICE_S = 0.1

_CLOSED = "the Prefetcher was closed, or another iteration of it was begun, while this one asked for a batch"


class Link(Protocol):
    """The way of a batch from the loader to the loop; see `HostLink` and `CudaLink`."""

    def send(self, item: Any, number: int) -> Any:
        """Returns the batch on its way."""

    def enter_thread(self) -> None:
        """Prepares the thread that reads."""


class _End:
    """The loader has no more, or failed: then with its error."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


class Snapshot:
    """A batch on its way, and the loader's state after it if the loader has one."""

    __slots__ = ("sent", "state")

    def __init__(self, sent: Any, state: Any) -> None:
        self.sent, self.state = sent, state


class Reader:
    """One pass over an iterator. `take` returns batches, raises what the loader raised, and StopIteration at the end."""

    def __init__(
        self,
        iterator: Iterator[Any],
        link: Any,
        depth: int,
        state_of: Any = None,
        times: Times | None = None,
    ) -> None:
        self._iterator, self._link, self._depth = iterator, link, depth
        self._state_of = state_of
        self._times = times if times is not None else Times()
        self._number = 0
        self._stopped = False
        self._grad = torch.is_grad_enabled()  # the loop's mode; a thread begins with its own
        self.sending = threading.RLock()  # held while a batch is being sent
        self.held_by: int | None = None  # the thread that lets nothing be sent meanwhile

    def _read(self) -> Snapshot | _End:
        """Returns the loader's next batch, sent on its way; what goes wrong is kept for its turn."""
        with torch.set_grad_enabled(self._grad):
            return self._read_one()

    def _read_one(self) -> Snapshot | _End:
        begun = time.perf_counter()
        try:
            item = next(self._iterator)
        except StopIteration:
            return _End()
        except Exception as error:
            return _End(error)
        finally:
            self._times.loader_s += time.perf_counter() - begun
        if (
            self._stopped
        ):  # a thread that was left behind inside the loader: nothing of it is sent any more
            return _End(InputError(_CLOSED))
        try:
            state = self._state_of() if self._state_of is not None else None
            # What is sent is made outside inference mode: buffers are written again in other modes.
            with self.sending, torch.inference_mode(False), torch.set_grad_enabled(self._grad):
                sent = self._link.send(item, self._number)
        except StopIteration as error:  # of a transform: not the loader's end
            return _End(RuntimeError(f"a transform of the batch raised StopIteration({error})"))
        except NotRebuiltError as error:
            return _End(InputError(f"{error}; give it a .to(device), or hand over a tuple or dict"))
        except RecursionError as error:
            said = f"a batch holds itself, or is nested too deeply ({error}): a tree of tensors is meant"
            return _End(InputError(said))
        except Exception as error:
            return _End(error)
        self._number += 1
        return Snapshot(sent, state)

    def take(self) -> Snapshot:
        """Returns the next batch."""
        raise NotImplementedError

    def stop(self) -> list[Snapshot]:
        """Stops reading and returns the batches that nobody took."""
        raise NotImplementedError

    def reads(self, iterator: Any) -> bool:
        """Returns whether this very iterator is being read here, or a thread that was left behind is inside it."""
        raise NotImplementedError


class InTurn(Reader):
    """Reads in the loop's own thread, where the loop asks for a batch: at the same place of the program every time."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._ready: deque[Snapshot | _End] = deque()

    def take(self) -> Snapshot:
        """Returns the next batch, after reading ahead as far as the depth allows."""
        if self._stopped:
            raise InputError(_CLOSED)
        while len(self._ready) < self._depth + 1 and not (
            self._ready and isinstance(self._ready[-1], _End)
        ):
            self._ready.append(self._read())
        first = self._ready[0]
        if isinstance(first, _End):
            raise first.error or StopIteration
        self._ready.popleft()
        return first

    def stop(self) -> list[Snapshot]:
        """Returns the batches that nobody took."""
        left = [x for x in self._ready if isinstance(x, Snapshot)]
        self._ready.clear()
        self._iterator = iter(())
        self._stopped = True
        return left

    def reads(self, iterator: Any) -> bool:
        """Returns whether this very iterator is being read here."""
        ended = bool(self._ready) and isinstance(self._ready[-1], _End)
        return self._iterator is iterator and not ended


class InThread(Reader):
    """Reads in a thread. The first batch is read where the loop asks for it: processes are forked and seeds drawn there."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._ready: SimpleQueue[Snapshot | _End] = SimpleQueue()
        self._room: SimpleQueue[bool] = SimpleQueue()  # True: one more may be read; False: stop
        self._thread: threading.Thread | None = None
        self._ended: _End | None = None
        self._started = False
        self._process = os.getpid()

    def take(self) -> Snapshot:
        """Returns the next batch; waits for the reading thread if it is not there yet."""
        if self._ended is not None:
            raise self._ended.error or StopIteration
        if self._stopped:
            raise InputError(_CLOSED)
        if not self._started:
            self._started = True
            first = self._read()
            if isinstance(first, Snapshot):
                self._start()
        else:
            first = self._next_ready()
            self._room.put(True)
        if isinstance(first, _End):
            self._ended = first
            raise first.error or StopIteration
        return first

    def _next_ready(self) -> Snapshot | _End:
        """Waits in slices: a signal that another thread got (Ctrl-C, a worker's death) is handled between two."""
        begun = time.perf_counter()
        while True:
            with suppress(Empty):
                read = self._ready.get(timeout=SLICE_S)
                self._times.loop_s += time.perf_counter() - begun
                return read
            self._expect_one()

    def _expect_one(self) -> None:
        """Ends a wait in vain.

        Raises:
            InputError: nobody reads any more, or this thread itself keeps the batch from being sent.
        """
        if self._stopped:
            raise InputError(_CLOSED)
        if self._process != os.getpid():
            raise InputError(
                "this process was forked while batches were read ahead, and the thread that reads is its parent's: "
                "begin another iteration here"
            )
        if self.held_by == threading.get_ident():
            raise InputError(
                "a batch was asked for inside of held(), where nothing is sent: ask for it before or after the block"
            )

    def _start(self) -> None:
        for _ in range(self._depth):
            self._room.put(True)
        self._thread = threading.Thread(target=self._run, name="flopwise-input", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._link.enter_thread()
            self._read_on()
        except BaseException as error:  # whatever ends the thread is to reach the loop
            self._ready.put(_End(error))

    def _read_on(self) -> None:
        while self._room.get():
            read = self._read()
            self._ready.put(read)
            if isinstance(read, _End):
                return

    def stop(self) -> list[Snapshot]:
        """Stops the thread, waiting for the batch that it is reading, and returns the batches that nobody took."""
        self._stopped = self._started = True
        if self._thread is not None and self._thread is not threading.current_thread():
            with suppress(Empty):
                while True:  # room that was not used yet: the thread is to see the stop first
                    self._room.get_nowait()
            self._room.put(False)
            held = self.held_by == threading.get_ident()  # it goes when the block is over
            self._thread.join(0 if held else PATIENCE_S)
            if self._thread.is_alive() and not held:
                say_once(
                    f"the loader did not return a batch within {PATIENCE_S:g} s of the end of the loop: "
                    "the thread that waits for it is left behind"
                )
        left = []
        while not self._ready.empty():
            read = self._ready.get_nowait()
            if isinstance(read, Snapshot):
                left.append(read)
        return left

    def reads(self, iterator: Any) -> bool:
        """Returns whether this very iterator is being read here, or a thread that was left behind is inside it."""
        alive = self._thread is not None and self._thread.is_alive()
        begun = not self._stopped and self._ended is None
        return self._iterator is iterator and (alive or begun)
