"""One clip_grad_norm_ over experts on their own mesh and a dense rest on another raised (pytorch/pytorch#180346,
pytorch/pytorch#180501).
"""

from __future__ import annotations

import math

from torch import nn

import fsdp
from fsdp import fully_shard
from tests import cluster
from tests.fsdp.modules import Stack, squares
from tests.fsdp.reference import average_gradients, differences, twins


def two_meshes() -> list[str]:
    """Experts on one mesh, the rest on another."""
    mesh = cluster.mesh((2, 2), ("replicate", "shard"))

    def shard(model: nn.Module) -> nn.Module:
        fully_shard(model.blocks[0], mesh=mesh)
        return fully_shard(model, mesh=cluster.mesh((4,)))

    sharded, plain = twins(Stack, shard)
    for model in (sharded, plain):
        squares(model).backward()
    average_gradients(plain)
    found = differences(sharded, plain, 1e-6)
    for norm_type in (2.0, math.inf):
        norms = [
            fsdp.clip_grad_norm_(sharded.parameters(), 0.05, norm_type).item(),
            nn.utils.clip_grad_norm_(plain.parameters(), 0.05, norm_type).item(),
        ]
        if not math.isclose(*norms, rel_tol=1e-5):
            found.append(f"{norm_type}: {norms}")
        found += differences(sharded, plain, 1e-6)
    return found


def test_clipping_over_two_meshes_does_not_fail() -> None:
    assert cluster.run(4, two_meshes) == [[]] * 4
