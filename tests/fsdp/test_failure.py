"""After an exception in forward, backward or a hook, the next iteration computes what a clean run computes, and memory
rests.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fsdp.hooks import state_of
from tests import cluster
from tests.fsdp.modules import WIDTH, Mlp, Stack, data, squares
from tests.fsdp.reference import average_gradients, differences, full, shard_children, step, train, twins


class Boom(Exception):
    pass


class RaiseInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise Boom("in backward")


class Fragile(nn.Module):
    """``where`` says in which block and direction the next pass raises."""

    class Block(Mlp):
        raises = ""

        def forward(self, x: Tensor) -> Tensor:
            if self.raises == "forward":
                raise Boom("in forward")
            x = super().forward(x)
            if self.raises == "after compute":
                raise Boom("late in forward")
            return RaiseInBackward.apply(x) if self.raises == "backward" else x

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))
        self.head = nn.Parameter(torch.randn(WIDTH, 5))
        self.checkpointed: bool | None = None
        self.raises = ""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.checkpointed is None else checkpoint(block, x, use_reentrant=self.checkpointed)
        if self.raises == "forward":
            raise Boom("in the root's forward")
        return x @ self.head


def check(world_size: int, function: Callable[..., list[str]], *args: Any, **kwargs: Any) -> None:
    assert cluster.run(world_size, function, *args, **kwargs) == [[]] * world_size


def resting(model: nn.Module) -> list[str]:
    ledger = state_of(model).bucket.pool.ledger
    found = [f"{ledger.in_use} bytes in use"] if ledger.in_use else []
    return found + [f"{n} is whole" for n, p in model.named_parameters() if not isinstance(p, DTensor)]


def fail(model: nn.Module, where: str, index: int) -> list[str]:
    """One iteration that raises; what went wrong other than that."""
    handles = []
    blocks = list(model.blocks)
    if where in ("forward", "after compute", "backward"):
        target = model if index < 0 else blocks[index]
        target.raises = where
    elif where == "forward hook":
        handles.append(blocks[index].register_forward_hook(boom))
    elif where == "forward pre-hook":
        handles.append(blocks[index].register_forward_pre_hook(boom))
    elif where == "backward hook":
        handles.append(blocks[index].register_full_backward_hook(boom))
    elif where == "tensor hook":
        handles.append(
            blocks[index].register_forward_hook(lambda m, a, out: out.register_hook(lambda g: boom()) and None)
        )
    try:
        x = data(50)
        if model.checkpointed is not None:
            x.requires_grad_()
        model(x).square().mean().backward()
        return ["no exception"]
    except Boom:
        return []
    finally:
        for block in [*blocks, model]:
            block.raises = ""
        for handle in handles:
            handle.remove()


def boom(*_: Any) -> None:
    raise Boom("in a hook")


CASES = [
    ("forward", 0),
    ("forward", 2),
    ("forward", -1),
    ("after compute", 1),
    ("backward", 0),
    ("backward", 2),
    ("forward hook", 1),
    ("forward pre-hook", 1),
    ("backward hook", 1),
    ("tensor hook", 0),
]


def recover(
    where: str,
    index: int,
    reset: bool,
    reshard_after_forward: bool | None = None,
    checkpointed: bool | None = None,
    failures: int = 1,
) -> list[str]:
    sharded, plain = twins(Fragile, partial(shard_children, reshard_after_forward=reshard_after_forward))
    sharded.checkpointed = plain.checkpointed = checkpointed
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=True) for m in (sharded, plain)]

    def loss_of(model: nn.Module, number: int) -> Tensor:
        x = data(number)
        return model(x.requires_grad_() if checkpointed is not None else x).square().mean()

    found = step(sharded, plain, partial(loss_of, number=0), optimizers)
    for _ in range(failures):
        found += fail(sharded, where, index)
    # The shards change between the failure and the next forward: gathered weights of before must not survive.
    with torch.no_grad():
        for model in (sharded, plain):
            for parameter in state_parameters(model):
                parameter.mul_(0.5)
    if reset:
        sharded.reset_iter_state()
        found += [f"after reset_iter_state: {r}" for r in resting(sharded)]
    sharded.zero_grad()
    for number in (1, 2):
        found += [
            f"step {number} after: {d}" for d in step(sharded, plain, partial(loss_of, number=number), optimizers)
        ]
        found += [f"step {number} after: {r}" for r in resting(sharded)]
    return found


def state_parameters(model: nn.Module) -> list[Tensor]:
    """The sharded parameters, also while whole ones are registered."""
    sharded = [p.sharded for m in model.modules() if (s := state_of(m)) for p in s.bucket.parameters]
    return sharded or list(model.parameters())


@pytest.mark.parametrize(("where", "index"), [("forward", 1), ("backward", 1), ("backward hook", 1)])
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_reset_iter_state_leaves_resting_memory(where: str, index: int, reshard_after_forward: bool) -> None:
    check(2, recover, where, index, True, reshard_after_forward)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("where", "index"), [("forward", 1), ("backward", 1), ("backward hook", 1)])
def test_failures_under_activation_checkpoints(where: str, index: int, reentrant: bool) -> None:
    check(2, recover, where, index, False, None, reentrant)


def test_failures_in_a_row() -> None:
    for where in ("forward", "backward"):
        check(2, recover, where, 1, False, None, None, 3)


def during_accumulation() -> list[str]:
    """The failed iteration's gradients are lost, unreduced sums of earlier micro-batches included; training starts
    anew.
    """
    sharded, plain = twins(Fragile)
    sharded.set_requires_gradient_sync(False)
    squares(sharded, 0).backward()
    found = fail(sharded, "backward", 1)
    sharded.set_requires_gradient_sync(True)
    sharded.zero_grad()
    return found + step(sharded, plain, partial(squares, step=1)) + resting(sharded)


def test_failure_during_accumulation() -> None:
    check(2, during_accumulation)


def published_gradients_survive() -> list[str]:
    """Reduced gradients of earlier micro-batches that were published stay what they were after a failed forward."""
    sharded, _ = twins(Fragile)
    squares(sharded, 0).backward()
    before = {n: full(p.grad) for n, p in sharded.named_parameters()}
    found = fail(sharded, "forward", 1)
    sharded.reset_iter_state()
    return found + [n for n, p in sharded.named_parameters() if not torch.equal(full(p.grad), before[n])]


def test_published_gradients_survive_a_failed_forward() -> None:
    check(2, published_gradients_survive)


def forward_between_micro_batches_fails() -> list[str]:
    sharded, plain = twins(Fragile)
    found = []
    for number, context in enumerate((torch.no_grad(), torch.enable_grad()), 1):
        sharded.set_requires_gradient_sync(False)
        for model in (sharded, plain):
            squares(model, 0).backward()
        with context:
            found += fail(sharded, "forward", 1)
        sharded.set_requires_gradient_sync(True)
        found += step(sharded, plain, partial(squares, step=number), tolerance=1e-6) + resting(sharded)
        for model in (sharded, plain):
            model.zero_grad()
    return found


def test_a_failed_forward_leaves_gradients_of_micro_batches_alone() -> None:
    check(2, forward_between_micro_batches_fails)


def another_graph() -> list[str]:
    """A backward that raises is followed by that of a forward from before it: none of its gradients was to be seen."""
    sharded, plain = twins(Fragile)
    found = []
    for number in range(2):
        sharded.blocks[1].raises = "backward"
        broken = squares(sharded, 50)
        sharded.blocks[1].raises = ""
        losses = [squares(model, number) for model in (sharded, plain)]
        try:
            broken.backward()
            found.append("no exception")
        except Boom:
            pass
        sharded.zero_grad()
        for model, loss in zip((sharded, plain), losses, strict=True):
            model.zero_grad()
            loss.backward()
        average_gradients(plain)
        found += differences(sharded, plain, tolerance=1e-6) + resting(sharded)
    return found


def test_another_graph_after_a_failed_backward() -> None:
    check(2, another_graph)


def replicas_after_a_failure() -> list[str]:
    """Sums of a replica's earlier micro-batches go with those of the failed one."""
    mesh = cluster.mesh((2, 2), ("replicate", "shard"))
    sharded, plain = twins(Fragile, partial(shard_children, mesh=mesh))
    sharded.set_requires_all_reduce(False)
    squares(sharded, 0).backward()
    found = fail(sharded, "backward", 1)
    sharded.set_requires_all_reduce(True)
    sharded.zero_grad()
    return found + step(sharded, plain, partial(squares, step=1), tolerance=1e-6) + resting(sharded)


