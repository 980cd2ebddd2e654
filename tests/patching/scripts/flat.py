import torch
from torch import nn
from torch.utils.data import DataLoader

# hyperparameters
lr = 0.05
torch.manual_seed(0)

# data
images = [(torch.randn(3, 8, 8), i % 4) for i in range(96)]
loader = DataLoader(images, batch_size=8)

# model
model = nn.Sequential(
    nn.Conv2d(3, 8, 3),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(8 * 36, 4),
)
loss_fn = nn.CrossEntropyLoss()
if lr > 1:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
else:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)

for x, y in loader:
    pred = model(x)
    loss = loss_fn(pred, y)
    optimizer.zero_grad(); loss.backward(); optimizer.step()  # noqa: E702  # fmt: skip
    print("loss %.6f" % loss.item(), flush=True)  # noqa: UP031
