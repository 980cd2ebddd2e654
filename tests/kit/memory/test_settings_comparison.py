from __future__ import annotations

import json
from typing import Any

from flopwise.kit.memory.allocator_counters import AllocatorState
from flopwise.kit.memory.interleaved import Ratio
from flopwise.kit.memory.settings_comparison import DEFAULT, Run, SettingsComparison

GIB = 2**30


def state(retries: int = 0) -> AllocatorState:
    return AllocatorState(GIB, 2 * GIB, 3 * GIB, 4 * GIB, GIB // 2, retries, 0, 1, 0, GIB)


def comparison(**settings: Any) -> SettingsComparison:
    """Returns one in which each setting has (ratio's low, high, retries)."""
    result = SettingsComparison(runs={DEFAULT: [Run(1.0, state(settings.pop("retries", 0)))] * 3})
    for name, (low, high, retries) in settings.items():
        middle = (low + high) / 2
        result.runs[name] = [Run(middle, state(retries))] * 3
        result.ratios[name] = Ratio(1.0, middle, middle, low, high, 3)
        result.settings[name] = f"{name}:True"
    return result


class TestBest:
    def test_the_default_where_none_is_shown_to_be_faster(self) -> None:
        assert comparison(a=(0.9, 1.1, 0)).best() == DEFAULT
        assert comparison().best() == DEFAULT

    def test_the_fastest_that_is_shown(self) -> None:
        assert comparison(a=(0.8, 0.9, 0), b=(0.7, 0.8, 0), c=(0.5, 1.1, 0)).best() == "b"

    def test_one_that_retries_more_is_not_taken(self) -> None:
        assert comparison(a=(0.7, 0.8, 1)).best() == DEFAULT

    def test_one_without_retries_where_the_default_has_some(self) -> None:
        assert comparison(retries=4, a=(0.95, 1.05, 0)).best() == "a"
        assert comparison(retries=4, a=(1.02, 1.05, 0)).best() == DEFAULT

    def test_the_one_that_runs_where_the_default_does_not(self) -> None:
        result = comparison(a=(1.5, 1.6, 2), b=(1.7, 1.8, 0), c=(1.8, 1.9, 0))
        del result.runs[DEFAULT]
        result.failed[DEFAULT] = "CUDA out of memory"
        assert result.best() == "b"


def test_it_is_told_in_words() -> None:
    result = comparison(a=(0.8, 0.9, 1), retries=1)
    result.declined["b"] = "no"
    result.failed["c"] = "out of memory"
    assert str(result) == (
        "as it is: 1 s, peak 3.00 GiB allocated, 4.00 GiB reserved, 25.0% fragmented at the end, "
        "3 retries in 3 runs\n"
        "a: 850 ms, peak 3.00 GiB allocated, 4.00 GiB reserved, 25.0% fragmented at the end, "
        "3 retries in 3 runs; 0.850 of the time (95 % interval 0.800 to 0.900, 3 rounds; 1 s "
        "before, 850 ms after)\n"
        "c: failed: out of memory\n"
        "b: not tried: no\n"
        "to keep: a (a:True)"
    )


def test_as_json() -> None:
    found = json.loads(json.dumps(comparison(a=(0.8, 0.9, 0)).as_json()))
    assert found["best"] == "a"
    assert found["runs"]["a"][0]["state"]["peak_reserved_bytes"] == 4 * GIB
