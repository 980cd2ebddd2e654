"""The prefetcher as a loop sees it, on a CPU: order, nesting, ends, errors, state."""

from __future__ import annotations

import copy
import ctypes
import gc
import os
import pickle
import subprocess
import sys
import threading
import time
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    default_convert,
)

from flopwise.errors import ConsistencyError, FlopwiseWarning, InputError
from flopwise.kit.input import (
    IMAGENET,
    Normalize,
    PinnedPool,
    Prefetcher,
    RandomResizedCropBatch,
    collate_into,
)

Pair = namedtuple("Pair", "x y")


@dataclass
class Boxes:
    corners: torch.Tensor
    names: list[str]


class Graph:
    """A batch type that moves itself."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x
        self.moved_to: Any = None

    def to(self, device: Any, non_blocking: bool = False) -> Graph:
        twin = Graph(self.x.to(device))
        twin.moved_to = torch.device(device)
        return twin


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "flopwise-input"]


BATCHES: list[Any] = [
    torch.arange(6).reshape(2, 3),
    [torch.ones(2), torch.zeros(0)],
    (torch.ones(1), "text", 3),
    {"a": {"b": [torch.ones(2, dtype=torch.uint8), None]}},
    OrderedDict(z=torch.ones(1), a=torch.zeros(1)),
    Pair(torch.ones(2), [torch.zeros(2)]),
    Boxes(torch.ones(4), ["cat"]),
    torch.ones(3, 3).to_sparse(),
    torch.tensor([float("nan"), float("inf"), -0.0]),
    7,
]


@pytest.mark.parametrize("thread", [True, False])
@pytest.mark.parametrize("depth", [1, 3, 50])
def test_what_comes_out_is_what_the_loader_gives(thread: bool, depth: int) -> None:
    got = list(Prefetcher(BATCHES, "cpu", depth, thread=thread))
    assert len(got) == len(BATCHES)
    for a, b in zip(got, BATCHES, strict=True):
        assert type(a) is type(b)
        assert repr(a) == repr(b)
    assert threads() == []


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_nested_batches_and_types_of_ones_own_are_moved(device: str) -> None:
    batch = {
        "pair": Pair(torch.ones(2), [torch.ones(1)]),
        "boxes": Boxes(torch.ones(4), ["a"]),
        "graph": Graph(torch.ones(1)),
    }
    if device == "meta":
        with pytest.warns(FlopwiseWarning, match="they go the plain way"):
            batches = Prefetcher([batch], device)
    else:
        batches = Prefetcher([batch], device)
    got = next(iter(batches))
    where = [
        got["pair"].x.device.type,
        got["pair"].y[0].device.type,
        got["boxes"].corners.device.type,
        got["graph"].x.device.type,
    ]
    assert where == [device] * 4
    assert got["boxes"].names == ["a"]
    assert batch["boxes"].corners.device.type == "cpu"  # the loader's own batch is left as it is
    batches.close()


def test_what_cannot_be_moved_is_said_once_and_stays() -> None:
    class Own:
        pass

    with pytest.warns(FlopwiseWarning) as said:
        got = list(Prefetcher([[Own(), torch.ones(1)], [Own(), torch.ones(1)]], "meta"))
    assert [len(b) for b in got] == [2, 2]
    assert type(got[0][0]) is Own
    assert sum("has no .to(device): it stays on the host" in str(w.message) for w in said) == 1


def test_a_mapping_that_cannot_be_changed_is_built_anew() -> None:
    with pytest.warns(FlopwiseWarning, match="plain way"):
        batches = Prefetcher([MappingProxyType({"x": torch.ones(1)})], "meta")
    assert [b["x"].device.type for b in batches] == ["meta"]


def test_samples_that_are_batches_already_are_not_stacked() -> None:
    data = TensorDataset(torch.arange(6.0).view(3, 2), torch.arange(6.0, 12.0).view(3, 2))
    pool = PinnedPool(4096, 8)
    with pytest.raises(InputError, match="batch_size=None, so each sample is a batch"):
        Prefetcher(DataLoader(data, batch_size=None, collate_fn=collate_into(pool)), "cpu")
    loader = DataLoader(data, batch_size=None, collate_fn=collate_into(pool, default_convert))
    got = [(x.tolist(), y.tolist()) for x, y in Prefetcher(loader, "cpu")]
    assert got == [(x.tolist(), y.tolist()) for x, y in data]
    assert pool.counts.placed == 3


class Fixed(tuple):  # type: ignore[type-arg]
    """A tuple that cannot be built from its parts."""

    def __new__(cls) -> Any:
        return super().__new__(cls, [torch.ones(1)])


def test_a_type_that_cannot_be_built_again_is_a_clear_error_at_its_step() -> None:
    with pytest.warns(FlopwiseWarning):
        batches = iter(Prefetcher([torch.ones(1), Fixed()], "meta"))
    assert next(batches).device.type == "meta"
    with pytest.raises(
        InputError, match=r"Fixed cannot be built again .*; give it a .to\(device\)"
    ):
        next(batches)


@pytest.mark.parametrize("thread", [True, False])
@pytest.mark.parametrize("at", [0, 1, 5])
def test_an_error_of_the_loader_comes_at_its_step(thread: bool, at: int) -> None:
    def loader() -> Any:
        for k in range(at):
            yield torch.full((1,), k)
        raise KeyError("broken file")

    seen = []
    with pytest.raises(KeyError, match="broken file") as caught:  # noqa: PT012
        for batch in Prefetcher(loader(), "cpu", 3, thread=thread):
            seen.append(int(batch))
    assert seen == list(range(at))
    assert any("loader" in entry.name for entry in caught.traceback)  # where it was raised
    assert threads() == []


def test_an_error_of_a_transform_comes_at_its_step_also_one_that_looks_like_the_end() -> None:
    def transform(batch: Any) -> Any:
        if batch == 2:
            next(iter(()))
        return batch * 10

    batches = iter(Prefetcher([0, 1, 2, 3], "cpu", transform=transform))
    assert [next(batches), next(batches)] == [0, 10]
    with pytest.raises(RuntimeError, match="transform of the batch raised StopIteration"):
        next(batches)


@pytest.mark.parametrize("n", [0, 1, 2])
def test_a_loader_shorter_than_the_ring_and_epochs_without_a_batch(n: int) -> None:
    batches = Prefetcher([torch.full((1,), k) for k in range(n)], "cpu", depth=8, consistency=True)
    for _ in range(3):
        assert [int(b) for b in batches] == list(range(n))
    assert len(batches) == n
    assert batches.findings == []


def test_it_is_iterated_again_and_left_early_as_often_as_one_likes() -> None:
    data = TensorDataset(torch.arange(40))
    batches = Prefetcher(DataLoader(data, batch_size=2, num_workers=1), "cpu", consistency=True)
    for stop in (0, 1, 7, 100):
        seen = []
        for k, (x,) in enumerate(batches):
            if k == stop:
                break
            seen += x.tolist()
        assert seen == list(range(40))[: 2 * stop]
        assert threads() == []
    assert batches.findings == []


def test_two_loops_over_one_prefetcher_are_told() -> None:
    batches = Prefetcher(list(range(10)), "cpu")
    first, second = iter(batches), iter(batches)
    assert next(second) == 0
    with pytest.raises(InputError, match="another iteration of the same Prefetcher was begun"):
        next(first)
    assert next(second) == 1
    batches.close()


def test_an_iterator_that_is_dropped_takes_its_thread_with_it() -> None:
    iterator = iter(Prefetcher(iter(int, 1), "cpu"))  # without end
    next(iterator)
    assert threads() == ["flopwise-input"]
    del iterator
    gc.collect()
    assert threads() == []


def test_a_loader_that_is_stuck_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flopwise.kit.input.reader.PATIENCE_S", 0.05)
    go_on = threading.Event()

    def loader() -> Any:
        yield 0
        go_on.wait()
        yield 1

    batches = iter(Prefetcher(loader(), "cpu"))
    next(batches)
    with pytest.warns(FlopwiseWarning, match="did not return a batch within 0.05 s"):
        batches.close()  # type: ignore[attr-defined]
    go_on.set()


SCRIPT = """
import os, sys, torch
from torch.utils.data import DataLoader, TensorDataset
from flopwise.kit.input import PinnedPool, Prefetcher, collate_into
data = TensorDataset(torch.arange(400.0))
pool = PinnedPool(4096, 12)
loader = DataLoader(data, batch_size=2, num_workers=2, collate_fn=collate_into(pool))
for k, batch in enumerate(Prefetcher(loader, "cpu")):
    if k == 3:
        {end}
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [("break", 0), ("sys.exit(3)", 3), ("raise ValueError('own')", 1), ("kept = iter(batch)", 0)],
)
def test_the_script_ends_with_nothing_left_behind(end: str, code: int) -> None:
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(end=end)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == code, done.stderr
    expected = "ValueError: own" if code == 1 else ""
    assert done.stderr.strip().endswith(expected)
    assert expected or done.stderr == ""
    if os.path.isdir("/dev/shm"):
        mine = {
            name
            for name in os.listdir("/dev/shm")
            if "flopwise" in name or name.startswith("torch_")
        }
        assert mine - before == set()


