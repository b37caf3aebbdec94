"""Memory that is swapped under fixed views, and its ledger.

A tensor's views are made once; between uses its storage holds no memory at all::

    lease = pool.lease(numel, dtype)    a StorageImpl with memory; make the views of lease.tensor now
    lease.release()                     the block moves to the free list; the views stay valid objects
    lease.acquire()                     a block moves in, from the free list or newly allocated
    ... compute, autograd saves views ...

Swapping (``UntypedStorage._swap_data_ptr_``) costs 0.1 us, allocates nothing and bumps no version counter, so views
that autograd has saved are right again after the next ``acquire``. The pool grows only when a schedule holds more
leases at once than ever before; ``Ledger.grown`` counts that.

A lease may also leave its memory to tensors that outlive it (``lend``, on CPU): the block comes back when nobody refers
to them any more.

Reading a view while its lease is released is an error of the caller that torch does not always catch: whoever owns a
lease must not hand out its views then.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["Event", "Lease", "Ledger", "Pool"]

# Blocks are multiples of this, so that buckets of nearly equal size share one.
_GRANULARITY = 512


@dataclass
class Ledger:
    """What a pool holds and did, in bytes of memory blocks (rounded up to 512) and counts since the pool was made."""

    held: int = 0
    in_use: int = 0
    peak_in_use: int = 0
    grown: int = 0
    acquired: int = 0
    by_label: dict[str, int] = field(default_factory=lambda: defaultdict(int))


@dataclass(frozen=True)
class Event:
    """Something that happened to a lease, or was noted by who uses it. ``seconds``: of ``time.perf_counter``."""

    action: str
    label: str
    owner: str
    nbytes: int
    seconds: float


class _Block:
    """A piece of memory without an owner: a storage, and (CUDA) the event after which it may be written."""

    __slots__ = ("event", "storage")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage
        self.event: torch.Event | None = None


class Lease:
    """A flat tensor of fixed identity whose memory comes and goes. Not usable while released."""

    __slots__ = ("_block", "_pool", "_storage", "held", "label", "nbytes", "owner", "tensor")

    def __init__(self, pool: Pool, numel: int, dtype: torch.dtype, label: str, owner: str) -> None:
        self._pool = pool
        self.nbytes = _round_up(numel * dtype.itemsize)
        self.label = label
        self.owner = owner
        self._storage = torch.UntypedStorage(0, device=pool.device)
        self._block: _Block | None = None
        # Views can be made only while there is memory, so a lease is born held.
        self.held = False
        self.acquire()
        empty = torch.empty(0, dtype=dtype, device=pool.device)
        self.tensor: Tensor = empty.set_(self._storage, 0, (numel,))  # type: ignore[call-overload]

    @classmethod
    def over(cls, pool: Pool, storage: torch.UntypedStorage, label: str, owner: str) -> Lease:
        """A lease whose memory is that of ``storage``, under the tensors that lie in it."""
        lease = object.__new__(cls)
        lease._pool, lease._storage, lease.nbytes = pool, storage, storage.nbytes()
        lease.label, lease.owner, lease.held = label, owner, True
        lease._block = _Block(torch.UntypedStorage(0, device=pool.device))
        empty = torch.empty(0, dtype=torch.uint8, device=pool.device)
        lease.tensor = empty.set_(storage, 0, (lease.nbytes,))  # type: ignore[call-overload]
        return lease

    def acquire(self) -> bool:
        """Put memory under the views (undefined contents); ``False`` when it is there already."""
        if self.held:
            return False
        self._pool._acquire(self)
        self.held = True
        return True

    def release(self) -> None:
        """Give the memory back; on CUDA it is reused only after the work that the current stream has been given."""
        if self.held:
            self._pool._release(self)
            self.held = False

    def lend(self) -> torch.UntypedStorage:
        """Leave the memory to the storage that is returned, and hold none. Only where ``Pool.lends``."""
        assert self.held
        self.held = False
        return self._pool._lend(self)


class Pool:
    """Blocks of memory of one device, reused by size."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.ledger = Ledger()
        # What makes a block of so many bytes, if not torch's allocator for the device.
        self.allocator: Callable[[int], torch.UntypedStorage] | None = None
        # A list to be filled with what happens, or None: nothing is recorded.
        self.timeline: list[Event] | None = None
        # On accelerators, who uses a block last would have to leave an event.
        self.lends = device.type in ("cpu", "meta")
        self._free: dict[int, list[_Block]] = defaultdict(list)
        # Bytes of the block that only a reduction has asked for.
        self._scratch = 0
        self._lent: dict[int, list[_Block]] = defaultdict(list)

    def note(self, action: str, label: str, owner: str, nbytes: int) -> None:
        """Put an event on the timeline, if one is kept."""
        if self.timeline is not None:
            self.timeline.append(Event(action, label, owner, nbytes, time.perf_counter()))

    def lease(self, numel: int, dtype: torch.dtype, label: str = "", owner: str = "") -> Lease:
        """A flat tensor of ``numel`` elements, holding memory (undefined contents)."""
        return Lease(self, numel, dtype, label, owner)

    def scratch(self, nbytes: int, owner: str = "") -> Lease:
        """Bytes, held, for a reduction in flight: the smallest free block that has so many, or a new one."""
        free = [size for size, blocks in self._free.items() if blocks and size >= nbytes]
        if not free:
            if self._scratch and self._free[self._scratch]:
                self._free[self._scratch].pop()
                self.ledger.held -= self._scratch
            self._scratch = _round_up(nbytes)
        return Lease(self, min(free, default=nbytes), torch.uint8, "scratch", owner)

    def adopt(self, storage: torch.UntypedStorage, label: str = "", owner: str = "") -> Lease:
        """A lease, held, over memory that somebody else has allocated: from now on it comes and goes as any other's."""
        lease = Lease.over(self, storage, label, owner)
        self.ledger.held += lease.nbytes
        self.ledger.grown += 1
        self._count(lease)
        return lease

    def trim(self) -> None:
        """Free every block that is not in use."""
        for nbytes in list(self._lent):
            self._collect(nbytes)
        for nbytes, blocks in self._free.items():
            self.ledger.held -= nbytes * len(blocks)
        self._free.clear()

    def _count(self, lease: Lease) -> None:
        ledger = self.ledger
        ledger.acquired += 1
        ledger.in_use += lease.nbytes
        ledger.by_label[lease.label] += lease.nbytes
        ledger.peak_in_use = max(ledger.peak_in_use, ledger.in_use)
        self.note("acquire", lease.label, lease.owner, lease.nbytes)

    def _acquire(self, lease: Lease) -> None:
        ledger = self.ledger
        self._count(lease)
        free = self._free[lease.nbytes]
        if not free:
            self._collect(lease.nbytes)
        if free:
            block = free.pop()
            if block.event is not None:
                torch.accelerator.current_stream(self.device).wait_event(block.event)
        else:
            make = self.allocator
            block = _Block(
                torch.UntypedStorage(lease.nbytes, device=self.device) if make is None else make(lease.nbytes)
            )
            ledger.held += lease.nbytes
            ledger.grown += 1
        _swap(lease._storage, block.storage)
        lease._block = block

    def _lend(self, lease: Lease) -> torch.UntypedStorage:
        assert self.lends
        self._release(lease)
        block = self._free[lease.nbytes].pop()
        self._lent[lease.nbytes].append(block)
        return block.storage

    def _collect(self, nbytes: int) -> None:
        """Take back the blocks that nobody else refers to: neither a tensor nor somebody's name for the storage."""
        lent = self._lent[nbytes]
        if not lent:
            return
        kept = [b for b in lent if torch._C._storage_Use_Count(b.storage._cdata) > 1 or sys.getrefcount(b.storage) > 2]
        self._free[nbytes] += [block for block in lent if block not in kept]
        self._lent[nbytes] = kept

    @property
    def lent(self) -> int:
        """Bytes of blocks that tensors of others lie in; they are a part of ``ledger.held``."""
        for nbytes in list(self._lent):
            self._collect(nbytes)
        return sum(nbytes * len(blocks) for nbytes, blocks in self._lent.items())

    def _release(self, lease: Lease) -> None:
        self.ledger.in_use -= lease.nbytes
        self.ledger.by_label[lease.label] -= lease.nbytes
        self.note("release", lease.label, lease.owner, lease.nbytes)
        block, lease._block = lease._block, None
        assert block is not None
        _swap(lease._storage, block.storage)
        if self.device.type not in ("cpu", "meta"):
            block.event = torch.accelerator.current_stream(self.device).record_event(block.event)
        self._free[lease.nbytes].append(block)


def _swap(one: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    one._swap_data_ptr_(other)  # type: ignore[attr-defined]  # not in the stubs of every version


def _round_up(nbytes: int) -> int:
    return max(_GRANULARITY, -(-nbytes // _GRANULARITY) * _GRANULARITY)


def storage_bytes(tensors: list[Tensor]) -> int:
    """Bytes of the distinct storages behind ``tensors``."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())
