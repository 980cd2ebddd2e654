"""The Llama-like model as an expert trains it: everything of text.py, and no attention mask, since no token is padding."""

import ahead  # noqa: F401  (it finds the naive scripts)
import llama as naive
import text
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import AttentionMaskInterface


def main():
    args = text.parser(__doc__, steps=200).parse_args()
    device = text.device_of()
    batch_size, length = (1, 64) if args.tiny else (4, 2048)
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    full = {"hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 24}
    heads = 4 if args.tiny else 16
    config = LlamaConfig(
        vocab_size=509 if args.tiny else 32000,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=length,
        use_cache=False,
        **(small if args.tiny else full),
    )
    AttentionMaskInterface.register("sdpa", lambda *_, **__: None)
    with torch.device(device):
        model = LlamaForCausalLM(config)
    data = naive.Text(config.vocab_size, length, 1_000_000)
    loader = DataLoader(
        data,
        batch_size,
        collate_fn=lambda ids: {"ids": torch.stack(ids)},
        **text.loading(args.tiny),
    )
    text.train(
        args,
        model,
        loader,
        lambda net, batch: net(input_ids=batch["ids"], labels=batch["ids"]).loss,
        batch_size,
    )


if __name__ == "__main__":
    main()
