"""Layouts of the same shard in which less lies apart from the rest of its tensor.

Where blocks leave the order of the tensors free, padding does not depend on it, but what an optimizer of whole matrices
moves does: a matrix that lies whole on one rank is updated there. What moves costs by the element, and by the message:
every further part of a tensor is one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ragged_shard.bound import Kind
from ragged_shard.packing import Run, earliest

__all__ = ["apart", "keep_whole"]

# Beyond these, ranks x kinds, a chunk holds few whole tensors and looking for them takes longer than planning.
_WORK_LIMIT = 512
# A message takes about as long as this many elements of one (some 0.1 ms and 5 ns over gloo), if it has as many.
_MESSAGE = 16384
# Small ones fill what the others leave of a chunk: they are at most this part of it.
_SMALL = 16


def apart(kinds: Sequence[Kind], runs: Sequence[Run], shard: int) -> int:
    """What it costs that tensors do not lie whole in shards of ``shard`` elements, in elements: those that are not with
    the largest part of their tensor, and the messages of the parts.
    """
    total = 0
    for kind, start, count in runs:
        numel = kinds[kind].numel
        for at in range(start, start + count * numel, numel):
            boundaries = (at + numel - 1) // shard - at // shard
            if not boundaries:
                continue
            first, last = shard - at % shard, (at + numel - 1) % shard + 1
            largest = shard if boundaries > 1 else 0
            total += numel - max(first, last, largest) + boundaries * min(numel, _MESSAGE)
    return total


def keep_whole(kinds: Sequence[Kind], runs: Sequence[Run], shard: int, world_size: int) -> Sequence[Run]:
    """``runs``, or a layout in the same buffer that costs less."""
    if world_size == 1 or world_size * len(kinds) > _WORK_LIMIT:
        return runs
    if not any(kind.block < kind.numel <= shard for kind in kinds):
        return runs
    best, cost = runs, apart(kinds, runs, shard)
    for choose in (_largest_that_fits, _giants_first):
        found = _fill_chunks(kinds, shard, shard * world_size, choose) if cost else None
        if found is not None and (less := apart(kinds, found, shard)) < cost:
            best, cost = found, less
    return best


# Which kind comes next: ``kinds``, those that are left from the largest to the smallest, how many of each, the room in
# this chunk, the elements of a chunk. ``None`` leaves it to what can cross the boundary with the least gap, of equals
# the largest.
Choose = Callable[[Sequence[Kind], Sequence[int], Sequence[int], int, int], int | None]


def _largest_that_fits(kinds: Sequence[Kind], alive: Sequence[int], _: Sequence[int], room: int, __: int) -> int | None:
    return next((i for i in alive if kinds[i].numel <= room), None)


def _giants_first(
    kinds: Sequence[Kind], alive: Sequence[int], left: Sequence[int], room: int, shard: int
) -> int | None:
    """Tensors larger than a chunk begin at the beginning of one, and the smallest close it."""
    small = [i for i in alive if kinds[i].numel * _SMALL <= shard]
    if room < shard and room <= sum(kinds[i].numel * left[i] for i in small):
        return next((i for i in small if kinds[i].numel <= room), small[-1])
    if room * _SMALL > shard * (_SMALL - 1) and kinds[alive[0]].numel > shard:
        return alive[0]
    large = [i for i in alive if kinds[i].numel * _SMALL > shard]
    return next((i for i in large or alive if kinds[i].numel <= room), None)


def _fill_chunks(kinds: Sequence[Kind], shard: int, limit: int, choose: Choose) -> list[Run] | None:
    left = [kind.copies for kind in kinds]
    alive = sorted(range(len(kinds)), key=lambda i: (-kinds[i].numel, -kinds[i].block))
    runs: list[Run] = []
    p = 0
    while alive:
        room = shard - p % shard
        chosen = choose(kinds, alive, left, room, shard)
        start, count = p, 1
        if chosen is not None and kinds[chosen].numel <= room:
            count = min(left[chosen], room // kinds[chosen].numel)
        else:
            candidates = alive if chosen is None else [chosen]
            starts = [(earliest(p, kinds[i].numel, kinds[i].block, shard), i) for i in candidates]
            valid = [(start, position) for position, (start, _) in enumerate(starts) if start >= 0]
            if not valid:
                return None
            start, position = min(valid)
            chosen = candidates[position]
        numel = kinds[chosen].numel
        runs.append((chosen, start, count))
        p = start + count * numel
        if p > limit:
            return None
        left[chosen] -= count
        if not left[chosen]:
            alive.remove(chosen)
    return runs
