"""Does a bucket fit into shards of S elements, and in which order?

For a given S one tensor has an earliest valid start at or after any position, found in constant time, and it never
moves left when that position moves right. So for a given *order* of the tensors greedy is optimal, and what is left
to search is the
order. Tensors are handled as kinds (equal ones are interchangeable) and a layout is a list of runs::

    (kind, start, count)      count equal tensors side by side from start on
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ragged_shard.bound import Kind, Target, round_up, targets

__all__ = ["Layout", "Run", "earliest", "pack", "pack_exactly", "search"]

Run = tuple[int, int, int]

WORK_LIMIT = 200_000  # steps of one search, each well below a microsecond


@dataclass(frozen=True)
class Layout:
    """A buffer of shards of ``shard`` elements. ``target`` is the fact behind the lower bound ``target.shard``."""

    shard: int
    runs: tuple[Run, ...]
    target: Target


def earliest(p: int, numel: int, block: int, shard: int) -> int:
    """The least start >= ``p`` of a tensor such that no multiple of ``shard`` cuts one of its blocks; -1 if there
    is none."""
    inside = p % shard
    if inside + numel <= shard:
        return p
    divides = shard % block == 0
    room = shard - inside
    if room >= block:
        head = room - room % block
        if divides or numel - head <= shard:
            return p + room - head
    p += room
    if divides or numel <= shard:
        return p
    head = shard - shard % block
    if head and numel - head <= shard:
        return p + shard - head
    return -1


def side_by_side(p: int, numel: int, block: int, left: int, shard: int) -> int:
    """How many of ``left`` equal tensors are valid one after another from the valid start ``p`` on (at least 1)."""
    if shard % block == 0 and numel % block == 0 and p % block == 0:
        return left
    return max(1, min(left, (shard - p % shard) // numel))


class Budget:
    """Work in steps of the search, so that a plan never depends on how fast the machine is."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def spend(self, steps: int) -> None:
        self.steps -= steps


