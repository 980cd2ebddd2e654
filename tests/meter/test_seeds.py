"""Seeds that a script sets are moved by a stated amount, and nothing else is."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from flopwise.meter.seeds import Seeds

PLACES = ((torch, "manual_seed"), (torch.random, "manual_seed"), (torch.cuda, "manual_seed"),
          (torch.cuda, "manual_seed_all"), (random, "seed"))  # fmt: skip


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for owner, name in PLACES:
        monkeypatch.setattr(owner, name, getattr(owner, name))
    with torch.random.fork_rng(devices=[]):
        yield


def test_an_offset_of_0_moves_no_seed() -> None:
    before = [getattr(owner, name) for owner, name in PLACES]
    Seeds(0).install()
    assert [getattr(owner, name) for owner, name in PLACES] == before
    assert torch.initial_seed() == 1


def test_what_follows_is_as_from_the_seed_plus_the_offset() -> None:
    torch.manual_seed(1007)
    random.seed(1008)
    wanted = torch.rand(3), random.random()
    seeds = Seeds(1000)
    seeds.install()
    torch.manual_seed(7)
    random.seed(8)
    assert torch.equal(torch.rand(3), wanted[0])
    assert random.random() == wanted[1]
    assert seeds.moved == Counter({"torch.manual_seed": 1, "random.seed": 1})
    assert torch.initial_seed() == 1007


def test_a_keyword_is_moved_and_what_is_no_whole_number_is_not() -> None:
    seeds = Seeds(5)
    seeds.install()
    random.seed(a=1)
    first = random.random()
    assert first == random.Random(6).random()
    random.seed("text")
    assert random.random() == random.Random("text").random()
    random.seed(None)
    random.seed()
    assert seeds.moved == Counter({"random.seed": 1})
    torch.manual_seed(seed=2)
    assert torch.initial_seed() == 7


def test_torch_that_seeds_its_devices_does_not_move_a_seed_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", given.append)
    seeds = Seeds(10)
    seeds.install()
    given.clear()
    torch.manual_seed(1)
    assert given == [11]
    torch.cuda.manual_seed_all(1)
    assert given[-1] == 11
    assert seeds.moved["torch.cuda.manual_seed_all"] == 1


@pytest.mark.parametrize("seed", [2**63 - 1, -3, 0])
def test_a_moved_seed_is_one_that_torch_takes(seed: int) -> None:
    Seeds(100_003).install()
    torch.manual_seed(seed)
    assert torch.initial_seed() == (seed + 100_003) % 2**63


def test_a_script_that_seeds_nothing_begins_otherwise_and_alike_each_time() -> None:
    code = (
        "import torch\nfrom flopwise.meter.seeds import Seeds\n"
        "Seeds({}).install()\nprint(torch.initial_seed(), torch.rand(2).tolist())"
    )

    def first(offset: int) -> str:
        return subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code.format(offset)], capture_output=True, text=True, check=True
        ).stdout  # fmt: skip

    bare, other = first(0), first(100_003)
    assert (bare, other) == (first(0), first(100_003))
    assert (bare.split()[0], other.split()[0]) == ("1", "100004")
    assert bare.split()[1:] != other.split()[1:]
