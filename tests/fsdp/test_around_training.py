"""What people put around a model: GradScaler, schedulers, clipping, CUDA-free AMP, EMA-style averaging of gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fsdp
from ragged_shard import Block, ParamPolicy
from tests import cluster
from tests.fsdp.modules import WIDTH, Mlp, Stack, data, squares
from tests.fsdp.reference import average_gradients, differences, shard_children, step, train, twins


def check(world_size: int, function: Callable[..., list[str]], *args: Any, **kwargs: Any) -> None:
    assert cluster.run(world_size, function, *args, **kwargs) == [[]] * world_size


def whole(name: str, parameter: Tensor) -> ParamPolicy:
    """Every tensor on one rank: other ranks hold empty shards of it."""
    return ParamPolicy(block=Block.whole())


# ---- clipping ----


def clipped(norm_type: float | str, function: str, policy: Any) -> list[str]:
    sharded, plain = twins(Stack, partial(shard_children, orig_param_policy=policy))
    for model in (sharded, plain):
        squares(model).backward()
    average_gradients(plain)
    clip = fsdp.clip_grad_norm_ if function == "ours" else nn.utils.clip_grad_norm_
    norms = [clip(sharded.parameters(), 0.05, norm_type=norm_type)]
    norms.append(nn.utils.clip_grad_norm_(plain.parameters(), 0.05, norm_type=norm_type))
    found = []
    if isinstance(norms[0], DTensor):
        norms[0] = norms[0].full_tensor()
    if not math.isclose(norms[0].item(), norms[1].item(), rel_tol=1e-5):
        found.append(f"norm {norms[0].item()}, not {norms[1].item()}")
    everywhere = [torch.zeros(()) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, norms[0].detach().clone())
    if any(not torch.equal(n, everywhere[0]) for n in everywhere):
        found.append(f"ranks disagree on the norm: {everywhere}")
    return found + differences(sharded, plain, 1e-6)


@pytest.mark.parametrize("policy", [None, whole])
@pytest.mark.parametrize("function", ["ours", "torch"])
@pytest.mark.parametrize("norm_type", [0.0, 1.0, 2.0, 3.0, "inf"])
def test_clip_grad_norm(norm_type: float | str, function: str, policy: Any) -> None:
    """pytorch/pytorch#173238: with an empty shard, FSDP2's infinity norm hangs; #170862: the norm is the whole one."""
    check(3, clipped, norm_type, function, policy)


def clipped_with_non_finite() -> list[str]:
    """error_if_nonfinite: nan on one rank's shard is an error on all."""
    found = []
    sharded, _ = twins(Stack)
    squares(sharded).backward()
    with torch.no_grad():
        if dist.get_rank() == 1:
            next(p for p in sharded.parameters() if p.grad.to_local().numel()).grad.to_local().view(-1)[0] = math.nan
    try:
        fsdp.clip_grad_norm_(sharded.parameters(), 1.0, error_if_nonfinite=True)
        found.append("no error")
    except RuntimeError as error:
        if "nan" not in str(error) and "non-finite" not in str(error):
            found.append(str(error))
    before = {n: p.grad.full_tensor() for n, p in sharded.named_parameters()}
    norm = fsdp.clip_grad_norm_(sharded.parameters(), 1.0)
    if not torch.isnan(norm):
        found.append(f"norm {norm}")
    del before
    return found


def test_clip_refuses_non_finite_gradients_on_all_ranks() -> None:
    check(2, clipped_with_non_finite)


def clip_of_nothing() -> list[str]:
    model = shard_children(Stack())
    norms = [fsdp.clip_grad_norm_(model.parameters(), 1.0), fsdp.clip_grad_norm_([], 1.0)]
    return [] if all(n.item() == 0 for n in norms) else [str(norms)]


def test_clip_without_gradients() -> None:
    check(2, clip_of_nothing)


def clipped_in_double() -> list[str]:
    sharded, plain = twins(lambda: Stack().double())
    for model in (sharded, plain):
        model(data().double()).square().mean().backward()
    average_gradients(plain)
    norms = [fsdp.clip_grad_norm_(sharded.parameters(), 0.05), nn.utils.clip_grad_norm_(plain.parameters(), 0.05)]
    found = [] if norms[0].dtype == torch.float64 else [f"a norm in {norms[0].dtype}"]
    return found + differences(sharded, plain, 1e-14)


def test_the_norm_of_double_gradients_is_not_rounded() -> None:
    check(2, clipped_in_double)


# ---- scaling, schedules ----


