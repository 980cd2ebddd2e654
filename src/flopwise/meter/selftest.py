"""Is every private hook that the meter leans on there, and does it fire? Asked once, at attach, in microseconds.

A new torch that changed one of them is met with a message instead of a wrong number.
"""

from __future__ import annotations

import torch
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter


def missing_hooks() -> list[str]:
    """Returns what is not as the meter needs it, in words; empty if all is well."""
    problems = []
    if not _optimizer_hooks_fire():
        problems.append("the global optimizer step hooks do not fire")
    names = torch.Tensor.backward.__code__.co_names
    if "backward" not in names or "autograd" not in names or not callable(torch.autograd.backward):
        problems.append("Tensor.backward no longer goes through torch.autograd.backward")
    if "__next__" not in vars(_BaseDataLoaderIter):
        problems.append("DataLoader iterators have no common __next__")
    if "__iter__" not in vars(DataLoader):
        problems.append("DataLoader has no __iter__ of its own")
    if "step" not in vars(torch.amp.GradScaler):
        problems.append("torch.amp.GradScaler has no step")
    if not hasattr(torch._C, "_current_graph_task_id"):
        problems.append("torch._C._current_graph_task_id is gone")
    return problems


def _optimizer_hooks_fire() -> bool:
    """Runs a step that does nothing through torch's own wrapper and looks whether both hooks are called.

    Built without Optimizer.__init__, which would import Dynamo into processes that never train.
    """

    class Probe(torch.optim.Optimizer):
        def __init__(self) -> None:
            pass

    probe = Probe()
    fired = []
    try:
        probe._optimizer_step_pre_hooks = {}
        probe._optimizer_step_post_hooks = {}
        before = torch_optimizer.register_optimizer_step_pre_hook(
            lambda optimizer, args, kwargs: fired.append("pre") if optimizer is probe else None
        )
        after = torch_optimizer.register_optimizer_step_post_hook(
            lambda optimizer, args, kwargs: fired.append("post") if optimizer is probe else None
        )
        try:
            torch.optim.Optimizer.profile_hook_step(lambda self: None)(probe)
        finally:
            before.remove()
            after.remove()
    except Exception:
        return False
    return fired == ["pre", "post"]
