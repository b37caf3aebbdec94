"""unshard, reshard, the handle, prefetch lists, and who is the root."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import UnshardHandle as TorchUnshardHandle
from torch.distributed.tensor import DTensor

from fsdp import FSDPModule, UnshardHandle, fully_shard, share_comm_ctx
from fsdp.hooks import state_of
from tests import cluster
from tests.fsdp.counting import Counted
from tests.fsdp.modules import WIDTH, Mlp, Stack, data, squares
from tests.fsdp.reference import differences, shard_children, step, train, twins


def check(world_size: int, function: Callable[..., list[str]], *args: Any, **kwargs: Any) -> None:
    assert cluster.run(world_size, function, *args, **kwargs) == [[]] * world_size


def is_whole(module: nn.Module) -> bool:
    kinds = {not isinstance(p, DTensor) for p in module.parameters(recurse=False)}
    (kind,) = kinds
    return kind


def by_hand(asynchronous: bool) -> list[str]:
    sharded, plain = twins(Stack)
    found = []
    for number in range(3):
        handle = sharded.unshard(async_op=asynchronous)
        if asynchronous:
            if not isinstance(handle, UnshardHandle) or not isinstance(handle, TorchUnshardHandle):
                found.append(f"unshard returned {handle!r}")
            handle.wait()
            handle.wait()
        elif handle is not None:
            found.append(f"unshard returned {handle!r}")
        if not is_whole(sharded) or any(is_whole(b.up) for b in sharded.blocks):
            found.append("unshard is of this module alone")
        if not torch.equal(sharded.head, plain.head):
            found.append("wrong values after unshard")
        sharded.unshard()
        if number == 1:
            sharded.reshard()
            sharded.reshard()
            if is_whole(sharded):
                found.append("reshard does nothing")
        found += step(sharded, plain, lambda m, n=number: squares(m, n))
        for model in (sharded, plain):
            model.zero_grad()
    return found


@pytest.mark.parametrize("asynchronous", [False, True])
def test_unshard_and_reshard_by_hand(asynchronous: bool) -> None:
    check(2, by_hand, asynchronous)


def prefetched_by_hand() -> list[str]:
    """unshard(async_op=True) before forward without waiting: forward waits for it, and gathers once."""
    sharded, plain = twins(Stack, partial(shard_children, reshard_after_forward=False))
    found = step(sharded, plain, squares)
    for model in (sharded, plain):
        model.zero_grad()
    with Counted() as counted:
        for block in sharded.blocks:
            block.unshard(async_op=True)
        loss = squares(sharded, 1)
    if counted.gathers(2) != 4:
        found.append(f"{counted.gathers(2)} gathers")
    loss.backward()
    squares(plain, 1).backward()
    from tests.fsdp.reference import average_gradients

    average_gradients(plain)
    return found + differences(sharded, plain)


def test_forward_waits_for_an_unshard_on_its_way() -> None:
    check(2, prefetched_by_hand)


def before_the_first_forward() -> list[str]:
    """Unsharded before anybody knows the root; changed, resharded, changed; what counts is what the shards hold."""
    sharded, plain = twins(Stack)
    found = []
    for block in sharded.blocks:
        block.unshard()
    sharded.unshard()
    if not all(torch.equal(a, b) for a, b in zip(sharded.parameters(), plain.parameters(), strict=True)):
        found.append("wrong values")
    for module in [*sharded.blocks, sharded]:
        module.reshard()
    with torch.no_grad():
        for model in (sharded, plain):
            for parameter in model.parameters():
                parameter.mul_(2)
    return found + step(sharded, plain, squares)


def test_unshard_before_the_first_forward() -> None:
    check(2, before_the_first_forward)


def outside_forward() -> list[str]:
    """A method that needs whole parameters outside forward: unshard, compute, reshard; then train."""
    sharded, plain = twins(Stack)
    found = step(sharded, plain, squares)
    sharded.unshard()
    with torch.no_grad():
        if not torch.equal(data() @ sharded.head, data() @ plain.head):
            found.append("compute")
    sharded.reshard()
    for model in (sharded, plain):
        model.zero_grad()
    return found + step(sharded, plain, partial(squares, step=1))


def test_compute_with_unsharded_parameters_outside_forward() -> None:
    check(2, outside_forward)


def lists(forward: bool, backward: bool, ahead: int, reshard_after_forward: bool | None) -> list[str]:
    def shard(model: nn.Module) -> nn.Module:
        shard_children(model, reshard_after_forward=reshard_after_forward)
        blocks = list(model.blocks)
        for index, block in enumerate(blocks):
            if forward:
                block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + ahead])
            if backward:
                block.set_modules_to_backward_prefetch(blocks[max(0, index - ahead) : index][::-1])
        return model

    return train(partial(Stack, 4), squares, shard)


@pytest.mark.parametrize("ahead", [1, 3])
@pytest.mark.parametrize(("forward", "backward"), [(True, False), (False, True), (True, True)])
def test_prefetch_lists(forward: bool, backward: bool, ahead: int) -> None:
    check(2, lists, forward, backward, ahead, True)


def held(blocks: list[nn.Module]) -> list[int]:
    """Which blocks have memory under their gathered buffer: unsharded, or on the way."""
    buffers = [state_of(block).bucket.buffers[0].full for block in blocks]
    return [index for index, full in enumerate(buffers) if full is not None and full.held]


def gathered_ahead(ahead: int) -> list[list[int]]:
    """What is held when each block computes, in the first iteration."""
    torch.manual_seed(0)
    model = shard_children(Stack(4), reshard_after_forward=True)
    blocks, seen = list(model.blocks), []
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + ahead])
        block.register_forward_pre_hook(lambda *_: seen.append(held(blocks)))
    squares(model).backward()
    return seen


def test_forward_prefetch_lists_gather_ahead() -> None:
    for seen in cluster.run(2, gathered_ahead, 2):
        assert seen == [[0, 1, 2], [1, 2, 3], [2, 3], [3]]


def implicit_prefetch() -> list[list[int]]:
    """What is held when each block computes forward and backward, in the second iteration."""
    torch.manual_seed(0)
    model = shard_children(Stack(4), reshard_after_forward=True)
    blocks, seen = list(model.blocks), []
    squares(model).backward()
    for block in blocks:
        block.register_forward_pre_hook(lambda *_: seen.append(held(blocks)))
        block.register_full_backward_pre_hook(lambda *_: seen.append(held(blocks)))
    squares(model, 1).backward()
    return seen


def test_the_next_block_is_gathered_while_one_computes() -> None:
    """At most two at once (DESIGN: memory is known), in forward and in backward."""
    for seen in cluster.run(2, implicit_prefetch):
        assert seen[:4] == [[0, 1], [1, 2], [2, 3], [3]]
        assert all(len(blocks) <= 2 for blocks in seen[4:])


def changing_order() -> list[str]:
    """Dynamic modules: another order, fewer and repeated blocks from step to step, the same on all ranks."""

    class Dynamic(Stack):
        order = (0, 1, 2)

        def forward(self, x: Tensor) -> Tensor:
            for index in self.order:
                x = self.blocks[index](x)
            return x @ self.head

    sharded, plain = twins(Dynamic, partial(shard_children, reshard_after_forward=True))
    found = []
    for number, order in enumerate([(0, 1, 2), (2, 1, 0), (1,), (0, 0, 2), (2, 0, 1), (0, 1, 2)]):
        for model in (sharded, plain):
            model.order = order
            model.zero_grad()
        found += [
            f"step {number}: {d}" for d in step(sharded, plain, lambda m, n=number: squares(m, n), tolerance=1e-6)
        ]
    return found


def test_the_order_of_modules_may_change() -> None:
    check(2, changing_order)
    check(3, changing_order)


def types() -> list[str]:
    model = fully_shard(Mlp())
    found = []
    if not isinstance(model, FSDPModule) or not isinstance(model, TorchFSDPModule) or not isinstance(model, Mlp):
        found.append("isinstance")
    if type(model).__name__ != "FSDPMlp":
        found.append(type(model).__name__)
    inherited = [
        name
        for name in vars(TorchFSDPModule)
        if not name.startswith("__") and name not in vars(FSDPModule) and callable(getattr(TorchFSDPModule, name))
    ]
    # Those that torch's class defines must be our own: they would look for torch's state.
    return found + [f"inherited from torch unchanged: {name}" for name in inherited]


def test_the_class_is_torchs_and_ours() -> None:
    check(1, types)


def sliced() -> list[str]:
    """Indexing a sharded Sequential makes a plain one (torch's __new__)."""
    model = fully_shard(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)))
    part = model[:2]
    return [] if type(part) is nn.Sequential and len(part) == 2 else [type(part).__name__]


