"""Fixes within the loops of Transformers' Trainer (Accelerate under it) and of Lightning, where they are installed.

Each is checked, applied, compared and switched between the steps of a real training, at the place in which the trials
do so; and what the training leaves behind is what it leaves behind without.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.utils.data import DataLoader, Dataset

from flopwise.fixes import application
from flopwise.fixes.application import facts_of, scene_of
from flopwise.fixes.catalog.bf16_autocast import Bf16Autocast
from flopwise.fixes.catalog.chunked_loss import ChunkedLoss
from flopwise.fixes.catalog.fused_optimizer import FusedOptimizer
from flopwise.fixes.catalog.labelled_logits import LabelledLogits
from flopwise.fixes.catalog.loader_workers import LoaderWorkers
from flopwise.fixes.interface import Declined, Facts, Fix
from flopwise.meter.config import Config
from flopwise.meter.session import Session

#: What the libraries say about themselves is not what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore")

VOCABULARY, LENGTH = 1100, 32


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Accelerate keeps the precision of a process in one state, and TrainingArguments (4.57) in the environment."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    yield
    if "accelerate" in sys.modules:
        import_module("accelerate.state").AcceleratorState._reset_state(reset_partial_state=True)


def needed(*names: str) -> None:
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed")


class Text(Dataset[Any]):
    """Pieces of a text; `as_pairs`: with the tokens that come next, else with labels."""

    def __init__(self, as_pairs: bool, count: int = 2000) -> None:
        self.tokens = torch.randint(
            5, VOCABULARY, (5000,), generator=torch.Generator().manual_seed(0)
        )
        self.as_pairs, self.count = as_pairs, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Any:
        piece = self.tokens[i : i + LENGTH + 1]
        if self.as_pairs:
            return piece[:-1], piece[1:]
        return {"input_ids": piece[:-1], "labels": piece[:-1]}


@dataclasses.dataclass
class Seen:
    """What became of one fix."""

    answer: Any
    parity: Any = None
    failure: str | None = None
    settled: bool = False


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    """What other tests of this process have compiled would pass for the script's own."""
    torch._dynamo.reset()


class Trying:
    """Tries fixes between the steps of a training, one after another."""

    def __init__(self, *fixes: type[Fix]) -> None:
        self.fixes, self.seen = fixes, dict[str, Seen]()
        self.facts, self.forwards, self.done = Facts(), list[str](), False
        self._steps: Iterator[None] | None = None

    def __call__(self, session: Session, row: Any) -> None:
        if self._steps is None:
            self._steps = self._all(session)
        if next(self._steps, "over") == "over":
            session.observers.remove(self)

    def _all(self, session: Session) -> Iterator[None]:
        while not (session.boundaries_known() and session.roots.settled):
            yield
        self.facts = facts_of(session, session.roots.autocast)
        self.forwards = [type(m).__name__ for m in session.roots.forwards]
        session.roots.keep_inputs = True
        yield
        yield
        snapshot = session.roots.take_inputs()
        assert snapshot is not None
        session.roots.look_away()
        for kind in self.fixes:
            shares = {"data_frac": 0.5, "compute_frac": 0.4, "optimizer_frac": 0.1}
            scene = dataclasses.replace(scene_of(session), facts=self.facts, cores=3, **shares)
            seen = self.seen[kind.name] = Seen(kind().check(scene))
            if isinstance(seen.answer, Declined):
                continue
            applied = kind().apply(scene)
            for _ in range(10):
                yield
                if applied.ready():
                    break
            session.live = False
            seen.parity = applied.verify(snapshot)
            session.live = True
            applied.enable()
            for _ in range(12):
                yield
                if applied.settled():
                    break
            seen.settled = applied.settled()
            applied.disable()
            yield
            applied.enable()
            yield
            seen.failure = applied.failure()
            applied.undo()
            yield
        session.roots.watch_again()
        self.done = True


def metered(train: Callable[[], Any], *observers: Any, plan: Any = ()) -> Session:
    """Runs a training under the meter."""
    session = Session(Config(steps=10_000, warmup=3))
    if plan:
        application.install(session, plan)
    session.observers.extend(observers)
    session.attach()
    try:
        train()
    finally:
        session.detach()
    return session


# ---------------------------------------------------------------------- Trainer


def trainer(folder: Path, steps: int = 60, until: Any = None, **more: Any) -> Any:
    """Returns a Trainer of a small GPT-2."""
    needed("transformers", "accelerate")
    library = import_module("transformers")
    library.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = library.GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip

    class Stop(library.TrainerCallback):  # type: ignore[name-defined, misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop |= until is not None and until.done

    arguments = {
        "optim": "adamw_torch",
        "per_device_train_batch_size": 4,
        "save_steps": 5,
        "save_total_limit": 1,
    }
    made = library.Trainer(
        model=library.GPT2LMHeadModel(config),
        args=library.TrainingArguments(
            str(folder), max_steps=steps, report_to="none", use_cpu=True, disable_tqdm=True, logging_steps=5,
            **{**arguments, **more},
        ),
        train_dataset=Text(as_pairs=False),
        callbacks=[Stop()],
    )  # fmt: skip
    made.remove_callback(library.PrinterCallback)
    return made


TRIED = (LoaderWorkers, FusedOptimizer, Bf16Autocast, LabelledLogits, ChunkedLoss)


