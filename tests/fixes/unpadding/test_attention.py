from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from flopwise.fixes.unpadding import attention
from flopwise.fixes.unpadding.attention import NAME, Segments, Unfit, attend, kernel_problem, over


def segments(lengths: list[int]) -> Segments:
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return Segments(ends, max(lengths), lengths)


def config() -> Any:
    return SimpleNamespace(_attn_implementation="sdpa")


def made(total: int, heads: int = 4, kv_heads: int = 4, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(1, h, total, 8, generator=generator, dtype=torch.float64, requires_grad=True)
        for h in (heads, kv_heads, kv_heads)
    ]


def reference(
    qkv: list[torch.Tensor], lengths: list[int], causal: bool, scaling: float | None = None
) -> torch.Tensor:
    q, k, v = qkv
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    member = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    allowed = member[:, None] == member[None]
    if causal:
        allowed = allowed.tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=scaling).transpose(1, 2)


def module(causal: bool = False) -> nn.Module:
    made = nn.Identity()
    made.is_causal = causal  # type: ignore[assignment]
    return made


class TestAttend:
    @settings(deadline=None, max_examples=30)
    @given(
        st.lists(st.integers(1, 9), min_size=1, max_size=5),
        st.booleans(),
        st.sampled_from((4, 2, 1)),
    )
    def test_is_that_of_each_sequence_alone(
        self, lengths: list[int], causal: bool, kv_heads: int
    ) -> None:
        qkv = made(sum(lengths), kv_heads=kv_heads)
        with over(segments(lengths), config()):
            found, weights = attend(module(causal), *qkv, None, scaling=0.3)
        expected = reference(qkv, lengths, causal, 0.3)
        assert weights is None
        torch.testing.assert_close(found, expected)
        ours = torch.autograd.grad(found.square().sum(), qkv)
        theirs = torch.autograd.grad(expected.square().sum(), qkv)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)

    @pytest.mark.parametrize("causal", [False, True])
    def test_compiled_code_is_one_for_all_lengths_and_masks(self, causal: bool) -> None:
        torch._dynamo.reset()
        frames = []

        def backend(graph: Any, inputs: Any) -> Any:
            frames.append(graph)
            return graph

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return attend(module(causal), q, k, v, None)[0]

        compiled = torch.compile(run, backend=backend, fullgraph=True)
        for lengths in ([3, 5, 4], [6, 1, 5], [4, 4, 4]):
            qkv = made(12, seed=sum(lengths[:2]))
            with over(segments(lengths), config()):
                attention._NOW.longest = 12
                found = compiled(*qkv)
            torch.testing.assert_close(found, reference(qkv, lengths, causal))
        assert len(frames) == 1
        torch._dynamo.reset()

    def test_under_autocast_it_computes_as_torch_s_own_does(self) -> None:
        qkv = [t.detach().float() for t in made(6)]
        with over(segments([4, 2]), config()), torch.autocast("cpu", torch.bfloat16):
            found, _ = attend(module(), *qkv, None)
        assert found.dtype == torch.bfloat16

    def test_dropout_is_applied(self) -> None:
        torch.manual_seed(0)
        qkv = made(6)
        with over(segments([4, 2]), config()):
            found, _ = attend(module(), *qkv, None, dropout=0.5)
            plain, _ = attend(module(), *qkv, None, dropout=0.0)
        assert not torch.allclose(found, plain)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"attention_mask": torch.ones(1, 1, 6, 6)}, "mask of its own"),
            ({"sliding_window": 4}, "sliding_window"),
            ({"softcap": 30.0}, "softcap"),
            ({"s_aux": torch.ones(4)}, "s_aux"),
        ],
    )
    def test_what_it_cannot_do_it_says(self, change: dict[str, Any], words: str) -> None:
        arguments = {"attention_mask": None, **change}
        with over(segments([4, 2]), config()), pytest.raises(Unfit, match=words):
            attend(module(), *made(6), **arguments)

    def test_two_rows_are_not_one(self) -> None:
        qkv = [t.expand(2, -1, -1, -1) for t in made(6)]
        with over(segments([4, 2]), config()), pytest.raises(Unfit, match="one row"):
            attend(module(), *qkv, None)

    def test_outside_of_a_call_there_are_no_sequences(self) -> None:
        with pytest.raises(Unfit, match="outside"):
            attend(module(), *made(6), None)

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_what_is_computed_again_in_the_backward_is_refused(self, reentrant: bool) -> None:
        qkv = made(6)
        with over(segments([4, 2]), config()), pytest.raises(Unfit, match="again"):
            checkpoint(lambda *t: attend(module(), *t, None)[0], *qkv, use_reentrant=reentrant)


