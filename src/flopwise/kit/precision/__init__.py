"""Precision: mixed dtypes that are seen to take effect, and a loss scaler that follows the gradients."""

from flopwise.kit.precision.difference import Difference
from flopwise.kit.precision.effective import EffectiveDtypes, effective_dtypes
from flopwise.kit.precision.late import Review
from flopwise.kit.precision.master_weights import MasterWeights
from flopwise.kit.precision.mixed import MixedPrecision
from flopwise.kit.precision.nonfinite import NonFinite, find_nonfinite
from flopwise.kit.precision.scaler import DynamicScaler
from flopwise.kit.precision.step_check import StepCheck, check_step
from flopwise.kit.precision.weight_memory import WeightMemory, weight_memory

__all__ = [
    "Difference",
    "DynamicScaler",
    "EffectiveDtypes",
    "MasterWeights",
    "MixedPrecision",
    "NonFinite",
    "Review",
    "StepCheck",
    "WeightMemory",
    "check_step",
    "effective_dtypes",
    "find_nonfinite",
    "weight_memory",
]
