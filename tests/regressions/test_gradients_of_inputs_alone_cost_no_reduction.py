"""``torch.autograd.grad(out, x)`` and ``backward(inputs=[x])`` computed every weight's gradient and reduced a zero for
each bucket, ``is_grads_batched=True`` failed in the products that write in place, and the transforms of ``torch.func``
refused the gathers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from tests import cluster
from tests.fsdp.modules import WIDTH, Mlp, Stack, data, squares
from tests.fsdp.reference import average_gradients, differences, shard_children, step, twins
from tests.fsdp.test_memory import pool_of


def slope(model: nn.Module, x: Tensor) -> Tensor:
    return torch.autograd.grad(model(x).sum(), x)[0]


def slope_by_backward(model: nn.Module, x: Tensor) -> Tensor:
    model(x).sum().backward(inputs=[x])
    return x.grad


def slopes_at_once(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    return torch.autograd.grad(out, x, torch.eye(out.numel()).view(-1, *out.shape), is_grads_batched=True)[0]


def transformed(transform: Callable[..., Callable[[Tensor], Tensor]], model: nn.Module, x: Tensor) -> Tensor:
    return transform(lambda y: model(y).square().mean())(x.detach())


def tangent(model: nn.Module, x: Tensor) -> Tensor:
    return torch.func.jvp(model, (x.detach(),), (torch.ones_like(x),))[1]


HOW: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "grad": slope,
    "inputs": slope_by_backward,
    "batched": slopes_at_once,
    "func.grad": partial(transformed, torch.func.grad),
    "jacrev": partial(transformed, torch.func.jacrev),
    "hessian": partial(transformed, torch.func.hessian),
    "vmap": lambda model, x: torch.vmap(model)(x.detach()),
    "jvp": tangent,
}


def frozen_first() -> nn.Module:
    model = Stack()
    model.blocks[0].requires_grad_(False)
    return model


def asked(first: bool) -> list[str]:
    """``first``: before anything else was gathered."""
    found = []
    for name, how in HOW.items():
        sharded, plain = twins(frozen_first)
        if not first:
            found += step(sharded, plain, squares)
        pool = pool_of(sharded) if not first else None
        if pool is not None:
            pool.timeline = []
        ours, theirs = (how(model, data(1).requires_grad_()) for model in (sharded, plain))
        if not torch.allclose(ours, theirs, atol=1e-6):
            found.append(f"{name}: off by {(ours - theirs).abs().max()}")
        if pool is not None:
            seen = [e for e in pool.timeline if e.action == "reduce_scatter" or e.label == "gradients"]
            found += [f"{name}: {e.action} {e.label} {e.owner}" for e in seen]
        for model in (sharded, plain):
            model.zero_grad()
        for number in (2, 3):
            found += [f"after {name}: {d}" for d in step(sharded, plain, partial(squares, step=number), tolerance=1e-6)]
    return found


def test_gradients_of_inputs_alone_cost_no_reduction() -> None:
    assert cluster.run(2, asked, False) == [[], []]


def test_transforms_may_be_what_runs_a_model_first() -> None:
    assert cluster.run(2, asked, True) == [[], []]


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).tanh()


def without_products() -> list[str]:
    """Nothing in this model can be asked whether a backward comes there."""
    found = []
    for reshard in (None, True):
        make = partial(nn.Sequential, Scale(), Scale(), Scale())
        sharded, plain = twins(make, partial(shard_children, reshard_after_forward=reshard))
        x = data(1).requires_grad_()
        if not torch.allclose(slope(sharded, x), slope(plain, x)):
            found.append("the input's gradient")
        for number in range(2):
            for model in (sharded, plain):
                squares(model, 10)
                first, second = squares(model, number), squares(model, number + 5)
                second.backward()
                first.backward()
            average_gradients(plain)
            found += differences(sharded, plain, 1e-6)
            for model in (sharded, plain):
                model.zero_grad()
    return found


def test_a_model_without_products() -> None:
    assert cluster.run(2, without_products) == [[], []]


def adversarial(model: nn.Module, number: int) -> Tensor:
    """The graph is used again after the gradient of the input was taken from it."""
    x = data(number).requires_grad_()
    out = model(x).square().mean()
    (gradient,) = torch.autograd.grad(out, x, retain_graph=True)
    return out + model(data(number) + 0.1 * gradient.sign()).square().mean()


def attacked() -> list[str]:
    sharded, plain = twins(partial(nn.Sequential, Mlp(), Mlp()))
    return [d for n in range(3) for d in step(sharded, plain, partial(adversarial, number=n), tolerance=1e-6)]


def test_a_graph_whose_input_gradient_was_taken_still_trains() -> None:
    assert cluster.run(2, attacked) == [[], []]
