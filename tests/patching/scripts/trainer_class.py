import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, i):
        x = torch.randn(20, generator=torch.Generator().manual_seed(i))
        return x, x.sum().unsqueeze(0)


class Trainer:
    def __init__(self, model, train_data, optimizer, device, save_every=1):
        self.device = device
        self.model = model.to(device)
        self.train_data = train_data
        self.optimizer = optimizer
        self.save_every = save_every

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        output = self.model(source)
        loss = torch.nn.functional.mse_loss(output, targets)
        loss.backward()
        self.optimizer.step()
        print(f"loss {loss.item():.6f}", flush=True)

    def _run_epoch(self, epoch):
        for source, targets in self.train_data:
            source = source.to(self.device)
            targets = targets.to(self.device)
            self._run_batch(source, targets)

    def train(self, max_epochs: int):
        for epoch in range(max_epochs):
            self._run_epoch(epoch)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 1))

    def forward(self, x):
        return self.layers(x)


def load_train_objs():
    train_set = Numbers()  # load your dataset
    model = Net()  # load your model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    return train_set, model, optimizer


def prepare_dataloader(dataset: Dataset, batch_size: int):
    return DataLoader(dataset, batch_size=batch_size, pin_memory=False, shuffle=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    dataset, model, optimizer = load_train_objs()
    train_data = prepare_dataloader(dataset, 8)
    trainer = Trainer(model, train_data, optimizer, device="cpu")
    trainer.train(1)
