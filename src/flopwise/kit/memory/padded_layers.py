"""Linear and convolution layers that compute on round dimensions and show the ones that they have.

Weights, biases and inputs are padded by zeros in each call, and the result is cut to its own size. All of it is ordinary ops
of autograd, so parameters stay what and where they are, and what was added gets no gradient that anyone sees.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

#: Attribute of a padded layer: output and input dimension that it computes with, whether its result is made
#: contiguous, and the dimensions that its weight had. None: it computes as it is.
SETTING = "_flopwise_padded_to"
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class PaddedLinear(nn.Linear):
    """A linear layer that computes with rounded in_features and out_features."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns what the layer without padding returns, to within the rounding of another kernel."""
        weight = self.weight
        more = _more(self, weight)
        if more is None:
            return F.linear(input, weight, self.bias)
        return padded_linear(input, weight, self.bias, *more)


class _PaddedConv:
    """What the convolutions share: `_conv_forward` of torch with other weights."""

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        """Returns what the layer without padding returns, to within the rounding of another kernel."""
        weight = self.weight
        more = _more(self, weight)
        if more is None:
            return self._conv_forward(input, weight, self.bias)  # type: ignore[no-any-return]
        out, into, contiguous = more
        channels = 1 - weight.dim()  # from the end, so that it holds without a batch too
        result: torch.Tensor = self._conv_forward(
            _longer(_cast(input), channels, into), *_parameters(weight, self.bias, out, into)
        )
        return _cut(result, channels, weight.shape[0], contiguous)


class PaddedConv1d(_PaddedConv, nn.Conv1d):
    """A 1-d convolution that computes with rounded channels."""


class PaddedConv2d(_PaddedConv, nn.Conv2d):
    """A 2-d convolution that computes with rounded channels."""


class PaddedConv3d(_PaddedConv, nn.Conv3d):
    """A 3-d convolution that computes with rounded channels."""


class _PaddedTransposed:
    """What the transposed convolutions share. Their weights have input channels first."""

    def forward(
        self: Any, input: torch.Tensor, output_size: list[int] | None = None
    ) -> torch.Tensor:
        """Returns what the layer without padding returns, to within the rounding of another kernel."""
        weight = self.weight
        out, into, contiguous = _more(self, weight) or (0, 0, False)
        dims = weight.dim() - 2
        output_padding = self._output_padding(
            input, output_size, self.stride, self.padding, self.kernel_size, dims, self.dilation
        )
        result: torch.Tensor = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[
            dims - 1
        ](
            _longer(_cast(input), -1 - dims, into),
            _longer(_longer(_cast(weight), 0, into), 1, out),
            None if self.bias is None else _longer(_cast(self.bias), 0, out),
            self.stride,
            self.padding,
            output_padding,
            self.groups,
            self.dilation,
        )
        return _cut(result, -1 - dims, weight.shape[1], contiguous)


class PaddedConvTranspose1d(_PaddedTransposed, nn.ConvTranspose1d):
    """A transposed 1-d convolution that computes with rounded channels."""


class PaddedConvTranspose2d(_PaddedTransposed, nn.ConvTranspose2d):
    """A transposed 2-d convolution that computes with rounded channels."""


class PaddedConvTranspose3d(_PaddedTransposed, nn.ConvTranspose3d):
    """A transposed 3-d convolution that computes with rounded channels."""


#: By the exact class: a subclass may compute anything.
PADDED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: PaddedLinear,
    nn.Conv1d: PaddedConv1d,
    nn.Conv2d: PaddedConv2d,
    nn.Conv3d: PaddedConv3d,
    nn.ConvTranspose1d: PaddedConvTranspose1d,
    nn.ConvTranspose2d: PaddedConvTranspose2d,
    nn.ConvTranspose3d: PaddedConvTranspose3d,
}
PLAIN = {padded_class: plain for plain, padded_class in PADDED.items()}


