"""A sharded parameter began with other values than on one device, and one from the meta device with garbage
(pytorch/pytorch#168058, #140301).
"""

from __future__ import annotations

import random

import torch
from torch import nn
from torch.distributed.tensor import distribute_tensor

from ragged_shard import RaggedShard
from tests import cluster
from tests.ragged_shard import oracle


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(7, 12), nn.LayerNorm(12), nn.Linear(12, 5), nn.Embedding(9, 4))


def initialised(seed: int) -> None:
    mesh = cluster.mesh((3,))
    torch.manual_seed(7)
    expected = layers()
    rng = random.Random(seed)
    with torch.device("meta"):
        model = layers()
    for module in model:
        for name, parameter in list(module.named_parameters(recurse=False)):
            total = rng.choice(oracle.divisors(parameter.numel()))
            p = RaggedShard(tuple(range(parameter.ndim)), oracle.units(rng, total, 3))
            setattr(module, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [p])))
    model.to_empty(device="cpu")
    torch.manual_seed(7)
    for module in model:
        module.reset_parameters()
    for mine, plain in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), plain)


def test_sharded_initialisation_does_not_depend_on_the_layout() -> None:
    for seed in range(3):
        cluster.run(3, initialised, seed)
