"""Matrix products, convolutions, recurrent layers and linear algebra by hand."""

from __future__ import annotations

import math

import pytest

from flopwise.flops.call import Call, Cost, Operand, bytes_moved
from flopwise.flops.table import cost


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

    def test_grouped(self) -> None:
        assert flops("_grouped_mm", self=(M, K), mat2=(4, K, N)) == 2 * M * K * N
        assert flops("_grouped_mm", self=(M, K), mat2=(K, N)) == 2 * M * K * N
        assert flops("_grouped_mm", self=(4, M, K), mat2=(K, N)) == 2 * M * K * N
        assert flops("_grouped_mm", self=(4, M, K), mat2=(4, K, N)) == 8 * M * K * N

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
        assert (
            flops("conv_tbc", (9, 2, 6), self=(11, 2, 4), weight=(3, 4, 6)) == 2 * 9 * 2 * 6 * 3 * 4
        )


class TestRecurrent:
    T, B, IN, H = 10, 4, 32, 64

    def weights(self, gates: int, directions: int) -> list[tuple[int, ...]]:
        one: list[tuple[int, ...]] = [(gates * self.H, self.IN), (gates * self.H, self.H)]
        return (one + [(gates * self.H,)] * 2) * directions

    def test_cudnn_lstm(self) -> None:
        forward = self.T * self.B * 2 * 4 * self.H * (self.IN + self.H)
        got = flops("_cudnn_rnn", input=(self.T, self.B, self.IN), weight=self.weights(4, 1))
        assert got == forward == 1_966_080

    @pytest.mark.parametrize("directions", [1, 2])
    def test_cudnn_backward_leaves_out_an_input_gradient_that_nobody_wants(
        self, directions: int
    ) -> None:
        call = Call(
            "aten::_cudnn_rnn_backward",
            {
                "input": Operand((self.T, self.B, self.IN)),
                "weight": tuple(Operand(w) for w in self.weights(3, directions)),
                "weight_stride0": 4,
                "bidirectional": directions == 2,
                "output_mask": (False, True, False, True),
            },
        )
        found = cost(call)
        assert found is not None
        token = 2 * 3 * self.H * (self.IN + self.H) * directions
        first = 2 * 3 * self.H * self.IN * directions
        assert found.executed == self.T * self.B * 2 * token
        assert found.needed == self.T * self.B * (2 * token - first)

    def test_packed_input_has_a_row_a_token(self) -> None:
        got = flops("_cudnn_rnn", input=(25, self.IN), weight=self.weights(4, 1))
        assert got == 25 * 2 * 4 * self.H * (self.IN + self.H)


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
