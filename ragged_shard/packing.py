"""The smallest shard that a search finds for one flat buffer, and the layout that fits into it.

For a given shard S one tensor has an earliest valid start at or after any position, found in constant time, and it
never moves left when that position moves right. So for a given *order* of the tensors greedy is optimal, and what is
left to search is the order and S. Tensors are handled as kinds (equal ones are interchangeable), a layout is a list
of runs::

    (kind, start, copies)      that many equal tensors side by side from start on

Which S: whether S fits is not monotone in S, but nearly so along the multiples of a block that divides it. The targets
of the lower bound name the multiples that matter; each is searched by bisection, coarse ones first.

Work is counted in steps, never in time, so a layout does not depend on the machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations

from ragged_shard.bound import Kind, Target, ceil_div, round_up, targets, threshold, tightest

__all__ = ["Layout", "Run", "earliest", "fit", "pack", "pack_exactly", "paper_search", "search"]

Run = tuple[int, int, int]

WORK_LIMIT = 50_000  # steps of one search, each below half a microsecond
EXACT_STEPS = 3_000  # steps of one exact packing
EXHAUSTIVE_STEPS = 40_000  # steps of trying every shard exactly
ATTEMPTS = 9  # orders tried for one shard
PAPER_TENSORS = 256  # more tensors than these: the paper's search in declared order is not among our candidates


@dataclass(frozen=True)
class Layout:
    """A buffer with shards of ``shard`` elements. None is smaller than ``lower_bound``, which rests on ``target``."""

    shard: int
    runs: tuple[Run, ...]
    lower_bound: int
    target: Target
    steps: int  # the work it took


class Budget:
    """Steps left."""

    __slots__ = ("steps",)

    def __init__(self, steps: int) -> None:
        self.steps = steps


def earliest(p: int, numel: int, block: int, shard: int) -> int:
    """The least start >= ``p`` of a tensor of which no multiple of ``shard`` cuts a block; -1 if there is none."""
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


def pack(
    kinds: Sequence[Kind], shard: int, limit: int, *, tolerance: int | None, fillers: Sequence[int], budget: Budget
) -> list[Run] | None:
    """Greedy in the order of ``kinds``: a layout within ``limit`` elements, or None if this greedy finds none.

    The first kind that starts within ``tolerance`` elements of the end so far is placed (None: the first kind,
    whatever gap it needs); if there is none, the kind with the smallest gap. Then ``fillers`` (indices, in this
    order) go into the gap. Every kind must have a valid start.
    """
    left = [k.copies for k in kinds]
    alive = list(range(len(kinds)))
    slack = limit - sum(k.numel * k.copies for k in kinds)
    if slack < 0:
        return None
    # earliest() and side_by_side() are written out here: this loop is where the time goes. ``beyond``: where the
    # tensor starts relative to a boundary that it cannot cross.
    facts = []
    for numel, block, _ in kinds:
        divides = shard % block == 0
        beyond = 0 if divides or numel <= shard else shard % block
        facts.append((numel, block, numel if divides else shard, divides and numel % block == 0, beyond))
    runs: list[Run] = []
    p = steps = 0
    while alive:
        room = shard - p % shard
        gap, best = -1, -1
        for i in alive:
            steps += 1
            numel, block, reach, _, beyond = facts[i]
            if numel <= room:
                gap, best = 0, i
                break
            wait = room % block
            head = room - wait
            if not head or numel - head > reach:
                wait = room + beyond
            if best < 0 or wait < gap:
                gap, best = wait, i
            if tolerance is None or wait <= tolerance:
                gap, best = wait, i
                break
        if gap:
            start = p + gap
            for j in fillers:
                numel, block, reach, _, beyond = facts[j]
                while left[j] and numel <= start - p and j != best:
                    steps += 1
                    room = shard - p % shard
                    if numel <= room:
                        wait = 0
                    else:
                        wait = room % block
                        if room == wait or numel - room + wait > reach:
                            wait = room + beyond
                    if p + wait + numel > start:
                        break
                    runs.append((j, p + wait, 1))
                    left[j] -= 1
                    slack -= wait
                    p += wait + numel
                    if not left[j]:
                        alive.remove(j)
            slack -= start - p
            if slack < 0:
                budget.steps -= steps
                return None
            p = start
        numel, block, _, on_grid, _ = facts[best]
        count = 1
        if left[best] > 1 and (tolerance is None or best == alive[0]):
            if on_grid and p % block == 0:
                count = left[best]
            else:
                count = max(1, min(left[best], (shard - p % shard) // numel))
        runs.append((best, p, count))
        left[best] -= count
        p += count * numel
        if not left[best]:
            alive.remove(best)
    budget.steps -= steps
    return runs


def pack_exactly(kinds: Sequence[Kind], shard: int, limit: int, *, budget: Budget) -> list[Run] | None:
    """A layout within ``limit`` elements, or None if there is none in any order.

    Dynamic programme over how many of each kind are placed: end(counts) is the least end over the kind placed last.
    ``len(kinds) * prod(copies + 1)`` steps.
    """
    sizes = [k.copies + 1 for k in kinds]
    strides = [math.prod(sizes[:i]) for i in range(len(kinds))]
    states = math.prod(sizes)
    budget.steps -= states * len(kinds)
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


class _Search:
    """The search for one buffer. ``kinds`` must not be empty."""

    def __init__(self, kinds: tuple[Kind, ...], world_size: int, alignment: int, work_limit: int) -> None:
        self.kinds = kinds
        self.world_size = world_size
        self.alignment = alignment
        self.budget = Budget(work_limit)
        self.numel = sum(k.numel * k.copies for k in kinds)
        # Free kinds fit anywhere without a gap, whatever S is: they fill the gaps that the others leave.
        self.free = [i for i, k in enumerate(kinds) if alignment % k.block == 0]
        self.free.sort(key=lambda i: -kinds[i].numel)
        self.bound = [i for i, k in enumerate(kinds) if alignment % k.block]
        self.bound.sort(key=lambda i: (-kinds[i].block, -kinds[i].numel))
        self.free_numel = sum(kinds[i].numel * kinds[i].copies for i in self.free)
        self.largest = max(k.block for k in kinds)
        self.favourite = 0

    def fits(self, shard: int) -> list[Run] | None:
        """A layout in shards of ``shard`` elements that one of the packers finds, or None."""
        if any(shard % k.block and threshold(k.numel, k.block) > shard < k.numel for k in self.kinds):
            self.budget.steps -= len(self.kinds)
            return None
        # what worked for the last shard is likely to work again
        for attempt in (self.favourite, *(i for i in range(ATTEMPTS) if i != self.favourite)):
            order, tolerance = self._attempt(attempt, shard)
            runs = pack(
                [self.kinds[i] for i in order],
                shard,
                shard * self.world_size,
                tolerance=tolerance,
                fillers=range(len(order)),
                budget=self.budget,
            )
            if runs is not None:
                self.favourite = attempt
                return [(order[i], start, count) for i, start, count in runs]
            if self.budget.steps < 0:
                return None
        return self._best_order(shard)

    def _attempt(self, attempt: int, shard: int) -> tuple[list[int], int | None]:
        """(order of the kinds, tolerance) for ``pack``, the most successful first: 0 alone solves 98 % of real cases.

        The others were chosen as a set that covers every shard of the tables of expected plans.
        """
        kinds, bound, free = self.kinds, self.bound, self.free
        off = [i for i in bound if shard % kinds[i].block]
        on = [i for i in bound if not shard % kinds[i].block]
        # what every boundary may cost on average: padding, and the free tensors that fill gaps
        share = (shard * self.world_size - self.numel + self.free_numel) // self.world_size
        if attempt in (0, 5):
            # long tensors first, so that the short ones are left to fit between; wide gaps let them alternate
            off.sort(key=lambda i: (-kinds[i].numel, -kinds[i].block))
            return [*off, *on, *free], share // 2 if attempt == 0 else 3 * share
        if attempt in (1, 4):
            return [*bound, *free], share if attempt == 1 else 0
        if attempt in (2, 6):
            return [*on, *off, *free], 0 if attempt == 2 else None
        if attempt == 3:
            return [*off, *on[::-1], *free], self.largest
        by_volume = self.by_volume
        if attempt == 7:
            return [*by_volume, *free], None
        # two kinds make most of the bucket; the smallest of the others shift them against the boundaries
        return [*by_volume[:2], *by_volume[:1:-1], *free], share

    @cached_property
    def by_volume(self) -> list[int]:
        kinds = self.kinds
        return sorted(self.bound, key=lambda i: (-kinds[i].numel * kinds[i].copies, -kinds[i].block))

    @cached_property
    def exact(self) -> tuple[int, int]:
        """How many kinds, the largest first, an exact packing can take, and the steps it costs then."""
        states, steps = 1, 0
        for taken, kind in enumerate(sorted(self.kinds, reverse=True)):
            states *= kind.copies + 1
            if states * (taken + 1) > EXACT_STEPS:
                return taken, steps
            steps = states * (taken + 1)
        return len(self.kinds), steps

    def _best_order(self, shard: int) -> list[Run] | None:
        """The exact order of the largest tensors, with the small ones put into the gaps."""
        kinds, taken = self.kinds, self.exact[0]
        by_numel = sorted(range(len(kinds)), key=lambda i: kinds[i], reverse=True)
        large, small = by_numel[:taken], by_numel[taken:]
        limit = shard * self.world_size
        if sum(kinds[i].numel * kinds[i].copies for i in small) * 100 > limit:
            return None
        runs = pack_exactly([kinds[i] for i in large], shard, limit, budget=self.budget)
        if runs is None or not small:
            return runs and [(large[i], start, count) for i, start, count in runs]
        order = [*(large[i] for i, _, _ in runs), *small]
        sequence = [*(kinds[large[i]]._replace(copies=1) for i, _, _ in runs), *(kinds[i] for i in small)]
        fillers = range(len(runs), len(sequence))
        packed = pack(sequence, shard, limit, tolerance=None, fillers=fillers, budget=self.budget)
        return packed and [(order[i], start, count) for i, start, count in packed]

    def descend(self, first: int, step: int, best: int) -> tuple[int, list[Run]] | None:
        """The least of first, first + step, ... below ``best`` that fits, if fitting is monotone there, or None."""
        low, high = -1, (best - 1 - first) // step + 1
        found = None
        middle = 0
        while low + 1 < high and self.budget.steps >= 0:
            runs = self.fits(first + middle * step)
            if runs is None:
                low = middle
            else:
                high, found = middle, (first + middle * step, runs)
            middle = (low + high) // 2
        return found

    def above(self, bound: int) -> tuple[int, list[Run]]:
        """A small shard above ``bound``, which does not fit. Coarse steps first: they find good shards quickly."""
        best, runs = safe_shard(self.kinds, self.world_size, self.alignment), None
        firsts = {step: round_up(bound + 1, step) for step in more_steps(self.kinds, self.alignment)}
        goals = targets(self.kinds, self.world_size, self.alignment)
        firsts |= {goal.step: max(goal.shard, round_up(bound + 1, goal.step)) for goal in goals}
        for step, first in sorted(firsts.items(), reverse=True):
            if first < best and self.budget.steps >= 0:
                found = self.descend(first, step, best)
                if found is not None:
                    best, runs = found
        return best, runs or safe_runs(self.kinds, best, self.world_size)

    def every_shard(self, bound: int, best: int, runs: list[Run]) -> tuple[int, list[Run], int]:
        """(shard, runs, bound) after trying every shard between the two exactly, if that is little work."""
        shards = range(bound, best, self.alignment)
        taken, steps = self.exact
        if taken < len(self.kinds) or len(shards) * steps > EXHAUSTIVE_STEPS:
            return best, runs, bound
        for shard in shards:
            found = pack_exactly(self.kinds, shard, shard * self.world_size, budget=self.budget)
            if found is not None:
                return shard, found, shard
        return best, runs, best


def safe_shard(kinds: Sequence[Kind], world_size: int, alignment: int) -> int:
    """A shard that always fits: all blocks on one grid, or everything on one rank."""
    grid = math.lcm(alignment, *(k.block for k in kinds))
    on_grid = round_up(ceil_div(sum(k.copies * (k.numel + k.block - 1) for k in kinds), world_size), grid)
    return min(on_grid, round_up(sum(k.copies * k.numel for k in kinds), alignment))


def more_steps(kinds: Sequence[Kind], alignment: int) -> list[int]:
    """Steps of shards that nothing forces: multiples of heavy blocks, or of their divisors, often fit where others
    do not."""
    heavy: dict[int, int] = {}
    for kind in kinds:
        if alignment % kind.block:
            heavy[kind.block] = heavy.get(kind.block, 0) + kind.numel * kind.copies
    blocks = sorted(heavy, key=lambda block: (-heavy[block], -block))[:4]
    steps: set[int] = set()
    for size in range(1, len(blocks) + 1):
        for chosen in combinations(blocks, size):
            steps.add(math.lcm(alignment, *chosen))
        common = math.gcd(*blocks[:size])
        for _ in range(4):
            if common > alignment:
                steps.add(math.lcm(alignment, common))
            if common % 2:
                break
            common //= 2
    return sorted(steps, reverse=True)


@lru_cache(maxsize=1024)
def search(kinds: tuple[Kind, ...], world_size: int, alignment: int, work_limit: int = WORK_LIMIT) -> Layout:
    """The best layout found in about ``work_limit`` steps. ``kinds`` may be empty."""
    target = tightest(kinds, world_size, alignment)
    if not kinds:
        return Layout(0, (), 0, target, 0)
    state = _Search(kinds, world_size, alignment, work_limit)
    best = bound = target.shard
    runs = state.fits(bound)
    if runs is None:
        best, runs = state.above(bound)
        if best > bound:
            best, runs, bound = state.every_shard(bound, best, runs)
    return Layout(best, in_order(runs), bound, target, work_limit - state.budget.steps)


def fit(
    kinds: tuple[Kind, ...], world_size: int, alignment: int, shard: int, work_limit: int = WORK_LIMIT
) -> tuple[Run, ...] | None:
    """A layout in shards of ``shard`` elements, or None if the search finds none. ``kinds`` must not be empty."""
    runs = _Search(kinds, world_size, alignment, work_limit).fits(shard)
    return None if runs is None else in_order(runs)


def in_order(runs: Sequence[Run]) -> tuple[Run, ...]:
    return tuple(sorted(runs, key=lambda run: run[1]))


@lru_cache(maxsize=256)
def paper_search(
    kinds: tuple[Kind, ...], world_size: int, alignment: int, declared: tuple[int, ...]
) -> tuple[int, tuple[Run, ...]]:
    """The planner of veScale-FSDP (arXiv 2602.22437) as we read it; ``declared``: the kind of each tensor, in order.

    Three orders (declared, by block, by size). For each, the blocks of the largest tensors, one tensor more at a
    time, give common multiples, and a binary search over the multiples of each takes the least shard at which
    placing every tensor as early as possible fits.
    """
    budget = Budget(0)
    merged: list[tuple[int, int]] = []
    for kind in declared:
        if merged and merged[-1][0] == kind:
            merged[-1] = (kind, merged[-1][1] + 1)
        else:
            merged.append((kind, 1))
    by_block = sorted(range(len(kinds)), key=lambda i: (-kinds[i].block, -kinds[i].numel))
    by_numel = sorted(range(len(kinds)), key=lambda i: (-kinds[i].numel, -kinds[i].block))
    orders = [merged, [(i, kinds[i].copies) for i in by_block], [(i, kinds[i].copies) for i in by_numel]]
    steps = [alignment]
    for block in [k.block for k in sorted(kinds, key=lambda k: (-k.numel, k.block))]:
        steps.append(math.lcm(steps[-1], block))
    total = sum(k.numel * k.copies for k in kinds)
    best, best_runs = round_up(total, alignment), None
    for order in orders:
        sequence = [Kind(kinds[i].numel, kinds[i].block, copies) for i, copies in order]
        for step in dict.fromkeys(steps):
            low, high = ceil_div(total, world_size * step) - 1, ceil_div(total, step)
            while low + 1 < high:
                middle = (low + high) // 2
                runs = pack_in_order(sequence, middle * step, world_size * middle * step, budget)
                if runs is None:
                    low = middle
                else:
                    high = middle
                    if middle * step < best:
                        best, best_runs = middle * step, [(order[i][0], start, count) for i, start, count in runs]
    return best, in_order(best_runs or safe_runs(kinds, best, world_size))


def pack_in_order(kinds: Sequence[Kind], shard: int, limit: int, budget: Budget) -> list[Run] | None:
    if any(shard % k.block and threshold(k.numel, k.block) > shard < k.numel for k in kinds):
        return None
    return pack(kinds, shard, limit, tolerance=None, fillers=(), budget=budget)


def safe_runs(kinds: Sequence[Kind], shard: int, world_size: int) -> list[Run]:
    """The layout of ``safe_shard``: any order fits."""
    runs = pack(kinds, shard, shard * world_size, tolerance=None, fillers=(), budget=Budget(0))
    assert runs is not None
    return runs
