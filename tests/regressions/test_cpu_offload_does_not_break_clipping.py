"""CPU offload broke clipping: no collective on CPU tensors in a GPU group, or norms of parts
(pytorch/pytorch#148532, pytorch/torchtune#1977).
"""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import nn

import fsdp
from fsdp import CPUOffloadPolicy
from tests import cluster
from tests.fsdp.modules import Stack, squares
from tests.fsdp.reference import average_gradients, differences, shard_children, twins


def clipped(pin_memory: bool, function: str) -> list[str]:
    offload = CPUOffloadPolicy(pin_memory=pin_memory)
    sharded, plain = twins(Stack, partial(shard_children, offload_policy=offload))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=True) for m in (sharded, plain)]
    clip = fsdp.clip_grad_norm_ if function == "ours" else nn.utils.clip_grad_norm_
    found = []
    for number in range(3):
        for model in (sharded, plain):
            squares(model, number).backward()
        average_gradients(plain)
        norms = [clip(sharded.parameters(), 0.05).item(), nn.utils.clip_grad_norm_(plain.parameters(), 0.05).item()]
        if not math.isclose(*norms, rel_tol=1e-5):
            found.append(f"step {number}: norms {norms}")
        found += [f"step {number}: {d}" for d in differences(sharded, plain, 1e-6)]
        found += [n for n, p in sharded.named_parameters() if p.device.type != "cpu" or p.grad.device.type != "cpu"]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return found


@pytest.mark.parametrize("function", ["ours", "torch"])
@pytest.mark.parametrize("pin_memory", [False, True])
def test_cpu_offload_does_not_break_clipping(pin_memory: bool, function: str) -> None:
    assert cluster.run(2, clipped, pin_memory, function) == [[], []]
