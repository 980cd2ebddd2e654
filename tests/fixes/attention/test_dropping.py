from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import fx, nn

from flopwise.fixes.attention.fusing import AttentionBackend

pytestmark = pytest.mark.timeout(200, method="thread")
WIDTH, HEADS, LENGTH = 16, 2, 6


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Fused(nn.Module):
    """Attention by the fused operator, with a mask of a kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.qkv, self.kind = nn.Linear(WIDTH, 3 * WIDTH), kind
        self.register_buffer("lower", torch.ones(8, 8).tril().bool())

    def mask(self, t: int, given: torch.Tensor | None) -> torch.Tensor | None:
        index = torch.arange(t)
        return {
            "buffer": lambda: self.lower[:t, :t],
            "arange": lambda: (index[None] <= index[:, None])[None, None].expand(2, -1, -1, -1),
            "ones": lambda: torch.ones(2, 1, t, t, dtype=torch.bool),
            "zeros added": lambda: torch.zeros(t, t, dtype=self.qkv.weight.dtype),
            "lower added": lambda: torch.full((t, t), -torch.inf).triu(1).to(self.qkv.weight.dtype),
            "window": lambda: (index[None] <= index[:, None]) & (index[None] > index[:, None] - 2),
            "given": lambda: given,
            "partly given": lambda: (index[None] <= index[:, None]) & given[:, None, None],
        }[self.kind]()

    def forward(self, x: torch.Tensor, given: torch.Tensor | None = None) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, HEADS, c // HEADS).transpose(1, 2) for y in self.qkv(x).split(c, 2))
        return F.scaled_dot_product_attention(q, k, v, self.mask(t, given), scale=0.3)


class Kept:
    """Compiles nothing, and keeps the graph as it comes."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []

    def __call__(self, graph: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        self.graphs.append(graph)
        return graph.forward

    def node(self, name: str) -> fx.Node:
        (graph,) = self.graphs
        return next(n for n in graph.graph.nodes if getattr(n.target, "__name__", "") == name)


def compared(model: nn.Module, *inputs: Any) -> tuple[Kept, AttentionBackend]:
    kept = Kept()
    backend = AttentionBackend([model], kept)
    compiled = torch.compile(model, backend=backend)
    results = []
    for call in (model, compiled):
        model.zero_grad()
        out = call(*inputs)
        out.square().sum().backward()
        results.append([out.detach(), *(p.grad for p in model.parameters())])
    for eager, fused in zip(*results, strict=True):
        torch.testing.assert_close(fused, eager, rtol=1e-9, atol=1e-9)
    return kept, backend


def x() -> torch.Tensor:
    return torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1)).double()


@pytest.mark.parametrize(
    ("kind", "causal"),
    [
        ("buffer", True),
        ("arange", True),
        ("lower added", True),
        ("ones", False),
        ("zeros added", False),
    ],
)
def test_a_mask_that_is_not_needed_goes(kind: str, causal: bool) -> None:
    kept, backend = compared(Fused(kind).double(), x())
    node = kept.node("scaled_dot_product_attention")
    assert node.args[3] is None
    assert node.kwargs["is_causal"] is causal
    assert backend.words() == "without masks 1"


@pytest.mark.parametrize("kind", ["window", "given", "partly given"])
def test_a_mask_that_is_needed_or_not_known_stays(kind: str) -> None:
    given = torch.ones(2, LENGTH, dtype=torch.bool)
    if kind == "given":
        given = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool)
    kept, backend = compared(Fused(kind).double(), x(), given)
    node = kept.node("scaled_dot_product_attention")
    assert node.args[3] is not None
    assert backend.words() is None


class Layer(nn.Module):
    """Torch's own layer, as most write it."""

    def __init__(self, causal: bool = True, padding: bool = False) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, 0.0, batch_first=True)
        self.causal, self.padding = causal, padding

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        t = x.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(t, dtype=x.dtype)
        if not self.causal:
            mask = torch.zeros(t, t, dtype=x.dtype)
        padding = torch.zeros(2, t, dtype=x.dtype) if self.padding else None
        return self.layer(x, mask, padding)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("padding", [False, True])
def test_torchs_own_layer_is_told_what_its_mask_is(causal: bool, padding: bool) -> None:
    torch.manual_seed(0)
    kept, backend = compared(Layer(causal, padding).double(), x())
    node = kept.node("multi_head_attention_forward")
    if not causal:
        assert node.kwargs["attn_mask"] is None
    else:
        assert node.kwargs["is_causal"] is not padding
    assert backend.words() == (None if causal and padding else "without masks 1")


class TestTransformers:
    """Masks that transformers builds while it is traced."""

    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
    @pytest.mark.parametrize("kind", ["sdpa", "eager"])
    @pytest.mark.parametrize("name", ["Llama", "Bert", "GPT2"])
    @pytest.mark.parametrize("packed", [False, True])
    def test_are_not_needed_unless_sequences_are_packed(
        self, name: str, kind: str, packed: bool
    ) -> None:
        transformers = pytest.importorskip("transformers", minversion="5.0", reason="not installed")
        sizes = {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "vocab_size": 64,
            "max_position_embeddings": 16,
        }
        model_name = {"Llama": "LlamaForCausalLM", "Bert": "BertForMaskedLM"}.get(
            name, "GPT2LMHeadModel"
        )
        config = getattr(transformers, f"{name}Config")(**sizes, attn_implementation=kind)
        config.use_cache = False
        torch.manual_seed(0)
        model = getattr(transformers, model_name)(config).eval()
        ids = torch.randint(0, 64, (2, 8))
        inputs = {"input_ids": ids, "labels": ids}
        if packed:
            inputs["position_ids"] = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]] * 2)
        kept = Kept()
        compiled = torch.compile(model, backend=AttentionBackend([model], kept))
        torch.testing.assert_close(compiled(**inputs).loss, model(**inputs).loss)
        nodes = [
            node
            for graph in kept.graphs
            for node in graph.graph.nodes
            if getattr(node.target, "__name__", "") == "scaled_dot_product_attention"
        ]
        masked = packed and name != "Bert"  # Bert's attention goes both ways over everything
        assert len(nodes) == 2
        for node in nodes:
            mask = node.kwargs.get("attn_mask")
            assert (mask is not None) is masked
            assert node.kwargs["is_causal"] is (name != "Bert" and not masked)
