"""Uneven communication was an open request: no way to keep a tensor whole on one rank through forward, backward and
optimizer, so that Muon needs no communication (NVIDIA/Megatron-LM#6587, NVIDIA/Megatron-LM#7396,
NVIDIA/Megatron-LM#6161).
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ragged_optim import Muon, policies
from ragged_shard import Block, ParamPolicy
from tests import cluster
from tests.fsdp.counting import Counted
from tests.fsdp.modules import Stack, squares
from tests.fsdp.reference import average_gradients, differences, shard_children, twins


def whole(name: str, parameter: nn.Parameter) -> ParamPolicy:
    return ParamPolicy(block=Block.whole())


def muon(model: nn.Module) -> Muon:
    return Muon(model.named_parameters(), orig_param_policy=policies.muon(), lr=0.02)


def trained() -> list[str]:
    sharded, plain = twins(Stack, partial(shard_children, orig_param_policy=whole))
    found = []
    for name, parameter in sharded.named_parameters():
        here = parameter.to_local().numel()
        holders = torch.tensor([here == parameter.numel()], dtype=torch.int64)
        dist.all_reduce(holders)
        if holders.item() != 1 or here not in (0, parameter.numel()):
            found.append(f"{name}: {holders.item()} ranks hold all of it")
    optimizers = [muon(model) for model in (sharded, plain)]
    for number in range(3):
        for model in (sharded, plain):
            squares(model, number).backward()
        average_gradients(plain)
        with Counted() as counted:
            optimizers[0].step()
        optimizers[1].step()
        # Ranks agree on which gradients are there; no matrix travels.
        moved = [one for one in counted.collectives if one[1] > 64]
        found += [f"step {number}: {d}" for d in [*differences(sharded, plain, 1e-5), *moved]]
        for optimizer in optimizers:
            optimizer.zero_grad()
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_whole_tensors_on_one_rank_train_and_muon_moves_nothing(world_size: int) -> None:
    assert cluster.run(world_size, trained) == [[]] * world_size
