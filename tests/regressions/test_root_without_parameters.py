"""A root all of whose parameters lie in its children's buckets has an empty bucket of its own: backward ended in
"IndexError: list index out of range".
"""

from __future__ import annotations

import pytest
from torch import nn

from fsdp import fully_shard, memory_report
from tests import cluster
from tests.fsdp.modules import WIDTH, squares
from tests.fsdp.reference import train


def sequential(ignore: bool) -> list[str]:
    def make() -> nn.Module:
        return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def shard(model: nn.Module) -> nn.Module:
        for child in list(model)[: None if not ignore else 2]:
            fully_shard(child)
        return fully_shard(model, ignored_params=set(model[2].parameters()) if ignore else None)

    if ignore:
        model = shard(make())
        squares(model).backward()
        return [] if all(p.grad is not None for p in model.parameters()) else ["no gradient"]
    return train(make, squares, shard)


@pytest.mark.parametrize("ignore", [False, True])
def test_root_without_parameters_of_its_own(ignore: bool) -> None:
    assert cluster.run(2, sequential, ignore) == [[], []]


def without_any() -> list[str]:
    """No parameters at all, and reports of such a module."""
    model = fully_shard(nn.Sequential(nn.ReLU(), fully_shard(nn.Identity())))
    squares(model)
    model.unshard()
    model.reshard()
    return [] if memory_report(model).parameters == 0 else ["bytes of parameters"]


def test_module_without_any_parameter() -> None:
    assert cluster.run(2, without_any) == [[], []]
