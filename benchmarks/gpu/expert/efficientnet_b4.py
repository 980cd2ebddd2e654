"""EfficientNet-B4 as an expert trains it: everything of images.py."""

import ahead  # noqa: F401  (it finds the naive scripts)
import efficientnet_b4 as naive
import images
import timm


def model_of(tiny):
    return timm.create_model("efficientnet_b0" if tiny else "efficientnet_b4", num_classes=1000)


if __name__ == "__main__":
    images.train(__doc__, naive.Photos, model_of, (64, 432, 380), (2, 80, 64), None, False)
