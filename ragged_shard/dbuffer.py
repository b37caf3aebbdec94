"""DBuffer: a planned flat buffer over a mesh, its per-tensor views, in-place collectives and group-fused operations.

One DBuffer is one flat tensor laid out by one ``BufferPlan``. Along the mesh dimension that is cut, the ranks either
hold a chunk each (``Shard``), or the whole buffer (``Replicate``: parameters after a gather; ``Partial``: gradients
before the reduction). The views never move::

    whole    [ q_proj ........ | k_proj .... |~| norm |~~]      ~ gaps: alignment and padding, always zero in gradients
             |<---- chunk 0 ---->|<---- chunk 1 ---->|          S elements each, what collectives move
    sharded  [ q_proj ........ | k ]     [ _proj .... |~| ...]  a view of each tensor's own part on this rank

    sharded.all_gather(whole)        writes this rank's slot once (casting if the dtypes differ), gathers in place
    whole.reduce_scatter(sharded)    sums in place; no other copy

Parameters, gradients, optimizer states and norms speak of what a rank *owns*; only the two collectives speak of chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement
from torch.utils.weak import WeakTensorKeyDictionary

from ragged_shard.collectives import (
    Pending,
    all_gather_in_place,
    reduce_scatter_in_place,
    reduce_scatter_scratch_numel,
)
from ragged_shard.placement import RaggedShard, contiguous_stride
from ragged_shard.planner import BufferPlan
from ragged_shard.pool import Lease, Pool

__all__ = ["DBuffer", "Layout", "buffer_of"]


@dataclass(frozen=True)
class Outer:
    """The DTensor of which a buffered tensor is this rank's part (tensor parallelism on another mesh dimension).

    ``mesh``: the buffer's mesh and the other together. ``placements``: those on the other. ``shape``: the global one.
    ``seen``: the mesh and placements of the whole tensor that a module computes with, and those dimensions of that mesh
    which the buffer gathers and reduces over; by default the other mesh alone.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    seen: tuple[DeviceMesh, tuple[Placement, ...], tuple[int, ...]] | None = None


@dataclass(frozen=True)
class Layout:
    """Where the tensors of one buffer lie on the ranks of ``mesh`` dimension ``shard_dim``.

    ``shapes``: the shape of each tensor, in the order of ``plan.starts``. ``plan.world_size`` ranks hold a chunk each;
    the other mesh dimensions hold replicas.
    """

    plan: BufferPlan
    shapes: tuple[tuple[int, ...], ...]
    mesh: DeviceMesh
    shard_dim: int
    outer: tuple[Outer | None, ...] = ()

    def __post_init__(self) -> None:
        names = [name for name, _ in self.plan.starts]
        for name, numel, shape in zip(names, self.plan.numels, self.shapes, strict=True):
            if math.prod(shape) != numel:
                raise ValueError(f"{name}: shape {shape} has {math.prod(shape)} elements, the plan says {numel}")
        if self.mesh.size(self.shard_dim) != self.ranks:
            raise ValueError(
                f"a plan for {self.ranks} ranks does not fit mesh dimension {self.shard_dim} of {self.mesh}, "
                f"which has {self.mesh.size(self.shard_dim)}"
            )

    @property
    def ranks(self) -> int:
        return len(self.plan.cuts) - 1

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.plan.starts)

    @cached_property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.get_group(self.shard_dim)

    @cached_property
    def rank(self) -> int:
        return self.mesh.get_local_rank(self.shard_dim)

    @property
    def shard(self) -> int:
        """Elements of a chunk."""
        return self.plan.shard

    @cached_property
    def placements(self) -> tuple[tuple[Placement, ...], ...]:
        """Of each tensor: a RaggedShard on ``shard_dim``, over as few leading dimensions as the cuts allow."""
        found = []
        for name, shape in zip(self.names, self.shapes, strict=True):
            ranges = [self.plan.local_range(name, rank) for rank in range(self.ranks)]
            ragged = _ragged_shard([hi - lo for lo, hi in ranges], shape)
            found.append(tuple(ragged if dim == self.shard_dim else Replicate() for dim in range(self.mesh.ndim)))
        return tuple(found)

    @cached_property
    def specs(self) -> tuple[tuple[tuple[Placement, ...], tuple[int, ...], tuple[int, int]], ...]:
        """Of each tensor: its placements, this rank's local shape, and its range [lo, hi) in this rank's owned
        elements.
        """
        base, _ = self.plan.owned(self.rank)
        found = []
        for name, shape, placements in zip(self.names, self.shapes, self.placements, strict=True):
            lo, hi = self.plan.local_range(name, self.rank)
            ragged = placements[self.shard_dim]
            assert isinstance(ragged, RaggedShard)
            found.append((placements, tuple(ragged.local_shape(shape, self.rank)), (lo - base, hi - base)))
        return tuple(found)

    def dtensor_spec(self, index: int, dtype: torch.dtype) -> DTensorSpec:
        """What makes a DTensor of tensor ``index``; kept, since every step makes one for each gradient."""
        spec = self._dtensor_specs.get((index, dtype))
        if spec is None:
            outer = self.outer[index] if self.outer else None
            shape = self.shapes[index] if outer is None else outer.shape
            mesh = self.mesh if outer is None else outer.mesh
            placements = self.placements[index] + (() if outer is None else outer.placements)
            meta = TensorMeta(torch.Size(shape), contiguous_stride(shape), dtype)
            spec = self._dtensor_specs[index, dtype] = DTensorSpec(mesh, placements, tensor_meta=meta)
        return spec

    @cached_property
    def _dtensor_specs(self) -> dict[tuple[int, torch.dtype], DTensorSpec]:
        return {}

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """The ranges of the whole buffer that belong to no tensor."""
        gaps, end = [], 0
        for (_, start), numel in zip(self.plan.starts, self.plan.numels, strict=True):
            if start > end:
                gaps.append((end, start))
            end = max(end, start + numel)
        total = self.shard * self.ranks
        return (*gaps, (end, total)) if end < total else tuple(gaps)


