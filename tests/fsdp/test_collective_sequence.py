"""Which collectives a step issues: how many gathers, how many reductions, and the same sequence on every rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp import fully_shard
from tests import cluster
from tests.fsdp.counting import Counted
from tests.fsdp.modules import Half, Optional, Stack, data

DEPTH = 3


def stack(depth: int = DEPTH, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = Stack(depth)
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def plainly(model: nn.Module, step: int) -> Tensor:
    return model(data(step)).square().mean()


class CheckpointedStack(Stack):
    reentrant = False
    calls = 1

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            for _ in range(self.calls):
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x @ self.head


class RepeatedStack(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.blocks[0](x))


def sharded(kind: type[Stack], **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = kind()
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def two_forwards(model: nn.Module, step: int) -> Tensor:
    return plainly(model, step) + plainly(model, step + 100)


def per_step(
    kind: str, loss: Callable[[nn.Module, int], Tensor] = plainly, steps: int = 3, **options: Any
) -> tuple[list[float], list[int], list[list[tuple[str, int]]]]:
    """Of each step: gathers, reductions, and all collectives."""
    classes = {
        "plain": Stack,
        "repeated": RepeatedStack,
        "checkpoint": CheckpointedStack,
        "reentrant": type("Reentrant", (CheckpointedStack,), {"reentrant": True}),
        "checkpoint twice": type("Twice", (CheckpointedStack,), {"calls": 2}),
        "reentrant twice": type("ReentrantTwice", (CheckpointedStack,), {"reentrant": True, "calls": 2}),
    }
    model = sharded(classes[kind], **options)
    ranks = torch.distributed.get_world_size()
    gathers, reductions, sequences = [], [], []
    for step in range(steps):
        model.zero_grad()
        with Counted() as counted:
            # A reentrant checkpoint needs an input that wants a gradient.
            x = data(step).requires_grad_(kind.startswith("reentrant"))
            loss_value = model(x).square().mean() if loss is plainly else loss(model, step)
            loss_value.backward()
        gathers.append(counted.gathers(ranks))
        reductions.append(counted.reductions(ranks))
        sequences.append(counted.collectives)
    return gathers, reductions, sequences


BUCKETS = DEPTH + 1


@pytest.mark.parametrize(
    ("reshard_after_forward", "gathers"), [(True, 2 * BUCKETS), (False, BUCKETS), (None, 2 * BUCKETS - 2)]
)
def test_gathers_of_a_step(reshard_after_forward: bool | None, gathers: int) -> None:
    """``None`` keeps the root and, once an iteration has shown which it is, the bucket that backward starts with."""
    for counted, reductions, _ in cluster.run(2, per_step, "plain", reshard_after_forward=reshard_after_forward):
        assert counted[1:] == [gathers, gathers]
        assert counted[0] in (gathers, gathers + 1)
        assert reductions == [BUCKETS] * 3


@pytest.mark.parametrize(
    ("kind", "gathers", "reductions"),
    [
        ("repeated", 2 * BUCKETS + 1, BUCKETS),
        ("checkpoint", 2 * BUCKETS, BUCKETS),
        ("reentrant", 2 * BUCKETS, BUCKETS),
        ("checkpoint twice", 2 * BUCKETS + DEPTH, BUCKETS),
    ],
)
def test_gathers_with_checkpoints_and_repeated_modules(kind: str, gathers: int, reductions: int) -> None:
    """A recomputation gathers once for itself and the backward that follows it (pytorch/pytorch#175406)."""
    for counted, reduced, _ in cluster.run(2, per_step, kind, reshard_after_forward=True):
        assert reduced[1:] == [reductions] * 2
        assert max(counted[1:]) <= gathers
        assert min(counted[1:]) >= 2 * BUCKETS


def test_reentrant_checkpoint_of_a_module_called_twice_may_reduce_twice() -> None:
    """Each recomputation is a backward of its own; the sum must be right (test_forward_patterns), the count bounded."""
    for counted, reduced, _ in cluster.run(2, per_step, "reentrant twice", reshard_after_forward=True):
        assert max(reduced) <= BUCKETS + DEPTH
        assert max(counted) <= 2 * BUCKETS + 2 * DEPTH


def test_two_forwards_before_one_backward_gather_twice_and_reduce_once() -> None:
    for counted, reduced, _ in cluster.run(2, per_step, "plain", two_forwards, reshard_after_forward=True):
        assert reduced == [BUCKETS] * 3
        assert 3 * BUCKETS <= max(counted) <= 4 * BUCKETS


def test_evaluation_gathers_each_bucket_once() -> None:
    assert cluster.run(2, gathers_of_evaluation) == [[BUCKETS] * 3] * 2


def gathers_of_evaluation() -> list[float]:
    model, counts = stack(), []
    for _ in range(3):
        with Counted() as counted, torch.no_grad():
            model(data())
        counts.append(counted.gathers(2))
    return counts


def test_one_mask_reduction_a_backward() -> None:
    """Which parameters any rank used is one small message, whatever the number of buckets."""
    for _, _, sequences in cluster.run(2, per_step, "plain"):
        for sequence in sequences:
            assert sum(name in ("send", "allreduce_") for name, _ in sequence) == 1


def divergent(step_of_change: int) -> list[tuple[str, int]]:
    """Ranks use different parameters; the order of modules changes between steps, alike on all ranks."""
    torch.manual_seed(0)
    model = Optional()
    model.b = Half()
    for child in (model.a, model.b, model.c):
        fully_shard(child)
    fully_shard(model)
    sequence = []
    for step in range(4):
        model.b.use = "one" if torch.distributed.get_rank() == step % 2 else "two"
        model.skip = ("a",) if step == step_of_change else ()
        with Counted() as counted:
            model(data(step)).square().mean().backward()
        sequence += counted.collectives
    return sequence


def whole_reductions(sequence: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """The two all-to-alls of a reduction as one: what goes to lower and to higher ranks differs between ranks."""
    found: list[tuple[str, int]] = []
    first: int | None = None
    for name, size in sequence:
        if not name.startswith("alltoall"):
            assert first is None
            found.append((name, size))
        elif first is None:
            first = size
        else:
            found.append((name, first + size))
            first = None
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_rank_issues_the_same_sequence(world_size: int) -> None:
    for case in (partial(divergent, 2), partial(divergent, 9)):
        results = cluster.run(world_size, case)
        if world_size > 2:
            results = [whole_reductions(result) for result in results]
        assert all(result == results[0] for result in results)
    for kind in ("plain", "reentrant twice"):
        results = [sequences for _, _, sequences in cluster.run(world_size, per_step, kind)]
        if world_size > 2:
            results = [[whole_reductions(sequence) for sequence in sequences] for sequences in results]
        assert all(result == results[0] for result in results)
