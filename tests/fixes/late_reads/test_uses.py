"""What a script does with a value that it reads."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from flopwise.fixes.late_reads.uses import uses_problem

pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="no positions of instructions before Python 3.11"
)


class Seen:
    """Stands in for a loss: notes the frames that read it."""

    def __init__(self) -> None:
        self.problems: list[str | None] = []

    def _read(self, frame: FrameType) -> float:
        self.problems.append(uses_problem(frame.f_code, frame.f_lasti))
        return 2.0

    def item(self) -> float:
        return self._read(sys._getframe(1))

    def __float__(self) -> float:
        return self._read(sys._getframe(1))

    def __format__(self, spec: str) -> str:
        return format(self._read(sys._getframe(1)), spec)


def problems(tmp_path: Path, body: str, prefix: str = "") -> list[str | None]:
    """Returns what is said of each read of a function's body."""
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    path = tmp_path / "train.py"
    path.write_text(
        f"{prefix}def train(loss, n, log, things):\n    total = 0.0\n    losses = []\n{lines}\n"
    )
    seen = Seen()
    space: dict[str, Any] = {"__name__": "script"}
    exec(compile(path.read_text(), str(path), "exec", dont_inherit=True), space)
    space["train"](seen, 3, lambda *_, **__: None, Things())
    assert seen.problems
    return seen.problems


class Things:
    loss = 0.0
    losses: list[float] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: 0.0

    def __setitem__(self, key: Any, value: Any) -> None:
        return None


SHOWN = [
    "print(loss.item())",
    "print('loss', round(float(loss), 3), n)",
    "print(f'{loss:.3f}')",
    "print(f'{loss.item():.3f} of {n}')",
    "print('%.3f' % loss.item())",
    "print('{:.3f}'.format(loss.item()))",
    "total += loss.item() * n\nprint(total / n)",
    "total = total + loss.item()\nprint(total)",
    "value = loss.item()\nprint(value)",
    "value = loss.item()\ntext = f'{value:.3f}'\nprint(text)",
    "losses.append(loss.item())\nprint(sum(losses) / len(losses))",
    "losses.append(loss.item())\nprint(losses[-1])",
    "log({'loss': loss.item(), 'n': n})",
    "things.set_postfix(loss=loss.item(), n=n)",
    "things.add_scalar('loss', loss.item(), n)",
    "meter = things\nmeter.update(loss.item(), n)\nprint(meter.avg)\nmeter.reset()",
    "if n:\n    print(loss.item())",
    "loss.item()",
    "print(\n    'a line',\n    loss.item(),\n)",
]


@pytest.mark.parametrize("body", SHOWN)
def test_values_that_are_shown_or_summed_up(tmp_path: Path, body: str) -> None:
    assert set(problems(tmp_path, body)) == {None}


DECIDES = [
    ("if loss.item() > 3:\n    pass", "decides by it"),
    ("while loss.item() > 3:\n    pass", "decides by it"),
    ("assert loss.item() < 3", "decides by it"),
    ("best = n if loss.item() < 3 else 0", "decides by it"),
    ("return loss.item()", "decides by it, or gives it on"),
    ("return {'loss': loss.item()}", "gives it on"),
    ("total += loss.item()\nreturn total / n", "gives it on"),
    ("total += loss.item()\nif total > 9:\n    pass", "decides by it"),
    ("value = loss.item()\nprint(value)\nthings.step(value)", "gives it to step"),
    ("things.loss = loss.item()", "keeps it where it cannot be followed"),
    ("things['loss'] = loss.item()", "keeps it where it cannot be followed"),
    ("things.losses.append(loss.item())", "keeps it where it cannot be followed"),
    ("losses.append(loss.item())\nif min(losses) > 9:\n    pass", "gives it to min"),
    ("losses.append(loss.item())\nvalue = losses[-1]\nif value > 9:\n    pass", "decides by it"),
    ("print([v for v in [loss.item()]])", "decides by it, or gives it on"),
    ("(lambda: loss.item())()", "in a class or a lambda"),
    ("value = loss.item()\nprint(locals())", "locals() may read"),
    ("print(things.decide(loss.item()))", "gives it to decide"),
    ("print(n[loss.item()] if False else loss.item())", "decides by it"),
    ("if (value := loss.item()):\n    print(value)", "names it within an expression"),
]


@pytest.mark.parametrize(("body", "said"), DECIDES)
def test_values_that_may_decide(tmp_path: Path, body: str, said: str) -> None:
    found = problems(tmp_path, body)
    assert all(problem is not None and said in problem for problem in found), found


def test_a_global_is_followed_through_the_whole_file(tmp_path: Path) -> None:
    prefix = "total = 0.0\ndef later():\n    if total > 3:\n        pass\n"
    body = "global last\nlast = loss.item()\nprint(last)"
    assert problems(tmp_path, body, prefix) == [None]
    prefix = "last = 0.0\ndef later():\n    if last > 3:\n        pass\n"
    (problem,) = problems(tmp_path, body, prefix)
    assert "line 3 decides by it" in str(problem)


def test_source_that_has_changed_since(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("def train(loss):\n    print(loss.item())\n")
    space: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), space)
    path.write_text("def train(loss):\n    if loss.item(): pass\n")
    seen = Seen()
    space["train"](seen)
    assert seen.problems == ["its source has changed since it was started"]


def test_source_that_is_not_there() -> None:
    space: dict[str, Any] = {}
    exec("def train(loss):\n    print(loss.item())\n", space)
    seen = Seen()
    space["train"](seen)
    assert seen.problems == ["its source has changed since it was started"]
