"""All-gather extensions: tensor subclasses that say what is gathered and what is made of it (float8, for instance).

torch's protocol for ``fully_shard``. The local tensor of the sharded parameter is an instance of the subclass, with

    fsdp_pre_all_gather(mesh)                                          -> (tensors to gather, metadata)
    fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)   the same
    fsdp_post_all_gather(gathered, metadata, param_dtype)              -> (unsharded tensor, inner tensors)
    fsdp_post_all_gather(gathered, metadata, param_dtype, out=...)     -> None: fill ``out``, made by an earlier call

Every such parameter has a buffer of its own, cut between rows into equal parts but for the last (what ``Shard(0)``
does, so that a subclass written for FSDP2 pads as it does there), or into whole blocks of rows where a policy asks for
a ``Block``::

    shard (subclass) ──pre──▶ encoded rows ──1 write──▶ own slot of [ rank 0 | rank 1 | ... ] ──gather in place──▶ post

What ``post`` gets are views of that buffer, whose memory comes from the pool and goes back to it between uses, as does
that of the inner tensors which ``post`` made: after the first gather nothing is allocated.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import _unsafe_preserve_version_counter  # type: ignore[attr-defined]  # not in its __all__
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from fsdp.flat_buffer import BucketParameter, FlatBuffer
from ragged_shard.collectives import Pending, all_gather_in_place, all_gather_v, on_wire
from ragged_shard.dbuffer import DBuffer, Layout
from ragged_shard.pool import Lease, Pool, storage_bytes

__all__ = ["ExtendedBuffer", "chunk_numel", "is_extended", "local_shard"]


def is_extended(name: str, tensor: Tensor) -> bool:
    """Whether ``tensor`` has the two methods. Raises ``ValueError`` where they are not as torch wants them."""
    pre = getattr(tensor, "fsdp_pre_all_gather", None)
    post = getattr(tensor, "fsdp_post_all_gather", None)
    if pre is None and post is None:
        return False
    kind = type(tensor).__name__
    if pre is None or post is None:
        raise ValueError(
            f"parameter {name!r} is a {kind} with only one of fsdp_pre_all_gather and fsdp_post_all_gather; define both"
        )
    signature = inspect.signature(pre)
    if len(signature.parameters) not in (1, 5):
        raise ValueError(
            f"fsdp_pre_all_gather of {kind} (parameter {name!r}) takes {signature}; it must take (mesh) or (mesh, "
            f"outer_size, outer_stride, module, mp_policy)"
        )
    if tensor.dim() == 0:
        raise ValueError(f"parameter {name!r} is a 0-d {kind} with fsdp_pre_all_gather, which is cut between rows")
    return True


def chunk_numel(name: str, shape: Sequence[int], block: int, ranks: int) -> int:
    """Elements of a rank's part: whole blocks of ``block`` elements (1: rows), as many on each rank but the last."""
    row = math.prod(shape[1:])
    block = row if block == 1 else block
    if row and block % row and block < math.prod(shape):
        raise ValueError(
            f"parameter {name!r} with fsdp_pre_all_gather is cut between its rows of {row} elements, but its policy "
            f"wants blocks of {block}; use Block.rows(...)"
        )
    blocks = -(-math.prod(shape) // max(1, block))
    return max(1, -(-blocks // ranks) * block)


def local_shard(data: Tensor, chunk: int, rank: int) -> Tensor:
    """This rank's rows of ``data``, a subclass, in memory of their own; by operations that FSDP2 asks of it too."""
    row = math.prod(data.shape[1:])
    pieces = data.split(max(1, chunk // max(1, row)), 0)
    rows = pieces[rank].shape[0] if rank < len(pieces) else 0
    local = data.new_zeros((rows, *data.shape[1:]))
    if rows and data.device.type != "meta":
        local.copy_(pieces[rank])
    return local


class _Gathered:
    """One of the tensors that ``pre`` returns: where each rank's part of it lies in a buffer of the pool."""

    def __init__(self, shapes: Sequence[torch.Size], dtype: torch.dtype, pool: Pool, owner: str) -> None:
        self.shapes = list(shapes)
        numels = [shape.numel() for shape in shapes]
        tail = shapes[0][1:]
        rows = sum(shape[0] if shape else 1 for shape in shapes)
        self.lease: Lease = pool.lease(sum(numels), dtype, "parameters", owner)
        # What `post` sees; writes go through another alias, with a version counter of its own.
        self.view = self.lease.tensor.view(rows, *tail)
        self.parts = self.lease.tensor.data.split(numels)
        self.even = len(set(numels)) == 1

    def gather(self, mine: Tensor, group: dist.ProcessGroup) -> Pending:
        self.parts[group.rank()].copy_(mine.reshape(-1), non_blocking=True)
        if self.even:
            return all_gather_in_place(on_wire(self.lease.tensor.data), group)
        return all_gather_v(self.parts, group)


class ExtendedBuffer(FlatBuffer):
    """The buffer of one parameter with an extension. Its gradient is an ordinary one, reduced as any other."""

    extended = True

    def __init__(self, layout: Layout, parameter: BucketParameter, mp_policy: MixedPrecisionPolicy) -> None:
        # Of `params` only the layout counts: the shard lies in memory of the subclass's own.
        dtype = parameter.sharded.dtype
        super().__init__(layout, [parameter], DBuffer.sharded(layout, dtype, torch.device("meta")))
        self.mp_policy = mp_policy
        self._gathered: list[_Gathered] | None = None
        self._inner: list[Lease] = []
        self._metadata: Any = None

    @property
    def local(self) -> Tensor:
        """This rank's shard, an instance of the subclass."""
        return self.parameters[0].local

    @property
    def dtype(self) -> torch.dtype:
        return self.parameters[0].sharded.dtype

    @property
    def device(self) -> torch.device:
        return self.local.device

    @property
    def full_dtype(self) -> torch.dtype:
        full = self.parameters[0].full
        assert full is not None
        return full.dtype

    def shards(self) -> list[Tensor]:
        return _plain(self.local)

    def shard_nbytes(self) -> int:
        """As observed: what a subclass keeps is its own affair."""
        return storage_bytes(self.shards())

    def leases(self) -> list[Lease]:
        return [gathered.lease for gathered in self._gathered or ()] + self._inner

    def release_full(self) -> None:
        for lease in self.leases():
            lease.release()
        self._metadata = None

    def copied(self, parameters: Sequence[BucketParameter]) -> ExtendedBuffer:
        return ExtendedBuffer(self.layout, parameters[0], self.mp_policy)

    # -- gathering --

    def gather(self, pool: Pool, owner: str) -> Pending:
        """Let the subclass say what to gather, and start."""
        if self._gathered is None:
            self._gathered = self._first(pool, owner)
            inputs = self._inputs
        else:
            inputs = self._pre(pool.device)
            self._check(inputs)
        pending = []
        for gathered, mine in zip(self._gathered, inputs, strict=True):
            gathered.lease.acquire()
            pool.note("all_gather", "parameters", owner, gathered.lease.tensor.nbytes)
            pending.append(gathered.gather(mine, self.layout.group))
        self._inputs = ()
        return Pending(pending)

    _inputs: tuple[Tensor, ...] = ()

    def _pre(self, device: torch.device) -> tuple[Tensor, ...]:
        local, parameter = self.local, self.parameters[0]
        if local.device != device:
            local = local.to(device, non_blocking=True)
        pre = local.fsdp_pre_all_gather  # type: ignore[attr-defined]  # the subclass has it
        mesh = self._shard_mesh
        if len(inspect.signature(pre).parameters) == 1:
            inputs, self._metadata = pre(mesh)
        else:
            shape = torch.Size(self.layout.shapes[0])
            module = parameter.places[0][0]
            inputs, self._metadata = pre(mesh, shape, _strides(shape), module, self.mp_policy)
        return tuple(inputs)

    @property
    def _shard_mesh(self) -> DeviceMesh:
        mesh = self.layout.mesh
        if mesh.ndim == 1:
            return mesh
        if mesh.mesh_dim_names is not None:
            return mesh[mesh.mesh_dim_names[self.layout.shard_dim]]
        return DeviceMesh.from_group(self.layout.group, mesh.device_type)

    def _first(self, pool: Pool, owner: str) -> list[_Gathered]:
        """Ranks tell each other what they are going to gather: once, since it may not change."""
        error: Exception | None = None
        told: Any = None
        try:
            self._inputs = self._pre(pool.device)
            told = [(tuple(t.shape), t.dtype) for t in self._inputs]
        except Exception as raised:  # whatever the subclass raises: the others wait for this rank below
            error, told = raised, f"{type(raised).__name__}: {raised}"
        everybody: list[Any] = [None] * self.layout.group.size()
        dist.all_gather_object(everybody, told, group=self.layout.group)
        name, kind = self.parameters[0].name, type(self.local).__name__
        for rank, other in enumerate(everybody):
            if isinstance(other, str):
                raise RuntimeError(
                    f"fsdp_pre_all_gather of {kind}, parameter {name!r}, raised on rank {rank} of the shard group: "
                    f"{other}"
                ) from error
        if complaint := self._complaint(everybody):
            raise RuntimeError(f"fsdp_pre_all_gather of {kind}, parameter {name!r}: {complaint}")
        return [
            _Gathered([torch.Size(shape) for shape, _ in each], each[0][1], pool, owner)
            for each in zip(*everybody, strict=True)
        ]

    def _complaint(self, everybody: Sequence[Sequence[tuple[tuple[int, ...], torch.dtype]]]) -> str:
        """What is wrong with the shapes and dtypes that the ranks are going to gather, if anything."""
        if len({len(each) for each in everybody}) > 1 or not everybody[0]:
            return f"ranks return {[len(each) for each in everybody]} tensors; return as many on each, at least one"
        shape = self.layout.shapes[0]
        chunk = self.layout.shard // max(1, math.prod(shape[1:]))
        owned = [self.layout.plan.owned(rank) for rank in range(self.layout.ranks)]
        total = math.prod(shape)
        rows = [(min(hi, total) - min(lo, total)) // max(1, math.prod(shape[1:])) for lo, hi in owned]
        for position, each in enumerate(zip(*everybody, strict=True)):
            if len({dtype for _, dtype in each}) > 1 or len({tuple(s[1:]) for s, _ in each}) > 1:
                return f"tensor {position} is {[*each]} on the ranks; only the first dimension may differ"
            if len(each[0][0]) == 0 or each[0][0][1:] != shape[1:]:
                continue
            found = [s[0] for s, _ in each]
            if found not in (rows, [chunk] * len(found)):
                return (
                    f"tensor {position} has {found} rows on the ranks for shards of {rows}; return as many as the "
                    f"shard has, or {chunk} on every rank (padded at the end)"
                )
        return ""

    def _check(self, inputs: tuple[Tensor, ...]) -> None:
        assert self._gathered is not None
        rank = self.layout.rank
        expected = [(gathered.shapes[rank], gathered.lease.tensor.dtype) for gathered in self._gathered]
        if [(t.shape, t.dtype) for t in inputs] != expected:
            raise RuntimeError(
                f"fsdp_pre_all_gather of {type(self.local).__name__}, parameter {self.parameters[0].name!r}, returned "
                f"{[(tuple(t.shape), t.dtype) for t in inputs]}, and {expected} at first; it must return the same "
                f"shapes and dtypes every time"
            )

    def finish_gather(self, pool: Pool, owner: str) -> None:
        """All parts have come: let the subclass make the unsharded parameter of them, or fill the one it made."""
        assert self._gathered is not None
        parameter = self.parameters[0]
        gathered = tuple(one.view for one in self._gathered)
        post = self.local.fsdp_post_all_gather  # type: ignore[attr-defined]  # the subclass has it
        dtype = self.mp_policy.param_dtype or self.dtype
        if not self.dtype.is_floating_point:
            dtype = self.dtype
        metadata, self._metadata = self._metadata, None
        if (full := parameter.full) is not None:
            for lease in self._inner:
                lease.acquire()
            # Autograd has saved it, or will; that it is filled again is no modification.
            with _unsafe_preserve_version_counter((full, *_plain(full))):
                post(gathered, metadata, dtype, out=full)
            return
        made, inner = post(gathered, metadata, dtype)
        pooled = {one.lease.tensor.untyped_storage()._cdata for one in self._gathered}
        for tensor in (plain for one in inner for plain in _plain(one)):
            storage = tensor.untyped_storage()
            if storage._cdata not in pooled and storage.nbytes():
                pooled.add(storage._cdata)
                self._inner.append(pool.adopt(storage, "parameters", owner))
        shape = torch.Size(self.layout.shapes[0])
        if made.shape != shape or not made.is_contiguous():
            # Padding rows lie at the end.
            made = torch.as_strided(made, shape, _strides(shape), 0)
        parameter.full = self._unsharded(0, made, parameter.sharded.requires_grad)

    def rehome(self) -> bool:
        """After ``module.to(...)``: the subclass has moved its own memory; ours is made anew when that differs."""
        name, local = self.parameters[0].name, self.local
        if not is_extended(name, local):
            raise RuntimeError(
                f"parameter {name!r} was given a local tensor of type {type(local).__name__}, without the "
                f"fsdp_pre_all_gather that it was sharded with"
            )
        kept = self.params.dtype == local.dtype and (
            self._gathered is None or self._gathered[0].lease.tensor.device == local.device
        )
        if kept:
            return False
        self.params = DBuffer.sharded(self.layout, local.dtype, torch.device("meta"))
        self._gathered, self._inner = None, []
        self.forget()
        return True


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return torch.empty(tuple(shape), device="meta").stride()


def _plain(tensor: Tensor) -> list[Tensor]:
    """The plain tensors inside of a subclass, as far as it says which they are."""
    if isinstance(tensor, DTensor):
        return _plain(tensor._local_tensor)
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return [tensor]
    return [plain for name in flatten()[0] for plain in _plain(getattr(tensor, name))]
