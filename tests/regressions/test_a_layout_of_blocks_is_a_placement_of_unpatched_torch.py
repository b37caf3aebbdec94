"""Blocks that must stay whole, matrices gathered to one rank, and shards that are views of a buffer could not be
expressed as a DTensor placement (pytorch/pytorch#169320).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from ragged_shard import RaggedShard
from tests import cluster


def orthogonalised() -> None:
    """Muon by hand: rows in blocks of four, the whole matrix on one rank for its SVD, and back into the buffer."""
    mesh, rank = cluster.mesh((3,)), dist.get_rank()
    full = torch.randn(12, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    blocks = RaggedShard((0,), (4, 0, 8))
    buffer = torch.zeros(100, dtype=torch.float64)
    shape = blocks.local_shape(full.shape, rank)
    local = buffer[: shape[0] * shape[1]].view(shape)
    local.copy_(distribute_tensor(full, mesh, [blocks]).to_local())
    weight = DTensor.from_local(local, mesh, [blocks], shape=full.shape, stride=full.stride())
    assert weight.to_local().untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()

    owned = weight.redistribute(placements=[RaggedShard.one_hot(1, 3)])
    matrix = owned.to_local()
    assert matrix.shape == ((12, 6) if rank == 1 else (0, 6))
    if rank == 1:
        u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
        matrix.copy_(u @ vh)
    weight.copy_(owned)

    u, _, vh = torch.linalg.svd(full, full_matrices=False)
    torch.testing.assert_close(weight.full_tensor(), u @ vh)
    torch.testing.assert_close(buffer[: local.numel()].view(shape), weight.to_local(), rtol=0, atol=0)


def test_blocks_owners_and_views_of_a_buffer_in_one_placement() -> None:
    cluster.run(3, orthogonalised)