def pack(
    kinds: Sequence[Kind],
    shard: int,
    limit: int,
    *,
    tolerance: int | None,
    fill: bool,
    budget: Budget,
) -> list[Run] | None:
    """Greedy in the order of ``kinds``: a layout within ``limit`` elements, or None if this greedy finds none.

    The first kind that starts within ``tolerance`` elements of the end so far is placed (None: the first kind,
    whatever gap it needs); if there is none, the kind with the smallest gap. ``fill`` puts later kinds into the gap
    that is left.
    """
    left = [k.copies for k in kinds]
    alive = list(range(len(kinds)))
    slack = limit - sum(k.numel * k.copies for k in kinds)
    runs: list[Run] = []
    p = steps = 0
    while alive:
        best, start = -1, -1
        for i in alive:
            steps += 1
            numel, block, _ = kinds[i]
            at = earliest(p, numel, block, shard)
            if at < 0:
                budget.spend(steps)
                return None
            if best < 0 or at < start:
                best, start = i, at
            if tolerance is None or at - p <= tolerance:
                best, start = i, at
                break
        if fill and start > p:
            for j in alive:
                numel, block, _ = kinds[j]
                while j != best and left[j] and p + numel <= start:
                    steps += 1
                    at = earliest(p, numel, block, shard)
                    if at < 0 or at + numel > start:
                        break
                    count = min(side_by_side(at, numel, block, left[j], shard), (start - at) // numel)
                    runs.append((j, at, count))
                    left[j] -= count
                    slack -= at - p
                    p = at + count * numel
        slack -= start - p
        if slack < 0:
            budget.spend(steps)
            return None
        numel, block, _ = kinds[best]
        count = side_by_side(start, numel, block, left[best], shard)
        runs.append((best, start, count))
        left[best] -= count
        p = start + count * numel
        alive = [i for i in alive if left[i]]
    budget.spend(steps)
    return runs


def pack_exactly(kinds: Sequence[Kind], shard: int, limit: int, *, budget: Budget) -> list[Run] | None:
    """A layout within ``limit`` elements, or None if there is none in any order.

    Dynamic programme over how many of each kind are placed: end(counts) is the least end over the kind placed last.
    ``len(kinds) * prod(copies + 1)`` steps.
    """
    sizes = [k.copies + 1 for k in kinds]
    strides = [math.prod(sizes[:i]) for i in range(len(kinds))]
    states = math.prod(sizes)
    budget.spend(states * len(kinds))
    unreachable = limit + 1
    ends = [unreachable] * states
    last = [-1] * states
    ends[0] = 0
    for state in range(1, states):
        best, which = unreachable, -1
        for i, (numel, block, _) in enumerate(kinds):
            if state // strides[i] % sizes[i]:
                before = ends[state - strides[i]]
                if before + numel < best:
                    at = earliest(before, numel, block, shard)
                    if at >= 0 and at + numel < best:
                        best, which = at + numel, i
        ends[state], last[state] = best, which
    if ends[-1] > limit:
        return None
    runs: list[Run] = []
    state = states - 1
    while state:
        i = last[state]
        runs.append((i, ends[state] - kinds[i].numel, 1))
        state -= strides[i]
    return runs[::-1]


def fits(kinds: Sequence[Kind], shard: int, limit: int, budget: Budget) -> list[Run] | None:
    """A layout within ``limit`` elements that one of the packers finds, or None."""
    if math.prod(k.copies + 1 for k in kinds) * len(kinds) <= 2_000:
        return pack_exactly(kinds, shard, limit, budget=budget)
    for order in orders(kinds, shard):
        ordered = [kinds[i] for i in order]
        for tolerance, fill in ((None, True), (None, False), (0, True)):
            runs = pack(ordered, shard, limit, tolerance=tolerance, fill=fill, budget=budget)
            if runs is not None:
                return [(order[i], start, count) for i, start, count in runs]
    return None


def orders(kinds: Sequence[Kind], shard: int) -> list[list[int]]:
    by_block = sorted(range(len(kinds)), key=lambda i: (-kinds[i].block, -kinds[i].numel))
    by_numel = sorted(range(len(kinds)), key=lambda i: (-kinds[i].numel, -kinds[i].block))
    off_grid = [i for i in by_block if shard % kinds[i].block] + [i for i in by_block if not shard % kinds[i].block]
    found: list[list[int]] = []
    for order in (by_block, off_grid, by_numel):
        if order not in found:
            found.append(order)
    return found


def safe_shard(kinds: Sequence[Kind], world_size: int, alignment: int) -> int:
    """A shard that always fits: all blocks on one grid, or everything on one rank."""
    grid = math.lcm(alignment, *(k.block for k in kinds))
    on_grid = round_up(-(-sum(k.copies * (k.numel + k.block - 1) for k in kinds) // world_size), grid)
    return min(on_grid, round_up(sum(k.copies * k.numel for k in kinds), alignment))


@lru_cache(maxsize=1024)
def search(kinds: tuple[Kind, ...], world_size: int, alignment: int, work_limit: int = WORK_LIMIT) -> Layout:
    """The best layout found in ``work_limit`` steps. ``kinds`` may be empty."""
    goals = targets(kinds, world_size, alignment)
    if not kinds:
        return Layout(0, (), goals[0])
    budget = Budget(work_limit)
    best = safe_shard(kinds, world_size, alignment)
    runs = None
    for goal in goals:
        if goal.shard >= best and runs is not None:
            break
        good, found = gallop(kinds, world_size, goal, best, budget)
        if found is not None:
            best, runs = good, found
    if runs is None:
        runs = pack(
            sorted(kinds, key=lambda k: -k.block), best, world_size * best, tolerance=None, fill=False, budget=budget
        )
        order = sorted(range(len(kinds)), key=lambda i: -kinds[i].block)
        assert runs is not None
        runs = [(order[i], start, count) for i, start, count in runs]
    return Layout(best, tuple(runs), goals[0])


def gallop(
    kinds: Sequence[Kind], world_size: int, goal: Target, best: int, budget: Budget
) -> tuple[int, list[Run] | None]:
    """The least multiple of ``goal.step`` between ``goal.shard`` and ``best`` that fits, if fitting were monotone."""
    low, stride, shard = goal.shard - goal.step, 1, goal.shard
    found = None
    while shard < best and budget.steps > 0:
        found = fits(kinds, shard, world_size * shard, budget)
        if found is not None:
            break
        low, shard, stride = shard, shard + stride * goal.step, stride * 2
    if found is None:
        return best, None
    while shard - low > goal.step and budget.steps > 0:
        middle = low + (shard - low) // goal.step // 2 * goal.step
        between = fits(kinds, middle, world_size * middle, budget)
        if between is None:
            low = middle
        else:
            shard, found = middle, between
    return shard, found
