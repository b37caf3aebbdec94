"""Whole models under both runtimes: stock FSDP2, HSDP, and ours with the blocks that a policy asks for."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import ragged_optim
from ragged_optim import Block, policies
from tests import cluster
from tests.ragged_optim.models import digest, full


class Model(nn.Module):
    """An embedding, a fused projection, a stack of experts, a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(40, 24)
        self.up = nn.Linear(24, 70)
        self.experts = nn.Parameter(torch.randn(3, 70, 24) / 8)
        self.norm = nn.LayerNorm(24)
        self.lm_head = nn.Linear(24, 40, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for expert in self.experts.unbind():
            x = x + torch.tanh(self.up(x)) @ expert
        return self.lm_head(self.norm(x)).logsumexp(-1).mean()


def optimizer_of(name: str, model: nn.Module) -> Any:
    if name == "Muon+AdamW8bit":
        policy = policies.muon_adamw8bit(expert_block=Block.slices(1), tile=(8, 8))
        return ragged_optim.Muon(model.named_parameters(), lr=0.02, adamw_lr=0.01, orig_param_policy=policy)
    options: dict[str, Any] = {"min_8bit_size": 64, "tile": (8, 8)} if "8bit" in name else {}
    return getattr(ragged_optim, name)(model.named_parameters(), lr=0.02, **options)


def train(name: str, runtime: str, mesh_shape: tuple[int, ...]) -> list[str]:
    model = Model()
    mesh = cluster.mesh(mesh_shape, ("replicate", "shard")[-len(mesh_shape) :])
    if runtime == "fsdp2":
        from torch.distributed.fsdp import fully_shard as shard_with
    else:
        from fsdp import fully_shard

        policy = {
            "AdamW8bit": policies.adamw8bit(tile=(8, 8)),
            "Muon+AdamW8bit": policies.muon_adamw8bit(expert_block=Block.slices(1), tile=(8, 8)),
        }.get(name)
        shard_with = functools.partial(fully_shard, orig_param_policy=policy)
    shard_with(model.up, mesh=mesh)
    shard_with(model, mesh=mesh)
    optimizer = optimizer_of(name, model)
    for step in range(3):
        optimizer.zero_grad()
        # The same tokens everywhere: the mean of the gradients is that of one process.
        tokens = (full((4, 6), step).abs() * 10).long() % 40
        model(tokens).backward()
        optimizer.step()
    assert all(isinstance(p, DTensor) for p in model.parameters())
    return [digest(p) for p in model.parameters()]


@pytest.mark.parametrize("name", ["AdamW", "Muon", "NorMuon", "Shampoo", "SOAP", "Lion"])
def test_stock_fsdp2_and_hsdp_end_alike(name: str) -> None:
    (expected,) = cluster.run(1, train, name, "fsdp2", (1,))
    assert cluster.run(2, train, name, "fsdp2", (2,)) == [expected] * 2
    assert cluster.run(4, train, name, "fsdp2", (2, 2)) == [expected] * 4


@pytest.mark.parametrize("name", ["AdamW", "AdamW8bit", "Muon", "Muon+AdamW8bit", "Shampoo"])
def test_the_runtime_of_this_library_ends_alike(name: str) -> None:
    pytest.importorskip("fsdp")
    (expected,) = cluster.run(1, train, name, "fsdp", (1,))
    assert cluster.run(2, train, name, "fsdp", (2,)) == [expected] * 2
    assert cluster.run(4, train, name, "fsdp", (2, 2)) == [expected] * 4
