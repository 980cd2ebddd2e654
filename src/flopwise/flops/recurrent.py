"""Recurrent layers that run as one kernel (cuDNN, oneDNN): each weight matrix meets each token once.

Source: the equations of torch.nn.LSTM, GRU and RNN: every gate is W_ih x + W_hh h; a projection is W_hr h.
"""

from __future__ import annotations

from flopwise.flops.call import Call, Cost, Operand


def fused(call: Call) -> Cost:
    """Returns the FLOPs of `_cudnn_rnn` or `miopen_rnn`: 2 tokens times the elements of all weight matrices."""
    return Cost.exactly(2 * _tokens(call) * sum(w.numel for w in _matrices(call)))


def fused_backward(call: Call) -> Cost:
    """Returns the FLOPs of the gradients that `output_mask` (input, hx, cx, weights) asks for.

    The state's gradient passes through every matrix. The input's passes through the first layer's W_ih only, which
    is left out of `needed` where nobody asks for it; the kernel computes it all the same.
    """
    tokens, matrices = _tokens(call), sum(w.numel for w in _matrices(call))
    wanted = call.mask("output_mask", 4)
    weights = matrices if wanted[3] else 0
    skipped = 0 if wanted[0] else _first_layer(call)
    needed = 2 * tokens * (matrices - skipped + weights)
    return Cost(needed, needed, 2 * tokens * (matrices + weights))


def layer(call: Call) -> Cost:
    """Returns the FLOPs of `mkldnn_rnn_layer`, one layer in one direction."""
    matrices = call.tensor("weight0").numel + call.tensor("weight1").numel
    return Cost.exactly(2 * _tokens(call) * matrices)


def layer_backward(call: Call) -> Cost:
    """Returns the FLOPs of `mkldnn_rnn_layer_backward`, which computes all gradients: twice the forward's."""
    matrices = call.tensor("weight1").numel + call.tensor("weight2").numel
    return Cost.exactly(2 * 2 * _tokens(call) * matrices)


def _tokens(call: Call) -> int:
    """Returns steps times sequences; packed input has one row a token."""
    shape = call.tensor("input").shape
    return shape[0] if len(shape) == 2 else shape[0] * shape[1]


def _matrices(call: Call) -> list[Operand]:
    return [w for w in call.tensors("weight") if len(w.shape) == 2]


def _first_layer(call: Call) -> int:
    weights, stride = call.tensors("weight"), call.integer("weight_stride0", default=0)
    directions = 2 if call.flag("bidirectional") else 1
    return sum(weights[i * stride].numel for i in range(directions) if i * stride < len(weights))
