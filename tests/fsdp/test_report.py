"""The memory report: predicted and observed bytes of every kind, per bucket, are equal in every step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ragged_optim
from fsdp import MixedPrecisionPolicy, fully_shard, memory_report
from fsdp.simulate import record
from ragged_optim import policies
from ragged_shard import Block, ParamPolicy
from tests import cluster
from tests.fsdp.modules import Stack, squares
from tests.models import LanguageModel, loss_of, tokens

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return ragged_optim.Muon(model.named_parameters(), orig_param_policy=policies.muon(), lr=1e-2)


CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "stack": (Stack, adamw, {}),
    "stack, resharded": (Stack, adamw, {"reshard_after_forward": True}),
    "tied, rows, Muon": (
        lambda: LanguageModel(tied=True),
        muon,
        {"orig_param_policy": lambda n, p: ParamPolicy(block=Block.rows(3)), "reshard_after_forward": True},
    ),
    "bf16, kept, sgd": (
        lambda: LanguageModel(depth=4, width=24),
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
        {"mp_policy": BF16, "reshard_after_forward": False},
    ),
    "frozen, whole tensors, 8 bits": (
        lambda: LanguageModel(vocabulary=128, width=64, hidden=96, depth=2),
        lambda m: ragged_optim.AdamW8bit(
            [(n, p) for n, p in m.named_parameters() if p.requires_grad], orig_param_policy=policies.adamw8bit()
        ),
        {"orig_param_policy": lambda n, p: ParamPolicy(block=Block.whole()), "reshard_after_forward": True},
    ),
}


def reports(name: str) -> list[str]:
    make, optimizer_of, options = CASES[name]
    torch.manual_seed(0)
    model = make()
    if "frozen" in name:
        model.blocks[0].up.weight.requires_grad_(False)
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = optimizer_of(model)
    before = memory_report(model, optimizer)
    found = [f"before the first step: {s}" for s in before.surprises]

    def step() -> None:
        data = tokens(model.embed.num_embeddings, dist.get_rank(), 0) if isinstance(model, LanguageModel) else None
        optimizer.zero_grad()
        (squares(model) if data is None else loss_of(model, data)).backward()
        optimizer.step()

    profile = record(model, step)
    for number in range(3):
        report = memory_report(model, optimizer, profile)
        found += [f"step {number}: {s}" for s in report.surprises]
        if not (report.parameters and report.gradients and report.optimizer_state and report.buffers_peak):
            found.append(f"step {number}: nothing observed")
        states = [s for bucket in report.buckets for s in (bucket.state,)]
        if sum(states) != report.optimizer_state:
            found.append(f"step {number}: {sum(states)} bytes of states in buckets, {report.optimizer_state} in all")
        if "as predicted" not in str(report) or "NOT" in str(report):
            found.append(str(report))
        step()
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_predicted_and_observed_bytes_are_equal_in_every_step(world_size: int) -> None:
    for name in CASES:
        assert cluster.run(world_size, reports, name) == [[]] * world_size, name


def surprised() -> list[str]:
    """Memory that nobody predicted is named: a state that keeps a larger storage, a forward that gathers more."""
    torch.manual_seed(0)
    model = Stack()
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=True)
    fully_shard(model, reshard_after_forward=True)
    optimizer = adamw(model)

    def step() -> None:
        optimizer.zero_grad()
        squares(model).backward()
        optimizer.step()

    profile = record(model, step)
    head = optimizer.state[model.head]["exp_avg"]
    room = head._local_tensor.numel()
    head._local_tensor = torch.zeros(2 * room + 64)[:room].view(head._local_tensor.shape)
    model.blocks[0].unshard()
    model.blocks[1].unshard()
    model.blocks[2].unshard()
    model.unshard()
    step()
    report = memory_report(model, optimizer, profile)
    return [*report.surprises, str(report)]


def test_memory_that_nobody_predicted_is_named() -> None:
    for *surprises, text in cluster.run(2, surprised):
        assert any(s.startswith("Stack: ") and "states" in s for s in surprises), surprises
        assert any(s.startswith("communication buffers: ") and "at the peak" in s for s in surprises), surprises
        assert "NOT as predicted" in text and " != " in text
