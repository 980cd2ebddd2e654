"""Scripts that leave the training loop to a library: what its own flags for a fix are.

Source: the documentation of Transformers' TrainingArguments (5.17), of Lightning's Trainer (2.5) and of Accelerate's Accelerator (1.11).
"""

from __future__ import annotations

import libcst as cst

from flopwise.patching.script import Script

TRANSFORMERS, LIGHTNING, ACCELERATE = "Transformers' Trainer", "Lightning", "Accelerate"

#: What says that a library trains: full names, or prefixes that end with a dot.
SIGNS = {
    TRANSFORMERS: ("transformers.Trainer", "transformers.Seq2SeqTrainer", "transformers.TrainingArguments", "trl."),
    LIGHTNING: (
        "lightning.Trainer", "lightning.pytorch.Trainer", "pytorch_lightning.Trainer", "lightning.LightningModule",
        "lightning.pytorch.LightningModule", "pytorch_lightning.LightningModule", "lightning.Fabric",
        "lightning.fabric.Fabric", "lightning_fabric.Fabric",
    ),
    ACCELERATE: ("accelerate.Accelerator",),
}  # fmt: skip

#: The flags of each library by fix; what is in braces comes from the fix's setting.
FLAGS = {
    TRANSFORMERS: {
        "loader-workers": "TrainingArguments(dataloader_num_workers={num_workers}, dataloader_persistent_workers=True)",
        "fused-optimizer": 'TrainingArguments(optim="adamw_torch_fused")',
        "bf16-autocast": "TrainingArguments(bf16=True)",
        "compile-model": "TrainingArguments(torch_compile=True)",
        "tf32": "TrainingArguments(tf32=True)",
        "channels-last": "model = model.to(memory_format=torch.channels_last)  # before Trainer(...)",
    },
    LIGHTNING: {
        "loader-workers": "DataLoader(..., num_workers={num_workers}, pin_memory=True, persistent_workers=True)",
        "fused-optimizer": "torch.optim.X(..., fused=True)  # in configure_optimizers; refused beside gradient_clip_val in mixed precision",
        "bf16-autocast": 'Trainer(precision="bf16-mixed")',
        "compile-model": "model = torch.compile(model)  # before trainer.fit(model, ...)",
        "cudnn-benchmark": "Trainer(benchmark=True)",
        "channels-last": "model = model.to(memory_format=torch.channels_last)  # before trainer.fit(model, ...)",
    },
    ACCELERATE: {
        "loader-workers": "DataLoader(..., num_workers={num_workers}, pin_memory=True, persistent_workers=True)",
        "bf16-autocast": 'Accelerator(mixed_precision="bf16")',
        "compile-model": 'Accelerator(dynamo_backend="inductor")',
        "channels-last": "model = model.to(memory_format=torch.channels_last)  # before accelerator.prepare(...)",
    },
}  # fmt: skip


def frameworks(script: Script) -> tuple[str, ...]:
    """Returns the libraries that train in place of the script's own loop."""
    found = []
    bases = [base.value for kind in script.classes for base in kind.bases]
    used: list[cst.CSTNode] = [*(c.func for c in script.calls), *bases]
    names = {n for node in used for n in script.imported(node)}
    for library, signs in SIGNS.items():
        if any(n == s or (s.endswith(".") and n.startswith(s)) for n in names for s in signs):
            found.append(library)
    return tuple(found)


def flags(library: str, rule: str, setting: dict[str, str]) -> str | None:
    """Returns how a library is told to do what a fix does, None where it has no flag for it."""
    line = FLAGS[library].get(rule)
    if line is None:
        return None
    return line.replace("{num_workers}", setting.get("num_workers", "N"))
