"""Trains EfficientNet-B4 on photographs with the settings that PyTorch starts with: python efficientnet_b4.py --steps 300

Needs torchvision and timm. The photographs are made up: smooth noise with grain, decoded already.
"""

import argparse

import numpy as np
import timm
import torch
import torch.nn as nn
import torchvision.transforms as T
from PIL import Image
from step_times import StepTimes
from torch.utils.data import DataLoader, Dataset


class Photos(Dataset):
    def __init__(self, count, stored, crop, classes=1000):
        self.count = count
        self.classes = classes
        self.photos = [self.make(i, stored) for i in range(64)]
        self.transform = T.Compose(
            [
                T.RandomResizedCrop(crop),
                T.RandomHorizontalFlip(),
                T.ToTensor(),
                T.Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
            ]
        )

    @staticmethod
    def make(seed, size):
        random = np.random.default_rng(seed)
        coarse = Image.fromarray(random.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((size, size), Image.BICUBIC), dtype=np.float32)
        return (smooth + random.normal(0, 12, (size, size, 1))).clip(0, 255).astype(np.uint8)

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        number = i % len(self.photos)
        return self.transform(Image.fromarray(self.photos[number])), number % self.classes


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tiny", action="store_true", help="small, for a CPU")
    parser.add_argument("--times", help="write step times there")
    args = parser.parse_args()

    torch.manual_seed(1234)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batch_size = 2 if args.tiny else 64
    if args.tiny:
        dataset = Photos(10_000, stored=80, crop=64)
        model = timm.create_model("efficientnet_b0", num_classes=1000)
    else:
        dataset = Photos(1_281_167, stored=432, crop=380)
        model = timm.create_model("efficientnet_b4", num_classes=1000)
    loader = DataLoader(dataset, batch_size=batch_size, shuffle=True, num_workers=2, drop_last=True)
    model = model.to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)

    times = StepTimes(args.times)
    model.train()
    for step, (images, labels) in enumerate(loader, 1):
        images = images.to(device)
        labels = labels.to(device)
        outputs = model(images)
        loss = criterion(outputs, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        times.mark(batch_size)
        print(f"step {step} loss {loss.item():.4f}", flush=True)
        if step == args.steps:
            break
    times.write(batch=batch_size)


if __name__ == "__main__":
    main()
