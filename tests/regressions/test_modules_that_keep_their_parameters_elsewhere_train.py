"""A module that is told of its parameters by ``__setattr__``, as torch's recurrent ones are, and computes with what it
was told, went on computing with the parameters from before fully_shard: it trained nothing, without a word.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from tests import cluster
from tests.fsdp.modules import WIDTH, squares
from tests.fsdp.reference import train


class Told(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        self.__dict__.setdefault("told", {})[name] = value

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.told["weight"], self.told["bias"])


def make() -> nn.Module:
    return nn.Sequential(Told(), nn.Tanh(), Told())


def told() -> list[str]:
    return train(make, lambda model, number: squares(model, number))


def test_modules_that_keep_their_parameters_elsewhere_train() -> None:
    assert cluster.run(2, told) == [[], []]
