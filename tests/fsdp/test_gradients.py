"""What ``p.grad`` is after backward: accumulated, replaced by the user, missing on all ranks or one, frozen, tied."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp import fully_shard
from tests import cluster
from tests.fsdp.modules import WIDTH, Adapters, Optional, Stack, data, squares
from tests.fsdp.reference import average_gradients, differences, shard_children, step, train, twins


def check(world_size: int, function: Callable[..., list[str]], *args: Any, **kwargs: Any) -> None:
    """Nothing differs on any rank."""
    assert cluster.run(world_size, function, *args, **kwargs) == [[]] * world_size


# ---- accumulation ----


def accumulate(sync: str, zero_to_none: bool, reshard_after_forward: bool | None) -> list[str]:
    """Two optimizer steps of three micro-batches; ``sync``: 'last', 'each', or 'middle' (the second and the last)."""
    sharded, plain = twins(Stack, partial(shard_children, reshard_after_forward=reshard_after_forward))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=True) for m in (sharded, plain)]
    found = []
    for number in range(2):
        for micro in range(3):
            now = micro == 2 or sync == "each" or (sync == "middle" and micro == 1)
            sharded.set_requires_gradient_sync(now)
            squares(sharded, 3 * number + micro).backward()
            squares(plain, 3 * number + micro).backward()
            if not now and number == 0 and any(p.grad is not None for p in sharded.parameters()):
                found.append(f"micro-batch {micro}: a gradient was published without synchronisation")
        average_gradients(plain)
        found += [f"step {number}: {d}" for d in differences(sharded, plain, 0.0 if sync == "last" else 1e-6)]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=zero_to_none)
    return found


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("zero_to_none", [True, False])
def test_micro_batches_without_communication(zero_to_none: bool, reshard_after_forward: bool) -> None:
    check(2, accumulate, "last", zero_to_none, reshard_after_forward)


@pytest.mark.parametrize("zero_to_none", [True, False])
def test_micro_batches_that_reduce_each_or_some(zero_to_none: bool) -> None:
    check(2, accumulate, "each", zero_to_none, None)


def middle() -> list[str]:
    """Reduced, unreduced, reduced: sums of both kinds meet."""
    sharded, plain = twins(Stack)
    for micro, now in enumerate((True, False, True)):
        sharded.set_requires_gradient_sync(now)
        squares(sharded, micro).backward()
        squares(plain, micro).backward()
    average_gradients(plain)
    return differences(sharded, plain, 1e-6)


def test_reduced_and_unreduced_micro_batches_add_up() -> None:
    check(2, middle)


def unsynchronised_then_unused() -> list[str]:
    """A block that only an unsynchronised micro-batch used is reduced with the last one all the same."""
    sharded, plain = twins(Optional)
    for micro, skip in enumerate(((), ("b",))):
        sharded.set_requires_gradient_sync(micro == 1)
        for model in (sharded, plain):
            model.skip = skip
            squares(model, micro).backward()
    average_gradients(plain)
    return differences(sharded, plain, 1e-6)


def test_a_block_used_only_in_an_unsynchronised_micro_batch() -> None:
    check(2, unsynchronised_then_unused)


def communication_of_micro_batches() -> list[int]:
    from tests.fsdp.counting import Counted

    model, sends = shard_children(Stack()), []
    for micro in range(3):
        model.set_requires_gradient_sync(micro == 2)
        with Counted() as counted:
            squares(model, micro).backward()
        sends.append(sum(name.startswith(("alltoall", "allreduce")) for name, _ in counted.collectives))
    return sends


def test_an_unsynchronised_backward_reduces_nothing() -> None:
    for sends in cluster.run(2, communication_of_micro_batches):
        assert sends[:2] == [0, 0] and sends[2] > 0


# ---- gradients that autograd makes of the sharded parameters themselves ----


def penalised(before: bool, micro_batches: int) -> list[str]:
    """A loss with a penalty of all weights, computed before or after the forward."""

    def loss(model: nn.Module, number: int) -> Tensor:
        weights = [*model.parameters()]
        first = None if before else squares(model, number)
        penalty = sum(p.square().sum() + p.sum() for p in weights)
        if isinstance(penalty, DTensor):
            penalty = penalty.full_tensor()
        return (squares(model, number) if first is None else first) + 0.1 * penalty

    sharded, plain = twins(Stack)
    found = []
    for _ in range(2):
        for model in (sharded, plain):
            for micro in range(micro_batches):
                loss(model, micro).backward()
        average_gradients(plain)
        found += differences(sharded, plain, 1e-6)
        for model in (sharded, plain):
            model.zero_grad()
    return found


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("before", [True, False])
def test_a_penalty_of_the_weights_adds_to_their_gradients(before: bool, micro_batches: int) -> None:
    check(2, penalised, before, micro_batches)


# ---- the user's hands on p.grad ----


def replaced(how: str) -> list[str]:
    sharded, plain = twins(Stack)
    for model in (sharded, plain):
        squares(model, 0).backward()
    average_gradients(plain)
    for model in (sharded, plain):
        for parameter in model.parameters():
            if how == "another tensor":
                parameter.grad = parameter.grad * 3
            elif how == "in place":
                parameter.grad.mul_(3)
            elif how == "zeros_like":
                parameter.grad = torch.zeros_like(parameter)
            elif how == "some None" and parameter.ndim == 1:
                parameter.grad = None
    found = [f"before: {d}" for d in differences(sharded, plain)]
    held = [p.grad for p in plain.parameters()]
    for parameter in plain.parameters():
        parameter.grad = None
    for model in (sharded, plain):
        squares(model, 1).backward()
    average_gradients(plain)
    for parameter, before in zip(plain.parameters(), held, strict=True):
        parameter.grad = parameter.grad if before is None else before + parameter.grad
    return found + [f"after: {d}" for d in differences(sharded, plain, 1e-7)]


@pytest.mark.parametrize("how", ["another tensor", "in place", "zeros_like", "some None"])
def test_what_the_user_puts_into_grad_is_what_backward_adds_to(how: str) -> None:
    check(2, replaced, how)


# ---- unused parameters ----


def unused(skips: list[tuple[str, ...]], first: str | None = None) -> list[str]:
    """``skips[step][rank % n]`` are the children that this rank's forward leaves out."""
    sharded, plain = twins(Optional)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=True) for m in (sharded, plain)]
    found = []
    for number, by_rank in enumerate(skips):
        sharded.skip = plain.skip = by_rank[dist.get_rank() % len(by_rank)]
        found += [
            f"step {number}: {d}"
            for d in step(sharded, plain, lambda m, n=number: squares(m, n), optimizers, tolerance=0.0)
        ]
    return found


