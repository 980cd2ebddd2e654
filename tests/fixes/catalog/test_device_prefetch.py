"""device-prefetch, with a link to the meta device whose copies are host tensors: order, identity, and what declines.

What streams and events do is in tests/fixes/test_on_a_gpu.py.
"""

from __future__ import annotations

import copy
import gc
import multiprocessing
import pickle
import random
import time
from collections import UserDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.dataloader import (
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from flopwise.fixes.ahead import MOST_UNCLAIMED, MOST_WATCHED
from flopwise.fixes.catalog import device_prefetch
from flopwise.fixes.catalog.device_prefetch import CudaWay, DevicePrefetch
from flopwise.fixes.catalog.loader_workers import LoaderWorkers
from flopwise.fixes.interface import Declined, Eligible, Scene
from flopwise.fixes.moves import GIVES_AWAY, Move

META = torch.device("meta")
WRAPPED = ("to", "cuda", *GIVES_AWAY)
KINDS = (_SingleProcessDataLoaderIter, _MultiProcessingDataLoaderIter)
ORIGINALS = [kind._next_data for kind in KINDS]
TENSOR = {name: vars(torch.Tensor).get(name) for name in WRAPPED}


class Squares(Dataset):
    """Item i is a dict of i and i squared."""

    def __init__(self, n: int = 40) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"i": i, "x": torch.full((3,), float(i * i)), "name": str(i)}


class Drawing(Squares):
    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"i": i, "x": torch.rand(3), "name": str(i)}


class Broken(Squares):
    def __getitem__(self, i: int) -> dict[str, Any]:
        if i == 22:
            raise KeyError("sample 22")
        return super().__getitem__(i)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (Squares()[i] for i in range(40))


@dataclass
class FakeLink:
    """Copies are host tensors, so that their values can be seen."""

    sent: list[list[torch.Size]] = field(default_factory=list)
    handed: int = 0
    dropped: int = 0
    fails_at: int = -1
    met: int = 0
    closed: bool = False

    def send(self, tensors: list[torch.Tensor]) -> Any:
        if len(self.sent) == self.fails_at:
            raise RuntimeError("out of memory")
        self.sent.append([t.shape for t in tensors])
        return [t.clone() for t in tensors]

    def hand_over(self, sent: Any) -> list[torch.Tensor]:
        self.handed += 1
        return list(sent)

    def meet(self, sent: Any, copy: torch.Tensor, move: Any) -> None:
        self.met += 1

    def drop(self, sent: Any) -> None:
        self.dropped += 1

    def close(self) -> None:
        self.closed = True


def moved(batch: Any) -> Any:
    """Moves a batch as scripts do; tensors that stay meta have no values, so they come as None."""
    out = {}
    for name, value in batch.items():
        if not isinstance(value, torch.Tensor):
            out[name] = value
            continue
        there = value.to(META, non_blocking=True)
        out[name] = None if there.device == META else there.tolist()
    return out


def loader_of(dataset: Any = None, **arguments: Any) -> DataLoader[Any]:
    dataset = Squares() if dataset is None else dataset
    return DataLoader(dataset, **({"batch_size": 4, "num_workers": 1} | arguments))


@pytest.fixture
def apply() -> Iterator[Any]:
    done = []

    def apply(*loaders: Any, link: Any = None, **more: Any) -> Any:
        here = Scene(loaders=loaders, device=META, **more)
        done.append(device_prefetch._Applied(here, link or FakeLink()))
        return done[-1]

    yield apply
    while done:
        done.pop().undo()
    gc.collect()
    assert [kind._next_data for kind in KINDS] == ORIGINALS
    assert {name: vars(torch.Tensor).get(name) for name in WRAPPED} == TENSOR
    assert multiprocessing.active_children() == []


def run(loader: Any, applied: Any = None, switch: Any = None, epochs: int = 1) -> list[Any]:
    """Returns the values of every batch, on the host and as moved (None: by torch itself)."""
    seen, k = [], 0
    for _ in range(epochs):
        for batch in loader:
            there = moved(batch)
            host = {n: v.tolist() if isinstance(v, torch.Tensor) else v for n, v in batch.items()}
            for name, value in there.items():
                assert value is None or value == host[name]
            seen.append((host, there["x"] is not None))
            if switch is not None:
                applied.enable() if switch(k) else applied.disable()
            k += 1
    return seen


def hosts(seen: list[Any]) -> list[Any]:
    return [host for host, _ in seen]


