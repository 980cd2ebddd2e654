from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from flopwise.fixes.attention import known_masks
from flopwise.fixes.attention.fusing import AttentionBackend

pytestmark = pytest.mark.timeout(200, method="thread")
WIDTH, HEADS, LENGTH, MOST = 16, 2, 6, 8
INF = float("inf")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Attention(nn.Module):
    """What every form has in common: projections, and buffers with the usual masks."""

    def __init__(self, form: Callable[..., torch.Tensor], dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)
        self.form = form
        lower = torch.tril(torch.ones(MOST, MOST))
        self.register_buffer("bias", lower.view(1, 1, MOST, MOST))
        self.register_buffer("kept", lower.bool().view(1, 1, MOST, MOST), persistent=False)
        self.plain = lower.view(1, 1, MOST, MOST)  # an attribute, no buffer

    def forward(self, x: torch.Tensor, *more: Any) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).split(width, 2)
        q, k, v = (t.view(batch, length, HEADS, width // HEADS).transpose(1, 2) for t in (q, k, v))
        y = self.form(self, q, k, v, *more)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


def min_gpt(m: Any, q: Any, k: Any, v: Any) -> Any:  # also nanoGPT
    t = q.size(2)
    att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    att = att.masked_fill(m.bias[:, :, :t, :t] == 0, -INF)
    return m.drop(F.softmax(att, dim=-1)) @ v


def by_attribute(m: Any, q: Any, k: Any, v: Any) -> Any:
    t = q.size(2)
    att = q.matmul(k.mT) / math.sqrt(q.size(-1))
    att = att.masked_fill(~m.plain[0, 0, :t, :t].bool(), -1e9)
    return torch.matmul(m.drop(att.softmax(3)), v)


def hf_gpt2(m: Any, q: Any, k: Any, v: Any) -> Any:  # transformers before 4.50
    att = torch.matmul(q, k.transpose(-1, -2))
    att = att / torch.full([], v.size(-1) ** 0.5, dtype=att.dtype, device=att.device)
    low = torch.full([], torch.finfo(att.dtype).min, dtype=att.dtype, device=att.device)
    att = torch.where(m.kept[:, :, : q.size(-2), : k.size(-2)], att.to(att.dtype), low)
    att = nn.functional.softmax(att, dim=-1).type(v.dtype)
    return torch.matmul(m.drop(att), v)


def hf_eager(m: Any, q: Any, k: Any, v: Any) -> Any:  # transformers 4.50 to 5
    t = q.size(2)
    kept = torch.arange(t)[None, :] <= torch.arange(t)[:, None]
    mask = torch.where(kept, torch.tensor(0.0, dtype=q.dtype), torch.finfo(q.dtype).min)
    att = torch.matmul(q, k.transpose(2, 3)) * q.shape[-1] ** -0.5
    att = F.softmax(att + mask[None, None], dim=-1, dtype=q.dtype).to(q.dtype)
    att = F.dropout(att, p=m.drop.p, training=m.training)
    return torch.matmul(att, v)


def flat(m: Any, q: Any, k: Any, v: Any) -> Any:  # batch and heads in one dimension
    b, h, t, d = q.shape
    q, k, v = (x.reshape(b * h, t, d) for x in (q * d**-0.5, k, v))
    att = torch.bmm(q, k.transpose(1, 2)) + torch.full((t, t), -INF).triu(1).to(q.dtype)
    return torch.bmm(m.drop(F.softmax(att, -1)), v).view(b, h, t, d)


def einsums(m: Any, q: Any, k: Any, v: Any) -> Any:
    t = q.size(2)
    att = torch.einsum("b h i d, b h j d -> b h i j", q, k) * q.size(-1) ** -0.5
    later = torch.ones(t, t, dtype=torch.bool).triu(1)
    att = att.masked_fill(later, -torch.finfo(att.dtype).max)
    return torch.einsum("b h i j, b h j d -> b h i d", m.drop(att.softmax(-1)), v)


def masked_in_place(m: Any, q: Any, k: Any, v: Any) -> Any:
    att = torch.einsum("bhid,bhdj->bhij", q, k.transpose(-1, -2))
    att *= 0.25
    att = att.masked_fill_(m.bias[:, :, : q.size(2), : q.size(2)] == 0, -INF)
    return m.drop(F.softmax(att, dim=-1)) @ v


def no_mask(m: Any, q: Any, k: Any, v: Any) -> Any:
    return m.drop(((q @ k.transpose(-2, -1)) / 8).softmax(-1)) @ v


CAUSAL = [min_gpt, by_attribute, hf_gpt2, hf_eager, flat, einsums, masked_in_place]


class Looked:
    """Compiles nothing, and keeps the graphs as the backend left them."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []

    def __call__(self, graph: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        self.graphs.append(graph)
        return graph.forward

    def fused(self) -> list[dict[str, Any]]:
        """Settings of the fused operators, in order."""
        return [
            dict(node.kwargs)
            for graph in self.graphs
            for node in graph.graph.nodes
            if node.target is F.scaled_dot_product_attention
        ]


def x(length: int = LENGTH, batch: int = 3) -> torch.Tensor:
    return torch.randn(
        batch, length, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )


def attention(form: Any, dropout: float = 0.0) -> Attention:
    torch.manual_seed(0)
    return Attention(form, dropout).double()


def compared(model: nn.Module, *inputs: Any) -> Looked:
    """Returns what was compiled, having compared outputs and gradients with eager ones, in float64."""
    looked = Looked()
    compiled = torch.compile(model, backend=AttentionBackend([model], looked))
    results = []
    for call in (model, compiled):
        model.zero_grad()
        out = call(*inputs)
        out.square().sum().backward()
        results.append([out.detach(), *(p.grad for p in model.parameters())])
    for eager, fused in zip(*results, strict=True):
        torch.testing.assert_close(fused, eager, rtol=1e-10, atol=1e-10)
    return looked


@pytest.mark.parametrize("form", CAUSAL, ids=lambda f: f.__name__)
def test_a_causal_form_gets_the_flag_and_no_mask(form: Any) -> None:
    (fused,) = compared(attention(form), x()).fused()
    assert fused["is_causal"] is True
    assert fused["attn_mask"] is None


def test_a_form_without_a_mask_gets_neither() -> None:
    (fused,) = compared(attention(no_mask), x()).fused()
    assert (fused["is_causal"], fused["attn_mask"], fused["scale"]) == (False, None, 0.125)


@pytest.mark.parametrize("form", [*CAUSAL, no_mask], ids=lambda f: f.__name__)
def test_nothing_of_the_scores_is_left(form: Any) -> None:
    (graph,) = compared(attention(form), x()).graphs
    names = {str(node.target) for node in graph.graph.nodes}
    assert not any("softmax" in name or "matmul" in name or "bmm" in name for name in names)


@pytest.mark.parametrize("training", [True, False])
def test_dropout_is_passed_on_while_training(training: bool) -> None:
    model = attention(min_gpt, dropout=0.3).train(training)
    looked = Looked()
    torch.compile(model, backend=AttentionBackend([model], looked))(x())
    assert looked.fused()[0]["dropout_p"] == (0.3 if training else 0.0)


@pytest.mark.parametrize("form", [min_gpt, hf_gpt2, hf_eager], ids=lambda f: f.__name__)
def test_under_autocast_the_dtypes_stay(form: Any) -> None:
    model = attention(form).float()
    looked = Looked()
    compiled = torch.compile(model, backend=AttentionBackend([model], looked))
    inputs = x().float()
    with torch.autocast("cpu", torch.bfloat16):
        eager, fused = model(inputs), compiled(inputs)
    assert fused.dtype == eager.dtype
    torch.testing.assert_close(fused, eager, rtol=0.05, atol=0.05)
    assert looked.fused()[0]["is_causal"] is True


def test_lengths_that_change_keep_the_flag() -> None:
    model = attention(min_gpt)
    looked = Looked()
    compiled = torch.compile(model, backend=AttentionBackend([model], looked))
    for length in (6, 4, 7):
        torch.testing.assert_close(compiled(x(length)), model(x(length)))
    # compiled for the first length, and once more for any
    assert [f["is_causal"] for f in looked.fused()] == [True, True]


def given_mask(m: Any, q: Any, k: Any, v: Any, mask: Any) -> Any:
    att = q @ k.transpose(-2, -1) * 0.5
    att = att.masked_fill(mask, -INF) if mask.dtype == torch.bool else att + mask
    return F.softmax(att, dim=-1) @ v


@pytest.mark.parametrize("kind", ["bool", "added", "lowest"])
def test_a_mask_that_is_an_input_is_passed_on(kind: str) -> None:
    hidden = torch.zeros(3, 1, LENGTH, LENGTH, dtype=torch.bool)
    hidden[0, :, :, 3:] = hidden[1, :, :, :2] = True
    if kind == "added":
        mask = torch.where(hidden, -1e4, 0.25).double()
    elif kind == "lowest":
        hidden[2, :, 1] = True  # a row of which everything is hidden
        mask = torch.where(hidden, torch.finfo(torch.float32).min, 0.0)
    else:
        mask = hidden
    model = attention(given_mask)
    if kind == "lowest":
        model = model.float()
        looked = Looked()
        compiled = torch.compile(model, backend=AttentionBackend([model], looked))
        torch.testing.assert_close(compiled(x().float(), mask), model(x().float(), mask))
    else:
        looked = compared(model, x(), mask)
    (fused,) = looked.fused()
    assert fused["is_causal"] is False
    assert fused["attn_mask"] is not None


# ---------------------------------------------------------------------- what is not the same is left alone


def written_in_forward(m: Any, q: Any, k: Any, v: Any) -> Any:
    m.bias[0, 0, 0, 1] = 1.0
    return min_gpt(m, q, k, v)


def written_by_a_view(m: Any, q: Any, k: Any, v: Any) -> Any:
    t = q.size(2)
    mask = torch.ones(t, t).tril()
    mask.view(-1)[1] = 1.0
    return F.softmax((q @ k.mT).masked_fill(mask == 0, -1e5), -1) @ v


def windowed(m: Any, q: Any, k: Any, v: Any) -> Any:
    t = q.size(2)
    seen = torch.ones(t, t).tril() - torch.ones(t, t).tril(-3)
    return F.softmax((q @ k.mT).masked_fill(seen == 0, -INF), -1) @ v


def upper(m: Any, q: Any, k: Any, v: Any) -> Any:
    t = q.size(2)
    return F.softmax((q @ k.mT).masked_fill(torch.ones(t, t).tril(-1) == 1, -INF), -1) @ v


def random_mask(m: Any, q: Any, k: Any, v: Any) -> Any:
    t = q.size(2)
    mask = torch.bernoulli(torch.full((t, t), 0.5)).triu(1) * -1e9
    return F.softmax(q @ k.mT + mask.to(q.dtype), -1) @ v


@pytest.mark.parametrize("form", [written_in_forward, written_by_a_view, windowed, upper])
def test_no_flag_for_a_mask_that_is_not_causal(form: Any) -> None:
    for fused in compared(attention(form), x()).fused():
        assert fused["is_causal"] is False
        assert fused["attn_mask"] is not None


def test_no_flag_for_a_random_mask() -> None:
    model = attention(random_mask)
    looked = Looked()
    torch.compile(model, backend=AttentionBackend([model], looked))(x())
    assert all(f["is_causal"] is False and f["attn_mask"] for f in looked.fused())


def weak_mask(m: Any, q: Any, k: Any, v: Any) -> Any:
    t = q.size(2)
    return F.softmax((q @ k.mT).masked_fill(m.bias[:, :, :t, :t] == 0, -5.0), -1) @ v


def scaled_after_the_mask(m: Any, q: Any, k: Any, v: Any) -> Any:
    t = q.size(2)
    return F.softmax((q @ k.mT + torch.full((t, t), -3.0).triu(1).to(q.dtype)) * 0.5, -1) @ v


def over_queries(m: Any, q: Any, k: Any, v: Any) -> Any:
    return F.softmax(q @ k.mT, -2) @ v


def weights_returned(m: Any, q: Any, k: Any, v: Any) -> Any:
    att = F.softmax(q @ k.mT, -1)
    return att @ v + att.mean()


def with_bias_that_learns(m: Any, q: Any, k: Any, v: Any) -> Any:
    return F.softmax(q @ k.mT + m.out.weight[:6, :6], -1) @ v


def broadcast_keys(m: Any, q: Any, k: Any, v: Any) -> Any:
    return F.softmax(q @ k[:, :1].mT, -1) @ v


def negative(m: Any, q: Any, k: Any, v: Any) -> Any:
    return F.softmax(-(q @ k.mT), -1) @ v


def written_scores(m: Any, q: Any, k: Any, v: Any) -> Any:
    att = q @ k.mT
    att.masked_fill_(m.bias[:, :, :6, :6] == 0, -INF)
    return F.softmax(att, -1) @ v


def double_dropout(m: Any, q: Any, k: Any, v: Any) -> Any:
    att = F.softmax(q @ k.mT, -1)
    return F.dropout(F.dropout(att, 0.0), 0.0) @ v + 0 * F.relu(att).sum()


@pytest.mark.parametrize(
    "form",
    [
        weak_mask,
        scaled_after_the_mask,
        over_queries,
        weights_returned,
        with_bias_that_learns,
        broadcast_keys,
        negative,
        written_scores,
        double_dropout,
    ],
)
def test_what_is_not_understood_is_left_as_it_is(form: Any) -> None:
    assert compared(attention(form), x()).fused() == []


class Checkpointed(nn.Module):
    """Computes its attention again in backward."""

    def __init__(self, part: nn.Module, write: bool = False) -> None:
        super().__init__()
        self.part, self.write = part, write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(self.part, x, use_reentrant=False)
        if self.write:
            self.part.bias[0, 0, 0, 1] = 1.0
        return y


@pytest.mark.parametrize("form", CAUSAL, ids=lambda f: f.__name__)
def test_attention_that_is_computed_again(form: Any) -> None:
    looked = compared(Checkpointed(attention(form)), x())
    inner = [g for graph in looked.graphs for g in graph.children()]
    nodes = [n for g in inner for n in g.graph.nodes if n.target is F.scaled_dot_product_attention]
    assert [n.kwargs["is_causal"] for n in nodes] == [True]


def test_no_flag_where_the_outer_graph_writes_the_mask() -> None:
    looked = Looked()
    model = Checkpointed(attention(min_gpt), write=True)
    torch.compile(model, backend=AttentionBackend([model], looked))(x())
    inner = [g for graph in looked.graphs for g in graph.children()]
    nodes = [n for g in inner for n in g.graph.nodes if n.target is F.scaled_dot_product_attention]
    assert [n.kwargs["is_causal"] for n in nodes] == [False]


# ---------------------------------------------------------------------- any chain of scalings and masks


@st.composite
def chains(draw: Any) -> Callable[..., torch.Tensor]:
    """An attention with scalings, masks and casts in any order."""
    steps = draw(
        st.lists(st.sampled_from(["mul", "div", "fill", "add", "where", "to"]), max_size=4)
    )
    kinds = [draw(st.sampled_from(["later", "nothing", "window"])) for _ in steps]
    numbers = [draw(st.sampled_from([-INF, -1e9, -1e4])) for _ in steps]

    def form(m: Any, q: Any, k: Any, v: Any) -> Any:
        t = q.size(2)
        att = q @ k.transpose(-1, -2)
        for step, kind, number in zip(steps, kinds, numbers, strict=True):
            later = torch.ones(t, t, dtype=torch.bool).triu(1)
            hidden = {
                "later": later,
                "nothing": torch.zeros(t, t, dtype=torch.bool),
                "window": later | torch.ones(t, t, dtype=torch.bool).tril(-3),
            }[kind]
            if step == "mul":
                att = 0.7 * att
            elif step == "div":
                att = att / 1.3
            elif step == "fill":
                att = att.masked_fill(hidden, number)
            elif step == "where":
                att = torch.where(hidden, number, att)
            elif step == "add":
                att = att + torch.zeros(t, t).masked_fill(hidden, number).to(att.dtype)
            else:
                att = att.to(torch.float64)
        return att.softmax(-1) @ v

    return form


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(chains())
def test_whatever_is_done_to_scores_results_are_the_same(form: Any) -> None:
    torch._dynamo.reset()
    looked = compared(attention(form), x())
    assert len(looked.fused()) <= 1


# ---------------------------------------------------------------------- masks that change later


def test_a_mask_that_is_written_after_compiling_is_noticed() -> None:
    model = attention(min_gpt)
    backend = AttentionBackend([model], Looked())
    torch.compile(model, backend=backend)(x())
    assert backend.known.changed(model) is None
    model.bias.copy_(model.bias.clone())  # the same values
    assert backend.known.changed(model) is None
    model.bias[0, 0, 0, 1] = 1.0
    assert backend.known.changed(model) == "bias"


def test_a_mask_that_is_replaced_is_noticed() -> None:
    model = attention(min_gpt)
    backend = AttentionBackend([model], Looked())
    torch.compile(model, backend=backend)(x())
    model.bias = torch.ones_like(model.bias)
    assert backend.known.changed(model) == "bias"


def test_ranks_look_at_a_mask_that_is_always_written_only_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(known_masks, "_has_ranks", lambda: True)
    model = attention(min_gpt)
    backend = AttentionBackend([model], Looked())
    torch.compile(model, backend=backend)(x())
    for _ in range(known_masks.MOST_REWRITTEN):
        model.bias.mul_(1)
        assert backend.known.changed(model) is None
    noticed = []
    for _ in range(known_masks.SELDOM):
        model.bias.fill_(1.0)
        noticed.append(backend.known.changed(model))
    assert noticed.count("bias") == 1
