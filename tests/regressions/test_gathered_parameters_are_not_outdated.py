"""Parameters that stay gathered were computed with, and shown, after their shards had changed: an evaluation between
backward and optimizer.step() with reshard_after_forward=False made the next iteration compute with the weights of
before, without a word. FSDP2 still does so.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from fsdp import FSDPModule
from tests import cluster
from tests.fsdp.modules import Stack, data, squares
from tests.fsdp.reference import average_gradients, differences, shard_children, twins


def evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        model(data(9))


def unshard(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard(async_op=isinstance(module, Stack))


def before_the_step(meanwhile: Callable[[nn.Module], None], fused: bool, create_graph: bool) -> list[str]:
    sharded, plain = twins(Stack, partial(shard_children, reshard_after_forward=meanwhile is unshard))
    pairs = [(m, torch.optim.AdamW(m.parameters(), lr=0.1, fused=fused)) for m in (sharded, plain)]
    found = []
    for number in range(2):
        for model, _ in pairs:
            squares(model, number).backward(create_graph=create_graph)
        average_gradients(plain)
        for model, optimizer in pairs:
            meanwhile(model)
            optimizer.step()
        found += differences(sharded, plain, tolerance=1e-5)
        for _, optimizer in pairs:
            optimizer.zero_grad()
    return found


def average() -> list[str]:
    """Of a model that is never trained and stays gathered, by its parameters of before the first forward."""
    sharded, plain = twins(Stack, partial(shard_children, reshard_after_forward=False))
    kept = [(m, list(m.requires_grad_(False).parameters())) for m in (sharded, plain)]
    found = []
    for number in range(3):
        outputs = []
        for model, parameters in kept:
            with torch.no_grad():
                outputs.append(model(data(number)))
                for parameter in parameters:
                    parameter.mul_(1.5)
        if not torch.equal(*outputs):
            found.append(f"output {number}")
    return found


def cases() -> list[str]:
    found = average()
    for meanwhile in (evaluate, unshard):
        for fused, create_graph in ((True, False), (False, True)):
            found += before_the_step(meanwhile, fused, create_graph)
    return found


def test_gathered_parameters_are_not_outdated() -> None:
    assert cluster.run(2, cases) == [[], []]
