import torch
from torch import nn


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTMCell(1, 16)
        self.linear = nn.Linear(16, 1)

    def forward(self, x):
        h, c = x.new_zeros(x.size(0), 16), x.new_zeros(x.size(0), 16)
        out = []
        for part in x.split(1, dim=1):
            h, c = self.lstm(part, (h, c))
            out += [self.linear(h)]
        return torch.cat(out, dim=1)


torch.manual_seed(0)
data = torch.sin(torch.arange(0, 20).float() / 2.0 + torch.rand(8, 1) * 6)
seq = Sequence()
criterion = nn.MSELoss()
optimizer = torch.optim.Adam(seq.parameters(), lr=0.02)
for i in range(12):

    def closure():
        optimizer.zero_grad()
        out = seq(data[:, :-1])
        loss = criterion(out, data[:, 1:])
        loss.backward()
        return loss

    print("loss %.6f" % optimizer.step(closure).item(), flush=True)  # noqa: UP031
