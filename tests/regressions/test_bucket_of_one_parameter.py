"""Stepping a bucket that holds a single parameter raised "Tensor list must have at least one tensor"."""

import torch
from torch import nn

from fsdp import fully_shard
from ragged_optim import AdamW
from tests import cluster


def step() -> bool:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False))
    reference = [p.detach().clone().requires_grad_() for p in model.parameters()]
    fully_shard(model[0])
    fully_shard(model)
    optimizers = AdamW(model.named_parameters(), lr=1e-2), torch.optim.AdamW(reference, lr=1e-2)
    inputs = torch.ones(2, 8)
    model(inputs).sum().backward()
    (inputs @ reference[0].t() @ reference[1].t()).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    ours = [p.detach().full_tensor() for p in model.parameters()]
    return all(torch.allclose(a, b, rtol=1e-6, atol=1e-7) for a, b in zip(ours, reference, strict=True))


def test_a_bucket_of_one_parameter_steps() -> None:
    assert all(cluster.run(2, step))
