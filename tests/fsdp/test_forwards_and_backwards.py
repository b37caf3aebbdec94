"""Forwards that no backward follows, several for one backward and the other way round, and modules that ranks pass by
at different times: the same gradients, and the same collectives, as if nothing were odd.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp.bucket
from fsdp import fully_shard
from fsdp.hooks import state_of
from tests import cluster
from tests.fsdp.modules import WIDTH, Half, Optional, Stack, data, squares
from tests.fsdp.reference import average_gradients, differences, shard_children, step, train, twins

# ---- no backward ----


def events(model: nn.Module, loss: Tensor) -> list[str]:
    """What a backward did, in order."""
    pool = state_of(model).bucket.pool
    pool.timeline = []
    loss.backward()
    happened, pool.timeline = pool.timeline, None
    return [f"{e.action} {e.owner}" for e in happened if e.action in ("unshard", "reshard", "reduce", "reduced")]


def after_abandoned_forwards(reshard_after_forward: bool | None) -> list[str]:
    sharded, plain = twins(Stack, partial(shard_children, reshard_after_forward=reshard_after_forward))
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.0)
    squares(sharded).backward()
    expected = events(sharded, squares(sharded))
    found, kept = [], []
    for number in range(3):
        optimizer.zero_grad()
        if number == 1:
            # The loss of an evaluation, still referred to.
            kept.append(squares(sharded, 5))
        elif number == 2:
            squares(sharded, 6)
            squares(sharded, 7)
        loss = squares(sharded)
        if (happened := events(sharded, loss)) != expected:
            found.append(f"{number}: {happened}, expected {expected}")
    squares(plain).backward()
    average_gradients(plain)
    schedule = state_of(sharded).schedule
    found += differences(sharded, plain) + ["calls are remembered"] * (len(schedule._forwards) > 1)
    # The kept one may have its backward after all.
    kept[0].backward()
    squares(plain, 5).backward()
    plain.zero_grad()
    for number in (0, 5):
        squares(plain, number).backward()
    average_gradients(plain)
    return found + differences(sharded, plain, 1e-6)


@pytest.mark.parametrize("reshard_after_forward", [True, None])
def test_a_forward_without_backward_does_not_delay_the_reductions_of_the_next(
    reshard_after_forward: bool | None,
) -> None:
    assert cluster.run(2, after_abandoned_forwards, reshard_after_forward) == [[], []]


# ---- modules that some ranks pass by ----


class Odd(nn.Module):
    """Four blocks; ``uses`` says of each call of the model, and of each block, what it runs ('none': hands through)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Half() for _ in range(4))
        self.uses: list[tuple[str, ...]] = []
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        uses = self.uses[self.calls % len(self.uses)]
        self.calls += 1
        x = self.first(x)
        for block, block.use in zip(self.blocks, uses, strict=True):
            x = block(x)
        return x


ALL, NONE = ("both",) * 4, ("none",) * 4
# Of two calls, on rank 0 and on the others.
PATTERNS: list[tuple[list[tuple[str, ...]], list[tuple[str, ...]]]] = [
    ([("both", "none", "both", "both"), ALL], [ALL, ("both", "none", "both", "both")]),
    ([("none", "both", "none", "both"), ("both", "none", "both", "none")], [ALL, ALL]),
    ([NONE, ALL], [ALL, NONE]),
    ([("both", "both", "both", "none"), ("one", "two", "none", "both")], [("none", "both", "two", "one"), ALL]),
    ([NONE, NONE], [("none", "none", "both", "none"), ("both", "none", "none", "none")]),
]


def sum_of_two(model: nn.Module) -> None:
    (squares(model, 0) + squares(model, 1)).backward()


def in_order(model: nn.Module) -> None:
    losses = [squares(model, 0), squares(model, 1)]
    for loss in losses:
        loss.backward()


def last_first(model: nn.Module) -> None:
    one, two = squares(model, 0), squares(model, 1)
    two.backward()
    one.backward()


def twice(model: nn.Module) -> None:
    for number in range(2):
        loss = squares(model, number)
        loss.backward(retain_graph=True)
        (loss * 2).backward()


def two_losses(model: nn.Module) -> None:
    for number in range(2):
        out = model(data(number))
        out[:2].square().mean().backward(retain_graph=True)
        out[2:].square().mean().backward()


def gradient_first(model: nn.Module) -> None:
    for number in range(2):
        x = data(number).requires_grad_()
        loss = model(x).square().mean()
        torch.autograd.grad(loss, x, retain_graph=True)
        loss.backward()


