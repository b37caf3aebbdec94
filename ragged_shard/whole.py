"""Layouts of the same shard in which fewer elements lie apart from the rest of their tensor.

Where blocks leave the order of the tensors free, padding does not depend on it, but what an optimizer of whole matrices
moves does: a matrix that lies whole on one rank is updated there.
"""

from __future__ import annotations

from collections.abc import Sequence

from ragged_shard.bound import Kind
from ragged_shard.packing import Run, earliest

__all__ = ["apart", "keep_whole"]

# Beyond these, ranks x kinds, a chunk holds few whole tensors and looking for them takes longer than planning.
_WORK_LIMIT = 512


def apart(kinds: Sequence[Kind], runs: Sequence[Run], shard: int) -> int:
    """Elements that do not lie with the largest part of their tensor, in shards of ``shard`` elements."""
    total = 0
    for kind, start, count in runs:
        numel = kinds[kind].numel
        for at in range(start, start + count * numel, numel):
            first = min(numel, shard - at % shard)
            last = (at + numel) % shard if first + shard < numel or (at + numel) // shard > (at + first) // shard else 0
            largest = shard if numel - first - last >= shard else max(first, last, numel - first - last)
            total += numel - largest
    return total


def keep_whole(kinds: Sequence[Kind], runs: Sequence[Run], shard: int, world_size: int) -> Sequence[Run]:
    """``runs``, or a layout in the same buffer with fewer elements apart.

    Chunk by chunk: the largest tensors that fit whole, then smaller ones, then the largest left over the boundary.
    """
    if world_size == 1 or world_size * len(kinds) > _WORK_LIMIT:
        return runs
    if not any(kind.block < kind.numel <= shard for kind in kinds):
        return runs
    before = apart(kinds, runs, shard)
    if not before:
        return runs
    found = _fill_chunks(kinds, shard, shard * world_size)
    return found if found is not None and apart(kinds, found, shard) < before else runs


def _fill_chunks(kinds: Sequence[Kind], shard: int, limit: int) -> list[Run] | None:
    left = [kind.copies for kind in kinds]
    alive = sorted(range(len(kinds)), key=lambda i: (-kinds[i].numel, -kinds[i].block))
    runs: list[Run] = []
    p = 0
    while alive:
        room = shard - p % shard
        chosen = next((i for i in alive if kinds[i].numel <= room), None)
        start, count = p, 1
        if chosen is not None:
            count = min(left[chosen], room // kinds[chosen].numel)
        else:
            starts = [(earliest(p, kinds[i].numel, kinds[i].block, shard), i) for i in alive]
            valid = [(start, position) for position, (start, _) in enumerate(starts) if start >= 0]
            if not valid:
                return None
            start, position = min(valid)
            chosen = alive[position]
        numel = kinds[chosen].numel
        runs.append((chosen, start, count))
        p = start + count * numel
        if p > limit:
            return None
        left[chosen] -= count
        if not left[chosen]:
            alive.remove(chosen)
    return runs
