"""The layout of one bucket: which tensor lies where in which flat buffer, and which rank owns what.

    buffer of world_size * S elements
    |<------ S ------>|<------ S ------>|<------ S ------>|
    [ q q q q | q q q | k k | . | v v v v v | o o o o o . ]       | block ends, . padding
    ^ chunk 0         ^ chunk 1         ^ chunk 2         ^
    ^ cuts[0]         ^ cuts[1]         ^ cuts[2]         ^ cuts[3]

A rank's *chunk* is what collectives move, [k * S, (k + 1) * S). What it *owns* is [cuts[k], cuts[k + 1]), always
whole blocks. In the padded plans made here they coincide.

Integers only, no torch, no clock, no dependence on the order of the tensors or of sets: every rank computes the same
plan, and ``digest()`` shows it.
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import chain, pairwise
from operator import itemgetter
from typing import Any, Literal, cast

from ragged_shard.bound import (
    Kind,
    Problem,
    ceil_div,
    lower_bound,
    natural,
    packing_bound,
    problems,
    round_up,
    rounded,
    tightest,
    vector_elements,
)
from ragged_shard.packing import PAPER_TENSORS, Layout, fit, paper_search, search
from ragged_shard.whole import keep_whole

__all__ = ["BucketPlan", "BufferPlan", "TensorSpec", "lower_bound", "plan_bucket", "plan_model", "validate"]

Method = Literal["ours", "paper"]

SPLITS_DRAFTED, DRAFT_WORK_LIMIT = 128, 2_000  # groupings of the blocks; steps of the search for one buffer
SPLITS_PLANNED, SPLIT_WORK_LIMIT = 8, 20_000
SPLIT_STEPS = 60_000  # of all these searches together
SPLIT_BLOCKS = 10  # told apart when they are grouped: there are 9,330 ways to put ten into three buffers


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a bucket: ``numel`` elements of ``itemsize`` bytes, cut only between blocks of ``block`` elements.

    Blocks are counted from the start of the flattened tensor; the last one may be short. A block larger than the tensor
    means the whole tensor, and is stored as such.
    """

    name: str
    numel: int
    itemsize: int
    block: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"the name of a tensor must be a string, got {self.name!r}")
        for field, least in (("numel", 0), ("itemsize", 1), ("block", 1)):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"tensor {self.name!r}: {field} must be an integer, got {value!r}")
            if value < least:
                raise ValueError(f"tensor {self.name!r}: {field} must be at least {least}, got {value}")
        if self.block > self.numel:
            object.__setattr__(self, "block", max(1, self.numel))


