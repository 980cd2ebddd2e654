from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flopwise.fixes.unpadding.restored import Restoring, Shape, scattered, zeros_behind

SUBCLASSES: list[type] = []


@dataclass
class Output(OrderedDict):  # type: ignore[type-arg]
    """As the outputs of transformers: a dictionary with attributes and places."""

    loss: Any = None
    logits: Any = None
    hidden_states: Any = None

    def __init_subclass__(cls) -> None:
        SUBCLASSES.append(cls)

    def __post_init__(self) -> None:
        for name in ("loss", "logits", "hidden_states"):
            if vars(self).get(name) is not None:
                self[name] = vars(self)[name]

    def __getitem__(self, key: Any) -> Any:
        return dict(self.items())[key] if isinstance(key, str) else self.to_tuple()[key]

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self) -> Any:
        return Output, (self.loss, self.logits, self.hidden_states)

    def to_tuple(self) -> tuple[Any, ...]:
        return tuple(self[name] for name in self)


PLACES = torch.tensor([0, 1, 4])  # of a batch of 2 x 4


def shape() -> Shape:
    return Shape(1, 5, scattered(PLACES, 2, 4))


def output() -> Output:
    row = torch.arange(1.0, 6.0).view(1, 5, 1).requires_grad_()
    return Output(loss=torch.tensor(3.0), logits=row, hidden_states=(row * 2, torch.ones(())))


EXPECTED = [[1.0, 2.0, 0.0, 0.0], [3.0, 0.0, 0.0, 0.0]]


def read(tensor: torch.Tensor) -> Any:
    return tensor.detach()[..., 0].tolist()


class TestBack:
    def test_the_loss_restores_nothing(self) -> None:
        raw = output()
        got = Restoring().back(raw, shape())
        assert isinstance(got, Output)
        assert float(got.loss) == float(got["loss"]) == float(got[0]) == 3.0
        assert list(got) == list(got.keys()) == ["loss", "logits", "hidden_states"]
        assert "logits" in got
        assert len(got) == 3
        assert type(got) is not Output  # nothing has been read

    @pytest.mark.parametrize(
        "reading",
        [
            lambda o: o.logits,
            lambda o: o["logits"],
            lambda o: o[1],
            lambda o: o[-2],
            lambda o: o[:2][1],
            lambda o: o.get("logits"),
            lambda o: list(o.values())[1],
            lambda o: dict(o.items())["logits"],
            lambda o: dict(o)["logits"],
            lambda o: {**o}["logits"],
            lambda o: o.to_tuple()[1],
            lambda o: copy.copy(o).logits,
            lambda o: pickle.loads(pickle.dumps(o)).logits,
        ],
    )
    def test_every_way_of_reading_restores(self, reading: Any) -> None:
        got = Restoring().back(output(), shape())
        assert read(reading(got)) == EXPECTED
        assert type(got) is Output
        assert not any("flopwise" in name for name in vars(got))
        assert read(got.hidden_states[0]) == [[2 * v for v in row] for row in EXPECTED]

    def test_gradients_go_through(self) -> None:
        raw = output()
        row = raw.logits
        got = Restoring().back(raw, shape())
        (got.logits * torch.arange(8.0).view(2, 4, 1)).sum().backward()
        assert row.grad[0, :, 0].tolist() == [0.0, 1.0, 4.0, 0.0, 0.0]

    def test_writing_is_kept(self) -> None:
        got = Restoring().back(output(), shape())
        got.logits = torch.zeros(1)
        assert got.logits.tolist() == [0.0]
        got = Restoring().back(output(), shape())
        got["loss"] = torch.ones(())
        assert float(got.loss) == 1.0
        assert read(got.logits) == EXPECTED

    def test_no_class_is_told_of(self) -> None:
        before = list(SUBCLASSES)
        restoring = Restoring()
        first, second = restoring.back(output(), shape()), restoring.back(output(), shape())
        assert type(first) is type(second)
        assert before == SUBCLASSES

    def test_tuples_and_dictionaries_are_restored_at_once(self) -> None:
        raw = output()
        loss, logits = Restoring().back((raw["loss"], raw["logits"]), shape())
        assert float(loss) == 3.0
        assert read(logits) == EXPECTED
        assert read(Restoring().back({"a": raw["logits"]}, shape())["a"]) == EXPECTED

    def test_an_output_without_positions_is_left_alone(self) -> None:
        raw = Output(loss=torch.tensor(1.0))
        assert type(Restoring().back(raw, shape())) is Output


class TestShape:
    def test_tensors_that_cannot_be_restored(self) -> None:
        assert shape().problem((torch.ones(()), torch.ones(1, 5, 2))) is None
        assert shape().problem([torch.ones(1, 4, 5, 5)]) == "(1, 4, 5, 5)"
        assert shape().problem([None, "words", (torch.ones(1, 7),)]) == "(1, 7)"


@given(st.integers(1, 4), st.integers(1, 5), st.data())
def test_scattering_undoes_the_taking(rows: int, width: int, data: st.DataObject) -> None:
    total = rows * width
    held = data.draw(st.lists(st.booleans(), min_size=total, max_size=total))
    places = torch.tensor([i for i, h in enumerate(held) if h], dtype=torch.int64)
    batch = torch.arange(1.0, total * 2 + 1).view(rows, width, 2)
    row = batch.view(total, 2)[places]
    filled = torch.cat([row, torch.full((3, 2), 9.0)])[None]
    mask = torch.tensor(held).view(rows, width, 1)
    assert torch.equal(scattered(places, rows, width)(filled), batch * mask)


def test_cropped_columns_are_zeros() -> None:
    restored = zeros_behind(4)(torch.ones(2, 3, 5))
    assert restored.shape == (2, 4, 5)
    assert restored[:, 3].count_nonzero() == 0
    assert restored[:, :3].sum() == 30
