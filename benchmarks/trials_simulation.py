"""How often trials are right, by simulation: python benchmarks/trials_simulation.py

Simulated step times go through the real `Schedule` and `PairedComparison`, step by step. Writes
benchmarks/results/trials_simulation.json and prints the table of docs/trials.md. About two minutes
on one core. tests/trials/test_simulation.py runs a small part of it.

Unless a row says otherwise, a block has 4 timed and 1 wash-out step, and "1 % noise" means that the
log ratio of one pair of equal arms has a standard deviation of 0.01 (before any ramp).
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import median

from flopwise.trials.compare import PairedComparison
from flopwise.trials.interval import mean_interval, student_t_quantile
from flopwise.trials.schedule import Pair, Schedule
from flopwise.trials.sequential import ConfidenceSequence, pairs_needed

BLOCK_STEPS, WASHOUT_STEPS = 4, 1
STEPS_A_BLOCK = BLOCK_STEPS + WASHOUT_STEPS
SPREAD = 0.01
LOOKS = 200
RESULTS = Path(__file__).parent / "results" / "trials_simulation.json"

Steps = Iterator[float]


# ---------------------------------------------------------------- simulated step times, seconds


def step_sd(correlation: float = 0.0) -> float:
    """Returns the sd of one step that gives a pair a log ratio with sd SPREAD."""
    weights = (
        [-1 / BLOCK_STEPS] * BLOCK_STEPS + [0.0] * WASHOUT_STEPS + [1 / BLOCK_STEPS] * BLOCK_STEPS
    )
    variance = sum(
        a * b * correlation ** abs(i - j)
        for i, a in enumerate(weights)
        for j, b in enumerate(weights)
    )
    return SPREAD / math.sqrt(variance)


def gaussian(rng: random.Random, sd: float | None = None) -> Steps:
    """Yields independent normal step times around 1 s."""
    sd = step_sd() if sd is None else sd
    while True:
        yield 1 + sd * rng.gauss(0, 1)


def heavy_tailed(rng: random.Random) -> Steps:
    """Yields step times with Student t noise of 3 degrees of freedom, cut at 0.2 s."""
    scale = step_sd() / math.sqrt(3)
    while True:
        chi2 = rng.gauss(0, 1) ** 2 + rng.gauss(0, 1) ** 2 + rng.gauss(0, 1) ** 2
        yield max(0.2, 1 + scale * rng.gauss(0, 1) / math.sqrt(chi2 / 3))


def autocorrelated(correlation: float) -> Callable[[random.Random], Steps]:
    """Returns a process whose steps follow a first-order autoregression."""

    def process(rng: random.Random) -> Steps:
        sd = step_sd(correlation)
        fresh, x = sd * math.sqrt(1 - correlation**2), sd * rng.gauss(0, 1)
        while True:
            yield 1 + x
            x = correlation * x + fresh * rng.gauss(0, 1)

    return process


def drifting(log_time: Callable[[float], float]) -> Callable[[random.Random], Steps]:
    """Returns normal noise times exp(log_time(blocks since the start))."""

    def process(rng: random.Random) -> Steps:
        for i, step in enumerate(gaussian(rng)):
            yield step * math.exp(log_time(i / STEPS_A_BLOCK))

    return process


def stalling(rng: random.Random) -> Steps:
    """Yields normal step times of which one in a hundred takes five times as long."""
    for step in gaussian(rng):
        yield 5 * step if rng.random() < 0.01 else step


PROCESSES: dict[str, Callable[[random.Random], Steps]] = {
    "normal": gaussian,
    "Student t, 3 degrees of freedom": heavy_tailed,
    "autocorrelated, 0.9 from step to step": autocorrelated(0.9),
    "autocorrelated, 0.99": autocorrelated(0.99),
    "clocks ramp up: 0.05 % faster each block": drifting(lambda block: -0.0005 * block),
    "clocks ramp up: 0.5 % faster each block": drifting(lambda block: -0.005 * block),
    "warms up: 15 % slower within about 10 blocks": drifting(
        lambda block: 0.15 * (1 - math.exp(-block / 5))
    ),
    "disturbed every 4 blocks, by 2 %": drifting(
        lambda block: 0.02 * math.cos(math.pi / 2 * (block - 0.5))
    ),
    "stalls: 1 step in 100 takes 5x": stalling,
}


# ---------------------------------------------------------------- other designs, for comparison


class FixedOrder(Schedule):
    """Old first in every pair."""

    def _next_block(self) -> None:
        super()._next_block()
        self._new_first = False


class Abba(Schedule):
    """Old new new old, for ever."""

    def _next_block(self) -> None:
        super()._next_block()
        self._new_first = self._index % 2 == 1


class Quadruples(Schedule):
    """ABBA or BAAB by a coin; the unit is the quadruple."""

    def _next_block(self) -> None:
        before = self._new_first
        super()._next_block()
        if not self._second and self._index % 2 == 1:
            self._new_first = not before


class QuadrupleComparison(PairedComparison):
    """The mean of two pairs is one value; drift cancels in it."""

    def __init__(self) -> None:
        super().__init__()
        self.half: float | None = None
        self.sequence = ConfidenceSequence()
        self.seen = 0

    def add(self, pair: Pair) -> None:
        self.seen += 1
        value = math.log(sum(pair.new) / sum(pair.old))
        if self.half is None:
            self.half = value
        else:
            self.sequence.add((self.half + value) / 2)
            self.half = None

    def outcome(self) -> str:
        return {-1: "faster", 0: "not shown", 1: "slower"}[self.sequence.direction]

    @property
    def pairs(self) -> int:
        return self.seen


class NoDriftCorrection(PairedComparison):
    """Pairs as they are."""

    def add(self, pair: Pair) -> None:
        self._effect._slopes.clear()
        super().add(pair)


class GaussianMixture(PairedComparison):
    """The t-mixture martingale for normal noise of unknown variance, prior N(0, 1) on mean / sd.

    Source: Lai 1976, Ann. Stat. 4:265; Wang & Ramdas, arXiv:2310.03722.
    """

    def outcome(self) -> str:
        values = self._effect.sequence.values
        n, total, squares = len(values), math.fsum(values), math.fsum(v * v for v in values)
        if n < 2 or total >= 0:
            return "not shown"
        log_wealth = 0.5 * math.log(1 / (n + 1))
        log_wealth += n / 2 * math.log(squares / (squares - total**2 / (n + 1)))
        return "faster" if log_wealth >= math.log(1 / 0.05) else "not shown"


@cache
def t_bar(df: int) -> float:
    """Returns the two-sided 95 % quantile."""
    return student_t_quantile(0.975, df)


class PeekingTTest:
    """What everyone does first: a 95 % t interval over the pairs, looked at after each."""

    def __init__(self) -> None:
        self.n, self.sum, self.squares = 0, 0.0, 0.0
        self.faster_at = 0  # pairs at which it first looked faster, 0: never

    def add(self, pair: Pair) -> None:
        value = math.log(sum(pair.new) / sum(pair.old))
        self.n, self.sum, self.squares = self.n + 1, self.sum + value, self.squares + value * value
        if self.n < 2 or self.faster_at:
            return
        variance = (self.squares - self.sum**2 / self.n) / (self.n - 1)
        half = t_bar(self.n - 1) * math.sqrt(max(variance, 0.0) / self.n)
        if self.sum / self.n + half < 0:
            self.faster_at = self.n


# ---------------------------------------------------------------- one trial, and many


@dataclass
class Trial:
    """One simulated trial: what was concluded, and after how many pairs."""

    outcome: str
    pairs: int
    comparison: PairedComparison


def trial(
    steps: Steps,
    seed: int,
    factor: Callable[[str, int], float],
    *,
    looks: int = LOOKS,
    min_pairs: int = 0,
    schedule: Schedule | None = None,
    comparison: PairedComparison | None = None,
    also: PeekingTTest | None = None,
) -> Trial:
    """Returns a trial that stops as soon as it looks faster, or after `looks` pairs.

    Args:
        steps: step times of the machine, whatever runs.
        seed: of the schedule.
        factor: (arm, steps since this block began) -> how many times as long a step takes.
        looks: pairs at most.
        min_pairs: no stop before.
        schedule: another design.
        comparison: another analysis.
        also: sees the same pairs, and keeps the trial going until it has concluded too.
    """
    schedule = schedule or Schedule(seed, BLOCK_STEPS, WASHOUT_STEPS)
    comparison = comparison or PairedComparison()
    faster_at = since = 0
    for step_s in steps:
        event = schedule.advance(step_s * factor(schedule.arm, since))
        since += 1
        if event is None:
            continue
        if event.toggle:
            since = 0
        if event.pair is None:
            continue
        done = event.pair.index + 1
        if also:
            also.add(event.pair)
        if not faster_at:
            comparison.add(event.pair)
            if done >= min_pairs and comparison.outcome() == "faster":
                faster_at = done
        if done == looks or (faster_at and (also is None or also.faster_at)):
            break
    return Trial("faster" if faster_at else "not shown", faster_at or looks, comparison)


def equal(arm: str, since: int) -> float:
    """Returns 1: the arms do not differ."""
    return 1.0


def gain(frac: float) -> Callable[[str, int], float]:
    """Returns a new arm that takes `frac` less time."""
    return lambda arm, since: 1 - frac if arm == "new" else 1.0


@dataclass(frozen=True)
class Row:
    """One figure of the table."""

    section: str
    case: str
    measure: str
    value: float
    runs: int
    standard_error: float | None = None  # None: not a share


def share(section: str, case: str, measure: str, hits: int, runs: int) -> Row:
    """Returns a share with its binomial standard error."""
    value = hits / runs
    error = round(math.sqrt(value * (1 - value) / runs), 5)
    return Row(section, case, measure, value, runs, error)


def false_faster(name: str, runs: int, looks: int = LOOKS) -> tuple[int, int]:
    """Returns how many of `runs` trials of equal arms ended with "faster": (flopwise, peeking t-test)."""
    ours = naive = 0
    for seed in range(runs):
        peeking = PeekingTTest()
        result = trial(
            PROCESSES[name](random.Random(f"{name} {seed}")), seed, equal, looks=looks, also=peeking
        )
        ours += result.outcome == "faster"
        naive += peeking.faster_at > 0
    return ours, naive


def found(
    name: str,
    frac: float,
    runs: int,
    looks: int = LOOKS,
    design: Callable[[int], Schedule] | None = None,
    analysis: Callable[[], PairedComparison] | None = None,
) -> list[Trial]:
    """Returns trials of a new arm that is faster by `frac`."""
    return [
        trial(
            PROCESSES[name](random.Random(f"{name} {frac} {seed}")),
            seed,
            gain(frac),
            looks=looks,
            schedule=design(seed) if design else None,
            comparison=analysis() if analysis else None,
        )
        for seed in range(runs)
    ]


# ---------------------------------------------------------------- the table


def no_effect(runs: int) -> Iterator[Row]:
    """Yields how often equal arms look faster."""
    section = f"No effect: stopped as soon as it looks faster, {LOOKS} looks"
    for name in PROCESSES:
        ours, naive = false_faster(name, runs)
        yield share(section, name, "false faster", ours, runs)
        yield share(section, name, "a t interval, peeked at", naive, runs)


def other_orders(runs: int) -> Iterator[Row]:
    """Yields how often equal arms look faster when the order is not random."""
    section = f"No effect, the same interval, an order that is not random, {LOOKS} looks"
    names = [
        "normal",
        "clocks ramp up: 0.5 % faster each block",
        "disturbed every 4 blocks, by 2 %",
    ]
    for name in names:
        for label, design in (("AB AB AB", FixedOrder), ("AB BA AB BA", Abba)):
            hits = 0
            for seed in range(runs):
                steps = PROCESSES[name](random.Random(f"{name} {seed}"))
                result = trial(
                    steps,
                    seed,
                    equal,
                    schedule=design(seed, BLOCK_STEPS, WASHOUT_STEPS),
                    comparison=NoDriftCorrection(),
                )
                hits += result.outcome == "faster"
            yield share(section, name, label, hits, runs)


def power(runs: int) -> Iterator[Row]:
    """Yields how fast an effect is found, and whether the interval at the stop holds the truth."""
    section = "A true gain at 1 % noise"
    cases = [
        ("normal", 0.01, 40),
        ("Student t, 3 degrees of freedom", 0.01, 40),
        ("autocorrelated, 0.9 from step to step", 0.01, 40),
        ("clocks ramp up: 0.5 % faster each block", 0.01, 40),
        ("warms up: 15 % slower within about 10 blocks", 0.01, 40),
        ("normal", 0.005, 120),
        ("normal", 0.03, 12),
        ("normal", 0.1, 8),
    ]
    for name, frac, within in cases:
        trials = found(name, frac, runs)
        case = f"{100 * frac:g} %, {name}, within {within} pairs"
        hits = sum(t.outcome == "faster" and t.pairs <= within for t in trials)
        yield share(section, case, "found", hits, runs)
        yield Row(section, case, "pairs, median", median(t.pairs for t in trials), runs)
        truth, held = 1 - frac, 0
        for t in trials:
            seen = t.comparison.comparison()
            held += seen is not None and seen.ci95[0] <= truth <= seen.ci95[1]
        yield share(section, case, "interval at the stop holds the truth", held, runs)


def designs(runs: int) -> Iterator[Row]:
    """Yields what orders and analyses cost in pairs."""
    section = "Pairs to find a 1 % gain, 90 % of trials"
    options: list[tuple[str, type[Schedule], Callable[[], PairedComparison]]] = [
        ("random pairs, drift taken out (ours)", Schedule, PairedComparison),
        ("random pairs as they are", Schedule, NoDriftCorrection),
        ("random quadruples ABBA or BAAB", Quadruples, QuadrupleComparison),
        ("random pairs, drift taken out, t-mixture", Schedule, GaussianMixture),
    ]
    for name in (
        "normal",
        "Student t, 3 degrees of freedom",
        "clocks ramp up: 0.5 % faster each block",
    ):
        for label, design, analysis in options:
            trials = found(
                name,
                0.01,
                runs,
                design=lambda seed, design=design: design(seed, BLOCK_STEPS, WASHOUT_STEPS),  # type: ignore[misc]
                analysis=analysis,
            )
            ranked = sorted(t.pairs if t.outcome == "faster" else LOOKS + 1 for t in trials)
            value = ranked[math.ceil(0.9 * runs) - 1]
            yield Row(section, name, label, value, runs)


def promises(runs: int) -> Iterator[Row]:
    """Yields whether what is said about power and about many fixes holds."""
    section = "What is said about power"
    count = pairs_needed(0.01, SPREAD)
    hits = sum(t.outcome == "faster" for t in found("normal", 0.01, runs, looks=count))
    case = f"`pairs_needed` for a 1 % gain at 1 % noise: {count} pairs"
    yield share(section, case, "found (80 % is meant)", hits, runs)
    for pairs in (12, 30, 80):
        sizes = []
        for seed in range(50):
            result = trial(gaussian(random.Random(f"size {seed}")), seed, equal, looks=pairs)
            seen = result.comparison.comparison()
            sizes.append(seen.minimum_detectable_frac if seen else math.nan)
        size = median(sizes)
        hits = sum(t.outcome == "faster" for t in found("normal", size, runs, looks=pairs))
        case = f"minimum detectable gain after {pairs} pairs at 1 % noise: {100 * size:.2f} %"
        yield share(section, case, "found (80 % is meant)", hits, runs)
    section = "Many fixes"
    fixes, families = 10, max(1, runs // 4)
    wrong = 0
    for family in range(families):
        wrong += any(
            trial(
                gaussian(random.Random(f"family {family} {fix}")),
                fixes * family + fix,
                equal,
                looks=60,
                comparison=PairedComparison(comparisons=fixes),
            ).outcome
            == "faster"
            for fix in range(fixes)
        )
    yield share(
        section, "10 useless fixes side by side, 60 looks each", "any false faster", wrong, families
    )


def beyond(runs: int) -> Iterator[Row]:
    """Yields what happens outside the assumptions."""
    section = "Outside the assumptions: equal means, but only the new arm stalls (blocks of 16)"
    for least in (8, 20):
        hits = 0
        for seed in range(runs):
            rng = random.Random(f"own stalls {seed}")

            def own_stalls(arm: str, since: int, rng: random.Random = rng) -> float:
                # Mean 1: 0.96 in 99 steps of 100, 4.96 in one.
                return 1.0 if arm == "old" else 4.96 if rng.random() < 0.01 else 0.96

            result = trial(
                gaussian(rng, 0.02),
                seed,
                own_stalls,
                looks=60,
                min_pairs=least,
                schedule=Schedule(seed, 16, 2),
            )
            hits += result.outcome == "faster"
        yield share(
            section,
            "1 step in 100 takes 5x, the others are 4 % faster; 60 looks",
            f"false faster, min_pairs {least}",
            hits,
            runs,
        )

    section = "Outside the assumptions: equal arms, a wash-out that is too short (blocks of 8)"

    def slow_switch(arm: str, since: int) -> float:
        return 1.3 if arm == "old" and since < 4 else 1.0

    for washout in (1, 4):
        hits = sum(
            trial(
                gaussian(random.Random(f"switch {seed}")),
                seed,
                slow_switch,
                looks=60,
                schedule=Schedule(seed, 8, washout),
            ).outcome
            == "faster"
            for seed in range(runs)
        )
        yield share(
            section,
            "switching back to old slows 4 steps by 30 %; 60 looks",
            f"false faster, wash-out of {washout}",
            hits,
            runs,
        )


def of_processes(
    seed: int, effect: float, own: float, pairs: int, noise: float = SPREAD, comparisons: int = 1
) -> tuple[bool, bool, int]:
    """Returns whether a comparison of up to 8 processes came to "faster", whether all pairs alone would have, and after how many.

    Args:
        seed: of the noise, the processes and the coin.
        effect: log ratio of the arms.
        own: standard deviation of what a process adds to it for all its pairs.
        pairs: of each process.
        noise: standard deviation of one pair.
        comparisons: see `PairedComparison`.
    """
    rng = random.Random(f"processes {seed} {effect} {own} {pairs} {noise}")
    comparison, alone = PairedComparison(comparisons=comparisons), False
    for process in range(8):
        comparison.start(process)
        here = effect + rng.gauss(0, own)
        for index in range(pairs):
            new = math.exp(here + rng.gauss(0, noise))
            comparison.add(Pair(index, (1.0,), (new,), bool(rng.getrandbits(1)), False))
        faster = comparison.outcome() == "faster"
        alone = alone or faster or (comparison.wants_processes and mean(comparison) < 0)
        if faster:
            return True, alone, process + 1
    return False, alone, 8


def mean(comparison: PairedComparison) -> float:
    """Returns the log ratio that a comparison has found."""
    found = comparison.comparison()
    return 0.0 if found is None else math.log(found.ratio)


def processes(runs: int) -> Iterator[Row]:
    """Yields how often pairs of several processes are right, where each process has an effect of its own."""
    section = "No effect, pairs of up to 8 processes, looked at after each"
    for own, noise, pairs in ((0.0, 0.01, 5), (0.01, 0.01, 5), (0.03, 0.01, 5), (0.03, 0.001, 5)):
        case = f"{pairs} pairs a process with {100 * noise:g} % noise, processes differ by {100 * own:g} %"
        results = [of_processes(seed, 0.0, own, pairs, noise) for seed in range(runs)]
        yield share(section, case, "false faster, both intervals", sum(r[0] for r in results), runs)
        yield share(section, case, "if all pairs alone decided", sum(r[1] for r in results), runs)

    section = (
        "A true gain, 5 pairs a process with 1 % noise, processes differ by 1 %, one of five fixes"
    )
    for frac in (0.05, 0.1, 0.3):
        effect = math.log1p(-frac)
        results = [of_processes(seed, effect, 0.01, 5, comparisons=5) for seed in range(runs)]
        case, n = f"{100 * frac:g} %", sum(r[0] for r in results)
        yield share(section, case, "found in 8 processes", n, runs)
        yield Row(section, case, "processes, median", median(r[2] for r in results), runs)


def giving_up(runs: int) -> Iterator[Row]:
    """Yields what it costs to give up what will not show a gain, and what it saves."""
    section = "Giving up: 1 % noise, up to 40 pairs, one of six fixes"
    for frac in (0.0, 0.0075, 0.01):
        for gives_up in (False, True):
            faster, pairs = 0, 0
            for seed in range(runs):
                rng = random.Random(f"giving up {frac} {seed}")
                comparison = PairedComparison(comparisons=6)
                for index in range(40):
                    new = math.exp(math.log1p(-frac) + rng.gauss(0, SPREAD))
                    comparison.add(Pair(index, (1.0,), (new,), bool(rng.getrandbits(1)), False))
                    if comparison.decided(8, 40) or (gives_up and comparison.futile(40)):
                        break
                faster += comparison.outcome() == "faster"
                pairs += comparison.pairs
            case, how = f"{100 * frac:g} %", "giving up" if gives_up else "to the end"
            yield share(section, case, f"found, {how}", faster, runs)
            yield Row(section, case, f"pairs, mean, {how}", round(pairs / runs, 1), runs)


def mean_intervals(runs: int) -> Iterator[Row]:
    """Yields how often `mean_interval` holds the true mean of autocorrelated steps."""
    section = "95 % interval of a mean step time (`mean_interval`): holds the truth"
    for correlation in (0.0, 0.5, 0.8, 0.9):
        for steps in (10, 20, 40, 100, 400):
            rng = random.Random(f"mean {correlation} {steps}")
            held = 0
            for _ in range(runs):
                x, series = rng.gauss(0, 1), []
                for _ in range(steps):
                    series.append(x)
                    x = correlation * x + math.sqrt(1 - correlation**2) * rng.gauss(0, 1)
                interval = mean_interval(series)
                assert interval.low is not None
                assert interval.high is not None
                held += interval.low <= 0 <= interval.high
            yield share(
                section,
                f"correlation {correlation:g} from step to step",
                f"{steps} steps",
                held,
                runs,
            )


def markdown(rows: list[Row]) -> str:
    """Returns the rows as one table a section: cases down, measures across."""
    parts = []
    for section in dict.fromkeys(row.section for row in rows):
        here = [row for row in rows if row.section == section]
        measures = list(dict.fromkeys(row.measure for row in here))
        values = {(row.case, row.measure): _cell(row) for row in here}
        runs = " or ".join(f"{n:,}" for n in sorted({row.runs for row in here}))
        parts.append(f"**{section}** ({runs} trials a figure)\n")
        parts.append("| | " + " | ".join(measures) + " |\n|---" + "|---" * len(measures) + "|")
        for case in dict.fromkeys(row.case for row in here):
            cells = (values.get((case, measure), "") for measure in measures)
            parts.append(f"| {case} | " + " | ".join(cells) + " |")
        parts.append("")
    return "\n".join(parts)


def _cell(row: Row) -> str:
    if row.standard_error is not None:
        return f"{100 * row.value:.1f} %"
    return f"{row.value:g}" if row.value <= LOOKS else f"over {LOOKS}"


def main() -> None:
    """Runs everything and writes the results."""
    began = time.perf_counter()
    rows: list[Row] = []
    for part, runs in (
        (no_effect, 1000),
        (other_orders, 200),
        (power, 500),
        (designs, 300),
        (promises, 1000),
        (beyond, 300),
        (processes, 300),
        (giving_up, 300),
        (mean_intervals, 1000),
    ):
        rows += list(part(runs))
        print(f"{part.__name__}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
    RESULTS.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    print(markdown(rows))


if __name__ == "__main__":
    main()
