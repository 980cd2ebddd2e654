"""Outputs in the shape that the script knows, made when it reads them.

Most scripts read the loss and nothing else. An output whose other tensors have the shape of a shortened batch gets, for as
long as nobody reads them, a class that restores them on reading. `isinstance`, names and keys are as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

Restore = Callable[[torch.Tensor], torch.Tensor]

_TODO = "_flopwise_todo"
#: Methods that show values.
_READING = (
    "__copy__", "__deepcopy__", "__eq__", "__ne__", "__or__", "__reduce__", "__reduce_ex__", "__repr__",
    "__ror__", "__setitem__", "copy", "get", "items", "move_to_end", "to_tuple", "values",
)  # fmt: skip


class Shape:
    """How outputs of a shortened call are told, and restored."""

    def __init__(self, rows: int, width: int, restore: Restore) -> None:
        self._rows, self._width, self._restore = rows, width, restore

    def concerns(self, tree: Any) -> bool:
        """Whether there is a tensor by position in an output."""
        if isinstance(tree, torch.Tensor):
            return tree.dim() >= 2 and tuple(tree.shape[:2]) == (self._rows, self._width)
        return isinstance(tree, (tuple, list)) and any(self.concerns(t) for t in tree)

    def problem(self, tree: Any, least: int = 1) -> str | None:
        """Returns the shape of a tensor that cannot be restored, or None. It must not have `least` dimensions or more
        unless it is by position."""
        if isinstance(tree, torch.Tensor):
            other = tree.numel() > 1 and tree.dim() >= least
            return str(tuple(tree.shape)) if other and not self.concerns(tree) else None
        if isinstance(tree, (tuple, list)):
            return next((p for t in tree if (p := self.problem(t, least))), None)
        return None

    def restored(self, tree: Any) -> Any:
        """Returns an output in the shape that the script knows."""
        if isinstance(tree, torch.Tensor):
            return self._restore(tree) if self.concerns(tree) else tree
        if isinstance(tree, (tuple, list)) and self.concerns(tree):
            parts = [self.restored(t) for t in tree]
            return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
        return tree


class Restoring:
    """Gives outputs back; one class for each class of outputs is kept."""

    def __init__(self) -> None:
        self._kinds: dict[Any, type] = {}

    def back(self, outputs: Any, shape: Shape) -> Any:
        """Returns the outputs as the script knows them; a mapping is changed in place and restores when it is read."""
        if not isinstance(outputs, Mapping):
            return shape.restored(outputs)
        names = tuple(name for name, value in outputs.items() if shape.concerns(value))
        if not names:
            return outputs
        kind: Any = type(outputs)
        if kind is dict:
            return {name: shape.restored(value) for name, value in outputs.items()}
        key = (kind, names)
        if key not in self._kinds:
            self._kinds[key] = _restoring(kind, names)
        vars(outputs)[_TODO] = shape
        object.__setattr__(outputs, "__class__", self._kinds[key])
        return outputs


class Later(Shape):
    """How outputs are made that were not computed: by the name that stands in their place, when they are read."""

    def __init__(self, make: Callable[[str], Any]) -> None:
        super().__init__(0, 0, lambda tensor: tensor)
        self._make = make

    def concerns(self, tree: Any) -> bool:
        """Whether a name stands in the place of an output."""
        return isinstance(tree, _Name)

    def restored(self, tree: Any) -> Any:
        """Returns the output that a name stands for."""
        return self._make(str(tree)) if isinstance(tree, _Name) else tree


class _Name(str):
    __slots__ = ()


def plain_kind(outputs: Any) -> Any:
    """Returns the class that outputs have once everything was restored."""
    kind = type(outputs)
    return kind.__bases__[1] if _TODO in vars(outputs) else kind


def named(kind: Any, known: Mapping[str, Any], others: Iterable[str]) -> Any:
    """Returns outputs of a class that hold what is known, and the names of the others in their place."""
    made = kind(**known)
    for name in others:
        made[name] = _Name(name)
    return made


class _Unregistered:
    """Keeps a class of outputs from telling torch's trees of its subclasses, as those of transformers do."""

    def __init_subclass__(cls) -> None:
        return None


def _restoring(kind: Any, names: tuple[str, ...]) -> type:
    """Returns a subclass that becomes its base, with everything restored, once one of these names is read."""

    def settle(outputs: Any) -> None:
        shape = vars(outputs).pop(_TODO)
        object.__setattr__(outputs, "__class__", kind)
        for name in names:
            outputs[name] = shape.restored(kind.__getitem__(outputs, name))

    def through(name: str) -> Any:
        def method(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            settle(outputs)
            return getattr(outputs, name)(*args, **kwargs)

        return method

    def item(outputs: Any, key: Any) -> Any:
        name = list(outputs)[key] if isinstance(key, int) else key
        if isinstance(name, str) and name not in names:
            return dict.__getitem__(outputs, name)
        settle(outputs)
        return outputs[key]

    def attribute(name: str) -> Any:
        def read(outputs: Any) -> Any:
            settle(outputs)
            return getattr(outputs, name)

        def write(outputs: Any, value: Any) -> None:
            settle(outputs)
            setattr(outputs, name, value)

        return property(read, write)

    body: dict[str, Any] = {n: through(n) for n in _READING if hasattr(kind, n)}
    body.pop("__getitem__", None)
    body.update({"__getitem__": item, "__module__": kind.__module__, "__hash__": None})
    body.update({name: attribute(name) for name in names})
    return type(kind.__name__, (_Unregistered, kind), body)


def zeros_behind(width: int) -> Restore:
    """Returns what fills cropped columns up to this width with zeros."""

    def restore(tensor: torch.Tensor) -> torch.Tensor:
        rest = tensor.new_zeros((tensor.shape[0], width - tensor.shape[1], *tensor.shape[2:]))
        return torch.cat([tensor, rest], dim=1)

    return restore


def scattered(places: torch.Tensor, rows: int, width: int) -> Restore:
    """Returns what puts the tokens of a packed row back to their places in a batch; all others are zeros."""

    def restore(tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.new_zeros((rows * width, *tensor.shape[2:]))
        flat = flat.index_copy(0, places, tensor[0, : places.shape[0]])
        return flat.view(rows, width, *tensor.shape[2:])

    return restore
