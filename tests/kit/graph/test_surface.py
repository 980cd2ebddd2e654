"""The order of what is done to a CUDA device, with its functions replaced by ones that write it down."""

from __future__ import annotations

import itertools
import sys
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from flopwise.kit.graph.surface import CudaSurface, NoSurface, is_move, is_optimizers

OPTIMIZER = sys.modules[torch.optim.ASGD.__module__].__file__


class Device:
    """Writes down what is asked of it."""

    def __init__(self, monkeypatch: Any) -> None:
        self.log: list[str] = []
        self.end_fails = False
        self.generator_stuck = False
        log = self.log

        class Stream:
            def __init__(self, name: Any) -> None:
                self.name = name if isinstance(name, str) else "side"

            def wait_stream(self, other: Any) -> None:
                log.append(f"{self.name} waits for {other.name}")

        current = Stream("current")

        @contextmanager
        def stream(s: Any) -> Any:
            log.append(f"on {s.name}")
            yield
            log.append(f"off {s.name}")

        device, pools = self, itertools.count(7)

        class Graph:
            def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
                log.append(f"begin {pool} {capture_error_mode}")

            def capture_end(self) -> None:
                log.append("end")
                if device.end_fails:
                    raise RuntimeError("capture was invalidated")

            def register_generator_state(self, generator: Any) -> None:
                log.append("register")

            def replay(self) -> None:
                log.append("replay")

            def reset(self) -> None:
                log.append("reset")

        class Generator:
            device = torch.device("cuda", 0)

            def clone_state(self) -> str:
                return "clone"

            def get_state(self) -> str:
                return "rng"

            def set_state(self, state: str) -> None:
                log.append(f"set {state}")

            def graphsafe_set_state(self, state: str) -> None:
                log.append(f"generator {state}")

        class Draw:
            def uniform_(self, generator: Any) -> None:
                log.append("draw")
                if device.generator_stuck:
                    raise RuntimeError("Offset increment outside graph capture")

        self.generator = Generator()
        cuda = torch.cuda
        names: dict[str, Any] = {
            "Stream": Stream,
            "stream": stream,
            "CUDAGraph": Graph,
            "current_stream": lambda _=None: current,
            "synchronize": lambda _=None: log.append("synchronize"),
            "empty_cache": lambda: log.append("empty"),
            "graph_pool_handle": lambda: (0, next(pools)),
            "default_generators": (Generator(),),
        }
        for name, value in names.items():
            monkeypatch.setattr(cuda, name, value)
        monkeypatch.setattr(torch, "empty", lambda *_, **__: Draw())
        for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            monkeypatch.setattr(
                torch._C,
                name,
                lambda index, pool, n=name: log.append(f"{n[6:]} {pool}"),
                raising=False,
            )


@pytest.fixture
def device(monkeypatch: Any) -> Device:
    return Device(monkeypatch)


def surface() -> CudaSurface:
    return CudaSurface(torch.device("cuda", 0))


def test_a_block_aside_is_ordered_before_and_after_the_current_stream(device: Device) -> None:
    with surface().aside():
        device.log.append("step")
    assert device.log == [
        "side waits for current", "on side", "step", "off side", "current waits for side",
    ]  # fmt: skip


def test_a_block_aside_is_joined_after_an_error_too(device: Device) -> None:
    with pytest.raises(ValueError, match="of the step"), surface().aside():
        raise ValueError("of the step")
    assert device.log[-1] == "current waits for side"


def test_a_capture_on_the_side_stream_in_a_pool_shared_by_all(device: Device) -> None:
    target = surface()
    for _ in range(2):
        graph, result = target.capture(lambda: device.log.append("step") or 5, [])
        assert result == 5
    one = [
        "synchronize",
        "empty",
        "on side",
        "begin (0, 7) thread_local",
        "step",
        "end",
        "off side",
    ]
    assert device.log == one * 2
    device.log.clear()
    graph.replay()
    graph.reset()
    graph.reset()  # once is enough
    assert device.log == ["replay", "synchronize", "reset"]


def test_a_pool_that_all_graphs_have_left_is_not_used_again(device: Device) -> None:
    target = surface()

    def pool_of_next() -> tuple[Any, str]:
        graph, _ = target.capture(lambda: None, [])
        return graph, next(e for e in reversed(device.log) if e.startswith("begin")).split(" t")[0]

    first, pool = pool_of_next()
    second, same = pool_of_next()
    first.reset()
    third, still = pool_of_next()
    assert pool == same == still == "begin (0, 7)"
    second.reset()
    fourth, still = pool_of_next()
    assert still == "begin (0, 7)"  # one of it lives
    third.reset()
    fourth.reset()
    assert pool_of_next()[1] == "begin (0, 8)"


def test_generators_of_the_step_are_registered(device: Device) -> None:
    class Own:
        device = torch.device("cuda")

    surface().capture(lambda: None, [Own(), torch.Generator()])  # type: ignore[list-item]
    assert device.log.count("register") == 1  # the host's is not the graph's
    # On the stream, and so on the device, of the graph: memory is taken for it.
    at = device.log.index("register")
    assert device.log[at - 1 : at + 2] == ["on side", "register", "begin (0, 7) thread_local"]


def fails() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_step_that_fails_leaves_the_allocator_in_order_and_its_error_comes_through(
    device: Device,
) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        surface().capture(fails, [])
    after = device.log[device.log.index("end") :]
    assert after == [
        "end", "reset", "endAllocateToPool (0, 7)", "releasePool (0, 7)", "draw", "set rng", "empty",
    ]  # fmt: skip


def test_an_invalidated_capture_gives_the_generator_a_state_of_its_own(device: Device) -> None:
    device.end_fails = device.generator_stuck = True
    with pytest.raises(RuntimeError, match="invalidated"):
        surface().capture(lambda: None, [])
    assert "generator clone" in device.log
    assert device.log.index("generator clone") < device.log.index("set rng")
    device.log.clear()
    device.end_fails = device.generator_stuck = False
    surface().capture(lambda: None, [])
    assert "begin (0, 8) thread_local" in device.log


def test_generators_of_the_step_are_put_in_order_as_well(device: Device) -> None:
    device.end_fails = device.generator_stuck = True
    with pytest.raises(RuntimeError, match="invalidated"):
        surface().capture(lambda: None, [device.generator, torch.Generator()])
    assert device.log.count("generator clone") == device.log.count("set rng") == 2


def test_waits_are_told_with_their_lines_and_other_warnings_come_through(monkeypatch: Any) -> None:
    modes: list[Any] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    import warnings

    def step() -> int:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
        return 4

    with pytest.warns(UserWarning, match="something else") as seen:
        result, waits = surface().syncs(step)
    assert len(seen) == 1
    assert result == 4
    assert [w.rpartition("/")[2].rpartition(":")[0] for w in waits] == ["test_surface.py"]
    assert modes == ["warn", 0]


def test_no_surface_says_why() -> None:
    assert NoSurface(torch.device("cpu"), "no graphs").problem() == "no graphs"


def test_a_move_of_a_batch_is_told_from_other_waits(tmp_path: Any) -> None:
    script = tmp_path / "train.py"
    script.write_text("x = x.to(device)\ny = y.cuda()\nprint(loss.item())\n", encoding="utf-8")
    assert [is_move(f"{script}:{line}") for line in (1, 2, 3, 9)] == [True, True, False, False]
    assert not is_move("nowhere")


def test_places_in_optimizers() -> None:
    assert is_optimizers(f"{OPTIMIZER}:417")
    assert not is_optimizers(f"{torch.nn.utils.clip_grad.__file__}:12")
    assert not is_optimizers("train.py:3")