@dataclass(frozen=True)
class BufferPlan:
    """One flat buffer of ``world_size * shard`` elements of ``itemsize`` bytes.

    ``shard``: elements of a chunk. ``starts``: (name, first element), sorted by position. ``numels`` and
    ``blocks``: elements, and elements of one block, in the same order. ``cuts``: ``world_size + 1`` positions, rank
    k owns [cuts[k], cuts[k + 1]).
    """

    itemsize: int
    shard: int
    starts: tuple[tuple[str, int], ...]
    numels: tuple[int, ...]
    cuts: tuple[int, ...]
    blocks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.blocks:
            object.__setattr__(self, "blocks", (1,) * len(self.starts))
        if not len(self.starts) == len(self.numels) == len(self.blocks):
            raise ValueError("starts, numels and blocks must have one entry for each tensor")
        if len(self.cuts) < 2 or self.shard < 0 or self.itemsize < 1:
            raise ValueError(
                f"a buffer needs a rank, a shard and an itemsize, got {self.cuts}, {self.shard}, {self.itemsize}"
            )
        if len({name for name, _ in self.starts}) != len(self.starts):
            raise ValueError("two tensors of a buffer have the same name")
        end = 0
        for (name, start), numel, block in zip(self.starts, self.numels, self.blocks, strict=True):
            if start < end or numel < 0 or block < 1:
                raise ValueError(
                    f"tensor {name!r}: [{start}, {start + numel}) in blocks of {block} begins before {end}"
                )
            end = start + numel
        if end > self.numel:
            raise ValueError(f"the tensors end at {end}, the buffer at {self.numel}")
        padded, shard = self.is_padded, self.shard
        if not padded:
            self._check_cuts()
        for (name, start), numel, block in zip(self.starts, self.numels, self.blocks, strict=True):
            if padded and shard:
                # evenly spaced cuts: the first one inside, and whether the block divides their distance, say it all
                inside = shard - start % shard
                fine = inside >= numel or (inside % block == 0 and (inside + shard >= numel or shard % block == 0))
            else:
                fine = block == 1
            if not fine and (cut := self._cut_block(start, numel, block)) is not None:
                raise ValueError(f"tensor {name!r} at {start}: the cut at {cut} splits a block of {block} elements")

    def _check_cuts(self) -> None:
        cuts = self.cuts
        if cuts[0] != 0 or cuts[-1] != self.numel or any(b < a for a, b in pairwise(cuts)):
            raise ValueError(f"cuts must rise from 0 to the end of the buffer, {self.numel}")
        for rank in range(self.world_size):
            lo, hi = self.owned(rank)
            if lo < hi and (hi <= rank * self.shard or lo >= (rank + 1) * self.shard):
                raise ValueError(f"rank {rank} owns [{lo}, {hi}), which does not meet its chunk {self.chunk(rank)}")

    def _cut_block(self, start: int, numel: int, block: int) -> int | None:
        """The first cut strictly inside a block of this tensor, or None."""
        first, last = bisect_right(self.cuts, start), bisect_left(self.cuts, start + numel)
        return next((cut for cut in self.cuts[first:last] if (cut - start) % block), None)

    @property
    def world_size(self) -> int:
        return len(self.cuts) - 1

    @property
    def numel(self) -> int:
        """Elements of the buffer, padding included."""
        return self.world_size * self.shard

    @cached_property
    def is_padded(self) -> bool:
        """Whether every rank owns exactly its chunk."""
        even = even_cuts(self.world_size, self.shard)
        return self.cuts is even or self.cuts == even

    @cached_property
    def _index(self) -> dict[str, int]:
        return {name: index for index, (name, _) in enumerate(self.starts)}

    def _span(self, name: str) -> tuple[int, int]:
        index = self._index.get(name)
        if index is None:
            raise KeyError(f"no tensor {name!r} in this buffer; it has {', '.join(self._index)}")
        start = self.starts[index][1]
        return start, start + self.numels[index]

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} of {self.world_size}")

    def chunk(self, rank: int) -> tuple[int, int]:
        """[lo, hi) of the buffer that collectives move for ``rank``."""
        self._check_rank(rank)
        return rank * self.shard, (rank + 1) * self.shard

    def owned(self, rank: int) -> tuple[int, int]:
        """[lo, hi) of the buffer whose elements ``rank`` keeps and updates; whole blocks."""
        self._check_rank(rank)
        return self.cuts[rank], self.cuts[rank + 1]

    def owner(self, position: int) -> int:
        """The rank that owns the element at ``position`` of the buffer (the last rank for the end of an empty
        buffer)."""
        return min(bisect_right(self.cuts, position), self.world_size) - 1

    def edges(self, rank: int) -> tuple[tuple[int, int, int], ...]:
        """(peer, lo, hi): what ``rank`` owns of other ranks' chunks. Empty in a padded plan."""
        lo, hi = self.owned(rank)
        if lo == hi:
            return ()
        pieces = []
        for peer in range(lo // self.shard, (hi - 1) // self.shard + 1):
            if peer != rank:
                pieces.append((peer, max(lo, peer * self.shard), min(hi, (peer + 1) * self.shard)))
        return tuple(pieces)

    def local_range(self, name: str, rank: int) -> tuple[int, int]:
        """[lo, hi) of the buffer: what ``rank`` owns of the tensor. Within ``owned(rank)`` even when it is empty
        (lo == hi)."""
        start, stop = self._span(name)
        lo, hi = self.owned(rank)
        first = min(max(start, lo), hi)
        return first, max(first, min(stop, hi))

    def units(self, name: str) -> tuple[int, ...]:
        """Elements of the tensor that each rank owns, divided by their greatest common divisor.

        For a tensor without elements rank 0 has the only unit, so that the sum is never 0.
        """
        start, stop = self._span(name)
        if start == stop:
            return (1, *(0,) * (self.world_size - 1))
        inner = self.cuts[bisect_right(self.cuts, start) : bisect_left(self.cuts, stop)]
        points = (start, *inner, stop)
        held = [b - a for a, b in pairwise(points)]
        before = bisect_right(self.cuts, start) - 1
        divisor = math.gcd(*held)
        after = self.world_size - before - len(held)
        return (*(0,) * before, *(h // divisor for h in held), *(0,) * after)

    def block(self, name: str) -> int:
        """Elements of one block of the tensor."""
        self._span(name)
        return self.blocks[self._index[name]]

    @property
    def padding(self) -> int:
        """Elements of the buffer that belong to no tensor."""
        return self.numel - sum(self.numels)

    @cached_property
    def held(self) -> tuple[int, ...]:
        """Elements of tensors (no padding) that each rank owns."""
        held = [0] * self.world_size
        for (_, start), numel in zip(self.starts, self.numels, strict=True):
            rank, position = bisect_right(self.cuts, start) - 1, start
            while position < start + numel:
                stop = min(self.cuts[rank + 1], start + numel)
                held[rank] += stop - position
                rank, position = rank + 1, stop
        return tuple(held)


@dataclass(frozen=True)
class BucketPlan:
    """The buffers of one bucket, and how good they are.

    ``numel``: elements of the tensors; ``padding``: elements of the buffers that belong to none. ``lower_bound``:
    elements per rank; no even buffers with these tensors in them (in this grouping, if there are several) have a
    smaller sum of shards. ``optimal``: that bound is reached. ``forced_by``: why it is not smaller, in sentences;
    empty if only the alignment adds to a fair share.
    """

    world_size: int
    buffers: tuple[BufferPlan, ...]
    numel: int
    padding: int
    lower_bound: int
    optimal: bool
    forced_by: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [name for buffer in self.buffers for name, _ in buffer.starts]
        if len(set(names)) != len(names):
            raise ValueError("a tensor is in two buffers")
        if any(buffer.world_size != self.world_size for buffer in self.buffers):
            raise ValueError(f"every buffer of a plan for {self.world_size} ranks needs {self.world_size + 1} cuts")
        numel, padding = sum(sum(b.numels) for b in self.buffers), sum(b.padding for b in self.buffers)
        if (self.numel, self.padding) != (numel, padding):
            raise ValueError(f"numel and padding are {numel} and {padding}, not {self.numel} and {self.padding}")
        if self.lower_bound > self.shard or self.optimal != (self.lower_bound == self.shard):
            raise ValueError(
                f"optimal={self.optimal} contradicts a bound of {self.lower_bound} for {self.shard} elements per rank"
            )

    @property
    def shard(self) -> int:
        """Elements per rank of all buffers together."""
        return sum(buffer.shard for buffer in self.buffers)

    @property
    def padding_fraction(self) -> float:
        """Bytes of padding over bytes of tensors (0 if there are none)."""
        tensors = sum(b.itemsize * sum(b.numels) for b in self.buffers)
        return sum(b.itemsize * b.padding for b in self.buffers) / tensors if tensors else 0.0

    @property
    def imbalance(self) -> float:
        """Bytes of tensors on the fullest rank over the average, minus 1 (0 if there are none)."""
        held = [sum(b.itemsize * b.held[rank] for b in self.buffers) for rank in range(self.world_size)]
        total = sum(held)
        return max(held) * self.world_size / total - 1 if total else 0.0

    def __str__(self) -> str:
        """A picture of the layout in text, about 100 columns wide."""
        verdict = "proved minimal" if self.optimal else f"bound {self.lower_bound:,}"
        head = (
            f"{self.numel:,} elements over {self.world_size} rank{'s' if self.world_size > 1 else ''}: "
            f"{self.shard:,} per rank ({verdict}), padding {self.padding_fraction:.2%}"
        )
        lines = [head, *(f"  because {reason}" for reason in self.forced_by)]
        for number, buffer in enumerate(self.buffers):
            lines += ["", f"buffer {number}: {buffer.itemsize} bytes per element, {buffer.shard:,} elements per rank"]
            lines += drawn(buffer)
        return "\n".join(lines)

    def digest(self) -> str:
        """64 hexadecimal digits that differ wherever two layouts differ."""
        return hashlib.sha256(json.dumps([_buffer_json(b) for b in self.buffers]).encode()).hexdigest()

    def to_json(self) -> str:
        return json.dumps(
            {
                "version": 1,
                "world_size": self.world_size,
                "numel": self.numel,
                "padding": self.padding,
                "lower_bound": self.lower_bound,
                "optimal": self.optimal,
                "forced_by": list(self.forced_by),
                "buffers": [_buffer_json(buffer) for buffer in self.buffers],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> BucketPlan:
        """The plan that ``to_json`` wrote. Raises ``ValueError`` for anything else."""
        try:
            data = json.loads(text)
            if data["version"] != 1:
                raise ValueError(f"version {data['version']!r} of the plan format is not known, only 1")
            return cls(
                world_size=data["world_size"],
                buffers=tuple(_buffer_from_json(b, data["world_size"]) for b in data["buffers"]),
                numel=data["numel"],
                padding=data["padding"],
                lower_bound=data["lower_bound"],
                optimal=data["optimal"],
                forced_by=tuple(data["forced_by"]),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a BucketPlan in JSON: {error!r}") from None


LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
PICTURE_WIDTH = 96
PICTURE_ROWS = 24  # of the list of tensors


def drawn(buffer: BufferPlan) -> list[str]:
    """What lies where: one character for each stretch of the buffer, | between ranks, and a list of the tensors."""
    groups: list[list[int]] = []  # neighbours of one size and block are one entry
    for index in range(len(buffer.starts)):
        shape = (buffer.numels[index], buffer.blocks[index])
        if groups and shape == (buffer.numels[groups[-1][0]], buffer.blocks[groups[-1][0]]):
            groups[-1].append(index)
        else:
            groups.append([index])
    letters = {index: LETTERS[n % len(LETTERS)] for n, group in enumerate(groups) for index in group}
    lines = []
    if buffer.numel:
        ranks = min(buffer.world_size, PICTURE_WIDTH // 3)
        cells = PICTURE_WIDTH // ranks - 1
        picture = "|".join(_cells(buffer, rank, cells, letters) for rank in range(ranks))
        lines.append(
            f"  |{picture}|" + (f" ... {buffer.world_size - ranks} more ranks" if ranks < buffer.world_size else "")
        )
    rows = []
    for group in groups[:PICTURE_ROWS]:
        (name, start), (last, last_start) = buffer.starts[group[0]], buffer.starts[group[-1]]
        numel, block = buffer.numels[group[0]], buffer.blocks[group[0]]
        label = name if len(group) == 1 else f"{name} ... {last} ({len(group)})"
        first = buffer.owner(start)
        final = buffer.owner(max(start, last_start + numel - 1))
        where = f"rank {first}" if first == final else f"ranks {first}-{final}"
        rows.append((letters[group[0]], label, f"{numel:,}", f"{block:,}", where))
    if rows:
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        for letter, label, numel_text, block_text, where in rows:
            sizes = f"{numel_text:>{widths[2]}} in blocks of {block_text:>{widths[3]}}"
            lines.append(f"  {letter}  {label:{widths[1]}}  {sizes}  {where}")
    hidden = sum(map(len, groups[PICTURE_ROWS:]))
    if hidden:
        lines.append(f"     and {hidden} more tensors")
    return lines


def _cells(buffer: BufferPlan, rank: int, count: int, letters: Mapping[int, str]) -> str:
    """``count`` characters for what ``rank`` owns: the tensor in the middle of each stretch, . for padding."""
    lo, hi = buffer.owned(rank)
    positions = [start for _, start in buffer.starts]
    text = ""
    for cell in range(count):
        position = lo + (hi - lo) * (2 * cell + 1) // (2 * count)
        index = bisect_right(positions, position) - 1
        inside = hi > lo and index >= 0 and position < positions[index] + buffer.numels[index]
        text += letters[index] if inside else "."
    return text


@lru_cache(maxsize=64)
def even_cuts(world_size: int, shard: int) -> tuple[int, ...]:
    return tuple(range(0, world_size * shard + 1, shard)) if shard else (0,) * (world_size + 1)


def _buffer_json(buffer: BufferPlan) -> dict[str, Any]:
    return {
        "itemsize": buffer.itemsize,
        "shard": buffer.shard,
        "tensors": [
            [name, start, numel, block]
            for (name, start), numel, block in zip(buffer.starts, buffer.numels, buffer.blocks, strict=True)
        ],
        "cuts": "even" if buffer.is_padded else list(buffer.cuts),
        "world_size": buffer.world_size,
    }


def _buffer_from_json(data: dict[str, Any], world_size: int) -> BufferPlan:
    cuts, tensors = data["cuts"], data["tensors"]
    return BufferPlan(
        itemsize=data["itemsize"],
        shard=data["shard"],
        starts=tuple((name, start) for name, start, _, _ in tensors),
        numels=tuple(numel for _, _, numel, _ in tensors),
        cuts=even_cuts(world_size, data["shard"]) if cuts == "even" else tuple(cuts),
        blocks=tuple(block for _, _, _, block in tensors),
    )


def plan_bucket(
    specs: Sequence[TensorSpec],
    world_size: int,
    *,
    alignment_bytes: int = 128,
    max_buffers: int = 3,
    min_saving: float = 0.01,
    method: Method = "ours",
    ordinal: int = 0,
) -> BucketPlan:
    """Lay out the tensors of one bucket over ``world_size`` ranks.

    ``alignment_bytes``: every shard is a multiple of it. ``max_buffers``: how many buffers tensors of one itemsize
    may be split into, by block; more than one is used only if that saves at least ``min_saving`` of the tensors'
    elements. ``method``: "paper" is the heuristic of arXiv 2602.22437 in one buffer. ``ordinal``: which bucket of
    the model this is; padded plans do not depend on it.

    The plan does not depend on the order of ``specs``. Raises ``ValueError`` for parameters out of range and for a
    repeated name.
    """
    check_parameters(specs, world_size, max_buffers, min_saving, method)
    sizes = {spec.name: (spec.numel, spec.block) for spec in specs}
    empty: dict[int, list[str]] = {}
    for spec in specs:
        if not spec.numel:
            empty.setdefault(spec.itemsize, []).append(spec.name)
    buffers: list[BufferPlan] = []
    bounds: list[int] = []
    reasons: list[str] = []
    for problem in problems(specs, alignment_bytes):
        parts = [(problem, one_buffer(problem, world_size, method))]
        if method == "ours":
            parts = split(problem, world_size, parts[0][1], max_buffers, min_saving)
        for part, layout in parts:
            at_zero = sorted(empty.pop(problem.itemsize, ()))
            placed, laid = more_aligned(part, layout, world_size, sizes)
            if method == "ours":
                runs = keep_whole(placed.kinds, laid.runs, laid.shard, world_size)
                laid = replace(laid, runs=tuple(runs))
            buffers.append(build(placed, laid, world_size, sizes, at_zero))
            bounds.append(layout.lower_bound)
            reasons.extend(why(part, layout, world_size))
    return BucketPlan(
        world_size=world_size,
        buffers=tuple(buffers),
        numel=sum(sum(b.numels) for b in buffers),
        padding=sum(b.padding for b in buffers),
        lower_bound=sum(bounds),
        optimal=sum(bounds) == sum(b.shard for b in buffers),
        forced_by=tuple(reasons),
    )


def one_buffer(problem: Problem, world_size: int, method: Method) -> Layout:
    """The best layout in one buffer; never worse than the paper's heuristic, whose layout is a candidate.

    (Buckets of more than ``PAPER_TENSORS`` tensors, where that search costs more than ours, are the exception.)
    """
    layout = search(problem.kinds, world_size, problem.alignment)
    tensors = sum(kind.copies for kind in problem.kinds)
    if method == "ours" and (layout.shard == layout.lower_bound or tensors > PAPER_TENSORS):
        return layout
    pairs = ((natural(name), index) for index, names in enumerate(problem.names) for name in names)
    declared = tuple(index for _, index in sorted(pairs))
    paper = paper_search(problem.kinds, world_size, problem.alignment, declared)
    if method == "ours" and layout.shard <= paper[0]:
        return layout
    return replace(layout, shard=paper[0], runs=paper[1])


def split(
    problem: Problem, world_size: int, single: Layout, max_buffers: int, min_saving: float
) -> list[tuple[Problem, Layout]]:
    """The fewest buffers, by block, that save enough against one buffer: (tensors, layout) of each.

    A further buffer has to save ``min_saving`` of the tensors' elements. Of all groupings of the blocks into two,
    three, ... buffers those with the least sum of lower bounds are planned; ``min_saving=0`` plans more of them.
    """
    chosen = [(problem, single)]
    numel = sum(kind.numel * kind.copies for kind in problem.kinds)
    blocks = split_blocks(problem)
    # elements per rank that are worth a buffer, and that are worth going on for
    enough = max(1, ceil_div(int(min_saving * numel), world_size))
    close = enough // 10
    steps = SPLIT_STEPS if min_saving else 30 * SPLIT_STEPS
    floor = packing_bound(problem.kinds, world_size)  # of any buffers whatsoever

    def planned(groups: Sequence[tuple[int, ...]], work_limit: int) -> tuple[int, list[tuple[Problem, Layout]]]:
        parts = [select(problem, group) for group in groups]
        layouts = [search(part.kinds, world_size, problem.alignment, work_limit) for part in parts]
        nonlocal steps
        steps -= sum(layout.steps for layout in layouts)
        return sum(layout.shard for layout in layouts), list(zip(parts, layouts, strict=True))

    for count in range(2, min(max_buffers, len(blocks)) + 1):
        total = sum(layout.shard for _, layout in chosen)
        limit = total - enough  # what a candidate may have at most
        if limit < floor:
            break
        best: tuple[int, list[tuple[Problem, Layout]]] = limit + 1, []
        drafts = []
        # a short search for many groupings, a long one for the most promising
        for bound, groups in groupings(problem, world_size, blocks, count, limit)[:SPLITS_DRAFTED]:
            if bound >= best[0] - close or steps < 0:
                break
            draft = planned(groups, DRAFT_WORK_LIMIT)
            drafts.append((draft[0], bound, groups))
            best = min(best, draft, key=itemgetter(0))
        for size, bound, groups in sorted(drafts)[:SPLITS_PLANNED]:
            if bound < min(size, best[0] - close) and steps > 0:
                best = min(best, planned(groups, SPLIT_WORK_LIMIT), key=itemgetter(0))
        if best[0] <= limit:
            chosen = best[1]
    return chosen


def split_blocks(problem: Problem) -> list[tuple[int, ...]]:
    """The blocks that may go to different buffers: each its own, but for those with the fewest elements of many."""
    volume: dict[int, int] = {}
    for kind in problem.kinds:
        volume[kind.block] = volume.get(kind.block, 0) + kind.numel * kind.copies
    heavy = sorted(volume, key=lambda block: (-volume[block], -block))
    if len(heavy) <= SPLIT_BLOCKS:
        return [(block,) for block in sorted(heavy, reverse=True)]
    rest = tuple(sorted(heavy[SPLIT_BLOCKS - 1 :], reverse=True))
    return [*((block,) for block in sorted(heavy[: SPLIT_BLOCKS - 1], reverse=True)), rest]


def groupings(
    problem: Problem, world_size: int, blocks: Sequence[tuple[int, ...]], count: int, limit: int
) -> list[tuple[int, tuple[tuple[int, ...], ...]]]:
    """(sum of lower bounds, blocks of each buffer) for the ways to make ``count`` buffers with a sum of at most
    ``limit``, best first."""
    bounds: dict[tuple[int, ...], int] = {}
    found = []
    for parts in partitions(tuple(blocks), count):
        groups = tuple(tuple(chain.from_iterable(part)) for part in parts)
        bound = 0
        for group in groups:
            if group not in bounds:
                kinds = tuple([kind for kind in problem.kinds if kind.block in group])
                bounds[group] = tightest(kinds, world_size, problem.alignment).shard
            bound += bounds[group]
            if bound > limit:
                break
        else:
            found.append((bound, groups))
    return sorted(found)


@lru_cache(maxsize=64)
def partitions(items: tuple[tuple[int, ...], ...], count: int) -> tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]:
    """Every way to put ``items`` into ``count`` unordered groups, none empty."""
    if count == 1:
        return ((items,),)
    if len(items) < count:
        return ()
    first, rest = items[0], items[1:]
    alone = [((first,), *others) for others in partitions(rest, count - 1)]
    joined = [
        (*groups[:i], (first, *group), *groups[i + 1 :])
        for groups in partitions(rest, count)
        for i, group in enumerate(groups)
    ]
    return (*alone, *joined)


def select(problem: Problem, blocks: tuple[int, ...]) -> Problem:
    """The tensors of ``problem`` whose block is one of ``blocks``."""
    chosen = [i for i, kind in enumerate(problem.kinds) if kind.block in blocks]
    return replace(
        problem, kinds=tuple(problem.kinds[i] for i in chosen), names=tuple(problem.names[i] for i in chosen)
    )


def more_aligned(
    problem: Problem, layout: Layout, world_size: int, sizes: Mapping[str, tuple[int, int]]
) -> tuple[Problem, Layout]:
    """The same shard with starts at multiples of 16 bytes, or of 8, 4, ... bytes, if such a layout is found."""
    start = vector_elements(problem.itemsize, problem.alignment)
    if problem.start_alignment >= start or not layout.runs:
        return problem, layout
    raw: dict[tuple[int, int], list[str]] = {}
    for names in problem.names:
        for name in names:
            raw.setdefault(sizes[name], []).append(name)
    while start > problem.start_alignment:
        tidy = rounded(problem.itemsize, problem.alignment, start, raw)
        runs = fit(tidy.kinds, world_size, problem.alignment, layout.shard)
        if runs is not None:
            return tidy, replace(layout, runs=runs)
        start //= 2
    return problem, layout


def why(problem: Problem, layout: Layout, world_size: int) -> list[str]:
    """Sentences that say why the shard is larger than a fair share rounded up to the alignment; none if it is not."""
    kinds, target, step = problem.kinds, layout.target, layout.target.step
    numel = sum(kind.numel * kind.copies for kind in kinds)
    fair = -(-numel // world_size)
    if layout.shard <= round_up(fair, problem.alignment):
        return []
    sentences = []
    unit = target.witness and named(problem, lambda kind: kind.block == cast(Kind, target.witness).block)
    same = target.witness and named(problem, lambda kind: kind == target.witness)
    if target.why == "largest block":
        sentences.append(f"a block of {same} has {target.need:,} elements, a fair share of a rank only {fair:,}")
    elif target.why == "packing":
        sentences.append(
            f"the blocks of {unit} do not spread evenly over {world_size} ranks: one holds {target.need:,} elements"
        )
    elif target.why == "threshold":
        sentences.append(
            f"{same} can be cut only once unless the block divides the shard, so a shard must hold "
            f"the larger part, {target.need:,} elements"
        )
    elif target.why == "chain":
        sentences.append(
            f"{same} are longer than a shard and sit on a boundary each, which takes {target.need:,} elements"
        )
    if target.shard > round_up(target.need, problem.alignment):
        blocks = [named(problem, partial(spans, block, target.need)) for block in target.forced]
        sentences.append(f"shard forced to a multiple of {step:,} by {' and '.join(blocks)}, longer than a shard")
    if layout.lower_bound > target.shard:
        sentences.append(f"no order of the tensors fits a shard below {layout.lower_bound:,}: all were tried")
    if layout.shard > layout.lower_bound:
        sentences.append(
            f"no layout was found between the bound, {layout.lower_bound:,}, and {layout.shard:,} elements"
        )
    return sentences


def spans(block: int, shard: int, kind: Kind) -> bool:
    return kind.block == block and kind.numel > shard


def named(problem: Problem, wanted: Callable[[Kind], bool]) -> str:
    """The tensors of the wanted kinds, in few words."""
    names = [name for kind, group in zip(problem.kinds, problem.names, strict=True) if wanted(kind) for name in group]
    short = names if len(names) <= 3 else [names[0], names[1], f"{len(names) - 2} more"]
    return short[0] if len(short) == 1 else f"{', '.join(short[:-1])} and {short[-1]}"


def check_parameters(
    specs: Sequence[TensorSpec], world_size: int, max_buffers: int, min_saving: float, method: str
) -> None:
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size must be an integer of at least 1, got {world_size!r}")
    if isinstance(max_buffers, bool) or not isinstance(max_buffers, int) or max_buffers < 1:
        raise ValueError(f"max_buffers must be an integer of at least 1, got {max_buffers!r}")
    if not min_saving >= 0:
        raise ValueError(f"min_saving is a fraction of the bucket and must be at least 0, got {min_saving!r}")
    if method not in ("ours", "paper"):
        raise ValueError(f"method must be 'ours' or 'paper', got {method!r}")
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise ValueError(f"two tensors of the bucket are named {spec.name!r}; names must be unique")
        seen.add(spec.name)


def build(
    problem: Problem, layout: Layout, world_size: int, sizes: dict[str, tuple[int, int]], empty: Sequence[str]
) -> BufferPlan:
    """Give the tensors of each kind, in natural order, the places that the layout has for the kind. Empty ones go
    first."""
    names = [iter(group) for group in problem.names]
    starts = [(name, 0) for name in empty]
    for kind, start, count in sorted(layout.runs, key=lambda run: run[1]):
        numel = problem.kinds[kind].numel
        starts.extend((next(names[kind]), start + i * numel) for i in range(count))
    return BufferPlan(
        itemsize=problem.itemsize,
        shard=layout.shard,
        starts=tuple(starts),
        numels=tuple(sizes[name][0] for name, _ in starts),
        cuts=even_cuts(world_size, layout.shard),
        blocks=tuple(sizes[name][1] for name, _ in starts),
    )


def plan_model(
    buckets: Sequence[Sequence[TensorSpec]],
    world_size: int,
    *,
    alignment_bytes: int = 128,
    max_buffers: int = 3,
    min_saving: float = 0.01,
    method: Method = "ours",
) -> list[BucketPlan]:
    """``plan_bucket`` for every bucket of a model; equal buckets are planned once."""
    plans: dict[tuple[TensorSpec, ...], BucketPlan] = {}
    same: dict[int, BucketPlan] = {}  # the very same object again: no need to compare a thousand tensors
    for ordinal, bucket in enumerate(buckets):
        if id(bucket) in same:
            continue
        key = tuple(bucket)
        if key not in plans:
            plans[key] = plan_bucket(
                bucket,
                world_size,
                alignment_bytes=alignment_bytes,
                max_buffers=max_buffers,
                min_saving=min_saving,
                method=method,
                ordinal=ordinal,
            )
        same[id(bucket)] = plans[key]
    return [same[id(bucket)] for bucket in buckets]


def validate(plan: BucketPlan, specs: Sequence[TensorSpec], *, alignment_bytes: int = 128) -> None:
    """Check a plan against the definition, element by element where it matters, sharing nothing with the planner.

    Raises ``ValueError`` that names the tensor, the rank or the buffer. Every tensor of ``specs`` lies in exactly
    one buffer of its itemsize, inside it, apart from the others; shards are multiples of the alignment; the owned
    intervals cover each buffer in rank order, meet their chunks, and no cut splits a block.
    """
    wanted = {spec.name: spec for spec in specs}
    if len(wanted) != len(specs):
        raise ValueError("two tensors have the same name")
    seen: set[str] = set()
    for number, buffer in enumerate(plan.buffers):
        ranks = plan.world_size
        if buffer.shard * buffer.itemsize % alignment_bytes:
            raise ValueError(
                f"buffer {number}: {buffer.shard * buffer.itemsize} bytes are not aligned to {alignment_bytes}"
            )
        if len(buffer.cuts) != ranks + 1 or buffer.cuts[0] != 0 or buffer.cuts[-1] != ranks * buffer.shard:
            raise ValueError(f"buffer {number}: the cuts do not cover {ranks} shards of {buffer.shard}")
        for rank in range(ranks):
            lo, hi = buffer.cuts[rank], buffer.cuts[rank + 1]
            if hi < lo:
                raise ValueError(f"buffer {number}: rank {rank} owns [{lo}, {hi})")
            if lo < hi and not max(lo, rank * buffer.shard) < min(hi, (rank + 1) * buffer.shard):
                raise ValueError(f"buffer {number}: rank {rank} owns [{lo}, {hi}) and nothing of its own chunk")
        end = 0
        for (name, start), numel, block in zip(buffer.starts, buffer.numels, buffer.blocks, strict=True):
            spec = wanted.get(name)
            if spec is None or name in seen:
                raise ValueError(
                    f"buffer {number}: tensor {name!r} is {'there twice' if spec else 'not in the bucket'}"
                )
            seen.add(name)
            if (numel, block, buffer.itemsize) != (spec.numel, spec.block, spec.itemsize):
                raise ValueError(
                    f"buffer {number}: {spec} lies there as {numel} elements of {buffer.itemsize} bytes, block {block}"
                )
            if start < end or start + numel > ranks * buffer.shard:
                raise ValueError(f"buffer {number}: {name!r} at {start} overlaps the tensor before it, or the end")
            end = start + numel
            for cut in buffer.cuts[bisect_right(buffer.cuts, start) : bisect_left(buffer.cuts, end)]:
                if (cut - start) % block:
                    raise ValueError(
                        f"buffer {number}: the cut at {cut} splits a block of {name!r} (at {start}, block {block})"
                    )
    if missing := wanted.keys() - seen:
        raise ValueError(f"not in the plan: {', '.join(sorted(missing))}")