def padded_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    more_out: int,
    more_in: int,
    contiguous: bool,
) -> torch.Tensor:
    """Returns what `F.linear` returns, to within rounding, computed with this many rows and columns of zeros more.

    Args:
        contiguous: copy the result to the strides that it had; False: a view with a gap behind each row.
    """
    longer = _parameters(weight, bias, more_out, more_in)
    result = F.linear(_longer(_cast(input), -1, more_in), *longer)
    return _cut(result, -1, weight.shape[0], contiguous)


def dimensions(layer: Any) -> tuple[int, int]:
    """Returns output and input dimension of a Linear or convolution layer.

    Of those that can be padded they are the weight's, which is what computes: one that is tied to another may have more rows
    than the layer says.
    """
    if (type(layer) in PADDED or type(layer) in PLAIN) and getattr(layer, "groups", 1) == 1:
        return _sizes(layer, layer.weight)
    if isinstance(layer, nn.Linear):
        return layer.out_features, layer.in_features
    return layer.out_channels, layer.in_channels


def switch_on(layer: nn.Module, out: int, into: int, contiguous: bool) -> None:
    """Makes a plain layer compute with these dimensions; the object, its parameters and its hooks stay."""
    setattr(layer, SETTING, (out, into, contiguous, dimensions(layer)))
    layer.__class__ = PADDED[type(layer)]


def switch_off(layer: nn.Module) -> None:
    """Makes it a plain layer again; one whose class someone has changed since keeps that class, and computes plainly."""
    if type(layer) in PLAIN:
        layer.__class__ = PLAIN[type(layer)]
        delattr(layer, SETTING)
    elif hasattr(layer, SETTING):
        setattr(layer, SETTING, None)


def _sizes(layer: Any, weight: torch.Tensor) -> tuple[int, int]:
    a, b = weight.shape[:2]
    return (b, a) if getattr(layer, "transposed", False) else (a, b)


def _more(layer: Any, weight: torch.Tensor) -> tuple[int, int, bool] | None:
    """Returns by how much output and input grow; None where it computes as it is: the weight may be another one by now."""
    setting = getattr(layer, SETTING)
    if setting is None or _sizes(layer, weight) != setting[3]:
        return None
    out, into, contiguous, (had_out, had_in) = setting
    return out - had_out, into - had_in, contiguous


def _cast(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor in the dtype that autocast gives to products: cast first, fewer bytes are padded."""
    kind = tensor.device.type
    if not tensor.is_floating_point() or tensor.dtype == torch.float64 or kind == "meta":
        return tensor  # as autocast leaves them
    if not torch.is_autocast_enabled(kind):
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))


def _cut(result: torch.Tensor, dim: int, size: int, contiguous: bool) -> torch.Tensor:
    """Returns the result without what was added: a copy, or a view with gaps.

    Of channels that lie innermost a copy has them there too: the layout is the one that the convolution chose.
    """
    more = result.shape[dim] - size
    if more == 0:
        return result
    # The gradient of a piece of a split is joined with zeros in one pass; that of a slice takes two. The rest and the
    # whole are nobody's from here on, so that this one may be written in place, which a piece of a plain split may not.
    piece = torch.unsafe_split(result, size, dim)[0]
    if not contiguous:
        return piece
    last = _LAST.get(result.dim())
    innermost = last is not None and result.is_contiguous(memory_format=last)
    layout = last if last is not None and innermost else torch.contiguous_format
    return piece.clone(memory_format=layout)


def _parameters(
    weight: torch.Tensor, bias: torch.Tensor | None, more_out: int, more_in: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns weight and bias with zeros behind."""
    longer = _longer(_longer(_cast(weight), 1, more_in), 0, more_out)
    return longer, None if bias is None else _longer(_cast(bias), 0, more_out)


def _longer(tensor: torch.Tensor, dim: int, more: int) -> torch.Tensor:
    """Returns the tensor with this many zeros behind in one dimension. One of a wrong size stays of a wrong size."""
    if more == 0:
        return tensor
    return F.pad(tensor, (0, 0) * (-1 - dim if dim < 0 else tensor.dim() - 1 - dim) + (0, more))
