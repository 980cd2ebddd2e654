"""Matrix products, convolutions and linear algebra by hand."""

from __future__ import annotations

import math

import pytest

from flopwise.flops.call import Call, Cost, Operand, bytes_moved
from flopwise.flops.table import RULES, cost, rule_of


def flops(name: str, out: tuple[int, ...] | None = None, **args: object) -> int | None:
    """FLOPs of a call whose tensors are given as shapes, lists of tensors as lists of shapes."""

    def operand(value: object) -> object:
        if isinstance(value, list):
            return tuple(Operand(v) for v in value)
        if isinstance(value, tuple) and value and all(type(v) is int for v in value):
            return Operand(value)
        return value

    name = name if "::" in name else f"aten::{name}"
    made = Call(name, {k: operand(v) for k, v in args.items()}, (Operand(out),) if out else ())
    found = cost(made)
    assert found is None or found == Cost(found.needed, found.needed, found.executed)
    return found.needed if found else None


M, K, N = 3, 5, 7


class TestMatmul:
    @pytest.mark.parametrize(
        ("name", "args", "expected"),
        [
            ("mm", {"self": (M, K), "mat2": (K, N)}, 2 * M * K * N),
            ("_int_mm", {"self": (M, K), "mat2": (K, N)}, 2 * M * K * N),
            ("_scaled_mm", {"self": (M, K), "mat2": (K, N)}, 2 * M * K * N),
            ("addmm", {"self": (N,), "mat1": (M, K), "mat2": (K, N)}, 2 * M * K * N),
            ("bmm", {"self": (4, M, K), "mat2": (4, K, N)}, 8 * M * K * N),
            ("baddbmm", {"self": (4, M, N), "batch1": (4, M, K), "batch2": (4, K, N)}, None),
            ("mv", {"self": (M, K), "vec": (K,)}, 2 * M * K),
            ("addmv", {"self": (M,), "mat": (M, K), "vec": (K,)}, 2 * M * K),
            ("dot", {"self": (K,), "tensor": (K,)}, 2 * K),
            ("linear", {"input": (4, M, K), "weight": (N, K)}, 8 * M * K * N),
            ("linear", {"input": (K,), "weight": (N, K)}, 2 * K * N),
            ("matmul", {"self": (K,), "other": (K,)}, 2 * K),
            ("matmul", {"self": (M, K), "other": (K,)}, 2 * M * K),
            ("matmul", {"self": (2, 1, M, K), "other": (6, K, N)}, 24 * M * K * N),
            ("_euclidean_dist", {"x1": (2, M, K), "x2": (2, N, K)}, 4 * M * K * N),
        ],
    )
    def test_is_two_for_each_multiply_add(
        self, name: str, args: dict[str, object], expected: int | None
    ) -> None:
        if name == "baddbmm":  # batches are spelled out differently there
            assert cost(
                Call(
                    "aten::baddbmm",
                    {"batch1": Operand((4, M, K)), "batch2": Operand((4, K, N))},
                )
            ) == Cost.exactly(8 * M * K * N)
        else:
            assert flops(name, **args) == expected

    @pytest.mark.parametrize(
        ("left", "right", "axis"),
        [((9, 8), (4, 8, 7), 9), ((9, 8), (8, 7), 8), ((4, 9, 8), (8, 7), 7)],
    )
    def test_grouped(self, left: tuple[int, ...], right: tuple[int, ...], axis: int) -> None:
        whole = 2 * 9 * 8 * 7

        def grouped(ends: tuple[int, ...] | None) -> Cost | None:
            args = {"self": Operand(left), "mat2": Operand(right)}
            return cost(Call("aten::_grouped_mm", {**args, "offs": Operand((4,), "int32", ends)}))

        assert grouped((2, 2, 3, axis)) == Cost.exactly(whole)
        # What lies past the last offset belongs to no group and is not multiplied.
        assert grouped((2, 2, 3, 5)) == Cost.exactly(whole * 5 // axis)
        unread = grouped(None)
        assert unread is not None
        assert (unread.needed, unread.executed) == (whole, whole)
        assert unread.note is not None

    def test_batched_groups_have_no_offsets(self) -> None:
        assert flops("_grouped_mm", self=(4, M, K), mat2=(4, K, N)) == 8 * M * K * N
        assert flops("_grouped_mm", self=(M, K), mat2=(4, K, N)) is None

    @pytest.mark.parametrize("name", ["addmm_", "baddbmm_", "addmv_", "mm"])
    def test_in_place_forms_have_the_same_rule(self, name: str) -> None:
        assert rule_of(f"aten::{name}") is RULES[f"aten::{name.rstrip('_')}"]

    def test_bilinear_layers_and_their_gradients(self) -> None:
        # y[n,k] = sum_ij a[n,i] w[k,i,j] b[n,j]: a w sums i, then b sums j.
        n, i, j, k = 4, 5, 6, 7
        a, b, w, y = (n, i), (n, j), (k, i, j), (n, k)

        def trilinear(shapes: list[tuple[int, ...]], expand: list[tuple[int, ...]]) -> int | None:
            args: dict[str, object] = {}
            for place in (1, 2, 3):
                args[f"i{place}"] = Operand(shapes[place - 1])
                args[f"expand{place}"] = expand[place - 1]
            args["sumdim"] = expand[3]
            found = cost(Call("aten::_trilinear", args))
            return found.needed if found else None

        in_a, in_w, in_b, in_y = (1, 3), (0,), (1, 2), (2, 3)
        one = 2 * n * i * j * k
        assert trilinear([a, w, b], [in_a, in_w, in_b, in_y]) == one + 2 * n * k * j
        # In the gradients one of the two products sums nothing and is pointwise.
        assert trilinear([y, w, b], [in_y, in_w, in_b, in_a]) == one
        assert trilinear([a, y, b], [in_a, in_y, in_b, in_w]) == one
        assert trilinear([a, w, y], [in_a, in_w, in_y, in_b]) == one

    def test_affine_grid(self) -> None:
        got = flops("affine_grid_generator", (3, 8, 9, 2), theta=(3, 2, 3))
        assert got == 3 * 8 * 9 * (2 * 2 * 3)

    @pytest.mark.parametrize("wanted", [(False, False), (True, False), (True, True)])
    def test_fused_head_and_loss_computes_its_gradients_at_once(
        self, wanted: tuple[bool, bool]
    ) -> None:
        got = flops(
            "torch_nn::_linear_cross_entropy_batch_chunked",
            input=(8, 16),
            linear_weight=(32, 16),
            compute_input_grad=wanted[0],
            compute_linear_weight_grad=wanted[1],
        )
        assert got == 2 * 8 * 16 * 32 * (1 + sum(wanted))

    def test_four_bit_elements_come_in_pairs(self) -> None:
        left = Operand((M, K), "float4_e2m1fn_x2")
        found = cost(Call("aten::_scaled_mm", {"self": left, "mat2": Operand((K, N))}))
        assert found == Cost.exactly(2 * M * 2 * K * N)

    def test_shapes_that_do_not_fit_are_unknown(self) -> None:
        assert flops("mm", self=(M, K), mat2=(K + 1, N)) is None
        assert flops("mm", self=(M, K)) is None

    def test_linear_backward_by_its_mask(self) -> None:
        one = 2 * M * K * N
        for wanted in ((True, True, True), (False, True, True), (False, False, True)):
            got = flops(
                "linear_backward",
                self=(M, K),
                grad_output=(M, N),
                weight=(N, K),
                output_mask=wanted,
            )
            assert got == one * sum(wanted[:2])

    def test_cdist_uses_a_product_only_for_many_points(self) -> None:
        many = {"x1": (2, 30, K), "x2": (2, 10, K)}
        assert flops("_cdist_forward", **many, p=2.0) == 2 * 2 * 30 * 10 * K
        assert flops("_cdist_forward", **many, p=1.0) == 0
        assert flops("_cdist_forward", **many, p=2.0, compute_mode=2) == 0
        assert flops("_cdist_forward", x1=(2, 9, K), x2=(2, 9, K), p=2.0) == 0


class TestConvolution:
    def test_groups_dilation_and_transposition(self) -> None:
        plain = flops(
            "convolution", (2, 8, 6, 6), input=(2, 4, 8, 8), weight=(8, 4, 3, 3), groups=1
        )
        assert plain == 2 * (2 * 8 * 6 * 6) * 4 * 9
        grouped = flops(
            "convolution", (2, 8, 6, 6), input=(2, 4, 8, 8), weight=(8, 1, 3, 3), groups=4
        )
        assert grouped == plain // 4 if plain else False
        back = flops(
            "convolution", (2, 4, 17, 17), input=(2, 8, 8, 8), weight=(8, 4, 3, 3), transposed=True
        )
        assert back == 2 * (2 * 8 * 8 * 8) * 4 * 9

    @pytest.mark.parametrize(
        "mask", [(True, True, True), (False, True, True), (True, False, False)]
    )
    @pytest.mark.parametrize("groups", [1, 4])
    def test_backward_is_one_forward_for_each_gradient(
        self, mask: tuple[bool, ...], groups: int
    ) -> None:
        got = flops(
            "convolution_backward",
            grad_output=(2, 8, 6, 6),
            input=(2, 4, 8, 8),
            weight=(8, 4 // groups, 3, 3),
            groups=groups,
            transposed=False,
            output_mask=mask,
        )
        assert got == 2 * (2 * 8 * 6 * 6) * (4 // groups) * 9 * sum(mask[:2])

    def test_transposed_backward_uses_the_input_not_the_larger_output(self) -> None:
        got = flops(
            "convolution_backward",
            grad_output=(2, 4, 17, 17),
            input=(2, 8, 8, 8),
            weight=(8, 4, 3, 3),
            transposed=True,
            output_mask=(True, True, False),
        )
        assert got == 2 * 2 * (2 * 8 * 8 * 8) * 4 * 9

    def test_time_batch_channel_layout(self) -> None:
        one = 2 * 9 * 2 * 6 * 3 * 4
        assert flops("conv_tbc", (9, 2, 6), self=(11, 2, 4), weight=(3, 4, 6)) == one
        args = {"self": Operand((9, 2, 6)), "weight": Operand((3, 4, 6))}
        assert cost(Call("aten::conv_tbc_backward", args)) == Cost.exactly(2 * one)
        raw = {**args, "wanted": (False, True, True)}
        assert cost(Call("aten::conv_tbc_backward", raw)) == Cost(one, one, 2 * one)


class TestLinearAlgebra:
    @pytest.mark.parametrize(
        ("name", "out", "args", "expected"),
        [
            ("linalg_cholesky_ex", (2, 6, 6), {"self": (2, 6, 6)}, 2 * 6**3 // 3),
            ("linalg_inv_ex", (6, 6), {"A": (6, 6)}, 2 * 6**3),
            ("_linalg_solve_ex", (6, 2), {"A": (6, 6), "B": (6, 2)}, 2 * 6**3 // 3 + 2 * 36 * 2),
            ("linalg_lu_factor_ex", (6, 6), {"A": (6, 6)}, 2 * 6**3 // 3),
            ("linalg_solve_triangular", (6, 2), {"self": (6, 6), "B": (6, 2)}, 36 * 2),
            ("triangular_solve", (6, 2), {"self": (6, 2), "A": (6, 6)}, 36 * 2),
            ("linalg_qr", (9, 6), {"A": (9, 6), "mode": "r"}, 2 * 36 * 9 - 2 * 6**3 // 3),
            ("linalg_qr", (9, 6), {"A": (9, 6)}, 2 * (2 * 36 * 9 - 2 * 6**3 // 3)),
        ],
    )
    def test_nominal_counts(
        self, name: str, out: tuple[int, ...], args: dict[str, object], expected: int
    ) -> None:
        assert flops(name, out, **args) == expected

    def test_fourier_transforms(self) -> None:
        call = Call("aten::_fft_c2c", {"self": Operand((3, 64), "complex64"), "dim": (1,)})
        assert cost(call) == Cost.exactly(3 * 5 * 64 * int(math.log2(64)))
        real = Call("aten::_fft_r2c", {"self": Operand((3, 64)), "dim": (-1,)})
        assert cost(real) == Cost.exactly(3 * 5 * 64 * 6 // 2)

    @pytest.mark.parametrize("name", ["_linalg_svd", "_linalg_eigh", "linalg_eig", "linalg_lstsq"])
    def test_iterations_have_no_count(self, name: str) -> None:
        assert flops(name, self=(6, 6), A=(6, 6)) is None


def test_bytes_are_those_of_operands_and_results_once() -> None:
    call = Call(
        "aten::mm",
        {"self": Operand((M, K), "bfloat16"), "mat2": Operand((K, N), "bfloat16")},
        (Operand((M, N), "float32"),),
    )
    assert bytes_moved(call) == 2 * (M * K + K * N) + 4 * M * N
