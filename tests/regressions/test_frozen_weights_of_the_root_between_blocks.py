"""A frozen weight in the root's bucket, on the way to the gradients of a block: it was released with the last gradient
of the root's own parameters, and backward failed ("out of bounds for storage of size 0").
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fsdp import fully_shard
from tests import cluster


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4, bias=False).requires_grad_(False)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.frozen(self.block(x)).relu())


def gradients() -> list[str]:
    torch.manual_seed(0)
    plain, sharded = Model(), Model()
    sharded.load_state_dict(plain.state_dict())
    fully_shard(sharded.block)
    fully_shard(sharded)
    for model in (plain, sharded):
        model(torch.ones(2, 4)).sum().backward()
    return [
        name
        for (name, p), q in zip(plain.named_parameters(), sharded.parameters(), strict=True)
        if p.requires_grad and not torch.allclose(p.grad, q.grad.full_tensor())
    ]


@pytest.mark.parametrize("world", [1, 2])
def test_frozen_weights_of_the_root_between_blocks(world: int) -> None:
    assert cluster.run(world, gradients) == [[]] * world