def test_partial_sums_of_replicas_do_not_survive_a_failed_backward() -> None:
    check(4, replicas_after_a_failure)


class Fallback(Stack):
    """Tries a block, and runs it another way if that raises."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            self.blocks[0](x, fail=True)
        except Boom:
            x = self.blocks[0](x)
        return super().forward(x)


class MayFail(Mlp):
    def forward(self, x: Tensor, fail: bool = False) -> Tensor:
        if fail:
            raise Boom("caught by the model")
        return super().forward(x)


def make_fallback() -> nn.Module:
    model = Fallback()
    model.blocks[0] = MayFail()
    return model


def caught() -> list[str]:
    return train(make_fallback, lambda model, number: squares(model, number), tolerance=1e-6)


def test_an_exception_that_the_model_catches() -> None:
    check(2, caught)


def shown_after_a_failure() -> list[str]:
    """The parameters that modules show after a failed forward are those that the optimizer steps."""
    sharded, plain = twins(Fragile)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (sharded, plain)]
    for model in (sharded, plain):
        squares(model, 0).backward()
    average_gradients(plain)
    found = fail(sharded, "forward", 1)
    for optimizer in optimizers:
        optimizer.step()
    return found + differences(sharded, plain)


def test_parameters_are_shown_sharded_after_a_failed_forward() -> None:
    check(2, shown_after_a_failure)


def evaluation_fails() -> list[str]:
    sharded, plain = twins(Fragile)
    found = step(sharded, plain, squares)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            found += fail(sharded, "forward", 1)
    for model in (sharded, plain):
        model.zero_grad()
    return found + step(sharded, plain, partial(squares, step=1)) + resting(sharded)


def test_evaluation_that_raises() -> None:
    check(2, evaluation_fails)


def first_iteration_fails() -> list[str]:
    """The very first forward: buffers are half made."""
    sharded, plain = twins(Fragile)
    found = fail(sharded, "forward", 0)
    return found + step(sharded, plain, squares) + resting(sharded)


def test_the_first_iteration_raises() -> None:
    check(2, first_iteration_fails)


def state_dict_after_failure() -> list[str]:
    """A checkpoint written after the crash holds the parameters, sharded."""
    sharded, plain = twins(Fragile)
    found = step(sharded, plain, squares) + fail(sharded, "forward", 2)
    state = sharded.state_dict()
    found += [f"{n} is whole" for n, v in state.items() if not isinstance(v, DTensor)]
    return found + [n for n, p in plain.named_parameters() if not torch.equal(full(state[n]), p)]


def test_a_state_dict_after_a_failure() -> None:
    check(2, state_dict_after_failure)


def interrupted() -> list[str]:
    """Ctrl-C is an exception like any other."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    sharded, plain = twins(Fragile)
    found = step(sharded, plain, squares)
    handle = sharded.blocks[1].register_forward_hook(interrupt)
    try:
        squares(sharded)
        found.append("no exception")
    except KeyboardInterrupt:
        pass
    handle.remove()
    sharded.reset_iter_state()
    for model in (sharded, plain):
        model.zero_grad()
    return found + step(sharded, plain, partial(squares, step=1)) + differences(sharded, plain) + resting(sharded)