def scaled(overflow: bool, world: int) -> list[str]:
    """GradScaler: an overflow in one rank's shard skips the step on all ranks and lowers the scale."""
    sharded, plain = twins(Stack)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (sharded, plain)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2) for _ in range(2)]
    found = []
    for number in range(4):
        for model, optimizer, scaler in zip((sharded, plain), optimizers, scalers, strict=True):
            scaler.scale(squares(model, number)).backward()
            if model is plain:
                average_gradients(plain)
            if overflow and number == 1:
                with torch.no_grad():
                    if model is sharded:
                        local = model.blocks[0].up.weight.grad.to_local()
                        # The last rank that holds a part of it has the only infinity.
                        if model.blocks[0].up.weight.placements[0].flat_range((11, WIDTH), dist.get_rank())[1] == 88:
                            local.view(-1)[-1:] = math.inf
                    else:
                        model.blocks[0].up.weight.grad.view(-1)[-1] = math.inf
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        found += [f"step {number}: {d}" for d in differences(sharded, plain, 1e-6)]
        if scalers[0].get_scale() != scalers[1].get_scale():
            found.append(f"step {number}: scale {scalers[0].get_scale()}, not {scalers[1].get_scale()}")
    return found


@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_grad_scaler(world_size: int, overflow: bool) -> None:
    check(world_size, scaled, overflow, world_size)


def scheduled() -> list[str]:
    sharded, plain = twins(Stack)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=True) for m in (sharded, plain)]
    schedulers = [
        torch.optim.lr_scheduler.SequentialLR(
            o,
            [
                torch.optim.lr_scheduler.LinearLR(o, total_iters=2),
                torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=3),
            ],
            milestones=[2],
        )
        for o in optimizers
    ]
    for number in range(4):
        for model, optimizer, scheduler in zip((sharded, plain), optimizers, schedulers, strict=True):
            squares(model, number).backward()
            if model is plain:
                average_gradients(plain)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return differences(sharded, plain)


def test_learning_rate_schedulers() -> None:
    check(2, scheduled)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=False),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
}


def optimized(name: str) -> list[str]:
    sharded, plain = twins(Stack)
    optimizers = [OPTIMIZERS[name](m.parameters()) for m in (sharded, plain)]
    for number in range(3):
        for model, optimizer in zip((sharded, plain), optimizers, strict=True):
            squares(model, number).backward()
            if model is plain:
                average_gradients(plain)
            optimizer.step()
            optimizer.zero_grad()
    return differences(sharded, plain, 1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torch_optimizers(name: str) -> None:
    """torch's elementwise optimizers run on the shards unchanged."""
    check(2, optimized, name)


def autocast() -> list[str]:
    """Weight gradients under autocast have another dtype than the product that makes them."""

    def loss_of(model: nn.Module, number: int) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(data(number)).float().square().mean()

    return train(Stack, loss_of, partial(shard_children, reshard_after_forward=True))


def test_autocast() -> None:
    check(2, autocast)


def double_backward(reshard_after_forward: bool | None) -> list[str]:
    """A gradient penalty: create_graph=True, then a backward through the gradient, which needs the weights before any
    module's output is reached: they are kept between the two.
    """

    def loss_of(model: nn.Module, number: int) -> Tensor:
        x = data(number).requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.square().mean(), x, create_graph=True)
        return out.square().mean() + slope.square().sum()

    shard = partial(shard_children, reshard_after_forward=reshard_after_forward)
    sharded, plain = twins(Stack, shard)
    found = train(Stack, loss_of, shard, tolerance=1e-6)
    for number in range(2):
        found += step(sharded, plain, lambda m, n=number: loss_of(m, n), tolerance=1e-6)
        found += [f"{n} stays gathered" for n, p in sharded.named_parameters() if not isinstance(p, DTensor)]
    return found


@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
def test_gradient_penalty(reshard_after_forward: bool | None) -> None:
    check(2, double_backward, reshard_after_forward)


def anomaly() -> list[str]:
    with torch.autograd.set_detect_anomaly(True):
        return train(Stack, squares, steps=1)


def test_anomaly_mode() -> None:
    check(2, anomaly)


def labels() -> list[str]:
    """Profiler labels name the bucket and its collective."""
    model = shard_children(Stack())
    squares(model).backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        squares(model).backward()
    names = {event.key for event in profile.key_averages()}
    found = []
    for word in ("all_gather", "reduce_scatter"):
        for block in range(3):
            if not any("fsdp" in n.lower() and word in n and f"blocks.{block}" in n for n in names):
                found.append(f"no label with {word} and blocks.{block}: {sorted(n for n in names if 'fsdp' in n)}")
    return found


def test_profiler_labels_name_the_module() -> None:
    check(2, labels)


def accumulated_penalty() -> list[str]:
    """A loss that reaches a block's weights by two ways, one of them a weight's own norm inside the forward."""

    class Normed(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.up.weight.norm() + self.down.weight.square().mean()

    def make() -> nn.Module:
        model = Stack()
        model.blocks = nn.ModuleList(Normed() for _ in range(2))
        return model

    return train(make, squares, partial(shard_children, reshard_after_forward=True))


def test_weights_used_by_other_operations_too() -> None:
    check(2, accumulated_penalty)
