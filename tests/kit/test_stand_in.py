"""A stand-in passes for the method that it stands for."""

from __future__ import annotations

from typing import Any

from flopwise.kit.stand_in import StandIn


class Door:
    def knock(self, times: int) -> str:
        """Knocks."""
        return "knock " * times


METHOD = Door.knock


class Louder(StandIn):
    def __call__(self, door: Any, *args: Any) -> Any:
        return self._method(door, *args).upper()


def test_it_is_equal_to_the_method_and_found_by_it() -> None:
    there = StandIn(METHOD)
    assert there == METHOD
    assert there != Door.__init__
    assert {METHOD: 1}[there] == 1
    assert (there.__name__, there.__doc__) == ("knock", "Knocks.")


def test_it_is_bound_as_a_method_is(monkeypatch: Any) -> None:
    monkeypatch.setattr(Door, "knock", StandIn(METHOD))
    assert Door().knock(2) == "knock knock "
    assert Door.knock(Door(), 1) == "knock "
    monkeypatch.setattr(Door, "knock", Louder(METHOD))
    assert Door().knock(1) == "KNOCK "
