"""The gradient of an encoder's output is complete when backward has left every layer of the decoder that took it. Until
then each layer kept its whole parameters and gradients, as if nothing were sharded; so did the blocks of a U-Net.
"""

from __future__ import annotations

from functools import partial

import pytest
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests import cluster
from tests.fsdp.modules import WIDTH, Mlp, squares
from tests.fsdp.reference import shard_children, train
from tests.fsdp.test_memory import pool_of


class Takes(Mlp):
    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return super().forward(x + other)


class Decoder(nn.Module):
    def __init__(self, layers: int, how: str) -> None:
        super().__init__()
        self.how = how
        self.encoder = Mlp()
        self.downs = nn.ModuleList(Mlp() for _ in range(layers if how == "u-net" else 0))
        self.layers = nn.ModuleList(Takes() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        skips = [self.encoder(x)]
        for down in self.downs:
            skips.append(down(skips[-1]))
        for layer in self.layers:
            other = skips.pop() if self.how == "u-net" else skips[0]
            x = checkpoint(layer, x, other, use_reentrant=False) if self.how == "checkpoint" else layer(x, other)
        return self.head(x)


def pool_bytes(how: str) -> list[int]:
    """What the pool holds for few and for many layers."""
    held = []
    for layers in (3, 6):
        model = shard_children(Decoder(layers, how), reshard_after_forward=True)
        for number in range(2):
            squares(model, number).backward()
        held.append(pool_of(model).ledger.held)
    return held


def trained(how: str) -> list[str]:
    return train(partial(Decoder, 3, how), squares, partial(shard_children, reshard_after_forward=True), tolerance=1e-6)


@pytest.mark.parametrize("how", ["decoder", "u-net", "checkpoint"])
def test_an_input_of_many_modules_does_not_keep_all_of_them_gathered(how: str) -> None:
    assert cluster.run(2, trained, how) == [[], []]
    for few, many in cluster.run(2, pool_bytes, how):
        assert many == few
