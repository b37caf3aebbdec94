"""Exact counts of one step: collectives, copies, allocations. They need no quiet machine and repeat to the byte.

``OperationCounter`` sits under autograd and above the kernels (a TorchDispatchMode), so it sees forward, backward, the
optimizer and what the sharding does in between, for DTensors too. ``record_allocations`` reads the CPU allocator's
events from the profiler, so it sees tensors that C++ allocates as well. Neither sees what gloo copies in C++
(README.md in this folder says what that is).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Allocations", "OperationCounter", "copies_beyond", "live_bytes", "record_allocations"]

# Kernels that only move values (and may cast them). Everything that torch generates as a copying twin of a view
# (``split_with_sizes_copy``, ``expand_copy``, ...) ends in ``_copy`` and need not be listed.
_COPIES = {"copy_", "clone", "cat", "stack", "_foreach_copy_", "constant_pad_nd", "_chunk_cat"}
_COPIES |= {"chunk_cat", "all_gather_copy_in"}  # torch.ops.fsdp
_NOT_COLLECTIVES = {"barrier", "monitored_barrier_", "wait_tensor", "_wrap_tensor_autograd"}

Copies = Counter[tuple[str, int]]  # (kernel with the shapes it writes, bytes it writes) -> how often


class OperationCounter(TorchDispatchMode):
    """Counts, while active, on this rank:

    ``operations``        every c10d operation by name, messages (``send``, ``recv_``) included
    ``collectives``       the same, but broadcasts of one buffer, one from each rank, are one all-gather, and a run of
                          sends and receives, at most one each way with each peer, is one exchange
    ``collective_bytes``  the larger of what goes in and what comes out of each operation: the full buffer of an
                          all-gather or reduce-scatter, the tensor of an all-reduce, what is sent point to point
                          (receiving adds nothing)
    ``copies``            every kernel that only moves values, by what it writes
    ``written_bytes``     bytes written by all kernels, copies included: a copy hidden in arithmetic shows here
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.collectives = 0
        self.collective_bytes = 0
        self.copies: Copies = Counter()
        self.written_bytes = 0
        self._run = _Run()

    @property
    def copied_bytes(self) -> int:
        return sum(nbytes * times for (_, nbytes), times in self.copies.items())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # A subclass such as DTensor first turns into operations on plain tensors; those are what is counted.
        if any(_has_dispatch(t) for t in types):
            return NotImplemented
        out = func(*args, **kwargs)
        name = func._schema.name.split("::")[1]
        if func.namespace in ("c10d", "_c10d_functional"):
            if name not in _NOT_COLLECTIVES:
                self._count_collective(name, args, (*args, *kwargs.values(), out))
            return out
        written = _written(func, name, args, kwargs, out)
        nbytes = sum(map(_nbytes, written))
        self.written_bytes += nbytes
        if nbytes and is_copy(name):
            shapes = ", ".join(str(tuple(t.shape)) for t in written)
            self.copies[f"{name} {shapes}", nbytes] += 1
        return out

    def _count_collective(self, name: str, args: tuple[Any, ...], operands: Sequence[Any]) -> None:
        self.operations[name] += 1
        if not name.startswith("recv"):
            sizes = [sum(map(_nbytes, _tensors(operand))) for operand in operands]
            # Two ranks that exchange the halves of one buffer gather it.
            self.collective_bytes += sum(sizes[:2]) if _in_place(name, args) else max(sizes)
        self.collectives += self._run.starts_anew(name, args)


@dataclass
class _Run:
    """The run of broadcasts or messages that the last operation belongs to."""

    kind: tuple[Any, ...] | None = None
    seen: set[Any] = field(default_factory=set)

    def starts_anew(self, name: str, args: tuple[Any, ...]) -> bool:
        """Whether this operation begins a new collective; keeps what the next call needs to tell."""
        if name == "broadcast_":
            tensors, group, root = args[:3]
            kind: tuple[Any, ...] | None = (name, _group_name(group), tensors[0].untyped_storage().data_ptr())
            member: Any = root
        elif name in ("send", "recv_"):
            kind, member = ("messages", _group_name(args[1])), (name, args[2])
        else:
            kind, member = None, None
        if kind is None or kind != self.kind or member in self.seen:
            self.kind, self.seen = kind, {member}
            return True
        self.seen.add(member)
        return False


def _in_place(name: str, args: tuple[Any, ...]) -> bool:
    """Whether an all-to-all receives into the buffer that it sends from."""
    return name.startswith("alltoall") and len({t.untyped_storage()._cdata for t in _tensors(args[:2])}) == 1


