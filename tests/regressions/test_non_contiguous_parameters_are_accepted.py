"""Parameters that are not contiguous (a transposed weight, channels_last convolutions) were rejected
(pytorch/pytorch#137000, pytorch/torchtitan#1180).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests import cluster
from tests.fsdp.modules import data
from tests.fsdp.reference import train


class Strided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 5, 2).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(7, 5).t())
        self.every_second = nn.Parameter(torch.randn(14)[::2])

    def forward(self, x: Tensor) -> Tensor:
        assert x.is_contiguous(memory_format=torch.channels_last)
        features = self.convolution(x).mean((2, 3))
        return features @ self.transposed * self.every_second


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.strided, self.out = Strided(), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.strided(x.view(4, 2, 2, 2).contiguous(memory_format=torch.channels_last)))


def loss_of(model: nn.Module, step: int) -> Tensor:
    return model(data(step, 4, 8)).square().mean()


def trained() -> list[str]:
    # Contiguous weights multiply in another order than strided ones.
    return train(Model, loss_of, tolerance=1e-6)


@pytest.mark.parametrize("world_size", [2, 3])
def test_non_contiguous_parameters_are_accepted(world_size: int) -> None:
    assert cluster.run(world_size, trained) == [[]] * world_size
