"""HSDP: a 2x2 mesh of replicas and shards trains as four ranks of DDP and as one dimension of four shards do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate
from torch.nn.parallel import DistributedDataParallel

from fsdp import fully_shard
from ragged_shard import Block, ParamPolicy, RaggedShard
from tests import cluster
from tests.fsdp.counting import Counted
from tests.fsdp.modules import Half, Stack, squares
from tests.fsdp.reference import average_gradients, differences, shard_children, train, twins


def check(world_size: int, function: Callable[..., list[str]], *args: Any, **kwargs: Any) -> None:
    assert cluster.run(world_size, function, *args, **kwargs) == [[]] * world_size


def mesh() -> Any:
    return cluster.mesh((2, 2), ("replicate", "shard"))


def hybrid(model: nn.Module, **options: Any) -> nn.Module:
    return shard_children(model, mesh=mesh(), **options)


def against_ddp(reshard_after_forward: bool | None, block: Block | None) -> list[str]:
    policy = None if block is None else lambda name, parameter: ParamPolicy(block=block)
    torch.manual_seed(0)
    plain = Stack()
    sharded = hybrid(copy.deepcopy(plain), reshard_after_forward=reshard_after_forward, orig_param_policy=policy)
    ddp = DistributedDataParallel(plain)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=True) for m in (sharded, plain)]
    found = []
    for number in range(3):
        losses = []
        for model in (sharded, ddp):
            loss = squares(model, number)
            loss.backward()
            losses.append(loss.item())
        if losses[0] != pytest.approx(losses[1], rel=1e-5):
            found.append(f"step {number}: {losses}")
        found += [f"step {number}: {d}" for d in differences(sharded, plain, 1e-5)]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return found


@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
def test_a_2x2_mesh_trains_as_ddp_on_four_ranks(reshard_after_forward: bool | None) -> None:
    check(4, against_ddp, reshard_after_forward, Block.rows(3))


def placements() -> list[str]:
    model = hybrid(Stack())
    squares(model).backward()
    found = []
    for name, parameter in model.named_parameters():
        for tensor in (parameter, parameter.grad):
            replicate, shard = tensor.placements
            if not isinstance(replicate, Replicate) or not isinstance(shard, RaggedShard):
                found.append(f"{name}: {tensor.placements}")
            if tensor.device_mesh != mesh():
                found.append(f"{name}: mesh {tensor.device_mesh}")
    return found


def test_placements_are_replicate_and_ragged() -> None:
    check(4, placements)


def unused() -> list[str]:
    """Ranks of different replicas and shards use different parameters."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Half() for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    sharded, plain = twins(Model, hybrid)
    found = []
    for by_rank in (("one", "one", "one", "two"), ("two",) * 4, ("both", "one", "two", "one")):
        for model in (sharded, plain):
            model.zero_grad()
            for block in model.blocks:
                block.use = by_rank[dist.get_rank()]
            squares(model).backward()
        average_gradients(plain)
        found += [f"{by_rank}: {d}" for d in differences(sharded, plain, 1e-6)]
    return found


def test_unused_parameters_that_differ_between_ranks() -> None:
    check(4, unused)


def clipped() -> list[str]:
    sharded, plain = twins(Stack, hybrid)
    for model in (sharded, plain):
        squares(model).backward()
    average_gradients(plain)
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.05) for m in (sharded, plain)]
    found = [] if norms[0].item() == pytest.approx(norms[1].item(), rel=1e-5) else [f"norms {norms}"]
    return found + differences(sharded, plain, 1e-6)


def test_clipping_counts_replicas_once() -> None:
    check(4, clipped)


def gathers_stay_inside_a_replica() -> list[str]:
    model = hybrid(Stack(), reshard_after_forward=True)
    squares(model).backward()
    with Counted() as counted:
        squares(model).backward()
    gathers = counted.gathers(2)
    reduces = sum(name.startswith("allreduce") and size > 64 for name, size in counted.collectives)
    return [] if (gathers, reduces) == (8, 4) else [f"{gathers} gathers, {reduces} all-reduces"]


def test_parameters_are_gathered_inside_a_replica() -> None:
    """Only reduced chunks travel between replicas."""
    check(4, gathers_stay_inside_a_replica)


def mixed() -> list[str]:
    """Blocks on the 2x2 mesh, the root on all four ranks."""

    def shard(model: nn.Module) -> nn.Module:
        for block in model.blocks:
            fully_shard(block, mesh=mesh())
        return fully_shard(model, mesh=cluster.mesh((4,)))

    return train(Stack, squares, shard, tolerance=1e-5)


def test_a_mesh_per_module() -> None:
    check(4, mixed)


def degenerate(shape: tuple[int, int]) -> list[str]:
    """(n, 1): replicas alone, DDP; (1, n): shards alone."""
    return train(
        Stack, squares, partial(shard_children, mesh=cluster.mesh(shape, ("replicate", "shard"))), tolerance=1e-5
    )


@pytest.mark.parametrize("shape", [(2, 1), (1, 2), (3, 1)])
def test_degenerate_meshes(shape: tuple[int, int]) -> None:
    check(shape[0] * shape[1], degenerate, shape)