def _ragged_shard(counts: Sequence[int], shape: tuple[int, ...]) -> RaggedShard:
    """The RaggedShard under which rank k holds ``counts[k]`` consecutive elements of a tensor of ``shape``."""
    if not any(counts):
        return RaggedShard((0,) if shape else (), (1,) + (0,) * (len(counts) - 1))
    for prefix in range(min(1, len(shape)), len(shape) + 1):
        row = math.prod(shape[prefix:])
        if all(count % row == 0 for count in counts):
            return RaggedShard(tuple(range(prefix)), tuple(count // row for count in counts))
    raise AssertionError("one element is always a unit")


class DBuffer:
    """One flat tensor laid out by ``layout``, sharded or whole along the mesh dimension that is cut.

    Make one with ``DBuffer.sharded`` (memory of its own, zeroed) or ``DBuffer.whole`` (memory leased from a pool while
    ``held``).
    """

    def __init__(self, layout: Layout, flat: Tensor, placements: tuple[Placement, ...], lease: Lease | None) -> None:
        self.layout = layout
        self.placements = placements
        self.lease = lease
        self._flat = flat
        # Writes and collectives go through an alias with a version counter of its own: autograd compares the counter of
        # the views it has saved, and a gather that restores the same values is no modification.
        self.flat = flat.data

    @classmethod
    def sharded(
        cls, layout: Layout, dtype: torch.dtype, device: torch.device, *, zero: bool = True, pin_memory: bool = False
    ) -> DBuffer:
        """A chunk on each rank, zeroed unless ``zero`` is false. Padded plans only: what is owned is the chunk."""
        lo, hi = layout.plan.owned(layout.rank)
        if (lo, hi) != tuple(layout.plan.chunk(layout.rank)):
            raise NotImplementedError(
                "this plan owns other elements than its chunk; plan the bucket with padded chunks"
            )
        flat = (torch.zeros if zero else torch.empty)(hi - lo, dtype=dtype, device=device, pin_memory=pin_memory)
        return cls(layout, flat, _placements(layout, Shard(0)), None)

    @classmethod
    def whole(
        cls, layout: Layout, dtype: torch.dtype, pool: Pool, *, partial: bool = False, label: str = "", owner: str = ""
    ) -> DBuffer:
        """The whole buffer on each rank, without memory until ``acquire``."""
        lease = pool.lease(layout.shard * layout.ranks, dtype, label, owner)
        buffer = cls(layout, lease.tensor, _placements(layout, Partial() if partial else Replicate()), lease)
        _ = buffer.views
        buffer.release()
        return buffer

    @property
    def plan(self) -> BufferPlan:
        return self.layout.plan

    @property
    def names(self) -> tuple[str, ...]:
        return self.layout.names

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return self.layout.shapes

    @property
    def mesh(self) -> DeviceMesh:
        return self.layout.mesh

    @property
    def dtype(self) -> torch.dtype:
        return self._flat.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the flat tensor on this rank, whether or not there is memory under it."""
        return self._flat.numel() * self._flat.itemsize

    @property
    def device(self) -> torch.device:
        return self._flat.device

    @property
    def is_sharded(self) -> bool:
        return self.placements[self.layout.shard_dim].is_shard()

    @property
    def held(self) -> bool:
        """Whether there is memory under the views."""
        return self.lease is None or self.lease.held

    @property
    def owned(self) -> Tensor:
        """1-D: the elements this rank owns, gaps included."""
        if self.is_sharded:
            return self.flat
        lo, hi = self.plan.owned(self.layout.rank)
        return self.flat[lo:hi]

    @property
    def chunk(self) -> Tensor:
        """1-D: this rank's chunk, what collectives move."""
        if self.is_sharded:
            return self.flat
        lo, hi = self.plan.chunk(self.layout.rank)
        return self.flat[lo:hi]

    @cached_property
    def views(self) -> tuple[Tensor, ...]:
        """A view of each tensor: of its original shape if whole, this rank's part in canonical layout if sharded."""
        if not self.is_sharded:
            starts = [start for _, start in self.plan.starts]
            return tuple(
                self._flat[start : start + math.prod(shape)].view(shape)
                for start, shape in zip(starts, self.shapes, strict=True)
            )
        return tuple(self._flat[lo:hi].view(shape) for _, shape, (lo, hi) in self.layout.specs)

    def dtensor(self, index: int) -> DTensor:
        """Tensor ``index`` as a DTensor with a RaggedShard placement, a view of this rank's shard."""
        if not self.is_sharded:
            raise ValueError("only a sharded DBuffer has DTensor views; a whole one has plain views")
        # Every DTensor gets a local of its own: torch.utils.swap_tensors and `_local_tensor` assignment must not alias
        # two of them.
        _, shape, (lo, hi) = self.layout.specs[index]
        local = self._flat[lo:hi].view(shape)
        _HOMES[local] = (self, index)
        # Without DTensor's __init__, which does nothing, behind Dynamo's guard.
        return DTensor.__new__(DTensor, local, self.layout.dtensor_spec(index, self.dtype), requires_grad=False)

    def like(self, dtype: torch.dtype | None = None) -> DBuffer:
        """A new, zeroed, sharded DBuffer of the same layout (optimizer states, gradients)."""
        return DBuffer.sharded(self.layout, dtype or self.dtype, self.device)

    # -- memory --

    def acquire(self) -> bool:
        """Put memory under a whole buffer (contents undefined); ``False`` if it was there."""
        return self.lease is not None and self.lease.acquire()

    def release(self) -> None:
        """Give the memory of a whole buffer back to its pool. Its views must not be read until the next ``acquire``."""
        if self.lease is not None:
            self.lease.release()

    def leave_shard(self) -> DBuffer:
        """Leave a whole buffer's memory to a sharded one, which lies where this rank's chunk does.

        It goes back to the pool when nobody refers to that one or its views. Only where ``Pool.lends``.
        """
        assert self.lease is not None
        lo, hi = self.plan.chunk(self.layout.rank)
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        flat = empty.set_(self.lease.lend(), lo, (hi - lo,))  # type: ignore[call-overload]
        return DBuffer(self.layout, flat, _placements(self.layout, Shard(0)), None)

    # -- collectives --

    def all_gather(self, out: DBuffer, collective: Callable[..., Any] | None = None) -> Pending:
        """Shard -> Replicate into ``out``. This rank's slot is written once; nothing else is copied here.

        ``collective``: called with ``output_tensor``, ``input_tensor`` (a part of it), ``group`` and ``async_op``.
        """
        self._same_layout(out)
        # From pinned memory this rank's slot crosses to the device while compute goes on.
        out.chunk.copy_(self.flat, non_blocking=True)
        if collective is None:
            return all_gather_in_place(out.flat, self.layout.group)
        options = {"group": self.layout.group, "async_op": True}
        return Pending([collective(output_tensor=out.flat, input_tensor=out.chunk, **options)])

    def reduce_scatter(
        self,
        out: DBuffer | None,
        *,
        divide_by: float = 1.0,
        accumulate: bool = False,
        scratch: Tensor | None = None,
        replicate_dim: int | None = None,
        carry: DBuffer | None = None,
        group: dist.ProcessGroup | None = None,
        collective: Callable[..., Any] | None = None,
        hook: Callable[[Tensor], object] | None = None,
    ) -> Pending:
        """Partial -> Shard into ``out``: the sum over the ranks divided by ``divide_by``, written or added. Without
        ``out``: into this rank's own chunk of this buffer.

        ``replicate_dim``: a second mesh dimension to sum over, (Partial, Partial) -> (Replicate, Shard): the shards are
        reduced first, so that only a chunk travels between replicas. ``carry``: a sharded sum to add before that.
        ``group``: another group of the same ranks. ``collective``: called with ``output_tensor`` (this rank's own part
        of the input), ``input_tensor``, ``group``, ``op`` and ``async_op``. ``hook``: called with the sum, 1-D, before
        it is divided.
        """
        if out is not None:
            self._same_layout(out)
        chunk, group = self.chunk, group or self.layout.group
        place = chunk if out is None else out.flat
        elsewhere = self._elsewhere(place)
        if replicate_dim is None and collective is None and hook is None and not elsewhere:
            return reduce_scatter_in_place(
                self.flat, place, group, scratch=scratch, divide_by=divide_by, accumulate=accumulate
            )
        if collective is None:
            shards = reduce_scatter_in_place(self.flat, chunk, group, scratch=scratch)
        else:
            options = {"group": group, "op": dist.ReduceOp.SUM, "async_op": True}
            shards = Pending([collective(output_tensor=chunk, input_tensor=self.flat, **options)])

        def over_replicas() -> None:
            shards.wait()
            if replicate_dim is not None:
                if carry is not None:
                    chunk.add_(carry.flat)
                dist.all_reduce(chunk, group=self.mesh.get_group(replicate_dim))
            if hook is not None:
                hook(chunk)
            if elsewhere:
                total = chunk.mul_(1.0 / divide_by).to(place.device)
                place.add_(total) if accumulate else place.copy_(total)
            elif accumulate:
                place.add_(chunk, alpha=1.0 / divide_by)
            else:
                torch.mul(chunk, 1.0 / divide_by, out=place)

        return Pending((), over_replicas)

    def _elsewhere(self, place: Tensor) -> bool:
        """Whether ``place`` lies on another device (offloaded gradients), so that the sum is made here first."""
        return place.device != self.device

    def scratch_nbytes(self) -> int:
        """Bytes of scratch that ``reduce_scatter`` wants, a multiple of 128 for aligned plans."""
        return reduce_scatter_scratch_numel(self.flat, self.layout.group) * self.dtype.itemsize

    def all_reduce(self, mesh_dim: int) -> Pending:
        """Sum in place over one mesh dimension."""
        work = dist.all_reduce(self.flat, group=self.mesh.get_group(mesh_dim), async_op=True)
        return Pending([work])

    # -- one operation for all tensors --

    def zero_(self) -> DBuffer:
        self.flat.zero_()
        return self

    def zero_gaps_(self) -> DBuffer:
        """Zero what belongs to no tensor, which pooled memory leaves undefined."""
        base = self.plan.owned(self.layout.rank)[0] if self.is_sharded else 0
        end = base + self.flat.numel()
        for lo, hi in self.layout.gaps:
            if max(lo, base) < min(hi, end):
                self.flat[max(lo, base) - base : min(hi, end) - base].zero_()
        return self

    def scale_(self, factor: float | Tensor) -> DBuffer:
        self.flat.mul_(factor)
        return self

    def add_(self, other: DBuffer, alpha: float = 1.0) -> DBuffer:
        self._same_layout(other)
        self.flat.add_(other.flat, alpha=alpha)
        return self

    def copy_(self, other: DBuffer) -> DBuffer:
        """Copy, casting to this buffer's dtype."""
        self._same_layout(other)
        self.flat.copy_(other.flat)
        return self

    def norm(self, norm_type: float = 2.0) -> Tensor:
        """The vector norm over all tensors together (``norm_type`` > 0), the same 0-d fp32 tensor on every rank.

        Gaps must hold zeros, as those of gradients do.
        """
        if not norm_type > 0:
            raise ValueError(f"norm_type must be positive (math.inf included), got {norm_type}")
        local: Tensor = torch.linalg.vector_norm(self.flat, norm_type, dtype=torch.float32)
        if not self.is_sharded:
            return local
        if math.isinf(norm_type):
            dist.all_reduce(local, dist.ReduceOp.MAX, group=self.layout.group)
            return local
        powers = local.pow(norm_type)
        dist.all_reduce(powers, group=self.layout.group)
        return powers.pow(1.0 / norm_type)

    def _same_layout(self, other: DBuffer) -> None:
        if other.layout is not self.layout:
            raise ValueError("these DBuffers have different layouts; make one with like() of the other")

    def __repr__(self) -> str:
        placements = ", ".join(map(str, self.placements))
        size = f"{self.layout.ranks} x {self.layout.shard} {self.dtype}"
        return f"DBuffer({len(self.names)} tensors, {size}, ({placements}))"


def _placements(layout: Layout, along_shard_dim: Placement) -> tuple[Placement, ...]:
    return tuple(along_shard_dim if dim == layout.shard_dim else Replicate() for dim in range(layout.mesh.ndim))


# Keyed by the local tensor object itself: an alias with another shape (`p.detach()`, `p.data`) is not the parameter's
# view any more, and an attribute on the tensor would travel into checkpoints.
_HOMES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def buffer_of(tensor: Tensor) -> tuple[DBuffer, int] | None:
    """The sharded DBuffer and the index in it of which ``tensor`` (a DTensor) is a view; ``None`` for any other
    tensor.
    """
    if not isinstance(tensor, DTensor):
        return None
    return cast("tuple[DBuffer, int] | None", _HOMES.get(tensor._local_tensor))
