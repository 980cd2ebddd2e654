"""16-bit weights whose float32 master copies are what the optimizer steps and what checkpoints hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from flopwise.errors import PrecisionError
from flopwise.kit.precision.arguments import dtype_name, module_of, names_of, optimizer_of
from flopwise.kit.precision.weight_memory import PRODUCTS, WeightMemory, weight_memory

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
#: On a 16-bit weight: its master.
_MASTER = "_flopwise_master"


def master_of(parameter: torch.Tensor) -> nn.Parameter | None:
    """Returns the float32 master copy of a 16-bit weight, None if it has none."""
    link = getattr(parameter, _MASTER, None)
    return link.master if isinstance(link, _Link) else None


class _Link:
    """Leads from a weight to its master; a pickled weight has none, since no optimizer would step it."""

    def __init__(self, master: nn.Parameter) -> None:
        self.master = master

    def __reduce__(self) -> Any:
        return _no_link, ()


def _no_link() -> None:
    return None


@dataclass(frozen=True)
class Pair:
    """A weight and its master."""

    name: str
    weight: nn.Parameter
    master: nn.Parameter


class _LetGo:
    """Before a forward, lets gradients go that were zeroed on one side: the other side would hold them through backward.

    A copied or pickled model has no masters, and gets one that does nothing.
    """

    def __init__(self, pairs: Iterable[Pair]) -> None:
        self._pairs = list(pairs)

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        for pair in self._pairs:
            if pair.master.grad is None:
                pair.weight.grad = None
            elif pair.weight.grad is None:
                pair.master.grad = None

    def __reduce__(self) -> Any:
        return _LetGo, ((),)


class MasterWeights:
    """Keeps the weights of products in 16 bits and steps float32 master copies of them, until `undo`.

    ```
    MasterWeights(model, optimizer)              # then train as before
    mixed = MixedPrecision(model, "bfloat16")
    ```

    What is computed is what autocast computes from float32 weights, to the bit: the weights are cast once after each step
    instead of in each forward. Gradients are float32 and summed in float32; `weight.grad` and the master's are one tensor,
    so clipping by either name and GradScaler work. State dicts of the model are float32 in both directions.

    Args:
        model: float32, not yet wrapped by DistributedDataParallel or sharded.
        optimizers: one or several; their parameters are replaced by masters, with their state.
        dtype: "bfloat16" or "float16" (needs a `DynamicScaler`).
        keep_float32: names of submodules or parameters that stay float32.
        also: names of submodules or parameters that become 16-bit besides linear, convolution and attention layers:
            embeddings, whose outputs are then rounded, too.

    Weights that an embedding or another layer shares stay float32, with the tie; `kept` says why for each.

    Raises:
        PrecisionError: the model is wrapped, sharded or not float32, there is no such dtype or name, or nothing to convert.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
        dtype: str | torch.dtype = "bfloat16",
        *,
        keep_float32: str | Iterable[str] = (),
        also: str | Iterable[str] = (),
    ) -> None:
        module_of("MasterWeights", model)
        self.optimizers = _several(optimizers)
        self.model, self.dtype = model, str(dtype_name(dtype))
        _check(model, self.dtype)
        self.kept: dict[str, str] = {}
        self.before: WeightMemory = weight_memory(model, self.optimizers)
        chosen = self._chosen(
            _named(model, names_of("keep_float32", keep_float32)),
            _named(model, names_of("also", also)),
        )
        if not chosen:
            raise PrecisionError(
                "MasterWeights: no weight can be 16-bit. "
                + "; ".join(f"{name}: {why}" for name, why in list(self.kept.items())[:3])
            )
        self.pairs = [_halve(name, weight, _DTYPES[self.dtype]) for name, weight in chosen.items()]
        self._handles: list[Any] = [
            model.register_forward_pre_hook(_not_in_ddp),
            model.register_forward_pre_hook(_LetGo(self.pairs)),
        ]
        for pair in self.pairs:
            self._handles += _aliased_gradients(pair)
        for optimizer in self.optimizers:
            _replace(optimizer, {id(pair.weight): pair.master for pair in self.pairs})
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(optimizer.register_step_post_hook(self._after_step))
        for module in model.modules():
            if any(master_of(p) is not None for p in module.parameters(recurse=False)):
                self._handles.append(module.register_state_dict_post_hook(_masters_out))
                self._handles.append(module.register_load_state_dict_pre_hook(_masters_in))

    def undo(self) -> None:
        """Makes the weights float32 again, with the masters' values, and steps them directly."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for optimizer in self.optimizers:
            _replace(optimizer, {id(pair.master): pair.weight for pair in self.pairs})
        for pair in self.pairs:
            gradient, pair.weight.grad, pair.master.grad = pair.weight.grad, None, None
            pair.weight.data = pair.master.data
            pair.weight.grad_dtype = torch.float32
            pair.weight.grad = gradient
            delattr(pair.weight, _MASTER)
        self.pairs = []

    def memory(self) -> WeightMemory:
        """Returns what weights, masters, gradients and optimizer state occupy now; `before` has it as it was found."""
        return weight_memory(self.model, self.optimizers, [pair.master for pair in self.pairs])

    def __str__(self) -> str:
        lines = [
            f"{len(self.pairs)} weights in {self.dtype} with float32 masters",
            str(self.memory()),
        ]
        lines += [f"float32: {name}, because {why}" for name, why in self.kept.items()]
        return "\n  ".join(lines)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _chosen(self, keep: set[int], also: set[int]) -> dict[str, nn.Parameter]:
        """Returns the weights that become 16-bit, and says of the others why not."""
        stepped = {id(p) for o in self.optimizers for g in o.param_groups for p in g["params"]}
        owners: dict[int, list[nn.Module]] = {}
        for module in self.model.modules():
            for parameter in module.parameters(recurse=False):
                owners.setdefault(id(parameter), []).append(module)
        chosen = {}
        for name, parameter in self.model.named_parameters():
            others = {
                type(m).__name__ for m in owners[id(parameter)] if not isinstance(m, PRODUCTS)
            }
            why = None
            if id(parameter) in keep:
                why = "asked to be kept"
            elif id(parameter) not in stepped:
                why = "no optimizer steps it"
            elif others and id(parameter) not in also:
                why = f"{', '.join(sorted(others))} computes with it in float32"
            if why is None:
                chosen[name] = parameter
            else:
                self.kept[name] = why
        return chosen

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Drops gradients that were zeroed on one side only; refuses those that were replaced on one side."""
        for pair in self.pairs:
            of_weight, of_master = pair.weight.grad, pair.master.grad
            if of_weight is of_master:
                continue
            if of_weight is not None and of_master is not None:
                raise PrecisionError(
                    f"the gradient of {pair.name} was replaced by another tensor: the float32 master does not see it. "
                    "Change gradients in place (grad.mul_(...), clip_grad_norm_)."
                )
            pair.weight.grad = pair.master.grad = None

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        pairs = [pair for pair in self.pairs if id(pair.master) in stepped]
        if pairs:
            torch._foreach_copy_([p.weight for p in pairs], [p.master for p in pairs])


