"""Counting a real step: right numbers, the step's own results to the bit, and no harm to anybody's code."""

from __future__ import annotations

import copy
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from flopwise.errors import AttachError
from flopwise.meter import count_ops
from flopwise.meter.count import CaptureCounter, StepCounter, combine
from flopwise.meter.count_mode import OpCounter
from flopwise.meter.count_roles import Roles
from flopwise.records.rank import FlopCount

ONE = 2 * 64 * 256 * 256  # a 256 x 256 layer on 64 rows


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    engine = torch.autograd._engine_run_backward
    yield
    assert _get_current_dispatch_mode_stack() == []
    assert torch.autograd._engine_run_backward is engine


def counted(step: Callable[[], object], **options: Any) -> FlopCount:
    counter = StepCounter("test", **options)
    counter.start()
    try:
        step()
    except BaseException:
        counter.abandon()
        raise
    return counter.stop()


def layers(n: int = 4) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(n)])


def rows(requires_grad: bool = True) -> torch.Tensor:
    return torch.randn(64, 256, requires_grad=requires_grad)


class TestOperatorsThatTorchCountsAsZero:
    def test_fused_attention_on_the_cpu(self) -> None:
        q = torch.randn(1, 12, 64, 64)
        count = counted(lambda: F.scaled_dot_product_attention(q, q, q))
        assert count.needed == {"fp32": 4 * 12 * 64 * 64 * 64} == {"fp32": 12_582_912}
        assert count.by_op == {"aten::_scaled_dot_product_flash_attention_for_cpu": 12_582_912}
        assert count.coverage_frac == 1.0

    def test_lstm(self) -> None:
        lstm, x = nn.LSTM(32, 64), torch.randn(10, 4, 32)
        with torch.no_grad():
            count = counted(lambda: lstm(x))
        assert count.needed == {"fp32": 10 * 4 * 2 * 4 * 64 * (32 + 64)} == {"fp32": 1_966_080}

    @pytest.mark.parametrize(("kind", "gates"), [(nn.GRU, 3), (nn.RNN, 1)])
    def test_gru_and_rnn_train(self, kind: type[nn.Module], gates: int) -> None:
        net, x = kind(32, 64), torch.randn(10, 4, 32)
        forward = 10 * 4 * 2 * gates * 64 * (32 + 64)
        # Nobody asks for the gradient of the input, nor for that of the state before the first step.
        unasked = 10 * 4 * 2 * gates * 64 * 32 + 4 * 2 * gates * 64 * 64
        count = counted(lambda: net(x)[0].sum().backward())
        assert count.needed == {"fp32": 3 * forward - unasked}

    def test_inference_fast_path_of_an_encoder_layer(self) -> None:
        batch, steps, width, ffn = 2, 5, 32, 64
        layer = nn.TransformerEncoderLayer(width, 4, ffn, batch_first=True).eval()
        x = torch.randn(batch, steps, width)
        with torch.no_grad():
            count = counted(lambda: layer(x))
        assert list(count.by_op) == ["aten::_transformer_encoder_layer_fwd"]
        token = 2 * 4 * width**2 + 2 * 2 * width * ffn + 4 * steps * width
        assert count.needed == {"fp32": batch * steps * token}

    def test_inference_fast_path_of_attention(self) -> None:
        layer, x = nn.MultiheadAttention(32, 4, batch_first=True).eval(), torch.randn(2, 5, 32)
        with torch.no_grad():
            count = counted(lambda: layer(x, x, x))
        assert count.needed == {"fp32": 2 * 5 * (2 * 4 * 32**2 + 4 * 5 * 32)}

    def test_convolution_backward(self) -> None:
        conv, x = (
            nn.Conv2d(16, 32, 3, padding=1, bias=False),
            torch.randn(2, 16, 8, 8).requires_grad_(),
        )
        count = counted(lambda: conv(x).sum().backward())
        forward = 2 * 2 * 32 * 8 * 8 * 16 * 9
        assert forward == 1_179_648
        assert count.needed == {"fp32": 3 * forward} == {"fp32": 3_538_944}


