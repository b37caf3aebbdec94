"""The smallest shard by exhaustion, from the definition alone. Nothing here is taken from the package.

A tensor is (numel, block). It may start at s if every multiple of the shard strictly inside [s, s + numel) is a whole
number of blocks away from s. Two solvers, so that one can check the other:

* ``smallest_shard`` tries every set of tensors already placed, keeps the least end for each, and finds starts by
  stepping one element at a time;
* ``smallest_shard_by_positions`` tries every order and every start of every tensor. Only for a handful of elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Tensor = tuple[int, int]


def may_start(start: int, numel: int, block: int, shard: int) -> bool:
    boundary = start // shard * shard + shard
    while boundary < start + numel:
        if (boundary - start) % block:
            return False
        boundary += shard
    return True


def fits(tensors: Sequence[Tensor], world_size: int, shard: int) -> bool:
    end = world_size * shard
    ends = {0: 0}
    for _ in tensors:
        following: dict[int, int] = {}
        for placed, position in ends.items():
            for index, (numel, block) in enumerate(tensors):
                if placed >> index & 1:
                    continue
                start = next((s for s in range(position, end - numel + 1) if may_start(s, numel, block, shard)), None)
                if start is not None:
                    key = placed | 1 << index
                    following[key] = min(following.get(key, end), start + numel)
        ends = following
    return bool(ends)


def smallest_shard(tensors: Sequence[Tensor], world_size: int, alignment: int) -> int:
    total = sum(numel for numel, _ in tensors)
    shard = 0
    while shard < total and not (shard and shard * world_size >= total and fits(tensors, world_size, shard)):
        shard += alignment
    return shard


def positions(tensors: Sequence[Tensor], free_from: int, end: int, shard: int) -> Iterator[None]:
    if not tensors:
        yield None
    for index, (numel, block) in enumerate(tensors):
        rest = [*tensors[:index], *tensors[index + 1 :]]
        for start in range(free_from, end - numel + 1):
            if may_start(start, numel, block, shard):
                yield from positions(rest, start + numel, end, shard)


def smallest_shard_by_positions(tensors: Sequence[Tensor], world_size: int, alignment: int) -> int:
    shard = alignment
    while next(positions(tensors, 0, world_size * shard, shard), "none") == "none":
        shard += alignment
    return shard
