"""With an empty shard, the infinity norm raised on that rank alone, and the others waited for it
(pytorch/pytorch#173238, meta-pytorch/torchrec#3809).
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import distribute_tensor

from ragged_shard import RaggedShard
from tests import cluster

UNITS = ((1, 0, 0, 0), (0, 0, 2, 0), (0, 1, 1, 4), (1, 2, 0, 3))


def norms(order: float) -> list[float]:
    """The norm of several gradients, most ranks without elements of most of them, and each after clipping by it."""
    mesh = cluster.mesh((4,))
    parameters, plain = [], []
    for number, units in enumerate(UNITS):
        full = torch.linspace(-3, 2, 24).reshape(12, 2) * (number + 1)
        parameters.append(nn.Parameter(distribute_tensor(torch.zeros(12, 2), mesh, [RaggedShard((0,), units)])))
        parameters[-1].grad = distribute_tensor(full, mesh, [RaggedShard((0,), units)])
        plain.append(nn.Parameter(torch.zeros(12, 2)))
        plain[-1].grad = full.clone()
    found = nn.utils.clip_grad_norm_(parameters, 1.0, norm_type=order).full_tensor()
    torch.testing.assert_close(found, nn.utils.clip_grad_norm_(plain, 1.0, norm_type=order))
    for mine, other in zip(parameters, plain, strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), other.grad)
    return [float(found)]


@pytest.mark.parametrize("order", [math.inf, 1.0, 2.0, 0.0])
def test_norms_of_empty_shards_do_not_hang(order: float) -> None:
    assert len({tuple(found) for found in cluster.run(4, norms, order)}) == 1
