"""A model whose output carries its loss, as those of transformers do."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


class LanguageModel(nn.Module):
    def __init__(self, words=50, width=32):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.up, self.down = nn.Linear(width, 64), nn.Linear(64, width)
        self.head = nn.Linear(width, words)

    def forward(self, input_ids, labels):
        h = self.embed(input_ids)
        h = h + self.down(torch.relu(self.up(h)))
        logits = self.head(h)
        return Output(nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


def collate(rows):
    ids = torch.stack(rows)
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}


def main():
    torch.manual_seed(0)
    rows = [torch.randint(0, 50, (17,)) for _ in range(96)]
    train_dataloader = DataLoader(rows, shuffle=True, collate_fn=collate, batch_size=8)
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    model.to(device)
    model.train()
    for epoch in range(1):
        for batch in train_dataloader:
            batch = {k: v.to(device) for k, v in batch.items()}
            outputs = model(**batch)
            loss = outputs.loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"loss {loss.item():.6f}", flush=True)


if __name__ == "__main__":
    main()
