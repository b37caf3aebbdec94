"""Ranks that used different parameters sent reductions of different sizes: a hang, or silently wrong gradients
(pytorch/pytorch#158719, pytorch/pytorch#170667, pytorch/pytorch#174862).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests import cluster
from tests.fsdp.modules import WIDTH, Half, squares
from tests.fsdp.reference import step, twins


def halves(uses: list[tuple[str, str]], accumulate: bool = False) -> list[str]:
    """``uses[step][rank]`` says which layers of the first and third block this rank runs."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Half() for _ in range(3))
            self.out = nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return self.out(x)

    sharded, plain = twins(Model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=True) for m in (sharded, plain)]
    rank, found = dist.get_rank(), []
    for number, use in enumerate(uses):
        for model in (sharded, plain):
            for index, block in enumerate(model.blocks):
                block.use = use[rank] if index != 1 else "both"
        if accumulate:
            sharded.set_requires_gradient_sync(False)
            for model in (sharded, plain):
                squares(model, number + 50).backward()
            sharded.set_requires_gradient_sync(True)
        found += [
            f"step {number}: {d}"
            for d in step(sharded, plain, lambda m, n=number: squares(m, n), optimizers, tolerance=0.0)
        ]
    return found


def test_gradients_of_a_conditional_module_do_not_hang() -> None:
    uses = [("one", "two"), ("one", "one"), ("both", "two"), ("both", "both"), ("none", "none")]
    assert cluster.run(2, halves, uses) == [[], []]


def test_gradients_of_a_module_without_a_graph_on_one_rank_do_not_hang() -> None:
    """One rank's first block has nothing to differentiate at all; the other's has."""
    for accumulate in (False, True):
        uses = [("both", "none"), ("none", "both"), ("both", "both")]
        assert cluster.run(2, halves, uses, accumulate) == [[], []]
