"""Steps are found right, whatever the loop looks like, and nothing of the run changes."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import flopwise
from flopwise.meter.config import Config
from flopwise.meter.session import Session


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def loss_of(net: nn.Module, n: int = 6) -> torch.Tensor:
    return net(torch.randn(n, 8)).square().mean()


def plain_loop(net: nn.Module, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(net).backward()
        optimizer.step()


class Nested(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class OwnBase(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p -= 0.01 * p.grad


class DuckTyped:
    """Knows nothing of torch.optim."""

    def __init__(self, params: Any) -> None:
        self.params = list(params)

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None

    def step(self) -> None:
        with torch.no_grad():
            for p in self.params:
                p.sub_(0.01 * p.grad)


@pytest.mark.parametrize(
    "kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, Nested, OwnBase]
)
def test_each_optimizer_step_is_a_step(measure: Any, kind: Any) -> None:
    net = model()
    optimizer = kind(net.parameters(), lr=0.01) if kind is not OwnBase else kind(net.parameters())
    measured = measure(lambda: plain_loop(net, optimizer, 12))
    assert measured.record.steps_seen == 12
    assert measured.record.boundary == "optimizer"
    assert len(measured.record.rows) == 11  # the first step has no beginning that anyone saw


def test_a_fused_optimizer_counts_once(measure: Any) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    assert measure(lambda: plain_loop(net, optimizer, 9)).record.steps_seen == 9


def test_a_closure_is_one_step_and_its_backward_is_not_optimizer_time(measure: Any) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(net, 4000)
        loss.backward()
        return loss

    measured = measure(lambda: [optimizer.step(closure) for _ in range(10)])
    assert measured.record.steps_seen == 10
    row = measured.record.rows[-1]
    assert row.backward_ns > 0
    assert row.optimizer_ns < row.host_ns - row.backward_ns


def test_lbfgs_evaluates_often_and_steps_once(measure: Any) -> None:
    net = model()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=4)
    x = torch.randn(6, 8)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        return loss

    measured = measure(lambda: [optimizer.step(closure) for _ in range(5)])
    assert measured.record.steps_seen == 5


def test_a_gan_takes_one_step_a_cycle(measure: Any) -> None:
    d, g = model(), model()
    opt_d, opt_g = (torch.optim.Adam(net.parameters()) for net in (d, g))

    def train() -> None:
        for _ in range(8):
            for _ in range(2):
                plain_loop(d, opt_d, 1)
            plain_loop(g, opt_g, 1)

    measured = measure(train)
    assert measured.record.steps_seen == 8
    assert measured.record.boundary == "optimizer cycle of 3 (2 optimizers)"
    assert measured.record.rows[-1].micro_batches == 3


def test_an_optimizer_for_every_parameter_in_backward(measure: Any) -> None:
    net = model()
    each = {p: torch.optim.SGD([p], lr=0.01) for p in net.parameters()}

    def update(p: nn.Parameter) -> None:
        each[p].step()
        each[p].zero_grad()

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(update)
    measured = measure(lambda: [loss_of(net).backward() for _ in range(7)])
    assert measured.record.steps_seen == 7
    assert measured.record.rows[-1].micro_batches == 1


def test_accumulation_is_one_step_of_several_micro_batches(measure: Any) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def train() -> None:
        for _ in range(9):
            optimizer.zero_grad()
            for _ in range(4):
                loss_of(net).backward()
            optimizer.step()

    measured = measure(train)
    assert measured.record.steps_seen == 9
    row = measured.record.rows[-1]
    assert (row.micro_batches, row.samples, row.shape) == (4, 24, "6x8 float32")


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_duck_typed_optimizer_falls_back_on_fresh_gradients(
    measure: Any, accumulate: int, set_to_none: bool
) -> None:
    net = model()

    def train() -> None:
        for _ in range(10):
            net.zero_grad(set_to_none=set_to_none)
            for _ in range(accumulate):
                loss_of(net).backward()
            for p in net.parameters():
                p.data.add_(p.grad, alpha=-0.01)  # the version of p does not move

    measured = measure(train)
    assert measured.record.boundary == "backward"
    assert measured.record.steps_seen == 10
    assert measured.record.rows[-1].micro_batches == accumulate
    assert any("flopwise.step()" in note for note in measured.record.notes)


def test_a_duck_typed_optimizer_with_its_own_object(measure: Any) -> None:
    net = model()
    assert measure(lambda: plain_loop(net, DuckTyped(net.parameters()), 10)).record.steps_seen in (
        9,
        10,
    )


def test_marks_take_over(measure: Any) -> None:
    net = model()
    optimizer = DuckTyped(net.parameters())

    def train() -> None:
        for _ in range(10):
            plain_loop(net, optimizer, 2)
            flopwise.step()

    measured = measure(train)
    assert (measured.record.steps_seen, measured.record.boundary) == (10, "mark")


def test_a_mark_without_the_meter_does_nothing() -> None:
    flopwise.step()


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_scaler_skips_is_time_without_an_update(measure: Any, fused: bool) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def train() -> None:
        for i in range(12):
            optimizer.zero_grad()
            loss = loss_of(net)
            scaler.scale(loss * (float("inf") if i in (8, 10) else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()

    measured = measure(train)
    assert measured.record.steps_seen == 12
    assert [i + 1 for i, row in enumerate(measured.record.rows) if row.skipped] == [8, 10]


def test_a_step_that_raises_does_not_lose_the_following_ones(measure: Any) -> None:
    net = model()
    optimizer = OwnBase(net.parameters())

    def train() -> None:
        for i in range(12):
            loss_of(net).backward()
            if i == 5:
                broken, net[0].weight.grad = net[0].weight.grad, None
                with pytest.raises(TypeError):
                    optimizer.step()
                net[0].weight.grad = broken
            optimizer.step()
            net.zero_grad()

    assert measure(train).record.steps_seen == 12


def loader(n: int = 60) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(n, 8), torch.randint(0, 4, (n,))), batch_size=6)


def test_evaluation_saving_and_epoch_starts_are_kept_apart(measure: Any, tmp_path: Any) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    train_set, test_set = loader(120), loader(30)

    def train() -> None:
        for _ in range(4):
            for x, y in train_set:
                optimizer.zero_grad()
                F.cross_entropy(net(x), y).backward()
                optimizer.step()
            with torch.no_grad():
                for x, _ in test_set:
                    net(x)
            torch.save(net.state_dict(), tmp_path / "net.pt")

    measured = measure(train)
    assert measured.record.steps_seen == 80
    kinds = measured.kinds()
    # Evaluation, save and the next epoch's start all fall between the same two steps.
    assert [i for i, kind in enumerate(kinds) if "evaluation" in kind] == [19, 39, 59]
    assert [i for i, kind in enumerate(kinds) if "checkpoint" in kind] == [19, 39, 59]
    assert all(row.samples == 6 for row in measured.record.rows)
    assert measured.record.counted_from == "leading dimension of the loader's batches"


def test_a_forward_without_gradient_in_every_step_is_part_of_the_step(measure: Any) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def train() -> None:
        for _ in range(30):
            with torch.no_grad():
                net(torch.randn(6, 8))
            plain_loop(net, optimizer, 1)

    assert "evaluation" not in measure(train).kinds()


def test_waiting_for_data_is_told(measure: Any) -> None:
    class Slow(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 80

        def __getitem__(self, index: int) -> torch.Tensor:
            torch.randn(300, 300) @ torch.randn(300, 300)
            return torch.randn(8)

    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def train() -> None:
        for x in DataLoader(Slow(), batch_size=4):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()

    rows = measure(train).record.rows
    assert sum(r.data_ns for r in rows[2:]) > 0.5 * sum(r.host_ns for r in rows[2:])


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8, padding_idx=0)
        self.head = nn.Linear(8, 50)

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None) -> torch.Tensor:
        return self.head(self.table(input_ids))


def test_tokens_and_real_tokens_are_counted_where_they_are_visible(measure: Any) -> None:
    ids = torch.randint(1, 50, (40, 10))
    mask = torch.ones_like(ids)
    mask[:, 7:] = 0
    data = [{"input_ids": i, "attention_mask": m} for i, m in zip(ids, mask, strict=True)]
    net = Words()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def train() -> None:
        for batch in DataLoader(data, batch_size=4):  # type: ignore[arg-type]
            optimizer.zero_grad()
            net(**batch).square().mean().backward()
            optimizer.step()

    row = measure(train).record.rows[-1]
    assert (row.samples, row.tokens, row.real_tokens) == (4, 40, 28)


def test_tokens_are_those_that_the_model_was_given(measure: Any) -> None:
    data = list(torch.randint(1, 50, (40, 9)))
    net = Words()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def train() -> None:
        for batch in DataLoader(data, batch_size=4):  # type: ignore[arg-type]
            optimizer.zero_grad()
            F.cross_entropy(net(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()
            optimizer.step()

    row = measure(train).record.rows[-1]
    assert (row.samples, row.tokens) == (4, 32)


def test_time_first_models_have_samples_in_the_second_dimension(measure: Any) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(50, 8)
            self.cell = nn.GRU(8, 8)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.cell(self.table(ids))[0]

    net = Recurrent()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def train() -> None:
        for _ in range(8):
            optimizer.zero_grad()
            net(torch.randint(0, 50, (35, 5))).square().mean().backward()
            optimizer.step()

    row = measure(train).record.rows[-1]
    assert (row.samples, row.tokens) == (5, 175)


def test_a_root_that_is_never_called_is_looked_through(measure: Any) -> None:
    class Task(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def training_step(self) -> torch.Tensor:
            return loss_of(self.net)

    task = Task()
    optimizer = torch.optim.SGD(task.parameters(), lr=0.01)

    def train() -> None:
        for _ in range(10):
            optimizer.zero_grad()
            task.training_step().backward()
            optimizer.step()

    row = measure(train).record.rows[-1]
    assert (row.shape, row.samples) == ("6x8 float32", 6)
    assert row.forward_ns


@pytest.mark.parametrize("how", ["wrapper", "in place", "function", "optimizer"])
def test_compiled_code_is_neither_recompiled_nor_broken(measure: Any, how: str) -> None:
    torch._dynamo.reset()
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    forward: Any = net
    step: Any = optimizer.step
    if how == "wrapper":
        forward = torch.compile(net, backend="eager", fullgraph=True)
    elif how == "in place":
        net.compile(backend="eager")
    elif how == "function":
        forward = torch.compile(lambda x: net(x).square(), backend="eager", fullgraph=True)
    else:
        step = torch.compile(optimizer.step, backend="eager")

    def train(steps: int = 12) -> int:
        for _ in range(steps):
            optimizer.zero_grad()
            forward(torch.randn(6, 8)).mean().backward()
            step()
        return int(torch._dynamo.utils.counters["frames"]["ok"])

    alone = train()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    measured = measure(train)
    assert measured.record.steps_seen == 12
    assert torch._dynamo.utils.counters["frames"]["ok"] <= alone
    shape = "" if how == "function" else "6x8 float32"
    assert measured.record.rows[-1].shape == shape
    torch._dynamo.reset()


def test_results_are_bit_for_bit_those_without_the_meter(measure: Any) -> None:
    start = model()

    def trained(with_meter: bool) -> dict[str, torch.Tensor]:
        net = copy.deepcopy(start)
        optimizer = torch.optim.AdamW(net.parameters())
        torch.manual_seed(1)
        if with_meter:
            measure(lambda: plain_loop(net, optimizer, 20), count=True)
        else:
            plain_loop(net, optimizer, 20)
        return net.state_dict()

    bare, metered = trained(False), trained(True)
    assert all(torch.equal(bare[name], metered[name]) for name in bare)


def test_everything_is_taken_out_again() -> None:
    watched = {
        "backward": torch.autograd.backward,
        "save": torch.save,
        "eval": nn.Module.eval,
        "iter": DataLoader.__iter__,
        "scaler": torch.amp.GradScaler.step,
    }
    hooks = (
        len(torch_optimizer._global_optimizer_pre_hooks),
        len(torch_optimizer._global_optimizer_post_hooks),
    )
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    session = Session(Config(steps=3))
    session.attach()
    plain_loop(net, optimizer, 30)
    assert session.phase == "done"
    assert watched == {
        "backward": torch.autograd.backward,
        "save": torch.save,
        "eval": nn.Module.eval,
        "iter": DataLoader.__iter__,
        "scaler": torch.amp.GradScaler.step,
    }
    assert hooks == (
        len(torch_optimizer._global_optimizer_pre_hooks),
        len(torch_optimizer._global_optimizer_post_hooks),
    )
    assert "_compiled_call_impl" not in vars(net)
    reference = session.optimizers[0]
    del optimizer, net
    gc.collect()
    assert reference() is None  # nothing of the user's is kept alive


@pytest.mark.parametrize("behind", [False, True])
def test_the_script_may_hook_into_all_optimizers_itself(behind: bool) -> None:
    calls = []
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    session = Session(Config(steps=3, count=False))
    if behind:
        session.attach()
    register = torch_optimizer.register_optimizer_step_post_hook
    handles = [register(lambda *_: calls.append(1)) for _ in range(2)]
    if not behind:
        session.attach()
    calls.clear()  # attaching tries whether hooks fire
    try:
        plain_loop(net, optimizer, 30)  # torch raises if its hooks change while it runs them
        assert session.phase == "done"
        assert len(calls) == 60
        stays = "a patch could not be undone: the script has put a hook behind ours"
        assert [note.startswith(stays) for note in session.notes] == [True] * behind
    finally:
        session.detach()
        for handle in handles:
            handle.remove()
    assert len(torch_optimizer._global_optimizer_post_hooks) == behind
    torch_optimizer._global_optimizer_post_hooks.clear()


def test_a_fault_of_ours_is_reported_and_the_loop_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    session = Session(Config())

    def broken(started: int) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(session, "_warm_up", broken)
    session.attach()
    before = net[0].weight.clone()
    plain_loop(net, optimizer, 5)
    assert not torch.equal(before, net[0].weight)
    assert not session.live
    message = capsys.readouterr().err
    assert message.count("flopwise:") == 1
    assert "planted" in message
    assert "goes on unmeasured" in message


def test_another_patch_on_top_of_ours_is_left_alone() -> None:
    session = Session(Config())
    session.attach()
    ours = torch.save
    calls = []

    def theirs(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return ours(*args, **kwargs)

    torch.save = theirs
    try:
        session.detach()
        assert torch.save is theirs
        import io

        torch.save({"a": 1}, io.BytesIO())
        assert calls
    finally:
        torch.save = ours.__wrapped__  # type: ignore[attr-defined]


def test_exactly_the_steps_that_were_asked_for_are_timed(measure: Any) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    measured = measure(lambda: plain_loop(net, optimizer, 40), steps=7, warmup=4)
    assert measured.kinds().count("timed") == 7
    assert measured.kinds()[:3] == ["warmup"] * 3


def test_short_steps_are_counted_all_and_looked_at_now_and_then(measure: Any) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    measured = measure(lambda: plain_loop(net, optimizer, 120), stride=None, steps=80, warmup=5)
    rows = [row for row in measured.record.rows if row.kind == "timed"]
    assert len(rows) == 80
    close = [row for row in rows if row.sampled]
    assert 8 <= len(close) <= 12
    assert all(row.backward_ns and row.shape == "6x8 float32" for row in close)
    assert all(row.ns > 0 for row in rows)
    assert measured.record.brief_own_ns > 0


def test_a_pause_is_seen_also_between_close_looks(measure: Any) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def train() -> None:
        for i in range(60):
            plain_loop(net, optimizer, 1)
            if i in (33, 47):
                with torch.no_grad():
                    net(torch.randn(6, 8))

    measured = measure(train, stride=20, steps=50, warmup=5)
    assert [i for i, kind in enumerate(measured.kinds()) if kind == "evaluation"] == [33, 47]


class _FakeStamp:
    """A stamp at a known device time."""

    def __init__(self, ns: int | None) -> None:
        self.ns = ns

    def passed(self) -> bool:
        return True

    def resolve(self) -> int | None:
        return self.ns


def test_the_device_time_of_a_span_is_split_by_host_times_and_not_across_a_pause() -> None:
    from flopwise.meter import finish
    from flopwise.meter.rows import EVALUATION, TIMED, Brief, Row

    def close(end: int, ns: int | None, flags: int = TIMED) -> Row:
        return Row(
            end, flags, 0, 0, 0, 0, 0, 0, 1, None, None, None, "", None, _FakeStamp(ns), None
        )

    raw = [
        close(0, None),
        Brief(10, TIMED, None),
        Brief(30, TIMED, None),
        close(40, 80),  # 40 on the host, 80 on the device
        Brief(50, TIMED, None),
        Brief(90, TIMED | EVALUATION, None),
        close(100, 70),
        close(110, 12),
        Brief(120, TIMED, None),  # no stamp behind it: it cannot be timed
    ]
    rows, clock = finish.step_rows(raw, None)
    assert clock == "cuda events"
    assert [row.ns for row in rows[:3]] == [20, 40, 20]
    kinds = ["timed"] * 3 + ["mixed", "evaluation", "mixed", "timed", "mixed"]
    assert [row.kind for row in rows] == kinds
    assert rows[-2].ns == 12


class OwnState(nn.Linear):
    """Hands all its attributes to copies and files."""

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))


@pytest.mark.parametrize("make", [model, lambda: OwnState(8, 4)])
def test_models_are_saved_and_copied_as_without_the_meter(
    measure: Any, tmp_path: Any, make: Any
) -> None:
    net = make()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    kept = {}

    def train() -> None:
        for i in range(12):
            plain_loop(net, optimizer, 1)
            if i == 8:
                torch.save(net, tmp_path / "net.pt")
                kept["copy"] = copy.deepcopy(net)
                kept["pickle"] = pickle.dumps(net)

    measured = measure(train)
    assert measured.record.rows[-1].shape == "6x8 float32"  # it was watched
    torch.save(net, tmp_path / "later.pt")
    loaded = torch.load(tmp_path / "net.pt", weights_only=False)
    for other in (loaded, kept["copy"], pickle.loads(kept["pickle"])):
        assert vars(other).get("_compiled_call_impl") is None
        assert not other._forward_pre_hooks
        loss_of(other).backward()
    assert b"flopwise" not in kept["pickle"]


def test_each_layer_may_have_an_optimizer_that_steps_for_a_while(measure: Any) -> None:
    nets = [model() for _ in range(3)]

    def train() -> None:
        for net in nets:
            plain_loop(net, torch.optim.Adam(net.parameters()), 60)

    measured = measure(train, stride=None, count=True)
    assert measured.record.steps_seen == 180
    timed = [i for i, kind in enumerate(measured.kinds()) if kind == "timed"]
    assert timed[0] > 120  # the steps of the last one alone
    assert any("another optimizer steps" in note for note in measured.record.notes)


def test_without_an_optimizer_every_backward_is_looked_at(measure: Any) -> None:
    net = model()
    measured = measure(lambda: plain_loop(net, DuckTyped(net.parameters()), 100), stride=None)
    assert measured.record.steps_seen == 100


def test_close_looks_do_not_keep_step_with_a_pattern(measure: Any) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def train() -> None:
        for i in range(400):
            optimizer.zero_grad()
            for _ in range(4 if i % 2 else 1):
                loss_of(net).backward()
            optimizer.step()

    rows = measure(train, stride=8, steps=360, warmup=5).record.rows
    looked = [row.micro_batches for row in rows if row.kind == "timed" and row.sampled]
    assert 30 <= len(looked) <= 65
    assert 0.25 < sum(n == 4 for n in looked) / len(looked) < 0.75


def test_a_count_says_how_many_micro_batches_it_is_of(measure: Any) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def train() -> None:
        for _ in range(12):
            optimizer.zero_grad()
            for _ in range(3):
                loss_of(net).backward()
            optimizer.step()

    (count,) = measure(train, count=True).record.flops
    assert count.micro_batches == 3


def test_a_short_warmup_by_hand_still_waits_for_the_count(measure: Any) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    measured = measure(lambda: plain_loop(net, optimizer, 30), count=True, warmup=0, steps=5)
    assert measured.record.flops
    assert measured.kinds().count("timed") == 5


def test_two_views_a_backward_do_not_count_samples_twice(measure: Any) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def train() -> None:
        for _ in range(10):
            optimizer.zero_grad()
            (loss_of(net) + loss_of(net)).backward()
            optimizer.step()

    assert measure(train).record.rows[-1].samples is None


def test_a_hook_that_cannot_be_taken_out_does_not_reach_the_script(
    measure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    session = Session(Config(steps=3, stride=1))

    def broken() -> None:
        raise RuntimeError("planted")

    session.attach()
    monkeypatch.setattr(session.roots, "release", broken)
    plain_loop(net, optimizer, 30)
    assert session.phase == "done"
    assert any("planted" in note for note in session.notes)


@pytest.mark.parametrize("every", [1, 7])
def test_an_optimizer_made_anew_for_the_same_parameters_goes_on(measure: Any, every: int) -> None:
    net = model()

    def train() -> None:
        for step in range(60):
            if step % every == 0:
                optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
            plain_loop(net, optimizer, 1)

    measured = measure(train, steps=30, warmup=5, stride=None)
    assert measured.kinds().count("timed") == 30
    assert measured.session.boundaries.cycle == (0,)


def test_an_optimizer_at_the_address_of_a_dead_one_is_another(measure: Any) -> None:
    def train() -> None:
        for _ in range(3):
            net = model()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
            plain_loop(net, optimizer, 25)
            del optimizer, net

    measured = measure(train, warmup=5, stride=None)
    assert measured.session.boundaries.total == 75
    assert measured.kinds().count("timed") <= 25
    assert any("another optimizer steps" in note for note in measured.session.notes)


def test_a_model_that_the_script_lets_go_is_freed_while_we_measure(measure: Any) -> None:
    freed = []

    def train() -> None:
        for _ in range(2):
            net = model()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
            plain_loop(net, optimizer, 12)
            module, weight = weakref.ref(net), weakref.ref(net[0].weight)
            del optimizer, net
            gc.collect()
            freed.extend([module() is None, weight() is None])

    measure(train, steps=100, warmup=5, count=True)
    assert freed == [True] * 4


class Understated(IterableDataset[Any]):
    """Yields more than it says, which torch warns of once somebody has asked for its length."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Any:
        return (torch.ones(8) for _ in range(40))


