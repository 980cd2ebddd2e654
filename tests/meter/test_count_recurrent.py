"""Recurrent layers on a real step: the same model FLOPs fused and unfused, on real and on fake tensors.

A layer in one direction has W_ih (gates x width, inputs), W_hh (gates x width, outputs) and, with a projection, W_hr
(projection, width). Over N tokens of B sequences its forward is 2 N (W_ih + W_hh + W_hr). Its backward is that much
again for the weights, and as much for what flows on, without
- 2 N W_ih of the first layer where the input wants no gradient (raw data, a frozen embedding);
- 2 W_hh for each sequence, as its first step starts from a state that wants none (zeros by default).
Upper layers always send a gradient down. Dropout between layers, biases and `batch_first` change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from flopwise.flops.call import Call, Operand
from flopwise.flops.table import cost
from flopwise.meter.count import StepCounter, count_fake
from flopwise.records.rank import FlopCount

T, B, IN, H = 5, 3, 6, 8
LENGTHS = (5, 2, 2)
Kind = Callable[..., nn.RNNBase]
GATES: dict[Kind, int] = {nn.LSTM: 4, nn.GRU: 3, nn.RNN: 1}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two layers": {"num_layers": 2},
    "both directions": {"bidirectional": True},
    "two layers in both directions": {"num_layers": 2, "bidirectional": True},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
    "dropout": {"num_layers": 3, "dropout": 0.5},
}


def counted(step: Callable[[], object]) -> FlopCount:
    counter = StepCounter("test")
    counter.start()
    try:
        step()
    except BaseException:
        counter.abandon()
        raise
    return counter.stop()


def by_hand(
    net: nn.RNNBase, tokens: int, starts: tuple[int, ...], to_input: bool, to_state: bool
) -> int:
    """Model FLOPs of forward and backward; `starts` are the sequences that start in each direction."""
    directions = 2 if net.bidirectional else 1
    out = net.proj_size or net.hidden_size
    total = 0
    for layer in range(net.num_layers):
        width = net.input_size if layer == 0 else out * directions
        w_ih = GATES[type(net)] * net.hidden_size * width
        w_hh = GATES[type(net)] * net.hidden_size * out
        w_hr = net.proj_size * net.hidden_size
        for direction in range(directions):
            total += 3 * 2 * tokens * (w_ih + w_hh + w_hr)
            if layer == 0 and not to_input:
                total -= 2 * tokens * w_ih
            if not to_state:
                total -= 2 * starts[direction] * w_hh
    return total


def train(net: nn.RNNBase, x: Any, state: Any = None) -> Callable[[], object]:
    def step() -> None:
        out = net(x, state)[0]
        (out.data if isinstance(out, nn.utils.rnn.PackedSequence) else out).sum().backward()

    return step


def data(net: nn.RNNBase, requires_grad: bool = False) -> torch.Tensor:
    shape = (B, T, IN) if net.batch_first else (T, B, IN)
    return torch.randn(shape, requires_grad=requires_grad)


@pytest.fixture(params=["fused", "unfused"])
def fused(request: pytest.FixtureRequest) -> Any:
    """Whether oneDNN's LSTM may be used; GRU and RNN are taken apart either way."""
    with torch.backends.mkldnn.flags(enabled=request.param == "fused"):
        yield request.param == "fused"


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")
class TestByHand:
    @pytest.mark.parametrize("kind", GATES)
    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("to_input", [False, True])
    def test_each_form(self, kind: Kind, form: str, to_input: bool, fused: bool) -> None:
        net = kind(IN, H, **FORMS[form])
        count = counted(train(net, data(net, to_input)))
        assert count.needed == {"fp32": by_hand(net, T * B, (B, B), to_input, False)}
        assert count.coverage_frac == 1.0

    @pytest.mark.parametrize("kind", GATES)
    def test_the_first_state_wants_a_gradient(self, kind: Kind, fused: bool) -> None:
        net = kind(IN, H, 2)
        first = torch.zeros(2, B, H, requires_grad=True)
        state = (first, torch.zeros(2, B, H)) if kind is nn.LSTM else first
        count = counted(train(net, data(net), state))
        assert count.needed == {"fp32": by_hand(net, T * B, (B,), False, True)}

    @pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
    def test_projection(self) -> None:
        net = nn.LSTM(IN, H, 2, proj_size=3, bidirectional=True)
        count = counted(train(net, data(net)))
        assert count.needed == {"fp32": by_hand(net, T * B, (B, B), False, False)}

    @pytest.mark.parametrize("kind", GATES)
    @pytest.mark.parametrize("directions", [1, 2])
    def test_packed_sequences_count_real_tokens(self, kind: Kind, directions: int) -> None:
        net = kind(IN, H, 2, bidirectional=directions == 2)
        packed = pack_padded_sequence(data(net), torch.tensor(LENGTHS))
        count = counted(train(net, packed))
        # Backwards in time only the longest sequence starts alone; those that join a running batch bring their state
        # along in one tensor with it, so torch computes its gradient too.
        starts = (B, 1)
        assert count.needed == {"fp32": by_hand(net, sum(LENGTHS), starts, False, False)}

    def test_pytorchs_mnist_rnn(self) -> None:
        """The example's network: LSTM(28, 64) over 28 rows, then 64 x 32 and 32 x 10 on the last."""
        lstm, first, last = nn.LSTM(28, 64, batch_first=True), nn.Linear(64, 32), nn.Linear(32, 10)
        images = torch.randn(16, 28, 28)

        def step() -> None:
            out = lstm(images)[0][:, -1]
            F.log_softmax(last(F.relu(first(out))), 1).sum().backward()

        tokens, w_ih, w_hh = 16 * 28, 4 * 64 * 28, 4 * 64 * 64
        expected = 3 * 2 * tokens * (w_ih + w_hh) - 2 * tokens * w_ih - 2 * 16 * w_hh
        expected += 3 * 2 * 16 * (64 * 32 + 32 * 10)
        count = counted(step)
        assert count.needed == {"fp32": expected}
        assert count.executed == {"fp32": expected + 2 * tokens * w_ih + 2 * 16 * w_hh}


