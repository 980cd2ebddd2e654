"""Loaders come out of one function, the batches through an iterator by hand."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Train(Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, i):
        x = torch.randn(6, generator=torch.Generator().manual_seed(i))
        return {"x": x, "y": (x[:1] > 0).float()}


class Valid(Train):
    def __len__(self):
        return 16


def loaders(size):
    train = DataLoader(Train(), batch_size=size, drop_last=True)
    valid = DataLoader(Valid(), batch_size=size)
    return train, valid


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x):
        return self.net(x)


def loss_of(model, batch):
    return F.binary_cross_entropy_with_logits(model(batch["x"]), batch["y"])


def main():
    torch.manual_seed(0)
    train, valid = loaders(8)
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batches = iter(train)
    for step in range(12):
        batch = next(batches)
        loss = loss_of(model, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.6f}", flush=True)
    model.eval()
    with torch.no_grad():
        print("valid", sum(loss_of(model, batch).item() for batch in valid))


main()