class Noise(Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> Any:
        if i == 7:
            os._exit(9)
        return torch.tensor(i)


@pytest.mark.usefixtures("workers_looked_after")
def test_a_worker_that_dies_is_one_clear_error() -> None:
    loader = DataLoader(Noise(), batch_size=2, num_workers=1)
    batches = iter(Prefetcher(loader, "cpu"))
    seen = []
    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid.*\) exited unexpectedly"):  # noqa: PT012
        for batch in batches:
            seen.append(batch.tolist())
            time.sleep(0.02)
    assert seen == [[0, 1], [2, 3], [4, 5]][: len(seen)]  # torch says so as soon as it sees it
    batches.close()  # type: ignore[attr-defined]  # the error may have come while the loop had the word
    assert threads() == []


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("cut", [0, 1, 5, 9])
def test_an_epoch_goes_on_where_it_was_left(workers: int, cut: int) -> None:
    def loader() -> Any:
        return DataLoader(
            TensorDataset(torch.arange(20)), batch_size=2, shuffle=True, num_workers=workers
        )

    torch.manual_seed(5)
    batches = Prefetcher(loader(), "cpu")
    whole: list[Any] = []
    state: Any = None
    for epoch in range(2):
        for k, (x,) in enumerate(batches):
            whole.append(x.tolist())
            if epoch == 1 and k + 1 == cut:
                state = batches.state_dict()
        if epoch == 0 and cut == 0:
            state = batches.state_dict()  # between two epochs
    torch.manual_seed(99)
    again = Prefetcher(loader(), "cpu")
    again.load_state_dict(state)
    assert again.state_dict()["batches"] == cut
    before = torch.get_rng_state()
    rest = [x.tolist() for (x,) in again]
    if cut < 10 and cut:
        assert rest == whole[10 + cut :]
        assert torch.equal(
            torch.get_rng_state(), before
        )  # skipping draws nothing that the loop would have drawn
    else:
        assert len(rest) == 10  # an epoch of its own
    assert again.state_dict()["batches"] == 0


