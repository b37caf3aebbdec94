"""``Shard`` cuts one dim and leaves ranks empty where that dim is smaller than the world, and uneven cuts on both dims
of a mesh came back in the wrong order (pytorch/pytorch#148269, #163843, #148894).
"""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor

from ragged_shard import RaggedShard
from tests import cluster


def every_rank_has_a_share() -> None:
    full = torch.arange(12.0).reshape(3, 2, 2)
    x = distribute_tensor(full, cluster.mesh((4,)), [RaggedShard((0, 1, 2), (1, 1, 1, 1))])
    assert x.to_local().numel() == 3 and torch.equal(x.full_tensor(), full)


def test_every_rank_has_a_share_of_a_tensor_with_small_dims() -> None:
    cluster.run(4, every_rank_has_a_share)


def uneven(rows: int) -> None:
    mesh = cluster.mesh((2, 2))
    full = torch.arange(rows * 5.0).reshape(rows, 5)
    for spec in ((RaggedShard((0,), (rows - 1, 1)), Shard(1)), (Shard(1), RaggedShard((0,), (2, rows - 2)))):
        y = distribute_tensor(full, mesh, spec)
        assert torch.equal(y.full_tensor(), full)
        assert torch.equal((y * 2).redistribute(placements=(Shard(0), Shard(1))).full_tensor(), full * 2)


@pytest.mark.parametrize("rows", [5, 6, 7])
def test_uneven_cuts_on_two_mesh_dims_come_back_in_order(rows: int) -> None:
    cluster.run(4, uneven, rows)
