from __future__ import annotations

from typing import Any

import pytest
import torch

from flopwise.kit.input import registration
from flopwise.kit.input.registration import Registration, caching_allocator_bytes, plan_pinned

GIB = 2**30


@pytest.mark.parametrize(
    ("asked", "taken"), [(0, 0), (1, 1), (2, 2), (3, 4), (4096, 4096), (4097, 8192)]
)
def test_the_caching_allocator_takes_powers_of_two(asked: int, taken: int) -> None:
    assert caching_allocator_bytes(asked) == taken


def test_a_plan_says_both() -> None:
    plan = plan_pinned([int(2.25 * GIB)])
    assert plan.taken_bytes == 4 * GIB
    assert "factor 1.78; registered exactly: 2.25 GiB" in str(plan)
    assert plan_pinned([]).factor == 1.0


class Owner:
    pass


class FakeRuntime:
    """cudaHostRegister as the runtime answers it."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.calls: list[tuple[str, Any]] = []

    def cudaHostRegister(self, pointer: int, nbytes: int, flags: int) -> int:
        self.calls.append(("register", (pointer, nbytes, flags)))
        return self.status

    def cudaHostUnregister(self, pointer: int) -> int:
        self.calls.append(("unregister", pointer))
        return 0

    def cudaGetErrorString(self, status: int) -> str:
        return "out of memory"


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    fake = FakeRuntime()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(
        registration, "_forget_last_error", lambda: fake.calls.append(("forget", 0))
    )
    return fake


def test_memory_is_registered_exactly_and_unregistered_once(runtime: FakeRuntime) -> None:
    owner, memory = Owner(), bytearray(4096)
    held = Registration(4096, 12345, owner, memory)
    assert held.locked
    assert runtime.calls == [("register", (4096, 12345, 1))]
    held.release()
    held.release()
    del owner
    assert runtime.calls[1:] == [("unregister", 4096)]


def test_memory_is_unregistered_with_its_owner(runtime: FakeRuntime) -> None:
    owner = Owner()
    held = Registration(4096, 100, owner, b"")
    del owner
    assert held.locked
    assert runtime.calls[-1] == ("unregister", 4096)


def test_a_refusal_says_why_and_leaves_no_error_behind(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    runtime.status = 2
    held = Registration(4096, 1 << 30, Owner(), b"")
    assert not held.locked
    assert held.error == "cudaHostRegister of 1024 MiB: out of memory (2); ulimit -l is 8192 KiB"
    assert runtime.calls[-1] == ("forget", 0)
    held.release()
    assert "unregister" not in dict(runtime.calls)


def test_a_fork_does_not_unregister(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Registration(4096, 100, Owner(), b"")
    runtime.calls.clear()
    monkeypatch.setattr(registration.os, "getpid", lambda: -5)
    held.release()
    assert runtime.calls == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
def test_without_cuda_the_reason_is_said() -> None:
    assert Registration(4096, 100, Owner(), b"").error == "there is no CUDA device"
