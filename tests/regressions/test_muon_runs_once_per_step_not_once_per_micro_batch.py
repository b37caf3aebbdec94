"""Muon ran once for each micro-batch (deepspeedai/DeepSpeed#8443, deepspeedai/DeepSpeed#8600) or, on sharded
parameters, never (deepspeedai/DeepSpeed#8438); neither was an error.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ragged_optim import Muon, policies
from ragged_optim.rules.muon import MuonRule
from tests import cluster
from tests.fsdp.modules import WIDTH, Stack
from tests.fsdp.reference import full, shard_children


def trained(micro_batches: int) -> tuple[list[torch.Tensor], int]:
    """Parameters after two steps over the same data in so many pieces; matrices that were orthogonalised anywhere."""
    torch.manual_seed(0)
    model = shard_children(Stack())
    optimizer = Muon(model.named_parameters(), orig_param_policy=policies.muon(), lr=0.02)
    one, many, calls = MuonRule.update, MuonRule.update_all, []

    def counted(self: MuonRule, matrix: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(1)
        return one(self, matrix, *args, **kwargs)

    def counted_together(self: MuonRule, matrices: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(len(matrices))
        return many(self, matrices, *args, **kwargs)

    MuonRule.update, MuonRule.update_all = counted, counted_together
    try:
        for step in range(2):
            generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
            for number, piece in enumerate(torch.randn(8, WIDTH, generator=generator).chunk(micro_batches)):
                model.set_requires_gradient_sync(number == micro_batches - 1)
                (model(piece).square().mean() / micro_batches).backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        MuonRule.update, MuonRule.update_all = one, many
    total = torch.tensor(sum(calls))
    dist.all_reduce(total)
    return [full(p) for p in model.parameters()], int(total)


def once_and_in_four() -> tuple[float, list[int], int]:
    (one, calls), (four, calls_of_four) = trained(1), trained(4)
    matrices = sum(isinstance(m, nn.Linear) for m in Stack().modules())
    off = torch.stack([(a - b).abs().max() for a, b in zip(one, four, strict=True)]).max().item()
    return off, [calls, calls_of_four], matrices


def test_muon_runs_once_per_step_and_not_once_per_micro_batch() -> None:
    for difference, calls, matrices in cluster.run(2, once_and_in_four):
        # Two steps; the root's head is no matrix between hidden states.
        assert calls == [2 * matrices] * 2
        assert difference < 2e-3  # Newton-Schulz in bf16 of gradients that differ in their last bits
