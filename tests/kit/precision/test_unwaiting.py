"""Steps that the device skips: torch's fused optimizers get what GradScaler would give them, and nothing is read."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.utils._python_dispatch import TorchDispatchMode

from flopwise.errors import PrecisionWarning
from flopwise.kit.precision import DynamicScaler, unwaiting


class Reads(TorchDispatchMode):
    """Counts reads of a tensor by the host: on a CUDA device each would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        self.count += name in ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal")
        return func(*args, **(kwargs or {}))


def reads_per_step(scaler: GradScaler, optimizer: torch.optim.Optimizer, steps: int = 20) -> float:
    (weight,) = optimizer.param_groups[0]["params"]
    counts = []
    for _ in range(steps):
        with Reads() as reads:
            optimizer.zero_grad()
            scaler.scale((weight * 2.0).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        counts.append(reads.count)
    return sum(counts[1:]) / (steps - 1)


def weight() -> nn.Parameter:
    return nn.Parameter(torch.ones(4))


@pytest.mark.parametrize("schedule", ["magnitude", "growth"])
def test_a_fused_step_reads_nothing(schedule: str) -> None:
    scaler = DynamicScaler("cpu", schedule=schedule, review_steps=5)
    # fused on a CPU reads nothing, and neither does the scaler, reviews included
    assert reads_per_step(scaler, torch.optim.SGD([weight()], 0.1, fused=True)) == 0


def test_a_masked_step_reads_nothing_where_gradscaler_reads_once() -> None:
    optimizer = torch.optim.SGD([weight()], 0.1, momentum=0.9)
    assert reads_per_step(DynamicScaler("cpu", unfused="masked"), optimizer) == 0
    assert reads_per_step(DynamicScaler("cpu", unfused="wait"), optimizer) == 1
    assert reads_per_step(GradScaler("cpu"), optimizer) == 1


def test_a_fused_optimizer_keeps_nothing_of_the_scaler() -> None:
    scaler, param = DynamicScaler("cpu"), weight()
    optimizer = torch.optim.AdamW([param], 0.1, fused=True)
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


def test_an_error_in_a_fused_step_leaves_it_clean() -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise ValueError("as it is")

    scaler, param = DynamicScaler("cpu"), weight()
    optimizer = Failing([param], 0.1, fused=True)
    scaler.scale(param.sum()).backward()
    with pytest.raises(ValueError, match="as it is"):
        scaler.step(optimizer)
    assert not hasattr(optimizer, "grad_scale")


def test_a_scale_of_the_users_own_is_multiplied_as_by_gradscaler() -> None:
    def trained(scaler: GradScaler) -> torch.Tensor:
        param = weight()
        optimizer: Any = torch.optim.SGD([param], 0.1, fused=True)
        scaler.scale(param.sum() * 4).backward()
        optimizer.grad_scale = torch.tensor(4.0)
        scaler.step(optimizer)
        return param.detach()

    assert torch.equal(trained(DynamicScaler("cpu", 64.0)), trained(GradScaler("cpu", 64.0)))


def test_an_optimizer_that_takes_the_scaler_is_given_it() -> None:
    class Old(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure: Any = None, grad_scaler: Any = None) -> Any:
            self.given = grad_scaler

    scaler, param = DynamicScaler("cpu"), weight()
    optimizer = Old([param], 0.1)
    optimizer._step_supports_amp_scaling = True
    scaler.scale(param.sum()).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own
        scaler.step(optimizer)
    assert optimizer.given is scaler


def test_a_masked_optimizer_waits_for_its_first_step_only() -> None:
    scaler, param = DynamicScaler("cpu", unfused="masked"), weight()
    optimizer = torch.optim.SGD([param], 0.1, momentum=0.9)
    counts = []
    for _ in range(3):
        with Reads() as reads:
            optimizer.zero_grad()
            scaler.scale(param.sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        counts.append(reads.count)
    assert counts == [1, 0, 0]  # momentum is made by a first step


def test_without_memory_for_a_copy_it_waits_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(optimizer: torch.optim.Optimizer) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(unwaiting, "copied", full)
    scaler, param = DynamicScaler("cpu", unfused="masked"), weight()
    optimizer = torch.optim.SGD([param], 0.1)
    with pytest.warns(PrecisionWarning, match="no memory for a copy of what SGD steps") as said:
        assert reads_per_step(scaler, optimizer, steps=5) == 1
    assert len(said) == 1
    assert param.detach().tolist() == pytest.approx([0.0] * 4, abs=1e-6)  # five steps of 0.2


def test_nothing_is_said_of_optimizers_that_do_not_wait() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrecisionWarning)
        reads_per_step(DynamicScaler("cpu", unfused="masked"), torch.optim.SGD([weight()], 0.1))
