"""The meta device stands for a device: what is sent there is not on the host."""

from __future__ import annotations

import copy
import gc
import pickle

import torch

from flopwise.fixes.unpadding.host_copies import HostCopies

ORIGINALS = {name: torch.Tensor.__dict__.get(name) for name in ("to", "cuda")}


def mask() -> torch.Tensor:
    return torch.tensor([[1, 1, 0], [1, 0, 0]])


def known(sent: torch.Tensor, copies: HostCopies) -> list[list[int]] | None:
    values = copies.of(sent)
    return None if values is None else values.tolist()


class TestOf:
    def test_a_tensor_that_was_sent(self) -> None:
        copies = HostCopies()
        copies.watch()
        sent = mask().to("meta")
        assert known(sent, copies) == mask().tolist()
        copies.unwatch()

    def test_the_source_may_change_afterwards(self) -> None:
        copies = HostCopies()
        copies.watch()
        source = mask()
        sent = source.to(device="meta", non_blocking=True)
        source.zero_()
        assert known(sent, copies) == mask().tolist()
        copies.unwatch()

    def test_a_copy_that_was_written_is_not_known(self) -> None:
        copies = HostCopies()
        copies.watch()
        sent = mask().to("meta")
        sent[0, 0] = 0
        assert copies.of(sent) is None
        copies.unwatch()

    def test_what_is_computed_from_a_copy_is_not_known(self) -> None:
        copies = HostCopies()
        copies.watch()
        sent = mask().to("meta")
        assert copies.of(sent[:, :2]) is None
        assert copies.of(sent.clone()) is None
        assert copies.of(sent.bool()) is None
        copies.unwatch()

    def test_other_dtypes_shapes_and_places_are_not_remembered(self) -> None:
        copies = HostCopies()
        copies.watch()
        for sent in (
            mask().float().to("meta"),
            mask()[0].to("meta"),
            mask().to("meta", torch.int32),
        ):
            assert copies.of(sent) is None
        copies.unwatch()

    def test_a_tensor_on_the_host_is_itself(self) -> None:
        on_host = mask()
        assert HostCopies().of(on_host) is on_host

    def test_nothing_is_kept_alive(self) -> None:
        copies = HostCopies()
        copies.watch()
        sent = mask().to("meta")
        assert len(copies._known) == 1
        del sent
        gc.collect()
        assert len(copies._known) == 0
        copies.unwatch()


class TestUnwatch:
    def test_torch_is_as_it_was(self) -> None:
        copies = HostCopies()
        copies.watch()
        copies.watch()
        assert torch.Tensor.__dict__.get("to") is not ORIGINALS["to"]
        copies.unwatch()
        copies.unwatch()
        assert {n: torch.Tensor.__dict__.get(n) for n in ORIGINALS} == ORIGINALS

    def test_what_was_sent_before_is_forgotten(self) -> None:
        copies = HostCopies()
        copies.watch()
        sent = mask().to("meta")
        copies.unwatch()
        assert copies.of(sent) is None

    def test_two_in_any_order(self) -> None:
        one, two = HostCopies(), HostCopies()
        one.watch()
        two.watch()
        one.unwatch()
        sent = mask().to("meta")
        assert one.of(sent) is None
        assert known(sent, two) == mask().tolist()
        two.unwatch()
        assert {n: torch.Tensor.__dict__.get(n) for n in ORIGINALS} == ORIGINALS


def test_tensors_are_copied_and_pickled_as_ever() -> None:
    copies = HostCopies()
    copies.watch()
    tensor = mask()
    for other in (copy.deepcopy(tensor), pickle.loads(pickle.dumps(tensor))):
        assert torch.equal(other, tensor)
    assert torch.equal(tensor.to(torch.int32), tensor.int())
    assert tensor.to(tensor.dtype) is tensor
    copies.unwatch()


def test_compiled_code_sends_as_ever() -> None:
    copies = HostCopies()
    copies.watch()

    def widen(x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.float64) + 1

    found = torch.compile(widen, backend="eager", fullgraph=True)(mask())
    copies.unwatch()
    assert torch.equal(found, mask().double() + 1)
