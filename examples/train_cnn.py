"""Trains a small convolutional net on real images: 1,797 handwritten digits (data/README.md).

The 8x8 scans are drawn larger and moved, turned and bent at random each time they are read.
Runs on a CPU or a GPU: python train_cnn.py --device cuda
"""

import argparse
import gzip
import math
import os
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

DATA = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data", "digits.csv.gz")
SIZE = 32


class Digits(Dataset):
    """Every line of the file is 64 pixels of 0..16, row by row, and the digit."""

    def __init__(self, lines, augment):
        self.lines = lines
        self.augment = augment

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, i):
        *pixels, label = [int(value) for value in self.lines[i].split(",")]
        angle = scale = dx = dy = 0.0
        if self.augment:
            angle = math.radians(random.uniform(-15, 15))
            scale = random.uniform(-0.1, 0.1)
            dx, dy = random.uniform(-1, 1), random.uniform(-1, 1)
        image = torch.tensor(draw(pixels, angle, 1 + scale, dx, dy)).view(1, SIZE, SIZE) / 16
        if self.augment:
            image = bend(image)
            image = image * random.uniform(0.8, 1.2) + 0.05 * torch.randn_like(image)
        return (image - 0.3) / 0.37, label


def draw(pixels, angle, scale, dx, dy):
    """Draws the 8x8 pixels at 32x32: turned, scaled, shifted, and interpolated bilinearly."""
    cos, sin = math.cos(angle) / scale, math.sin(angle) / scale
    middle = (SIZE - 1) / 2
    drawn = []
    for row in range(SIZE):
        for column in range(SIZE):
            right, down = (column - middle) * 8 / SIZE, (row - middle) * 8 / SIZE
            x = cos * right - sin * down + 3.5 + dx
            y = sin * right + cos * down + 3.5 + dy
            left, top = math.floor(x), math.floor(y)
            value = 0.0
            for py in (top, top + 1):
                for px in (left, left + 1):
                    if 0 <= px < 8 and 0 <= py < 8:
                        value += (1 - abs(x - px)) * (1 - abs(y - py)) * pixels[8 * py + px]
            drawn.append(value)
    return drawn


def bend(image):
    """Displaces the pixels by a smooth random field of up to 2 pixels."""
    coarse = (torch.rand(1, 2, 4, 4) * 2 - 1) * 2 * 2 / SIZE
    field = F.interpolate(coarse, size=(SIZE, SIZE), mode="bicubic", align_corners=False)
    grid = F.affine_grid(torch.eye(2, 3)[None], (1, 1, SIZE, SIZE), align_corners=False)
    return F.grid_sample(image[None], grid + field.permute(0, 2, 3, 1), align_corners=False)[0]


def conv_block(channels_in, channels_out):
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(),
        nn.Conv2d(channels_out, channels_out, 3, padding=1),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )


class ConvNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.features = nn.Sequential(
            conv_block(1, width), conv_block(width, 2 * width), conv_block(2 * width, 4 * width)
        )
        self.classifier = nn.Linear(4 * width, 10)

    def forward(self, x):
        x = self.features(x)
        return self.classifier(x.mean(dim=(2, 3)))


def evaluate(model, loader, device):
    model.eval()
    correct = 0
    with torch.no_grad():
        for images, labels in loader:
            predictions = model(images.to(device)).argmax(dim=1)
            correct += (predictions == labels.to(device)).sum().item()
    model.train()
    return correct / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--width", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--out", default=None, help="save a checkpoint here at the end")
    args = parser.parse_args()

    random.seed(args.seed)
    torch.manual_seed(args.seed)

    with gzip.open(DATA, "rt") as file:
        lines = file.read().splitlines()
    train_data = Digits(lines[:1500], augment=True)
    test_data = Digits(lines[1500:], augment=False)
    train_loader = DataLoader(
        train_data, batch_size=args.batch_size, shuffle=True, num_workers=args.num_workers
    )
    test_loader = DataLoader(test_data, batch_size=args.batch_size, num_workers=args.num_workers)

    model = ConvNet(args.width).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    print(f"{len(train_data)} images, {sum(p.numel() for p in model.parameters()):,} parameters")

    step = 0
    for epoch in range(1, args.epochs + 1):
        correct = 0
        for images, labels in train_loader:
            images, labels = images.to(args.device), labels.to(args.device)
            output = model(images)
            loss = F.cross_entropy(output, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            correct += (output.argmax(dim=1) == labels).sum().item()
            print(f"step {step} loss {loss.item():.4f}", flush=True)
        accuracy = evaluate(model, test_loader, args.device)
        train_accuracy = correct / len(train_data)
        print(f"epoch {epoch} train accuracy {train_accuracy:.4f} test accuracy {accuracy:.4f}")

    if args.out:
        torch.save({"model": model.state_dict(), "epoch": args.epochs}, args.out)
        print(f"saved {args.out}")


if __name__ == "__main__":
    main()