def repeated(model: nn.Module) -> None:
    """The second call continues from the first one's output."""
    model(model(data(0))).square().mean().backward()


WAYS: list[Callable[[nn.Module], None]] = [
    sum_of_two, in_order, last_first, twice, two_losses, gradient_first, repeated,
]  # fmt: skip


def shard_odd(reshard_after_forward: bool | None, model: nn.Module) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard_after_forward)
    return fully_shard(model, reshard_after_forward=reshard_after_forward)


def passed_by() -> list[str]:
    found = []
    for reshard in (True, None) if dist.get_world_size() == 2 else (True,):
        sharded, plain = twins(Odd, partial(shard_odd, reshard))
        optimizer = torch.optim.SGD(sharded.parameters(), lr=0.0)
        for number, pattern in enumerate(PATTERNS):
            for way in WAYS:
                optimizer.zero_grad()
                plain.zero_grad()
                for model in (sharded, plain):
                    model.uses, model.calls = pattern[min(dist.get_rank(), 1)], 0
                    way(model)
                average_gradients(plain)
                found += [f"{reshard} {number} {way.__name__}: {d}" for d in differences(sharded, plain, 1e-5)]
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_modules_that_ranks_pass_by_in_different_calls(world_size: int) -> None:
    assert cluster.run(world_size, passed_by, deadline=60) == [[]] * world_size


def skipped(where: str) -> str:
    """With RAGGED_DEBUG=1."""
    torch.manual_seed(0)
    model = shard_children(Optional(), reshard_after_forward=True)
    squares(model).backward()
    fsdp.bucket._DEBUG, fsdp.bucket._issued = True, itertools.count(1)
    try:
        if dist.get_rank() == 1:
            model.skip = (where,)
        squares(model).backward()
        return "no error"
    except ValueError as error:
        return str(error)
    finally:
        fsdp.bucket._DEBUG = False
        model.reset_iter_state()


def test_a_module_that_one_rank_does_not_run_is_named_in_debug_mode() -> None:
    """There is no telling, on the rank that does not run it, that others do: FSDP2 hangs as well."""
    for where in ("a", "b", "c"):
        one, other = cluster.run(2, skipped, where)
        assert one == other and "RAGGED_DEBUG" in one and f"all_gather of '{where}'" in one, one


# ---- how many reductions at once, and where memory comes from ----


def limited(limit: int) -> int:
    """The largest number of reductions in flight; gradients are checked."""
    sharded, plain = twins(partial(Stack, 5), partial(shard_children, reshard_after_forward=True))
    sharded.set_reduce_scatter_max_input_buffers(limit)
    assert not step(sharded, plain, squares) and not step(sharded, plain, squares, tolerance=1e-6)
    most = flying = 0
    for event in events(sharded, squares(sharded)):
        flying += {"reduce": 1, "reduced": -1}.get(event.split()[0], 0)
        most = max(most, flying)
    return most


def test_as_many_reductions_in_flight_as_asked_for() -> None:
    assert [cluster.run(2, limited, limit)[0] for limit in (1, 2, 3)] == [1, 2, 3]


class Backend:
    """A process group's backend with an allocator."""

    def __init__(self) -> None:
        self.made: list[int] = []

    def _get_backend(self, device: torch.device) -> Backend:
        return self

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return True

    def allocate_tensor(self, size: int, **options: Any) -> Tensor:
        self.made.append(size)
        return torch.empty(size, **options)


def from_the_group() -> list[str]:
    def shard(model: nn.Module, group: Any = None) -> nn.Module:
        shard_children(model, reshard_after_forward=True)
        model.set_allocate_memory_from_process_group_for_comm(True)
        if group is not None:
            pool = state_of(model).lazy_init().pool
            pool.allocator = partial(fsdp.bucket._group_memory, group, pool.device)
        return model

    # gloo has no allocator: nothing changes. A backend that has one makes every block.
    backend = Backend()
    found = train(Stack, squares, shard) + train(Stack, squares, partial(shard, group=backend))
    model = shard(Stack(), backend)
    backend.made.clear()
    squares(model).backward()
    held = state_of(model).bucket.pool.ledger.held
    return found if sum(backend.made) == held > 0 else [*found, f"{backend.made} of {held}"]


def test_memory_from_the_process_group() -> None:
    assert cluster.run(2, from_the_group) == [[], []]