def test_a_loader_is_freed_and_its_length_not_asked_for(measure: Any) -> None:
    freed = []

    def train() -> None:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        data = Understated()
        batches = DataLoader(data, batch_size=2)
        for _ in range(3):  # a warning would be an error
            for batch in batches:
                optimizer.zero_grad()
                net(batch).square().mean().backward()
                optimizer.step()
        seen = weakref.ref(data)
        del batches, data
        gc.collect()
        freed.append(seen() is None)

    measured = measure(train, steps=20, warmup=5)
    assert measured.record.surroundings.loaders[0].batches is None
    measured = measure(train, steps=200, warmup=5)
    assert measured.kinds().count("timed") > 20
    assert measured.record.surroundings.parameters.total == 8 * 16 + 16 + 16 * 4 + 4
    assert freed == [True, True]


def test_a_model_that_is_unfrozen_after_the_count_has_no_flops(measure: Any) -> None:
    net = model()
    net[0].requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def train() -> None:
        plain_loop(net, optimizer, 12)
        net[0].requires_grad_(True)
        plain_loop(net, optimizer, 12)

    record = measure(train, count=True).record
    assert record.flops == []
    assert any("trains others" in note for note in record.notes)


def test_a_step_whose_backward_raised_is_counted_again(measure: Any) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    plain = measure(lambda: plain_loop(net, optimizer, 20), count=True).record.flops

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("planted")

    def train() -> None:
        for i in range(20):
            optimizer.zero_grad()
            if i < 4:
                with pytest.raises(RuntimeError, match="planted"):
                    Fails.apply(net(torch.randn(6, 8))).mean().backward()
            loss_of(net).backward()
            optimizer.step()

    assert measure(train, count=True).record.flops[0].needed == plain[0].needed


