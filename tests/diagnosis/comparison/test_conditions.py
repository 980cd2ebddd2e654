"""What makes two sides incomparable, and what is only said."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from flopwise.diagnosis.comparison.conditions import conditions, voided
from flopwise.diagnosis.comparison.sides import Measured

Side = Callable[..., Measured]


@pytest.mark.parametrize(
    ("fields", "code", "voids"),
    [
        ({"device_name": "NVIDIA A100"}, "device", ["step", "lines", "mfu"]),
        ({"world_size": 8}, "world-size", ["step"]),
        ({"rank": 3}, "rank", []),
        ({"profiled": True}, "profiled", ["step", "lines"]),
        ({"steps_by": "whole trace"}, "steps", ["step", "lines"]),
        ({"steps_by": "backward"}, "steps", []),
        ({"model_flops_per_step": 4.1e12}, "flops", ["step", "lines"]),
        ({"model_flops_per_step": 4.1e12, "coverage_frac": 0.5}, "flops", []),
        ({"peak_flops_per_s": 2e15}, "peak", ["mfu", "ceilings"]),
        ({"notes": ["ceilings: measured elsewhere"]}, "ceilings", ["ceilings"]),
        ({"flopwise": "1"}, "software", []),
        ({"trusted": False, "untrusted_because": ["a", "b"]}, "untrusted", []),
    ],
)
def test_each_condition(a_side: Side, fields: dict[str, Any], code: str, voids: list[str]) -> None:
    for old, new in ((a_side(), a_side(**fields)), (a_side(**fields), a_side())):
        (found,) = conditions(old, new)
        assert (found.code, found.voids) == (code, voids)
        alike = conditions(new, new)
        assert [one.code for one in alike] == ["untrusted"] * 2 * (not new.side.trusted)


@pytest.mark.parametrize(
    "fields",
    [
        {"device_name": None},
        {"world_size": None},
        {"rank": None},
        {"model_flops_per_step": 4.003e12},
        {"model_flops_per_step": None},
    ],
)
def test_what_is_not_said_or_hardly_differs_is_no_condition(
    a_side: Side, fields: dict[str, Any]
) -> None:
    assert conditions(a_side(), a_side(**fields)) == []


def test_an_unknown_number_of_ranks_beside_several_is_said(a_side: Side) -> None:
    (found,) = conditions(a_side(world_size=8), a_side(world_size=None))
    assert (found.code, found.voids) == ("world-size", [])
    assert "the new side does not say" in found.text


def test_doubts_are_told_without_their_details(a_side: Side) -> None:
    doubts = ["one: because", "two", "three", "four", "five"]
    (found,) = conditions(a_side(), a_side(trusted=False, untrusted_because=doubts))
    assert found.text.endswith("are not trusted: one; two; three; four; and 1 more")


def test_a_file_that_ends_early_is_said(a_side: Side) -> None:
    (found,) = conditions(a_side(), dataclasses.replace(a_side(), damaged="inside event 7"))
    assert (found.code, found.voids) == ("damaged", [])


@pytest.mark.parametrize(
    ("withheld", "voids"), [(["steps"], ["step", "lines"]), (["ledger"], ["lines"])]
)
def test_what_the_traces_of_a_job_do_not_bear(
    a_side: Side, withheld: list[str], voids: list[str]
) -> None:
    (found,) = conditions(dataclasses.replace(a_side(), withheld=withheld), a_side())
    assert (found.code, found.voids) == ("health", voids)


def test_processors_matter_where_they_do_the_work(a_side: Side) -> None:
    def of(cpu: str, device: str) -> Measured:
        made = a_side(device_name=device)
        return dataclasses.replace(made, side=dataclasses.replace(made.side, cpu=cpu))

    (found,) = conditions(of("A", "CPU"), of("B", "CPU"))
    assert (found.code, found.voids) == ("host", ["step", "lines", "mfu"])
    (found,) = conditions(of("A", "NVIDIA H200"), of("B", "NVIDIA H200"))
    assert (found.code, found.voids) == ("host", [])


def test_what_voids_the_step_comes_first(a_side: Side) -> None:
    other = a_side(rank=3, trusted=False, untrusted_because=["x"], device_name="NVIDIA A100")
    found = conditions(a_side(), other)
    assert [one.code for one in found] == ["device", "rank", "untrusted"]
    assert voided(found) == {"step": ["device"], "lines": ["device"], "mfu": ["device"]}
