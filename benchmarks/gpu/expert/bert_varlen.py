"""BERT-large on sequences of many lengths as an expert trains it: packed, without padding, attention of variable length.

Sequences are put into rows of 8192 tokens. With --compile it is compiled, too.
"""

import ahead  # noqa: F401  (it finds the naive scripts)
import bert_varlen as naive
import text
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Sampler
from transformers import AttentionInterface, BertConfig, BertForMaskedLM
from transformers.masking_utils import AttentionMaskInterface

ENDS = {}  # of the sequences in the row at hand, for attention


def attention(module, query, key, value, attention_mask, scaling=None, **_):
    """Attention within each sequence of one packed row; inputs are (1, heads, tokens, width)."""
    ends, longest = ENDS["ends"], ENDS["longest"]
    if not query.is_cuda:
        number = torch.bucketize(torch.arange(query.shape[2]), ends[1:], right=True)
        same = number[:, None] == number[None]
        y = F.scaled_dot_product_attention(query, key, value, attn_mask=same, scale=scaling)
        return y.transpose(1, 2), None
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    y = varlen_attn(q, k, v, ends, ends, longest, longest, scale=scaling)
    return y[None], None


class Packed(nn.Module):
    """The loss of one packed row."""

    def __init__(self, model, longest):
        super().__init__()
        self.model, self.longest = model, longest

    def forward(self, ids, positions, labels, ends):
        ENDS["ends"], ENDS["longest"] = ends, self.longest
        logits = self.model(input_ids=ids, position_ids=positions).logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Rows(Sampler):
    """Sequences in random order, as many as fit into a row of so many tokens."""

    def __init__(self, lengths, tokens):
        self.lengths, self.tokens = torch.as_tensor(lengths), tokens

    def __iter__(self):
        row, used = [], 0
        while True:
            for i in torch.randperm(len(self.lengths)).tolist():
                length = int(self.lengths[i])
                if used + length > self.tokens:
                    yield row
                    row, used = [], 0
                row.append(i)
                used += length


class Pack:
    """Puts sequences into one row, filled up to its size with sequences that count for nothing."""

    def __init__(self, vocab, tokens, longest):
        self.vocab, self.tokens, self.longest = vocab, tokens, longest
        self.most = tokens // 64 + 32  # sequences in a row; three times what there are on average

    def __call__(self, pieces):
        lengths = [len(piece) for piece in pieces]
        real = sum(lengths)
        left = self.tokens - real
        lengths += [self.longest] * (left // self.longest)
        lengths += [left % self.longest] if left % self.longest else []
        ids = torch.cat([*pieces, torch.full((left,), naive.PAD)])
        hidden = (torch.rand(self.tokens) < 0.15) & (torch.arange(self.tokens) < real)
        labels = ids.masked_fill(~hidden, naive.IGNORED)
        kind = torch.rand(self.tokens)
        ids = ids.masked_fill(hidden & (kind < 0.8), naive.MASK)
        other = torch.randint(1, self.vocab, ids.shape)
        ids = torch.where(hidden & (kind >= 0.9), other, ids)
        positions = torch.cat([torch.arange(length) for length in lengths])
        ends = torch.full((self.most,), self.tokens, dtype=torch.int32)  # the rest are empty
        ends[0] = 0
        ends[1 : len(lengths) + 1] = torch.tensor(lengths).cumsum(0)
        return {
            "ids": ids[None],
            "labels": labels[None],
            "positions": positions[None],
            "ends": ends,
            "amount": real,
        }


def main():
    options = text.parser(__doc__)
    options.add_argument("--compile", action="store_true", help="compile the model, too")
    args = options.parse_args()
    device = text.device_of()
    longest, tokens = (64, 256) if args.tiny else (512, 8192)
    AttentionInterface.register("packed", attention)
    AttentionMaskInterface.register("packed", lambda *_, **__: None)
    config = BertConfig(
        vocab_size=509 if args.tiny else 30522,
        hidden_size=64 if args.tiny else 1024,
        num_hidden_layers=2 if args.tiny else 24,
        num_attention_heads=4 if args.tiny else 16,
        intermediate_size=128 if args.tiny else 4096,
        attention_probs_dropout_prob=0.0,
    )
    config._attn_implementation = "packed"
    model = Packed(BertForMaskedLM(config), longest).to(device)
    data = naive.Text(config.vocab_size, longest, 1_000_000)
    loader = DataLoader(
        data,
        batch_sampler=Rows(data.lengths, tokens),
        collate_fn=Pack(config.vocab_size, tokens, longest),
        **text.loading(args.tiny),
    )

    def loss_of(net, batch):
        return net(batch["ids"], batch["positions"], batch["labels"], batch["ends"])

    text.train(args, model, loader, loss_of, None, compiled=args.compile)


if __name__ == "__main__":
    main()
