"""Adds up what the ops of one step cost, and holds it against torch's own counter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from flopwise.errors import AttachError
from flopwise.flops.call import Cost
from flopwise.flops.dtypes import Precision, executed, real_operations
from flopwise.flops.table import Rule
from flopwise.meter.count_clock import Sample, shares
from flopwise.meter.count_roles import BACKWARD, FORWARD, OPTIMIZER, REPEATED
from flopwise.records.rank import FlopCount
from flopwise.units import count, percent

_UNASKED = "computed {} of gradients that nobody asked for"
_UNNEEDED = {
    "attention": "fused attention computed {} in its backward pass that the model does not ask for (the scores again, "
    "gradients that nobody wants)",
    "recurrent": f"fused recurrent layers {_UNASKED} (of their first input, of the state before the first step)",
    "convolution": "convolutions computed {} of gradients or with operands known to be zero",
    "matmul": "products with operands known to be zero (forward-mode gradients) took {}",
}


@dataclass(frozen=True)
class Place:
    """Where and how an op ran."""

    role: str
    precision: Precision
    device: str


@dataclass
class Pending:
    """An op whose cost hangs on the contents of a tensor on the device: resolved after the step."""

    name: str
    resolve: Callable[
        [], tuple[Cost, str] | None
    ]  # its cost, and torch's name of the operand's dtype
    family: str
    place: Place
    sample: Sample


@dataclass
class Tally:
    """Sums over the ops of one step."""

    needed: Counter[str] = field(default_factory=Counter)
    needed_causal: Counter[str] = field(default_factory=Counter)
    executed: Counter[str] = field(default_factory=Counter)
    repeated: Counter[str] = field(default_factory=Counter)  # forwards that ran again, as needed
    by_op: Counter[str] = field(default_factory=Counter)
    by_role: Counter[str] = field(default_factory=Counter)
    unneeded: Counter[str] = field(
        default_factory=Counter
    )  # by family: what a kernel does beyond what the model asks for
    ours: Counter[str] = field(
        default_factory=Counter
    )  # executed FLOPs by op, to hold against torch's
    theirs: Counter[str] = field(default_factory=Counter)
    unknown_to_torch: set[str] = field(default_factory=set)
    samples: list[Sample] = field(default_factory=list)
    pending: list[Pending] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)
    devices: dict[str, set[str]] = field(default_factory=dict)  # that did FLOPs, by role
    # Devices whose forward pass had ops without a count.
    unknown_on: set[str] = field(default_factory=set)

    def add(self, name: str, rule_family: str, dtype: str, cost: Cost, place: Place) -> None:
        """Books the cost of one op under its executed dtype and its role."""
        runs_in = executed(dtype, rule_family, place.precision)
        if runs_in is None:
            return  # integers: operations, but not floating-point ones
        factor = real_operations(dtype, rule_family)
        self.executed[runs_in] += factor * cost.executed
        self.ours[name] += factor * cost.executed
        self.by_role[place.role] += factor * cost.executed
        if cost.executed:
            self.devices.setdefault(place.role, set()).add(place.device)
        if cost.note:
            self.notes[cost.note] += 1
        if place.role == REPEATED:
            self.repeated[runs_in] += factor * cost.needed_causal
        if place.role in (FORWARD, BACKWARD):
            self.needed[runs_in] += factor * cost.needed
            self.needed_causal[runs_in] += factor * cost.needed_causal
            self.by_op[name] += factor * cost.needed
            self.unneeded[rule_family] += factor * (cost.executed - cost.needed)

    def unknown(self, place: Place) -> None:
        """Notes where an op ran that could not be counted: a forward pass that is known to be incomplete."""
        if place.role == FORWARD:
            self.unknown_on.add(place.device)

    def resolve(self) -> None:
        """Books the ops that waited for the contents of a tensor."""
        for waiting in self.pending:
            found = waiting.resolve()
            if found is None:
                self.unknown(waiting.place)
                continue
            cost, dtype = found
            self.add(waiting.name, waiting.family, dtype, cost, waiting.place)
            waiting.sample.covered = True
        self.pending.clear()

    def count(self, shape: str, method: str) -> FlopCount:
        """Returns the record of the step.

        Raises:
            AttachError: several accelerators of this process did FLOPs: the peak of one is no measure for them.
        """
        self.resolve()
        used = sorted({d for role in self.devices.values() for d in role if d != "cpu"})
        if len(used) > 1:
            raise AttachError(
                f"one process computes on {len(used)} devices ({', '.join(used)}): MFU is of one device a process"
            )
        covered, missing, basis = shares(self.samples)
        optimizer = self.by_role[OPTIMIZER]
        extra = sum(self.executed.values()) - sum(self.needed.values()) - optimizer
        return FlopCount(
            shape=shape,
            method=method,
            needed=_positive(self.needed),
            needed_causal=_positive(self.needed_causal),
            executed=_positive(self.executed),
            recomputed=extra,
            repeated=_positive(self.repeated),
            coverage_frac=covered,
            coverage_basis=basis,
            uncovered=[f"{name} ({percent(share)})" for name, share in missing.items()],
            by_op={name: n for name, n in self.by_op.most_common() if n},
            cross_check=self._cross_check(),
            notes=[*self._explain(), *self.notes],
        )

    def _explain(self) -> list[str]:
        """Returns notes on the executed FLOPs that are not model FLOPs."""
        done = []
        repeated, optimizer = self.by_role[REPEATED], self.by_role[OPTIMIZER]
        if repeated:
            done.append(f"activation checkpointing repeated {count(repeated)}FLOP")
        for family, flops in self.unneeded.items():
            if flops:
                done.append(_UNNEEDED[family].format(f"{count(flops)}FLOP"))
        if optimizer:
            done.append(f"the optimizer itself did {count(optimizer)}FLOP of products")
        return [f"{what}: in HFU, not in MFU" for what in done]

    def _cross_check(self) -> str | None:
        """Returns one line: agreement with torch.utils.flop_counter, or each disagreement by name."""
        differences = []
        for name, ours in self.ours.most_common():
            theirs = self.theirs.get(name)
            if name in self.unknown_to_torch and ours:
                differences.append(f"it has no rule for {name} ({count(ours)}FLOP)")
            elif theirs is not None and theirs != ours:
                ratio = f"{theirs / ours:.3g}x" if ours else "not as 0"
                differences.append(f"it counts {name} {ratio}{_why(name)}")
        for name, theirs in self.theirs.most_common():
            if theirs and name not in self.ours:
                differences.append(
                    f"it counts {name} ({count(theirs)}FLOP), which has no rule here"
                )
        if differences:
            return "torch.utils.flop_counter differs: " + "; ".join(differences)
        total = sum(self.ours.values())
        return f"torch.utils.flop_counter agrees ({count(total)}FLOP executed)" if total else None


def merged(shape: str, method: str, counts: list[FlopCount]) -> FlopCount:
    """Returns the sum of several counts, say of the graphs and the eager rest of one step.

    The coverage is the lowest of them, as their bases may differ.
    """

    def total(field_name: str) -> dict[str, int]:
        sums: Counter[str] = Counter()
        for one in counts:
            part: Mapping[str, int] = getattr(one, field_name)
            sums.update(part)
        return _positive(sums)

    lowest = min(counts, key=lambda c: c.coverage_frac)
    checks = list(dict.fromkeys(c.cross_check for c in counts if c.cross_check))
    return FlopCount(
        shape=shape,
        method=method,
        needed=total("needed"),
        needed_causal=total("needed_causal"),
        executed=total("executed"),
        recomputed=sum(c.recomputed for c in counts),
        repeated=total("repeated"),
        coverage_frac=lowest.coverage_frac,
        coverage_basis=lowest.coverage_basis,
        uncovered=list(dict.fromkeys(name for c in counts for name in c.uncovered)),
        by_op=total("by_op"),
        cross_check="; ".join(checks) or None,
        notes=list(dict.fromkeys(note for c in counts for note in c.notes)),
    )


def rule_dtype(rule: Rule, args: Mapping[str, object]) -> str:
    """Returns torch's name of the dtype that the product runs in.

    Raises:
        LookupError: the operand is missing.
    """
    for name in rule.operand:
        dtype = getattr(args.get(name), "dtype", None)
        if dtype is not None:
            return str(dtype)
    raise LookupError(f"no operand {' or '.join(rule.operand)}")


def _positive(counts: Mapping[str, int]) -> dict[str, int]:
    return {key: n for key, n in counts.items() if n}


def _why(name: str) -> str:
    return (
        " (the weight gradient of a grouped convolution)" if "convolution_backward" in name else ""
    )
