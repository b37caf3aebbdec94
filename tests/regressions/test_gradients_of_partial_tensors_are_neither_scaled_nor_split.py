"""Gradients through ``from_local``, ``to_local`` and ``redistribute`` of a Partial came back scaled by the world size,
or split into addends (pytorch/pytorch#172932, #115967, #170527).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

from ragged_shard import RaggedShard
from tests import cluster

LAYOUTS = (RaggedShard((0,), (0, 5, 1)), RaggedShard((0, 1), (7, 0, 11)), RaggedShard.one_hot(2, 3))
FULL = torch.arange(72.0).reshape(12, 6)


def gradients() -> None:
    """As torch: the gradient of a Partial is replicated, whatever the forward target."""
    mesh = cluster.mesh((3,))
    for after in LAYOUTS:
        local = (FULL * (dist.get_rank() + 1)).requires_grad_()
        summed = DTensor.from_local(local, mesh, [Partial()]).redistribute(placements=[after])
        summed.backward(distribute_tensor(FULL, mesh, [after], src_data_rank=None))
        assert torch.equal(local.grad, FULL), after
        leaf = DTensor.from_local(FULL * 1.0, mesh, [Partial()]).requires_grad_()
        leaf.redistribute(placements=[after]).backward(distribute_tensor(FULL, mesh, [after], src_data_rank=None))
        assert leaf.grad.placements == (Replicate(),)
        assert torch.equal(leaf.grad.to_local(), FULL)


def test_gradients_of_partial_tensors_are_neither_scaled_nor_split() -> None:
    cluster.run(3, gradients)


def gathered() -> None:
    """What FSDP does by hand: gather, compute on the rank's own batch, and sum the gradients of the ranks."""
    mesh = cluster.mesh((3,))
    for before in LAYOUTS:
        leaf = distribute_tensor(FULL, mesh, [before]).requires_grad_()
        whole = leaf.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        (whole * (dist.get_rank() + 1)).sum().backward()
        assert leaf.grad.placements == (before,)
        assert torch.equal(leaf.grad.full_tensor(), torch.full_like(FULL, 1.0 + 2 + 3))


def test_gradients_of_a_gathered_weight_are_summed_over_the_ranks_once() -> None:
    cluster.run(3, gathered)
