"""Matrix products: 2 m n k for an (m, k) by (k, n) product, whatever the op is called.

Source: BLAS convention, one multiply and one add for each of the m n k terms; torch.utils.flop_counter agrees.
Ignores: the bias or the added matrix (`addmm`), which is pointwise work.
"""

from __future__ import annotations

import math

from flopwise.flops.call import Call, Cost, Operand, Shape

LEFT = ("self", "input", "mat1", "batch1", "mat", "x1", "X")


OFFSETS_NOTE = "a grouped product is counted with all of its rows: how many of them belong to a group was not read"


def depth(operand: Operand) -> int:
    """Returns the length of the summed dimension, the last of a left operand; 4-bit pairs count twice."""
    return operand.shape[-1] * (2 if operand.dtype == "float4_e2m1fn_x2" else 1)


def mm(call: Call) -> Cost:
    """Returns the FLOPs of `mm(self, mat2)` and its scaled and integer forms, 2 m n k."""
    return Cost.exactly(_product(call.tensor("self", "mat1"), call.tensor("mat2")))


def addmm(call: Call) -> Cost:
    """Returns the FLOPs of `addmm(self, mat1, mat2)`, 2 m n k; the addition is pointwise."""
    return Cost.exactly(_product(call.tensor("mat1"), call.tensor("mat2")))


def bmm(call: Call) -> Cost:
    """Returns the FLOPs of `bmm(self, mat2)`, 2 b m n k."""
    return Cost.exactly(_product(call.tensor("self"), call.tensor("mat2")))


def baddbmm(call: Call) -> Cost:
    """Returns the FLOPs of `baddbmm` and `addbmm(self, batch1, batch2)`, 2 b m n k."""
    return Cost.exactly(_product(call.tensor("batch1"), call.tensor("batch2")))


def matvec(call: Call) -> Cost:
    """Returns the FLOPs of `mv(self, vec)` and `addmv(self, mat, vec)`, 2 m k."""
    return Cost.exactly(2 * call.tensor("mat", "self").numel)


def dot(call: Call) -> Cost:
    """Returns the FLOPs of `dot` and `vdot`, 2 n."""
    return Cost.exactly(2 * call.tensor("self").numel)


def linear(call: Call) -> Cost:
    """Returns the FLOPs of `linear(input, weight)` with a weight of (n, k): 2 rows n k."""
    left, weight = call.tensor("input", "self", "X"), call.tensor("weight", "mat2", "W")
    if left.shape[-1] != weight.shape[-1]:
        raise LookupError(f"{call.name}: packed weight {weight.shape}")
    return Cost.exactly(2 * left.numel * math.prod(weight.shape[:-1]))


def linear_backward(call: Call) -> Cost:
    """Returns the FLOPs of the gradients of `linear` that the mask asks for, the forward's for each of two."""
    wanted = call.mask("output_mask", 3)
    weight = call.tensor("weight")
    one = 2 * call.tensor("grad_output").numel * weight.shape[-1]
    return Cost.exactly(one * (wanted[0] + wanted[1]))


def affine_grid(call: Call) -> Cost:
    """Returns the FLOPs of `affine_grid_generator(theta)`, each position of the grid times the matrix of its sample."""
    return Cost.exactly(2 * call.out().numel * call.tensor("theta").shape[-1])


def linear_cross_entropy(call: Call) -> Cost:
    """Returns the FLOPs of torch's chunked `linear_cross_entropy`, whose forward pass also computes the gradients.

    The logits are one product of (rows, k) and (k, classes), each gradient asked for is another.
    Source: torch.nn.modules.linear_cross_entropy (torch 2.13).
    """
    one = 2 * call.tensor("input").numel * call.tensor("linear_weight").shape[0]
    wanted = call.flag("compute_input_grad") + call.flag("compute_linear_weight_grad")
    return Cost.exactly(one * (1 + wanted))


def packed_linear(call: Call) -> Cost:
    """Returns the FLOPs of a product whose weight is packed: 2 elements of the result times the left's depth."""
    return Cost.exactly(2 * call.out().numel * depth(call.tensor(*LEFT)))


def matmul(call: Call) -> Cost:
    """Returns the FLOPs of `matmul(self, other)` by its broadcasting rules."""
    left, right = (
        call.tensor("self", "input", "tensor1").shape,
        call.tensor("other", "tensor2").shape,
    )
    if len(left) == 1:
        left = (1, *left)
    if len(right) == 1:
        right = (*right, 1)
    batch = math.prod(_broadcast(left[:-2], right[:-2]))
    return Cost.exactly(2 * batch * left[-2] * left[-1] * right[-1])


