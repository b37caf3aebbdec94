"""Stages of torch.distributed.pipelining that are sharded train as plain ones do: torch asks internals of its own FSDP2
to reduce what the micro-batches left.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import fully_shard
from tests import cluster
from tests.fsdp.modules import WIDTH, Mlp
from tests.fsdp.reference import differences


def schedules() -> dict[str, Callable[..., Any]]:
    from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleavedZeroBubble

    def one(stages: list[Any], **options: Any) -> Any:
        return Schedule1F1B(stages[0], **options)

    return {"1F1B": one, "zero bubble": ScheduleInterleavedZeroBubble}


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def train(name: str) -> list[str]:
    """Two stages' ranks, and as many that share their parameters."""
    from torch.distributed.pipelining import PipelineStage

    mesh = cluster.mesh((2, 2), ("pipe", "data"))
    rank, data = mesh.get_local_rank("pipe"), mesh["data"]
    torch.manual_seed(5)
    per_rank = 1 if name == "1F1B" else 2
    model = nn.ModuleList(nn.Sequential(Mlp(), Mlp()) for _ in range(2 * per_rank))
    plain = nn.ModuleList([model[rank + 2 * j] for j in range(per_rank)])
    sharded = copy.deepcopy(plain)
    for stage in sharded:
        for module in (*stage, stage):
            fully_shard(module, mesh=data, reshard_after_forward=False)
    generator = torch.Generator().manual_seed(data.get_local_rank())
    found = []
    pairs = []
    for modules in (sharded, plain):
        stages = [
            PipelineStage(m, rank + 2 * j, 2 * per_rank, torch.device("cpu"), group=mesh.get_group("pipe"))
            for j, m in enumerate(modules)
        ]
        schedule = schedules()[name](stages, n_microbatches=4, loss_fn=squares)
        pairs.append((schedule, torch.optim.SGD(modules.parameters(), lr=0.1)))
    for _ in range(2):
        x, target = torch.randn(2, 8, WIDTH, generator=generator)
        for schedule, _optimizer in pairs:
            schedule.step(*[x] if rank == 0 else [], **{} if rank == 0 else {"target": target})
        for parameter in plain.parameters():
            dist.all_reduce(parameter.grad, group=data.get_group())
            parameter.grad /= 2
        found += differences(sharded, plain, tolerance=1e-6)
        for _schedule, optimizer in pairs:
            optimizer.step()
            optimizer.zero_grad()
    return found


def test_sharded_stages_train_as_plain_ones() -> None:
    for name in ("1F1B", "zero bubble"):
        assert cluster.run(4, train, name) == [[]] * 4
