"""CPU offload: shards and gradients on the CPU, gathers and reductions elsewhere. Without a GPU the same code runs,
where "elsewhere" is the CPU too.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp
from fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from ragged_shard.dbuffer import DBuffer
from tests import cluster
from tests.fsdp.modules import Stack, data, squares
from tests.fsdp.reference import average_gradients, differences, full, shard_children, twins


def accumulated(hybrid: bool, low: bool) -> list[str]:
    """Reduced micro-batches, reduced within a replica, and unreduced ones; each sum is made beside its place."""
    mesh = cluster.mesh((2, 2), ("replicate", "shard")) if hybrid else cluster.mesh((dist.get_world_size(),))
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {
        "mesh": mesh,
        "offload_policy": CPUOffloadPolicy(),
        "mp_policy": mixed if low else MixedPrecisionPolicy(),
    }
    original, crossed = DBuffer._elsewhere, []

    def elsewhere(self: DBuffer, place: torch.Tensor) -> bool:
        crossed.append(place.numel())
        return True

    grads: list[dict[str, torch.Tensor]] = []
    found: list[str] = []
    for forced in (False, True):
        sharded, plain = twins(Stack, partial(shard_children, **options))
        DBuffer._elsewhere = elsewhere if forced else original
        try:
            for micro in range(3):
                if hybrid:
                    sharded.set_requires_all_reduce(micro != 0)
                else:
                    sharded.set_requires_gradient_sync(micro != 0)
                sharded(data(micro)).float().square().mean().backward()
                squares(plain, micro).backward()
        finally:
            DBuffer._elsewhere = original
        average_gradients(plain)
        if not low:
            found += [f"{forced}: {d}" for d in differences(sharded, plain, 1e-5)]
        grads.append({n: full(p.grad) for n, p in sharded.named_parameters()})
    found += [n for n in grads[0] if not torch.allclose(grads[0][n], grads[1][n], rtol=1e-6, atol=1e-7)]
    return found if crossed else [*found, "nothing crossed"]


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("hybrid", [False, True])
def test_sums_that_are_made_beside_their_place(hybrid: bool, low: bool) -> None:
    world_size = 4 if hybrid else 2
    assert cluster.run(world_size, accumulated, hybrid, low) == [[]] * world_size


@pytest.mark.gpu
@pytest.mark.parametrize("pin_memory", [False, True])
def test_on_a_gpu_shards_and_gradients_stay_on_the_cpu(pin_memory: bool, tmp_path: Path) -> None:
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cuda", (1,))
        options: dict[str, Any] = {"mesh": mesh, "offload_policy": CPUOffloadPolicy(pin_memory=pin_memory)}
        sharded, plain = twins(Stack, partial(shard_children, **options))
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (sharded, plain)]
        for number in range(3):
            sharded(data(number).cuda()).square().mean().backward()
            squares(plain, number).backward()
            assert all(p.device.type == p.grad.device.type == "cpu" for p in sharded.parameters())
            norms = [
                fsdp.clip_grad_norm_(sharded.parameters(), 0.1),
                nn.utils.clip_grad_norm_(plain.parameters(), 0.1),
            ]
            assert norms[0].item() == pytest.approx(norms[1].item(), rel=1e-3)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert differences(sharded, plain, 1e-3) == []
    finally:
        dist.destroy_process_group()
