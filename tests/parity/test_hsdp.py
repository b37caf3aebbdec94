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

from fsdp import MixedPrecisionPolicy, fully_shard
from ragged_shard import Block, ParamPolicy, RaggedShard
from tests import cluster
from tests.fsdp.counting import Counted
from tests.fsdp.modules import Half, Stack, data, squares
from tests.fsdp.reference import average_gradients, differences, full, shard_children, train, twins


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


def exact_integers() -> list[str]:
    """Integer-valued sums have no order: as plain averaging, to the bit (pytorch/pytorch#155903)."""

    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 10), nn.Linear(10, 3)
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.copy_(torch.randint(-3, 4, parameter.shape))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x).relu())

    def loss_of(model: nn.Module) -> torch.Tensor:
        generator = torch.Generator().manual_seed(dist.get_rank())
        return model(torch.randint(-2, 3, (4, 6), generator=generator).float()).sum()

    def with_mesh(model: nn.Module, mesh: Any) -> nn.Module:
        fully_shard(model.a, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    found = []
    for which in (mesh(), cluster.mesh((4,))):
        sharded, plain = twins(Linear, partial(with_mesh, mesh=which))
        for model in (sharded, plain):
            loss_of(model).backward()
            loss_of(model).backward()
        average_gradients(plain)
        found += differences(sharded, plain)
    return found


def test_gradients_are_bit_identical_where_sums_are_exact() -> None:
    check(4, exact_integers)


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


def accumulated(factor: float | None, reduce_replicas_each: bool) -> list[str]:
    """Micro-batches: none reduced, or reduced among shards alone until the last (set_requires_all_reduce)."""
    sharded, plain = twins(Stack, hybrid)
    if factor is not None:
        for module in sharded.modules():
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(factor)
    for micro in range(3):
        last = micro == 2
        if reduce_replicas_each:
            sharded.set_requires_gradient_sync(last)
        else:
            sharded.set_requires_all_reduce(last)
        squares(sharded, micro).backward()
        squares(plain, micro).backward()
    average_gradients(plain, factor)
    return differences(sharded, plain, 1e-5)


@pytest.mark.parametrize("factor", [None, 2.0])
@pytest.mark.parametrize("reduce_replicas_each", [True, False])
def test_accumulation(factor: float | None, reduce_replicas_each: bool) -> None:
    """pytorch/pytorch#194628, #155903, #125484."""
    check(4, accumulated, factor, reduce_replicas_each)


def bfloat16_accumulation() -> list[str]:
    """Partial sums between reduce-scatter and all-reduce stay in reduce_dtype: fp32 sums of eight bf16 micro-batches
    are as good as those of one dimension.
    """
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    grads = []
    for which in (mesh(), cluster.mesh((4,))):
        torch.manual_seed(0)
        model = shard_children(Stack(), mesh=which, mp_policy=policy)
        for micro in range(8):
            if which.ndim == 2:
                model.set_requires_all_reduce(micro == 7)
            model(data(micro)).float().square().mean().backward()
        grads.append({n: full(p.grad) for n, p in model.named_parameters()})
    found = []
    for name, one in grads[0].items():
        worst = (one - grads[1][name]).abs().max() / one.abs().max()
        if not worst < 1e-5:
            found.append(f"{name}: {worst}")
    return found


def test_partial_sums_stay_in_the_reduction_dtype() -> None:
    check(4, bfloat16_accumulation)


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
