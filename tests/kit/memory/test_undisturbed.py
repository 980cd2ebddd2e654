from __future__ import annotations

import random
import warnings

import pytest
import torch
from torch import nn

from flopwise.errors import MemoryWarning
from flopwise.kit.memory.undisturbed import device_of, undisturbed


def test_gradients_buffers_and_random_numbers_are_put_back_even_after_an_error() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    gradient = net[0].weight.grad = torch.ones(3, 3)
    mean = net[1].running_mean.clone()
    state = torch.get_rng_state()

    def run() -> None:
        with undisturbed(net):
            assert net[0].weight.grad is None
            net(torch.randn(5, 3)).sum().backward()
            assert not torch.equal(net[1].running_mean, mean)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    assert net[0].weight.grad is gradient
    assert net[0].bias.grad is None
    assert torch.equal(net[1].running_mean, mean)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_step_of_the_optimizer_is_warned_of() -> None:
    net = nn.Linear(3, 3)

    def train() -> None:
        with undisturbed(net), torch.no_grad():
            net.weight.add_(1)

    with pytest.warns(MemoryWarning, match="without a step of the optimizer"):
        train()
    with warnings.catch_warnings(), undisturbed(net):
        warnings.simplefilter("error")
        net(torch.ones(1, 3)).sum().backward()


def test_the_device() -> None:
    assert device_of(nn.Linear(1, 1, device="meta")).type == "meta"
    assert device_of(nn.ReLU()).type == "cpu"


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("ones", torch.ones(1).expand(4))
        self.register_buffer("late", None)

    def forward(self) -> None:
        self.seen.add_(1)
        self.seen = self.seen + 1
        self.late = torch.ones(3)


def test_a_buffer_that_is_made_anew_in_each_forward_is_the_old_one_again() -> None:
    module = Counts()
    seen, ones = module.seen, module.ones
    with undisturbed(module):
        module()
    assert module.seen is seen
    assert module.seen.item() == 0
    assert module.ones is ones
    assert module.late is None


def test_pythons_random_numbers_are_put_back() -> None:
    state = random.getstate()
    with undisturbed(nn.ReLU()):
        random.random()
    assert random.getstate() == state


def test_buffers_that_were_made_in_inference_mode() -> None:
    with torch.inference_mode():
        module = Counts()
    with undisturbed(module), torch.inference_mode():
        module()
    assert module.seen.item() == 0


def test_gradients_in_a_buffer_of_others_have_their_values_again() -> None:
    net, bucket = nn.Linear(3, 3), torch.ones(12)
    net.weight.grad, net.bias.grad = bucket[:9].view(3, 3), bucket[9:]
    gradients = [p.grad for p in net.parameters()]
    with undisturbed(net):
        bucket.zero_()  # as a bucket of DistributedDataParallel is written in its backward
    assert all(p.grad is g for p, g in zip(net.parameters(), gradients, strict=True))
    assert torch.equal(bucket, torch.ones(12))
