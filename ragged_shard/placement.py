"""RaggedShard: a DTensor placement that cuts a tensor into unequal, possibly empty, contiguous pieces.

``RaggedShard(dims, local_units)`` flattens the leading ``dims`` of a tensor, cuts that prefix into
``sum(local_units)`` equal units and gives rank k of the mesh dim ``local_units[k]`` consecutive ones::

    tensor [6, 4], dims (0,), units (1, 2, 0, 3)        one unit = one row

      row 0   rank 0        local [1, 4]
      row 1   rank 1        local [2, 4]
      row 2   rank 1
              rank 2        local [0, 4]
      row 3   rank 3        local [3, 4]
      row 4   rank 3
      row 5   rank 3

With ``dims == (0, 1)`` the same tensor is cut into 24 elements and a rank may hold a row and a half.

A RaggedShard is *always applied last*: it splits the contiguous tensor that the other placements of a spec leave,
whatever its position in the mesh. A spec holds one at most. The local tensor has one canonical shape,
``[n_k, *shape[len(dims):]]``, because the C++ side of DTensor never compares local shapes, and ``[n]`` beside ``[n,
1]`` would silently broadcast to ``[n, n]``.

This file is the definition and its arithmetic; importing it also installs the hooks of ``install.py``, since stock
DTensor would relabel a Replicate tensor as ragged without moving anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NoReturn, cast

import torch
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from ragged_shard.compile_cache import cache_key

__all__ = [
    "Box",
    "RaggedShard",
    "Region",
    "check_placements",
    "check_tensor",
    "contiguous_stride",
    "range_boxes",
    "region_of",
]

Shape = tuple[int, ...]
_LARGEST = 2**63 - 1


class RaggedShard(Placement):
    """Consecutive units of the flattened leading dims; ``local_units[k]`` of them on rank k of the mesh dim.

    ``dims``: ``tuple(range(k))``. ``k == 0`` means a single unit, the whole tensor (0-d tensors, a tensor on one rank);
    exactly one rank then holds it. ``local_units``: one non-negative int per rank, not all zero; stored divided by
    their greatest common divisor, so equal layouts compare and hash equal.

    Raises ``TypeError`` for what is no int, ``ValueError`` for dims that are no prefix and for units that name no
    layout.
    """

    dims: Shape
    local_units: Shape

    def __init__(self, dims: Sequence[int], local_units: Sequence[int]) -> None:
        # The pybind11 base must be initialised, or its first method call is a segmentation fault.
        super().__init__()
        dims, units = _integers("dims", dims), _integers("local_units", local_units)
        if dims != tuple(range(len(dims))):
            raise ValueError(
                "RaggedShard flattens leading dims: dims must be (0,), (0, 1), ... or () for the whole tensor, "
                f"got {dims}"
            )
        if not units or any(u < 0 for u in units) or not any(units):
            raise ValueError(
                "RaggedShard: local_units must hold one non-negative count per rank of the mesh dim, with at "
                "least one "
                f"unit in all, got {units}"
            )
        if sum(units) > _LARGEST:
            raise ValueError(f"RaggedShard: local_units sum to {sum(units)}, which overflows a 64-bit size")
        if not dims and sum(map(bool, units)) != 1:
            raise ValueError(
                "RaggedShard: dims=() makes the whole tensor one unit, so exactly one rank can hold it, got "
                f"units {units}; "
                f"use dims=(0,) to cut rows"
            )
        divisor = math.gcd(*units)
        units = tuple(u // divisor for u in units)
        starts = tuple(accumulate(units, initial=0))
        for name, value in (
            ("dims", dims),
            ("local_units", units),
            ("_starts", starts),
            ("_hash", hash((dims, units))),
        ):
            object.__setattr__(self, name, value)

    @classmethod
    def one_hot(cls, root: int, world_size: int, dims: Sequence[int] = (0,)) -> RaggedShard:
        """Everything on rank ``root`` of ``world_size``."""
        if not 0 <= root < world_size:
            raise ValueError(f"RaggedShard.one_hot: root {root} is not a rank of a mesh dim of size {world_size}")
        return cls(dims, tuple(int(rank == root) for rank in range(world_size)))

    @property
    def total_units(self) -> int:
        return self._starts[-1]

    def unit_count(self, shape: Sequence[int]) -> int:
        """Elements of the flattened prefix of ``shape`` in one unit. Raises ``ValueError`` when units do not divide
        it."""
        if len(shape) < len(self.dims):
            raise ValueError(f"{self!r} flattens {len(self.dims)} leading dims, but the tensor is {len(shape)}-d")
        prefix = math.prod(shape[: len(self.dims)])
        if prefix % self.total_units:
            raise ValueError(
                f"{self!r}: its {self.total_units} units do not divide the {prefix} leading entries (dims "
                f"{self.dims}) of "
                f"a tensor of shape {tuple(shape)}; choose units whose sum divides {prefix}, or flatten more dims"
            )
        return prefix // self.total_units

    def local_shape(self, shape: Sequence[int], rank: int) -> Shape:
        """The canonical local shape on ``rank``; ``shape`` is what the other placements of the spec leave."""
        return (self.local_units[rank] * self.unit_count(shape), *shape[len(self.dims) :])

    def flat_range(self, shape: Sequence[int], rank: int) -> tuple[int, int]:
        """``(start, stop)``: the elements of the flattened tensor of ``shape`` that ``rank`` holds."""
        unit = self.unit_count(shape) * math.prod(shape[len(self.dims) :])
        return self._starts[rank] * unit, self._starts[rank + 1] * unit

    # ---- identity ----

    _starts: Shape
    _hash: int

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"RaggedShard is immutable; make a new one to change {name}")

    def __eq__(self, other: object) -> bool:
        # type(...) is: Python asks a subclass's reflected method first, and our markers are subclasses.
        if type(other) is not type(self):
            return False
        return self is other or (
            self._hash == other._hash and self.local_units == other.local_units and self.dims == other.dims
        )

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.dims, self.local_units)

    def __copy__(self) -> RaggedShard:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> RaggedShard:
        return self

    def __repr__(self) -> str:
        return f"RaggedShard(dims={self.dims}, local_units={self.local_units})"

    def __str__(self) -> str:
        units = ",".join(map(str, self.local_units)) if len(self.local_units) <= 8 else f"{len(self.local_units)} ranks"
        return f"Ragged(dims {','.join(map(str, self.dims)) or 'none'}: {units})"

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        # The text of a graph is part of the key of torch's compile caches.
        name = type(self).__name__
        return f"{name}._in_graph({cache_key()!r}, {self.dims!r}, {self.local_units!r})", {name: type(self)}

    @classmethod
    def _in_graph(cls, cache_key: str, dims: Sequence[int], local_units: Sequence[int]) -> RaggedShard:
        return cls(dims, local_units)


def _integers(name: str, values: Sequence[int]) -> Shape:
    try:
        given = tuple(values)
    except TypeError:
        raise TypeError(f"RaggedShard: {name} must be a tuple of ints, got {values!r}") from None
    for value in given:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"RaggedShard: {name} must be a tuple of ints, got {given!r}")
    return given


# ---- geometry of a whole spec ----


@dataclass(frozen=True)
class Box:
    """A rectangle of a tensor: ``offsets`` and ``sizes`` in elements, and where it starts in the flattened local
    tensor."""

    offsets: Shape
    sizes: Shape
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


def range_boxes(sizes: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    """The flat range ``[start, stop)`` of a contiguous tensor of ``sizes`` as ``(offsets, sizes)`` rectangles, in
    order.

    At most ``2 * len(sizes) - 1`` of them: a partial head and tail per dim and one body. ::

        . . . x x      head
        x x x x x      body
        x x x x x
        x . . . .      tail
    """
    if start >= stop:
        return
    if not sizes:
        yield (), ()
        return
    row = math.prod(sizes[1:])
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if first == last:
        for offsets, inner in range_boxes(sizes[1:], head, tail):
            yield (first, *offsets), (1, *inner)
        return
    if head:
        for offsets, inner in range_boxes(sizes[1:], head, row):
            yield (first, *offsets), (1, *inner)
        first += 1
    if last > first:
        yield (first, *(0 for _ in sizes[1:])), (last - first, *sizes[1:])
    if tail:
        for offsets, inner in range_boxes(sizes[1:], 0, tail):
            yield (last, *offsets), (1, *inner)


@dataclass(frozen=True)
class Region:
    """What one rank holds: the flat range ``[start, stop)`` of the box ``offsets``, ``sizes`` of the global tensor.

    Without a RaggedShard the range is the whole box. ``local_shape`` is the shape of the local tensor.
    """

    offsets: Shape
    sizes: Shape
    start: int
    stop: int
    local_shape: Shape

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def boxes(self) -> tuple[Box, ...]:
        """The rectangles of the global tensor that make up the region, in the order of the local tensor."""
        found, start = [], 0
        for offsets, sizes in range_boxes(self.sizes, self.start, self.stop):
            box = Box(tuple(map(int.__add__, self.offsets, offsets)), sizes, start)
            found.append(box)
            start += box.numel
        return tuple(found)


def region_of(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> Region:
    """The region of a tensor of ``shape`` that the rank at ``coordinate`` of the mesh holds.

    Shards apply from left to right, each as torch.chunk does; the RaggedShard applies to what they leave.
    """
    offsets, sizes = [0] * len(shape), list(shape)
    ragged: tuple[RaggedShard, int] | None = None
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, RaggedShard):
            ragged = placement, coordinate[mesh_dim]
        elif isinstance(placement, Shard):
            chunk = -(-sizes[placement.dim] // mesh_shape[mesh_dim])
            start = min(chunk * coordinate[mesh_dim], sizes[placement.dim])
            offsets[placement.dim] += start
            sizes[placement.dim] = min(chunk, sizes[placement.dim] - start)
        elif not isinstance(placement, (Replicate, Partial)):
            raise NotImplementedError(
                f"{placement!r} cannot stand beside a RaggedShard; redistribute it to Shard or Replicate first"
            )
    base = tuple(sizes)
    if ragged is None:
        return Region(tuple(offsets), base, 0, math.prod(base), base)
    placement, rank = ragged
    start, stop = placement.flat_range(base, rank)
    return Region(tuple(offsets), base, start, stop, placement.local_shape(base, rank))


def contiguous_stride(shape: Sequence[int]) -> Shape:
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def has_ragged(placements: Sequence[Placement]) -> bool:
    return any(isinstance(placement, RaggedShard) for placement in placements)


def check_placements(shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Placement]) -> None:
    """Raise ``ValueError`` unless ``placements`` describe a tensor of ``shape`` on *every* rank of a mesh of
    ``mesh_shape``.

    Only what is the same on all ranks is looked at, so all of them raise the same error, before any communication.
    """
    if len(placements) != len(mesh_shape):
        raise ValueError(
            f"placements {tuple(placements)} name {len(placements)} mesh dims, the mesh has {len(mesh_shape)}"
        )
    ragged_dims = [dim for dim, placement in enumerate(placements) if isinstance(placement, RaggedShard)]
    if not ragged_dims:
        return
    if len(ragged_dims) > 1:
        raise ValueError(
            f"placements {tuple(placements)} hold {len(ragged_dims)} RaggedShards; one spec can hold one, "
            "because it splits "
            f"what all other placements leave. Use Replicate or Shard on the other mesh dims"
        )
    mesh_dim = ragged_dims[0]
    ragged = cast(RaggedShard, placements[mesh_dim])
    if len(ragged.local_units) != mesh_shape[mesh_dim]:
        raise ValueError(
            f"{ragged!r} describes {len(ragged.local_units)} ranks, but mesh dim {mesh_dim} has {mesh_shape[mesh_dim]}"
        )
    if math.prod(shape) > _LARGEST:
        raise ValueError(f"a tensor of shape {tuple(shape)} overflows a 64-bit number of elements")
    # The sizes of a Shard's chunks differ between coordinates, so look at every tensor that the others can leave.
    left = {tuple(shape)}
    for dim, placement in enumerate(placements):
        if not isinstance(placement, Shard):
            continue
        if not 0 <= placement.dim < len(shape):
            raise ValueError(f"{placement!r} names a dim that a tensor of shape {tuple(shape)} does not have")
        left = {
            tuple(size if d != placement.dim else piece for d, size in enumerate(sizes))
            for sizes in left
            for piece in _chunks(sizes[placement.dim], mesh_shape[dim])
        }
    for sizes in sorted(left):
        ragged.unit_count(sizes)


def _chunks(size: int, count: int) -> set[int]:
    chunk = -(-size // count)
    return {max(0, min(chunk, size - chunk * index)) for index in range(count)}


def check_tensor(tensor: torch.Tensor, what: str) -> None:
    """Raise ``TypeError`` for a tensor that cannot be cut into flat ranges: sparse, complex, quantized."""
    if tensor.layout != torch.strided:
        raise TypeError(
            f"{what}: a RaggedShard holds a dense tensor, got layout {tensor.layout}; call to_dense() first"
        )
    if tensor.is_complex():
        raise TypeError(
            f"{what}: complex tensors have no RaggedShard, got {tensor.dtype}; shard torch.view_as_real(tensor) instead"
        )
    if tensor.is_quantized:
        raise TypeError(
            f"{what}: quantized tensors have no RaggedShard; shard tensor.int_repr() and its scales instead"
        )


from ragged_shard.install import install  # noqa: E402  (the hooks need the class above)

install()
