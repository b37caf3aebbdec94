"""What each rank of a mesh should hold, by plain indexing on one process; shares no code with the package."""

from __future__ import annotations

import itertools
import math
import random

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

from ragged_shard import RaggedShard

MESHES = ((1,), (2,), (3,), (4,), (2, 2))


def held(full: Tensor, mesh_shape, coordinate, placements) -> Tensor:
    """The local tensor of the rank at ``coordinate``: chunks first, in mesh order, then the ragged cut of what is
    left."""
    left, ragged = full, None
    for size, index, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if isinstance(placement, RaggedShard):
            ragged = placement, index
        elif isinstance(placement, Shard):
            pieces = left.chunk(size, placement.dim)
            left = pieces[index] if index < len(pieces) else left.narrow(placement.dim, 0, 0)
    if ragged is None:
        return left.contiguous()
    placement, index = ragged
    k, units = len(placement.dims), placement.local_units
    suffix = left.shape[k:]
    prefix = math.prod(left.shape[:k])
    rows = left.reshape(prefix, *suffix)
    per_unit = prefix // sum(units)
    start = per_unit * sum(units[:index])
    return rows[start : start + per_unit * units[index]].contiguous()


def coordinates(mesh_shape):
    return list(itertools.product(*map(range, mesh_shape)))


def addend(full: Tensor, mesh_shape, coordinate, placements) -> Tensor:
    """What a rank holds when some dims are Partial: an own multiple of the values per Partial coordinate."""
    factor = 1
    for index, placement in zip(coordinate, placements, strict=True):
        if isinstance(placement, Partial):
            factor = factor * 3 + index
    plain = [Replicate() if isinstance(p, Partial) else p for p in placements]
    return held(full, mesh_shape, coordinate, plain) * factor


def reduced(full: Tensor, mesh_shape, placements) -> Tensor:
    """The global value of the addends of ``addend``."""
    plain = [Replicate()] * len(mesh_shape)
    terms, operation = [], "sum"
    partial = [i for i, p in enumerate(placements) if isinstance(p, Partial)]
    for choice in itertools.product(*(range(mesh_shape[i]) for i in partial)):
        coordinate = [0] * len(mesh_shape)
        for i, index in zip(partial, choice, strict=True):
            coordinate[i] = index
        masked = [p if isinstance(p, Partial) else q for p, q in zip(placements, plain, strict=True)]
        terms.append(addend(full, mesh_shape, coordinate, masked))
    for i in partial:
        operation = placements[i].reduce_op
    stacked = torch.stack(terms)
    if operation == "avg":
        return stacked.sum(0) / len(terms) if full.is_floating_point() else stacked.sum(0) // len(terms)
    return {"sum": stacked.sum, "max": stacked.amax, "min": stacked.amin}[operation](0).to(full.dtype)


def missing_elements(shape, mesh_shape, coordinate, before, after) -> int:
    """Elements that the rank holds after and not before, counted one by one; Partial dims that are reduced count
    each addend."""
    index = torch.arange(max(1, math.prod(shape))).reshape(shape) if math.prod(shape) else torch.empty(shape)
    wanted = held(index, mesh_shape, coordinate, after).reshape(-1).tolist()
    others = 1
    for size, p, q in zip(mesh_shape, before, after, strict=True):
        if isinstance(p, Partial) and not isinstance(q, Partial):
            others *= size
    plain = [Replicate() if isinstance(p, Partial) else p for p in before]
    have = set(held(index, mesh_shape, coordinate, plain).reshape(-1).tolist())
    own = sum(element in have for element in wanted)
    return len(wanted) * others - own


def shapes(rng: random.Random) -> tuple[int, ...]:
    """Small shapes with zeros, ones and primes among their sizes."""
    sizes = (1, 2, 3, 4, 5, 6, 7, 8, 12, 13)
    shape = [rng.choice(sizes) for _ in range(rng.choice((1, 1, 2, 2, 2, 3, 3, 4)))]
    if rng.random() < 0.06:
        shape[rng.randrange(len(shape))] = 0
    return tuple(shape)


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def units(rng: random.Random, total: int, ranks: int) -> tuple[int, ...]:
    """``total`` units over ``ranks``, often with empty ranks."""
    cuts = sorted(rng.randint(0, total) for _ in range(ranks - 1))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True))


def placements(rng: random.Random, shape, mesh_shape, partial: tuple[str, ...] = ()) -> tuple:
    """Random placements that are valid for a tensor of ``shape``: at most one RaggedShard, one kind of ``partial``."""
    kind = rng.choice(partial or ("",))
    chosen = []
    for _ in mesh_shape:
        roll = rng.random()
        if partial and roll < 0.5:
            chosen.append(Partial(kind))
        elif roll < 0.6:
            chosen.append(Shard(rng.randrange(len(shape))))
        else:
            chosen.append(Replicate())
    if rng.random() < 0.75:
        mesh_dim = rng.randrange(len(mesh_shape))
        chosen[mesh_dim] = Replicate()
        left = {
            tuple(held(torch.empty(shape, device="meta"), mesh_shape, c, chosen).shape) for c in coordinates(mesh_shape)
        }
        k = rng.randint(0, len(shape))
        if k == 0:
            chosen[mesh_dim] = RaggedShard.one_hot(rng.randrange(mesh_shape[mesh_dim]), mesh_shape[mesh_dim], ())
        else:
            common = math.gcd(*(math.prod(sizes[:k]) for sizes in left))
            total = rng.choice(divisors(common)) if common else rng.randint(1, 9)
            chosen[mesh_dim] = RaggedShard(tuple(range(k)), units(rng, total, mesh_shape[mesh_dim]))
    return tuple(chosen)
