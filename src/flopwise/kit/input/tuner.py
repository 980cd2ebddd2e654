"""Finds a loader's settings by the time the device waits for batches, not by how fast batches could come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader

from flopwise.errors import InputError
from flopwise.hardware.limits import usable_cores
from flopwise.kit.input.arguments import called, real, whole
from flopwise.kit.input.links import device_of, pool_of
from flopwise.kit.input.loader_copy import (
    LoaderChoice,
    choice_of,
    kept_random_state,
    more_workers_problem,
    problem,
    with_choice,
)
from flopwise.kit.input.prefetcher import Prefetcher
from flopwise.kit.input.trial import HEAD, LEAST_STEPS, LoaderTrial, TrialRun
from flopwise.kit.worker_count import (
    choose_workers,
    most_workers_by_memory,
    shared_memory_problem,
)


@dataclass
class Tuning:
    """What was tried, what was chosen, and why. Nothing of the loader given was changed."""

    given: Any
    device: torch.device | str | None
    choice: LoaderChoice | None = None
    reason: str = ""
    trials: list[LoaderTrial] = field(default_factory=list)

    def table(self) -> str:
        """Returns the trials as a table, the choice below it."""
        return "\n".join([HEAD, *(t.row() for t in self.trials), f"chosen: {self.reason}"])

    def loader(self) -> Any:
        """Returns a loader as chosen, over the same data set, sampler and generators; the given one where it stays."""
        if self.choice is None or problem(self.given):
            return self.given
        if self.choice == choice_of(self.given, self.choice.depth):
            return self.given
        return with_choice(self.given, self.choice)

    def prefetcher(self, **options: Any) -> Prefetcher:
        """Returns the chosen loader in a Prefetcher of the chosen depth."""
        depth = self.choice.depth if self.choice is not None else 3
        return Prefetcher(self.loader(), self.device, depth, **options)


def tune_loader(
    loader: Any,
    step: Callable[[Any], Any],
    *,
    device: torch.device | str | None = None,
    depth: int = 3,
    enough_frac: float = 0.02,
    steps: int = 40,
    max_workers: int | None = None,
    budget_s: float = 120.0,
    say: Callable[[str], Any] | None = None,
) -> Tuning:
    """Returns which workers, prefetch factor, pinning and ring depth let the device wait least.

    Each trial runs `step` on `steps` batches, so give it a step that may be run: on a copy of the model, or before its
    state is loaded. Random generators of the loader and of torch, Python and NumPy on the host are restored: the
    loader chosen gives the same batches in the same order as the one given. (A data set that draws random numbers in
    workers draws others with another number of workers, as in torch itself.) Ends as soon as a setting waits less than
    `enough_frac` with 95 % confidence, when more does not help, or when `budget_s` is spent.

    Args:
        max_workers: at most so many; never more than the cores and the memory allow.
        say: called with each row as it comes.

    Raises:
        InputError: the loader is an iterator, which trying out would use up, or an argument makes no sense.
    """
    if isinstance(loader, Iterator):
        raise InputError(
            f"a {type(loader).__name__} can be read only once: give what can be iterated again, as a DataLoader"
        )
    depth = whole("depth", depth, 1, "at least one batch is read ahead")
    steps = whole("steps", steps, 1, "how many steps each setting is tried on")
    if max_workers is not None:
        max_workers = whole("max_workers", max_workers, 0, "a number of workers is meant, or None")
    real("enough_frac", enough_frac, 0, 1)
    real("budget_s", budget_s, 0)
    if not callable(step):
        raise InputError(f"step={step!r}: a function of one batch is meant")
    called("say", say)
    device_of(device)
    tuning = Tuning(loader, device)
    search = _Search(tuning, step, steps, enough_frac, time.monotonic() + budget_s, say)
    with kept_random_state(loader):
        first = search.run(_first_choice(loader, depth))
        if first is None:
            tuning.reason = "nothing was tried: the loader gives no batch"
            return tuning
        why = problem(loader)
        if not why and not search.enough(first):
            _search_workers(search, loader, max_workers)
            _search_rest(search)
        elif why and not search.enough(first):
            search.run(first.choice.but(depth=2 * depth))
    best = search.best()
    tuning.choice = best.choice
    tuning.reason = _reason(search, best, why)
    return tuning


def _first_choice(loader: Any, depth: int) -> LoaderChoice:
    if isinstance(loader, DataLoader):
        return choice_of(loader, depth)
    return LoaderChoice(0, None, False, depth)


class _Search:
    """Runs trials and remembers them; a setting is tried once."""

    def __init__(
        self, tuning: Tuning, step: Any, steps: int, enough_frac: float, end: float, say: Any
    ) -> None:
        self.tuning, self.step, self.steps = tuning, step, max(steps, LEAST_STEPS)
        self.enough_frac, self.end, self.say = enough_frac, end, say
        self.batch_bytes = 0

    def run(self, choice: LoaderChoice) -> LoaderTrial | None:
        """Returns the trial of a setting; None where time is up or there is no batch."""
        known = next((t for t in self.tuning.trials if t.choice == choice), None)
        if known is not None:
            return known
        if self.tuning.trials and time.monotonic() > self.end:
            return None
        given = self.tuning.given
        same = bool(problem(given)) or choice == choice_of(given, choice.depth)
        with kept_random_state(given):
            loader = given if same else with_choice(given, choice)
            run = TrialRun(loader, choice, self.tuning.device, self.step)
            trial = run.measure(self.steps, self.end)
        self.batch_bytes = self.batch_bytes or run.batch_bytes
        if trial is not None:
            self.tuning.trials.append(trial)
            if self.say is not None:
                self.say(trial.row())
        return trial

    def enough(self, trial: LoaderTrial) -> bool:
        """Returns whether a trial's device waits little enough, with confidence."""
        return trial.high_frac <= self.enough_frac

    def best(self) -> LoaderTrial:
        """Returns the trial to choose: the cheapest that waits little enough, else the one that waits least.

        One that is not better beyond both intervals than a cheaper one loses to it.
        """
        by_cost = sorted(self.tuning.trials, key=_cost)
        good = [t for t in by_cost if self.enough(t)]
        if good:
            return good[0]
        best = by_cost[0]
        for trial in by_cost[1:]:
            if trial.high_frac < best.low_frac or _much_less(trial, best):
                best = trial
        return best


