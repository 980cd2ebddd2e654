"""FLOPs of one training step by hand: closed formulas over layer shapes.

Written without flopwise's own tables, to hold them against. One multiply-add is two FLOPs. A matrix
product y = x w costs its forward pass, the gradient of w and the gradient of x: three products of
equal size; the gradient of x is left out where x is the input data. Attention is counted full (a
causal mask halves nothing). Recomputation, norms, activations and the optimizer are not counted.
"""

from __future__ import annotations

import math


def out_size(size: int, kernel: int, stride: int) -> int:
    """Returns the output size of a convolution or pooling padded by half its kernel."""
    return (size + 2 * (kernel // 2) - kernel) // stride + 1


def mlp(width: int, layers: int, outputs: int) -> int:
    """Returns FLOPs a sample of `layers` width x width products and a last one to `outputs`."""
    forward = 2 * (layers * width * width + width * outputs)
    return 3 * forward - 2 * width * width


def transformer(matmul_weights: int, layers: int, width: int, sequence: int) -> int:
    """Returns FLOPs a sequence of a decoder: 6 N T for weights, 12 L T^2 d for attention.

    Source: Chowdhery et al., PaLM, arXiv:2204.02311, appendix B: 6 N + 12 L H Q T a token.
    """
    return 6 * matmul_weights * sequence + 12 * layers * sequence**2 * width


def gpt(sequence: int, layers: int, width: int, vocab: int) -> int:
    """Returns FLOPs a sequence of GPT-2: 12 d^2 weights a layer (4 in attention) and the head."""
    return transformer(layers * 12 * width**2 + width * vocab, layers, width, sequence)


def llama(sequence: int, layers: int, width: int, hidden: int, vocab: int) -> int:
    """Returns FLOPs a sequence of a Llama, ungrouped heads: 4 d^2 + 3 d h a layer, and a head."""
    weights = layers * (4 * width**2 + 3 * width * hidden) + width * vocab
    return transformer(weights, layers, width, sequence)


def resnet50(image: int, classes: int = 1000) -> int:
    """Returns FLOPs an image of ResNet-50 with the stride on the 3x3.

    Source: He et al., arXiv:1512.03385, table 1; the stride as in torchvision
    (4.09 G multiply-adds forward at 224).
    """
    size = out_size(image, 7, 2)
    first = 3 * 64 * 49 * size**2
    macs = first
    size = out_size(size, 3, 2)
    inputs = 64
    for width, repeats, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for repeat in range(repeats):
            step = stride if repeat == 0 else 1
            after = out_size(size, 3, step)
            macs += inputs * width * size**2  # 1x1, before the stride
            macs += width * width * 9 * after**2  # 3x3
            macs += width * 4 * width * after**2  # 1x1
            if repeat == 0:
                macs += inputs * 4 * width * after**2  # the projection beside the block
            size, inputs = after, 4 * width
    macs += inputs * classes
    return 2 * (3 * macs - first)


def efficientnet(image: int, width: float, depth: float, classes: int = 1000) -> int:
    """Returns FLOPs an image of an EfficientNet (B0: width 1, depth 1; B4: 1.4, 1.8 at 380).

    A depthwise convolution has k^2 weights a channel, forward and in both gradients.
    Source: Tan and Le, arXiv:1905.11946, table 1; channels rounded to multiples of 8 as in
    its code.
    """

    def channels(count: int) -> int:
        rounded = max(8, int(count * width + 4) // 8 * 8)
        return rounded + 8 if rounded < 0.9 * count * width else rounded

    size = out_size(image, 3, 2)
    inputs = channels(32)
    first = 3 * inputs * 9 * size**2
    macs = first
    stages = (
        # kernel, stride, expansion, channels, repeats
        (3, 1, 1, 16, 1),
        (3, 2, 6, 24, 2),
        (5, 2, 6, 40, 2),
        (3, 2, 6, 80, 3),
        (5, 1, 6, 112, 3),
        (5, 2, 6, 192, 4),
        (3, 1, 6, 320, 1),
    )
    for kernel, stride, expansion, base, repeats in stages:
        outputs = channels(base)
        for repeat in range(math.ceil(repeats * depth)):
            middle = inputs * expansion
            after = out_size(size, kernel, stride if repeat == 0 else 1)
            if expansion > 1:
                macs += inputs * middle * size**2  # expand
            macs += middle * kernel**2 * after**2  # depthwise
            macs += 2 * middle * (inputs // 4)  # squeeze and excite, on one pixel
            macs += middle * outputs * after**2  # project
            size, inputs = after, outputs
    last = channels(1280)
    macs += inputs * last * size**2 + last * classes
    return 2 * (3 * macs - first)
