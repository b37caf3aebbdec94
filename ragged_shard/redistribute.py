"""RaggedShard <-> Replicate / Shard(d) / Partial / RaggedShard on any mesh, moving as few bytes as possible.

Every rank knows the region of every rank before and after (``placement.region_of``), so nothing is negotiated: rank s
receives from rank r the overlap of *s after* and *r before*, and nothing that it already holds. ::

    before   |  rank 0  |    rank 1    |r2|      rank 3      |     RaggedShard, Shard, ...
    after    |     rank 0     |  rank 1  |   rank 2   | rank 3 |
    moves                 1>0          2>1 3>1   3>2

* Replicate before: every rank takes what it needs from its own copy; no byte moves.
* Replicate after: an all-gather of unequal pieces, broadcast straight into the result.
* Partial before, cut after: rank s receives the addends of its own piece only (a reduce-scatter), and sums them
  in rank order. Partial before, Replicate after: an all-reduce, before or after the exchange, whichever is smaller.
* Both mesh dims may change at once, and the ragged dim may move: it is still one exchange of overlaps.

Overlaps are flat ranges wherever the cuts are contiguous, sent and received without packing; a Shard(d > 0) makes them
rectangles. Under torch.compile the same plan runs on the functional all-to-all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from ragged_shard.collectives import Pending, all_gather_v, all_to_all_v, all_to_all_v_into, exchange, is_gloo
from ragged_shard.placement import Box, RaggedShard, Region, Shape, check_placements, region_of

__all__ = [
    "bytes_received",
    "check_route",
    "distribute",
    "piece_of",
    "plan_exchange",
    "redistribute_local",
    "write_piece",
]

Placements = tuple[Placement, ...]


# ---- the plan: integers only, the same function of the same arguments on every rank ----


@dataclass(frozen=True)
class Piece:
    """Part of a flattened local tensor: the rectangle ``offsets``, ``sizes`` of the box of ``box`` sizes that begins at
    ``start``.

    A 1-D box is a flat range.
    """

    start: int
    box: Shape
    offsets: Shape
    sizes: Shape

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def of(self, flat: Tensor) -> Tensor:
        """The piece as a view of the 1-D ``flat``; 1-D itself where it is contiguous."""
        if len(self.box) == 1:
            begin = self.start + self.offsets[0]
            return flat[begin : begin + self.sizes[0]]
        view = flat[self.start : self.start + math.prod(self.box)].view(self.box)
        for dim, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            if size != self.box[dim]:
                view = view.narrow(dim, offset, size)
        return view


Pieces = tuple[Piece, ...]


@dataclass(frozen=True)
class ExchangePlan:
    """What one rank sends, keeps and receives. Peers are mesh coordinates; ``addend`` numbers the values to be
    reduced."""

    across: int | None
    """The one mesh dim that the exchange stays on, or ``None`` for the whole mesh."""
    sends: tuple[tuple[Shape, Pieces], ...]
    keeps: tuple[tuple[Pieces, Pieces], ...]
    """``(pieces of the tensor before, pieces of the tensor after)``: the own overlap, for the own addend."""
    receives: tuple[tuple[Shape, int, Pieces], ...]
    own_addend: int
    addends: int
    local_shape: Shape
    idle: bool
    """No rank has anything to send: each takes its piece from its own copy."""
    star: int
    """Elements that each other rank exchanges on average with the one that receives, or has, all that moves; 0 when
    several do."""
    gather: tuple[tuple[int, int], ...] | None
    """When all ranks of ``across`` end with the same flat range: the range of the result that each one has now."""

    @property
    def numel(self) -> int:
        return math.prod(self.local_shape)


@lru_cache(maxsize=8192)
def plan_exchange(shape: Shape, mesh_shape: Shape, here: Shape, before: Placements, after: Placements) -> ExchangePlan:
    """The exchange that takes the rank at coordinate ``here`` from ``before`` to ``after``; both specs are valid.

    A mesh dim that is Partial in both keeps its addends apart; one that is Partial only before is reduced.
    """
    reduced = [i for i, (p, q) in enumerate(zip(before, after, strict=True)) if p.is_partial() and not q.is_partial()]
    # From a dim where every coordinate has the value (or its own addend of it), a rank takes it from itself.
    pinned = [
        i
        for i, (p, q) in enumerate(zip(before, after, strict=True))
        if p.is_replicate() or (p.is_partial() and q.is_partial())
    ]
    across = _single_dim(before, after)
    ranges = [range(size) if across in (None, i) else (here[i],) for i, size in enumerate(mesh_shape)]
    ranks = list(itertools.product(*ranges))
    sources = {rank: region_of(shape, mesh_shape, rank, before) for rank in ranks}
    targets = {rank: region_of(shape, mesh_shape, rank, after) for rank in ranks}
    hull = _hull([*sources.values(), *targets.values()], len(shape))
    flat = hull is not None and all(_span(r, hull) is not None for r in [*sources.values(), *targets.values()])

    def overlap(source: Region, target: Region) -> tuple[Pieces, Pieces]:
        if flat:
            return _flat_overlap(source, target, cast(tuple[Shape, Shape], hull))
        return _box_overlap(source, target)

    def addend_of(rank: Shape) -> int:
        number = 0
        for i in reduced:
            number = number * mesh_shape[i] + rank[i]
        return number

    sends, keeps, receives = [], [], []
    for rank in ranks:
        # All that this rank sends to ``rank``, then all that it receives from it.
        if all(rank[i] == here[i] for i in pinned):
            mine, theirs = overlap(sources[here], targets[rank])
            if mine and rank == here:
                keeps.append((mine, theirs))
            elif mine:
                sends.append((rank, mine))
            theirs, mine = overlap(sources[rank], targets[here])
            if mine and rank != here:
                receives.append((rank, addend_of(rank), mine))
    gather = None
    goals = {targets[rank] for rank in ranks}
    if across is not None and flat and not reduced and len(goals) == 1 and across not in pinned:
        first = cast(tuple[int, int], _span(targets[here], cast(tuple[Shape, Shape], hull)))[0]
        spans = [cast(tuple[int, int], _span(sources[rank], cast(tuple[Shape, Shape], hull))) for rank in ranks]
        gather = tuple((start - first, stop - first) for start, stop in spans)
    return ExchangePlan(
        across,
        tuple(sends),
        tuple(keeps),
        tuple(receives),
        addend_of(here),
        math.prod(mesh_shape[i] for i in reduced),
        targets[here].local_shape,
        all(i in pinned or mesh_shape[i] == 1 for i in ([across] if across is not None else range(len(mesh_shape)))),
        max(_of_one(sources), _of_one(targets)),
        gather,
    )


def _of_one(regions: dict[Shape, Region]) -> int:
    held = [region.numel for region in regions.values() if region.numel]
    return held[0] // len(regions) if len(held) == 1 else 0


def _single_dim(before: Placements, after: Placements) -> int | None:
    """The mesh dim that all movement stays on, or ``None`` when it may cross dims.

    One dim changes, no RaggedShard rests on another one (its pieces would be cut from another tensor), and no Shard
    further right cuts the same tensor dim again.
    """
    changed = [i for i, (p, q) in enumerate(zip(before, after, strict=True)) if p != q]
    if len(changed) != 1:
        return None
    (dim,) = changed
    for i, placement in enumerate(before):
        if i == dim:
            continue
        if isinstance(placement, RaggedShard) and not (before[dim].is_partial() and after[dim].is_replicate()):
            return None
        cut = [p.dim for p in (before[dim], after[dim]) if isinstance(p, Shard)]
        if i > dim and isinstance(placement, Shard) and placement.dim in cut:
            return None
    return dim


def _hull(regions: Sequence[Region], ndim: int) -> tuple[Shape, Shape] | None:
    """Offsets and sizes of the smallest box that holds every region; ``None`` when all are empty."""
    boxes = [(r.offsets, r.sizes) for r in regions if r.numel]
    if not boxes:
        return None
    low = tuple(min(offsets[d] for offsets, _ in boxes) for d in range(ndim))
    high = (max(offsets[d] + sizes[d] for offsets, sizes in boxes) for d in range(ndim))
    return low, tuple(stop - start for start, stop in zip(low, high, strict=True))


def _span(region: Region, hull: tuple[Shape, Shape]) -> tuple[int, int] | None:
    """The region as a flat range of the box ``hull``, ``None`` when it is not contiguous there."""
    if not region.numel:
        return 0, 0
    offsets = tuple(o - h for o, h in zip(region.offsets, hull[0], strict=True))
    start = _contiguous_start(offsets, region.sizes, hull[1])
    return None if start is None else (start + region.start, start + region.stop)


def _contiguous_start(offsets: Shape, sizes: Shape, outer: Shape) -> int | None:
    """Where the rectangle begins in the flattened box of ``outer`` sizes, ``None`` unless it is a flat range there."""
    leading = 0
    while leading < len(sizes) and sizes[leading] == 1:
        leading += 1
    if sizes[leading + 1 :] != outer[leading + 1 :]:
        return None
    start = 0
    for offset, size in zip(offsets, outer, strict=True):
        start = start * size + offset
    return start


def _flat_piece(start: int, stop: int) -> Piece:
    return Piece(start, (stop - start,), (0,), (stop - start,))


def _flat_overlap(source: Region, target: Region, hull: tuple[Shape, Shape]) -> tuple[Pieces, Pieces]:
    """The common flat range, as a piece of the source's local tensor and as one of the target's."""
    a, b = cast(tuple[int, int], _span(source, hull)), cast(tuple[int, int], _span(target, hull))
    start, stop = max(a[0], b[0]), min(a[1], b[1])
    if start >= stop:
        return (), ()
    return (_flat_piece(start - a[0], stop - a[0]),), (_flat_piece(start - b[0], stop - b[0]),)


def _box_overlap(source: Region, target: Region) -> tuple[Pieces, Pieces]:
    """The common rectangles, each as a piece of either local tensor, in the same order on both sides."""
    given, taken = [], []
    for a, b in itertools.product(_boxes(source), _boxes(target)):
        low = tuple(map(max, a.offsets, b.offsets))
        high = tuple(min(o + s, p + t) for o, s, p, t in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True))
        if all(map(int.__lt__, low, high)):
            sizes = tuple(stop - start for start, stop in zip(low, high, strict=True))
            given.append(_piece_in(a, low, sizes))
            taken.append(_piece_in(b, low, sizes))
    return tuple(given), tuple(taken)


@lru_cache(maxsize=8192)
def _boxes(region: Region) -> tuple[Box, ...]:
    return region.boxes()


def _piece_in(box: Box, low: Shape, sizes: Shape) -> Piece:
    offsets = tuple(map(int.__sub__, low, box.offsets))
    start = _contiguous_start(offsets, sizes, box.sizes)
    if start is not None:
        return _flat_piece(box.start + start, box.start + start + math.prod(sizes))
    return Piece(box.start, box.sizes, offsets, sizes)


def bytes_received(
    shape: Shape, mesh_shape: Shape, here: Shape, before: Placements, after: Placements, itemsize: int
) -> int:
    """What the rank at ``here`` receives in the exchange (an all-reduce of Partial -> Replicate not counted), in
    bytes."""
    plan = plan_exchange(shape, mesh_shape, here, before, after)
    return itemsize * sum(piece.numel for _, _, pieces in plan.receives for piece in pieces)


# ---- running it ----


@lru_cache(maxsize=256)
def _rank_table(mesh: DeviceMesh) -> dict[Shape, int]:
    with unset_fake_temporarily():
        flat = mesh.mesh.flatten().tolist()
    return dict(zip(itertools.product(*map(range, mesh.shape)), flat, strict=True))


def _mesh_group(mesh: DeviceMesh, across: int | None) -> tuple[dist.ProcessGroup, bool]:
    """The group of one mesh dim, or of the whole mesh, and whether it holds no other rank.

    A mesh of several dims that is smaller than the world has no group of its own: it gets the world's.
    """
    if across is not None or mesh.ndim == 1:
        return mesh.get_group(across or 0), True
    world = cast(dist.ProcessGroup, dist.group.WORLD)
    return world, mesh.size() == world.size()


def _by_group_rank(mesh: DeviceMesh, mesh_dim: int, here: Shape, pieces: Sequence[Tensor]) -> list[Tensor]:
    """Pieces by coordinate along ``mesh_dim``, put in the order of the ranks of its group."""
    group, table = mesh.get_group(mesh_dim), _rank_table(mesh)
    ordered = list(pieces)
    for k, piece in enumerate(pieces):
        ordered[dist.get_group_rank(group, table[(*here[:mesh_dim], k, *here[mesh_dim + 1 :])])] = piece
    return ordered


def _coordinate(mesh: DeviceMesh) -> Shape | None:
    coordinate = mesh.get_coordinate()
    return None if coordinate is None else tuple(coordinate)


def _check_orders(current: DTensorSpec, target: DTensorSpec) -> None:
    for spec in (current, target):
        if not spec.use_strided_shard_as_shard_order and not DTensorSpec.is_default_device_order(spec.shard_order):
            raise NotImplementedError(f"a RaggedShard with the shard order {spec.shard_order} is not supported")


def check_route(shape: Shape, mesh_shape: Shape, before: Placements, after: Placements) -> None:
    """Raise on every rank alike, before any communication, when either layout cannot be or cannot be reached."""
    check_placements(shape, mesh_shape, before)
    check_placements(shape, mesh_shape, after)
    for mesh_dim, (p, q) in enumerate(zip(before, after, strict=True)):
        if q.is_partial() and p != q and not p.is_replicate():
            raise NotImplementedError(
                f"cannot redistribute {p!r} to {q!r} on mesh dim {mesh_dim}: values that are cut would become addends; "
                "redistribute to Replicate instead"
            )


def redistribute_local(local: Tensor, current: DTensorSpec, target: DTensorSpec, *, async_op: bool = False) -> Tensor:
    """The local tensor of ``target``, given the one of ``current``; one of them holds a RaggedShard.

    ``async_op``: the result is an ``AsyncCollectiveTensor`` which waits, and unpacks, on first use.
    """
    if current.mesh != target.mesh:
        raise NotImplementedError(
            f"a RaggedShard cannot be redistributed to another mesh ({current.mesh} to {target.mesh}); save and "
            "load it "
            "with torch.distributed.checkpoint instead"
        )
    mesh, before, after = current.mesh, current.placements, target.placements
    if mesh.ndim > 1:
        _check_orders(current, target)
    coordinate = mesh.get_coordinate()
    here = None if coordinate is None else tuple(coordinate)
    tracing = funcol._are_we_tracing()
    if tracing:
        # A plan is integers, so torch.compile has to compile again for another shape; it watches the local sizes only.
        local = local.reshape(tuple(map(int, local.shape)))
    route = _route(mesh, here, tuple(map(int, current.shape)), before, after)
    if here is None or before == after:
        return local
    if local.is_meta:
        return local.new_empty(region_of(tuple(current.shape), tuple(mesh.shape), here, after).local_shape)
    for first, second in route.reductions_before:
        local = _all_reduce(local, mesh, first, second)
    if route.exchange is not None:
        local, pending = _run(local, mesh, here, *route.exchange, route.operation, tracing)
        if async_op and route.ends_with_exchange and not tracing:
            return _deferred(local, pending)
        pending.wait()
    for first, second in route.reductions_after:
        local = _all_reduce(local, mesh, first, second)
    for mesh_dim, partial in route.divided:
        local = partial._partition_value(local, mesh, mesh_dim)
    return local


@dataclass(frozen=True)
class Route:
    """A redistribution: all-reduces, one exchange, all-reduces, and the split of a replicated value into addends.

    A reduction is a pair of placements, before and after it.
    """

    reductions_before: tuple[tuple[Placements, Placements], ...]
    exchange: tuple[ExchangePlan, Schedule] | None
    operation: str
    """What the exchange does with addends."""
    reductions_after: tuple[tuple[Placements, Placements], ...]
    divided: tuple[tuple[int, Partial], ...]

    @property
    def ends_with_exchange(self) -> bool:
        return not self.reductions_after and not self.divided


@lru_cache(maxsize=8192)
def _route(mesh: DeviceMesh, here: Shape | None, shape: Shape, before: Placements, after: Placements) -> Route:
    """The route of the rank at ``here``; raises as ``check_route`` (errors are not remembered, so they come again)."""
    mesh_shape = tuple(mesh.shape)
    check_route(shape, mesh_shape, before, after)
    # Replicate -> Partial is a local division; until then the dim is Replicate.
    divided = tuple(
        (i, q)
        for i, (p, q) in enumerate(zip(before, after, strict=True))
        if isinstance(q, Partial) and p.is_replicate()
    )
    goal = tuple(Replicate() if i in dict(divided) else q for i, q in enumerate(after))
    reductions = []
    for mesh_dim, (p, q) in enumerate(zip(before, goal, strict=True)):
        # Only these Partials know their reduction (norms, masked embeddings): rare and small.
        if _is_reduced(p, q) and (type(p) is not Partial or p.reduce_op not in _REDUCTIONS):
            single = (*before[:mesh_dim], Replicate(), *before[mesh_dim + 1 :])
            reductions.append((before, single))
            before = single
    middle = tuple(p if p.is_partial() and q.is_replicate() else q for p, q in zip(before, goal, strict=True))
    if middle != goal and _total_numel(shape, mesh_shape, before) <= _total_numel(shape, mesh_shape, middle):
        # The shards before are the smaller ones: reduce those.
        reductions.append((before, _reduced(before, goal)))
        before, middle = _reduced(before, goal), goal
    return Route(
        tuple(reductions),
        None if here is None or before == middle else _scheduled(mesh, here, shape, before, middle),
        _reduce_op(before, middle),
        ((middle, goal),) if middle != goal else (),
        divided,
    )


def _is_reduced(before: Placement, after: Placement) -> bool:
    return before.is_partial() and not after.is_partial()


def _reduce_op(before: Placements, after: Placements) -> str:
    found = (p for p, q in zip(before, after, strict=True) if isinstance(p, Partial) and _is_reduced(p, q))
    return next((p.reduce_op for p in found), "sum")


def _reduced(before: Placements, after: Placements) -> Placements:
    return tuple(q if p.is_partial() and q.is_replicate() else p for p, q in zip(before, after, strict=True))


def _total_numel(shape: Shape, mesh_shape: Shape, placements: Placements) -> int:
    """Elements of all local tensors together: what decides where an all-reduce is cheapest, the same on every rank."""
    total = 0
    for rank in itertools.product(*map(range, mesh_shape)):
        total += region_of(shape, mesh_shape, rank, placements).numel
    return total


def _all_reduce(local: Tensor, mesh: DeviceMesh, before: Placements, after: Placements) -> Tensor:
    for mesh_dim, (p, q) in enumerate(zip(before, after, strict=True)):
        if isinstance(p, Partial) and q.is_replicate() and local.numel():
            local = p._reduce_value(local, mesh, mesh_dim)
            if isinstance(local, funcol.AsyncCollectiveTensor):
                local = local.wait()
    return local


_REDUCTIONS = ("sum", "avg", "max", "min", "product")


def _flatten(local: Tensor) -> Tensor:
    """1-D and contiguous; the addresses do not change unless the local tensor has holes."""
    return local.contiguous().view(-1)


def _packed(flat: Tensor, pieces: Pieces) -> Tensor:
    """The pieces one after the other, 1-D and contiguous; a single flat range is a view."""
    if len(pieces) == 1:
        return pieces[0].of(flat).reshape(-1).contiguous()
    return torch.cat([piece.of(flat).reshape(-1) for piece in pieces])


def _unpack(packed: Tensor, target: Tensor, places: Pieces) -> None:
    start = 0
    for place in places:
        place.of(target).copy_(packed[start : start + place.numel].view(place.sizes))
        start += place.numel


def _consecutive(pieces: Pieces) -> tuple[int, int] | None:
    """The one flat range that the pieces make up in their order, ``None`` when they do not."""
    if not pieces:
        return 0, 0
    if any(len(piece.box) != 1 for piece in pieces):
        return None
    starts = [piece.start + piece.offsets[0] for piece in pieces]
    stops = [start + piece.numel for start, piece in zip(starts, pieces, strict=True)]
    return (starts[0], stops[-1]) if stops[:-1] == starts[1:] else None


@dataclass(frozen=True)
class Schedule:
    """An ExchangePlan by group rank: what is packed, the lengths of the all-to-all-v, and where arrivals go.

    ``span``: the flat range of the local tensor that is sent as it lies, when there is one. ``direct``: arrivals by
    source rank are the result already, or (Partial) the whole addends in order. ``peers``: their ranks in the process
    group that carries it, ``own`` being the number of this one.
    """

    peers: tuple[int, ...]
    own: int
    pieces: Pieces
    span: tuple[int, int] | None
    sent: tuple[int, ...]
    received: tuple[int, ...]
    places: tuple[tuple[int, Pieces], ...]
    direct: bool


def _schedule(plan: ExchangePlan, ranks: dict[Shape, int], here: Shape, peers: tuple[int, ...]) -> Schedule:
    size = len(peers)
    outgoing: list[Pieces] = [()] * size
    incoming: list[tuple[int, Pieces]] = [(0, ())] * size
    for coordinate, pieces in plan.sends:
        outgoing[ranks[coordinate]] = pieces
    for coordinate, addend, places in plan.receives:
        incoming[ranks[coordinate]] = (addend, places)
    for pieces, places in plan.keeps:
        outgoing[ranks[here]], incoming[ranks[here]] = pieces, (plan.own_addend, places)
    packed = tuple(itertools.chain.from_iterable(outgoing))
    arriving = tuple(itertools.chain.from_iterable(places for _, places in incoming))
    if plan.addends == 1:
        direct = _consecutive(arriving) == (0, plan.numel)
    else:
        whole = all(_consecutive(places) == (0, plan.numel) for _, places in incoming)
        direct = whole and [addend for addend, _ in incoming] == list(range(plan.addends))
    return Schedule(
        peers,
        ranks[here],
        packed,
        _consecutive(packed),
        tuple(sum(piece.numel for piece in pieces) for pieces in outgoing),
        tuple(sum(place.numel for place in places) for _, places in incoming),
        tuple(incoming),
        direct,
    )


def _scheduled(
    mesh: DeviceMesh, here: Shape, shape: Shape, before: Placements, after: Placements
) -> tuple[ExchangePlan, Schedule]:
    plan = plan_exchange(shape, tuple(mesh.shape), here, before, after)
    (group, exact), table = _mesh_group(mesh, plan.across), _rank_table(mesh)
    members = [
        c for c in table if plan.across is None or all(c[i] == here[i] for i in range(mesh.ndim) if i != plan.across)
    ]
    in_group = {coordinate: dist.get_group_rank(group, table[coordinate]) for coordinate in members}
    if exact:
        return plan, _schedule(plan, in_group, here, tuple(range(len(members))))
    numbers = {coordinate: number for number, coordinate in enumerate(members)}
    return plan, _schedule(plan, numbers, here, tuple(in_group.values()))


def _messages(schedule: Schedule, packed: Tensor, arrived: Tensor, group: dist.ProcessGroup) -> Pending:
    """The all-to-all-v as messages between those that have something for each other."""
    sends, receives, sent, received = [], [], 0, 0
    for number, (peer, out, back) in enumerate(zip(schedule.peers, schedule.sent, schedule.received, strict=True)):
        if number == schedule.own:
            if out:
                arrived[received : received + back].copy_(packed[sent : sent + out])
        else:
            if out:
                sends.append((peer, packed[sent : sent + out]))
            if back:
                receives.append((peer, arrived[received : received + back]))
        sent, received = sent + out, received + back
    return exchange(sends, receives, group)


# From this size on, in bytes, messages to or from a single rank cost half of gloo's all-to-all, which wakes every pair
# of ranks; small ones to a rank that has not asked yet cost more. NCCL's is a single launch.
_LARGE_MESSAGE = 1 << 20


def _run(
    local: Tensor,
    mesh: DeviceMesh,
    here: Shape,
    plan: ExchangePlan,
    schedule: Schedule,
    operation: str,
    tracing: bool,
) -> tuple[Tensor, Pending]:
    """Start the exchange. The returned tensor is right once the returned Pending has been waited for."""
    group, exact = _mesh_group(mesh, plan.across)
    flat = local.reshape(-1) if tracing else _flatten(local)
    if plan.gather is not None and not tracing:
        result = flat.new_empty(plan.numel)
        slots = [result[start:stop] for start, stop in plan.gather]
        across = cast(int, plan.across)
        slots[here[across]].copy_(flat)
        return result.view(plan.local_shape), all_gather_v(_by_group_rank(mesh, across, here, slots), group)
    if schedule.span is not None and schedule.span[1] > schedule.span[0]:
        packed = flat[schedule.span[0] : schedule.span[1]]
    else:
        packed = torch.cat([p.of(flat).reshape(-1) for p in schedule.pieces]) if schedule.pieces else flat[:0]
    if plan.idle or len(schedule.sent) == 1:
        arrived, pending = packed.clone(), Pending(())
    elif tracing and not exact:
        raise NotImplementedError(
            f"redistribution across the dims of {mesh} cannot be compiled, because the mesh is smaller than the "
            "world and "
            "has no group that holds all of it; change one mesh dim at a time, or redistribute outside torch.compile"
        )
    elif tracing:
        arrived, pending = all_to_all_v(packed, schedule.sent, schedule.received, group), Pending(())
    else:
        arrived = flat.new_empty(sum(schedule.received))
        if not exact or (plan.star * flat.element_size() >= _LARGE_MESSAGE and is_gloo(group, flat)):
            pending = _messages(schedule, packed, arrived, group)
        else:
            pending = all_to_all_v_into(arrived, packed, schedule.received, schedule.sent, group)
    if plan.addends == 1 and schedule.direct:
        return arrived.view(plan.local_shape), pending
    result = flat.new_empty(plan.numel)

    def finish() -> None:
        pending.wait()
        if schedule.direct:
            addends: Sequence[Tensor] = arrived.chunk(plan.addends) if plan.numel else [result] * plan.addends
        else:
            addends = [result] if plan.addends == 1 else [torch.empty_like(result) for _ in range(plan.addends)]
            start = 0
            for (addend, places), length in zip(schedule.places, schedule.received, strict=True):
                _unpack(arrived[start : start + length], addends[addend], places)
                start += length
        if plan.addends > 1:
            _reduce(addends, operation, result)

    if tracing:
        finish()
    return result.view(plan.local_shape), Pending((), finish)


def _reduce(addends: Sequence[Tensor], operation: str, out: Tensor) -> None:
    """``out`` = the reduction of ``addends`` in order. 16-bit floats are summed in fp32 and rounded once."""
    wide = addends[0].float() if out.dtype in (torch.bfloat16, torch.float16) else addends[0].clone()
    step: Callable[..., Any] = {"max": torch.maximum, "min": torch.minimum, "product": torch.mul}.get(
        operation, torch.add
    )
    for addend in addends[1:]:
        step(wide, addend.to(wide.dtype), out=wide)
    if operation == "avg":
        wide = wide / len(addends) if wide.is_floating_point() else wide.div_(len(addends), rounding_mode="trunc")
    out.copy_(wide)


def _deferred(result: Tensor, pending: Pending) -> Tensor:
    """``result`` as the tensor that functional collectives return: it waits, and unpacks, on first use."""
    callback_work = getattr(torch._C._distributed_c10d, "PythonCallbackWork", None)
    if callback_work is None:
        # Older torch has no work that runs Python: the call is then synchronous.
        pending.wait()
        return result

    def arrive(_timeout: Any) -> bool:
        with torch.no_grad():
            pending.wait()
        return True

    torch._C._distributed_c10d._register_work(result, callback_work(arrive))
    return funcol.AsyncCollectiveTensor(result)


# ---- a region of a whole tensor ----


def _pieces_of(region: Region, shape: Shape) -> Pieces:
    whole = Box((0,) * len(shape), shape, 0)
    return tuple(_piece_in(whole, box.offsets, box.sizes) for box in _boxes(region))


def _packed_region(flat: Tensor, region: Region, shape: Shape) -> Tensor:
    """The region of the flattened global tensor, 1-D; a view where it is one flat range."""
    pieces = _pieces_of(region, shape) if region.numel else ()
    return _packed(flat, pieces) if pieces else flat[:0]


def piece_of(full: Tensor, region: Region) -> Tensor:
    """A fresh copy of ``region`` of the global tensor, in the canonical local shape."""
    packed = _packed_region(_flatten(full), region, tuple(full.shape))
    return packed.clone().view(region.local_shape)


def write_piece(full: Tensor, region: Region, local: Tensor) -> Tensor:
    """Write the local tensor of ``region`` into the contiguous global tensor; returns it."""
    if region.numel:
        _unpack(_flatten(local), full.view(-1), _pieces_of(region, tuple(full.shape)))
    return full


# ---- from one rank to all ----


def distribute(full: Tensor, mesh: DeviceMesh, placements: Placements, source: int | None) -> Tensor:
    """The local tensor of the global ``full``; ``source`` as ``src_data_rank`` of ``distribute_tensor``.

    With a ``source`` (a coordinate along every mesh dim) the tensor of that rank is scattered: each rank receives its
    own piece and nothing else, and replicas of a piece are broadcast along their mesh dims. With ``None`` each rank
    cuts its own.
    """
    shape, here = tuple(full.shape), cast(Shape, _coordinate(mesh))
    if source is not None and not all(0 <= source < size for size in mesh.shape):
        raise ValueError(
            f"src_data_rank={source}: it counts along each dim of the mesh, which has the sizes {tuple(mesh.shape)}; "
            "None takes every rank's own tensor"
        )
    cut = tuple(Replicate() if p.is_partial() else p for p in placements)
    region = region_of(shape, tuple(mesh.shape), here, cut)
    if full.is_meta:
        local = full.new_empty(region.local_shape)
    elif source is None:
        local = piece_of(full, region)
    else:
        local = _scatter(full, mesh, here, cut, source)
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, Partial):
            local = placement._partition_value(local, mesh, mesh_dim)
    return local


def _scatter(full: Tensor, mesh: DeviceMesh, here: Shape, placements: Placements, source: int) -> Tensor:
    shape, mesh_shape = tuple(full.shape), tuple(mesh.shape)
    flat = _flatten(full)
    copies = [i for i, placement in enumerate(placements) if placement.is_replicate()]
    root = (source,) * len(mesh_shape)
    (group, _), table = _mesh_group(mesh, None), _rank_table(mesh)
    region = region_of(shape, mesh_shape, here, placements)
    sends, receives = [], []
    if here == root:
        local = piece_of(full, region).view(-1)
        for rank in itertools.product(*map(range, mesh_shape)):
            piece = _packed_region(flat, region_of(shape, mesh_shape, rank, placements), shape)
            if rank != here and piece.numel() and all(rank[i] == source for i in copies):
                sends.append((dist.get_group_rank(group, table[rank]), piece))
    else:
        local = flat.new_empty(region.numel)
        if region.numel and all(here[i] == source for i in copies):
            receives.append((dist.get_group_rank(group, table[root]), local))
    exchange(sends, receives, group).wait()
    # The replica at ``source`` has the piece by now; dim by dim, those that have it pass it on.
    for done, mesh_dim in enumerate(copies):
        if region.numel and mesh_shape[mesh_dim] > 1 and all(here[i] == source for i in copies[done + 1 :]):
            pieces = [local if k == source else local[:0] for k in range(mesh_shape[mesh_dim])]
            all_gather_v(_by_group_rank(mesh, mesh_dim, here, pieces), mesh.get_group(mesh_dim)).wait()
    return local.view(region.local_shape)