def _several(optimizers: Any) -> list[torch.optim.Optimizer]:
    several = isinstance(optimizers, Iterable) and not isinstance(optimizers, nn.Module)
    found = list(optimizers) if several else [optimizers]
    for optimizer in found:
        optimizer_of("MasterWeights", optimizer)
    return found


def _check(model: nn.Module, dtype: str) -> None:
    if dtype not in _DTYPES:
        raise PrecisionError(f"dtype={dtype!r}: it is one of {', '.join(_DTYPES)}")
    if not hasattr(torch.Tensor, "grad_dtype"):
        raise PrecisionError(
            f"MasterWeights needs Tensor.grad_dtype, which torch {torch.__version__} has not: update torch"
        )
    if isinstance(model, (DistributedDataParallel, DataParallel)):
        raise PrecisionError(_WRAPPED.format(kind=type(model).__name__))
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise PrecisionError(f"{name} is not made yet: call the model once, then MasterWeights")
        if hasattr(parameter, "to_local"):
            raise PrecisionError(
                f"{name} is sharded: FSDP keeps float32 shards itself (MixedPrecisionPolicy(param_dtype=torch.{dtype}))"
            )
        if master_of(parameter) is not None:
            raise PrecisionError(f"{name} has a master already")
        if parameter.is_floating_point() and parameter.dtype is not torch.float32:
            raise PrecisionError(
                f"{name} is {str(parameter.dtype).removeprefix('torch.')}: what it has lost against float32 cannot be had "
                "back. Make the model float32 (before loading its checkpoint), then MasterWeights."
            )


