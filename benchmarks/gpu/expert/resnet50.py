"""ResNet-50 as an expert trains it: everything of images.py, cuDNN's benchmark and CUDA graphs."""

import ahead  # noqa: F401  (it finds the naive scripts)
import images
import resnet50 as naive
import torchvision


def model_of(tiny):
    return torchvision.models.resnet18() if tiny else torchvision.models.resnet50()


if __name__ == "__main__":
    images.train(
        __doc__, naive.Photos, model_of, (256, 256, 224), (4, 48, 32), "reduce-overhead", True
    )
