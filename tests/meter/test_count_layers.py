"""Ops and layers that people use, each against a formula written down by hand.

"Trained" is a forward and a backward to every operand: three times the forward, if every product has two operands that
want a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.func
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from flopwise.meter.count import StepCounter
from flopwise.records.rank import FlopCount

Step = Callable[[], object]


def counted(step: Step) -> FlopCount:
    counter = StepCounter("test")
    counter.start()
    try:
        step()
    except BaseException:
        counter.abandon()
        raise
    return counter.stop()


def r(*shape: int) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)


def train(net: nn.Module, *args: Any, **kwargs: Any) -> Step:
    def step() -> None:
        out = net(*args, **kwargs)
        (out[0] if isinstance(out, tuple) else out).sum().backward()

    return step


def back(function: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> Step:
    return lambda: function(*args, **kwargs).sum().backward()


CONVOLUTIONS: dict[str, tuple[Step, int]] = {
    # Transposed: 2 x input x (C_out / groups) x kernel, whatever padding, dilation and stride make of the output.
    "transposed 1d, raw data": (
        train(
            nn.ConvTranspose1d(8, 12, 3, stride=2, output_padding=1, dilation=2, groups=4),
            torch.randn(2, 8, 7),
        ),
        2 * (2 * 2 * 8 * 7 * 3 * 3),
    ),
    "transposed 2d": (
        train(
            nn.ConvTranspose2d(
                8, 6, (3, 2), stride=2, padding=1, output_padding=1, groups=2, dilation=2
            ),
            r(2, 8, 5, 6),
        ),
        3 * (2 * 2 * 8 * 5 * 6 * 3 * 6),
    ),
    "transposed 3d": (
        train(nn.ConvTranspose3d(4, 6, 2, groups=2), r(1, 4, 3, 4, 5)),
        3 * (2 * 4 * 3 * 4 * 5 * 3 * 8),
    ),
    # Forward: 2 x output x (C_in / groups) x kernel.
    "same, dilated, with a bias, raw data": (
        train(nn.Conv2d(3, 8, 3, padding="same", dilation=2), torch.randn(2, 3, 9, 9)),
        2 * (2 * 2 * 8 * 81 * 3 * 9),
    ),
    "depthwise, circular": (
        train(nn.Conv1d(4, 8, 3, groups=4, padding_mode="circular", padding=1), r(2, 4, 10)),
        3 * (2 * 2 * 8 * 10 * 3),
    ),
    "one image without a batch": (
        train(nn.Conv2d(3, 8, 3), r(3, 5, 5)),
        3 * (2 * 8 * 9 * 27),
    ),
    "a kernel for each sample": (
        back(lambda x, w: torch.func.vmap(F.conv1d)(x, w), r(4, 2, 3, 8), r(4, 5, 3, 3)),
        3 * (4 * 2 * 2 * 5 * 6 * 9),
    ),
}

PRODUCTS: dict[str, tuple[Step, int]] = {
    "baddbmm": (back(torch.baddbmm, r(4, 6), r(3, 4, 5), r(3, 5, 6)), 3 * (2 * 3 * 4 * 5 * 6)),
    # The outer product that is the matrix's gradient is pointwise to torch.
    "matrix by vector": (back(torch.matmul, r(3, 4, 5), r(5)), 2 * (2 * 3 * 4 * 5)),
    "vector by matrix": (back(torch.matmul, r(4), r(4, 5)), 3 * (2 * 4 * 5)),
    "addmv": (back(torch.addmv, r(4), r(4, 5), r(5)), 2 * (2 * 4 * 5)),
    "broadcast batches": (
        back(torch.matmul, r(3, 1, 4, 5), r(2, 5, 6)),
        3 * (2 * 3 * 2 * 4 * 5 * 6),
    ),
    "einsum, broadcast": (
        back(lambda a, b: torch.einsum("...ij,...jk->...ik", a, b), r(2, 3, 4, 5), r(1, 3, 5, 6)),
        3 * (2 * 2 * 3 * 4 * 5 * 6),
    ),
    "einsum, nothing summed": (back(lambda a, b: torch.einsum("i,j->ij", a, b), r(4), r(5)), 0),
    "tensordot": (
        back(lambda a, b: torch.tensordot(a, b, 1), r(3, 4, 5), r(5, 6)),
        3 * (2 * 3 * 4 * 5 * 6),
    ),
    "in place": (
        lambda: torch.zeros(4, 5).addmm_(torch.randn(4, 6), torch.randn(6, 5)),
        2 * 4 * 6 * 5,
    ),
    # y[n,k] = sum_ij a[n,i] w[k,i,j] b[n,j]: over i, then over j; each of three gradients sums once.
    "bilinear": (
        train(nn.Bilinear(5, 6, 7), r(4, 5), r(4, 6)),
        2 * 4 * 7 * 6 * (5 + 1) + 3 * (2 * 4 * 7 * 5 * 6),
    ),
    "LSTM cell, raw data": (train(nn.LSTMCell(3, 4), torch.randn(2, 3)), 2 * (2 * 2 * 16 * 7)),
    "GRU cell": (train(nn.GRUCell(3, 4), r(2, 3), r(2, 4)), 3 * (2 * 2 * 12 * 7)),
    "bag of embeddings": (
        back(F.embedding_bag, torch.randint(0, 9, (6,)), r(9, 4), torch.tensor([0, 3])),
        0,
    ),
    "pointwise alone": (back(torch.addcmul, r(4, 5), r(4, 5), r(4, 5)), 0),
    "pairwise distances": (
        back(torch.cdist, r(30, 5), r(40, 5)),
        3 * (2 * 30 * 40 * 5),
    ),
    "affine grid": (
        back(lambda theta: F.affine_grid(theta, [1, 3, 6, 6], align_corners=False), r(1, 2, 3)),
        2 * (2 * 36 * 2 * 3),
    ),
    # 5/2 n log2 n forward for real data of length n; its gradient is a complex transform of length n.
    "real Fourier transform": (
        back(lambda x: torch.fft.rfft(x).abs(), r(3, 8)),
        3 * 8 * 3 * 5 // 2 + 3 * 8 * 3 * 5,
    ),
}

B, H, T, S, D = 2, 4, 6, 9, 8


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name: str) -> None:
    step, expected = CONVOLUTIONS[name]
    check(counted(step), expected)


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str) -> None:
    step, expected = PRODUCTS[name]
    check(counted(step), expected)


def check(count: FlopCount, expected: int) -> None:
    assert sum(count.needed.values()) == expected
    assert (count.coverage_frac, count.uncovered) == (1.0, [])


sdpa = F.scaled_dot_product_attention
PAIR = 2 * (D + D)


class TestAttention:
    @pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
    @pytest.mark.parametrize(
        ("form", "expected"),
        [
            ("square", 3 * B * H * T * T * PAIR),
            ("other lengths", 3 * B * H * T * S * PAIR),
            ("causal, other lengths", 3 * B * H * T * S * PAIR),
            ("grouped queries", 3 * B * H * T * T * PAIR),
            ("keys of one sequence for all", 3 * B * H * T * T * PAIR),
            ("a mask tensor", 3 * B * H * T * T * PAIR),
            # The scores and the values forward; then dP and dQ; dV alone; dV, dP and dK.
            ("frozen keys and values", B * H * T * T * (PAIR + 4 * D)),
            ("values alone", B * H * T * T * (PAIR + 2 * D)),
            ("frozen queries", B * H * T * T * (PAIR + 6 * D)),
        ],
    )
    def test_fused_and_unfused_need_the_same(
        self, backend: SDPBackend, form: str, expected: int
    ) -> None:
        q, k, v = r(B, H, T, D), r(B, H, T, D), r(B, H, T, D)
        options: dict[str, Any] = {}
        if "lengths" in form:
            k, v = r(B, H, S, D), r(B, H, S, D)
            options = {"is_causal": "causal" in form}
        elif form == "grouped queries":
            k, v, options = r(B, 2, T, D), r(B, 2, T, D), {"enable_gqa": True}
        elif form == "keys of one sequence for all":
            k, v = (t.expand(B, H, T, D) for t in (r(1, 1, T, D), r(1, 1, T, D)))
        elif form == "a mask tensor":
            options = {"attn_mask": torch.zeros(T, T)}
        elif form == "frozen keys and values":
            k, v = k.detach(), v.detach()
        elif form == "values alone":
            q, k = q.detach(), k.detach()
        elif form == "frozen queries":
            q = q.detach()
        with sdpa_kernel(backend):
            count = counted(lambda: sdpa(q, k, v, **options).sum().backward())
        assert sum(count.needed.values()) == expected
        assert count.coverage_frac == 1.0
        if backend is SDPBackend.FLASH_ATTENTION:
            assert sum(count.executed.values()) == B * H * T * count_keys(form) * (PAIR + 10 * D)

    def test_values_of_another_depth(self) -> None:
        step = back(sdpa, r(B, H, T, D), r(B, H, T, D), r(B, H, T, 5))
        check(counted(step), 3 * B * H * T * T * 2 * (D + 5))

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_under_a_checkpoint(self, reentrant: bool) -> None:
        forward = B * H * T * T * PAIR
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            count = counted(
                back(
                    checkpoint,
                    sdpa,
                    r(B, H, T, D),
                    r(B, H, T, D),
                    r(B, H, T, D),
                    use_reentrant=reentrant,
                )
            )
        check(count, 3 * forward)
        assert sum(count.executed.values()) == 4 * forward + B * H * T * T * 2 * D

    def test_attention_layer_in_training(self) -> None:
        net, x = nn.MultiheadAttention(16, 4, batch_first=True, dropout=0.1), r(B, T, 16)
        projections, scores = 2 * B * T * 16 * 16 * 4, B * 4 * T * T * 2 * (4 + 4)
        check(counted(train(net, x, x, x)), 3 * (projections + scores))

    def test_attention_layer_with_keys_of_another_width(self) -> None:
        net = nn.MultiheadAttention(16, 4, kdim=5, vdim=7, batch_first=True)
        projections = 2 * B * (2 * T * 16 * 16 + S * 5 * 16 + S * 7 * 16)
        scores = B * 4 * T * S * 2 * (4 + 4)
        step = train(net, r(B, T, 16), r(B, S, 5), r(B, S, 7))
        check(counted(step), 3 * (projections + scores))

    def test_encoder_and_decoder(self) -> None:
        net = nn.Transformer(16, 4, 1, 1, 32, batch_first=True)

        def block(queries: int, keys: int) -> int:
            projections = 2 * B * 16 * 16 * 2 * (queries + keys)
            return projections + B * 4 * queries * keys * 2 * (4 + 4)

        feed_forward = 2 * B * 16 * 32 * 2
        encoder = block(S, S) + S * feed_forward
        decoder = block(T, T) + block(T, S) + T * feed_forward
        check(counted(train(net, r(B, S, 16), r(B, T, 16))), 3 * (encoder + decoder))


def count_keys(form: str) -> int:
    return S if "lengths" in form else T


WIDTH, ROWS = 16, 8
ONE = 2 * ROWS * WIDTH * WIDTH


def stack(n: int) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(n)])


class TestCheckpoints:
    # (outer, inner) kinds of 4 layers, of which the middle two are inside both.
    @pytest.mark.parametrize("outer", [False, True])
    @pytest.mark.parametrize("inner", [False, True])
    @pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
    def test_one_inside_another_never_counts_as_the_models(self, outer: bool, inner: bool) -> None:
        net, x = stack(4), r(ROWS, WIDTH)

        def body(y: torch.Tensor) -> torch.Tensor:
            y = checkpoint(lambda z: net[2](net[1](z)), net[0](y), use_reentrant=inner)
            return net[3](y)  # type: ignore[no-any-return]

        count = counted(lambda: checkpoint(body, x, use_reentrant=outer).sum().backward())
        assert count.needed == {"fp32": 12 * ONE}
        # All again in the outer one, the middle two once more in the inner one; each of the newer kind stops before
        # a last layer whose output nobody needs.
        assert count.executed == {"fp32": (12 + 6 - (not outer) - (not inner)) * ONE}

    def test_in_segments(self) -> None:
        net, x = stack(4), r(ROWS, WIDTH)
        count = counted(
            lambda: checkpoint_sequential(net, 2, x, use_reentrant=False).sum().backward()
        )
        check(count, 12 * ONE)


class TestGradients:
    def test_of_functions(self) -> None:
        x, w = torch.randn(ROWS, WIDTH), torch.randn(WIDTH, WIDTH)

        def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return (x @ w).square().sum()

        check(counted(lambda: torch.func.grad(loss)(w, x)), 2 * ONE)
        check(counted(lambda: torch.func.grad(loss, argnums=(0, 1))(w, x)), 3 * ONE)
        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
        check(counted(lambda: each(w, x)), 2 * ONE)

    def test_penalty(self) -> None:
        x, w = r(ROWS, WIDTH), r(WIDTH, WIDTH)

        def step() -> None:
            (grad,) = torch.autograd.grad((x @ w).square().sum(), x, create_graph=True)
            grad.square().sum().backward()

        # x w; its gradient g w'; of that one the gradients of g and w; of the first those of x and w.
        check(counted(step), 6 * ONE)

    def test_tied_weights_are_multiplied_where_they_are_used(self) -> None:
        table, head = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 20, bias=False)
        head.weight = table.weight
        ids = torch.randint(0, 20, (ROWS,))
        check(counted(lambda: head(table(ids)).sum().backward()), 3 * 2 * ROWS * WIDTH * 20)

    @pytest.mark.parametrize(("frozen", "layers"), [(0, 3 + 1 + 2), (1, 3 + 1 + 1 + 2)])
    def test_frozen_layers(self, frozen: int, layers: int) -> None:
        # Three forwards; a gradient of each trained weight; one of each input above the first trained layer.
        net = stack(3)
        net[frozen].requires_grad_(False)
        check(counted(train(net, torch.randn(ROWS, WIDTH))), layers * ONE)

    def test_low_rank_adapter(self) -> None:
        base, down = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 2, bias=False)
        up, x = nn.Linear(2, WIDTH, bias=False), r(ROWS, WIDTH)
        base.requires_grad_(False)
        low = 2 * ROWS * WIDTH * 2
        check(counted(lambda: (base(x) + up(down(x))).sum().backward()), 2 * ONE + 2 * 3 * low)

    def test_function_of_its_own(self) -> None:
        class Product(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
                ctx.save_for_backward(x, w)
                return x @ w

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                x, w = ctx.saved_tensors
                return grad @ w.T, x.T @ grad

        step = back(Product.apply, r(ROWS, WIDTH), r(WIDTH, WIDTH))
        check(counted(step), 3 * ONE)


class TestOtherFormats:
    def test_eight_bits(self) -> None:
        a, b = torch.ones(32, 16, dtype=torch.int8), torch.ones(16, 32, dtype=torch.int8)
        assert counted(lambda: torch._int_mm(a, b)).needed == {"int8": 2 * 32 * 16 * 32}
        left = torch.ones(32, 16).to(torch.float8_e4m3fn)
        scale = torch.tensor(1.0)
        step = lambda: torch._scaled_mm(left, left.t(), scale, scale, out_dtype=torch.bfloat16)  # noqa: E731
        assert counted(step).needed == {"fp8": 2 * 32 * 16 * 32}

    def test_experts_multiply_the_rows_they_own(self) -> None:
        x = torch.randn(32, 16, dtype=torch.bfloat16, requires_grad=True)
        experts = torch.randn(4, 16, 8, dtype=torch.bfloat16, requires_grad=True)
        ends = torch.tensor([8, 16, 16, 24], dtype=torch.int32)

        def step() -> None:
            torch._grouped_mm(x, experts, offs=ends).float().sum().backward()
            ends.zero_()  # the script may use its buffer again

        check(counted(step), 3 * (2 * 24 * 16 * 8))

    @pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
    @pytest.mark.filterwarnings("ignore:Sparse")
    def test_sparse_operands_lower_the_coverage(self, layout: torch.layout) -> None:
        sparse = torch.eye(16).to_sparse(layout=layout)
        count = counted(lambda: sparse @ torch.randn(16, 4))
        assert count.needed == {}
        assert count.coverage_frac < 1
        assert count.uncovered


@pytest.mark.skipif(
    not hasattr(torch.nn, "LinearCrossEntropyOptions"), reason="torch fuses no head and loss yet"
)
def test_fused_head_and_loss() -> None:
    x, w, target = r(ROWS, WIDTH), r(32, WIDTH), torch.randint(0, 32, (ROWS,))
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=4)  # type: ignore[attr-defined,unused-ignore]
    fused = counted(lambda: F.linear_cross_entropy(x, w, target, options=options).backward())  # type: ignore[attr-defined,unused-ignore]
    check(fused, 3 * (2 * ROWS * WIDTH * 32))
