"""What the tests of the input kit share: messages that are given again, and a device whose order of work is written down."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from flopwise.kit.input import notices, staging


@pytest.fixture(autouse=True)
def _everything_is_said_again() -> Iterator[None]:
    torch.set_num_threads(1)
    # Python 3.12 and later say so wherever a process with threads forks, as DataLoader does.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    notices.forget()
    yield
    notices.forget()


class FakeStream:
    """A stream that notes what waits for what."""

    def __init__(self, name: str, log: list[tuple[Any, ...]]) -> None:
        self.name, self._log = name, log

    def wait_event(self, event: FakeEvent) -> None:
        self._log.append((self.name, "waits for", event.name))

    def wait_stream(self, stream: FakeStream) -> None:
        self._log.append((self.name, "waits for stream", stream.name))

    def synchronize(self) -> None:
        self._log.append(("host", "waits for stream", self.name))


class FakeEvent:
    """An event that has passed when the test says so, or the host waited for it."""

    def __init__(self, name: str, log: list[tuple[Any, ...]]) -> None:
        self.name, self._log = name, log
        self.passed = False

    def record(self, stream: FakeStream) -> None:
        self._log.append((stream.name, "records", self.name))

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self._log.append(("host", "waits for", self.name))
        self.passed = True


class FakeSurface:
    """What the link needs of torch.cuda, on the host: copies are done at once, the order of fences is in `log`.

    Its device is cpu:0, whose tensors are on cpu: none looks as if it were there already.
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu:0")
        self.log: list[tuple[Any, ...]] = []
        self.events: list[FakeEvent] = []
        self.compute = FakeStream("compute", self.log)
        self.current = self.compute
        self.pinned: set[int] = set()
        self.recorded: list[tuple[int, str]] = []

    def enter_thread(self) -> None:
        self.log.append(("thread", "enters", "device"))

    def new_stream(self) -> FakeStream:
        return FakeStream("copy", self.log)

    def stream_apart(self) -> FakeStream:
        return FakeStream("apart", self.log)

    def current_stream(self) -> FakeStream:
        return self.current

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def event(self, timing: bool = False) -> FakeEvent:
        self.events.append(FakeEvent(f"event {len(self.events)}", self.log))
        return self.events[-1]

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.pinned

    def record(self, tensor: torch.Tensor, stream: FakeStream) -> None:
        self.recorded.append((tensor.data_ptr(), stream.name))

    def share_count(self, tensor: torch.Tensor) -> int:
        return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))

    def pinned_words(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.int64)


@pytest.fixture
def surface() -> FakeSurface:
    return FakeSurface()


class Locked:
    """Memory that counts as page-locked."""

    locked, error = True, ""

    def __init__(self, *_: Any) -> None:
        self.released = 0

    def release(self) -> None:
        self.released += 1


@pytest.fixture
def page_locking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "Registration", Locked)


@pytest.fixture
def workers_looked_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets torch look after its workers three times a second in place of every 5 s."""
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.3,))