def test_slicing_a_sharded_sequential() -> None:
    check(1, sliced)


def child_first() -> str:
    torch.manual_seed(0)
    model = shard_children(Stack())
    model.blocks[0](data())
    try:
        model(data())
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_child_that_ran_before_its_root_is_an_error() -> None:
    for message in cluster.run(2, child_first):
        assert "blocks.0" in message and "outermost" in message


def no_root() -> list[str]:
    """Blocks that are sharded on their own, without a common parent: each is a root, all train."""

    def shard(model: nn.Module) -> nn.Module:
        for block in model.blocks:
            fully_shard(block)
        return model

    class Headless(Stack):
        def __init__(self) -> None:
            super().__init__()
            del self.head

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    return train(Headless, squares, shard)


def test_several_roots_without_a_common_parent() -> None:
    check(2, no_root)


def shared_context() -> list[str]:
    """Pipeline stages: two roots whose memory is one pool."""

    class Stages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Stack(2), nn.Sequential(nn.Linear(5, WIDTH), Stack(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    def shard(model: nn.Module) -> nn.Module:
        shard_children(model.first)
        shard_children(model.second[1])
        fully_shard(model.second)
        share_comm_ctx([model.first, model.second])
        return model

    found = train(Stages, squares, shard)
    model = shard(Stages())
    squares(model).backward()
    if state_of(model.first).bucket.pool is not state_of(model.second[1].blocks[0]).bucket.pool:
        found.append("the roots have pools of their own")
    return found


def test_share_comm_ctx() -> None:
    check(2, shared_context)


def not_gathered_in_backward() -> list[str]:
    """set_unshard_in_backward(False) on an embedding saves its second gather; the gradients are the same."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, WIDTH)
            self.blocks = nn.ModuleList(Mlp() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            h = self.embed(torch.arange(5))
            for block in self.blocks:
                h = block(h)
            return h

    def shard(model: nn.Module) -> nn.Module:
        shard_children(model, reshard_after_forward=True)
        model.embed.set_unshard_in_backward(False)
        return model

    found = train(Model, squares, shard)
    model = shard(Model())
    squares(model).backward()
    with Counted() as counted:
        squares(model).backward()
    return found if counted.gathers(2) == 5 else [*found, f"{counted.gathers(2)} gathers"]


def test_set_unshard_in_backward() -> None:
    check(2, not_gathered_in_backward)
