"""memory_report: the bytes of parameters, gradients, states and communication buffers, predicted and observed.

    profile = record(model, step)                            # fsdp.simulate: what one step does
    print(memory_report(model, optimizer, profile))

Predicted: from each bucket's plan, the shapes and placements of states, and, for what the communication buffers hold
at once, the recorded schedule replayed without memory. Observed: the distinct storages that are alive, and the ledger
of the memory pool. The two are equal, in every step of a schedule.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from fsdp.bucket import Bucket
from fsdp.hooks import State, state_of
from fsdp.simulate import Cluster, Profile, predict
from ragged_shard.dbuffer import DBuffer, Layout, buffer_of
from ragged_shard.placement import RaggedShard
from ragged_shard.pool import Pool, storage_bytes

__all__ = ["BucketMemory", "MemoryReport", "memory_report"]


@dataclass(frozen=True)
class BucketMemory:
    """One bucket on this rank, bytes.

    ``unsharded`` and ``unreduced``: its gathered parameters and its whole gradients while they are held, from the
    pool. They are made when they are first needed, and 0 until then.
    """

    name: str
    numel: int
    padding: float
    parameters: int
    predicted_parameters: int
    gradients: int
    predicted_gradients: int
    state: int
    predicted_state: int
    unsharded: int
    predicted_unsharded: int
    unreduced: int
    predicted_unreduced: int

    @property
    def columns(self) -> tuple[tuple[int, int], ...]:
        """(predicted, observed) of each kind of memory, in the order of ``COLUMNS``."""
        return (
            (self.predicted_parameters, self.parameters),
            (self.predicted_gradients, self.gradients),
            (self.predicted_state, self.state),
            (self.predicted_unsharded, self.unsharded),
            (self.predicted_unreduced, self.unreduced),
        )


COLUMNS = ("parameters", "gradients", "states", "unsharded", "unreduced")


@dataclass(frozen=True)
class MemoryReport:
    """Bytes on this rank. ``str()`` is a table.

    ``optimizer_state``: of the whole optimizer, what belongs to no bucket included. ``buffers_*``: of the pools; what
    sharded gradients lie in is counted with these. ``predicted_*`` are None without a profile.
    """

    buckets: tuple[BucketMemory, ...]
    optimizer_state: int
    buffers_held: int
    buffers_peak: int
    buffers_grown: int
    predicted_buffers_held: int | None = None
    predicted_buffers_peak: int | None = None

    @property
    def parameters(self) -> int:
        return sum(bucket.parameters for bucket in self.buckets)

    @property
    def gradients(self) -> int:
        return sum(bucket.gradients for bucket in self.buckets)

    @property
    def surprises(self) -> tuple[str, ...]:
        """Where observed and predicted bytes differ; empty when the memory is as predicted."""
        found = [
            f"{bucket.name}: {observed} bytes of {column}, predicted {predicted}"
            for bucket in self.buckets
            for column, (predicted, observed) in zip(COLUMNS, bucket.columns, strict=True)
            if predicted != observed
        ]
        for what, predicted, observed in (
            ("held", self.predicted_buffers_held, self.buffers_held),
            ("in use at the peak", self.predicted_buffers_peak, self.buffers_peak),
        ):
            if predicted is not None and predicted != observed:
                found.append(f"communication buffers: {observed} bytes {what}, predicted {predicted}")
        return tuple(found)

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("bucket", "elements", "padding", *COLUMNS)]
        for b in self.buckets:
            rows.append((b.name, f"{b.numel:,}", f"{b.padding:.2%}", *(_cell(*pair) for pair in b.columns)))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = []
        for row in rows:
            cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
            cells[0] = row[0].ljust(widths[0])
            lines.append("  ".join(cells))
        held, peak = self.predicted_buffers_held, self.predicted_buffers_peak
        lines.append(
            f"total: parameters {_size(self.parameters)}, gradients {_size(self.gradients)}, optimizer state "
            f"{_size(self.optimizer_state)}, communication buffers "
            f"{_cell(self.buffers_held if held is None else held, self.buffers_held)} held "
            f"({_cell(self.buffers_peak if peak is None else peak, self.buffers_peak)} in use at the peak, allocated "
            f"{self.buffers_grown} times)"
        )
        unknown = "" if held is not None else "; the buffers held at once are predicted from a profile (fsdp.simulate)"
        lines.append(f"as predicted{unknown}" if not self.surprises else "NOT as predicted: observed != predicted")
        return "\n".join(lines)


def memory_report(model: nn.Module, optimizer: Optimizer | None = None, profile: Profile | None = None) -> MemoryReport:
    """What ``model``'s shards, buffers and (given the optimizer) states take on this rank, and what they should.

    ``profile``: what ``fsdp.simulate.record`` kept of a step of this model; from it follows what the communication
    buffers hold at once. No communication.

    Raises ``ValueError`` when no part of ``model`` was passed to ``fully_shard``.
    """
    states: dict[int, State] = {}
    for module in model.modules():
        if (state := state_of(module)) is not None:
            states[id(state)] = state
    if not states:
        raise ValueError(f"{type(model).__name__} has no fully_shard module; call fully_shard on it first")
    buckets = [state.bucket for state in states.values() if state.bucket.buffers]
    pools = {id(s.bucket.pool): s.bucket.pool for s in states.values() if s.bucket.pool is not None}
    # What gradients lie in is counted there.
    lent = sum(pool.lent for pool in pools.values())
    held = peak = None
    if profile is not None:
        on_cpu = all(pool.device.type == "cpu" for pool in pools.values())
        ranks = max(mesh.size() for bucket in buckets for mesh in bucket.meshes)
        prediction = predict(profile, Cluster(ranks=ranks, gloo=on_cpu))
        held, peak = prediction.buffer_bytes - lent, prediction.peak_buffer_bytes
    return MemoryReport(
        buckets=tuple(_bucket(bucket, optimizer) for bucket in buckets),
        optimizer_state=0 if optimizer is None else _storages(_state_tensors(optimizer, optimizer.state)),
        buffers_held=sum(pool.ledger.held for pool in pools.values()) - lent,
        buffers_peak=sum(pool.ledger.peak_in_use for pool in pools.values()),
        buffers_grown=sum(pool.ledger.grown for pool in pools.values()),
        predicted_buffers_held=held,
        predicted_buffers_peak=peak,
    )


def _bucket(bucket: Bucket, optimizer: Optimizer | None) -> BucketMemory:
    live = bucket.live_bytes()
    numel = bucket.numel()
    room = sum(b.layout.shard * b.layout.ranks for b in bucket.buffers)
    states = [] if optimizer is None else _state_tensors(optimizer, [p.sharded for p in bucket.parameters])
    unsharded = unreduced = 0
    for buffer in bucket.buffers:
        dtype = buffer.params.dtype
        if bucket.param_dtype is not None and dtype.is_floating_point:
            dtype = bucket.param_dtype
        unsharded += 0 if buffer.full is None else _block_bytes(buffer.layout, dtype)
        unreduced += 0 if buffer.full_grads is None else _block_bytes(buffer.layout, bucket.reduce_dtype or dtype)
    return BucketMemory(
        name=bucket.name,
        numel=numel,
        padding=room / numel - 1 if numel else 0.0,
        parameters=live["parameters"],
        predicted_parameters=sum(b.shard_nbytes() for b in bucket.buffers),
        gradients=live["gradients"],
        predicted_gradients=sum(
            b.grads_nbytes() for b in bucket.buffers if any(p.sharded.grad is not None for p in b.parameters)
        ),
        state=_storages(states),
        predicted_state=_predicted(states),
        unsharded=_leased(buffer.full for buffer in bucket.buffers),
        predicted_unsharded=unsharded,
        unreduced=_leased(buffer.full_grads for buffer in bucket.buffers),
        predicted_unreduced=unreduced,
    )


def _block_bytes(layout: Layout, dtype: torch.dtype) -> int:
    """Of the block of memory that a whole buffer of this layout takes."""
    return Pool(torch.device("meta")).lease(layout.shard * layout.ranks, dtype).nbytes


def _leased(buffers: Iterable[DBuffer | None]) -> int:
    """Bytes of the blocks under whole buffers: of their storages while there is memory, else of the lease."""
    leases = [buffer.lease for buffer in buffers if buffer is not None and buffer.lease is not None]
    return sum(lease.tensor.untyped_storage().nbytes() if lease.held else lease.nbytes for lease in leases)


def _state_tensors(optimizer: Optimizer, parameters: Iterable[Tensor]) -> list[Tensor]:
    states = [optimizer.state[p] for p in parameters if p in optimizer.state]
    return [v for state in states for v in state.values() if isinstance(v, Tensor)]


def _predicted(states: Sequence[Tensor]) -> int:
    """From the states' shapes, placements and dtypes alone: what this rank's parts of them take.

    An optimizer may lay the states of a bucket out as the bucket itself, padding included (ragged_optim does).
    """
    total, flat = 0, dict[int, int]()
    for state in states:
        if not isinstance(state, DTensor):
            total += state.numel() * state.itemsize
        elif (home := buffer_of(state)) is not None:
            flat[id(home[0])] = home[0].layout.shard * state.itemsize
        else:
            total += _local_numel(state) * state.itemsize
    return total + sum(flat.values())


def _local_numel(tensor: DTensor) -> int:
    mesh = tensor.device_mesh
    ragged = [(dim, p) for dim, p in enumerate(tensor.placements) if isinstance(p, RaggedShard)]
    others = [Replicate() if isinstance(p, RaggedShard) else p for p in tensor.placements]
    shape, _ = compute_local_shape_and_global_offset(tensor.shape, mesh, others)
    for dim, placement in ragged:
        shape = tuple(placement.local_shape(shape, mesh.get_local_rank(dim)))
    return math.prod(shape)


def _storages(tensors: Sequence[Tensor]) -> int:
    return storage_bytes([t._local_tensor if isinstance(t, DTensor) else t for t in tensors])


def _cell(predicted: int, observed: int) -> str:
    return _size(observed) if predicted == observed else f"{_size(observed)} != {_size(predicted)}"


def _size(nbytes: int) -> str:
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    raise AssertionError
