"""Weights tied across groups were untied without a word, a freed parameter's id made a false tie, or one of the two
gradients was lost (pytorch/pytorch#176225, facebookresearch/lingua#75, huggingface/accelerate#3870,
pytorch/torchtitan#2817, NVIDIA/Megatron-LM#7166).
"""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import fully_shard
from tests import cluster
from tests.fsdp.modules import WIDTH, Mlp, Stack, squares
from tests.fsdp.reference import train


class Tied(nn.Module):
    """One weight as embedding, as a layer, and as the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, WIDTH)
        self.mlp = Mlp()
        self.head = nn.Linear(WIDTH, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.arange(6) + dist.get_rank()
        return self.head(self.mlp(self.embed(tokens))) + (x.sum() + self.embed.weight.square()).sum()


def tied_in_the_root() -> list[str]:
    def shard(model: nn.Module) -> nn.Module:
        fully_shard(model.mlp)
        return fully_shard(model)

    found = train(Tied, squares, shard)
    model = shard(Tied())
    if model.head.weight is not model.embed.weight:
        found.append("not tied after sharding")
    squares(model).backward()
    if model.head.weight is not model.embed.weight:
        found.append("not tied after a step")
    if len(list(model.named_parameters())) != 5:
        found.append("the tied weight counts twice")
    return found


def test_weights_tied_in_one_bucket_stay_tied() -> None:
    assert cluster.run(2, tied_in_the_root) == [[], []]


class TiedPlainly(Tied):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mlp(self.embed(torch.arange(6) + dist.get_rank())))


def tied_list() -> list[str]:
    def shard(model: nn.Module) -> nn.Module:
        fully_shard([model.embed, model.head])
        return fully_shard(model)

    return train(TiedPlainly, squares, shard)


def test_weights_tied_across_a_list_stay_tied() -> None:
    assert cluster.run(2, tied_list) == [[], []]


def tied_across(kind: str) -> str:
    model = Stack(2)
    model.blocks[1].up.weight = model.blocks[0].up.weight
    fully_shard(model.blocks[0])
    try:
        fully_shard(model.blocks[1] if kind == "siblings" else model)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("kind", ["siblings", "child and root"])
def test_weights_tied_across_buckets_are_an_error_that_names_both(kind: str) -> None:
    second = "'up.weight'" if kind == "siblings" else "'blocks.1.up.weight'"
    messages = cluster.run(2, tied_across, kind)
    assert len(set(messages)) == 1
    assert all(word in messages[0] for word in ("tied", second, "one list"))
    assert len(re.findall(r"up\.weight", messages[0])) >= 2


def unrelated_after_collection() -> str:
    """A freed parameter's id must not make a new one look tied."""
    for _ in range(30):
        fully_shard(nn.Linear(3, 3))
    return "ok"


def test_a_freed_parameter_does_not_look_tied() -> None:
    assert cluster.run(1, unrelated_after_collection) == ["ok"]
