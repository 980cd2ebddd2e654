"""Precision: mixed dtypes that are seen to take effect, and a loss scaler that follows the gradients."""

from flopwise.kit.precision.effective import EffectiveDtypes, effective_dtypes
from flopwise.kit.precision.late import Review
from flopwise.kit.precision.mixed import MixedPrecision
from flopwise.kit.precision.nonfinite import NonFinite, find_nonfinite
from flopwise.kit.precision.scaler import DynamicScaler

__all__ = [
    "DynamicScaler",
    "EffectiveDtypes",
    "MixedPrecision",
    "NonFinite",
    "Review",
    "effective_dtypes",
    "find_nonfinite",
]
