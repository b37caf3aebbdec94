"""memory_report: the bytes of parameters, gradients, states and communication buffers, predicted and observed.

Predicted from the plans alone (shards) and from the schedule's own ledger (how many buffers it holds at once); observed
from the distinct storages that are alive.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp.bucket import Bucket
from fsdp.hooks import State, state_of
from ragged_shard.pool import storage_bytes

__all__ = ["BucketMemory", "MemoryReport", "memory_report"]


@dataclass(frozen=True)
class BucketMemory:
    """One bucket on this rank, bytes. ``unsharded``: its gathered parameters while they are held."""

    name: str
    numel: int
    padding: float
    parameters: int
    predicted_parameters: int
    gradients: int
    predicted_gradients: int
    unsharded: int


@dataclass(frozen=True)
class MemoryReport:
    """Bytes on this rank. ``str()`` is a table."""

    buckets: tuple[BucketMemory, ...]
    optimizer_state: int
    buffers_held: int
    buffers_peak: int
    buffers_grown: int

    @property
    def parameters(self) -> int:
        return sum(bucket.parameters for bucket in self.buckets)

    @property
    def gradients(self) -> int:
        return sum(bucket.gradients for bucket in self.buckets)

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("bucket", "elements", "padding", "parameters", "predicted", "gradients", "predicted", "unsharded")
        ]
        for b in self.buckets:
            sizes = (b.parameters, b.predicted_parameters, b.gradients, b.predicted_gradients, b.unsharded)
            rows.append((b.name, f"{b.numel:,}", f"{b.padding:.2%}", *map(_size, sizes)))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = []
        for row in rows:
            cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
            cells[0] = row[0].ljust(widths[0])
            lines.append("  ".join(cells))
        lines.append(
            f"total: parameters {_size(self.parameters)}, gradients {_size(self.gradients)}, optimizer state "
            f"{_size(self.optimizer_state)}, communication buffers {_size(self.buffers_held)} held "
            f"({_size(self.buffers_peak)} in use at the peak, allocated {self.buffers_grown} times)"
        )
        return "\n".join(lines)


def memory_report(model: nn.Module, optimizer: Optimizer | None = None) -> MemoryReport:
    """What ``model``'s shards, buffers and (given the optimizer) states take on this rank.

    Raises ``ValueError`` when no part of ``model`` was passed to ``fully_shard``.
    """
    states: dict[int, State] = {}
    for module in model.modules():
        if (state := state_of(module)) is not None:
            states[id(state)] = state
    if not states:
        raise ValueError(f"{type(model).__name__} has no fully_shard module; call fully_shard on it first")
    pools = {id(s.bucket.pool): s.bucket.pool for s in states.values() if s.bucket.pool is not None}
    return MemoryReport(
        buckets=tuple(_bucket(state.bucket) for state in states.values() if state.bucket.buffers),
        optimizer_state=0 if optimizer is None else _state_bytes(optimizer),
        # What gradients lie in is counted there.
        buffers_held=sum(pool.ledger.held - pool.lent for pool in pools.values()),
        buffers_peak=sum(pool.ledger.peak_in_use for pool in pools.values()),
        buffers_grown=sum(pool.ledger.grown for pool in pools.values()),
    )


def _bucket(bucket: Bucket) -> BucketMemory:
    live = bucket.live_bytes()
    numel = bucket.numel()
    room = sum(b.layout.shard * b.layout.ranks for b in bucket.buffers)
    return BucketMemory(
        name=bucket.name,
        numel=numel,
        padding=room / numel - 1 if numel else 0.0,
        parameters=live["parameters"],
        predicted_parameters=sum(b.layout.shard * b.params.dtype.itemsize for b in bucket.buffers),
        gradients=live["gradients"],
        predicted_gradients=sum(
            b.grads_nbytes() for b in bucket.buffers if any(p.sharded.grad is not None for p in b.parameters)
        ),
        unsharded=sum(b.full.lease.nbytes for b in bucket.buffers if b.full is not None and b.full.lease is not None),
    )


def _state_bytes(optimizer: Optimizer) -> int:
    tensors = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return storage_bytes([t._local_tensor if isinstance(t, DTensor) else t for t in tensors])


def _size(nbytes: int) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1024  # type: ignore[assignment]
    raise AssertionError
