"""BERT-large as an expert trains it: everything of text.py, and no attention mask, since no token is padding.

With --sparse-head logits are made at the hidden places only, of which every sequence then has the same number.
"""

import ahead  # noqa: F401  (it finds the naive scripts)
import bert_large as naive
import text
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForMaskedLM
from transformers.masking_utils import AttentionMaskInterface


class SparseHead(nn.Module):
    """The loss of the hidden places, from their logits alone."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, places, targets):
        states = self.model.bert(input_ids=ids).last_hidden_state
        at = places.unsqueeze(-1).expand(-1, -1, states.shape[-1])
        logits = self.model.cls(states.gather(1, at))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class EquallyMany:
    """Hides the same number of tokens in every sequence: 15 %, to a multiple of 8."""

    def __init__(self, vocab, length):
        self.vocab, self.count = vocab, int(0.15 * length) // 8 * 8

    def __call__(self, pieces):
        ids = torch.stack(pieces)
        places = torch.rand(ids.shape).topk(self.count, dim=1).indices.sort(1).values
        targets = ids.gather(1, places)
        kind = torch.rand(places.shape)
        shown = torch.where(kind < 0.8, naive.MASK, targets)
        shown = torch.where(kind >= 0.9, torch.randint(0, self.vocab, places.shape), shown)
        return {"ids": ids.scatter(1, places, shown), "places": places, "targets": targets}


def main():
    options = text.parser(__doc__)
    options.add_argument("--sparse-head", action="store_true", help="logits at hidden places only")
    args = options.parse_args()
    device = text.device_of()
    batch_size, length = (2, 64) if args.tiny else (32, 512)
    config = BertConfig(
        vocab_size=509 if args.tiny else 30522,
        hidden_size=64 if args.tiny else 1024,
        num_hidden_layers=2 if args.tiny else 24,
        num_attention_heads=4 if args.tiny else 16,
        intermediate_size=128 if args.tiny else 4096,
    )
    AttentionMaskInterface.register("sdpa", lambda *_, **__: None)
    model = BertForMaskedLM(config).to(device)
    masking = naive.Masking(config.vocab_size)
    if args.sparse_head:
        model, masking = SparseHead(model), EquallyMany(config.vocab_size, length)
    data = naive.Text(config.vocab_size, length, 1_000_000)
    loader = DataLoader(data, batch_size, collate_fn=masking, **text.loading(args.tiny))

    def loss_of(net, batch):
        return net(**batch) if args.sparse_head else net(**batch).loss

    text.train(args, model, loader, loss_of, batch_size)


if __name__ == "__main__":
    main()
