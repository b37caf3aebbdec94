"""A rank that used no parameter of a block reduced it at the end of backward, where the others had long waited for it;
one that used a trainable parameter in the later of two calls alone gave the block back between them, and gathered it
again without the others. Both hung.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import fully_shard
from tests import cluster
from tests.fsdp.modules import Half, squares
from tests.fsdp.reference import step, twins


class Model(nn.Module):
    """The middle one of five blocks uses what ``uses`` says for each call."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Half() for _ in range(5))
        self.uses = ["both"]

    def forward(self, x: Tensor) -> Tensor:
        self.blocks[2].use = self.uses[0]
        self.uses = [*self.uses[1:], self.uses[0]]
        for block in self.blocks:
            x = block(x) * 1.0
        return x


def shard(reshard_after_forward: bool | None, model: Model) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard_after_forward)
    return fully_shard(model, reshard_after_forward=reshard_after_forward)


def no_parameter_on_one_rank(reshard_after_forward: bool | None) -> list[str]:
    sharded, plain = twins(Model, partial(shard, reshard_after_forward))
    found = []
    for use in ("none", "one", "none"):
        for model in (sharded, plain):
            model.zero_grad()
            model.uses = [use if dist.get_rank() == 1 else "both"]
        found += step(sharded, plain, squares, tolerance=1e-6)
    return found


@pytest.mark.parametrize("reshard_after_forward", [True, None])
def test_no_parameter_on_one_rank(reshard_after_forward: bool | None) -> None:
    assert cluster.run(2, no_parameter_on_one_rank, reshard_after_forward) == [[], []]


def in_one_of_two_calls(frozen: bool) -> list[str]:
    sharded, plain = twins(lambda: thaw(Model(), frozen), partial(shard, True))
    found = []
    for mine, other in (
        (["one", "two"], ["one", "one"]),
        (["two", "one"], ["one", "one"]),
        (["none", "one"], ["one", "two"]),
    ):
        for model in (sharded, plain):
            model.zero_grad()
            model.uses = mine if dist.get_rank() == 0 else other
        found += step(sharded, plain, lambda m: squares(m, 0) + squares(m, 1), tolerance=1e-6)
    return found


def thaw(model: Model, frozen: bool) -> Model:
    model.blocks[2].two.requires_grad_(not frozen)
    return model


@pytest.mark.parametrize("frozen", [False, True])
def test_in_one_of_two_calls(frozen: bool) -> None:
    assert cluster.run(2, in_one_of_two_calls, frozen) == [[], []]
