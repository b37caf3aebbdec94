"""A certified lower bound on the shard of one even flat buffer.

The problem: tensors lie one after another, gaps allowed, in a buffer of ``m`` equal shards of S elements; S is a
multiple of the alignment, and no shard boundary cuts a block. How small can S be?

    |<------ S ------>|<------ S ------>|<------ S ------>|
    [ a a a a | b b b b b b b b | b b b b | gap | c c c c ]      boundaries in b stand on block ends

Everything here is integer arithmetic over *kinds* of tensors, ``(numel, block, copies)``, so a layer of 1,152 expert
matrices costs no more than its two shapes. The facts used:

* **Two boundaries force the block.** If two neighbouring boundaries lie strictly inside a tensor, both stand a
  whole number of blocks from its start, so the block divides S.
* **Threshold.** With at most one boundary inside, the tensor is a head of whole blocks, at most S, and a tail, at
  most S: S + g * floor(S / g) >= numel. Let h be the least such S. Below h the block must divide S.
* **Blocks are items.** Every block lies in one shard, and a shard holds floor(S / d) units of d elements for any d.
* **Chains.** A tensor longer than S whose block does not divide S sits on exactly one boundary, its own. j of them on
  consecutive boundaries fill j + 1 shards, and separate chains use separate shards.

Nothing is known of which blocks divide the best S, so every set D of blocks that could be forced is assumed in
turn: S_D is the least multiple of lcm(alignment, D) that satisfies all of the above for the tensors outside D. The
bound is the least S_D, and the S_D are where the planner looks first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ragged_shard.planner import TensorSpec

__all__ = ["Kind", "Problem", "Target", "lower_bound", "packing_bound", "problems", "targets", "tightest"]

NUMBER = re.compile("([0-9]+)")
VECTOR_BYTES = 16  # starts of tensors: what vectorised kernels and TMA descriptors ask for

MAX_FORCED_BLOCKS = 8  # 2**8 sets of blocks; the blocks of the longest tensors are kept, which only weakens the bound


class Kind(NamedTuple):
    """``copies`` equal tensors of ``numel >= 1`` elements whose blocks have ``1 <= block <= numel`` elements."""

    numel: int
    block: int
    copies: int


class Target(NamedTuple):
    """The least shard if exactly the blocks ``forced`` are assumed to divide it.

    ``shard`` is a multiple of ``step = lcm(alignment, *forced)``; ``need`` is what the strongest fact asks before
    rounding up to the step, and ``why`` names that fact: "average", "largest block", "packing", "threshold" or
    "chain". ``witness`` is the kind of tensor (or, for packing, the unit d) that the fact is about.
    """

    shard: int
    step: int
    forced: tuple[int, ...]
    need: int
    why: str
    witness: Kind | None


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(a: int, step: int) -> int:
    return -(-a // step) * step


@lru_cache(maxsize=4096)
def threshold(numel: int, block: int) -> int:
    """The least S with ``S + block * floor(S / block) >= numel``: room for one boundary inside, on a block end."""
    whole = max(1, ceil_div(numel + 1 - block, 2 * block))
    return max(whole * block, numel - whole * block)


def packing_bound(kinds: Sequence[Kind], world_size: int) -> int:
    """A bound on the largest number of elements that any rank *owns*, whatever the layout, if no block is cut.

    It holds for uneven shards, permuted blocks and tensors in several pieces too. ``kinds`` may be empty (0).
    """
    return _packing(kinds, world_size, 1)[0]


def _packing(kinds: Sequence[Kind], world_size: int, alignment: int) -> tuple[int, str, Kind | None]:
    total = 0
    blocks: dict[int, Kind] = {}
    for kind in kinds:
        total += kind.numel * kind.copies
        if alignment % kind.block:  # the others say no more than the average, rounded up to the alignment
            blocks[kind.block] = max(kind, blocks.get(kind.block, kind))
    need, why, witness = ceil_div(total, world_size), "average", None
    largest = max(blocks, default=0)
    if largest > need:
        need, why, witness = largest, "largest block", blocks[largest]
    for unit in sorted(blocks):
        units = 0
        for numel, block, copies in kinds:
            if block >= unit:
                units += copies * (numel // block * (block // unit) + numel % block // unit)
        least = unit * ceil_div(units, world_size)
        if least > need:
            need, why, witness = least, "packing", blocks[unit]
    return need, why, witness


def _chain(longer: int, numel: int, world_size: int) -> int:
    """The least S for ``longer`` tensors of at least ``numel`` elements, none of whose blocks divides S."""
    if longer >= world_size:
        return numel
    in_a_row = ceil_div(longer, world_size - longer)
    return ceil_div(in_a_row * numel, in_a_row + 1)


@lru_cache(maxsize=4096)
def tightest(kinds: tuple[Kind, ...], world_size: int, alignment: int) -> Target:
    """The target with the least shard, which is the lower bound. ``alignment``: elements the shard is a multiple of."""
    return min(_targets(kinds, world_size, alignment, prune=True))


def targets(kinds: Sequence[Kind], world_size: int, alignment: int) -> list[Target]:
    """One ``Target`` for each set of blocks that could be forced, least shard first; never empty."""
    return sorted(_targets(kinds, world_size, alignment, prune=False))


def _targets(kinds: Sequence[Kind], world_size: int, alignment: int, *, prune: bool) -> list[Target]:
    """``prune`` leaves out targets that cannot be the least."""
    base = _packing(kinds, world_size, alignment)
    floor = base[0]
    # only a tensor longer than the shard can force anything, and no shard is shorter than the floor
    long = [(-kind[0], kind[1], kind) for kind in kinds if kind[0] > floor and alignment % kind[1]]
    if not long:
        return [Target(round_up(floor, alignment), alignment, (), *base)]
    long.sort()
    blocks = list(dict.fromkeys([block for _, block, _ in long]))[:MAX_FORCED_BLOCKS]
    ranked = [(kind, threshold(kind[0], kind[1])) for _, block, kind in long if block in blocks]
    found = [_target(ranked, base, world_size, alignment, ())]
    least = found[0].shard
    # equal multiples are one case: the fewest blocks that explain it
    steps: dict[int, tuple[int, ...]] = {alignment: ()}
    for block in blocks:
        for step, forced in list(steps.items()):
            longer = math.lcm(step, block)
            if longer not in steps and not (prune and round_up(floor, longer) >= least):
                steps[longer] = (*forced, block)
                found.append(_target(ranked, base, world_size, longer, steps[longer]))
                least = min(least, found[-1].shard)
    return found


def _target(
    ranked: Sequence[tuple[Kind, int]],
    base: tuple[int, str, Kind | None],
    world_size: int,
    step: int,
    forced: tuple[int, ...],
) -> Target:
    """``ranked``: (kind, threshold) of the kinds that could force something, longest first."""
    need, why, witness = base
    longer = 0
    for kind, least in ranked:
        numel, block, copies = kind
        if numel <= need:
            break
        if step % block:
            longer += copies
            if least > need:
                need, why, witness = least, "threshold", kind
            # a chain of the tensors of at least this size: no tighter in the middle of equal sizes than at their end
            least = _chain(longer, numel, world_size)
            if least > need:
                need, why, witness = least, "chain", kind
    return Target(round_up(need, step), step, forced, need, why, witness)


@dataclass(frozen=True)
class Problem:
    """One buffer to lay out: the tensors of one itemsize as kinds, and what starts and shards are multiples of.

    ``alignment``: elements that the shard is a multiple of. ``start_alignment``: elements that every start may be a
    multiple of without making any buffer larger (1 if nothing can be promised); the kinds are rounded up to it
    already. ``names``: for each kind, the tensors it stands for, in natural order. Tensors without elements are in
    no kind.
    """

    itemsize: int
    alignment: int
    start_alignment: int
    kinds: tuple[Kind, ...]
    names: tuple[tuple[str, ...], ...]


def natural(name: str) -> list[Any]:
    """Sorts ``experts.10`` after ``experts.9``."""
    parts: list[Any] = NUMBER.split(name)
    parts[1::2] = map(int, parts[1::2])
    parts.append(name)
    return parts


def problems(specs: Iterable[TensorSpec], alignment_bytes: int = 128) -> list[Problem]:
    """The buffers that ``specs`` need at least: one for each itemsize, smallest first.

    Raises ``ValueError`` for an alignment that is no positive multiple of an itemsize.
    """
    by_itemsize: dict[int, dict[tuple[int, int], list[str]]] = {}
    for spec in specs:
        kinds = by_itemsize.setdefault(spec.itemsize, {})
        if spec.numel:
            kinds.setdefault((spec.numel, spec.block), []).append(spec.name)
    found = []
    for itemsize, raw in sorted(by_itemsize.items()):
        if alignment_bytes < 1 or alignment_bytes % itemsize:
            raise ValueError(
                f"alignment_bytes={alignment_bytes} is no positive multiple of the element size, {itemsize} bytes; "
                f"use a multiple such as {max(1, 128 // itemsize) * itemsize}"
            )
        alignment = alignment_bytes // itemsize
        start = vector_elements(itemsize, alignment)
        # If numels are multiples of the start alignment, and blocks are multiples or divisors of it, then rounding
        # every start of any layout down to a multiple keeps it valid: aligned starts cost nothing.
        if any(numel % start or (block % start and start % block) for numel, block in raw):
            start = 1
        found.append(rounded(itemsize, alignment, start, raw))
    return found


def vector_elements(itemsize: int, alignment: int) -> int:
    """Elements that starts should be multiples of, given that shards are multiples of ``alignment``."""
    return math.gcd(alignment, VECTOR_BYTES // itemsize) if VECTOR_BYTES % itemsize == 0 else 1


def rounded(itemsize: int, alignment: int, start: int, raw: Mapping[tuple[int, int], Sequence[str]]) -> Problem:
    """The problem with all starts at multiples of ``start``. ``raw``: (numel, block) -> names."""
    merged: dict[Kind, list[str]] = {}
    for (numel, block), names in raw.items():
        size = round_up(numel, start)
        merged.setdefault(Kind(size, min(size, math.lcm(block, start)), 0), []).extend(names)
    ordered = sorted(merged.items(), reverse=True)
    return Problem(
        itemsize,
        alignment,
        start,
        tuple(kind._replace(copies=len(names)) for kind, names in ordered),
        tuple(tuple(names if len(names) == 1 else sorted(names, key=natural)) for _, names in ordered),
    )


def lower_bound(specs: Iterable[TensorSpec], world_size: int, *, alignment_bytes: int = 128) -> int:
    """Elements per rank below which no even buffer of these tensors exists.

    One buffer per itemsize, so with several itemsizes it is the sum of their bounds. Raises ``ValueError`` for a
    world size below 1 and for an alignment that is no multiple of an itemsize.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    return sum(tightest(p.kinds, world_size, p.alignment).shard for p in problems(specs, alignment_bytes))
