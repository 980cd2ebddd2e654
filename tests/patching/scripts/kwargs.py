import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
LOADER = dict(batch_size=8, shuffle=True, num_workers=0)
OPTIMIZER = dict(lr=0.01, weight_decay=0.0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Linear(12, 32)
        self.head = nn.Linear(32, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.backbone(x)))


def train(net, batches, optimizer, loss_fn=nn.CrossEntropyLoss()):
    for x, y in batches:
        prediction = net(x)
        loss = loss_fn(prediction, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.6f}", flush=True)


data = TensorDataset(torch.randn(96, 12), torch.randint(0, 3, (96,)))
model = Model()
optimizer = optim.Adam(
    [
        {"params": model.backbone.parameters(), "lr": 0.001},
        {"params": model.head.parameters()},
    ],
    **OPTIMIZER,
)
train(model, DataLoader(data, **LOADER), optimizer)
