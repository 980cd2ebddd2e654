"""The check of gradients, alone and over two ranks."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flopwise.kit.precision.checking import check, check_and_unscale, group_of, share

CPU = torch.device("cpu")


def test_a_check_alone_reads_and_writes_nothing() -> None:
    grads = [torch.tensor([1.0, -3.0]), torch.tensor([2.0]).half()]
    versions = [g._version for g in grads]
    found, amaxes = check(grads, CPU)
    assert {k: v.item() for k, v in found.items()} == {CPU: 0.0}
    assert [a.item() for a in amaxes] == [3.0]
    assert [g._version for g in grads] == versions


def test_unscaling_multiplies_and_gives_the_size_before() -> None:
    grads, found_inf = [torch.tensor([1.0, -3.0])], torch.zeros(())
    found, amaxes = check_and_unscale(grads, found_inf, torch.tensor(0.25))
    assert found[CPU] is found_inf
    assert grads[0].tolist() == [0.25, -0.75]
    assert [a.item() for a in amaxes] == [3.0]


def test_without_a_look_magnitudes_say_only_whether_all_is_finite() -> None:
    for value, found_inf, amax in (
        (3.0, 0.0, 0.0),
        (math.inf, 1.0, math.inf),
        (math.nan, 1.0, math.inf),
    ):
        grads = [torch.tensor([1.0, value]), torch.tensor([2.0], dtype=torch.float64)]
        found, amaxes = check_and_unscale(grads, torch.zeros(()), torch.tensor(0.25), look=False)
        assert {k: v.item() for k, v in found.items()} == {CPU: found_inf}
        assert [a.item() for a in amaxes] == [amax]
        assert grads[0][0].item() == 0.25
        found, amaxes = check([torch.tensor([1.0, value])], CPU, look=False)
        assert {k: v.item() for k, v in found.items()} == {CPU: found_inf}
        assert [a.item() for a in amaxes] == [amax]


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_anything_not_finite_is_found_alike(bad: float, at: int) -> None:
    def grads() -> list[torch.Tensor]:
        values = [torch.ones(2, 3), torch.ones(5), torch.ones(1)]
        values[at].view(-1)[-1] = bad
        return values

    for found, amaxes in (
        check(grads(), CPU),
        check_and_unscale(grads(), torch.zeros(()), torch.tensor(0.5)),
    ):
        assert found[CPU].item() == 1.0
        assert not math.isfinite(amaxes[0].item())


def test_empty_gradients_are_finite() -> None:
    for found, amaxes in (
        check([torch.empty(0)], CPU),
        check_and_unscale([torch.empty(0)], torch.zeros(()), torch.tensor(0.5)),
    ):
        assert (found[CPU].item(), [a.item() for a in amaxes]) == (0.0, [0.0])


def test_a_group_is_what_was_asked_for_or_that_of_shards(one_rank: None) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    assert group_of(optimizer, None) is None
    assert group_of(optimizer, True) is True
    sharded: Any = nn.Parameter(torch.ones(1))
    sharded.to_local = lambda: sharded
    assert group_of(torch.optim.SGD([sharded], 0.1), None) is True


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_sharing_says_inf_for_anything_not_finite(one_rank: None, bad: float) -> None:
    found, amaxes = share(True, check([torch.tensor([bad])], CPU), CPU)
    assert (found[CPU].item(), [a.item() for a in amaxes]) == (1.0, [math.inf])


def test_a_rank_without_gradients_takes_part(one_rank: None) -> None:
    found, amaxes = share(True, ({}, []), CPU)
    assert (found[CPU].item(), [a.item() for a in amaxes]) == (0.0, [0.0])


RANK = """
import os, sys, torch
from torch import nn
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from flopwise.kit.precision import DynamicScaler

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
weight = nn.Parameter(torch.zeros(2))  # each rank its own shard
kind, group = sys.argv[3], True
params = [weight]
if kind == "fsdp":
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(4))
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    params, weight, group = [module.weight], module.weight.to_local(), None
optimizer = torch.optim.SGD(params, 1.0, fused=kind == "fused")
scaler = DynamicScaler("cpu", process_group=group, review_steps=4)
seen = []
for step in range(12):
    optimizer.zero_grad()
    if not (rank == 1 and step == 7):  # a rank without gradients
        size = float("inf") if (rank, step) == (1, 2) else float(10 ** rank)
        if kind == "fsdp":  # each rank has its own shard of one gradient
            gradient = torch.full((2,), size) * scaler.scale(torch.ones(())).item()
            mesh, placements = params[0].device_mesh, params[0].placements
            params[0].grad = DTensor.from_local(gradient, mesh, placements)
        else:
            scaler.scale((weight * size).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    seen.append((scaler.get_scale(), scaler.skipped))
print(seen, weight.tolist(), flush=True)
dist.barrier()
os._exit(0)  # Gloo's threads can abort a process that ends in order
"""


@pytest.mark.parametrize("kind", ["fused", "plain", "fsdp"])
def test_two_ranks_skip_together_and_choose_one_scale(kind: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path), kind],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outs = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outs
    first, second = ("(" + out.strip().replace("] [", "], [") + ")" for out, _ in outs)
    (seen, weight), (others, other_weight) = eval(first), eval(second)
    assert seen == others
    # 512 after the skip of step 2; 65504 / 16 / 10 = 409, so 256 from the first review on
    assert [scale for scale, _ in seen] == [1024.0, 1024.0, 512.0, *[256.0] * 9]
    assert seen[-1][1] == 1
    # eleven steps, of which the second rank had ten with a gradient
    assert weight == [-11.0, -11.0]
    assert other_weight == [-100.0, -100.0]
