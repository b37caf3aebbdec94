"""gloo took ReduceOp.AVG for SUM, silently: gradients came out W times too large (pytorch/pytorch#162338)."""

from __future__ import annotations

from functools import partial

import pytest

from tests import cluster
from tests.fsdp.modules import Stack, squares
from tests.fsdp.reference import shard_children, train


def mean(shape: tuple[int, ...]) -> list[str]:
    mesh = cluster.mesh(shape, ("replicate", "shard")[-len(shape) :])
    return train(Stack, squares, partial(shard_children, mesh=mesh), tolerance=0.0 if shape == (2,) else 1e-5)


@pytest.mark.parametrize("shape", [(1,), (2,), (3,), (4,), (2, 2)])
def test_gradients_on_gloo_are_the_mean_and_not_the_sum(shape: tuple[int, ...]) -> None:
    world_size = shape[0] * shape[-1] if len(shape) == 2 else shape[0]
    assert cluster.run(world_size, mean, shape) == [[]] * world_size