class TestConvolutions:
    def test_transposed_backward_is_twice_the_forward(self) -> None:
        conv, x = nn.ConvTranspose2d(8, 6, 4, stride=2, bias=False), torch.randn(1, 8, 5, 5)
        forward = 2 * 8 * 5 * 5 * 6 * 16
        count = counted(lambda: conv(x.requires_grad_()).sum().backward())
        assert count.needed == {"fp32": 3 * forward}

    def test_grouped_weight_gradient_is_counted_once(self) -> None:
        conv, x = nn.Conv2d(16, 16, 3, groups=16, bias=False), torch.randn(2, 16, 8, 8)
        count = counted(lambda: conv(x).sum().backward())
        forward = 2 * 2 * 16 * 6 * 6 * 9
        assert count.needed == {"fp32": 2 * forward}
        assert count.cross_check == (
            "torch.utils.flop_counter differs: it counts aten::convolution_backward 16x "
            "(the weight gradient of a grouped convolution)"
        )


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
class TestFlexAttention:
    def test_dense_is_4_b_h_s_s_d_and_the_step_goes_on(self) -> None:
        q = torch.randn(1, 12, 64, 64)
        with torch.no_grad():
            expected = flex_attention(q, q, q)
            got: list[torch.Tensor] = []
            count = counted(lambda: got.append(flex_attention(q, q, q)))
        assert count.needed == count.needed_causal == {"fp32": 4 * 12 * 64 * 64 * 64}
        assert torch.equal(got[0], expected)

    def test_block_sparse_is_named(self) -> None:
        q = torch.randn(2, 3, 128, 16)
        blocks = create_block_mask(
            lambda b, h, i, j: i >= j, None, None, 128, 128, device="cpu", BLOCK_SIZE=32
        )
        with torch.no_grad():
            count = counted(lambda: flex_attention(q, q, q, block_mask=blocks))
        kept = 4 * 5 // 2  # of 4 x 4 blocks
        assert count.needed == {"fp32": 4 * 2 * 3 * 128 * 128 * 16}
        assert count.needed_causal == {"fp32": 4 * 2 * 3 * kept * 32 * 32 * 16}
        assert "flex_attention: block sparse" in count.notes


