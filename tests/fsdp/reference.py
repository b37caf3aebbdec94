"""What data parallelism means, in a few lines: a plain module whose gradients are averaged over all ranks by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp import fully_shard


def full(tensor: Tensor) -> Tensor:
    """The whole tensor behind a shard (a collective), detached."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_children(model: nn.Module, **options: Any) -> nn.Module:
    """``fully_shard`` on every child that has a forward and parameters, then on the model."""
    for child in model.children():
        for module in child if isinstance(child, nn.ModuleList) else [child]:
            if any(True for _ in module.parameters()):
                fully_shard(module, **options)
    return fully_shard(model, **options)


def twins(
    make: Callable[[], nn.Module], shard: Callable[[nn.Module], nn.Module] = shard_children
) -> tuple[nn.Module, nn.Module]:
    """A sharded model and a plain one with the same values, which are the same on every rank."""
    torch.manual_seed(11)
    plain = make()
    return shard(copy.deepcopy(plain)), plain


def average_gradients(plain: nn.Module, divide_by: float | None = None) -> None:
    """``p.grad`` becomes the mean over all ranks, a rank without one counting as zero; ``None`` where no rank has
    one.
    """
    trained = [p for p in plain.parameters() if p.requires_grad]
    used = torch.tensor([p.grad is not None for p in trained], dtype=torch.uint8)
    if dist.get_world_size() > 1:
        dist.all_reduce(used, dist.ReduceOp.MAX)
    for parameter, anywhere in zip(trained, used.tolist(), strict=True):
        if anywhere:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
            # Narrow gradients are summed in fp32 and rounded once.
            gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
            if dist.get_world_size() > 1 and gradient.numel():
                dist.all_reduce(gradient)
            parameter.grad = gradient.detach().div_(divide_by or dist.get_world_size()).to(parameter.dtype)


class Masters(nn.Module):
    """What mixed precision means: ``plain`` computes in ``dtype``, each gradient is added up and averaged in fp32, and
    fp32 parameters of the same names are updated. Buffers keep their dtype. With fp32 nothing is done.

    Without ``hooks`` the masters get their gradients from elsewhere.
    """

    def __init__(self, plain: nn.Module, dtype: torch.dtype, *, hooks: bool = True) -> None:
        super().__init__()
        self.plain, self.masters = [plain], {}
        for name, parameter in plain.named_parameters() if dtype != torch.float32 else ():
            master = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
            parameter.data = parameter.data.to(dtype)
            if parameter.requires_grad and hooks:
                parameter.register_post_accumulate_grad_hook(partial(self._take, master))
            self.masters[name] = master

    @staticmethod
    def _take(master: nn.Parameter, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            master.grad = gradient.float() if master.grad is None else master.grad + gradient.float()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        yield from self.masters.items()

    def write_back(self) -> None:
        with torch.no_grad():
            for name, parameter in self.plain[0].named_parameters() if self.masters else ():
                parameter.copy_(self.masters[name])


def differences(sharded: nn.Module, plain: nn.Module, tolerance: float = 0.0) -> list[str]:
    """Where parameters and gradients of the two differ by more than ``tolerance``; a collective."""
    ours, theirs = dict(sharded.named_parameters()), dict(plain.named_parameters())
    found = [f"names {sorted(ours.keys() ^ theirs.keys())}"] if ours.keys() != theirs.keys() else []
    for name in ours.keys() & theirs.keys() if found else ours:
        mine, other = ours[name], theirs[name]
        if mine.requires_grad != other.requires_grad:
            found.append(f"{name}.requires_grad is {mine.requires_grad}")
        found += _difference(name, full(mine), other.detach(), tolerance)
        if (mine.grad is None) != (other.grad is None):
            found.append(f"{name}.grad is {'None' if mine.grad is None else 'there'}")
        elif mine.grad is not None and other.grad is not None:
            found += _difference(f"{name}.grad", full(mine.grad), other.grad, tolerance)
    return found


def _difference(name: str, mine: Tensor, other: Tensor, tolerance: float) -> list[str]:
    if mine.shape != other.shape or mine.dtype != other.dtype:
        return [f"{name} is {tuple(mine.shape)} {mine.dtype}, not {tuple(other.shape)} {other.dtype}"]
    if not mine.numel():
        return []
    worst = (mine.double() - other.double()).abs().max().item()
    return [] if worst <= tolerance else [f"{name} is off by {worst:.3g}"]


def step(
    sharded: nn.Module,
    plain: nn.Module,
    loss_of: Callable[[nn.Module], Tensor],
    optimizers: Iterable[torch.optim.Optimizer] = (),
    *,
    tolerance: float = 0.0,
) -> list[str]:
    """One training step of both on this rank's data; the differences of losses, gradients and parameters."""
    losses = []
    for model in (sharded, plain):
        loss = loss_of(model)
        loss.backward()
        losses.append(loss.item())
    average_gradients(plain)
    found = [] if abs(losses[0] - losses[1]) <= tolerance else [f"loss is {losses[0]}, not {losses[1]}"]
    found += differences(sharded, plain, tolerance)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return found


def train(
    make: Callable[[], nn.Module],
    loss_of: Callable[[nn.Module, int], Tensor],
    shard: Callable[[nn.Module], nn.Module] = shard_children,
    *,
    steps: int = 3,
    tolerance: float = 0.0,
) -> list[str]:
    """Train both for ``steps`` with AdamW; ``loss_of(model, step)``. All differences, those of the end included."""
    sharded, plain = twins(make, shard)
    optimizers = [
        torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2, foreach=True)
        for m in (sharded, plain)
    ]
    found = []
    for number in range(steps):
        found += [
            f"step {number}: {d}"
            for d in step(sharded, plain, lambda m, n=number: loss_of(m, n), optimizers, tolerance=tolerance)
        ]
    return found + differences(sharded, plain, tolerance)


def message_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except Exception as error:  # of any type: the test compares type and text
        return f"{type(error).__name__}: {error}"
    return "no error"
