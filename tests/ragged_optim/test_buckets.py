"""Buckets of the FSDP runtime.

Element-wise rules run once on a bucket's flat shard, with the results of separate tensors.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import ragged_optim
from ragged_optim.rules import adamw
from tests import cluster
from tests.ragged_optim.models import digest, full

SHAPES = [(7, 5), (13,), (), (3, 4, 2), (1, 9)]


def bucket(seed: int, like: Any = None) -> Any:
    """A sharded DBuffer of the shapes above; every tensor filled as everywhere."""
    from ragged_shard.dbuffer import DBuffer, Layout
    from ragged_shard.planner import TensorSpec, plan_bucket

    if like is None:
        world = dist.get_world_size()
        specs = [TensorSpec(f"p{i}", torch.Size(shape).numel(), 4) for i, shape in enumerate(SHAPES)]
        (plan,) = plan_bucket(specs, world).buffers
        shapes = tuple(SHAPES[int(name[1:])] for name, _ in plan.starts)
        buffer = DBuffer.sharded(Layout(plan, shapes, cluster.mesh((world,)), 0), torch.float32, torch.device("cpu"))
    else:
        buffer = like.like()
    for index, name in enumerate(buffer.names):
        shape = SHAPES[int(name[1:])]
        target = buffer.dtensor(index)
        source = torch.distributed.tensor.distribute_tensor(
            full(shape, seed + int(name[1:])), target.device_mesh, target.placements, src_data_rank=None
        )
        target.to_local().copy_(source.to_local())
    return buffer


def parameter_of(buffer: Any, index: int) -> nn.Parameter:
    """A parameter that is the buffer's view.

    ``nn.Parameter`` alone makes an alias that no longer leads to the buffer.
    """
    dtensor = buffer.dtensor(index)
    param = nn.Parameter(dtensor)
    param._local_tensor = dtensor._local_tensor  # type: ignore[attr-defined]
    return param


def train(name: str, kind: str, lacking: int | None) -> tuple[list[Any], list[int]]:
    buffer = bucket(0)
    names = list(buffer.names)
    if kind == "bucket":
        params = {n: parameter_of(buffer, i) for i, n in enumerate(names)}
    else:
        params = {n: nn.Parameter(full(SHAPES[int(n[1:])], int(n[1:]))) for n in names}
    optimizer = getattr(ragged_optim, name)([(n, params[n]) for n in sorted(names)], lr=0.1)
    grads, sizes, real = [], [], adamw.AdamWRule.update_all

    def spy(self: Any, params: list[Any], *rest: Any) -> None:
        sizes.append(len(params))
        real(self, params, *rest)

    adamw.AdamWRule.update_all = spy
    for step in range(3):
        if kind == "bucket":
            grads.append(bucket(100 * step + 50, buffer))
        for i, n in enumerate(names):
            if step == 1 and int(n[1:]) == lacking:
                params[n].grad = None
            elif kind == "bucket":
                params[n].grad = grads[-1].dtensor(i)
            else:
                params[n].grad = full(SHAPES[int(n[1:])], 100 * step + 50 + int(n[1:]))
        optimizer.step()
    adamw.AdamWRule.update_all = real
    found = [
        [digest(params[n]), *(digest(v) for _, v in sorted(optimizer.state[params[n]].items()))] for n in sorted(names)
    ]
    return found, sizes


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_whole_bucket_is_one_piece_with_the_results_of_separate_tensors(name: str, world: int) -> None:
    for (flat, sizes), (apart, many) in zip(
        cluster.run(world, train, name, "bucket", None), cluster.run(world, train, name, "plain", None), strict=True
    ):
        assert flat == apart
        assert sizes == [1, 1, 1] and many == [5, 5, 5]


def test_a_missing_gradient_leaves_the_bucket_to_single_tensors_from_then_on() -> None:
    # The step counters differ afterwards, so the bucket cannot be one piece again.
    for (flat, sizes), (apart, _) in zip(
        cluster.run(2, train, "AdamW", "bucket", 1), cluster.run(2, train, "AdamW", "plain", 1), strict=True
    ):
        assert flat == apart
        assert sizes[0] == 1 and len(sizes) == 3 and min(sizes[1:]) > 1


def through_fsdp(name: str) -> list[str]:
    from fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=cluster.mesh((dist.get_world_size(),)))
    optimizer = getattr(ragged_optim, name)(model.named_parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(full((4, 8), step)).sum().backward()
        optimizer.step()
    assert all(isinstance(p, DTensor) for p in model.parameters())
    return [digest(p) for p in model.parameters()]


@pytest.mark.parametrize("name", ["AdamW", "Muon"])
def test_parameters_of_the_runtime(name: str) -> None:
    pytest.importorskip("fsdp")
    expected, *_ = cluster.run(1, through_fsdp, name)
    # The same data on both ranks: their mean gradient is that of one, bit for bit.
    assert cluster.run(2, through_fsdp, name) == [expected, expected]