@pytest.mark.parametrize(
    "more", [{}, {"gradient_accumulation_steps": 2}], ids=["plain", "two batches a step"]
)
def test_fixes_within_trainer(tmp_path: Path, more: dict[str, Any]) -> None:
    trying = Trying(*TRIED)
    metered(trainer(tmp_path, 400, trying, **more).train, trying)
    assert trying.done
    assert trying.forwards == ["GPT2LMHeadModel"]
    labelled = trying.seen.pop("labelled-logits")
    assert "100% of the places have a label" in labelled.parity.detail
    for name, seen in trying.seen.items():
        assert not isinstance(seen.answer, Declined), (name, seen.answer)
        assert seen.parity.passed, (name, seen.parity.detail)
        assert (seen.failure, seen.settled) == (None, True), name


def test_mixed_precision_of_trainer_is_seen_and_not_doubled(tmp_path: Path) -> None:
    trying = Trying(Bf16Autocast, ChunkedLoss)
    metered(trainer(tmp_path, 400, trying, bf16=True).train, trying)
    assert trying.facts.autocast
    assert "mixed precision itself" in trying.seen["bf16-autocast"].answer.reason
    assert trying.seen["chunked-loss"].parity.passed


def test_samples_of_trainer_are_the_same_with_workers(tmp_path: Path) -> None:
    """Two epochs and a bit: Accelerate seeds its sampler anew in each."""
    dataset = Text(as_pairs=False, count=64)

    def drawn(folder: Path, plan: Any) -> list[torch.Tensor]:
        made = trainer(folder, 40, save_strategy="no")
        made.train_dataset = dataset
        seen: list[torch.Tensor] = []
        made.model.register_forward_pre_hook(
            lambda module, args, given: seen.append(given["input_ids"].clone()), with_kwargs=True
        )
        notes = metered(made.train, plan=plan).notes
        assert all("left out" not in note for note in notes), notes
        return seen

    match = "Text, batch None, SequentialSampler"
    setting = {"num_workers": "1", "pin_memory": "false", "persistent_workers": "true", "match": match, "had_workers": "0"}  # fmt: skip
    bare = drawn(tmp_path / "bare", ())
    ours = drawn(tmp_path / "ours", [{"code": "FW101", "setting": setting}])
    assert len(bare) == len(ours) == 40
    assert all(torch.equal(a, b) for a, b in zip(bare, ours, strict=True))


def test_what_trainer_saves_with_a_plan_loads_without_one(tmp_path: Path) -> None:
    needed("safetensors")
    plan = [
        {"code": "FW102", "setting": {"fused": "true"}},
        {"code": "FW104", "setting": {"dtype": "bfloat16"}},
    ]
    made = trainer(tmp_path / "ours", 20)
    session = metered(made.train, plan=plan)
    assert "applied by the plan: FW102 fused-optimizer, FW104 bf16-autocast" in session.notes
    last = sorted((tmp_path / "ours").glob("checkpoint-*"))[-1]
    optimizer = torch.load(last / "optimizer.pt", weights_only=True)
    assert not any(group.get("fused") for group in optimizer["param_groups"])
    weights = import_module("safetensors.torch").load_file(last / "model.safetensors")
    assert {w.dtype for w in weights.values()} == {torch.float32}
    again = trainer(tmp_path / "again", 24)
    again.train(resume_from_checkpoint=str(last))
    assert again.state.global_step == 24


# ---------------------------------------------------------------------- Lightning


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner, self.head = (
            nn.Embedding(VOCABULARY, 32), nn.Linear(32, 32), nn.Linear(32, VOCABULARY)
        )  # fmt: skip

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.inner(self.embed(ids)).relu())
        return logits


def lightning(folder: Path, until: Any = None, **more: Any) -> Callable[[], Any]:
    """Returns what trains a small net by Lightning, gradients clipped."""
    needed("lightning")
    library = import_module("lightning")

    class Task(library.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            ids, targets = batch
            loss = nn.functional.cross_entropy(self.net(ids).flatten(0, 1), targets.flatten())
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    class Stop(library.Callback):  # type: ignore[name-defined, misc]
        def on_train_batch_end(self, running: Any, *_: Any) -> None:
            running.should_stop |= until is not None and until.done

    torch.manual_seed(0)
    running = library.Trainer(
        max_steps=400, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, callbacks=[Stop()],
        enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0, default_root_dir=folder, **more,
    )  # fmt: skip
    return lambda: running.fit(Task(), DataLoader(Text(as_pairs=True), 4, shuffle=True))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_fixes_within_lightning(tmp_path: Path, precision: str) -> None:
    """Clipping in mixed precision is what Lightning refuses for an optimizer that says it unscales."""
    trying = Trying(LoaderWorkers, FusedOptimizer, Bf16Autocast)
    metered(lightning(tmp_path, trying, precision=precision), trying)
    assert trying.done
    assert trying.forwards == ["Net"]
    assert trying.facts.autocast == (precision == "bf16-mixed")
    if precision == "bf16-mixed":
        assert "mixed precision itself" in trying.seen.pop("bf16-autocast").answer.reason
    for name, seen in trying.seen.items():
        assert not isinstance(seen.answer, Declined), (name, seen.answer)
        assert seen.parity.passed, (name, seen.parity.detail)
        assert (seen.failure, seen.settled) == (None, True), name