class TestDeclines:
    def test_without_a_loader(self) -> None:
        answer = DevicePrefetch().check(Scene())
        assert isinstance(answer, Declined)
        assert "no DataLoader" in answer.reason

    def test_without_a_device(self) -> None:
        answer = DevicePrefetch().check(Scene(loaders=[loader_of()]))
        assert isinstance(answer, Declined)
        assert "runs on cpu" in answer.reason

    def test_not_with_both(self) -> None:
        here = Scene(loaders=[loader_of()], device=torch.device("cuda"))
        assert isinstance(DevicePrefetch().check(here), Eligible)

    @pytest.mark.parametrize(
        "move",
        [
            lambda x: x,
            lambda x: x.to(torch.float64),
            lambda x: x.to(META, torch.float64),
            lambda x: x[:2].to(META),
            lambda x: (x + 0).to(META),
        ],
        ids=["stays", "cast", "cast on the way", "a view", "another"],
    )
    def test_where_batches_are_not_moved_whole(self, move: Any, apply: Any) -> None:
        loader = loader_of(Squares(64), num_workers=0)
        applied = apply(loader)
        applied.enable()
        for k, batch in enumerate(loader):
            move(batch["x"])
            if k < MOST_WATCHED:
                assert applied.failure() is None
        assert "not seen to move" in applied.failure()

    def test_where_moving_takes_too_little(self, apply: Any) -> None:
        loader = loader_of(num_workers=0)
        applied = apply(loader, step_s=10.0)
        run(loader)
        assert not applied.verify().passed
        assert "% of a step" in applied.failure()

    def test_where_the_device_would_not_hold_it(
        self, apply: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        loader = loader_of(num_workers=0)
        applied = apply(loader)
        monkeypatch.setattr(applied, "_free_bytes", lambda: 1000)
        run(loader)
        applied.enable()
        assert "batches in flight need" in applied.failure()
        assert not any(by_us for _, by_us in run(loader))

    def test_less_is_sent_ahead_where_there_is_less_room(
        self, apply: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(device_prefetch, "SPARE_BYTES", 0)
        loader = loader_of(num_workers=0)
        applied = apply(loader)
        monkeypatch.setattr(applied, "_free_bytes", lambda: 5 * 4 * (8 + 12))
        run(loader)
        assert applied.verify().passed
        assert applied.setting == {"depth": "1"}


class TestWatching:
    def test_finds_the_tensors_that_are_moved(self, apply: Any) -> None:
        loader = loader_of(num_workers=0)
        link = FakeLink()
        applied = apply(loader, link=link)
        assert not applied.ready()
        for k, batch in enumerate(loader):
            batch["x"].to(META)
            if k == 4:
                assert applied.ready()
                applied.enable()
        assert {tuple(shapes) for shapes in link.sent} == {((4, 3),)}

    def test_verify_compares_copies_and_leaves_it_off(self, apply: Any) -> None:
        loader = loader_of(num_workers=0)
        applied = apply(loader)
        run(loader)
        parity = applied.verify()
        assert parity.passed, parity.detail
        assert parity.numerics == "identical"
        assert not any(by_us for _, by_us in run(loader))

    def test_a_link_that_changes_a_bit_fails(self, apply: Any) -> None:
        class Wrong(FakeLink):
            def hand_over(self, sent: Any) -> list[torch.Tensor]:
                return [t + 1 for t in sent]

        loader = loader_of(num_workers=0)
        applied = apply(loader, link=Wrong())
        run(loader)
        assert not applied.verify().passed


LOADERS = {
    "no workers": lambda: loader_of(num_workers=0, shuffle=True),
    "draws, no workers": lambda: loader_of(Drawing(), num_workers=0, shuffle=True),
    "workers": lambda: loader_of(shuffle=True),
    "two workers": lambda: loader_of(shuffle=True, num_workers=2, prefetch_factor=4),
    "persistent": lambda: loader_of(shuffle=True, persistent_workers=True),
    "in any order": lambda: loader_of(num_workers=1, in_order=False),
    "iterable": lambda: loader_of(Stream()),
    "own generator": lambda: loader_of(shuffle=True, generator=torch.Generator().manual_seed(5)),
}
SWITCHES = {
    "on": lambda k: True,
    "blocks of 3": lambda k: (k // 3) % 2 == 1,
    "every batch": lambda k: k % 2 == 0,
    "random": lambda k: random.Random(k).random() < 0.5,
}


class TestOrderAndContent:
    @pytest.mark.parametrize(
        ("name", "when"),
        [*((name, "random") for name in LOADERS), *(("persistent", when) for when in SWITCHES)],
    )
    def test_are_the_bare_loaders_whenever_it_is_switched(
        self, name: str, when: str, apply: Any
    ) -> None:
        torch.manual_seed(3)
        bare = run(LOADERS[name](), epochs=3)
        bare_rng = torch.get_rng_state()
        torch.manual_seed(3)
        loader = LOADERS[name]()
        applied = apply(loader)
        ours = run(loader, applied, SWITCHES[when], epochs=3)
        assert hosts(ours) == hosts(bare)
        assert sum(by_us for _, by_us in ours) > 5
        assert torch.equal(torch.get_rng_state(), bare_rng)
        assert applied.failure() is None

    def test_batches_are_sent_before_they_are_asked_for_where_workers_have_them(
        self, apply: Any
    ) -> None:
        loader = loader_of(Squares(80), num_workers=2, prefetch_factor=4)
        link = FakeLink()
        applied = apply(loader, link=link)
        ahead = []
        for k, batch in enumerate(loader):
            moved(batch)
            if k == 4:
                applied.enable()
            if k > 6:
                time.sleep(0.01)  # in which the workers load
                ahead.append(len(link.sent) - link.handed)
        assert max(ahead) == 2

    def test_without_workers_nothing_is_loaded_early(self, apply: Any) -> None:
        loaded = []

        class Noting(Squares):
            def __getitem__(self, i: int) -> dict[str, Any]:
                loaded.append(i)
                return super().__getitem__(i)

        loader = loader_of(Noting(), num_workers=0)
        applied = apply(loader)
        applied.enable()
        for k, batch in enumerate(loader):
            moved(batch)
            assert len(loaded) == 4 * (k + 1)

    def test_workers_are_given_work_when_they_would_have_been(self, apply: Any) -> None:
        """A sampler is asked at the same batch as without: it may look at what training has done."""

        def asked(applied: Any, loader: Any) -> list[int]:
            numbers = []
            for k, batch in enumerate(loader):
                moved(batch)
                if applied is not None and k == 3:
                    applied.enable()
                numbers.append(sampler.asked)
            return numbers

        class Sampler(torch.utils.data.Sampler):
            asked = 0

            def __iter__(self) -> Iterator[int]:
                for i in range(80):
                    self.asked += 1
                    yield i

            def __len__(self) -> int:
                return 80

        sampler = Sampler()
        bare = asked(None, loader_of(Squares(80), sampler=sampler, num_workers=2))
        sampler = Sampler()
        loader = loader_of(Squares(80), sampler=sampler, num_workers=2)
        assert asked(apply(loader), loader) == bare

    def test_an_error_comes_in_its_turn_and_the_rest_follows(self, apply: Any) -> None:
        def walk(loader: Any, applied: Any) -> list[Any]:
            seen, iterator = [], iter(loader)
            while True:
                try:
                    batch = next(iterator)
                    moved(batch)
                    seen.append(batch["i"].tolist())
                except StopIteration:
                    return seen
                except KeyError as error:
                    seen.append("error" if "sample 22" in str(error) else error)
                if applied is not None:
                    applied.enable()

        bare = walk(loader_of(Broken()), None)
        assert bare.index("error") == 5
        loader = loader_of(Broken())
        assert walk(loader, apply(loader)) == bare

    @pytest.mark.parametrize("persistent", [True, False])
    def test_an_epoch_that_is_left_early(self, persistent: bool, apply: Any) -> None:
        def walk(loader: Any, applied: Any) -> list[Any]:
            seen = []
            for epoch in range(4):
                for k, batch in enumerate(loader):
                    moved(batch)
                    seen.append(batch["i"].tolist())
                    if applied is not None:
                        applied.enable() if epoch != 2 else applied.disable()
                    if k == 4:
                        break
            return seen

        made = lambda: loader_of(shuffle=True, persistent_workers=persistent)  # noqa: E731
        torch.manual_seed(1)
        bare = walk(made(), None)
        torch.manual_seed(1)
        loader = made()
        assert walk(loader, apply(loader)) == bare

    def test_other_loaders_are_left_alone(self, apply: Any) -> None:
        loader, other = loader_of(num_workers=0), loader_of(Squares(8), num_workers=0)
        applied = apply(loader)
        run(loader, applied, lambda k: True)
        assert not any(by_us for _, by_us in run(other))
        assert any(by_us for _, by_us in run(loader))


class TestMoves:
    """What the script may do with a batch that was sent."""

    @pytest.fixture
    def batch(self, apply: Any) -> Any:
        loader = loader_of(Squares(400), num_workers=0)
        self.applied = apply(loader)
        self.applied.enable()
        self.iterator = iter(loader)
        for _ in range(6):
            batch = next(self.iterator)
            there = moved(batch)
        assert there["x"] is not None
        yield next(self.iterator)
        del self.iterator

    def test_a_second_move_is_a_second_copy(self, batch: Any) -> None:
        first, second = batch["x"].to(META), batch["x"].to(META)
        assert torch.equal(first, batch["x"])
        assert first is not batch["x"]
        assert second.device == META

    @pytest.mark.parametrize(
        "move",
        [
            lambda x: x.to(META),
            lambda x: x.to("meta", non_blocking=True),
            lambda x: x.to(device="meta"),
            lambda x: x.to(META, torch.float32),
            lambda x: x.to(META, copy=True),
            lambda x: x.to(torch.empty(0, device=META)),
        ],
    )
    def test_in_every_spelling(self, move: Any, batch: Any) -> None:
        assert torch.equal(move(batch["x"]), batch["x"])

    @pytest.mark.parametrize(
        "act",
        [
            lambda x: x.add_(1),
            lambda x: x[0].zero_(),
            lambda x: x.numpy().fill(7),
            lambda x: x[1:].numpy().fill(7),
            lambda x: np.asarray(x),
            lambda x: x.data_ptr(),
            lambda x: np.from_dlpack(x),
            lambda x: x.requires_grad_(True),
            lambda x: pickle.dumps(x),
        ],
    )
    def test_what_may_have_been_written_to_goes_the_scripts_own_way(
        self, act: Any, batch: Any
    ) -> None:
        act(batch["x"])
        assert batch["x"].to(META).device == META
        assert torch.equal(batch["i"].to(META), batch["i"])

    @pytest.mark.parametrize(
        "move",
        [
            lambda x: x.to(META, torch.float64),
            lambda x: x.to(torch.float64),
            lambda x: x.to("cpu"),
            lambda x: x.clone().to(META),
            lambda x: x[:].to(META),
        ],
    )
    def test_other_moves_are_torchs_own(self, move: Any, batch: Any) -> None:
        there = move(batch["x"])
        assert there.device == META or there is batch["x"] or there.dtype == torch.float64

    def test_a_wrong_call_says_what_is_wrong(self, batch: Any) -> None:
        with pytest.raises((TypeError, RuntimeError)):
            batch["x"].to("nonsense")
        with pytest.raises(TypeError):
            batch["x"].to(META, nonsense=1)

    def test_layout_is_made_on_the_device(self, batch: Any) -> None:
        """Of a copy that is there, in the layout that is asked for."""
        x = batch["x"]
        assert torch.equal(x.to(META, memory_format=torch.contiguous_format), x)

    def test_the_hosts_tensor_stays_what_it_was(self, batch: Any) -> None:
        twin = copy.deepcopy(batch["x"])
        assert type(batch["x"]) is torch.Tensor
        assert vars(batch["x"]) == {}
        assert batch["x"].device.type == "cpu"
        assert torch.equal(twin, batch["x"])

    def test_batches_that_are_kept_are_answered_up_to_a_number(self, batch: Any) -> None:
        kept = [batch, *(next(self.iterator) for _ in range(MOST_UNCLAIMED + 1))]
        by_us = [moved(b)["x"] is not None for b in kept]
        assert by_us == [False] * 2 + [True] * MOST_UNCLAIMED

    def test_copies_of_dropped_batches_are_freed(self, batch: Any) -> None:
        known = self.applied._moves._known
        assert len(known) >= 2
        for _ in range(6):
            batch = next(self.iterator)
        del batch
        gc.collect()
        assert sum(one.answer is not None for one in known.values()) <= 2

    def test_inside_compiled_code(self, batch: Any) -> None:
        def f(x: torch.Tensor) -> torch.Tensor:
            return x.to(torch.float64).cpu().sin()

        torch._dynamo.reset()
        compiled = torch.compile(f, fullgraph=True, backend="eager")
        assert torch.equal(compiled(batch["x"]), f(batch["x"]))


class Pair(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor


class Encoding(UserDict):
    """As transformers' BatchEncoding: moves itself in place."""

    def to(self, device: Any) -> Encoding:
        self.data = {k: v.to(device) for k, v in self.data.items()}
        return self


@dataclass
class Record:
    x: torch.Tensor


class Graph:
    """As PyG's Data: tensors in attributes, moved by its own method."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: Any) -> Graph:
        return Graph(self.x.to(device))


def stacked(items: list[Any]) -> torch.Tensor:
    return torch.stack([item["x"] for item in items])


class TestKindsOfBatches:
    @pytest.mark.parametrize(
        ("collate", "move"),
        [
            (stacked, lambda b: b.to(META)),
            (lambda s: [stacked(s), [stacked(s)]], lambda b: b[1][0].to(META)),
            (lambda s: (stacked(s), "text", None), lambda b: b[0].to(META)),
            (lambda s: Pair(stacked(s), stacked(s)), lambda b: b.b.to(META)),
            (lambda s: Encoding(x=stacked(s)), lambda b: b.to(META)["x"]),
            (lambda s: Record(stacked(s)), lambda b: b.x.to(META)),
            (lambda s: Graph(stacked(s)), lambda b: b.to(META).x),
            (
                lambda s: pack_sequence([i["x"] for i in s]),
                lambda b: PackedSequence(b.data.to(META), b.batch_sizes).data,
            ),
        ],
    )
    def test_are_answered(self, collate: Any, move: Any, apply: Any) -> None:
        loader = loader_of(num_workers=0, collate_fn=collate)
        applied = apply(loader)
        applied.enable()
        places = [move(batch).device for batch in loader]
        assert places[:3] == [META] * 3
        assert places[3:] == [torch.device("cpu")] * 7

    def test_a_subclass_goes_its_own_way(self, apply: Any) -> None:
        class Image(torch.Tensor):
            pass

        loader = loader_of(
            num_workers=0, collate_fn=lambda s: [stacked(s).as_subclass(Image), stacked(s)]
        )
        apply(loader).enable()
        for k, (image, plain) in enumerate(loader):
            assert image.to(META).device == META
            assert type(image.to(META)) is Image
            assert (plain.to(META).device == META) == (k < 3)

    def test_a_batch_of_another_kind_goes_the_scripts_way(self, apply: Any) -> None:
        def collate(items: list[Any]) -> Any:
            return [stacked(items)] * 2 if items[0]["i"] == 20 else [stacked(items)]

        loader = loader_of(num_workers=0, collate_fn=collate)
        apply(loader).enable()
        places = [batch[0].to(META).device == META for batch in loader]
        assert places == [True] * 3 + [False] * 2 + [True] + [False] * 4


class TestFaults:
    @pytest.mark.parametrize("workers", [0, 1])
    def test_what_cannot_be_sent_switches_it_off(self, workers: int, apply: Any) -> None:
        bare = run(loader_of(num_workers=workers))
        loader = loader_of(num_workers=workers)
        applied = apply(loader, link=FakeLink(fails_at=2))
        assert hosts(run(loader, applied, lambda k: True)) == hosts(bare)
        assert "out of memory" in applied.failure()


class TestWithLoaderWorkers:
    @pytest.mark.parametrize("workers", [0, 1])
    @pytest.mark.parametrize("seed", range(3))
    def test_any_order_of_switching_is_the_bare_loaders(
        self, workers: int, seed: int, apply: Any
    ) -> None:
        def made() -> DataLoader[Any]:
            return loader_of(Squares(60), shuffle=True, num_workers=workers)

        torch.manual_seed(1)
        bare = run(made(), epochs=3)
        torch.manual_seed(1)
        loader, chance = made(), random.Random(seed)
        ahead = apply(loader)
        more = LoaderWorkers().apply(Scene(loaders=[loader], step_s=0.06, data_frac=0.6, cores=3))
        fixes = [ahead, more]
        seen = []
        for _ in range(3):
            for batch in loader:
                there = moved(batch)
                host = {
                    n: v.tolist() if isinstance(v, torch.Tensor) else v for n, v in batch.items()
                }
                assert there["x"] in (None, host["x"])
                seen.append(host)
                fix = chance.choice(fixes)
                fix.enable() if chance.random() < 0.6 else fix.disable()
                if len(seen) == 35:
                    fixes.remove(more)
                    more.undo()
        assert seen == hosts(bare)
        assert more.failure() is None
        assert ahead.failure() is None


class TestUndo:
    @pytest.mark.parametrize("workers", [0, 1])
    @pytest.mark.parametrize("at", [0, 5, 9])
    def test_in_the_middle_of_an_epoch_goes_on_with_the_same_batches(
        self, workers: int, at: int, apply: Any
    ) -> None:
        bare = run(loader_of(num_workers=workers))
        loader, link = loader_of(num_workers=workers), FakeLink()
        applied = apply(loader, link=link)
        applied.enable()
        iterator, seen = iter(loader), []
        for k, batch in enumerate(iterator):
            seen.append(batch["i"].tolist())
            if k == at:
                applied.undo()
                assert link.closed
            assert (moved(batch)["x"] is None) or k < at
        assert seen == [host["i"] for host in hosts(bare)]
        assert not {"_next_data", "_try_put_index", "_next_index"} & set(vars(iterator))

    def test_under_another_wrapper_ours_lets_everything_through(self, apply: Any) -> None:
        loader = loader_of(num_workers=0)
        applied = apply(loader)
        ours = torch.Tensor.to
        theirs = lambda self, *a, **k: ours(self, *a, **k)  # noqa: E731
        torch.Tensor.to = theirs
        try:
            applied.undo()
            assert torch.Tensor.to is theirs
            assert torch.ones(2).to(torch.float64).dtype == torch.float64
        finally:
            del torch.Tensor.to


class FakeEvent:
    def __init__(self, log: list[str]) -> None:
        self.log, self.passed = log, False

    def record(self, stream: Any) -> None:
        self.log.append(f"{stream.name} records")

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.log.append("host waits")
        self.passed = True


class FakeStream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_event(self, event: Any) -> None:
        self.log.append(f"{self.name} waits")

    def synchronize(self) -> None:
        pass


class FakeSurface:
    """What the link needs of torch.cuda; its device is cpu:0, and copies are done at once."""

    def __init__(self, device: Any) -> None:
        self.device, self.log = torch.device("cpu:0"), []
        self.current = FakeStream("compute", self.log)
        self.pinned = True
        self.recorded: list[str] = []

    def new_stream(self) -> FakeStream:
        return FakeStream("copy", self.log)

    def current_stream(self) -> FakeStream:
        return self.current

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def event(self, timing: bool = False) -> FakeEvent:
        return FakeEvent(self.log)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return self.pinned

    def record(self, tensor: torch.Tensor, stream: FakeStream) -> None:
        self.recorded.append(stream.name)


class TestTheWayToADevice:
    """The order of fences; what they do on a device is in tests/fixes/test_on_a_gpu.py."""

    @pytest.fixture
    def way(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        monkeypatch.setattr("flopwise.kit.input.cuda_surface.CudaSurface", FakeSurface)
        way = CudaWay(torch.device("cpu:0"), 2)
        self.x = torch.arange(6.0)
        self.sent = way.send([self.x])
        self.copy = way.hand_over(self.sent)[0]
        self.log = way._cuda.log
        yield way
        way.close()

    def test_a_copy_is_waited_for_on_the_stream_that_takes_the_batch(self, way: Any) -> None:
        assert torch.equal(self.copy, self.x)
        assert self.copy.data_ptr() != self.x.data_ptr()
        assert self.log == ["copy records", "compute waits"]
        way.meet(self.sent, self.copy, Move(way._device, None, False, None))
        assert self.log == ["copy records", "compute waits"]
        assert way._cuda.recorded == ["compute"]

    def test_and_on_another_that_moves_it(self, way: Any) -> None:
        way._cuda.current = FakeStream("side", self.log)
        way.meet(self.sent, self.copy, Move(way._device, None, False, None))
        assert self.log[-1] == "side waits"
        assert way._cuda.recorded == ["compute", "side"]

    def test_the_host_waits_only_where_it_may_write_to_the_source_next(self, way: Any) -> None:
        way.meet(self.sent, self.copy, Move(way._device, None, True, None))
        assert self.log[-1] == "host waits"
        way.meet(self.sent, self.copy, Move(way._device, None, True, None))
        assert self.log.count("host waits") == 1

    def test_not_where_the_source_was_copied_before(
        self, way: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        way._cuda.pinned = False
        monkeypatch.setattr(
            "flopwise.kit.input.staging.Stage.write", lambda stage, ts: [t.clone() for t in ts]
        )
        sent = way.send([self.x])
        copy = way.hand_over(sent)[0]
        before = list(self.log)
        way.meet(sent, copy, Move(way._device, None, True, None))
        assert self.log == before

    def test_what_was_sent_in_inference_mode_is_an_ordinary_tensor(self, way: Any) -> None:
        with torch.inference_mode():
            copy = way.hand_over(way.send([self.x]))[0]
        assert not copy.is_inference()
