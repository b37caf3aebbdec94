"""An encoder that an actor and a critic share was taken over by the model that ran last, and backward failed by an
assertion. FSDP2 refuses it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fsdp import fully_shard
from tests import cluster
from tests.fsdp.modules import WIDTH, Mlp, data
from tests.fsdp.reference import message_of, step, twins


class Head(nn.Module):
    def __init__(self, encoder: nn.Module, outputs: int) -> None:
        super().__init__()
        self.encoder, self.out = encoder, nn.Linear(WIDTH, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.encoder(x))


def make() -> nn.ModuleDict:
    encoder = nn.Sequential(Mlp(), Mlp())
    return nn.ModuleDict({"actor": Head(encoder, 4), "critic": Head(encoder, 1)})


def shard(both: nn.Module) -> nn.Module:
    for module in (*both["actor"].encoder, both["actor"], both["critic"]):
        fully_shard(module)
    return both


def together(both: nn.Module, number: int) -> Tensor:
    x = data(number)
    return both["actor"](x).square().mean() + (both["critic"](x) - 1).square().mean()


def train() -> list[str]:
    sharded, plain = twins(make, shard)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (sharded, plain)]
    found = []
    for number, name in enumerate(["", "actor", "critic", "", "critic"]):

        def loss(model: nn.Module, number: int = number, name: str = name) -> Tensor:
            return model[name](data(number)).square().mean() if name else together(model, number)

        found += step(sharded, plain, loss, optimizers, tolerance=1e-6)
    return found


def test_a_module_of_two_models_trains() -> None:
    assert cluster.run(2, train) == [[], []]


def sharded_with_one_of_them() -> str:
    both = make()
    fully_shard(both["actor"])
    return message_of(fully_shard, both["critic"])


def test_a_module_sharded_with_one_of_its_models_is_an_error_that_says_what_to_do() -> None:
    for message in cluster.run(2, sharded_with_one_of_them):
        assert "'encoder.0.up.weight' was sharded by an earlier fully_shard call" in message
        assert "pass it to a fully_shard call of its own" in message