_WRAPPED = (
    "MasterWeights does not work under {kind}, whose buckets would need gradients of 16 bits. Use MixedPrecision alone "
    "(float32 weights under autocast), or FSDP with a MixedPrecisionPolicy."
)


def _named(model: nn.Module, names: Iterable[str]) -> set[int]:
    """Returns the identities of the parameters that submodules or parameters of these names have."""
    found: set[int] = set()
    parameters, modules = (
        dict(model.named_parameters(remove_duplicate=False)),
        dict(model.named_modules()),
    )
    for name in names:
        if name in parameters:
            found.add(id(parameters[name]))
        elif name in modules:
            found.update(map(id, modules[name].parameters()))
        else:
            raise PrecisionError(f"MasterWeights: the model has no submodule or parameter {name!r}")
    return found


def _halve(name: str, weight: nn.Parameter, dtype: torch.dtype) -> Pair:
    """Makes a weight 16-bit in place; its master takes over the float32 storage."""
    gradient, weight.grad = weight.grad, None
    master = nn.Parameter(weight.data)
    weight.data = weight.data.to(dtype)
    weight.grad_dtype = torch.float32
    weight.grad = master.grad = gradient
    setattr(weight, _MASTER, _Link(master))
    return Pair(name, weight, master)


def _aliased_gradients(pair: Pair) -> Iterator[Any]:
    """Keeps the weight's and the master's gradient one tensor; yields the hooks' handles."""
    weight, master = pair.weight, pair.master

    def before(gradient: torch.Tensor) -> None:
        if master.grad is None:  # zeroed through the optimizer
            weight.grad = None

    def after(parameter: torch.Tensor) -> None:
        master.grad = parameter.grad

    yield weight.register_hook(before)
    yield weight.register_post_accumulate_grad_hook(after)


def _replace(optimizer: torch.optim.Optimizer, by: dict[int, nn.Parameter]) -> None:
    """Replaces parameters of the optimizer, by identity, and takes their state along."""
    for group in optimizer.param_groups:
        for i, old in enumerate(group["params"]):
            new = by.get(id(old))
            if new is not None:
                group["params"][i] = new
                if old in optimizer.state:
                    optimizer.state[new] = optimizer.state.pop(old)


def _masters_out(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Puts masters into a state dict in place of their weights."""
    for name, parameter in module._parameters.items():
        master = None if parameter is None else master_of(parameter)
        if master is not None and prefix + name in state:
            state[prefix + name] = master if state[prefix + name].requires_grad else master.detach()


def _masters_in(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, *rest: Any
) -> None:
    """Copies what is being loaded into the masters; the weights are loaded, and rounded, by the module itself."""
    if metadata.get("assign_to_params_buffers", False):
        raise PrecisionError(
            "load_state_dict(assign=True) would replace weights that have masters: load without assign"
        )
    for name, parameter in module._parameters.items():
        master = None if parameter is None else master_of(parameter)
        value = state.get(prefix + name)
        if master is not None and isinstance(value, torch.Tensor) and value.shape == master.shape:
            with torch.no_grad():
                master.copy_(value)


def _not_in_ddp(module: nn.Module, args: Any) -> None:
    if DistributedDataParallel._active_ddp_module is not None:
        raise PrecisionError(_WRAPPED.format(kind="DistributedDataParallel"))
