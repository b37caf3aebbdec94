"""Activation checkpointing gathered a module for the recomputation and again for the backward behind it, or left a
later module whole after backward (pytorch/pytorch#175406, pytorch/pytorch#105635, NVIDIA/Megatron-LM#6153,
NVIDIA/Megatron-LM#6309).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from tests import cluster
from tests.fsdp.counting import Counted
from tests.fsdp.modules import Stack, squares
from tests.fsdp.reference import shard_children

BUCKETS = 4


class Checkpointed(Stack):
    """``where``: the checkpoint lies around each sharded block, or inside it."""

    def __init__(self, reentrant: bool, where: str) -> None:
        super().__init__()
        self.reentrant = reentrant
        if where == "inside":
            for block in self.blocks:
                plain = block.forward
                block.forward = lambda x, f=plain: checkpoint(f, x, use_reentrant=reentrant)
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for block in self.blocks:
            x = block(x) if self.where == "inside" else checkpoint(block, x, use_reentrant=self.reentrant)
        return x @ self.head


def gathers(reentrant: bool, where: str) -> tuple[list[float], list[str]]:
    """Gathers of the second and third step; parameters that are whole after a backward."""
    torch.manual_seed(0)
    model = shard_children(Checkpointed(reentrant, where), reshard_after_forward=True)
    counts, whole = [], []
    for number in range(3):
        with Counted() as counted:
            squares(model, number).backward()
        counts.append(counted.gathers(2))
        whole += [n for n, p in model.named_parameters() if not isinstance(p, DTensor)]
    return counts[1:], whole


@pytest.mark.parametrize("where", ["around", "inside"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_does_not_gather_twice(reentrant: bool, where: str) -> None:
    """As without checkpoints: once for forward and once for backward. And all is sharded after it."""
    for counts, whole in cluster.run(2, gathers, reentrant, where):
        assert counts == [2 * BUCKETS] * 2
        assert whole == []