def _search_workers(search: _Search, loader: DataLoader[Any], max_workers: int | None) -> None:
    """Tries numbers of workers upwards from what the waiting needs, until it suffices or more does not help."""
    if more_workers_problem(loader):
        return
    first = search.tuning.trials[0]
    cores = usable_cores()
    most = min(cores, most_workers_by_memory(), max_workers if max_workers is not None else cores)
    most = min(most, _most_by_pool(loader, first.choice))
    if most < 1:
        return
    now = first.choice.num_workers
    share = min(first.wait_frac, 0.999)
    scale = max(1, now)
    needed = (
        choose_workers(share, waits=True, cores=most) if not now else round(scale / (1 - share))
    )
    count, last = min(most, max(1, needed)), first
    tried: set[int] = {now}
    while count not in tried:
        tried.add(count)
        choice = first.choice.but(num_workers=count)
        if shared_memory_problem(search.batch_bytes, count, choice.prefetch_factor or 2):
            return
        trial = search.run(choice)
        if (
            trial is None
            or search.enough(trial)
            or (last is not first and not _much_less(trial, last))
        ):
            return
        last, count = trial, min(most, max(count + 1, round(1.5 * count)))


def _most_by_pool(loader: DataLoader[Any], choice: LoaderChoice) -> int:
    """Returns how many workers a pool has slots for, if the loader collates into one."""
    pool = pool_of(loader)
    if pool is None:
        return 1 << 16
    return (pool.slots - choice.depth - 2) // (choice.prefetch_factor or 2)


def _search_rest(search: _Search) -> None:
    """Tries page-locked batches, more read ahead by workers, and a deeper ring, each on the best so far."""
    changes: list[dict[str, Any]] = [{"prefetch_factor": 4}, {"depth": 6}]
    if torch.cuda.is_available() and pool_of(search.tuning.given) is None:
        changes.insert(0, {"pin_memory": True})
    for change in changes:
        best = search.best()
        if search.enough(best):
            return
        if "prefetch_factor" in change and not best.choice.num_workers:
            continue
        choice = best.choice.but(**change)
        factor, workers = choice.prefetch_factor or 0, choice.num_workers
        if workers > _most_by_pool(search.tuning.given, choice):
            continue
        if shared_memory_problem(search.batch_bytes, workers, factor) is None:
            search.run(choice)


def _much_less(trial: LoaderTrial, than: LoaderTrial) -> bool:
    """Returns whether a trial's steps are shorter by more than a twentieth; less is not worth a worker."""
    return trial.step_s < 0.95 * than.step_s


def _cost(trial: LoaderTrial) -> tuple[int, int, int, bool]:
    c = trial.choice
    return c.num_workers, c.prefetch_factor or 0, c.depth, c.pin_memory


def _reason(search: _Search, best: LoaderTrial, why: str) -> str:
    c = best.choice
    said = (
        f"num_workers={c.num_workers}, prefetch_factor={c.prefetch_factor}, pin_memory={c.pin_memory}, "
        f"depth={c.depth}: the device waits {best.wait_frac:.1%} of the time ({best.low_frac:.1%} to {best.high_frac:.1%})"
    )
    if not search.enough(best):
        said += "; nothing tried brings it below the aim: loading itself must become cheaper"
        if best.choice.num_workers < usable_cores() and not why:
            said += ", or the time for the search longer"
    return f"{said}. {why}" if why else said