class FakeClock:
    """Moves by a nanosecond a look, and by what a test adds."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        self.ns += 1
        return self.ns


@pytest.fixture
def paced(measure: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Measures a loop of `script` steps, of which the i-th takes pace(i) milliseconds of a clock of its own."""
    clock = FakeClock()
    for module in ("session", "hooks", "roots"):
        monkeypatch.setattr(f"flopwise.meter.{module}.now", clock)

    def run(pace: Callable[[int], int], *, script: int = 200, **options: Any) -> Any:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

        def train() -> None:
            for i in range(script):
                clock.ns += pace(i) * 1_000_000
                plain_loop(net, optimizer, 1)

        return measure(train, **options)

    return run


@pytest.mark.parametrize("stride", [1, None])
def test_a_slow_lead_is_made_up_for(paced: Any, stride: int | None) -> None:
    measured = paced(lambda i: 20 if i < 14 else 5, steps=20, stride=stride)
    timed = [row.ns for row in measured.record.rows if row.kind == "timed"]
    assert len(timed) == 20
    assert max(timed) < 6_000_000
    assert measured.session.phase == "done"


def test_a_slow_lead_is_made_up_for_without_steps_asked_for(paced: Any) -> None:
    measured = paced(lambda i: 20 if i < 14 else 5, min_window_s=0.0)
    assert measured.kinds().count("timed") == 50


