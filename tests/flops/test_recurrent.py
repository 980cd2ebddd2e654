"""Fused recurrent layers by hand."""

from __future__ import annotations

from typing import Any

import pytest

from flopwise.flops.call import Call, Cost, Operand
from flopwise.flops.table import cost

T, B, IN, H = 10, 4, 32, 64
Shapes = list[tuple[int, ...]]


def weights(gates: int, directions: int = 1, layers: int = 1, bias: bool = True) -> Shapes:
    """W_ih and W_hh (and biases) of each layer and direction, as cuDNN's op gets them."""
    biases: Shapes = [(gates * H,)] * (2 if bias else 0)
    found: Shapes = []
    for layer in range(layers):
        width = IN if layer == 0 else directions * H
        found += ([(gates * H, width), (gates * H, H)] + biases) * directions
    return found


def cudnn(
    name: str, gates: int, directions: int = 1, layers: int = 1, **args: object
) -> Cost | None:
    given: dict[str, object] = {
        "input": Operand((T, B, IN)),
        "weight": tuple(Operand(w) for w in weights(gates, directions, layers)),
        "weight_stride0": 4,
        "hx": Operand((layers * directions, B, H)),
        "bidirectional": directions == 2,
    }
    return cost(Call(f"aten::{name}", {**given, **args}))


def test_a_token_meets_each_matrix_once() -> None:
    forward = T * B * 2 * 4 * H * (IN + H)
    assert cudnn("_cudnn_rnn", 4) == Cost.exactly(forward) == Cost.exactly(1_966_080)


def test_packed_input_has_a_row_a_token() -> None:
    got = cudnn("_cudnn_rnn", 4, input=Operand((25, IN)))
    assert got == Cost.exactly(25 * 2 * 4 * H * (IN + H))


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("to_input", [False, True])
@pytest.mark.parametrize("to_state", [False, True])
@pytest.mark.parametrize("to_weights", [False, True])
def test_cudnn_executes_what_nobody_asks_for(
    directions: int, layers: int, to_input: bool, to_state: bool, to_weights: bool
) -> None:
    mask = (to_input, to_state, to_state, to_weights)
    found = cudnn("_cudnn_rnn_backward", 3, directions, layers, output_mask=mask)
    assert found is not None
    later = (layers - 1) * (directions * H + H)
    matrices = 3 * H * directions * (IN + H + later)
    assert found.executed == 2 * T * B * matrices * (2 if to_weights else 1)
    # The first layer's W_ih leads to the input; one step of each sequence through W_hh to the state.
    unasked = 0 if to_input else 2 * T * B * 3 * H * IN * directions
    unasked += 0 if to_state else 2 * B * 3 * H * H * directions * layers
    assert found.needed == found.needed_causal == found.executed - unasked


def test_a_call_whose_matrices_cannot_be_told_apart_is_unknown() -> None:
    raw: dict[str, Any] = {"output_mask": (False, False, False, True)}
    assert cudnn("_cudnn_rnn_backward", 3, **raw) is not None
    assert cudnn("_cudnn_rnn_backward", 3, weight_stride0=0, **raw) is None
    assert cudnn("_cudnn_rnn_backward", 3, weight_stride0=3, **raw) is None
    assert cudnn("_cudnn_rnn_backward", 3, hx=None, **raw) is None


@pytest.mark.parametrize("without_bias", [2, 4])
def test_the_stride_is_that_of_the_list(without_bias: int) -> None:
    made = tuple(Operand(w) for w in weights(3, bias=without_bias == 4))
    found = cudnn(
        "_cudnn_rnn_backward",
        3,
        weight=made,
        weight_stride0=without_bias,
        output_mask=(False, False, False, True),
    )
    assert found is not None
    assert found.executed - found.needed == 2 * T * B * 3 * H * IN + 2 * B * 3 * H * H


class TestOneLayerOfOneDnn:
    def backward(self, **args: object) -> Cost | None:
        given: dict[str, object] = {
            "input": Operand((T, B, IN)),
            "weight1": Operand((4 * H, IN)),
            "weight2": Operand((4 * H, H)),
            "hx_": Operand((B, H)),
        }
        return cost(Call("aten::mkldnn_rnn_layer_backward", {**given, **args}))

    def test_all_gradients_where_nothing_tells(self) -> None:
        assert self.backward() == Cost.exactly(2 * 2 * T * B * 4 * H * (IN + H))

    def test_only_what_autograd_asks_for_is_needed(self) -> None:
        # input, W_ih, W_hh, both biases, state, cell: raw data, and zeros as the first state.
        found = self.backward(wanted=(False, True, True, True, True, False, False))
        assert found is not None
        w_ih, w_hh = 4 * H * IN, 4 * H * H
        assert found.executed == 2 * T * B * 2 * (w_ih + w_hh)
        assert found.needed == 2 * T * B * (w_ih + 2 * w_hh) - 2 * B * w_hh

    def test_frozen_weights(self) -> None:
        found = self.backward(wanted=(True, False, False, False, False, True, True))
        assert found is not None
        assert found.needed == 2 * T * B * 4 * H * (IN + H)
        assert found.executed == 2 * found.needed

    def test_a_mask_of_another_op_is_unknown(self) -> None:
        assert self.backward(wanted=(True, True)) is None