def is_copy(name: str) -> bool:
    """Whether the kernel ``name`` (without namespace and overload) only moves values."""
    return name in _COPIES or name.endswith("_copy")


def copies_beyond(copies: Copies, local: Copies) -> int:
    """Bytes of the copies that a step without communication does not make, kernel by kernel and shape by shape.

    Subtracting only like from like: a copy that the model itself makes and that a variant saves (autograd's ``stack``
    of expert gradients) must not pay for one on the communication path.
    """
    return sum(nbytes * times for (_, nbytes), times in (copies - local).items())


def live_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind ``tensors``; of a DTensor or another wrapper, those of what it wraps."""
    storages: dict[int, int] = {}
    for tensor in tensors:
        for plain in _unwrap(tensor):
            storage = plain.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


@dataclass(frozen=True)
class Allocations:
    """What the CPU allocator handed out during a call.

    ``nbytes``, ``times``           all of it
    ``buffers``, ``buffer_bytes``   those of these blocks that were given to a collective while they were held
    ``high_water``                  most that was held at one time beyond what was held before. An upper bound: what a
                                    thread of gloo frees counts as held until its place is handed out again
    """

    nbytes: int
    times: int
    buffers: int
    buffer_bytes: int
    high_water: int


Event = tuple[Literal["block", "collective"], int, int]  # what, address, bytes (negative: freed)


def record_allocations(call: Callable[[], object]) -> Allocations:
    """Run ``call`` and replay the allocator's events, of this thread and of what gloo's threads allocate for it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True) as profiler:
        call()
    results = profiler.profiler.kineto_results
    return replay(_events(results.experimental_event_tree()))


def replay(events: Iterable[Event]) -> Allocations:
    """What a sequence of events comes to. A block handed out twice was freed unseen in between."""
    held: dict[int, tuple[int, int]] = {}  # address -> (bytes, which allocation)
    buffers: dict[int, int] = {}  # which allocation -> bytes
    total = times = level = high = 0
    for what, address, nbytes in events:
        if what == "collective":
            if address in held:
                size, which = held[address]
                buffers[which] = size
        elif nbytes > 0:
            level += nbytes - held.get(address, (0, 0))[0]
            held[address] = (nbytes, times)
            total += nbytes
            times += 1
            high = max(high, level)
        else:
            level -= held.pop(address, (0, 0))[0]
    return Allocations(total, times, len(buffers), sum(buffers.values()), high)


def _events(tree: Any) -> list[Event]:
    found: list[tuple[int, Event]] = []
    stack = list(tree)
    while stack:
        node = stack.pop()
        stack.extend(node.children)
        if node.tag == torch._C._profiler._EventType.Allocation:
            fields = node.extra_fields
            found.append((node.start_time_ns, ("block", fields.ptr, fields.alloc_size)))
        elif node.name.startswith("c10d::"):
            for address in _storage_addresses(node.extra_fields.inputs):
                found.append((node.start_time_ns, ("collective", address, 0)))
    return [event for _, event in sorted(found, key=lambda item: item[0])]


def _storage_addresses(value: Any) -> Iterator[int]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _storage_addresses(item)
    elif getattr(value, "storage_data_ptr", None):
        yield value.storage_data_ptr


def _has_dispatch(cls: type) -> bool:
    method = getattr(cls, "__torch_dispatch__", None)
    return method is not None and method not in (Tensor.__torch_dispatch__, torch._C._disabled_torch_dispatch_impl)


def _written(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Tensor]:
    """The tensors that the kernel wrote: its mutated arguments, or else those of its results that are no views."""
    if name == "all_gather_copy_in":  # writes its inputs into a slot of the output; its schema names no mutation
        return list(_tensors(args[0]))
    if name in ("resize_", "set_"):
        return []
    written: list[Tensor] = []
    aliased: set[int] = set()
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        tensors = list(_tensors(value))
        aliased.update(t.untyped_storage().data_ptr() for t in tensors)
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.extend(tensors)
    if written or name.startswith(("empty", "new_empty")):
        return written
    return [t for t in _tensors(out) if t.untyped_storage().data_ptr() not in aliased]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _nbytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * tensor.element_size()


def _unwrap(tensor: Tensor) -> Iterator[Tensor]:
    if isinstance(tensor, DTensor):
        yield from _unwrap(tensor._local_tensor)
    elif hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        for part in (getattr(tensor, name) for name in names):
            if isinstance(part, Tensor):
                yield from _unwrap(part)
    else:
        yield tensor


def _group_name(group: Any) -> str:
    return str(dist.ProcessGroup.unbox(group).group_name)
