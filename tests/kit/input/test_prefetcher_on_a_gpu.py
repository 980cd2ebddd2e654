"""Batches on their way to a CUDA device: what only real streams and real page-locked memory can show."""

from __future__ import annotations

import importlib.util
import time
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from flopwise.kit.input import (
    IMAGENET,
    Normalize,
    PinnedPool,
    Prefetcher,
    RandomResizedCropBatch,
    Watch,
    collate_into,
    decode_jpegs,
)
from flopwise.kit.input.checksum import device_checksum, host_checksum
from flopwise.kit.input.cuda_surface import CudaSurface
from flopwise.kit.input.registration import Registration
from flopwise.kit.nested import tensors_in

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(280, method="thread"),
]

CUDA = torch.device("cuda")


class Items(Dataset[Any]):
    def __init__(self, n: int, width: int = 1000) -> None:
        self.n, self.width = n, width

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        image = torch.full((3, 8, 8), i % 256, dtype=torch.uint8)
        return {"x": torch.full((self.width,), float(i)), "image": image, "i": i}


def busy(seconds: float) -> None:
    """Keeps the current stream busy for about so long."""
    torch.cuda._sleep(int(seconds * 1.5e9))


def loader_of(path: str, n: int, width: int = 1000) -> tuple[Any, dict[str, Any]]:
    """Returns a loader and the options of its prefetcher, by the path its batches take."""
    data = Items(n, width)
    options: dict[str, Any] = {"reuse": path.endswith("reuse")}
    if path.startswith("pool"):
        pool = PinnedPool(4 * (4 * width + 4096), 16, checksums=True)
        return DataLoader(data, batch_size=4, num_workers=2, collate_fn=collate_into(pool)), options
    pinned = path.startswith("pinned")
    return DataLoader(data, batch_size=4, num_workers=2, pin_memory=pinned), options