class TestOver:
    def test_the_configuration_is_as_it_was_also_after_an_error(self) -> None:
        used = config()
        with pytest.raises(ZeroDivisionError), over(segments([1]), used):
            _ = 1 / (used._attn_implementation != NAME)
        assert used._attn_implementation == "sdpa"
        assert attention._NOW.ends is None


class TestOnADevice:
    """The kernels for CUDA have forms for the meta device, which check arguments and give shapes."""

    @pytest.mark.parametrize("dropout", [0.0, 0.1])
    @pytest.mark.parametrize("causal", [False, True])
    def test_halves_go_through_flash_attention(self, dropout: float, causal: bool) -> None:
        qkv = [
            torch.empty(1, 128, 4, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
            for _ in range(3)
        ]
        with over(Segments(torch.empty(5, dtype=torch.int32, device="meta"), 64, ()), config()):
            found = attention._on_cuda(*(t.transpose(1, 2) for t in qkv), dropout, 0.125, causal)
        assert found.shape == (1, 128, 4, 64)
        assert found.is_contiguous()
        grads = torch.autograd.grad(found.sum(), qkv)
        assert [g.shape for g in grads] == [t.shape for t in qkv]

    def test_float32_goes_through_the_memory_efficient_kernel(self) -> None:
        qkv = [torch.empty(1, 4, 128, 64, device="meta") for _ in range(3)]
        with over(Segments(torch.empty(5, dtype=torch.int32, device="meta"), 64, ()), config()):
            found = attention._on_cuda(*qkv, 0.0, None, False)
        assert found.shape == (1, 128, 4, 64)

    @pytest.mark.parametrize(
        ("dtype", "head", "value_head", "words"),
        [
            (torch.float64, 64, 64, "float64"),
            (torch.bfloat16, 288, 288, "288"),
            (torch.bfloat16, 192, 128, "192 and 128"),
            (torch.float16, 20, 20, "heads of 20"),
            (torch.float32, 6, 6, "heads of 6"),
        ],
    )
    def test_what_the_kernels_do_not_serve(
        self, dtype: torch.dtype, head: int, value_head: int, words: str
    ) -> None:
        assert words in str(kernel_problem(dtype, head, value_head))

    @pytest.mark.parametrize(
        ("dtype", "head"), [(torch.bfloat16, 64), (torch.float16, 256), (torch.float32, 20)]
    )
    def test_what_they_serve(self, dtype: torch.dtype, head: int) -> None:
        assert kernel_problem(dtype, head, head) is None


class TestRegister:
    def test_the_name_is_there_and_gone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Interface:
            _global_mapping: dict[str, Any] = {"sdpa": len}  # noqa: RUF012

            @classmethod
            def register(cls, name: str, function: Any) -> None:
                cls._global_mapping[name] = function

        fake = SimpleNamespace(AttentionInterface=Interface)
        monkeypatch.setitem(sys.modules, "transformers.modeling_utils", fake)  # type: ignore[arg-type]
        assert attention.interface_problem() is None
        attention.register()
        assert Interface._global_mapping[NAME] is attend
        attention.unregister()
        attention.unregister()
        assert Interface._global_mapping == {"sdpa": len}

    def test_another_transformers_is_left_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(
            sys.modules,
            "transformers.modeling_utils",
            SimpleNamespace(AttentionInterface=dict),  # type: ignore[arg-type]
        )
        assert "another interface" in str(attention.interface_problem())
        monkeypatch.delitem(sys.modules, "transformers.modeling_utils")
        assert "no interface" in str(attention.interface_problem())
