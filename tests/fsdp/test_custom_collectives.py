"""Collectives of the user's own, a hook on reduced gradients, and a group of its own for reductions."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FSDPModule
from fsdp.hooks import state_of
from tests import cluster
from tests.fsdp.modules import Stack, squares
from tests.fsdp.reference import average_gradients, differences, shard_children, train, twins


class Gather:
    """As torch's AllGather: called with an output, this rank's slot of it, and a group."""

    def __init__(self) -> None:
        self.calls = 0

    def allocate(self, *args: Any, **kwargs: Any) -> Tensor:
        raise AssertionError("memory comes from the pool")

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        self.calls += 1
        own = output_tensor.chunk(group.size())[group.rank()]
        assert input_tensor.data_ptr() == own.data_ptr()
        return dist.all_gather_into_tensor(output_tensor, input_tensor.clone(), group=group, async_op=async_op)


class Reduce:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        self.calls += 1
        assert op == dist.ReduceOp.SUM
        return dist.reduce_scatter_tensor(output_tensor, input_tensor.clone(), op, group=group, async_op=async_op)


def customised(hybrid: bool) -> list[str]:
    mesh = cluster.mesh((2, 2), ("replicate", "shard")) if hybrid else cluster.mesh((dist.get_world_size(),))
    gather, reduce = Gather(), Reduce()

    def shard(model: nn.Module) -> nn.Module:
        shard_children(model, mesh=mesh, reshard_after_forward=True)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(gather)
                module.set_custom_reduce_scatter(reduce)
        return model

    found = train(Stack, squares, shard, tolerance=1e-5)
    # Four buckets, three steps; forward and backward gather.
    return found if (gather.calls, reduce.calls) == (24, 12) else [*found, f"{gather.calls}, {reduce.calls}"]


@pytest.mark.parametrize("hybrid", [False, True])
def test_collectives_of_the_users_own(hybrid: bool) -> None:
    world_size = 4 if hybrid else 2
    assert cluster.run(world_size, customised, hybrid) == [[]] * world_size


def summed_over_replicas_by_a_hook() -> list[str]:
    """HSDP by hand: shards over pairs of ranks, and a hook that sums over the pairs."""
    mesh = cluster.mesh((2, 2), ("replicate", "shard"))
    sharded, plain = twins(Stack, lambda model: shard_children(model, mesh=mesh["shard"]))
    group, seen = mesh.get_group("replicate"), []

    def hook(reduced: Tensor) -> None:
        seen.append(reduced.shape)
        dist.all_reduce(reduced, group=group)

    for module in sharded.modules():
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(hook)
            module.set_gradient_divide_factor(4.0)
    found = []
    for accumulated in (False, True):
        for model in (sharded, plain):
            if not accumulated:
                model.zero_grad()
            squares(model, int(accumulated)).backward()
        if not accumulated:
            kept = [p.grad.clone() for p in plain.parameters()]
            average_gradients(plain)
            found += differences(sharded, plain, 1e-6)
            for parameter, gradient in zip(plain.parameters(), kept, strict=True):
                parameter.grad = gradient
    average_gradients(plain)
    found += differences(sharded, plain, 1e-6)
    return found if len(seen) == 8 and all(len(shape) == 1 for shape in seen) else [*found, str(seen)]


def test_a_hook_on_reduced_gradients() -> None:
    assert cluster.run(4, summed_over_replicas_by_a_hook) == [[]] * 4


def reduced_elsewhere() -> list[str]:
    def shard(model: nn.Module) -> nn.Module:
        shard_children(model)
        model.set_separate_reduce_scatter_group()
        return model

    found = train(Stack, squares, shard)
    model = shard(Stack())
    buffers = [b for m in model.modules() if (s := state_of(m)) for b in s.bucket.buffers]
    groups = {id(b.reduce_group) for b in buffers}
    if len(groups) != 1 or buffers[0].reduce_group is buffers[0].layout.group or buffers[0].reduce_group is None:
        found.append("not one group of its own")
    model.set_separate_reduce_scatter_group(False)
    return found + ["not switched off"] * any(b.reduce_group is not None for b in buffers)


def test_a_group_of_its_own_for_reductions() -> None:
    assert cluster.run(2, reduced_elsewhere) == [[], []]
