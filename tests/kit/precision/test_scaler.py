"""The scaler as a drop-in: equal to GradScaler on its schedule, right in any order, compatible in state."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from flopwise.errors import PrecisionError, PrecisionWarning
from flopwise.kit.precision import DynamicScaler

Make = Callable[[nn.Module], list[torch.optim.Optimizer]]


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [
        {"params": params[:2], "lr": 0.1},
        {"params": params[2:], "lr": 0.02, "weight_decay": 0.1},
    ]


MAKERS: dict[str, Make] = {
    "sgd": lambda m: [torch.optim.SGD(m.parameters(), 0.1)],
    "momentum": lambda m: [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9, foreach=True)],
    "adamw": lambda m: [torch.optim.AdamW(m.parameters(), 0.01, foreach=False)],
    "adamw foreach": lambda m: [torch.optim.AdamW(m.parameters(), 0.01, foreach=True)],
    "adamw fused": lambda m: [torch.optim.AdamW(m.parameters(), 0.01, fused=True)],
    "sgd fused": lambda m: [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9, fused=True)],
    "sgd nesterov fused": lambda m: [
        torch.optim.SGD(
            m.parameters(), 0.1, momentum=0.9, weight_decay=0.1, nesterov=True, fused=True
        )
    ],
    "adam decayed fused": lambda m: [
        torch.optim.Adam(m.parameters(), 0.01, weight_decay=0.1, fused=True)
    ],
    "adagrad": lambda m: [torch.optim.Adagrad(m.parameters(), 0.1)],
    "groups": lambda m: [torch.optim.SGD(groups(m), momentum=0.9)],
    "groups fused": lambda m: [torch.optim.AdamW(groups(m), fused=True)],
    "two optimizers": lambda m: [
        torch.optim.SGD(list(m.parameters())[:2], 0.1, momentum=0.9),
        torch.optim.AdamW(list(m.parameters())[2:], 0.01, fused=True),
    ],
}


def train(
    scaler: GradScaler,
    make: Make,
    steps: int = 40,
    bad: frozenset[int] = frozenset({5, 6, 19}),
    micro: int = 1,
    clip: bool = False,
) -> list[torch.Tensor]:
    """Trains with gradients that are not finite in the steps `bad`; returns weights, state and scales."""
    model = net()
    optimizers = make(model)
    data = torch.Generator().manual_seed(1)
    scales = []
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for _ in range(micro):
            loss = model(torch.randn(4, 8, generator=data)).square().mean() / micro
            scaler.scale(loss * (float("inf") if step in bad else 1.0)).backward()
        if clip:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        scales.append(torch.tensor([scaler.get_scale(), float(scaler._get_growth_tracker())]))
    state = [
        torch.as_tensor(value).detach().float()
        for optimizer in optimizers
        for per in optimizer.state.values()
        for value in per.values()
        if value is not None
    ]
    return [*(p.detach() for p in model.parameters()), *state, *scales]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def growing(**options: Any) -> DynamicScaler:
    options = {"init_scale": 2.0**16, "growth_interval": 3, "alarm_skips": 10, **options}
    return DynamicScaler("cpu", schedule="growth", **options)


@pytest.mark.filterwarnings("ignore::flopwise.errors.PrecisionWarning")
class TestOnGradScalersSchedule:
    @pytest.mark.parametrize("name", MAKERS)
    def test_it_equals_gradscaler_to_the_bit(self, name: str) -> None:
        theirs = train(GradScaler("cpu", 2.0**16, growth_interval=3), MAKERS[name])
        assert equal(train(growing(), MAKERS[name]), theirs)

    @pytest.mark.parametrize("name", ["momentum", "adamw fused", "two optimizers"])
    def test_it_equals_with_accumulation_and_clipping(self, name: str) -> None:
        theirs = train(
            GradScaler("cpu", 2.0**16, growth_interval=3), MAKERS[name], micro=3, clip=True
        )
        assert equal(train(growing(), MAKERS[name], micro=3, clip=True), theirs)

    @pytest.mark.parametrize("name", ["sgd", "adamw fused", "two optimizers"])
    @pytest.mark.parametrize(
        "options", [{"init_scale": 1000.0}, {"growth_factor": 1.7}, {"backoff_factor": 0.3}]
    )
    def test_it_equals_where_the_scale_is_no_power_of_two(
        self, name: str, options: dict[str, float]
    ) -> None:
        options = {"init_scale": 2.0**16, "growth_interval": 3, **options}
        theirs = train(GradScaler("cpu", **options), MAKERS[name])  # type: ignore[arg-type]
        assert equal(train(growing(**options), MAKERS[name]), theirs)

    def test_it_equals_after_a_scale_of_the_users(self) -> None:
        def trained(scaler: GradScaler) -> list[torch.Tensor]:
            first = train(scaler, MAKERS["adamw fused"], 3)
            scaler.scale(torch.zeros(()))
            scaler.update(1000.0)
            return [*first, *train(scaler, MAKERS["adamw fused"], 5)]

        theirs = trained(GradScaler("cpu", 2.0**16, growth_interval=3))
        assert equal(trained(growing()), theirs)
        loaded = growing()
        loaded.load_state_dict({**growing().state_dict(), "scale": 1000.0})
        other = GradScaler("cpu", 1000.0, growth_interval=3)
        assert equal(train(loaded, MAKERS["adamw fused"]), train(other, MAKERS["adamw fused"]))

    @pytest.mark.parametrize("name", ["sgd", "momentum", "two optimizers"])
    def test_masked_steps_equal_waiting_ones(self, name: str) -> None:
        theirs = train(GradScaler("cpu", 2.0**16, growth_interval=3), MAKERS[name])
        assert equal(train(growing(unfused="masked"), MAKERS[name]), theirs)

    @pytest.mark.parametrize("early", [False, True])
    def test_two_losses_of_which_one_is_unscaled_first_are_equal(self, early: bool) -> None:
        def trained(scaler: GradScaler) -> list[torch.Tensor]:
            one, two = net(1), net(2)
            first = torch.optim.AdamW(one.parameters(), 0.01, fused=True)
            second = torch.optim.SGD(two.parameters(), 0.1)
            for step in range(12):
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
                bad = float("inf") if step == 7 else 1.0
                first.zero_grad()
                second.zero_grad()
                scaler.scale(one(x).square().mean() * bad).backward()
                if early:  # before the other loss is scaled
                    scaler.unscale_(first)
                    torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1)
                scaler.scale(two(x).square().mean()).backward()
                scaler.step(first)
                scaler.step(second)
                scaler.update()
            return [p.detach() for m in (one, two) for p in m.parameters()]

        assert equal(trained(growing()), trained(GradScaler("cpu", 2.0**16, growth_interval=3)))

    def test_other_factors_are_kept(self) -> None:
        options = {"growth_factor": 1.5, "backoff_factor": 0.7, "growth_interval": 2}
        theirs = train(GradScaler("cpu", 1000.0, **options), MAKERS["sgd"])
        assert equal(train(growing(**{"init_scale": 1000.0, **options}), MAKERS["sgd"]), theirs)

    def test_it_starts_where_gradscaler_starts(self) -> None:
        assert DynamicScaler("cpu", schedule="growth").get_scale() == GradScaler("cpu").get_scale()


class TestFollowingTheGradients:
    def test_it_starts_at_1024_and_takes_the_largest_power_of_two_with_headroom(self) -> None:
        scaler = DynamicScaler("cpu", review_steps=4, headroom=16)
        weight = nn.Parameter(torch.zeros(3))
        optimizer = torch.optim.SGD([weight], 0.0)
        scales = []
        for step in range(8):
            scales.append(scaler.get_scale())
            weight.grad = None
            size = 0.5 if step < 4 else 3.0
            scaler.scale((weight * torch.tensor([size, -0.1, 0.0])).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        # 65504 / 16 / 0.5 = 8188, so 4096; 65504 / 16 / 3 = 1364.7, so 1024
        assert scales == [1024.0] * 4 + [4096.0] * 4
        assert scaler.get_scale() == 1024.0
        assert [(r.update, r.amax, r.scale) for r in scaler.reviews] == [
            (4, 0.5, 4096.0),
            (8, 3.0, 1024.0),
        ]
        assert scaler.reviews[0].zero_frac == pytest.approx(1 / 3)

    def test_an_overflow_halves_at_once_and_caps_the_coming_reviews(self) -> None:
        scaler = DynamicScaler("cpu", review_steps=2, alarm_skips=10)
        weight = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], 0.0)

        def step(size: float) -> float:
            weight.grad = None
            scaler.scale((weight * size).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            return scaler.get_scale()

        assert [step(float("inf")), step(0.5)] == [512.0, 512.0]
        # without the overflow 65504 / 16 / 0.5 would allow 4096
        assert [step(0.5) for _ in range(2 * 19)][-1] == 512.0
        assert [step(0.5) for _ in range(2)][-1] == 4096.0
        assert scaler.skipped == 1

    @pytest.mark.parametrize("name", ["momentum", "adamw fused"])
    def test_weights_are_those_without_a_scaler(self, name: str) -> None:
        scaled = train(DynamicScaler("cpu", review_steps=5), MAKERS[name], bad=frozenset())
        plain = train(GradScaler("cpu", enabled=False), MAKERS[name], bad=frozenset())
        weights = slice(0, 4)
        assert equal(scaled[weights], plain[weights])
        assert scaled[-1][0] != 1024.0  # the scale has moved meanwhile

    def test_the_underflow_share_is_printed(self, capsys: pytest.CaptureFixture[str]) -> None:
        scaler = DynamicScaler("cpu", review_steps=1, init_scale=1.0, verbose=True)
        weight = nn.Parameter(torch.zeros(4))
        optimizer = torch.optim.SGD([weight], 0.0)
        # at scale 1: normal, subnormal in float16, lost, zero
        scaler.scale((weight * torch.tensor([1.0, 1e-5, 1e-9, 0.0])).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        said = capsys.readouterr().out
        assert "max |grad| 1, scale 2048" in said
        assert "25.00% are subnormal in float16, 25.00% would be lost, 25.00% are zero" in said

    def test_gradients_of_nothing_but_zero_leave_the_scale(self) -> None:
        scaler = DynamicScaler("cpu", review_steps=1)
        weight = nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([weight], 0.1)
        scaler.scale((weight * 0).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 1024.0

    def test_float16_gradients_that_vanish_unscaled_arrive_scaled(self) -> None:
        weight = nn.Parameter(torch.zeros(4, 4))
        optimizer = torch.optim.SGD([weight], 1.0)
        scaler = DynamicScaler("cpu", review_steps=1)
        for _ in range(2):  # the second step is made with the reviewed scale
            weight.grad = None
            with torch.autocast("cpu", dtype=torch.float16):
                loss = (torch.ones(1, 4) @ weight).float().sum() * 1e-8
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0**24
        assert scaler.reviews[-1].lost_frac == 0.0
        assert weight.detach().flatten().tolist() == pytest.approx([-2e-8] * 16, rel=2**-9)
        alone = nn.Parameter(torch.ones(4, 4))
        with torch.autocast("cpu", dtype=torch.float16):
            loss = (torch.ones(1, 4) @ alone).float().sum() * 1e-8
        loss.backward()
        assert alone.grad is not None
        assert not alone.grad.any()


class TestState:
    @pytest.mark.filterwarnings("ignore::flopwise.errors.PrecisionWarning")
    def test_states_load_both_ways(self) -> None:
        ours, theirs = growing(), GradScaler("cpu", 2.0**16, growth_interval=3)
        train(ours, MAKERS["sgd"], steps=20)
        train(theirs, MAKERS["sgd"], steps=20)
        into_theirs = GradScaler("cpu")
        into_theirs.load_state_dict(ours.state_dict())
        into_ours = growing(growth_interval=7)
        into_ours.load_state_dict(theirs.state_dict())
        five = set(theirs.state_dict())
        assert {k: v for k, v in ours.state_dict().items() if k in five} == theirs.state_dict()
        assert equal(train(into_theirs, MAKERS["momentum"]), train(into_ours, MAKERS["momentum"]))

    def test_it_survives_a_pickle_and_a_copy(self) -> None:
        scaler = DynamicScaler("cpu", review_steps=5, model=net())
        train(scaler, MAKERS["sgd"], steps=12, bad=frozenset({3}))
        for twin in (pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler)):
            assert twin.state_dict() == scaler.state_dict()
            assert (twin.skipped, twin.headroom) == (1, 16.0)
            train(twin, MAKERS["sgd"], steps=5, bad=frozenset())

    def test_it_is_a_gradscaler(self) -> None:
        assert isinstance(DynamicScaler("cpu"), GradScaler)

    def test_switched_off_it_does_nothing(self) -> None:
        scaler = DynamicScaler("cpu", enabled=False)
        assert scaler.state_dict() == {}
        scaler.load_state_dict({})
        theirs = train(GradScaler("cpu", enabled=False), MAKERS["momentum"], bad=frozenset())
        assert equal(train(scaler, MAKERS["momentum"], bad=frozenset()), theirs)

    @pytest.mark.parametrize(
        "options",
        [
            {"schedule": "other"},
            {"headroom": 3.0},
            {"headroom": 0.5},
            {"review_steps": 0},
            {"alarm_skips": 0},
            {"alarm_frac": 0.0},
            {"unfused": "never"},
            {"min_scale": 0.0},
            {"min_scale": 8.0, "max_scale": 4.0},
        ],
    )
    def test_arguments_out_of_range_are_named(self, options: dict[str, Any]) -> None:
        with pytest.raises(PrecisionError, match=next(iter(options))):
            DynamicScaler("cpu", **options)


class TestOrder:
    def test_clipping_before_or_after_unscaling_is_the_same_to_the_bit(self) -> None:
        def clipped(order: str) -> list[torch.Tensor]:
            model, scaler = net(), DynamicScaler("cpu")
            optimizer = torch.optim.SGD(model.parameters(), 1.0)
            scaler.scale(model(torch.ones(2, 8)).square().sum()).backward()
            if order == "before":
                norm = scaler.clip_grad_norm_(model.parameters(), 0.5)
            scaler.unscale_(optimizer)
            if order == "after":
                norm = scaler.clip_grad_norm_(model.parameters(), 0.5)
            if order == "torch":
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            return [norm, *(p.detach() for p in model.parameters())]

        assert equal(clipped("before"), clipped("torch"))
        assert equal(clipped("after"), clipped("torch"))

    @pytest.mark.parametrize("order", ["before", "after"])
    def test_reviews_are_of_gradients_as_backward_made_them(self, order: str) -> None:
        scaler, weight = DynamicScaler("cpu", review_steps=1), nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([weight], 1.0, fused=True)
        scaler.scale((weight * torch.tensor([3.0, 4.0])).sum()).backward()
        if order == "after":
            scaler.unscale_(optimizer)
        scaler.clip_grad_norm_([weight], 0.05)
        scaler.step(optimizer)
        scaler.update()
        assert weight.detach().norm().item() == pytest.approx(0.05, rel=1e-4)
        assert scaler.reviews[0].amax == 4.0

    def test_no_common_norm_of_scaled_and_unscaled_gradients(self) -> None:
        model, scaler = net(), DynamicScaler("cpu")
        optimizers = MAKERS["two optimizers"](model)
        scaler.scale(model(torch.ones(2, 8)).sum()).backward()
        scaler.unscale_(optimizers[0])
        with pytest.raises(PrecisionError, match="no common norm"):
            scaler.clip_grad_norm_(model.parameters(), 1.0)

    def test_closures_are_refused(self) -> None:
        scaler, weight = DynamicScaler("cpu"), nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], 0.1)
        scaler.scale(weight.sum()).backward()
        for given in ((lambda: 1.0,), ()):
            kwargs: dict[str, Any] = {} if given else {"closure": lambda: 1.0}
            with pytest.raises(RuntimeError, match="closure"):
                scaler.step(optimizer, *given, **kwargs)
        lbfgs = torch.optim.LBFGS([weight])
        with pytest.raises(RuntimeError, match="LBFGS with a closure"):
            scaler.step(lbfgs)
        scaler.step(optimizer, None)  # as accelerate calls it
        assert weight.item() == pytest.approx(0.9)

    def test_a_second_step_and_unscaling_after_it_are_refused(self) -> None:
        scaler, weight = DynamicScaler("cpu"), nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], 0.1)
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        with pytest.raises(RuntimeError, match=r"unscale_\(\) is being called after step\(\)"):
            scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError, match=r"update\(\) is missing"):
            scaler.step(optimizer)

    def test_weights_of_16_bits_are_refused_with_the_cure(self) -> None:
        scaler = DynamicScaler("cpu")
        weight = nn.Parameter(torch.ones(1, dtype=torch.float16))
        optimizer = torch.optim.SGD([weight], 0.1)
        scaler.scale(weight.float().sum()).backward()
        with pytest.raises(ValueError, match="MasterWeights"):
            scaler.unscale_(optimizer)

    def test_sparse_gradients_equal_gradscalers(self) -> None:
        def embed(scaler: GradScaler) -> torch.Tensor:
            torch.manual_seed(0)
            table = nn.Embedding(10, 4, sparse=True)
            optimizer = torch.optim.SparseAdam(table.parameters(), 0.1)
            for step in range(6):
                optimizer.zero_grad()
                size = float("inf") if step == 2 else 1.0
                scaler.scale(table(torch.tensor([1, step, 1])).square().sum() * size).backward()
                scaler.step(optimizer)
                scaler.update()
            return table.weight.detach()

        theirs = embed(GradScaler("cpu", 2.0**16, growth_interval=3))
        assert torch.equal(embed(growing()), theirs)

    def test_an_optimizer_that_is_gone_is_forgotten(self) -> None:
        scaler = DynamicScaler("cpu", alarm_skips=10)
        train(scaler, MAKERS["sgd"], steps=3)
        assert scaler._left.alive() == []

    def test_the_gradients_of_an_optimizer_that_waits_follow_the_scale(self) -> None:
        scaler = DynamicScaler("cpu", alarm_skips=10)
        often, seldom = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        one, two = torch.optim.SGD([often], 1.0), torch.optim.SGD([seldom], 1.0)
        for step in range(3):
            often.grad = None
            size = float("inf") if step == 1 else 1.0
            scaler.scale((often * size).sum() + seldom.sum()).backward()
            scaler.step(one)
            if step == 2:
                scaler.step(two)
            elif step == 0:
                scaler._left.know(two)
            scaler.update()
        assert seldom.item() == -3.0  # three times 1, though the scale was halved between

    def test_a_scale_given_by_hand_is_taken(self) -> None:
        scaler, weight = DynamicScaler("cpu"), nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], 0.1)
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update(4.0)
        assert scaler.get_scale() == 4.0


class TestKnowledge:
    def test_the_report_has_updates_skips_and_reviews(self) -> None:
        scaler = DynamicScaler("cpu", review_steps=4)
        assert scaler.report() == "no update yet"
        train(scaler, MAKERS["sgd"], steps=8, bad=frozenset({1}))
        lines = scaler.report().splitlines()
        assert lines[0].startswith("8 updates, 1 skipped, scale ")
        assert lines[0].endswith("(headroom 16 under 65504)")
        assert [line.split(":")[0] for line in lines[1:]] == ["update 4", "update 8"]

    def test_an_optimizer_that_must_wait_is_said_once(self) -> None:
        class Own(torch.optim.SGD):
            pass

        scaler = DynamicScaler("cpu", unfused="masked")
        with pytest.warns(PrecisionWarning) as said:
            train(scaler, lambda m: [Own(m.parameters(), 0.1)], steps=3, bad=frozenset())
        assert [str(w.message) for w in said] == [
            "Own waits for the device at every step, as with GradScaler: Own is not one of torch's: what its step "
            "changes besides tensors is not known."
        ]


@pytest.mark.parametrize("way", ["step", "unscale_", "clip_grad_norm_"])
@pytest.mark.parametrize("fused", [False, True])
class TestLongWindows:
    """Of 100 updates every tenth is looked at; each is checked."""

    @staticmethod
    def updates(fused: bool, way: str, sizes: list[float]) -> tuple[DynamicScaler, list[float]]:
        weight = nn.Parameter(torch.zeros(3))
        optimizer = torch.optim.SGD([weight], 1.0, fused=fused)
        scaler, seen = DynamicScaler("cpu", alarm_skips=1000), []
        for size in sizes:
            weight.data.zero_()
            weight.grad = None
            scaler.scale((weight * size).sum()).backward()
            if way == "unscale_":
                scaler.unscale_(optimizer)
            elif way == "clip_grad_norm_":
                scaler.clip_grad_norm_([weight], 1e9)
            scaler.step(optimizer)
            scaler.update()
            seen.append(weight[0].item())
        return scaler, seen

    def test_what_was_looked_at_makes_the_scale(self, fused: bool, way: str) -> None:
        sizes = [2.0**-4] * 100
        sizes[42], sizes[49] = 1.0, 2.0**-2  # updates 43 and 50
        scaler, seen = self.updates(fused, way, sizes)
        assert seen == [-size for size in sizes]
        assert [(r.update, r.amax, r.scale) for r in scaler.reviews] == [(100, 2.0**-2, 2.0**13)]

    def test_every_overflow_is_skipped_and_backs_off(self, fused: bool, way: str) -> None:
        sizes = [2.0**-4] * 100
        sizes[42] = sizes[49] = float("inf")
        scaler, seen = self.updates(fused, way, sizes)
        assert [i for i, moved in enumerate(seen) if moved == 0] == [42, 49]
        assert scaler.skipped == 2
        # gradients allow 2**15; what overflowed second was 512
        assert [r.scale for r in scaler.reviews] == [256.0]
