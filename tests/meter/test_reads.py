"""The rule that tells which ops make the host wait, on tensors that are not there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from flopwise.meter.reads import (
    MASK_READ,
    MASK_WRITE,
    PAGEABLE,
    SCALAR,
    SIZE,
    SMALL_COPY,
    TO_HOST,
    wait_of,
)

MB = 1 << 20


@dataclass
class Device:
    type: str


class Fake:
    """As much of a tensor as a copy is judged by."""

    def __init__(self, device: str, n_bytes: int, pinned: bool = False) -> None:
        self.device = Device(device)
        self._bytes = n_bytes
        self._pinned = pinned

    def numel(self) -> int:
        return self._bytes // 4

    def element_size(self) -> int:
        return 4

    def is_pinned(self) -> bool:
        return self._pinned


def host(n_bytes: int, pinned: bool = False) -> Fake:
    return Fake("cpu", n_bytes, pinned)


def gpu(n_bytes: int) -> Fake:
    return Fake("cuda", n_bytes)


@pytest.mark.parametrize(
    ("source", "target", "non_blocking", "kind"),
    [
        (host(32 * MB), gpu(32 * MB), True, PAGEABLE),  # the flag has no effect
        (host(32 * MB, pinned=True), gpu(32 * MB), True, None),  # as it should be
        (host(32 * MB), gpu(32 * MB), False, None),  # asked to wait, of a batch: no finding
        (host(1024), gpu(1024), False, SMALL_COPY),  # a value parked on the host
        (host(1024), gpu(1024), True, SMALL_COPY),
        (host(1024, pinned=True), gpu(1024), True, None),
        (gpu(4), host(4), False, TO_HOST),
        (gpu(MB), host(MB), True, TO_HOST),  # into pageable memory
        (gpu(MB), host(MB, pinned=True), True, None),
        (gpu(MB), gpu(MB), False, None),
        (host(MB), host(MB), False, None),  # another dtype
    ],
)
def test_copies(source: Any, target: Any, non_blocking: bool, kind: str | None) -> None:
    moved = wait_of("aten::_to_copy", (source,), {"non_blocking": non_blocking}, target)
    copied = wait_of("aten::copy_", (target, source, non_blocking), {}, target)
    for wait in (moved, copied):
        assert (wait.kind if wait else None) == kind
        assert wait is None or wait.bytes == source.numel() * 4
        assert wait is None or wait.device == "cuda"


X = torch.zeros(4, 6)
ROWS, MASK = torch.tensor([1, 2]), torch.tensor([True, False, True, False])
ONE, MANY = torch.tensor(0.0), torch.zeros(2, 6)


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "kind"),
    [
        ("aten::_local_scalar_dense", (ONE,), {}, SCALAR),
        ("aten::equal", (X, X), {}, SCALAR),
        ("aten::nonzero", (X,), {}, SIZE),
        ("aten::_unique2", (X,), {}, SIZE),
        ("aten::unique_consecutive", (X,), {}, SIZE),
        ("aten::masked_select", (X, X > 0), {}, MASK_READ),
        ("aten::index", (X, [MASK]), {}, MASK_READ),
        ("aten::index", (X, [None, ROWS]), {}, None),
        ("aten::index", (X, [MASK.to(torch.uint8)]), {}, MASK_READ),
        ("aten::index_put_", (X, [MASK], MANY), {}, MASK_WRITE),
        ("aten::index_put_", (X, [MASK], ONE), {}, None),  # a masked fill
        ("aten::index_put_", (X, [MASK], ONE, True), {}, MASK_WRITE),  # that adds: it is none
        ("aten::index_put_", (X, [MASK, ROWS], ONE), {}, MASK_WRITE),
        ("aten::index_put_", (X, [ROWS], MANY), {}, None),
        ("aten::repeat_interleave", (ROWS,), {}, SIZE),
        ("aten::repeat_interleave", (ROWS,), {"output_size": 3}, None),
        ("aten::where", (MASK, ONE, ONE), {}, None),
        ("aten::masked_fill", (X, X > 0, ONE), {}, None),
        ("aten::add", (X, X), {}, None),
    ],
)
def test_reads_and_sizes(name: str, args: Any, kwargs: Any, kind: str | None) -> None:
    wait = wait_of(name, args, kwargs, None)
    assert (wait.kind if wait else None) == kind


def test_every_op_of_the_list_is_an_op_of_this_torch() -> None:
    from flopwise.meter import reads

    listed = {*reads._KINDS, *reads._COPIES, *reads._INDEX, *reads._INDEX_PUT}
    missing = [n for n in listed if not hasattr(torch.ops.aten, n.removeprefix("aten::"))]
    assert missing == []


def test_what_the_optimizer_and_the_loader_ask_for_is_no_wait(measure: Any) -> None:
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    lengths = torch.arange(64)

    class Lengths(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> torch.Tensor:
            assert lengths[index].item() == index  # of a tensor that any job has on the host
            return torch.ones(4)

    net = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(net.parameters())

    def train() -> None:
        for x in DataLoader(Lengths(), batch_size=4, shuffle=True):
            optimizer.zero_grad()
            net(x).sum().backward()
            optimizer.step()

    surroundings = measure(train, count=True).record.surroundings
    assert surroundings.read_steps == 1
    assert {(r.on_host, r.count) for r in surroundings.reads} == {(True, 2)}  # weight and bias


def test_the_script_is_named_where_a_package_reads(
    measure: Any, tmp_path: Any, monkeypatch: Any
) -> None:
    import importlib
    import sys

    from torch import nn

    package = tmp_path / "site-packages"
    package.mkdir()
    (package / "loud_library.py").write_text("def show(loss):\n    return loss.item()\n")
    monkeypatch.syspath_prepend(str(package))
    library = importlib.import_module("loud_library")
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def train() -> None:
        for _ in range(8):
            loss = net(torch.ones(2, 4)).sum()
            loss.backward()
            optimizer.step()
            library.show(loss.detach())

    (seen,) = measure(train, count=True).record.surroundings.reads
    sys.modules.pop("loud_library")
    assert seen.where.endswith("loud_library.py:2")
    assert "test_reads.py:" in seen.caller


def test_printing_is_watched_in_the_counted_step_alone(measure: Any) -> None:
    from torch import nn

    original = torch._tensor_str._str
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    watched = []

    def train() -> None:
        for _ in range(8):
            net(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            watched.append(torch._tensor_str._str is not original)

    measure(train, count=True)
    assert watched.count(True) == 1
    assert torch._tensor_str._str is original


def test_a_read_in_a_hook_of_the_backward_pass_is_seen(measure: Any) -> None:
    from torch import nn

    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def train() -> None:
        net.weight.register_hook(lambda grad: grad * (1.0 if grad.sum().item() else 2.0))
        for _ in range(8):
            net(torch.ones(2, 4)).sum().backward()
            optimizer.step()

    (seen,) = measure(train, count=True).record.surroundings.reads
    assert "test_reads.py:" in seen.where
    assert seen.count == 1


def test_small_copies_are_parked_values_inside_a_forward_and_a_part_of_the_batch_outside(
    measure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No copy between devices can run on a CPU: a cosine stands for it."""
    from torch import nn

    from flopwise.meter import reads

    def stand_in(name: str, args: Any, kwargs: Any, out: Any) -> Any:
        return reads.Wait(SMALL_COPY, "cuda", 1, 4) if name == "aten::cos" else None

    monkeypatch.setattr(reads, "wait_of", stand_in)

    class Net(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * torch.cos(torch.ones(()))

    net = Net(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def train() -> None:
        for _ in range(8):
            labels = torch.cos(torch.ones(2, 1))
            (net(torch.ones(2, 4)) - labels).sum().backward()
            optimizer.step()

    (seen,) = measure(train, count=True).record.surroundings.reads
    assert (seen.kind, seen.count) == (SMALL_COPY, 1)
