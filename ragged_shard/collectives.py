"""The few collectives we use, each chosen per backend.

In place on a flat buffer of one chunk per rank (what the FSDP runtime moves)::

    full = [ chunk 0 | chunk 1 | ... | chunk m-1 ]        rank k owns chunk k

    all_gather_in_place       before: chunk k is right on rank k      after: every chunk is right on every rank
    reduce_scatter_in_place   before: every rank holds its addends    after: chunk k is summed, on rank k, in ``out``

gloo's ``all_gather_into_tensor`` and ``reduce_scatter_tensor`` stage one more full buffer and take 2.5-4 times as long
as in-place broadcasts and an all-to-all + sum, so those are what runs on gloo (two ranks exchange their chunks in
place); NCCL's own are in place already.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

__all__ = [
    "Pending",
    "all_gather_in_place",
    "all_gather_v",
    "all_reduce_small",
    "all_to_all_v",
    "all_to_all_v_into",
    "coalesced",
    "exchange",
    "reduce_scatter_in_place",
    "reduce_scatter_scratch_numel",
]


class Pending:
    """Collectives in flight and what is left to do when they have arrived. ``wait()`` may be called again."""

    __slots__ = ("_finish", "_works")

    def __init__(self, works: Sequence[Any], finish: Callable[[], object] | None = None) -> None:
        self._works = [work for work in works if work is not None]
        self._finish = finish

    def wait(self) -> None:
        works, self._works = self._works, []
        for work in works:
            work.wait()
        self.finish()

    def finish(self) -> None:
        """What is left to do, when somebody else has waited for the collectives."""
        self._works = []
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


@contextmanager
def coalesced(
    group: dist.ProcessGroup, sample: Tensor, count: int
) -> Iterator[Callable[[list[Pending]], list[Pending]]]:
    """Issue ``count`` collectives of one kind as one: on NCCL a single grouped launch, on gloo nothing is gained.

    Pass the Pendings that were made inside to the function this yields, and wait for what it returns.
    """
    if count < 2 or group.size() == 1 or is_gloo(group, sample):
        yield lambda parts: parts
        return
    with c10d._coalescing_manager(group=group, async_ops=True) as manager:
        yield lambda parts: [Pending([manager], lambda: _finish_all(parts))]


def _finish_all(parts: Sequence[Pending]) -> None:
    for part in parts:
        part.finish()


def is_gloo(group: dist.ProcessGroup, tensor: Tensor) -> bool:
    """Whether ``tensor`` travels over gloo in ``group`` (a group may hold a backend per device type)."""
    backend = group._get_backend(tensor.device)
    return bool(backend.name() == "gloo")


def _by_message(group: dist.ProcessGroup, tensor: Tensor) -> bool:
    """gloo's messages carry memory of the CPU only."""
    return tensor.device.type == "cpu" and is_gloo(group, tensor)


def all_gather_in_place(full: Tensor, group: dist.ProcessGroup) -> Pending:
    """Gather the equal chunks of the 1-D buffer ``full``; rank k's chunk k is its input. No buffer is allocated."""
    size, rank = group.size(), group.rank()
    if size == 1 or full.numel() == 0:
        return Pending(())
    full = on_wire(full)
    chunks = full.chunk(size)
    own = chunks[rank]
    if is_gloo(group, full):
        if size == 2:
            # One operation instead of two, a fifth less CPU time. Nobody sends to or gets from himself.
            splits = [0, own.numel()] if rank == 0 else [own.numel(), 0]
            return Pending([dist.all_to_all_single(chunks[1 - rank], own, splits, splits, group=group, async_op=True)])
        return Pending(
            [dist.broadcast(chunk, group=group, group_src=source, async_op=True) for source, chunk in enumerate(chunks)]
        )
    return Pending([dist.all_gather_into_tensor(full, own, group=group, async_op=True)])


def reduce_scatter_scratch_numel(full: Tensor, group: dist.ProcessGroup) -> int:
    """Elements of scratch memory that ``reduce_scatter_in_place`` needs for ``full``: what is received, on gloo."""
    size = group.size()
    if size == 1 or not is_gloo(group, full):
        return 0
    return full.numel() // size * (size - 1)


