"""A job could not go on with another number of ranks, a plain ``dcp.save`` wrote padding instead of values, ranks
without elements saved other keys and hung, and only Adam's state names were known (pytorch/torchtitan#811,
NVIDIA/Megatron-LM#4129, #6024, #6214, #3510, #6215, #6573, deepspeedai/Megatron-DeepSpeed#439,
deepspeedai/DeepSpeed#8608, #8609).
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ragged_shard import RaggedShard
from tests import cluster

WORLDS = (2, 3, 1, 4)
ROWS = {1: (1,), 2: (5, 1), 3: (0, 1, 5), 4: (0, 3, 0, 3)}
CODES = torch.arange(48, dtype=torch.uint8).reshape(12, 4)
VALUES = torch.linspace(-1, 1, 48).reshape(12, 4)


def state(fill: bool) -> dict[str, dict[str, DTensor]]:
    """8-bit codes, a momentum, and a state of a name that nobody knows; the layout of the last hop is Shard(0)."""
    world = dist.get_world_size()
    mesh = cluster.mesh((world,))
    ragged = RaggedShard((0,), ROWS[world])
    one = RaggedShard.one_hot(world - 1, world)

    def place(full: torch.Tensor, placement: RaggedShard | Shard) -> DTensor:
        return distribute_tensor(full if fill else torch.zeros_like(full), mesh, [placement])

    return {
        "layer.weight": {"codes": place(CODES, ragged), "momentum_buffer": place(VALUES, one)},
        "other.weight": {"whitened_by_nobody": place(VALUES * 3, Shard(0) if world == 4 else ragged)},
    }


def hop(source: str | None, target: str) -> list[str]:
    """Load the last checkpoint, compare every element, and save what was loaded; no preparation either way."""
    held = state(fill=source is None)
    if source is not None:
        dcp.load(held, checkpoint_id=source)
    assert torch.equal(held["layer.weight"]["codes"].full_tensor(), CODES)
    assert held["layer.weight"]["codes"].dtype == torch.uint8
    assert torch.equal(held["layer.weight"]["momentum_buffer"].full_tensor(), VALUES)
    assert torch.equal(held["other.weight"]["whitened_by_nobody"].full_tensor(), VALUES * 3)
    dcp.save(held, checkpoint_id=target)
    return [f"{name}.{key}" for name, tensors in held.items() for key in tensors]


def test_state_survives_a_chain_of_worlds(tmp_path: Path) -> None:
    source = None
    for number, world in enumerate(WORLDS):
        keys = cluster.run(world, hop, source, str(tmp_path / str(number)))
        assert all(found == keys[0] for found in keys), "every rank has the same keys, with elements or without"
        source = str(tmp_path / str(number))
