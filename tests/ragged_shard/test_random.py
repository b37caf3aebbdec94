"""Random values do not depend on where an element lies (pytorch/pytorch#168058, #140301)."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

from ragged_shard import RaggedShard
from tests import cluster
from tests.ragged_shard import oracle

DRAWS = {
    "uniform_": lambda x: x.uniform_(-1, 2),
    "normal_": lambda x: x.normal_(1, 3),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "exponential_": lambda x: x.exponential_(2),
    "log_normal_": lambda x: x.log_normal_(),
    "cauchy_": lambda x: x.cauchy_(),
    "geometric_": lambda x: x.geometric_(0.4),
    "random_": lambda x: x.random_(0, 100),
    "random_ default": lambda x: x.random_(),
    "rand_like": torch.rand_like,
    "randn_like": lambda x: torch.randn_like(x, dtype=torch.float64),
    "randint_like": lambda x: torch.randint_like(x, 3, 50),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "dropout": lambda x: nn.functional.dropout(x, 0.4),
    "native_dropout": lambda x: torch.native_dropout(x, 0.4, True)[0],
    "xavier_uniform_": nn.init.xavier_uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
    "kaiming_uniform_": lambda x: nn.init.kaiming_uniform_(x, a=math.sqrt(5)),
    "kaiming_normal_": nn.init.kaiming_normal_,
    "trunc_normal_": lambda x: nn.init.trunc_normal_(x, std=0.02, a=-0.03, b=0.05),
    "init.normal_": lambda x: nn.init.normal_(x, std=0.02),
    "init.uniform_": lambda x: nn.init.uniform_(x),
    "own generator": lambda x: x.uniform_(generator=torch.Generator().manual_seed(3)),
    "init with a generator": lambda x: nn.init.normal_(x, generator=torch.Generator().manual_seed(4)),
}


def draws(mesh_shape, dtype):
    mesh = cluster.mesh(mesh_shape)
    rng = random.Random(5)
    for name, draw in DRAWS.items():
        for shape in ((13, 7), (37, 1), (8, 6, 5)):
            placements = ()
            while not any(isinstance(p, RaggedShard) for p in placements):
                placements = oracle.placements(rng, shape, mesh_shape)
            full = (torch.arange(math.prod(shape)).reshape(shape) % 5).to(dtype)
            mine = distribute_tensor(full, mesh, placements, src_data_rank=None)
            torch.manual_seed(11)
            expected = draw(full.clone())
            after = torch.rand(3)
            torch.manual_seed(11)
            result = draw(mine)
            assert torch.equal(torch.rand(3), after), f"{name} leaves the generator in another state"
            assert result.placements == placements and result.dtype == expected.dtype
            assert torch.equal(result.full_tensor(), expected), (name, shape, placements)


@pytest.mark.parametrize(
    ("mesh_shape", "dtype"), [((4,), torch.float32), ((3,), torch.bfloat16), ((2, 2), torch.float32)], ids=str
)
def test_every_draw_equals_one_process(mesh_shape, dtype):
    cluster.run(math.prod(mesh_shape), draws, mesh_shape, dtype)


def generators_differ():
    mesh = cluster.mesh((2,))
    x = distribute_tensor(torch.zeros(6, 4), mesh, [RaggedShard((0,), (1, 2))])
    for seed in (1, 2, 1):
        expected = torch.zeros(6, 4).uniform_(generator=torch.Generator().manual_seed(seed))
        assert torch.equal(x.uniform_(generator=torch.Generator().manual_seed(seed)).full_tensor(), expected)


def test_the_generator_of_each_call_is_used():
    """DTensor drops the generator of a CPU call before the local operator, and its cache does not see it."""
    cluster.run(2, generators_differ)


def refused():
    mesh = cluster.mesh((2,))
    x = distribute_tensor(torch.zeros(6, 4), mesh, [RaggedShard((0,), (1, 2))])
    with pytest.raises(RuntimeError, match=r"redistribute\(\)"):
        x.bernoulli_(x)
    with pytest.raises(RuntimeError, match=r"redistribute\(\)"):
        torch.multinomial(x, 2)


def test_draws_that_need_other_ranks_refuse():
    cluster.run(2, refused)


@pytest.mark.gpu
def test_draws_on_cuda_equal_one_process():
    """One rank: every layout of a world of one must give the values of a plain tensor, through the stock RNG
    tracker."""
    import torch.distributed as dist

    store = dist.HashStore()
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cuda", (1,))
        for placement in (RaggedShard((0,), (1,)), RaggedShard((0, 1), (1,)), Replicate(), Shard(0)):
            x = distribute_tensor(torch.zeros(13, 7, device="cuda"), mesh, [placement])
            torch.manual_seed(5)
            x.uniform_()
            torch.manual_seed(5)
            assert torch.equal(x.full_tensor(), torch.zeros(13, 7, device="cuda").uniform_())
    finally:
        dist.destroy_process_group()