def test_a_lead_that_only_gets_slow_beside_what_follows_is_made_up_for(paced: Any) -> None:
    measured = paced(lambda i: 80 if i < 12 else 20 if i < 22 else 5, steps=20)
    timed = [row.ns for row in measured.record.rows if row.kind == "timed"]
    assert len(timed) == 20
    assert max(timed) < 6_000_000


def test_a_training_that_gets_faster_for_ever_is_not_measured_for_ever(paced: Any) -> None:
    measured = paced(lambda i: max(5, 20_000 >> i // 4), steps=8, warmup=None, script=400)
    assert measured.kinds().count("timed") == 8
    assert measured.session.phase == "done"


def test_pauses_are_made_up_for(measure: Any) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def train() -> None:
        for i in range(80):
            plain_loop(net, optimizer, 1)
            if i % 10 == 9:
                with torch.no_grad():
                    net(torch.randn(6, 8))

    for stride in (1, None):
        measured = measure(train, steps=30, warmup=5, stride=stride)
        assert measured.kinds().count("timed") == 30
        assert measured.session.phase == "done"


def test_what_a_script_lacks_of_the_steps_asked_for_is_said(paced: Any) -> None:
    record = paced(lambda i: 5, steps=50, script=30).record
    n = sum(row.kind == "timed" for row in record.rows)
    assert 20 <= n < 30
    assert f"--steps 50: the script ended after {n} timed steps" in record.notes
    assert not any("--steps" in note for note in paced(lambda i: 5, steps=20).record.notes)
