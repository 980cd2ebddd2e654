"""The scaler in frameworks that take a GradScaler: what they train is what they train with torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.data import DataLoader, TensorDataset

from flopwise.kit.precision import DynamicScaler

pytestmark = pytest.mark.filterwarnings("ignore")  # the frameworks' own


def scalers() -> list[GradScaler]:
    """Returns torch's scaler, ours on its schedule, and ours on its own."""
    options: dict[str, Any] = {"init_scale": 1024.0, "growth_interval": 3}
    return [
        GradScaler("cpu", **options),
        DynamicScaler("cpu", schedule="growth", **options),
        DynamicScaler("cpu", review_steps=4),
    ]


def test_lightning_takes_it() -> None:
    pl = pytest.importorskip("pytorch_lightning", reason="needs pytorch-lightning")
    plugins = pytest.importorskip("pytorch_lightning.plugins")

    class Model(pl.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = self.layer(batch[0]).float().square().mean()
            return loss * (float("inf") if index == 3 else 1.0)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-2)

    def trained(scaler: GradScaler) -> torch.Tensor:
        torch.manual_seed(0)
        model = Model()
        x = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
        trainer = pl.Trainer(
            accelerator="cpu",
            max_epochs=1,
            plugins=[plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            gradient_clip_val=0.5,
            accumulate_grad_batches=2,
        )
        trainer.fit(model, DataLoader(TensorDataset(x), 4))
        return model.layer.weight.detach()

    theirs, growing, following = (trained(scaler) for scaler in scalers())
    assert torch.equal(growing, theirs)
    assert torch.equal(following, theirs)


def test_accelerate_takes_it_and_sees_skipped_steps() -> None:
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate")

    def trained(scaler: GradScaler) -> tuple[torch.Tensor, list[bool], list[float]]:
        torch.manual_seed(0)
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        accelerator.scaler = scaler
        model = nn.Linear(8, 4)
        plain = torch.optim.AdamW(model.parameters(), 1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(plain, 1, 0.9)
        model, optimizer, schedule = accelerator.prepare(model, plain, schedule)
        x = torch.randn(20, 4, 8, generator=torch.Generator().manual_seed(0))
        skipped = []
        for i in range(20):
            with accelerator.accumulate(model):
                loss = model(x[i]).square().mean() * (float("inf") if i == 7 else 1.0)
                scaler.scale(loss / 2).backward()
                if accelerator.sync_gradients:
                    scaler.unscale_(plain)
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                skipped.append(optimizer.step_was_skipped)
        return model.weight.detach(), skipped, schedule.get_last_lr()

    theirs, growing, following = (trained(scaler) for scaler in scalers())
    assert any(theirs[1])
    for ours in (growing, following):
        assert torch.equal(ours[0], theirs[0])
        assert ours[1:] == theirs[1:]
