"""Trains a classifier of images, with functions for an epoch of training and of validation."""

import argparse

import torch
import torch.nn as nn
import torch.nn.parallel
import torch.optim
import torch.utils.data
from torch.optim.lr_scheduler import StepLR

parser = argparse.ArgumentParser(description="Image training")
parser.add_argument("-j", "--workers", default=0, type=int, metavar="N")
parser.add_argument("-b", "--batch-size", default=8, type=int)
parser.add_argument("--epochs", default=1, type=int)
parser.add_argument("--distributed", action="store_true")


class Pictures(torch.utils.data.Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        return torch.randn(3, 16, 16, generator=draw), index % 10


class SmallNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1, stride=2)
        self.fc = nn.Linear(16, 10)

    def forward(self, x):
        x = torch.relu(self.conv1(x))
        x = torch.relu(self.conv2(x))
        return self.fc(x.mean((2, 3)))


def main():
    args = parser.parse_args()
    torch.manual_seed(0)
    main_worker(args)


def main_worker(args):
    model = SmallNet()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.distributed:
        model.to(device)
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        model = model.to(device)

    # define loss function (criterion), optimizer, and learning rate scheduler
    criterion = nn.CrossEntropyLoss().to(device)

    optimizer = torch.optim.SGD(model.parameters(), 0.1,
                                momentum=0.9,
                                weight_decay=1e-4)  # fmt: skip
    scheduler = StepLR(optimizer, step_size=30, gamma=0.1)

    train_dataset = Pictures(96)
    val_dataset = Pictures(16)
    train_loader = torch.utils.data.DataLoader(
        train_dataset,
        batch_size=args.batch_size,
        shuffle=True,
        num_workers=args.workers,
        drop_last=True,  # the last batch may be short
    )
    val_loader = torch.utils.data.DataLoader(
        val_dataset, batch_size=args.batch_size, shuffle=False, num_workers=args.workers
    )

    for epoch in range(args.epochs):
        train(train_loader, model, criterion, optimizer, epoch, device)
        validate(val_loader, model, criterion, device)
        scheduler.step()


def train(train_loader, model, criterion, optimizer, epoch, device):
    model.train()
    for i, (images, target) in enumerate(train_loader):
        # move data to the same device as model
        images = images.to(device, non_blocking=True)
        target = target.to(device, non_blocking=True)

        # compute output
        output = model(images)
        loss = criterion(output, target)

        # measure accuracy and record loss
        acc1 = accuracy(output, target)

        # compute gradient and do SGD step
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"Epoch: [{epoch}][{i}] loss {loss.item():.6f} acc {acc1:.2f}", flush=True)


def validate(val_loader, model, criterion, device):
    model.eval()
    with torch.no_grad():
        for images, target in val_loader:
            output = model(images.to(device))
            loss = criterion(output, target.to(device))
    print(f"validated {loss.item():.3f}", flush=True)


def accuracy(output, target):
    with torch.no_grad():
        return (output.argmax(1) == target).float().mean().item()


if __name__ == "__main__":
    main()
