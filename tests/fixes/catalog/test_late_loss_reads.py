"""Reads of a loss that are answered with the value of the step before, on a CPU in the place of a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from flopwise.fixes.batches import LAYERS
from flopwise.fixes.catalog.late_loss_reads import WATCHED_STEPS, LateLossReads, _Applied
from flopwise.fixes.interface import Declined, Eligible, Scene
from flopwise.meter.replay import Snapshot

pytestmark = [
    pytest.mark.skipif(
        sys.version_info < (3, 11), reason="no positions of instructions before Python 3.11"
    ),
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad"),  # torch's own
]


class Numbers(Dataset[torch.Tensor]):
    def __init__(self, n: int) -> None:
        self._n = n

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((2,), float(i + 1))


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.full((9, 2), 1.0))


def scene(loader: Any, *optimizers: Any, **more: Any) -> Scene:
    given: dict[str, Any] = {
        "findings": {"D201": 0.05}, "step_s": 1.0, "device": torch.device("cuda"), "loaders": (loader,), **more
    }  # fmt: skip
    return Scene(optimizers=optimizers, **given)


SCRIPT = """
def train(model, optimizer, loader, shown, at_end):
    for batch in loader:
        loss = model(batch).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        {line}
    at_end()
"""


class Training:
    """A script of its own file, whose losses do not depend on its weights: 1, 2, 3, ..."""

    def __init__(self, folder: Path, line: str, n: int = 8, loader: Any = None) -> None:
        path = folder / "train.py"
        path.write_text(SCRIPT.format(line=line))
        space: dict[str, Any] = {}
        exec(compile(path.read_text(), str(path), "exec", dont_inherit=True), space)
        self._train: Callable[..., None] = space["train"]
        self.model = Weighted()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.loader = DataLoader(Numbers(n), batch_size=1) if loader is None else loader
        self.shown: list[Any] = []

    def epoch(self) -> list[Any]:
        self.shown.clear()
        self._train(self.model, self.optimizer, self.loader, self.shown, lambda: None)
        return list(self.shown)


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = {name: vars(torch.Tensor).get(name) for name in ("item", "__float__", "__format__")}
    yield
    assert {name: vars(torch.Tensor).get(name) for name in before} == before
    assert not LAYERS._layers


EXACT = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
LATE = [1.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0]


class TestDeclines:
    @pytest.mark.parametrize(
        ("more", "reason"),
        [
            ({"findings": {}}, "no read of a value was found"),
            ({"device": torch.device("cpu")}, "waits for a CUDA device only"),
            ({"loaders": (DataLoader(Stream()),)}, "the length of an epoch is not known"),
            ({"optimizers": ()}, "0 optimizers train"),
        ],
    )
    def test_with_a_reason(self, more: dict[str, Any], reason: str) -> None:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        given = {"optimizers": (optimizer,), **more}
        optimizers = given.pop("optimizers")
        answer = LateLossReads().check(scene(DataLoader(Numbers(3)), *optimizers, **given))
        assert isinstance(answer, Declined)
        assert reason in answer.reason

    def test_not_otherwise(self) -> None:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        given = scene(DataLoader(Numbers(3)), optimizer)
        assert isinstance(LateLossReads().check(given), Eligible)
        planned = scene(DataLoader(Numbers(3)), optimizer, step_s=None, findings={})
        assert isinstance(LateLossReads().check(planned), Eligible)


def watched(training: Training) -> Any:
    """The fix, after a first epoch in which places were looked for."""
    applied = _Applied(training.optimizer, "cpu")
    assert training.epoch() == EXACT
    assert applied.ready()
    return applied


class TestReads:
    @pytest.mark.parametrize(
        "line",
        [
            "shown.append(loss.item())",
            "shown.append(float(loss))",
            "shown.append(float(f'{loss:.2f}'))",
            "value = loss.item(); shown.append(value)",
        ],
    )
    def test_are_one_step_late_but_for_the_first_and_the_last(
        self, tmp_path: Path, line: str
    ) -> None:
        training = Training(tmp_path, line)
        applied = watched(training)
        assert applied.failure() is None
        assert applied.setting["places"].endswith("train.py:8")
        assert training.epoch() == EXACT  # off
        parity = applied.verify(Snapshot(training.model))
        assert parity.passed
        applied.enable()
        assert not applied.settled()
        assert training.epoch() == LATE
        assert training.epoch() == LATE
        assert applied.settled()
        applied.disable()
        assert training.epoch() == EXACT
        applied.undo()

    def test_before_the_backward_too(self, tmp_path: Path) -> None:
        training = Training(tmp_path, "pass")
        path = tmp_path / "train.py"
        path.write_text(
            SCRIPT.format(line="pass").replace(
                "loss.backward()", "shown.append(loss.item()); loss.backward()"
            )
        )
        space: dict[str, Any] = {}
        exec(compile(path.read_text(), str(path), "exec", dont_inherit=True), space)
        training._train = space["train"]
        applied = watched(training)
        applied.enable()
        assert training.epoch() == LATE
        applied.undo()

    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            ("shown.append(loss.item() if loss.item() < 9 else 0)", "decides by it"),
            ("shown.append(loss.detach().item())", "no line of the script was seen"),
            ("shown.append(loss.item()) if loss.item() else 0", "decides by it"),
            ("shown.extend(loss.item() for _ in range(1))", "decides by it, or gives it on"),
        ],
    )
    def test_of_values_that_may_decide_are_exact(
        self, tmp_path: Path, line: str, reason: str
    ) -> None:
        training = Training(tmp_path, line)
        applied = watched(training)
        applied.enable()
        assert training.epoch() == EXACT
        assert reason in str(applied.failure())
        applied.undo()

    def test_of_every_other_step_are_exact(self, tmp_path: Path) -> None:
        line = "if int(batch[0, 0]) % 2: shown.append(loss.item())"
        training = Training(tmp_path, line)
        applied = _Applied(training.optimizer, "cpu")
        training.epoch()
        assert applied.ready()
        assert "not read in every step" in str(applied.failure())
        applied.undo()
        applied = _Applied(training.optimizer, "cpu")
        applied.enable()  # as by a plan
        assert training.epoch() == [1.0, 3.0, 5.0, 7.0]
        applied.undo()

    def test_of_a_place_that_is_read_twice_a_step_are_exact(self, tmp_path: Path) -> None:
        training = Training(
            tmp_path, "[None for _ in shown]\n        for _ in range(2): shown.append(loss.item())"
        )
        applied = _Applied(training.optimizer, "cpu")
        applied.enable()
        assert training.epoch() == [n for n in EXACT for _ in range(2)]
        applied.undo()

    def test_of_an_epoch_whose_length_is_not_known_are_exact(self, tmp_path: Path) -> None:
        training = Training(
            tmp_path, "shown.append(loss.item())", loader=DataLoader(Stream(), batch_size=1)
        )
        applied = _Applied(training.optimizer, "cpu")
        training.epoch()
        assert applied.ready()
        assert applied.failure() == "the length of an epoch is not known"
        applied.undo()

    def test_of_batches_from_elsewhere_are_exact(self, tmp_path: Path) -> None:
        training = Training(tmp_path, "shown.append(loss.item())")
        training.loader = [torch.full((1, 2), n) for n in EXACT]  # type: ignore[assignment]
        applied = _Applied(training.optimizer, "cpu")
        assert training.epoch() == EXACT
        assert applied.ready()
        assert applied.failure() == "no batch was seen to come from a DataLoader"
        applied.undo()

    def test_in_another_library_or_in_torch_are_exact(self) -> None:
        training = _Applied(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1), "cpu")
        loss = torch.ones(2, requires_grad=True).sum()
        assert torch.allclose(loss, torch.tensor(2.0))
        assert not training.reads.places
        training.undo()

    def test_of_other_tensors_and_with_arguments_pass_through(self) -> None:
        applied = _Applied(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1), "cpu")
        applied.enable()
        assert torch.tensor(3).item() == 3
        assert float(torch.tensor(2.5)) == 2.5
        with pytest.raises(RuntimeError, match="elements"):
            torch.ones(2, requires_grad=True).mul(2).item()
        assert f"{torch.ones(2)}" == "tensor([1., 1.])"
        assert f"{torch.tensor(2.5):.2f}" == "2.50"
        with pytest.raises(TypeError):
            torch.tensor(3).item(1, 2)  # type: ignore[call-arg]
        assert torch.Tensor.item == vars(torch._C.TensorBase)["item"]
        applied.undo()

    def test_watching_ends_by_itself(self, tmp_path: Path) -> None:
        training = Training(tmp_path, "shown.append(loss.item())", n=WATCHED_STEPS - 1)
        applied = _Applied(training.optimizer, "cpu")
        training.epoch()
        assert not applied.ready()
        training.epoch()
        assert applied.ready()
        assert "item" not in vars(torch.Tensor)
        applied.undo()
        applied.undo()
