"""Mixed precision around one module: its forward in a narrower dtype, its outputs and the loss in float32."""

from __future__ import annotations

import math
from collections.abc import Iterable
from types import TracebackType
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from flopwise.errors import PrecisionError
from flopwise.kit.nested import map_tensors, tensors_in
from flopwise.kit.precision import arguments, float8
from flopwise.kit.precision.arguments import dtype_name, module_of, names_of
from flopwise.kit.precision.casting import Call, Wrapped, WrappedForward, in_float32
from flopwise.kit.precision.custom_functions import any_defined, functions_reason, traced_to_modules
from flopwise.kit.precision.declining import (
    AUTOCAST,
    cpu_note,
    cuda_problem,
    device_of,
    weights_problem,
)
from flopwise.kit.precision.difference import Difference, difference
from flopwise.kit.precision.masks import constants_beyond_float16
from flopwise.kit.precision.master_weights import master_of
from flopwise.kit.precision.replaying import Before
from flopwise.kit.precision.saying import Once
from flopwise.kit.precision.tf32 import Flags, in_backward_of, tf32

DTYPES = (*AUTOCAST, "tf32", "float8")


class MixedPrecision:
    """Runs a module in a narrower dtype until `undo`; weights, their gradients and the outputs stay float32.

    ```
    mixed = MixedPrecision(model, "bfloat16")
    print(mixed)                                 # what stayed in float32, and why
    ```

    Args:
        module: the root module; compiled modules and DistributedDataParallel, too. With "tf32" compile before, not after.
        dtype: "bfloat16" or "float16" (autocast; float16 needs a `DynamicScaler`), "tf32" (products of float32 in this
            module's forward and backward only), "float8" (torchao for large linear layers, bfloat16 for the rest).
        keep_float32: names of submodules that stay in float32; not with "tf32".
        training_only: leaves calls under `no_grad` as they were.

    Where the dtype cannot be used, `declined` says why, it is warned once and the module stays as it was. If this process
    has autograd Functions without an autocast policy, the first call with gradients looks which modules use them; those
    stay in float32, and that call is made once more.

    Raises:
        PrecisionError: it is around the module already; no such dtype, no such submodule, or `keep_float32` with "tf32".
    """

    def __init__(
        self,
        module: nn.Module,
        dtype: str | torch.dtype = "bfloat16",
        *,
        keep_float32: str | Iterable[str] = (),
        training_only: bool = False,
    ) -> None:
        module_of("MixedPrecision", module)
        dtype = dtype_name(dtype)
        if dtype not in DTYPES:
            raise PrecisionError(f"dtype={dtype!r}: it is one of {', '.join(DTYPES)}")
        other = _AROUND.get(id(module))
        if other is not None and other.active:
            raise PrecisionError(
                f"MixedPrecision is around this {type(module).__name__} already, in {other.dtype}: undo() that first"
            )
        self.module, self.training_only = module, training_only
        self.dtype: str = dtype
        self.device = device_of(module)
        self.notes: list[str] = []
        self.kept: dict[str, str] = {}
        keep = names_of("keep_float32", keep_float32)
        self._names = {id(m): n for n, m in module.named_modules()}
        self._once = Once()
        self._wrapped: list[Wrapped | WrappedForward] = []
        self._root: Wrapped | None = None
        self._inner: WrappedForward | None = None
        self._off = False  # while the module runs as it was found
        self._converted: float8.Conversion | None = None
        self._looked = dtype == "tf32"
        self._defined = any_defined()
        self.declined = self._problem()
        submodules = [self._submodule(name) for name in keep]
        keep = [self._names.get(id(m), n) for m, n in zip(submodules, keep, strict=True)]
        if keep and dtype == "tf32":
            raise PrecisionError(
                "keep_float32: TF32 is switched for all of a module. Put MixedPrecision around those submodules that are to "
                "compute in it"
            )
        if self.declined is not None:
            self._once.say(
                "declined", f"{dtype} is not used: {self.declined}. The module runs as before."
            )
            return
        self._prepare(keep)
        for name, submodule in zip(keep, submodules, strict=True):
            self._keep(submodule, name, "asked to be kept")
        self._root = Wrapped(module, self._around)
        _AROUND[id(module)] = self
        if dtype != "tf32" and not _wraps(module):
            self._inner = WrappedForward(module, self._unless_around)

    def verify(self, *args: Any, tolerance: float, **kwargs: Any) -> Difference:
        """Returns how far outputs and gradients of a batch are from float32; takes the dtype back if too far.

        The module is run twice on the batch in evaluation mode, forward and backward, and left as it was. What is beyond
        the tolerance (relative, in the 2-norm), or not finite, is a reason to decline: `declined` has it, and it is said.

        Raises:
            PrecisionError: the dtype is not in use, or the tolerance is not a number above 0.
        """
        arguments.between("verify: tolerance", tolerance, 0.0, math.inf, "above 0, and finite")
        if self._root is None or not self.active:
            raise PrecisionError(
                f"verify: {self.dtype} is not in use, {self.declined or 'it was undone or replaced'}"
            )
        found = difference(self.module, self._plain, self.module, args, kwargs)
        if self.active and not found.largest <= tolerance:
            self.declined = f"it moves results by {found}, and {tolerance:g} is allowed"
            self._once.say(
                "moved", f"{self.dtype} is taken back: {self.declined}. The module runs as before."
            )
            self.undo()
        return found

    def undo(self) -> None:
        """Leaves the module and its submodules as they were."""
        wrapped = [w for w in (*self._wrapped, self._inner, self._root) if w is not None]
        taken = [one for one in reversed(wrapped) if one.take_back()]
        done = {id(one.module) for one in taken if isinstance(one, WrappedForward)}
        # A call that was compiled since calls the forward, so its own part is gone with that.
        for one in wrapped:
            if one not in taken and id(one.module) not in done:
                self._once.say(
                    "replaced",
                    f"the call of {type(one.module).__name__} was replaced after MixedPrecision was put around it: what is "
                    "there now was left.",
                )
        self._wrapped, self._root, self._inner = [], None, None
        if self._converted is not None:
            self._converted.undo(self.module)
            self._converted = None

    @property
    def active(self) -> bool:
        """Whether calls of the module go through this now."""
        return any(one is not None and one.active for one in (self._root, self._inner))

    def __enter__(self) -> MixedPrecision:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.undo()

    def __str__(self) -> str:
        head = f"{self.dtype} around {type(self.module).__name__}"
        if self.declined is not None:
            return f"{head}: not used, {self.declined}"
        lines = [head + ("" if self.active else " (not active)"), *self.notes]
        lines += [
            f"in float32: {name or 'the whole model'}, because {why}"
            for name, why in self.kept.items()
        ]
        if self._converted is not None:
            lines += [
                f"not float8: {name}, because {why}" for name, why in self._converted.left.items()
            ]
        return "\n  ".join(lines)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _problem(self) -> str | None:
        """Returns why the dtype cannot be used, None if it can."""
        if self.device.type not in ("cuda", "cpu"):
            return f"not tested on devices of type {self.device.type}"
        if (reason := weights_problem(self.module, self.dtype)) is not None:
            return reason
        if self.dtype == "float8":
            return float8.unavailable(self.device)
        if self.device.type == "cuda":
            return cuda_problem(self.device, self.dtype)
        if self.dtype == "tf32":
            return "TF32 is a format of CUDA tensor cores; the model is on a CPU"
        return None

    def _prepare(self, keep: list[str]) -> None:
        if self.device.type == "cpu" and self.dtype in AUTOCAST:
            note = cpu_note(self.dtype)
            if note is not None:
                self.notes.append(note)
        if self.dtype == "tf32":
            conflict = Flags.read().conflict()
            if conflict is not None:
                self.notes.append(f"{conflict}; only the new ones are set")
        if self.dtype == "float16":
            for constant in constants_beyond_float16(self.module):
                self.notes.append(str(constant))
                self._once.say(f"mask {constant.line} {constant.module}", str(constant))
        if self.dtype == "float8":
            self._converted = float8.convert(self.module, keep)
            if not self._converted.originals:
                self.notes.append("no linear layer suits float8: all runs in bfloat16")

    def _plain(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module as it was found: with its own layers, too, where they were converted."""
        assert self._root is not None
        if self._converted is None:
            return self._as_found(self._root.plain)(*args, **kwargs)
        self._converted.undo(self.module)
        try:
            return self._as_found(self._root.plain)(*args, **kwargs)
        finally:
            self._converted.redo(self.module)

    def _as_found(self, call: Call) -> Call:
        """Returns a call without the dtype."""

        def found(*args: Any, **kwargs: Any) -> Any:
            self._off = True
            try:
                return call(*args, **kwargs)
            finally:
                self._off = False

        return found

    def _unless_around(self, call: Call) -> Call:
        """Returns the forward under autocast, where nothing is around it: in a call that torch.compile traced or replaced."""
        device, inside = self.device.type, self._with_autocast(call)

        def forward(*args: Any, **kwargs: Any) -> Any:
            left = self.training_only and not torch.is_grad_enabled()
            around = self._off or left or torch.is_autocast_enabled(device)
            return (call if around else inside)(*args, **kwargs)

        return forward

    def _submodule(self, name: str) -> nn.Module:
        inner = self.module
        while True:  # by its name in the model, too, where that is wrapped
            try:
                return inner.get_submodule(name)
            except AttributeError:
                wrapped = getattr(inner, "_orig_mod", None) or getattr(inner, "module", None)
                if not _wraps(inner) or not isinstance(wrapped, nn.Module):
                    raise PrecisionError(
                        f"keep_float32: the module has no submodule {name!r}"
                    ) from None
                inner = wrapped

    def _keep(self, module: nn.Module, name: str, why: str) -> None:
        self.kept[name] = why
        # Its hooks are in float32, too, where they run eagerly.
        self._wrapped += [
            WrappedForward(module, self._in_float32),
            Wrapped(module, self._in_float32),
        ]

    def _in_float32(self, call: Call) -> Call:
        device = self.device.type

        def without_autocast(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_autocast_enabled(device):
                return call(*args, **kwargs)
            with torch.autocast(device, enabled=False):
                return call(*map_tensors(args, in_float32), **map_tensors(kwargs, in_float32))

        return without_autocast

    def _around(self, call: Call) -> Call:
        inside = self._with_tf32(call) if self.dtype == "tf32" else self._with_autocast(call)

        def mixed(*args: Any, **kwargs: Any) -> Any:
            if self.training_only and not torch.is_grad_enabled():
                return call(*args, **kwargs)
            if not self._looked and torch.is_grad_enabled():
                if not torch.compiler.is_compiling():
                    return look(args, kwargs)
                if self._defined:  # what was defined since is not looked for in compiled code
                    return look_eagerly(args, kwargs)
            return inside(*args, **kwargs)

        def look(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self._looked = True
            if any_defined():
                return self._first_call(call, inside, args, kwargs)
            return inside(*args, **kwargs)

        look_eagerly = torch.compiler.disable(look, reason=_LOOKS) if self._defined else look

        return mixed

    def _with_autocast(self, call: Call) -> Call:
        device, dtype = self.device.type, AUTOCAST.get(self.dtype, torch.bfloat16)

        def under_autocast(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(device, dtype=dtype):
                outputs = call(*args, **kwargs)
            return map_tensors(outputs, in_float32)

        return under_autocast

    def _with_tf32(self, call: Call) -> Call:
        def under_tf32(*args: Any, **kwargs: Any) -> Any:
            with tf32():
                outputs = call(*args, **kwargs)
            in_backward_of(list(tensors_in(outputs)))
            return outputs

        return under_tf32

    def _first_call(
        self, call: Call, inside: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Makes the call and looks which modules use autograd Functions without a policy.

        If some do, they stay in float32 from now on and the call is made again, from the same buffers and random numbers.
        """
        before = Before(self.module)
        try:
            with traced_to_modules(self.module) as found, _eagerly():
                outputs = inside(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError):
            # Such a Function may refuse 16-bit inputs in its forward already; in float32 it shows itself.
            before.restore()
            with traced_to_modules(self.module) as found, _eagerly():
                self._as_found(call)(*args, **kwargs)
            if not found:
                raise
        if not found:
            return outputs
        before.restore()
        return (inside if self._without(found) else call)(*args, **kwargs)

    def _without(self, found: dict[nn.Module, tuple[str, ...]]) -> bool:
        """Keeps modules in float32; returns False if the dtype is taken back altogether.

        Raises:
            PrecisionError: their weights are 16-bit already.
        """
        named = {
            self._names.get(id(module), ""): (module, names) for module, names in found.items()
        }
        if any(master_of(p) is not None for p in self.module.parameters()):
            raise PrecisionError(
                f"{', '.join(named) or 'the model'}: {functions_reason(n for _, names in named.values() for n in names)}. "
                "Decorate them, or leave MasterWeights out: their modules are then kept in float32."
            )
        if "" in named:
            self.declined = functions_reason(named[""][1])
            self._once.say(
                "root",
                f"{self.dtype} is taken back: {self.declined}. They are called by the root module itself.",
            )
            self.undo()
            return False
        for name, (module, names) in named.items():
            why = f"its autograd Function {', '.join(names)} declares no autocast policy"
            self._keep(module, name, why)
            self._once.say(
                f"kept {name}",
                f"{name} ({type(module).__name__}) stays in float32: {why} (torch.amp.custom_fwd declares one).",
            )
        return True


#: Said where a first call may not break the graph.
_LOOKS = (
    "MixedPrecision looks at the first call for autograd Functions without an autocast policy: call the model once before "
    "it is compiled, or compile it before MixedPrecision"
)
#: What is around a module, by its identity: it lives as long as the module has its call.
_AROUND: WeakValueDictionary[int, MixedPrecision] = WeakValueDictionary()


def _wraps(module: nn.Module) -> bool:
    """Returns whether the module only calls another, whose forward is not its: compiled, or a copy for each device."""
    return isinstance(module, (DistributedDataParallel, DataParallel)) or hasattr(
        module, "_orig_mod"
    )


def _eagerly() -> Any:
    return torch.compiler.set_stance("force_eager")