class TestRecomputation:
    def test_plain(self) -> None:
        net = layers()
        count = counted(lambda: net(rows()).sum().backward())
        assert count.needed == count.executed == {"fp32": 12 * ONE} == {"fp32": 100_663_296}
        assert count.recomputed == 0

    @pytest.mark.parametrize(("reentrant", "again"), [(False, 3), (True, 4)])
    def test_checkpointed(self, reentrant: bool, again: int) -> None:
        net = layers()
        count = counted(lambda: checkpoint(net, rows(), use_reentrant=reentrant).sum().backward())
        assert count.needed == {"fp32": 12 * ONE}
        assert count.executed == {"fp32": (12 + again) * ONE}
        assert count.recomputed == again * ONE
        if not reentrant:
            assert count.executed == {"fp32": 125_829_120}

    def test_nested_reentrant(self) -> None:
        net = layers()

        def inner(x: torch.Tensor) -> torch.Tensor:
            return checkpoint(net, x, use_reentrant=True)

        count = counted(lambda: checkpoint(inner, rows(), use_reentrant=True).sum().backward())
        assert count.needed == {"fp32": 12 * ONE}
        assert count.recomputed == 8 * ONE

    def test_function_of_its_own_that_recomputes(self) -> None:
        class Frugal(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
                ctx.save_for_backward(x, w)
                return torch.tanh(x @ w)

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
                x, w = (t.detach().requires_grad_() for t in ctx.saved_tensors)
                with torch.enable_grad():
                    y = torch.tanh(x @ w)
                return torch.autograd.grad(y, (x, w), grad)

        x, w = rows(), torch.randn(256, 256, requires_grad=True)
        count = counted(lambda: Frugal.apply(x, w).sum().backward())
        assert count.needed == {"fp32": 3 * ONE}
        assert count.recomputed == ONE

    def test_gradient_penalty_is_no_recomputation(self) -> None:
        net, x = layers(), rows()

        def step() -> None:
            (grad,) = torch.autograd.grad(net(x).tanh().sum(), x, create_graph=True)
            grad.square().sum().backward()

        count = counted(step)
        # Forward 4 and the gradient of x 4; backward of the latter 8, of the former 8.
        assert count.needed == count.executed == {"fp32": 24 * ONE}

    def test_checkpoint_under_a_gradient_penalty_is(self) -> None:
        net, x = layers(), rows()

        def step() -> None:
            y = checkpoint(net, x, use_reentrant=False).tanh().sum()
            (grad,) = torch.autograd.grad(y, x, create_graph=True)
            grad.square().sum().backward()

        count = counted(step)
        assert count.needed == {"fp32": 24 * ONE}
        assert count.recomputed > 0

    def test_fused_attention_computes_its_scores_again(self) -> None:
        q = torch.randn(1, 2, 32, 16, requires_grad=True)
        count = counted(
            lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
        )
        forward = 4 * 2 * 32 * 32 * 16
        assert count.needed == {"fp32": 3 * forward}
        assert count.needed_causal == {"fp32": 3 * 4 * 2 * (32 * 33 // 2) * 16}
        assert count.recomputed == forward // 2


class TestOptimizers:
    def test_products_of_the_optimizer_are_executed_but_not_needed(self) -> None:
        net = nn.Linear(32, 32, bias=False)
        optimizer = torch.optim.Muon(net.parameters())
        x = torch.randn(8, 32)

        def step() -> None:
            net(x).sum().backward()
            optimizer.step()

        count = counted(step)
        assert count.needed == {"fp32": 2 * 2 * 8 * 32 * 32}
        assert sum(count.executed.values()) > sum(count.needed.values())
        assert count.recomputed == 0
        assert any("optimizer" in note for note in count.notes)

    def test_closure_and_teacher_inside_the_step_are_the_models(self) -> None:
        net, teacher = nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        x = rows(requires_grad=False)

        def closure() -> torch.Tensor:
            with torch.no_grad():
                target = teacher(x)
            loss = F.mse_loss(net(x), target)
            loss.backward()
            return loss

        assert counted(lambda: optimizer.step(closure)).needed == {"fp32": 3 * ONE}

    @pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {}])
    def test_update_does_no_flops_and_is_covered(self, options: dict[str, bool]) -> None:
        net = layers(1)
        optimizer = torch.optim.AdamW(net.parameters(), **options)
        net(rows()).sum().backward()
        count = counted(optimizer.step)
        assert count.needed == count.executed == {}
        assert count.coverage_frac == 1.0
        assert count.uncovered == []


class TestCoverage:
    def test_unknown_op_is_named_with_its_share(self) -> None:
        @torch.library.custom_op("flopwise_test::mystery", mutates_args=())
        def mystery(x: torch.Tensor) -> torch.Tensor:
            return x @ x

        x = torch.randn(256, 256)
        count = counted(lambda: mystery(x).relu())
        assert count.coverage_frac < 1
        assert len(count.uncovered) == 1
        assert count.uncovered[0].startswith("flopwise_test::mystery (")
        assert count.coverage_basis == "op time (host clock around each op)"

    def test_sparse_operand_is_not_counted_as_if_it_were_dense(self) -> None:
        sparse = torch.eye(8).to_sparse()
        count = counted(lambda: torch.sparse.mm(sparse, torch.randn(8, 8)))
        assert count.needed == {}
        assert count.coverage_frac < 1

    def test_an_unknown_forward_is_named_and_its_backward_counts(self) -> None:
        @torch.library.custom_op("flopwise_test::unknown_product", mutates_args=())
        def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return x @ w

        def setup(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs)

        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x, w = ctx.saved_tensors
            return grad @ w.T, x.T @ grad

        product.register_autograd(backward, setup_context=setup)
        x, w = rows(), torch.randn(256, 256, requires_grad=True)
        count = counted(lambda: product(x, w).sum().backward())
        assert count.needed == {"fp32": 2 * ONE}
        assert count.coverage_frac < 1
        assert count.uncovered[0].startswith("flopwise_test::unknown_product")

    def test_without_times_bytes_weigh(self) -> None:
        x = torch.randn(8, 8)
        count = counted(lambda: (x @ x).relu(), time_ops=False)
        assert count.coverage_basis == "bytes touched by each op, as no op was timed"
        assert count.coverage_frac == 1.0

    def test_inference_mode_is_seen_through(self) -> None:
        lstm, x = nn.LSTM(32, 64), torch.randn(10, 4, 32)
        with torch.inference_mode():
            count = counted(lambda: (lstm(x), torch.einsum("ij,jk->ik", x[0], x[0].T)))
        assert count.needed == {"fp32": 1_966_080 + 2 * 4 * 32 * 4}

    def test_integer_products_are_no_flops_but_covered(self) -> None:
        x = torch.ones(8, 8, dtype=torch.long)
        count = counted(lambda: x @ x)
        assert count.needed == {}
        assert count.coverage_frac == 1.0

    def test_complex_multiply_add_is_four_real_ones(self) -> None:
        x = torch.randn(8, 8, dtype=torch.complex64)
        assert counted(lambda: x @ x).needed == {"fp32": 4 * 2 * 8**3}


class TestPackedSequences:
    def test_sum_of_squares_not_square_of_the_sum(self) -> None:
        heads, depth, lengths = 2, 16, (3, 5, 12)

        @torch.library.custom_op("flash_attn::_flash_attn_varlen_forward", mutates_args=())
        def packed(
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            cu_seqlens_q: torch.Tensor,
            cu_seqlens_k: torch.Tensor,
            max_seqlen_q: int,
            max_seqlen_k: int,
            causal: bool,
        ) -> torch.Tensor:
            return torch.zeros_like(q)

        q = torch.randn(sum(lengths), heads, depth)
        ends = torch.tensor([0, 3, 8, 20], dtype=torch.int32)

        def step() -> None:
            packed(q, q, q, ends, ends, 12, 12, True)
            ends.zero_()  # the script may use its buffer again

        count = counted(step)
        assert count.needed == {"fp32": 4 * heads * depth * sum(n * n for n in lengths)}
        assert count.needed_causal == {
            "fp32": 4 * heads * depth * sum(n * (n + 1) // 2 for n in lengths)
        }
        assert count.coverage_frac == 1.0

    def test_lengths_are_not_read_from_a_graph_that_has_not_run(self) -> None:
        """What is captured holds nothing yet; and replays may have other lengths."""

        @torch.library.custom_op("flash_attn::_flash_attn_forward", mutates_args=())
        def packed(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor
        ) -> torch.Tensor:
            return torch.zeros_like(q)

        q, ends = torch.randn(20, 2, 16), torch.tensor([0, 3, 8, 20], dtype=torch.int32)
        torch._dynamo.utils.counters.clear()
        counter = CaptureCounter("graph")
        counter.start()
        packed(q, q, q, ends)
        count = counter.stop()
        assert count.needed == {}
        assert any("lengths of the packed sequences are not visible" in n for n in count.notes)
        assert count.coverage_frac < 1


class TestPrecision:
    @pytest.fixture(autouse=True)
    def _settings(self) -> Iterator[None]:
        names = (
            ("generic", "all"),
            ("cuda", "all"),
            *(("cuda", op) for op in ("matmul", "conv", "rnn")),
        )
        kept = [torch._C._get_fp32_precision_getter(*name) for name in names]
        before = torch.get_float32_matmul_precision()
        yield
        torch.set_float32_matmul_precision(before)
        for name, value in zip(names, kept, strict=True):
            torch._C._set_fp32_precision_setter(*name, value)

    def test_cpu_never_runs_tf32(self) -> None:
        torch.set_float32_matmul_precision("high")
        x = torch.randn(8, 8)
        assert counted(lambda: x @ x).needed == {"fp32": 2 * 8**3}

    def test_defaults_on_cuda_are_tf32_for_convolutions_only(self) -> None:
        precision = count_ops.precision_of("cuda")
        assert not precision.matmul_tf32
        assert precision.conv_tf32
        assert precision.rnn_tf32

    def test_old_and_new_names_are_both_read_without_a_word(self) -> None:
        torch.set_float32_matmul_precision("high")
        assert count_ops.precision_of("cuda").matmul_tf32
        torch.backends.cudnn.conv.fp32_precision = "ieee"
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        precision = count_ops.precision_of("cuda")
        assert not precision.matmul_tf32
        assert not precision.conv_tf32

    def test_autocast_is_counted_in_the_dtype_that_runs(self) -> None:
        net = nn.Linear(16, 16)
        with torch.autocast("cpu", torch.bfloat16):
            count = counted(lambda: net(torch.randn(4, 16)))
        assert count.needed == {"bf16": 2 * 4 * 16 * 16}


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.conv = nn.Embedding(50, 16), nn.Conv1d(16, 16, 3, padding=1)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.norm, self.head = nn.BatchNorm1d(16), nn.Linear(16, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(self.embed(ids).transpose(1, 2))).transpose(1, 2)
        x = checkpoint(self.block, x, use_reentrant=False)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_weights_after_counted_steps_are_those_of_uncounted_ones_to_the_bit(
    dtype: torch.dtype | None,
) -> None:
    def train(count: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        net = Small()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        for _ in range(3):

            def step() -> None:
                ids = torch.randint(0, 50, (4, 12))
                with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
                    loss = net(ids)
                loss.backward()
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

            counted(step) if count else step()
        return copy.deepcopy(net.state_dict()), torch.get_rng_state(), torch.rand(3)

    bare, watched = train(False), train(True)
    assert all(torch.equal(bare[0][name], watched[0][name]) for name in bare[0])
    assert torch.equal(bare[1], watched[1])
    assert torch.equal(bare[2], watched[2])


class TestOtherPeoplesCode:
    def test_an_error_of_the_step_comes_through_and_the_counter_comes_off(self) -> None:
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            counted(lambda: torch.randn(3, 4) @ torch.randn(5, 6))

    def test_a_failure_of_ours_is_a_note(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*_: Any) -> Any:
            raise ZeroDivisionError("ours")

        monkeypatch.setattr("flopwise.meter.count_mode.precision_of", broken)
        x = torch.randn(4, 4)
        got: list[torch.Tensor] = []
        count = counted(lambda: got.append(x @ x))
        assert torch.equal(got[0], x @ x)
        assert count.coverage_frac < 1
        assert "counting aten::mm failed: ZeroDivisionError: ours" in count.notes

    def test_a_mode_that_is_left_during_the_step_is_the_one_that_goes(self) -> None:
        seen: list[str] = []

        class Theirs(TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                seen.append(str(func))
                return func(*args, **(kwargs or {}))

        counter, x = StepCounter("test"), torch.randn(4, 4)
        with Theirs() as theirs:
            counter.start()
            assert _get_current_dispatch_mode_stack()[-1] is theirs
            x @ x
        x @ x
        with Theirs() as other:
            count = counter.stop()
            assert _get_current_dispatch_mode_stack() == [other]
        assert count.needed == {"fp32": 2 * 2 * 4**3}
        assert len(seen) == 1

    def test_a_mode_that_others_removed_is_an_error_and_no_number(self) -> None:
        counter = StepCounter("test")
        counter.start()
        torch.utils._python_dispatch._pop_mode()
        with pytest.raises(AttachError, match="no longer on this thread's stack"):
            counter.stop()

    def test_stopping_on_another_thread_is_an_error_and_passes_ops_on(self) -> None:
        counter = StepCounter("test")
        counter.start()
        caught: list[BaseException] = []

        def stop() -> None:
            try:
                counter.stop()
            except AttachError as error:
                caught.append(error)

        thread = threading.Thread(target=stop)
        thread.start()
        thread.join()
        assert len(caught) == 1
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).sum() == 8
        torch.utils._python_dispatch._pop_mode()
        torch.utils._python_dispatch._is_in_torch_dispatch_mode = False

    def test_a_backward_without_its_forward_is_no_number(self) -> None:
        net, out = layers(1), []
        thread = threading.Thread(target=lambda: out.append(net(rows()).sum()))

        def step() -> None:
            thread.start()
            thread.join()
            out[0].backward()

        with pytest.raises(AttachError, match="not its forward pass"):
            counted(step)

    def test_a_model_spread_over_several_devices_is_no_number(self) -> None:
        fake = OpCounter(Roles(), timed=False, in_place=True, fake=True)
        with FakeTensorMode(), fake:
            for device in ("cuda:0", "cpu"):
                a = torch.empty(4, 4, device=device)
                a @ a
        assert fake.tally.count("", "fake tensors").needed == {"fp32": 2 * 2 * 4**3}
        with FakeTensorMode(), fake:
            b = torch.empty(4, 4, device="cuda:1")
            b @ b
        with pytest.raises(AttachError, match=r"2 devices \(cuda:0, cuda:1\)"):
            fake.tally.count("", "fake tensors")

    def test_an_extension_with_kernels_of_its_own_is_a_note(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(
            sys.modules, "transformer_engine_torch", types.ModuleType("transformer_engine_torch")
        )
        count = counted(lambda: torch.ones(2, 2) @ torch.ones(2, 2))
        assert any(note.startswith("transformer_engine_torch is loaded") for note in count.notes)

    def test_subclasses_unwrap_themselves(self) -> None:
        class Wrapped(torch.Tensor):
            inner: torch.Tensor

            @staticmethod
            def __new__(cls, inner: torch.Tensor) -> Wrapped:
                made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
                made.inner = inner
                return made

            @classmethod
            def __torch_dispatch__(
                cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                plain = [a.inner[:2] if isinstance(a, cls) else a for a in args]
                return func(*plain, **(kwargs or {}))

        got: list[torch.Tensor] = []
        wrapped = Wrapped(torch.ones(4, 8))
        count = counted(lambda: got.append(torch.mm(wrapped, torch.ones(8, 3))))
        assert got[0].shape == (2, 3)
        assert count.needed == {"fp32": 2 * 2 * 8 * 3}  # of what it really did

    def test_sharded_layers_count_what_this_rank_does(self, tmp_path: Any) -> None:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
        from torch.distributed.tensor.parallel import parallelize_module as parallelize

        dist.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
        )
        try:
            mesh = init_device_mesh("cpu", (1,))
            tensor = parallelize(layers(2), mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
            assert counted(lambda: tensor(rows()).sum().backward()).needed == {"fp32": 6 * ONE}
            data = layers(2)
            fully_shard(data, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
            count = counted(lambda: data(rows()).sum().backward())
            assert count.needed == {"bf16": 6 * ONE}
            assert count.coverage_frac == 1.0
        finally:
            dist.destroy_process_group()

    @pytest.mark.parametrize("fullgraph", [False, True])
    def test_compiled_code_survives_with_its_cache(self, fullgraph: bool) -> None:
        from torch._dynamo.testing import CompileCounter

        torch._dynamo.reset()
        compiles = CompileCounter()
        net = torch.compile(nn.Linear(16, 16, bias=False), backend=compiles, fullgraph=fullgraph)
        x = torch.randn(4, 16)
        net(x).sum().backward()
        assert compiles.frame_count == 1
        count = counted(lambda: net(x).sum().backward())
        assert count.needed == {"fp32": 2 * 2 * 4 * 16 * 16}
        net(x).sum().backward()
        assert compiles.frame_count == 1
        torch._dynamo.reset()

    def test_abandon_takes_everything_off_and_says_nothing(self) -> None:
        counter = StepCounter("test")
        counter.abandon()
        counter.start()
        counter.abandon()
        counter.abandon()
        with pytest.raises(AttachError, match="not counting"):
            counter.stop()

    def test_starting_twice_is_refused(self) -> None:
        counter = StepCounter("test")
        counter.start()
        with pytest.raises(AttachError, match="already counting"):
            counter.start()
        counter.abandon()

    def test_no_compiler_is_imported(self) -> None:
        import subprocess

        code = (
            "import sys, torch\n"
            "from flopwise.meter.count import StepCounter\n"
            "c = StepCounter('x'); c.start(); torch.ones(2, 2) @ torch.ones(2, 2); print(c.stop().needed)\n"
            "print('torch._dynamo' in sys.modules)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert done.stdout.split("\n")[:2] == ["{'fp32': 16}", "False"]


class TestTritonLaunches:
    """Kernels that Python launches past the dispatcher, with Triton's hook chain stood in for."""

    def test_a_kernel_outside_of_any_op_is_uncovered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Chain(list[Any]):
            def add(self, hook: Any) -> None:
                self.append(hook)

        enter, leave = Chain(), Chain()
        runtime = types.SimpleNamespace(launch_enter_hook=enter, launch_exit_hook=leave)
        fake = types.ModuleType("triton")
        fake.knobs = types.SimpleNamespace(runtime=runtime)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "triton", fake)

        class Event:
            def __init__(self, enable_timing: bool) -> None: ...
            def record(self, stream: object) -> None: ...
            def synchronize(self) -> None: ...
            def elapsed_time(self, other: object) -> float:
                return 0.5

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: None)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

        counter = StepCounter("test")
        counter.start()
        for hook in enter:
            hook(types.SimpleNamespace(get=lambda: {"name": "swiglu"}))
        for hook in leave:
            hook(None)
        count = counter.stop()
        assert enter == leave == []
        assert count.uncovered == ["triton::swiglu (100 %)"]
        assert count.coverage_frac == 0.0


class TestCapture:
    @pytest.fixture(autouse=True)
    def _nothing_compiled(self) -> None:
        torch._dynamo.utils.counters.clear()

    def test_counts_between_begin_and_end_and_times_nothing(self) -> None:
        net, x = layers(1), rows(requires_grad=False)
        counter = CaptureCounter("graph 0")
        counter.start()
        net(x).sum().backward()
        count = counter.stop()
        net(x)
        assert count.method == "graph capture"
        assert count.needed == {"fp32": 2 * ONE}
        assert count.coverage_basis == "bytes touched by each op, as no op was timed"

    def test_a_backward_graph_alone_is_a_count(self) -> None:
        net = layers(1)
        out = net(rows(requires_grad=False)).sum()
        counter = CaptureCounter("graph 1")
        counter.start()
        out.backward()
        assert counter.stop().needed == {"fp32": ONE}

    def test_runs_inside_a_counted_step(self) -> None:
        net, x = layers(1), rows(requires_grad=False)
        outer, inner = StepCounter("step"), CaptureCounter("graph")
        outer.start()
        net(x)
        inner.start()
        net(x)
        assert inner.stop().needed == {"fp32": ONE}
        assert outer.stop().needed == {"fp32": 2 * ONE}

    def test_compiled_code_is_left_alone_and_refused(self) -> None:
        torch._dynamo.reset()
        net = torch.compile(nn.Linear(4, 4), backend="eager")
        net(torch.randn(2, 4))
        with pytest.raises(AttachError, match="compiled code"):
            CaptureCounter("graph").start()
        torch._dynamo.reset()

    def test_combined_counts_add_up(self) -> None:
        net, x = layers(1), rows(requires_grad=False)
        one = counted(lambda: net(x).sum().backward())
        total = combine("step", "graph capture", [one, one])
        assert total.needed == {"fp32": 4 * ONE}
        assert total.by_op == {"aten::mm": 4 * ONE}
        assert total.coverage_frac == 1.0
