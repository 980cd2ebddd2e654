import torch
import torch.utils.data
from torch import nn


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1))

    def forward(self, x):
        features = self.body(x)
        return {"out": features, "aux": features.mean(1, keepdim=True)}


class Scenes(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, i):
        image = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(i))
        return image, (image.sum(0) > 0).long()


def criterion(inputs, target):
    losses = {}
    for name, x in inputs.items():
        if name == "out":
            losses[name] = nn.functional.cross_entropy(x, target)
    return losses["out"]


def train_one_epoch(model, criterion, optimizer, data_loader, device):
    model.train()
    for image, target in data_loader:
        image, target = image.to(device), target.to(device)
        output = model(image)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.6f}", flush=True)


def main(device="cpu"):
    torch.manual_seed(0)
    device = torch.device(device)
    dataset = Scenes()
    sampler = torch.utils.data.SequentialSampler(dataset)
    data_loader = torch.utils.data.DataLoader(dataset, batch_size=8, sampler=sampler)
    model = Head()
    model.to(device)
    params_to_optimize = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(params_to_optimize, lr=0.1, momentum=0.9)
    train_one_epoch(model, criterion, optimizer, data_loader, device)


if __name__ == "__main__":
    main()
