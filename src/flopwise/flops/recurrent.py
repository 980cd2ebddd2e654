"""Recurrent layers that run as one kernel (cuDNN, MIOpen, oneDNN): each weight matrix meets each token once.

Forward, a token costs 2 W_ih + 2 W_hh (+ 2 W_hr with a projection) a layer and direction. Backward needs the same once
for the gradients of the weights and once for those that flow on: through W_ih to the layer below, through W_hh to the
step before, through W_hr to the state. Two of these nobody may ask for: that of the first layer's input (raw data) and
that of the state before the first step (zeros by default), which is one step of each sequence through W_hh. The kernels
compute both all the same, so they are executed and not needed; an unfused layer is spared both by autograd.

Source: the equations of torch.nn.LSTM, GRU and RNN (every gate is W_ih x + W_hh h, a projection is W_hr h).
cudnnRNNBackwardData_v8 always writes dx, and torch always runs it (pytorch/pytorch
aten/src/ATen/native/cudnn/RNN.cpp, `_cudnn_rnn_backward`: "unconditionally compute this gradient, because it mutates
reserve"); the weights' gradients are a call of their own. oneDNN's backward cell always multiplies diff_src_layer and
both weights' gradients (oneapi-src/oneDNN src/cpu/rnn/cell_common.cpp).
"""

from __future__ import annotations

from flopwise.flops.call import WANTED, Call, Cost, Operand

#: What `mkldnn_rnn_layer_backward` gives gradients for, in the order of the op that it belongs to.
LAYER_EDGES = ("input", "weight_ih", "weight_hh", "bias_ih", "bias_hh", "hx", "cx")


def fused(call: Call) -> Cost:
    """Returns the FLOPs of `_cudnn_rnn` or `miopen_rnn`: 2 tokens times the elements of all weight matrices."""
    return Cost.exactly(2 * _tokens(call) * sum(w.numel for w in _matrices(call)))


def fused_backward(call: Call) -> Cost:
    """Returns the FLOPs of the gradients that `output_mask` (input, hx, cx, weights) asks for.

    Ignores: that only some layers' weights may be trained, as the mask has one flag for all of them.

    Raises:
        LookupError: `weight_stride0` or `hx` is missing, so the matrices cannot be told apart.
    """
    tokens, matrices = _tokens(call), sum(w.numel for w in _matrices(call))
    to_input, to_state, _, to_weights = call.mask("output_mask", 4)
    executed = 2 * tokens * matrices * (2 if to_weights else 1)
    unasked = 0 if to_input else 2 * tokens * _first_layer(call)
    if not to_state:
        unasked += 2 * _sequences(call) * _recurrent(call)
    return Cost(executed - unasked, executed - unasked, executed)


def layer(call: Call) -> Cost:
    """Returns the FLOPs of `mkldnn_rnn_layer`, one layer in one direction."""
    matrices = call.tensor("weight0").numel + call.tensor("weight1").numel
    return Cost.exactly(2 * _tokens(call) * matrices)


def layer_backward(call: Call) -> Cost:
    """Returns the FLOPs of `mkldnn_rnn_layer_backward`, one layer in one direction.

    The kernel computes all gradients. The op has no mask: `wanted` tells what autograd asks for, in the
    order of `LAYER_EDGES`; where it is not given, all of them count.
    """
    tokens, w_ih, w_hh = _tokens(call), call.tensor("weight1").numel, call.tensor("weight2").numel
    mask = call.mask(WANTED, len(LAYER_EDGES))
    wanted = dict(zip(LAYER_EDGES, mask, strict=True))
    products_ih = wanted["input"] + wanted["weight_ih"]
    products_hh = 1 + wanted["weight_hh"]
    needed = 2 * tokens * (w_ih * products_ih + w_hh * products_hh)
    if not wanted["hx"]:
        needed -= 2 * _sequences(call) * w_hh
    return Cost(needed, needed, 2 * tokens * 2 * (w_ih + w_hh))


def _tokens(call: Call) -> int:
    """Returns steps times sequences; packed input has one row a token."""
    shape = call.tensor("input").shape
    return shape[0] if len(shape) == 2 else shape[0] * shape[1]


def _sequences(call: Call) -> int:
    """Returns how many sequences start: the state is (layers and directions, sequences, width), or the last two."""
    return call.tensor("hx", "hx_").shape[-2]


def _matrices(call: Call) -> list[Operand]:
    return [w for w in call.tensors("weight") if len(w.shape) == 2]


def _cells(call: Call) -> list[tuple[Operand, ...]]:
    """Returns the weights of each layer and direction: W_ih, W_hh, then biases, then W_hr.

    Raises:
        LookupError: `weight_stride0` does not cut the list of weights into equal parts.
    """
    weights, stride = call.tensors("weight"), call.integer("weight_stride0", default=0)
    if stride < 2 or len(weights) % stride:
        raise LookupError(f"{call.name}: {len(weights)} weights in groups of {stride}")
    return [weights[i : i + stride] for i in range(0, len(weights), stride)]


def _first_layer(call: Call) -> int:
    directions = 2 if call.flag("bidirectional") else 1
    return sum(cell[0].numel for cell in _cells(call)[:directions])


def _recurrent(call: Call) -> int:
    return sum(cell[1].numel for cell in _cells(call))
