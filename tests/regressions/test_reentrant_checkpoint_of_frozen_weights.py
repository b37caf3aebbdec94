"""A reentrant checkpoint around a block with adapters: the recomputation did not watch the block's inputs, so frozen
weights were given back after the adapters' gradients, before backward had passed through them.
"""

from __future__ import annotations

from functools import partial

import pytest
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests import cluster
from tests.fsdp.modules import Adapters, squares
from tests.fsdp.reference import shard_children, train


class Checkpointed(Adapters):
    def __init__(self, where: str, reentrant: bool) -> None:
        super().__init__(where)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def adapters(where: str, reentrant: bool) -> list[str]:
    return train(partial(Checkpointed, where, reentrant), squares, partial(shard_children, reshard_after_forward=True))


@pytest.mark.parametrize("where", ["start", "around", "end"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_frozen_weights_are_there_until_backward_has_left(reentrant: bool, where: str) -> None:
    assert cluster.run(2, adapters, where, reentrant) == [[], []]
