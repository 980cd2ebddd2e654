"""Graphs: compiled models and regions, folded evaluation graphs, and whole steps captured once and replayed.

from flopwise.kit.graph import CapturedStep, compile_in_place

compile_in_place(model)                                 # compiled on the first call in training
step = CapturedStep(train_step, model, optimizer)       # captured once it is shown to be the same
"""

from flopwise.kit.compiler import break_even_steps
from flopwise.kit.graph.buckets import Buckets, suggest_buckets
from flopwise.kit.graph.captured import CapturedStep
from flopwise.kit.graph.compilation import Compiled, compile_in_place, compile_regions
from flopwise.kit.graph.compile_report import CompileReport
from flopwise.kit.graph.folding import Folded, FoldReport, fold
from flopwise.kit.graph.fusion import FusedKernel, FusionReport, fusion_report
from flopwise.kit.graph.optimizer_forms import OptimizerForm, fastest_optimizer_form
from flopwise.kit.graph.regions import silent_compiles
from flopwise.kit.graph.shapes import StepReport

__all__ = [
    "Buckets",
    "CapturedStep",
    "CompileReport",
    "Compiled",
    "FoldReport",
    "Folded",
    "FusedKernel",
    "FusionReport",
    "OptimizerForm",
    "StepReport",
    "break_even_steps",
    "compile_in_place",
    "compile_regions",
    "fastest_optimizer_form",
    "fold",
    "fusion_report",
    "silent_compiles",
    "suggest_buckets",
]