def test_unused_on_all_ranks_leaves_no_gradient() -> None:
    check(2, unused, [((),), (("b",),), (("a", "scale"),), ((),)])


def no_rank_used_anything() -> list[str]:
    sharded, plain = twins(Optional)
    sharded.skip = plain.skip = ("a", "b", "c", "scale")
    for model in (sharded, plain):
        x = data().requires_grad_()
        model(x).sum().backward()
    found = differences(sharded, plain)
    sharded.skip = plain.skip = ()
    return found + step(sharded, plain, squares)


def test_no_parameter_used_at_all() -> None:
    check(2, no_rank_used_anything)


# ---- frozen ----


def lora(where: str, reshard_after_forward: bool | None) -> list[str]:
    return train(
        partial(Adapters, where), squares, partial(shard_children, reshard_after_forward=reshard_after_forward)
    )


@pytest.mark.parametrize("reshard_after_forward", [True, None])
@pytest.mark.parametrize("where", ["start", "around", "end"])
def test_frozen_weights_between_adapters(where: str, reshard_after_forward: bool | None) -> None:
    """Backward passes through frozen weights after the last gradient of their block has come."""
    check(2, lora, where, reshard_after_forward)


def lora_as_one_bucket(where: str) -> list[str]:
    return train(partial(Adapters, where), squares, fully_shard)


@pytest.mark.parametrize("where", ["start", "end"])
def test_frozen_weights_of_one_bucket(where: str) -> None:
    check(2, lora_as_one_bucket, where)


def frozen_communication() -> list[str]:
    """A frozen block is gathered, never reduced."""
    from tests.fsdp.counting import Counted

    torch.manual_seed(0)
    model = Stack()
    model.blocks[1].requires_grad_(False)
    shard_children(model)
    squares(model).backward()
    with Counted() as counted:
        squares(model).backward()
    reductions = counted.reductions(2)
    wrong = [] if reductions == 3 else [f"{reductions} reductions"]
    wrong += [n for n, p in model.named_parameters() if (p.grad is None) != n.startswith("blocks.1")]
    return wrong


def test_a_frozen_block_is_never_reduced() -> None:
    check(2, frozen_communication)


def thawed() -> list[str]:
    """requires_grad_ after sharding, both ways."""
    sharded, plain = twins(Stack)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (sharded, plain)]
    found = []
    for number, frozen in enumerate(((), ("blocks.1.up.weight", "head"), ("blocks.0.down.bias",), ())):
        for model in (sharded, plain):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name not in frozen)
        found += [
            f"step {number}: {d}"
            for d in step(sharded, plain, lambda m, n=number: squares(m, n), optimizers, tolerance=0.0)
        ]
    return found


def test_parameters_frozen_and_thawed_between_steps() -> None:
    check(2, thawed)