PATHS = ["staged", "pinned", "pool", "staged reuse", "pinned reuse", "pool reuse"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("thread", [True, False])
def test_every_path_brings_every_bit(path: str, thread: bool) -> None:
    loader, options = loader_of(path, 400)
    batches = Prefetcher(loader, CUDA, consistency=True, thread=thread, **options)
    for _ in range(2):
        seen = 0
        for batch in batches:
            wanted = torch.arange(seen, seen + 4)
            if seen % 40 == 0:
                busy(0.002)
            assert torch.equal(batch["i"].cpu(), wanted)
            assert torch.equal(batch["x"], wanted.to(CUDA).float()[:, None].expand(4, 1000))
            assert bool((batch["image"] == (wanted % 256).to(CUDA).view(4, 1, 1, 1)).all())
            seen += 4
        assert seen == 400
    assert batches.findings == []
    assert batches.judge is not None
    assert batches.judge.checked == 400
    counts = batches.counts
    if path.startswith("staged"):
        assert counts.staged_batches == 200
        assert counts.host_copied_bytes >= counts.moved_bytes
    else:
        assert counts.in_place_batches == 200
        assert counts.host_copied_bytes == 0
    batches.close()


def test_the_pool_is_page_locked_and_read_in_place_by_workers_forked_after_cuda_began() -> None:
    torch.ones(1, device=CUDA)
    pool = PinnedPool(1 << 20, 8)
    assert pool.page_locked, pool.refusal
    loader = DataLoader(
        Items(32),
        batch_size=4,
        num_workers=2,
        collate_fn=collate_into(pool),
        multiprocessing_context="fork",
    )
    for item in loader:
        batch = pool.unpack(item)
        assert all(t.is_pinned() for t in tensors_in(batch))
    del batch, item
    assert pool.held == 0


def test_a_refused_registration_leaves_no_error_for_the_next_kernel() -> None:
    memory = torch.zeros(4096)
    held = Registration(8, 4096, memory, None)
    assert not held.locked
    assert "cudaHostRegister" in held.error
    assert torch.ones(3, device=CUDA).sum().item() == 3


#: Way in which a fence is broken: whether buffers are owned, and what is slow so that it surely shows.
FENCES = {
    "read before the copy": (False, "copies"),  # a copy is queued behind 15 ms of other work
    "given back before the last use": (False, "steps"),  # memory goes to the next copy at once
    "written before the last use": (True, "steps"),
}


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("way", list(FENCES))
def test_a_broken_fence_is_caught_and_a_whole_one_is_quiet(
    way: str, broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reuse, slow = FENCES[way]
    sources = [torch.full((1 << 20,), float(k)).pin_memory() for k in range(8)]
    if broken and way == "given back before the last use":
        monkeypatch.setattr(CudaSurface, "record", lambda *_: None)

    def late(batch: Any) -> Any:
        busy(0.02)  # on the copy stream: the next batch's copy comes behind it
        return batch

    batches = Prefetcher(
        [sources[k % 8] for k in range(24)],
        CUDA,
        2,
        consistency="report",
        reuse=reuse,
        transform=late if slow == "copies" else None,
        _break_fence=broken and not way.startswith("given back"),
    )
    for batch in batches:
        if slow == "steps":
            busy(0.01)  # a copy that does not wait overtakes the reader
        total = batch.sum()
        del batch
    total.item()
    batches.close()
    found = batches.findings
    if not broken:
        assert found == []
        return
    assert len({f.step for f in found}) >= 8, [str(f) for f in found]
    kinds = {f.kind for f in found}
    if slow == "copies":  # what was there before: another batch, or memory that never held one
        assert kinds <= {"overwritten", "duplicated", "out of order"}
    else:
        assert kinds == {"overwritten"}


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("pinned", [False, True])
def test_slices_and_repeated_elements_are_checked_like_any(reuse: bool, pinned: bool) -> None:
    def loader() -> Any:
        for k in range(12):
            tokens = torch.arange(8 * 65).view(8, 65) + k
            tokens = tokens.pin_memory() if pinned else tokens
            yield tokens[:, :-1], tokens[:, 1:], torch.tensor([k]).expand(9)

    batches = Prefetcher(loader(), CUDA, 2, reuse=reuse, consistency=True)
    for k, (x, y, z) in enumerate(batches):
        assert torch.equal(x[:, 1:], y[:, :-1])
        assert int(x[0, 0]) == int(z[8]) == k
    assert batches.findings == []


def test_a_stream_that_is_apart_is_none_of_those_handed_out_again_and_again() -> None:
    apart = CudaSurface(torch.device("cuda:0")).stream_apart()
    ordinary = {torch.cuda.Stream().cuda_stream for _ in range(64)}
    assert len(ordinary) <= 32
    assert apart.cuda_stream not in ordinary


def test_batches_that_are_dropped_while_they_are_read_are_not_overwritten() -> None:
    totals = []
    loader = [torch.full((1 << 20,), float(k)) for k in range(60)]
    for batch in Prefetcher(loader, CUDA, 3):
        busy(0.003)
        totals.append(batch.double().sum())
        del batch
    assert [int(t.item()) for t in totals] == [k << 20 for k in range(60)]


@pytest.mark.parametrize("reuse", [False, True])
def test_a_loop_on_a_stream_of_its_own(reuse: bool) -> None:
    own = torch.cuda.Stream()
    loader = [torch.full((1 << 20,), float(k)) for k in range(40)]
    batches = Prefetcher(loader, CUDA, 2, reuse=reuse, stream=own, consistency=True)
    totals = []
    for batch in batches:
        with torch.cuda.stream(own):
            busy(0.003)
            totals.append(batch.double().sum())
        del batch
    own.synchronize()
    assert [int(t.item()) for t in totals] == [k << 20 for k in range(40)]
    assert batches.findings == []


def test_copies_of_two_streams_bring_every_bit_to_owned_buffers_and_new_ones() -> None:
    sources = [torch.full((1 << 20,), float(k)).pin_memory() for k in range(8)]
    for reuse in (False, True):
        totals = []
        batches = Prefetcher([sources[k % 8] for k in range(64)], CUDA, 3, reuse=reuse)
        for k, batch in enumerate(batches):
            busy(0.002 * (k % 3))
            totals.append(batch.double().sum())
            del batch
        assert [int(t.item()) for t in totals] == [(k % 8) << 20 for k in range(64)]
        times = batches.times
        assert times.copies_s + times.steps_s > 0.02  # reading waited for steps, not the loop
        batches.close()


def test_owned_buffers_stay_where_they_are() -> None:
    addresses = []
    for batch in Prefetcher([torch.ones(1000)] * 20, CUDA, 2, reuse=True):
        addresses.append(batch.data_ptr())
        del batch
    assert len(set(addresses)) <= 4


def test_a_ring_of_ones_own_without_a_fence_is_caught_and_with_one_is_quiet() -> None:
    """The loop over buffers[i % 3] with a stream for copies and one for computing."""
    sources = [torch.full((8 << 20,), float(k)).pin_memory() for k in range(6)]

    def run(fenced: bool) -> list[Any]:
        buffers = [torch.zeros(8 << 20, device=CUDA) for _ in range(3)]
        torch.cuda.synchronize()
        watch = Watch(buffers)
        copies, computing = torch.cuda.Stream(), torch.cuda.Stream()
        used: list[Any] = [None] * 3
        for i in range(24):
            with torch.cuda.stream(copies):
                if fenced and used[i % 3] is not None:
                    copies.wait_event(used[i % 3])
                buffers[i % 3].copy_(sources[i % 6], non_blocking=True)
                watch.wrote(i % 3, i)
                copied = torch.cuda.Event()
                copied.record()
            with torch.cuda.stream(computing):
                if fenced:
                    computing.wait_event(copied)
                watch.reading(i % 3, i)
                busy(0.004)
                buffers[i % 3].mul_(1.0)
                watch.done(i % 3, i)
                used[i % 3] = torch.cuda.Event()
                used[i % 3].record()
        return list(watch.check(wait=True))

    assert run(fenced=True) == []
    assert run(fenced=False)


def test_images_cross_as_bytes_and_are_the_same_to_the_bit() -> None:
    images = torch.randint(0, 256, (16, 3, 32, 32), dtype=torch.uint8)
    wanted = Normalize()(images)
    batches = Prefetcher(
        [images] * 3, CUDA, normalize=IMAGENET, channels_last=True, consistency=True
    )
    for got in batches:
        assert torch.equal(got.cpu(), wanted)
        assert got.is_contiguous(memory_format=torch.channels_last)
    assert batches.counts.moved_bytes == 3 * images.nbytes


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
def test_tensors_that_are_more_than_bytes_are_moved_too() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged)
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    batch = [torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr(), nested, packed]
    got = next(iter(Prefetcher([batch], CUDA)))
    assert torch.equal(got[0].to_dense().cpu(), torch.eye(3))
    assert torch.equal(got[1].to_dense().cpu(), torch.eye(3))
    assert got[2].values().is_cuda
    assert got[3].data.is_cuda


def test_the_checksum_is_that_of_the_host() -> None:
    tensors = [
        torch.randint(-(2**60), 2**60, (5000,)),
        torch.rand(7, 3),
        torch.zeros(0),
        torch.randint(0, 9, (4099,), dtype=torch.uint8),
    ]
    there = [t.to(CUDA) for t in tensors]
    assert int(device_checksum(there, CUDA)) == host_checksum(tensors)


def test_a_barrier_waits_for_both_streams_and_says_what_it_cost() -> None:
    batches = Prefetcher([torch.ones(1000)] * 5, CUDA)
    iterator = iter(batches)
    next(iterator)
    busy(0.05)
    begun = time.perf_counter()
    took = batches.barrier(say=False)
    assert took.streams == 3  # two of copies
    assert 0.02 < took.cost_s <= time.perf_counter() - begun
    assert torch.cuda.current_stream().query()
    batches.close()


def test_a_graph_is_captured_while_batches_are_held() -> None:
    static = torch.zeros(1000, device=CUDA)
    batches = Prefetcher([torch.full((1000,), float(k)) for k in range(50)], CUDA, 3, reuse=True)
    iterator = iter(batches)
    static.copy_(next(iterator))
    (static * 2).sum()  # what is allocated and chosen once, before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with batches.held(), torch.cuda.graph(graph):
        total = (static * 2).sum()
    found = []
    for batch in iterator:
        static.copy_(batch)
        graph.replay()
        found.append(total.clone())
    assert [int(t.item()) for t in found] == [2000 * k for k in range(1, 50)]


def test_the_host_does_not_run_ahead_of_the_device_without_end() -> None:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    nbytes = 16 << 20
    source = torch.ones(nbytes // 4).pin_memory()
    for batch in Prefetcher([source] * 60, CUDA, 2):
        busy(0.01)
        batch.sum()
        del batch
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= 12 * nbytes  # 60 without a bound


def test_the_wait_is_the_devices() -> None:
    def loader() -> Any:
        for k in range(12):
            time.sleep(0.02)
            yield torch.full((1000,), float(k))

    slow = Prefetcher(loader(), CUDA, measure_wait=True)
    for batch in slow:
        batch.sum()
    assert sorted(slow.waits_s())[6] > 0.01
    quick = Prefetcher([torch.ones(1000)] * 30, CUDA, measure_wait=True)
    for batch in quick:
        busy(0.005)
        batch.sum()
    assert sorted(quick.waits_s()[3:])[13] < 0.001


def test_crops_on_the_device_are_those_of_the_host() -> None:
    images = [torch.randint(0, 256, (3, 40 + 5 * k, 60), dtype=torch.uint8) for k in range(5)]
    crop = RandomResizedCropBatch(24, seed=1)
    boxes = crop.draw(torch.tensor([i.shape[-2:] for i in images]))
    there = crop.apply([i.to(CUDA) for i in images], boxes).cpu()
    assert (there - crop.apply(images, boxes)).abs().max() < 1e-2  # of 255


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="needs torchvision")
def test_jpegs_are_decoded_on_the_device() -> None:
    io: Any = importlib.import_module("torchvision.io")
    ramp = torch.arange(64, dtype=torch.uint8).mul(3)[None, None].expand(3, 48, 64).contiguous()
    files = [io.encode_jpeg(ramp, quality=95) for _ in range(4)]
    there = decode_jpegs(files, CUDA)
    here = decode_jpegs(files, "cpu")
    for a, b in zip(there, here, strict=True):
        assert a.is_cuda
        assert (a.cpu().int() - b.int()).abs().max() <= 8  # the two decoders round differently
