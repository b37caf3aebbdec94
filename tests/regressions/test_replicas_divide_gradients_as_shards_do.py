"""Gradients under HSDP were divided by another factor than under FSDP, and partial sums between reduce-scatter and
all-reduce were rounded (pytorch/pytorch#155903, pytorch/pytorch#125484, pytorch/pytorch#194628).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp import MixedPrecisionPolicy, fully_shard
from tests import cluster
from tests.fsdp.modules import Stack, data, squares
from tests.fsdp.reference import average_gradients, differences, full, shard_children, twins


def mesh() -> Any:
    return cluster.mesh((2, 2), ("replicate", "shard"))


def exact_integers() -> list[str]:
    """Integer-valued sums have no order: as plain averaging, to the bit."""

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


def test_replicas_divide_gradients_as_shards_do() -> None:
    assert cluster.run(4, exact_integers) == [[]] * 4


def accumulated(factor: float | None, reduce_replicas_each: bool) -> list[str]:
    """Micro-batches: none reduced, or reduced among shards alone until the last (set_requires_all_reduce)."""
    sharded, plain = twins(Stack, partial(shard_children, mesh=mesh()))
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
def test_micro_batches_of_replicas_add_up(factor: float | None, reduce_replicas_each: bool) -> None:
    assert cluster.run(4, accumulated, factor, reduce_replicas_each) == [[]] * 4


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


def test_partial_sums_of_replicas_are_not_rounded() -> None:
    assert cluster.run(4, bfloat16_accumulation) == [[]] * 4
