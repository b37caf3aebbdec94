"""A rank that died left the others waiting for the group's timeout of half an hour, or with a bare "connection closed"
that named neither the collective nor the module (NVIDIA/Megatron-LM#6573).
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from tests import cluster
from tests.fsdp.modules import Stack, squares
from tests.fsdp.reference import shard_children


def dies(where: str) -> None:
    """Rank 1 is killed in block 1 of the second iteration; what rank 0 then gets is raised."""
    torch.manual_seed(0)
    # Of the group of all ranks, whose timeout is many minutes.
    model = shard_children(Stack(), reshard_after_forward=True)
    squares(model, 0).backward()
    if dist.get_rank() == 1:
        register = model.blocks[1].register_forward_hook
        if where == "backward":
            register = model.blocks[1].register_full_backward_hook
        register(lambda *_: os._exit(9))
    for step in range(1, 3):
        squares(model, step).backward()


@pytest.mark.parametrize("where", ["backward"])
def test_a_rank_that_dies_is_an_error_that_names_collective_and_bucket(where: str) -> None:
    with pytest.raises(cluster.ClusterError) as caught:
        cluster.run(2, dies, where)
    survivor, victim = str(caught.value).split("---- rank 1: ")
    assert victim.startswith("died") and "exit code 9" in victim
    assert "rank 0: raised" in survivor
    assert "all-gather of the parameters of bucket" in survivor or "reduction of the gradients of bucket" in survivor
    assert "failed on rank 0" in survivor and "Another rank has died" in survivor
