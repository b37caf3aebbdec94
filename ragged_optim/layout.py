"""Where the elements of one parameter lie: which rank holds what, from rank-independent data alone.

A parameter's flattened elements are cut by its DTensor placements. ``Shard(d)`` leaves a box on each rank; a
``RaggedShard`` is always applied last and leaves a flat range of that box::

    rank k:  box (offset, sizes) of the global tensor, then elements [start, stop) of the flattened box

With ``Shard(0)``, ``RaggedShard`` or both, that is one range of the flattened *global* tensor, which is what element-
and block-wise rules see (``Extent``). Matrix rules see ``Matrix`` (a run of whole rows) and its ``Fragment`` per rank.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

__all__ = ["Extent", "Fragment", "Layout", "Matrix", "Piece", "as_matrices", "fragments", "layout_of", "refuse_partial"]


@dataclass(frozen=True)
class Extent:
    """Elements [start, stop) of the flattened global tensor of ``shape``; ``name``: the parameter's."""

    shape: tuple[int, ...]
    start: int
    stop: int
    name: str = ""


@dataclass(frozen=True)
class Matrix:
    """``rows`` x ``cols`` consecutive elements of a flattened parameter: rows [row, row + rows) of slice ``slice``.

    ``flatten``: the parameter is one slice whose columns are dims 1.. together.
    """

    slice: int
    row: int
    rows: int
    cols: int
    flatten: bool = False


@dataclass(frozen=True)
class Piece:
    """What one rank holds: elements [start, stop) of the flattened box of ``sizes`` at ``offset``."""

    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Fragment:
    """What one rank holds of one matrix.

    Elements [at, at + numel) of its flattened local tensor are elements [start, start + numel) of the flattened box
    rows [row, row + height), columns [col, col + width) of the matrix.
    """

    at: int
    numel: int
    row: int
    height: int
    col: int
    width: int
    start: int


@dataclass(frozen=True)
class Layout:
    """A parameter over the ranks of ``group``, in group-rank order; ``group is None``: every rank holds it whole.

    ``mesh``, ``dim``: the mesh dim that is the group: of the parameter's own mesh, or, where it is sharded over several
    dims, of these flattened to one.
    """

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    group: dist.ProcessGroup | None
    rank: int
    mesh: DeviceMesh | None = None
    dim: int = 0

    def extent(self, rank: int) -> Extent | None:
        """The range of the flattened global tensor that ``rank`` holds, or ``None`` where it is not one range."""
        piece = self.pieces[rank]
        if piece.stop == piece.start:
            return Extent(self.shape, 0, 0)
        if piece.sizes[1:] != self.shape[1:]:
            return None
        first = (piece.offset[0] if piece.offset else 0) * math.prod(self.shape[1:])
        return Extent(self.shape, first + piece.start, first + piece.stop)


def refuse_partial(param: Tensor, name: str) -> None:
    """Raise ``ValueError`` naming a parameter that is a sum still to be made."""
    for dim, placement in enumerate(param.placements) if isinstance(param, DTensor) else ():
        if isinstance(placement, Partial):
            raise ValueError(
                f"parameter {name!r} is {placement} on mesh dim {dim}: redistribute it before building the optimizer"
            )


def layout_of(param: Tensor, name: str) -> Layout:
    """How ``param`` lies. Raises ``ValueError`` naming the parameter for placements no rule can work on."""
    shape = tuple(param.shape)
    if not isinstance(param, DTensor):
        return Layout(shape, (Piece((0,) * len(shape), shape, 0, math.prod(shape)),), None, 0)
    refuse_partial(param, name)
    mesh = param.device_mesh
    sharded = []
    for dim, placement in enumerate(param.placements):
        if isinstance(placement, Replicate):
            continue
        if type(placement) is not Shard and not _is_ragged(placement):
            raise ValueError(
                f"parameter {name!r} has placement {placement} on mesh dim {dim}; ragged_optim works on Shard, "
                "RaggedShard and Replicate. For FSDP over tensor parallelism use fsdp.fully_shard, which needs no "
                "strided shards"
            )
        if mesh.size(dim) > 1:
            sharded.append(dim)
    if not sharded:
        return Layout(shape, (Piece((0,) * len(shape), shape, 0, math.prod(shape)),), None, 0)
    flat, flat_dim = mesh, sharded[0]
    if len(sharded) > 1:
        if mesh.mesh_dim_names is None:
            raise ValueError(
                f"parameter {name!r} is sharded over {len(sharded)} dims of an unnamed mesh; give the mesh "
                "mesh_dim_names"
            )
        part = mesh if len(sharded) == mesh.ndim else mesh[tuple(mesh.mesh_dim_names[dim] for dim in sharded)]
        flat, flat_dim = part._flatten(), 0
    group = flat.get_group(flat_dim)
    sizes = [mesh.size(dim) for dim in sharded]
    pieces = [
        _piece(shape, [(param.placements[dim], size, at) for dim, size, at in zip(sharded, sizes, ats, strict=True)])
        for ats in itertools.product(*map(range, sizes))
    ]
    return Layout(shape, tuple(pieces), group, group.rank(), flat, flat_dim)


