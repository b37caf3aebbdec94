"""Which parameters root and child show after forward confused everybody: the whole table, with torch's own as the
control (pytorch/pytorch#149029, pytorch/pytorch#154655, pytorch/pytorch#155319, pytorch/pytorch#131965).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from fsdp import fully_shard
from tests import cluster
from tests.fsdp.modules import Stack, squares

SHARDED, WHOLE = "sharded", "whole"


def shown(module: nn.Module) -> str:
    (kind,) = {SHARDED if isinstance(p, DTensor) else WHOLE for p in module.parameters()}
    return kind


def shown_of_its_own(module: nn.Module) -> str:
    (kind,) = {SHARDED if isinstance(p, DTensor) else WHOLE for p in module.parameters(recurse=False)}
    return kind


def states(wrap: str, reshard_after_forward: bool | int | None) -> list[tuple[str, str]]:
    """(child, root) after construction, forward, backward, and a second forward and backward."""
    torch.manual_seed(0)
    shard = fully_shard if wrap == "ours" else torch_fully_shard
    model = Stack()
    options: dict[str, Any] = {"reshard_after_forward": reshard_after_forward}
    for block in model.blocks:
        shard(block, **options)
    shard(model, **options)

    def now() -> tuple[str, str]:
        return shown(model.blocks[0]), shown_of_its_own(model)

    seen = [now()]
    for step in range(2):
        loss = squares(model, step)
        seen.append(now())
        loss.backward()
        seen.append(now())
    return seen


# reshard_after_forward, ranks, (child, root) after forward. A child of the default is resharded, a root of it is not.
TABLE = [
    (True, 2, (SHARDED, SHARDED)),
    (False, 2, (WHOLE, WHOLE)),
    (None, 2, (SHARDED, WHOLE)),
    (1, 2, (WHOLE, WHOLE)),
    (2, 2, (SHARDED, SHARDED)),
    (2, 4, (SHARDED, SHARDED)),
]


@pytest.mark.parametrize(("reshard_after_forward", "world_size", "after_forward"), TABLE)
def test_resharding_of_the_root_does_not_surprise(
    reshard_after_forward: bool | int | None, world_size: int, after_forward: tuple[str, str]
) -> None:
    rest = (SHARDED, SHARDED)
    expected = [rest, after_forward, rest, after_forward, rest]
    assert cluster.run(world_size, states, "ours", reshard_after_forward) == [expected] * world_size
    assert cluster.run(world_size, states, "torch", reshard_after_forward) == [expected] * world_size