def test_a_loader_with_a_state_of_its_own_is_asked_for_it() -> None:
    class Stateful:
        def __init__(self) -> None:
            self.at = 0

        def __iter__(self) -> Any:
            while self.at < 9:
                self.at += 1
                yield self.at - 1
            self.at = 0

        def state_dict(self) -> Any:
            return {"at": self.at}

        def load_state_dict(self, state: Any) -> None:
            self.at = state["at"]

    batches = Prefetcher(Stateful(), "cpu", depth=4)
    iterator = iter(batches)
    assert [next(iterator) for _ in range(3)] == [0, 1, 2]
    state = batches.state_dict()
    assert state["loader"] == {"at": 3}  # as handed out, not as read ahead
    batches.close()
    again = Prefetcher(Stateful(), "cpu")
    again.load_state_dict(state)
    assert list(again) == [3, 4, 5, 6, 7, 8]


def test_states_that_are_none_are_refused() -> None:
    batches = Prefetcher([1], "cpu")
    for state in (None, {}, {"version": 2, "batches": 1}, {"version": 1, "batches": -1}):
        with pytest.raises(InputError, match="not the state of a Prefetcher"):
            batches.load_state_dict(state)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"depth": 0}, "depth=0: at least one"),
        ({"consistency": "loud"}, "consistency='loud'"),
        ({"normalize": 3}, "normalize=3"),
        ({"loader": 3}, "int cannot be iterated"),
    ],
)
def test_arguments_that_make_no_sense_are_told_before_anything_runs(
    arguments: Any, said: str
) -> None:
    loader = arguments.pop("loader", [1])
    with pytest.raises(InputError, match=said):
        Prefetcher(loader, "cpu", **arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
def test_a_device_that_is_not_there_is_told() -> None:
    with pytest.raises(InputError, match="torch sees no CUDA device here"):
        Prefetcher([1], "cuda")


def test_attributes_of_the_loader_are_its_own() -> None:
    loader = DataLoader(TensorDataset(torch.arange(4)), batch_size=2)
    batches = Prefetcher(loader, "cpu")
    assert batches.batch_size == 2
    assert batches.sampler is loader.sampler
    with pytest.raises(AttributeError, match="no_such"):
        _ = batches.no_such

    class Endless(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([torch.ones(1)])

    with pytest.raises(TypeError, match=r"__len__|has no len"):
        len(Prefetcher(DataLoader(Endless()), "cpu"))


def test_reading_overlaps_with_the_loop() -> None:
    def loader() -> Any:
        for k in range(20):
            time.sleep(0.01)
            yield k

    batches = Prefetcher(loader(), "cpu", measure_wait=True)
    for _ in batches:
        time.sleep(0.012)
    waits = batches.waits_s()
    assert len(waits) == 20
    assert sorted(waits)[10] < 0.005  # 10 ms where nothing overlaps
    assert batches.waits_s() == []


def test_a_barrier_says_what_it_cost(capsys: pytest.CaptureFixture[str]) -> None:
    batches = Prefetcher([1, 2], "cpu")
    for _ in batches:
        took = batches.barrier()
        assert took.cost_s >= 0
        assert took.streams == 0
    assert len(batches.barriers) == 2
    assert capsys.readouterr().err.count("input barrier: 0 streams waited for") == 2
    batches.barrier(say=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("thread", [True, False])
def test_nothing_is_sent_while_it_is_held(thread: bool) -> None:
    sent: list[int] = []
    batches = Prefetcher(
        range(9), "cpu", depth=3, thread=thread, transform=lambda b: sent.append(b) or b
    )
    with batches.held():  # nothing runs yet
        pass
    iterator = iter(batches)
    next(iterator)
    with batches.held():
        before = len(sent)
        time.sleep(0.03)
        assert len(sent) == before
    assert list(iterator) == list(range(1, 9))


def test_what_is_found_about_the_last_batch_is_raised_at_the_end() -> None:
    x = torch.ones(8)
    with pytest.raises(ConsistencyError, match=r"step 2.*while the step used it"):  # noqa: PT012
        for batch in Prefetcher([torch.ones(1), torch.ones(1), x], "cpu", consistency=True):
            if batch is x:
                (ctypes.c_float * 8).from_address(x.data_ptr())[:] = [3.0] * 8


def test_gradients_are_recorded_in_the_loader_as_in_the_loop() -> None:
    w = torch.ones(1, requires_grad=True)

    def loader() -> Any:
        for _ in range(4):
            yield w * 2

    assert [x.requires_grad for x in Prefetcher(loader(), "cpu")] == [True] * 4
    with torch.no_grad():
        assert [x.requires_grad for x in Prefetcher(loader(), "cpu")] == [False] * 4


@pytest.mark.parametrize("thread", [True, False])
def test_a_loop_in_inference_mode(thread: bool) -> None:
    images = [torch.randint(0, 256, (1, 3, 2, 2), dtype=torch.uint8) for _ in range(5)]
    batches = Prefetcher(images, "cpu", normalize=IMAGENET, consistency=True, thread=thread)
    for _ in range(2):
        with torch.inference_mode():
            assert len([x.sum() for x in batches]) == 5
    w = torch.ones(1, requires_grad=True)
    for x in batches:  # and then one that trains, on what was made in that mode
        (x * w).sum().backward()

    def loader() -> Any:
        for _ in range(4):
            yield torch.ones(2)  # an inference tensor, as it is in a plain loop

    with torch.inference_mode():
        assert len(list(Prefetcher(loader(), "cpu", consistency=True, thread=thread))) == 4
    assert batches.findings == []


@pytest.mark.parametrize("thread", [True, False])
def test_a_default_device_of_the_scripts_changes_nothing(thread: bool) -> None:
    pool = PinnedPool(4096, 8, checksums=True)
    images = torch.randint(0, 256, (8, 3, 20, 20), dtype=torch.uint8)
    into = collate_into(pool)
    loader = (into([(images[k],), (images[k + 1],)]) for k in range(0, 8, 2))
    crop = RandomResizedCropBatch(8, normalize=Normalize())
    with torch.device("meta"):
        batches = Prefetcher(
            loader, "cpu", pool=pool, transform=crop.at(0), consistency=True, thread=thread
        )
        got = [x for (x,) in batches]
    assert [x.device.type for x in got] == ["cpu"] * 4
    assert batches.findings == []


def test_numbers_that_are_none_pass_and_do_not_alarm() -> None:
    x = torch.tensor([float("nan"), 1.0])
    batches = Prefetcher([x, x], "cpu", consistency=True)
    assert all(torch.equal(got.view(torch.int32), x.view(torch.int32)) for got in batches)
    assert batches.findings == []


def test_a_batch_that_the_loader_writes_again_too_early_is_found_with_its_step() -> None:
    ring = [torch.zeros(64) for _ in range(2)]

    def loader() -> Any:
        for k in range(10):
            yield ring[k % 2].fill_(k) if k < 6 else raw_fill(ring[k % 2], k)

    def raw_fill(x: torch.Tensor, k: int) -> torch.Tensor:
        memoryview(x.numpy())[:] = memoryview(
            torch.full((64,), float(k)).numpy()
        )  # past torch's own count of writes
        return x

    pytest.importorskip("numpy")
    batches = Prefetcher(loader(), "cpu", depth=3, consistency=True)
    with pytest.raises(ConsistencyError, match=r"step \d+, buffer -1: overwritten"):  # noqa: PT012
        for _ in batches:
            time.sleep(0.002)


def test_a_child_forked_in_the_middle_is_told_that_nobody_reads_there() -> None:
    code = """
import os, sys, time
from flopwise.errors import InputError
from flopwise.kit.input import Prefetcher
batches = Prefetcher(list(range(20)), "cpu", depth=2)
loop = iter(batches)
next(loop), next(loop)
time.sleep(0.2)
child = os.fork()
if child == 0:
    try:
        list(loop)
    except InputError as error:
        os._exit(7 if "forked" in str(error) and len(list(batches)) == 20 else 1)
    os._exit(2)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert len(list(loop)) == 18
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)


def test_a_batch_asked_for_inside_of_held_is_told() -> None:
    batches = Prefetcher(list(range(30)), "cpu", depth=2)
    loop = iter(batches)
    next(loop)
    with batches.held(), pytest.raises(InputError, match=r"inside of held\(\)"):
        list(loop)
    assert list(batches) == list(range(30))


@pytest.mark.parametrize("consistency", [False, "report"])
def test_copies_and_pickles_of_an_open_one_are_new_and_leave_it_alone(consistency: Any) -> None:
    batches = Prefetcher(list(range(9)), "cpu", consistency=consistency)
    loop = iter(batches)
    next(loop)
    for twin in (
        copy.copy(batches),
        copy.deepcopy(batches),
        pickle.loads(pickle.dumps(batches)),
    ):
        assert list(twin) == list(range(9))
    assert list(loop) == list(range(1, 9))


def test_closing_in_the_loop_is_told() -> None:
    batches = Prefetcher(list(range(9)), "cpu")
    loop = iter(batches)
    next(loop)
    batches.close()
    with pytest.raises(InputError, match="or it was closed"):
        next(loop)


def test_what_an_iterator_loses_is_said() -> None:
    batches = Prefetcher(iter(range(20)), "cpu", depth=3)
    for k in batches:
        if k == 4:
            time.sleep(0.2)
            break
    with pytest.warns(FlopwiseWarning, match="3 batches of a range_iterator had been read ahead"):
        assert list(batches) == list(range(8, 20))


def test_two_in_one_iterator_are_refused_until_the_first_is_closed() -> None:
    loader = DataLoader(TensorDataset(torch.arange(40)), 4, num_workers=1, persistent_workers=True)
    first, second = Prefetcher(loader, "cpu"), Prefetcher(loader, "cpu")
    loop = iter(first)
    next(loop)
    with pytest.raises(InputError, match="another Prefetcher is reading this DataLoader"):
        next(iter(second))
    first.close()
    assert [int(x[0]) for (x,) in second] == list(range(0, 40, 4))
    with pytest.raises(InputError, match="another Prefetcher is reading this generator"):
        list(
            zip(*[Prefetcher(shared, "cpu") for shared in [(k for k in range(9))] * 2], strict=True)
        )