def test_an_interrupt() -> None:
    check(2, interrupted)


def alone(where: str) -> str:
    """Rank 1 raises, and rank 0 waits for it no longer than the group's timeout: what each of them gets."""
    group = dist.new_group(timeout=timedelta(minutes=10))
    # Named for its group: DTensor takes equal meshes for one, and tensors of later tests would meet this broken group.
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(group.group_name,))
    torch.manual_seed(0)
    model = shard_children(Fragile(), mesh=mesh, reshard_after_forward=True)
    squares(model, 0).backward()
    if dist.get_rank() == 1:
        return " ".join(fail(model, where, 1))
    # Only here: rank 1 has to come to where it raises, however late rank 0 is.
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3), group)
    try:
        squares(model, 1).backward()
    except RuntimeError as error:
        return str(error)
    return "no exception"


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_on_one_rank_is_an_error_on_the_others_that_names_collective_and_bucket(where: str) -> None:
    """Within the group's timeout, which alone is shorter than a test's deadline."""
    waiting, raised = cluster.run(2, alone, where)
    assert raised == ""
    assert "all-gather" in waiting or "reduction" in waiting, waiting
    # Rank 0 is ahead of the one that raises by a bucket or two.
    assert any(f"bucket {name!r}" in waiting for name in ("Fragile", "blocks.0", "blocks.1", "blocks.2")), waiting