def reduce_scatter_in_place(
    full: Tensor,
    out: Tensor,
    group: dist.ProcessGroup,
    *,
    scratch: Tensor | None = None,
    divide_by: float = 1.0,
    accumulate: bool = False,
) -> Pending:
    """Sum chunk k of ``full`` over the ranks, divide it, and write it to (or add it to) ``out`` on rank k.

    ``full``: 1-D of ``size * n`` elements; its own chunk may be overwritten. ``out``: 1-D of n, of any floating dtype;
    it may be the own chunk of ``full``. ``scratch``: on gloo, 1-D of ``reduce_scatter_scratch_numel`` elements of
    ``full``'s dtype, allocated when missing; it must stay untouched until ``wait()`` returns. The addends are summed
    in rank order, in ``out``'s precision where that is the higher one, so the result does not depend on who is asked.
    """
    size, rank = group.size(), group.rank()
    own = full.chunk(size)[rank] if full.numel() else full

    if size == 1 or full.numel() == 0:
        return Pending((), lambda: _combine([own], out, divide_by, accumulate))
    if is_gloo(group, full):
        return _reduce_by_exchange(full, own, out, group, scratch, divide_by, accumulate)
    work = dist.reduce_scatter_tensor(own, full, group=group, async_op=True)
    return Pending([work], lambda: _combine([own], out, divide_by, accumulate))


def _reduce_by_exchange(
    full: Tensor,
    own: Tensor,
    out: Tensor,
    group: dist.ProcessGroup,
    scratch: Tensor | None,
    divide_by: float,
    accumulate: bool,
) -> Pending:
    """``reduce_scatter_in_place`` on gloo: an all-to-all of the others' chunks into ``scratch``, and a sum.

    An all-to-all sends consecutive memory, so the chunks before and after a rank's own are two (of two ranks, each has
    one). Messages would be asked for and sent at different times by different ranks, which costs gloo a tenth of a
    step's CPU time; so would pieces.
    """
    size, rank, n = group.size(), group.rank(), own.numel()
    received = full.new_empty(n * (size - 1)) if scratch is None else scratch
    # How much each rank below, or above, this one sends and gets.
    below, above = [n] * rank + [0] * (size - rank), [0] * (rank + 1) + [n] * (size - rank - 1)
    if size == 2:
        parts = [(received, full[n:], above, above) if rank == 0 else (received, full[:n], below, below)]
    else:
        parts = [
            (received[rank * n :], full[: rank * n], above, below),
            (received[: rank * n], full[(rank + 1) * n :], below, above),
        ]
    works = [
        dist.all_to_all_single(place, sent, come, go, group=group, async_op=True) for place, sent, come, go in parts
    ]
    addends = list(received.chunk(size - 1))
    addends.insert(rank, own)
    return Pending(works, lambda: _combine(addends, out, divide_by, accumulate))


# Elements of the working memory where the sum cannot be made in its place.
_CHUNK = 1 << 16


def _combine(addends: Sequence[Tensor], out: Tensor, divide_by: float, accumulate: bool) -> None:
    """``out = sum(addends) / divide_by`` (or ``+=``), summed in rank order, in fp32 at least.

    ``out`` may be one of the addends; nothing else is written.
    """
    source = addends[0].dtype
    wide = torch.promote_types(out.dtype, source)
    wide = torch.float32 if wide in (torch.bfloat16, torch.float16) else wide
    numel = out.numel()
    # `out` itself holds the running sum, unless it is narrower, is added to, or is an addend still to come.
    overwritten = any(addend.data_ptr() == out.data_ptr() for addend in addends[2:])
    in_out = not accumulate and out.dtype == wide == source and not overwritten
    if in_out and len(addends) > 1 and divide_by != 1.0 and math.frexp(divide_by)[0] == 0.5:
        _scaled_sum(addends, out, 1.0 / divide_by)
        return
    step = numel if in_out or out.device.type != "cpu" else min(numel, _CHUNK)
    work = None if in_out else torch.empty(step, dtype=wide, device=out.device)
    for start in range(0, numel, max(1, step)):
        stop = min(start + step, numel)
        place = out[start:stop]
        total = place if work is None else work[: stop - start]
        first, *others = (addend[start:stop] for addend in addends)
        if source == wide and others:
            torch.add(first, others.pop(0), out=total)
        elif first.data_ptr() != total.data_ptr():
            total.copy_(first)
        for other in others:
            total.add_(other)
        if accumulate:
            place.add_(total, alpha=1.0 / divide_by)
            continue
        if work is not None and place.dtype == wide:
            torch.mul(total, 1.0 / divide_by, out=place)
            continue
        if divide_by != 1.0:
            total.mul_(1.0 / divide_by)
        if work is not None:
            place.copy_(total)


def _scaled_sum(addends: Sequence[Tensor], out: Tensor, scale: float) -> None:
    """``out = sum(addends) * scale`` for a power of two, which scales both terms of the last sum without rounding: the
    sum and the scaling are one pass.
    """
    *addends, last = addends
    total = addends[0]
    for addend in addends[1:]:
        total = torch.add(total, addend, out=out)
    if last.data_ptr() == out.data_ptr():
        total, last = last, total
    one = torch.ones(1, dtype=out.dtype, device=out.device)
    torch.addr(total.unsqueeze(0), one, last, beta=scale, alpha=scale, out=out.unsqueeze(0))


# ---- pieces of unequal length: what redistribution moves ----