def grouped_mm(call: Call) -> Cost:
    """Returns the FLOPs of `_grouped_mm(self, mat2, offs)`, where each row (or each summed index) has one group.

    (M, K) by (G, K, N) and (M, K) by (K, N) cut along K are 2 M K N; (G, M, K) by (K, N) cut along N is
    2 M K N too; (G, M, K) by (G, K, N) is 2 G M K N. Rows past the last offset belong to no group and are not
    multiplied; where the offsets were not read they count, and a note says so.
    """
    left, right = call.tensor("self"), call.tensor("mat2")
    m, k, n = left.shape[-2], depth(left), right.shape[-1]
    if len(left.shape) == 3 and len(right.shape) == 3:
        return Cost.exactly(2 * left.shape[0] * m * k * n)
    ends = call.tensor("offs").values
    if ends is None:
        whole = 2 * m * k * n
        return Cost(whole, whole, whole, OFFSETS_NOTE)
    owned = ends[-1] if ends else 0
    if len(left.shape) == 3:
        return Cost.exactly(2 * m * k * min(n, owned))
    if len(right.shape) == 3:
        return Cost.exactly(2 * min(m, owned) * k * n)
    return Cost.exactly(2 * m * min(k, owned * (k // left.shape[-1])) * n)


def trilinear(call: Call) -> Cost:
    """Returns the FLOPs of `_trilinear` (bilinear layers and their gradients): two products, one after the other.

    The three operands are broadcast to the same dimensions and multiplied. Dimensions that only the first two share
    are summed in the first product, the others in the second; a product that sums nothing is pointwise. One dimension
    is looped over, so that both products run for each of its elements.
    Source: pytorch/pytorch aten/src/ATen/native/Linear.cpp, `_trilinear`.
    """
    operands = [
        _spread(call.tensor(f"i{n}").shape, _integers(call, f"expand{n}")) for n in (1, 2, 3)
    ]
    one, two, three = operands
    looped = call.integer("unroll_dim", default=1)
    summed = [d for d in _integers(call, "sumdim") if d != looped]
    first = [d for d in summed if d not in three]
    sizes = {**one, **two, **three}
    pair = {*one, *two, looped}
    rest = {d for d in pair if d not in first} | {*three}
    flops = 2 * math.prod(sizes[d] for d in pair) if first else 0
    if len(first) < len(summed):
        flops += 2 * math.prod(sizes[d] for d in rest)
    return Cost.exactly(flops)


def euclidean_dist(call: Call) -> Cost:
    """Returns the FLOPs of `_euclidean_dist(x1, x2)`, the matrix product inside it: 2 P R M.

    Ignores: the two columns that the kernel appends to carry the norms.
    """
    left, right = call.tensor("x1").shape, call.tensor("x2").shape
    return Cost.exactly(2 * math.prod(left) * right[-2])


def cdist(call: Call) -> Cost:
    """Returns the FLOPs of `_cdist_forward`: of its matrix product if it uses one, else 0 (pointwise distances).

    Source: torch.cdist documentation: the product is used for p = 2 when P > 25 or R > 25, unless told otherwise.
    """
    left, right = call.tensor("x1").shape, call.tensor("x2").shape
    mode = call.integer("compute_mode", default=0)
    large = left[-2] > 25 or right[-2] > 25
    if call.args.get("p") != 2 or mode == 2 or not (large or mode == 1):
        return Cost.exactly(0)
    return Cost.exactly(2 * math.prod(left) * right[-2])


def _product(left: Operand, right: Operand) -> int:
    """Returns 2 b m n k, having checked that the operands fit."""
    if left.shape[-1] != right.shape[-2]:
        raise LookupError(f"inner dimensions {left.shape} and {right.shape} differ")
    return 2 * math.prod(left.shape[:-1]) * depth(left) * right.shape[-1]


def _broadcast(one: Shape, other: Shape) -> Shape:
    size = max(len(one), len(other))
    one, other = (1,) * (size - len(one)) + one, (1,) * (size - len(other)) + other
    return tuple(max(a, b) if min(a, b) else 0 for a, b in zip(one, other, strict=True))


def _integers(call: Call, name: str) -> tuple[int, ...]:
    value = call.args.get(name)
    if not isinstance(value, tuple):
        raise LookupError(f"{call.name}: no {name}")
    return tuple(int(v) for v in value)


def _spread(shape: Shape, missing: tuple[int, ...]) -> dict[int, int]:
    """Returns the sizes of a tensor by dimension, had it been given the missing ones."""
    there = [d for d in range(len(shape) + len(missing)) if d not in missing]
    return dict(zip(there, shape, strict=True))
