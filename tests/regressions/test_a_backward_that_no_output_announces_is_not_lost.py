"""A model that returned a torch.distributions object trained nothing, without a word: a backward was learnt of by hooks
on output tensors, and none was seen. FSDP2 still does so.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Normal

from fsdp import fully_shard
from tests import cluster
from tests.fsdp.modules import WIDTH, Mlp, data
from tests.fsdp.reference import message_of, train


class Choice(Mlp):
    """A block that returns an object too."""

    def forward(self, x: Tensor) -> Categorical:
        return Categorical(logits=super().forward(x))


class Policy(nn.Module):
    def __init__(self, answer: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.body, self.choice, self.scale, self.answer = Mlp(), Choice(), nn.Parameter(torch.ones(WIDTH)), answer

    def forward(self, x: Tensor) -> object:
        return self.answer(self.choice(self.body(x)).logits * self.scale)


def categorical(logits: Tensor) -> Categorical:
    return Categorical(logits=logits)


def nested(logits: Tensor) -> Independent:
    return Independent(Normal(logits, logits.exp()), 1)


def closed(logits: Tensor) -> Callable[[], Tensor]:
    """What nobody can look into."""
    return lambda: logits.square().mean()


def loss(model: nn.Module, number: int) -> Tensor:
    answer = model(data(number))
    return answer() if callable(answer) else -answer.log_prob(answer.sample() * 0 + 1).mean()


def objects() -> list[str]:
    return [d for answer in (categorical, nested, closed) for d in train(partial(Policy, answer), loss)]


def test_a_model_that_returns_an_object_trains() -> None:
    assert cluster.run(2, objects) == [[], []]


def by_hand() -> list[str]:
    """Parameters that are used outside of any forward."""

    def outside(model: nn.Module, number: int) -> Tensor:
        if number == 0:
            return model(data()).square().mean()
        if hasattr(model, "unshard"):
            model.unshard()
        return (data(number) @ model.weight).square().mean()

    found = train(partial(nn.Linear, WIDTH, WIDTH), outside, fully_shard)
    early = fully_shard(nn.Linear(WIDTH, WIDTH))
    early.unshard()
    message = message_of((data() @ early.weight).sum().backward)
    return found + ([] if "by hand before any forward of the model; run one first" in message else [message])


def test_gradients_of_parameters_unsharded_by_hand_are_reduced() -> None:
    assert cluster.run(2, by_hand) == [[], []]
