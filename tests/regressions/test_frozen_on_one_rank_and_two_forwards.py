"""Some ranks use only a frozen parameter of a bucket, others a trainable one, in two forwards before a backward: the
first kind gave the bucket back after the first forward's backward and gathered it again, alone; a hang.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from tests import cluster
from tests.fsdp.modules import WIDTH, Half, squares
from tests.fsdp.reference import step, twins


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(WIDTH, WIDTH), Half(), nn.Linear(WIDTH, 3)
        self.middle.two.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


def two_forwards() -> list[str]:
    sharded, plain = twins(Model)
    found = []
    for use in (("one", "two"), ("two", "one"), ("two", "two"), ("both", "two")):
        for model in (sharded, plain):
            model.zero_grad()
            model.middle.use = use[dist.get_rank()]
        found += step(sharded, plain, lambda m: squares(m, 0) + squares(m, 1), tolerance=1e-6)
    return found


def test_frozen_on_one_rank_and_two_forwards() -> None:
    assert cluster.run(2, two_forwards) == [[], []]
