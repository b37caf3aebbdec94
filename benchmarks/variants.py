"""Every way to train the same model that is compared: how it is wrapped and which optimizer steps it.

A trailing ``_b`` on any name is a second, identical instance of it (an A/A control: its ratio says what the noise is).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from benchmarks.rounds import Clock

__all__ = ["OPTIMIZERS", "RESHARD", "VARIANTS", "Options", "Training", "build", "check_names", "wrap"]

OPTIMIZERS = ("fused_adamw", "foreach_adamw")
RESHARD: dict[str, bool | None] = {"always": True, "default": None, "never": False}
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Options:
    """What all variants of a run share. ``reshard``: ``reshard_after_forward`` of every block and of the root."""

    optimizer: str = "fused_adamw"
    reshard: str = "always"


@dataclass
class Training:
    """A wrapped model, its optimizer and its fixed batch. ``step()`` is the step that is measured."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: tuple[Tensor, Tensor]
    loss: float = float("nan")

    def step(self, clock: Clock | None = None) -> None:
        """Forward, backward, optimizer step, gradients dropped; ``loss`` is kept."""
        clock = clock or Clock()
        loss = self.model(*self.batch)
        clock.lap("forward")
        loss.backward()
        clock.lap("backward")
        self.optimizer.step()
        self.optimizer.zero_grad()
        clock.lap("optimizer")
        self.loss = loss.item()

    def parameters(self) -> list[Tensor]:
        return list(self.model.parameters())

    def state(self) -> list[Tensor]:
        """The optimizer's state tensors, step counters included."""
        return [value for one in self.optimizer.state.values() for value in one.values() if isinstance(value, Tensor)]


def check_names(names: Sequence[str]) -> None:
    """Raises ``ValueError`` that names what is unknown or given twice, and what exists."""
    unknown = [name for name in names if name.removesuffix("_b") not in VARIANTS]
    if unknown or not names:
        what = f"unknown variants: {', '.join(unknown)}" if unknown else "no variant given"
        raise ValueError(f"{what}; choose from {', '.join(VARIANTS)} (add _b for a second instance, e.g. fsdp2_b)")
    twice = sorted({name for name in names if list(names).count(name) > 1})
    if twice:
        raise ValueError(f"variants given twice: {', '.join(twice)}; for an A/A control add _b, e.g. {twice[0]}_b")


def build(name: str, model: nn.Module, batch: tuple[Tensor, Tensor], options: Options) -> Training:
    """Wrap ``model`` (plain, the same on every rank) as the variant ``name`` does; collective."""
    wrapped, optimizer = VARIANTS[name.removesuffix("_b")](model, options)
    return Training(wrapped, optimizer, batch)


def _adamw(parameters: Any, options: Options) -> torch.optim.Optimizer:
    kind = {"fused": True} if options.optimizer == "fused_adamw" else {"foreach": True}
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, **kind)  # type: ignore[arg-type]


def _local(model: nn.Module, options: Options) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, _adamw(model.parameters(), options)


def _ddp(model: nn.Module, options: Options) -> tuple[nn.Module, torch.optim.Optimizer]:
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return wrapped, _adamw(wrapped.parameters(), options)


def wrap(fully_shard: Callable[..., Any], model: nn.Module, options: Options, **more: Any) -> None:
    """Each block, then the root: the same buckets for every runtime. ``more`` goes to every call."""
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, reshard_after_forward=RESHARD[options.reshard], **more)
    fully_shard(model, reshard_after_forward=RESHARD[options.reshard], **more)


def _fsdp2(model: nn.Module, options: Options) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.fsdp import fully_shard

    wrap(fully_shard, model, options)
    return model, _adamw(model.parameters(), options)


def _fsdp2_fastgloo(model: nn.Module, options: Options) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.fsdp import FSDPModule

    wrapped, optimizer = _fsdp2(model, options)
    for module in wrapped.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(_BroadcastAllGather())
            module.set_custom_reduce_scatter(_AllToAllReduceScatter())
    return wrapped, optimizer


def _ours(model: nn.Module, options: Options) -> tuple[nn.Module, torch.optim.Optimizer]:
    from fsdp import fully_shard

    wrap(fully_shard, model, options)
    return model, _adamw(model.parameters(), options)


def _ours_ragged(model: nn.Module, options: Options) -> tuple[nn.Module, torch.optim.Optimizer]:
    import ragged_optim
    from fsdp import fully_shard

    wrap(fully_shard, model, options)
    return model, ragged_optim.AdamW(model.parameters(), lr=LEARNING_RATE)


class _Allocation:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _BroadcastAllGather(_Allocation):
    """FSDP2's all-gather as one broadcast a rank, in place: gloo's own stages the full buffer once more.

    Complete on return, whatever ``async_op`` says, which FSDP2 allows.
    """

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        chunks = output_tensor.chunk(group.size())
        own = chunks[group.rank()]
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor)
        works = [dist.broadcast(chunk, group=group, group_src=root, async_op=True) for root, chunk in enumerate(chunks)]
        for work in works:
            work.wait()


class _AllToAllReduceScatter(_Allocation):
    """FSDP2's reduce-scatter as an all-to-all and a local sum (averaged, where FSDP2 asks for the average)."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise NotImplementedError(f"fsdp2_fastgloo: the reduce operation {op} is neither SUM nor AVG")
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        first, *rest = received.chunk(group.size())
        output_tensor.copy_(first) if not rest else torch.add(first, rest[0], out=output_tensor)
        for addend in rest[1:]:
            output_tensor.add_(addend)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())


VARIANTS: dict[str, Callable[[nn.Module, Options], tuple[nn.Module, torch.optim.Optimizer]]] = {
    "local": _local,
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    "fsdp2_fastgloo": _fsdp2_fastgloo,
    "ours": _ours,
    "ours_ragged": _ours_ragged,
}
