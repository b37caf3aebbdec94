"""Training steps of a sharded model beside those of DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fsdp import MixedPrecisionPolicy
from tests.fsdp.reference import Masters, differences

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def train_beside_ddp(
    model: nn.Module,
    plain: nn.Module,
    loss_of: Callable[[nn.Module, int], Tensor],
    *,
    low: bool = False,
    steps: int = 5,
    tolerance: float = 1e-5,
    **options: Any,
) -> list[str]:
    """``steps`` of AdamW of ``model``, sharded, and of its copy ``plain`` under DDP (with ``options``): losses,
    gradients and parameters that differ. ``loss_of(model, step)`` is this rank's.

    ``low``: ``model`` was sharded with ``MIXED``; ``plain`` becomes a bfloat16 model, whose gradients DDP sums in fp32
    for fp32 masters, which are updated.
    """
    masters = Masters(plain, torch.bfloat16 if low else torch.float32, hooks=False)
    trained = masters if low else plain
    ddp = DistributedDataParallel(plain, **options)
    if low:
        ddp.register_comm_hook({p: masters.masters[n] for n, p in plain.named_parameters()}, average_into_masters)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, trained)]
    found = []
    for number in range(steps):
        losses = []
        for one in (model, ddp):
            loss = loss_of(one, number)
            loss.backward()
            losses.append(loss.item())
        if losses[0] != pytest.approx(losses[1], rel=tolerance):
            found.append(f"step {number}: losses {losses}")
        for name, parameter in plain.named_parameters() if low else ():
            if parameter.grad is None:  # unused on all ranks, which DDP knows when it has summed
                masters.masters[name].grad = None
            parameter.grad = None
        found += [f"step {number}: {d}" for d in differences(model, trained, tolerance)]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        masters.write_back()
    return found


def average_into_masters(masters: dict[Tensor, nn.Parameter], bucket):  # DDP takes annotations as types, not as text
    """A communication hook of DDP: the mean over ranks in fp32, which the masters get as their gradients."""
    buffer = bucket.buffer()

    def hand_out(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        mean = future.value()[0] / dist.get_world_size()
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            start = gradient.storage_offset() - buffer.storage_offset()
            masters[parameter].grad = mean[start : start + gradient.numel()].view(gradient.shape)
        return buffer.copy_(mean)

    return dist.all_reduce(buffer.float(), async_op=True).get_future().then(hand_out)