def on_wire(tensor: Tensor) -> Tensor:
    """The contiguous 1-D ``tensor`` in a dtype that every backend carries: bytes for those that gloo does not know."""
    return tensor if tensor.dtype in _CARRIED else tensor.view(torch.uint8)


_CARRIED = {torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.uint8}


def exchange(
    sends: Sequence[tuple[int, Tensor]],
    receives: Sequence[tuple[int, Tensor]],
    group: dist.ProcessGroup,
    *,
    tag: int = 0,
) -> Pending:
    """Send each ``(group rank, tensor)`` and fill each one to receive: an all-to-all-v in which empty messages do not
    exist.

    Tensors are 1-D, contiguous and not empty; what one rank sends to a peer arrives there in the same order. On gloo,
    messages of different ``tag`` do not wait for each other.
    """
    if not sends and not receives:
        return Pending(())
    if is_gloo(group, (sends or receives)[0][1]):
        works = [dist.irecv(on_wire(place), group=group, group_src=peer, tag=tag) for peer, place in receives]
        works += [dist.isend(on_wire(piece), group=group, group_dst=peer, tag=tag) for peer, piece in sends]
        return Pending(works)
    operations = [dist.P2POp(dist.irecv, on_wire(place), group=group, group_peer=peer) for peer, place in receives]
    operations += [dist.P2POp(dist.isend, on_wire(piece), group=group, group_peer=peer) for peer, piece in sends]
    return Pending(dist.batch_isend_irecv(operations))


def all_gather_v(pieces: Sequence[Tensor], group: dist.ProcessGroup) -> Pending:
    """Fill ``pieces[k]`` (1-D, contiguous, any length) on every rank with what rank k holds there. Nothing is copied.

    gloo refuses an all-gather of unequal lengths; a broadcast per piece moves the same bytes and needs no buffer.
    """
    if group.size() == 1:
        return Pending(())
    if is_gloo(group, pieces[0]):
        return Pending(
            [
                dist.broadcast(on_wire(piece), group=group, group_src=source, async_op=True)
                for source, piece in enumerate(pieces)
                if piece.numel()
            ]
        )
    wired = [on_wire(piece) for piece in pieces]
    return Pending([dist.all_gather(wired, wired[group.rank()], group=group, async_op=True)])


# Ranks up to which each can send to every other: gloo's ring has 4 (size - 1) messages a rank, one after the other.
_MESH_SIZE = 8
# No message of a user's own has it.
_SMALL_TAG = 0x5A6D


def all_reduce_small(
    tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup, room: Tensor | None = None
) -> None:
    """``MIN`` or ``MAX`` of some bytes over the ranks, in place: ``tensor`` is 1-D and contiguous. ``room``: a row for
    what each rank sends, new memory without it.

    On gloo, with few ranks, everybody sends to everybody: a third to a fifth of the CPU time of its all-reduce.
    """
    size, rank = group.size(), group.rank()
    if size == 1 or tensor.numel() == 0:
        return
    if size > _MESH_SIZE or not _by_message(group, tensor):
        dist.all_reduce(tensor, op, group=group)
        return
    of = tensor.new_empty(size, tensor.numel()) if room is None else room[:size]
    of[rank] = tensor
    peers = [(rank + step) % size for step in range(1, size)]
    exchange([(peer, tensor) for peer in peers], [(peer, of[peer]) for peer in peers], group, tag=_SMALL_TAG).wait()
    (torch.amin if op == dist.ReduceOp.MIN else torch.amax)(of, 0, out=tensor)


def all_to_all_v_into(
    out: Tensor, flat: Tensor, received: Sequence[int], sent: Sequence[int], group: dist.ProcessGroup
) -> Pending:
    """Rank k gets ``sent[k]`` elements of the 1-D ``flat``, in order; ``out`` (1-D) takes ``received[k]`` from rank k.

    Every rank of the group must call it, whatever it has to send. On gloo this does not depend on who comes first; a
    message of its own to a rank that has not asked for it yet costs it milliseconds.
    """
    wired, place = on_wire(flat), on_wire(out)
    scale = flat.element_size() // wired.element_size()
    splits = ([n * scale for n in received], [n * scale for n in sent])
    return Pending([dist.all_to_all_single(place, wired, *splits, group=group, async_op=True)])


def all_to_all_v(flat: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """The functional form, for torch.compile: returns the ``sum(received)`` elements that arrived, by source rank.

    Plain ``torch.distributed`` calls traced by AOTAutograd give wrong values without an error; only functional
    collectives may appear in a graph.
    """
    wired = on_wire(flat)
    scale = flat.element_size() // wired.element_size()
    result = funcol.all_to_all_single(wired, [n * scale for n in received], [n * scale for n in sent], group)
    if isinstance(result, funcol.AsyncCollectiveTensor):
        result = result.wait()
    return result.view(flat.dtype)
