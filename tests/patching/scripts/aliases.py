import torch as th
import torch.nn.functional as fn
from torch.optim import AdamW as Opt
from torch.utils.data import DataLoader as DL
from torch.utils.data import TensorDataset as TD

th.manual_seed(0)
xs = th.randn(96, 12)
ys = (xs.sum(1) > 0).long()
dl = DL(TD(xs, ys), 8, True)
net = th.nn.Sequential(th.nn.Linear(12, 32), th.nn.ReLU(), th.nn.Linear(32, 2))
opt = Opt(net.parameters(), 1e-2)
for step, batch in enumerate(dl):
    x, y = batch
    loss = fn.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, "loss", f"{loss:.6f}", flush=True)