class TestWhatIsAskedFor:
    W_IH, W_HH = 4 * H * IN, 4 * H * H
    FORWARD = 2 * T * B * (W_IH + W_HH)
    START = 2 * B * W_HH

    def check(self, count: FlopCount, needed: int, executed: int | None = None) -> None:
        assert count.needed == {"fp32": needed}
        assert count.executed == {"fp32": executed or 3 * self.FORWARD}
        assert any("gradients that nobody asked for" in note for note in count.notes)

    @pytest.mark.parametrize("trained", [False, True])
    def test_an_embedding_below_wants_a_gradient_if_it_is_trained(self, trained: bool) -> None:
        table, net = nn.Embedding(7, IN).requires_grad_(trained), nn.LSTM(IN, H)
        ids = torch.randint(0, 7, (T, B))
        count = counted(lambda: net(table(ids))[0].sum().backward())
        self.check(
            count,
            3 * self.FORWARD - self.START - (0 if trained else 2 * T * B * self.W_IH),
        )

    def test_frozen_weights(self) -> None:
        net = nn.LSTM(IN, H).requires_grad_(False)
        count = counted(train(net, data(net, requires_grad=True)))
        self.check(count, 2 * self.FORWARD - self.START)

    def test_one_frozen_weight(self) -> None:
        net = nn.LSTM(IN, H)
        net.weight_hh_l0.requires_grad_(False)
        count = counted(train(net, data(net)))
        raw = 2 * T * B * self.W_IH
        self.check(count, 3 * self.FORWARD - raw - 2 * T * B * self.W_HH - self.START)

    def test_gradients_of_the_weights_alone(self) -> None:
        net = nn.LSTM(IN, H)
        x = data(net, requires_grad=True)
        count = counted(lambda: torch.autograd.grad(net(x)[0].sum(), list(net.parameters())))
        self.check(count, 3 * self.FORWARD - 2 * T * B * self.W_IH - self.START)

    def test_gradient_of_the_input_alone(self) -> None:
        net = nn.LSTM(IN, H)
        x = data(net, requires_grad=True)
        count = counted(lambda: torch.autograd.grad(net(x)[0].sum(), x))
        self.check(count, 2 * self.FORWARD - self.START)

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_checkpointed(self, reentrant: bool) -> None:
        net = nn.LSTM(IN, H)
        x = data(net, requires_grad=True)
        count = counted(lambda: checkpoint(net, x, use_reentrant=reentrant)[0].sum().backward())
        self.check(count, 3 * self.FORWARD - self.START, 4 * self.FORWARD)

    def test_a_gradient_that_is_differentiated_says_that_it_is_too_high(self) -> None:
        net = nn.LSTM(IN, H)
        x = data(net, requires_grad=True)

        def step() -> None:
            (grad,) = torch.autograd.grad(net(x)[0].sum(), x, create_graph=True)
            grad.square().sum().backward()

        assert any("too high" in note for note in counted(step).notes)
        assert not any("too high" in note for note in counted(train(net, x)).notes)


class First(nn.Module):
    def __init__(self, net: nn.RNNBase) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("to_input", [False, True])
def test_fake_tensors_count_the_same(kind: Kind, form: str, to_input: bool) -> None:
    net = kind(IN, H, **FORMS[form])
    x = data(net, to_input)
    real, fake = counted(train(net, x)), count_fake(First(net), (x,), {}, "")
    assert fake.needed == real.needed == {"fp32": by_hand(net, T * B, (B, B), to_input, False)}
    assert fake.executed == real.executed


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("to_input", [False, True])
@pytest.mark.parametrize("to_state", [False, True])
def test_cudnns_op_needs_what_an_unfused_layer_computes(
    kind: Kind, form: str, to_input: bool, to_state: bool
) -> None:
    """No GPU here: the op is called on paper, with the weights that torch would hand it."""
    net = kind(IN, H, **FORMS[form])
    flat = [w for cell in net.all_weights for w in cell]
    first = data(net)
    call = {
        "input": Operand(tuple(first.shape)),
        "weight": tuple(Operand(tuple(w.shape)) for w in flat),
        "weight_stride0": len(net.all_weights[0]),
        "hx": Operand((len(net.all_weights), B, H)),
        "bidirectional": net.bidirectional,
        "output_mask": (to_input, to_state, to_state, True),
    }
    parts = [cost(Call(f"aten::{name}", call)) for name in ("_cudnn_rnn", "_cudnn_rnn_backward")]
    needed = sum(part.needed for part in parts if part is not None)
    assert needed == by_hand(net, T * B, (B, B), to_input, to_state)