def _is_ragged(placement: object) -> bool:
    # By name: a stock Shard(0) parameter must not need the placement hooks installed.
    return any(base.__name__ == "RaggedShard" for base in type(placement).__mro__)


def _piece(shape: tuple[int, ...], cuts: Sequence[tuple[object, int, int]]) -> Piece:
    offset, sizes = [0] * len(shape), list(shape)
    ragged = None
    for placement, ranks, at in cuts:
        if not isinstance(placement, Shard):
            ragged = placement, at
            continue
        dim = placement.dim % len(shape)
        chunk = -(-sizes[dim] // ranks)
        first = min(sizes[dim], chunk * at)
        offset[dim] += first
        sizes[dim] = min(sizes[dim], first + chunk) - first
    start, stop = 0, math.prod(sizes)
    if ragged is not None:
        start, stop = ragged[0].flat_range(tuple(sizes), ragged[1])  # type: ignore[attr-defined]
    return Piece(tuple(offset), tuple(sizes), start, stop)


def as_matrices(
    shape: tuple[int, ...], *, split_sizes: Sequence[int] | None = None, flatten: bool = False
) -> tuple[Matrix, ...]:
    """The matrices of a parameter: its leading dims count slices; ``split_sizes`` cuts the rows of each slice. None
    if it is empty.

    ``flatten``: (shape[0], prod(shape[1:])) is one matrix instead. Raises ``ValueError`` when ``split_sizes`` does
    not sum to the rows.
    """
    slices, rows, cols = _as_stack(shape, flatten)
    if split_sizes is None:
        split_sizes = (rows,)
    elif sum(split_sizes) != rows or any(size < 1 for size in split_sizes):
        raise ValueError(
            f"split_sizes={tuple(split_sizes)} must be positive and sum to the {rows} rows of shape {shape}"
        )
    if rows * cols == 0:
        return ()
    starts = (0, *itertools.accumulate(split_sizes))
    return tuple(
        Matrix(index, start, size, cols, flatten)
        for index in range(slices)
        for start, size in zip(starts, split_sizes, strict=False)
    )


def _as_stack(shape: tuple[int, ...], flatten: bool) -> tuple[int, int, int]:
    if flatten:
        return 1, shape[0], math.prod(shape[1:])
    return math.prod(shape[:-2]), shape[-2], shape[-1]


def fragments(layout: Layout, matrix: Matrix, name: str) -> tuple[Fragment | None, ...]:
    """What each rank of the layout holds of ``matrix``; ``None`` where it holds nothing of it."""
    return tuple(_fragment(layout.shape, piece, matrix, name) for piece in layout.pieces)


def _fragment(shape: tuple[int, ...], piece: Piece, matrix: Matrix, name: str) -> Fragment | None:
    (slice0, slices), (row0, rows), (col0, cols) = _stack_box(shape, piece, matrix, name)
    if not slice0 <= matrix.slice < slice0 + slices:
        return None
    low, high = max(row0, matrix.row), min(row0 + rows, matrix.row + matrix.rows)
    if low >= high or cols == 0:
        return None
    first = ((matrix.slice - slice0) * rows + low - row0) * cols
    start, stop = max(first, piece.start), min(first + (high - low) * cols, piece.stop)
    if start >= stop:
        return None
    return Fragment(start - piece.start, stop - start, low - matrix.row, high - low, col0, cols, start - first)


def _stack_box(
    shape: tuple[int, ...], piece: Piece, matrix: Matrix, name: str
) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """The box of a piece as (offset, size) of slices, rows and columns."""
    offset, sizes = piece.offset, piece.sizes
    # Which dims make the slices, the rows, the columns.
    parts: tuple[tuple[int, ...], ...]
    if matrix.flatten:
        parts = ((), (0,), tuple(range(1, len(shape))))
    else:
        parts = (tuple(range(len(shape) - 2)), (len(shape) - 2,), (len(shape) - 1,))
    box = []
    for dims in parts:
        size, start = 1, 0
        for position, dim in enumerate(dims):
            if position and sizes[dim] != shape[dim] and sizes[dim] != 0:
                raise ValueError(
                    f"parameter {name!r} of shape {shape} is sharded on dim {dim}, which does not leave whole runs "
                    f"of rows or columns of its matrices; shard it on dim {dims[0]} or redistribute it"
                )
            size *= sizes[dim]
            start = start * shape[dim] + offset[dim]
        box.append((start, size))
    return box[0], box[1], box[2]
