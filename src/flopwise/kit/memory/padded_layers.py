"""Linear and convolution layers that compute on round dimensions and show the ones that they have.

Output features and channels are padded by rows of zeros behind the weight (`rows`), and cut off the result. Input features
and channels are padded by zeros in the call, on the input and on the weight. Cutting and padding are ordinary ops of
autograd, so gradients of what was added are never seen by anyone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from flopwise.kit.memory.rows import padded, shrink

#: Of a padded layer: output and input dimension that it computes with, and whether its output is made contiguous.
SETTING = "_padded_to"


class PaddedLinear(nn.Linear):
    """A linear layer that computes with rounded in_features and out_features."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns what the layer without padding returns, to within the rounding of another kernel."""
        out, into, contiguous = getattr(self, SETTING)
        if into > self.in_features:
            input = F.pad(input, (0, into - self.in_features))
        result = F.linear(input, _weight(self.weight, out, into), _bias(self.bias, out))
        if out == self.out_features:
            return result
        result = result[..., : self.out_features]
        return result.contiguous() if contiguous else result


class _PaddedConv:
    """What the convolutions share: `_conv_forward` of torch with other weights."""

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        """Returns what the layer without padding returns, to within the rounding of another kernel."""
        out, into, contiguous = getattr(self, SETTING)
        dims = self.weight.dim() - 2
        if into > self.in_channels:
            input = F.pad(input, (0, 0) * dims + (0, into - self.in_channels))
        weight, bias = _weight(self.weight, out, into), _bias(self.bias, out)
        result: torch.Tensor = self._conv_forward(input, weight, bias)
        if out == self.out_channels:
            return result
        # Channels that lie innermost stay there: the layout is the one that the convolution chose.
        channel = -1 - dims
        nhwc = dims == 2 and result.is_contiguous(memory_format=torch.channels_last)
        layout = torch.channels_last if nhwc else torch.contiguous_format
        result = result.narrow(channel, 0, self.out_channels)
        return result.contiguous(memory_format=layout) if contiguous else result


class PaddedConv1d(_PaddedConv, nn.Conv1d):
    """A 1-d convolution that computes with rounded channels."""


class PaddedConv2d(_PaddedConv, nn.Conv2d):
    """A 2-d convolution that computes with rounded channels."""


class PaddedConv3d(_PaddedConv, nn.Conv3d):
    """A 3-d convolution that computes with rounded channels."""


#: By the exact class: a subclass may compute anything.
PADDED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: PaddedLinear,
    nn.Conv1d: PaddedConv1d,
    nn.Conv2d: PaddedConv2d,
    nn.Conv3d: PaddedConv3d,
}
PLAIN = {padded_class: plain for plain, padded_class in PADDED.items()}


def dimensions(layer: nn.Module) -> tuple[int, int]:
    """Returns output and input dimension of a Linear or convolution layer."""
    if isinstance(layer, nn.Linear):
        return layer.out_features, layer.in_features
    return int(layer.out_channels), int(layer.in_channels)  # type: ignore[arg-type]


def switch_on(layer: nn.Module, out: int, into: int, contiguous: bool) -> None:
    """Makes a plain layer compute with these dimensions; the object, its parameters and its hooks stay."""
    setattr(layer, SETTING, (out, into, contiguous))
    layer.__class__ = PADDED[type(layer)]


def switch_off(layer: nn.Module) -> None:
    """Makes it a plain layer again."""
    if type(layer) in PLAIN:
        layer.__class__ = PLAIN[type(layer)]
        delattr(layer, SETTING)


def give_memory_back(layer: nn.Module) -> None:
    """Gives the layer's parameters memory of their own size again."""
    for parameter in layer.parameters(recurse=False):
        shrink(parameter)


def _weight(weight: torch.Tensor, out: int, into: int) -> torch.Tensor:
    weight = padded(weight, out)
    more = into - weight.shape[1]
    return F.pad(weight, (0, 0) * (weight.dim() - 2) + (0, more)) if more else weight


def _bias(bias: torch.Tensor | None, out: int) -> torch.Tensor | None:
    return None if bias is None else padded(bias, out)
