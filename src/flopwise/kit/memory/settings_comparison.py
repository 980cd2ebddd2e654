"""What allocator settings came to, and which of them is kept."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from flopwise.errors import FlopwiseError
from flopwise.kit.memory.allocator_counters import AllocatorState
from flopwise.kit.memory.interleaved import Ratio
from flopwise.units import duration

DEFAULT = "as it is"


class SettingsError(FlopwiseError):
    """Allocator settings could not be measured."""


@dataclass(frozen=True)
class Run:
    """One fresh process under one setting."""

    step_s: float  # mean of the timed steps; of a command: all of it
    state: AllocatorState | None  # at its end; None without CUDA
    loss: float | None = None  # of the last step, if it returns one


@dataclass
class SettingsComparison:
    """What each setting came to."""

    runs: dict[str, list[Run]] = field(default_factory=dict)
    ratios: dict[str, Ratio] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # tried, and not to be had
    declined: dict[str, str] = field(default_factory=dict)  # not tried
    settings: dict[str, str] = field(default_factory=dict)

    def best(self) -> str:
        """Returns the setting to keep, the default where none is shown to be better.

        Where the training fails as it is: that of the others with the fewest failures and retries, then the fastest. Else
        one that is shown to be faster without more of them; or that has none while the default has, and is not shown to
        be slower.
        """
        if DEFAULT not in self.runs:
            return min(self.runs, key=lambda name: (self.trouble(name), self.step_s(name)))
        before = self.trouble(DEFAULT)
        better = {
            name: ratio.ratio
            for name, ratio in self.ratios.items()
            if (ratio.faster and self.trouble(name) <= before)
            or (ratio.low <= 1 and before and not self.trouble(name))
        }
        return min(better, key=lambda name: better[name], default=DEFAULT)

    def trouble(self, name: str) -> int:
        """Returns retries and failures of a setting's runs."""
        states = [run.state for run in self.runs[name] if run.state is not None]
        return sum(state.retries + state.out_of_memory for state in states)

    def step_s(self, name: str) -> float:
        """Returns the median over a setting's processes of their step times."""
        return median(run.step_s for run in self.runs[name])

    def as_json(self) -> dict[str, Any]:
        """Returns everything that was measured, as plain data."""
        return {**asdict(self), "best": self.best()}

    def __str__(self) -> str:
        """Returns one line a setting, and which is kept."""
        lines = [self._line(name) for name in self.runs]
        lines += [f"{name}: failed: {why}" for name, why in self.failed.items()]
        lines += [f"{name}: not tried: {why}" for name, why in self.declined.items()]
        best = self.best()
        value = self.settings.get(best)
        return "\n".join([*lines, f"to keep: {best}" + (f" ({value})" if value else "")])

    def _line(self, name: str) -> str:
        text = f"{name}: {duration(self.step_s(name))}"
        states = [run.state for run in self.runs[name] if run.state is not None]
        if states:
            text += (
                f", peak {max(s.peak_allocated_bytes for s in states) / 2**30:.2f} GiB allocated, "
                f"{max(s.peak_reserved_bytes for s in states) / 2**30:.2f} GiB reserved, "
                f"{max(s.fragmentation_frac for s in states):.1%} fragmented at the end, "
                f"{sum(s.retries for s in states)} retries in {len(states)} runs"
            )
        return text + (f"; {self.ratios[name]}" if name in self.ratios else "")