def all_frozen() -> list[str]:
    sharded, plain = twins(lambda: Stack().requires_grad_(False))
    results = []
    for model in (sharded, plain):
        x = data().requires_grad_()
        model(x).square().mean().backward()
        results.append(x.grad)
    return differences(sharded, plain) + ([] if torch.equal(*results) else ["gradient of the input"])


def test_a_wholly_frozen_model_passes_gradients_to_its_input() -> None:
    check(2, all_frozen)


# ---- tied ----


# ---- factors ----


def divided(factor: float, world: int) -> list[str]:
    sharded, plain = twins(Stack)
    for module in sharded.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(factor)
    for model in (sharded, plain):
        squares(model).backward()
    average_gradients(plain, divide_by=factor)
    return differences(sharded, plain, 1e-6)


@pytest.mark.parametrize(("world_size", "factor"), [(2, 1.0), (2, 8.0), (3, 2.0)])
def test_gradient_divide_factor(world_size: int, factor: float) -> None:
    check(world_size, divided, factor, world_size)


def not_recursive() -> list[bool]:
    sharded, plain = twins(Stack)
    sharded.set_gradient_divide_factor(1.0)
    for model in (sharded, plain):
        squares(model).backward()
    average_gradients(plain)
    ours = {n: p.grad.full_tensor() for n, p in sharded.named_parameters()}
    theirs = {n: p.grad for n, p in plain.named_parameters()}
    return [
        torch.equal(ours["head"], theirs["head"] * 2),
        torch.equal(ours["blocks.0.up.weight"], theirs["blocks.0.up.weight"]),
    ]


def test_the_divide_factor_is_of_one_module_as_torchs() -> None:
    assert cluster.run(2, not_recursive) == [[True, True]] * 2


# ---- kinds of backward ----


def hooks_on_parameters() -> list[str]:
    """A user's post-accumulate hook on a sharded parameter cannot fire; one on the whole module's inputs must."""
    model, seen = shard_children(Stack()), []
    model.blocks[1].register_full_backward_hook(lambda m, gi, go: seen.append((len(gi), len(go))))
    squares(model).backward()
    return [] if seen == [(1, 1)] else [str(seen)]


def test_a_full_backward_hook_on_a_sharded_module() -> None:
    check(2, hooks_on_parameters)


def autograd_grad() -> list[str]:
    """torch.autograd.grad for an input (a gradient penalty) leaves p.grad alone and the next step right."""
    sharded, plain = twins(Stack)
    results = []
    for model in (sharded, plain):
        x = data().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).square().mean(), x)
        results.append(gradient)
    found = [] if torch.equal(*results) else ["the input's gradient"]
    found += [f"{n}.grad is there" for n, p in sharded.named_parameters() if p.grad is not None]
    return found + step(sharded, plain, squares)


def test_gradient_of_an_input_alone() -> None:
    check(2, autograd_grad)


def retained() -> list[str]:
    """backward(retain_graph=True) twice through one graph."""
    sharded, plain = twins(Stack, partial(shard_children, reshard_after_forward=True))
    for model in (sharded, plain):
        loss = squares(model)
        loss.backward(retain_graph=True)
        loss.backward()
    average_gradients(plain)
    return differences(sharded, plain, 1e-7)


def test_backward_twice_through_a_retained_graph() -> None:
    check(2, retained)


def grad_kept_by_the_user() -> list[str]:
    """A copy of a gradient stays what it was; the next one is not added to it."""
    sharded, plain = twins(Stack)
    squares(sharded, 0).backward()
    kept = {n: p.grad.full_tensor().clone() for n, p in sharded.named_parameters()}
    sharded.zero_grad()
    for model in (sharded, plain):
        squares(model, 1).backward()
    average_gradients(plain)
    found = differences(sharded, plain)
    plain.zero_grad()
    squares(plain, 0).backward()
    average_gradients(plain)
    return found + [n for n, p in plain.named_parameters() if not torch.equal(kept[n], p.grad)]


def test_gradients_of_different_steps_do_not_mix() -> None:
    check(2, grad_kept_by_the_user)


def sparse() -> str:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(7, WIDTH, sparse=True)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.table(tokens)

    model = fully_shard(Model())
    try:
        model(torch.arange(3)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_sparse_gradient_is_refused_by_name() -> None:
    for message in cluster.run(2, sparse):
        assert "table.weight" in message and "sparse" in message


def deep_copy_of_the_reference_is_independent() -> list[str]:
    """fully_shard changes nothing in a copy made before it."""
    torch.manual_seed(0)
    plain = Stack()
    before = {n: p.clone() for n, p in plain.named_parameters()}
    model = shard_children(copy.deepcopy(plain))
    squares(model).backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return [n for n, p in plain.named_parameters() if not torch.equal(p, before[n]) or p.grad is not None]


def test_a_copy_made_before_sharding_is_independent() -> None:
    check(2, deep_copy_of_the_reference_is_independent)
