"""Steps that are taken back on the device: to the bit, and only where that can be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from flopwise.kit.precision import masked_step as masked_step_module
from flopwise.kit.precision.masked_step import copied, has_state, masked_step, unmaskable

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
MAKERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, 0.1, capturable=False),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.1, momentum=0.5),
}


def params(seed: int = 0) -> list[nn.Parameter]:
    torch.manual_seed(seed)
    made = [nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(2, 2))]
    for p in made:
        p.grad = torch.randn_like(p)
    return made


def values(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    state = [
        v for per in optimizer.state.values() for v in per.values() if isinstance(v, torch.Tensor)
    ]
    weights = [p for g in optimizer.param_groups for p in g["params"]]
    return [t.detach().clone() for t in (*weights, *state)]


@pytest.mark.parametrize("small", [0, 3, 2**20])
@pytest.mark.parametrize("skip", [False, True])
def test_copies_of_any_size_stride_and_dtype_come_back_alone_or_together(
    small: int, skip: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masked_step_module, "SMALL", small)
    torch.manual_seed(0)
    weights = [
        nn.Parameter(torch.randn(3)),
        nn.Parameter(torch.randn(())),
        nn.Parameter(torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last)),
        nn.Parameter(torch.randn(2, 2, dtype=torch.float64)),
        nn.Parameter(torch.randn(0)),
        nn.Parameter(torch.tensor([float("nan"), float("inf"), -0.0])),
    ]
    optimizer = torch.optim.SGD(weights, 1.0)
    for w in weights:
        w.grad = torch.full_like(w, float("nan") if skip else 1.0)
    before = [w.detach().clone() for w in weights]
    masked_step(optimizer, copied(optimizer), torch.tensor(float(skip)))
    for w, old in zip(weights, before, strict=True):
        expected = old if skip else old - 1
        assert torch.equal(w.detach().nan_to_num(7.0), expected.nan_to_num(7.0))
        assert torch.equal(torch.signbit(w.detach()), torch.signbit(expected))
        assert w.stride() == old.stride()


@pytest.mark.parametrize("name", MAKERS)
def test_a_skipped_step_changes_nothing_and_another_all(name: str) -> None:
    optimizer, plain = MAKERS[name](params()), MAKERS[name](params())
    optimizer.step()
    plain.step()  # makes the state
    assert unmaskable(optimizer) is None
    assert has_state(optimizer)
    before = values(optimizer)
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad.fill_(float("nan"))
    masked_step(optimizer, copied(optimizer), torch.tensor(1.0))
    assert all(torch.equal(a, b) for a, b in zip(values(optimizer), before, strict=True))
    for group in optimizer.param_groups:
        for p, q in zip(group["params"], plain.param_groups[0]["params"], strict=True):
            p.grad.copy_(q.grad)
    masked_step(optimizer, copied(optimizer), torch.tensor(0.0))
    plain.step()
    assert all(torch.equal(a, b) for a, b in zip(values(optimizer), values(plain), strict=True))


def test_the_result_of_the_step_is_given() -> None:
    optimizer = torch.optim.SGD(params(), 0.1)
    assert masked_step(optimizer, copied(optimizer), torch.tensor(0.0), lambda: 3.0) == 3.0


def test_state_is_missing_before_the_first_step() -> None:
    assert has_state(MAKERS["sgd"](params()))
    assert not has_state(MAKERS["momentum"](params()))
    assert not has_state(MAKERS["adamw"](params()))


class Own(torch.optim.SGD):
    pass


def sparse() -> torch.optim.Optimizer:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    return torch.optim.SGD(table.parameters(), 0.1)


def hooked() -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(params(), 0.1)
    optimizer.register_step_post_hook(lambda *a: None)
    return optimizer


def counting() -> torch.optim.Optimizer:
    optimizer: Any = torch.optim.SGD(params(), 0.1)
    optimizer.state[optimizer.param_groups[0]["params"][0]]["count"] = 3
    return optimizer


def on_the_host() -> torch.optim.Optimizer:
    weight = nn.Parameter(torch.ones(1, device="meta"))
    weight.grad = torch.ones(1, device="meta")
    optimizer: Any = torch.optim.AdamW([weight], 0.1)
    optimizer.state[weight]["step"] = torch.tensor(1.0)
    return optimizer


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Own(params(), 0.1), "Own is not one of torch's"),
        (sparse, "SGD has sparse gradients"),
        (hooked, "SGD has step hooks"),
        (counting, "SGD keeps its 'count' as a int on the host"),
        (on_the_host, "AdamW keeps its 'step' on the host; fused=True"),
    ],
)
def test_what_cannot_be_taken_back_is_told(
    make: Callable[[], torch.optim.Optimizer], reason: str
) -> None:
    told = unmaskable(make())
    assert told is not None
    assert told.startswith(reason)
