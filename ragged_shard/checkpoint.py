"""The boxes of a ragged shard, for torch.distributed.checkpoint.

DCP knows rectangles. The flat range that a rank holds is at most ``2 * ndim - 1`` of them (``placement.range_boxes``),
in coordinates of the tensor that the other placements leave, shifted by where that begins. Each box is a *view* of the
local tensor, so saving copies nothing and loading writes in place. Ranks without elements have no box, and the same
keys.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from ragged_shard.placement import Box, region_of
from ragged_shard.redistribute import piece_of

__all__ = ["boxes", "chunk_list", "load_from_full", "one_box_a_file", "single_box", "tensor_shard", "write_items"]


def boxes(tensor: DTensor) -> tuple[Box, ...]:
    """The rectangles of the global tensor that this rank holds, in the order of its local tensor.

    Of a tensor without elements every rank holds the one empty box; or the tensor would be missing from the checkpoint.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return ()
    shape = tuple(tensor.shape)
    if not math.prod(shape):
        return (Box((0,) * len(shape), shape, 0),)
    return region_of(shape, tuple(tensor.device_mesh.shape), coordinate, tensor.placements).boxes()


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))


def chunk_list(tensor: DTensor) -> list[ChunkStorageMetadata]:
    tensor._raise_if_contains_partial_placements()
    return [_chunk(box) for box in boxes(tensor)]


def write_items(fqn: str, tensor: DTensor) -> list[WriteItem]:
    tensor._raise_if_contains_partial_placements()
    properties = TensorProperties.create_from_tensor(tensor._local_tensor)
    return [
        WriteItem(
            index=MetadataIndex(fqn, torch.Size(box.offsets)),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=_chunk(box), properties=properties, size=tensor.size()),
        )
        for box in boxes(tensor)
    ]


def one_box_a_file(files: dict[int, list[WriteItem]], largest: int) -> dict[int, list[WriteItem]]:
    """``files`` (what goes to which number) with further ones, from ``largest`` on, for what is named twice in one.

    A safetensors file has one tensor of a name, and readers look into every file.
    """
    answer: dict[int, list[WriteItem]] = {}
    for number, items in files.items():
        seen: dict[str, int] = {}
        for item in items:
            before = seen.get(item.index.fqn, 0)
            seen[item.index.fqn] = before + 1
            answer.setdefault(number + before * largest, []).append(item)
    return answer


def tensor_shard(tensor: DTensor, index: MetadataIndex) -> Tensor:
    """The box at ``index.offset`` as a view of the local tensor."""
    tensor._raise_if_contains_partial_placements()
    local = tensor._local_tensor.detach()
    for box in boxes(tensor):
        if index.offset is None or tuple(index.offset) == box.offsets:
            return local.view(-1)[box.start : box.start + box.numel].view(box.sizes)
    raise ValueError(
        f"{index.fqn}: this rank holds no box at offset {tuple(index.offset or ())} of {tuple(tensor.shape)}"
    )


def single_box(
    shape: Any, mesh_shape: Any, coordinate: Any, placements: Any
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """``(sizes, offsets)`` of a shard that is one box, for torch's ``compute_local_shape_and_global_offset``.

    An empty shard has the sizes of its local tensor and begins at the end of dim 0. Raises ``RuntimeError`` for several
    boxes.
    """
    region = region_of(tuple(shape), tuple(mesh_shape), coordinate, placements)
    found = region.boxes()
    if len(found) > 1:
        raise RuntimeError(
            f"the RaggedShard of {placements} cuts rows of a tensor of shape {tuple(shape)}, so the shard is "
            f"{len(found)} boxes and "
            f"has no single offset; use tensor.__create_chunk_list__()"
        )
    if found:
        return found[0].sizes, found[0].offsets
    if len(region.local_shape) == len(region.sizes):
        return region.local_shape, (region.offsets[0] + region.sizes[0], *region.offsets[1:])
    return (0, *region.sizes[1:]), region.offsets


def load_from_full(state: DTensor, full: Tensor) -> DTensor:
    """``state`` filled with its piece of the global ``full``; a meta tensor is materialised on the device of
    ``full``."""
    mesh = state.device_mesh
    region = region_of(
        tuple(state.shape), tuple(mesh.shape), mesh.get_coordinate() or (0,) * mesh.ndim, state.placements
    )
    piece = piece_of(full.detach(), region)
    if state.is_meta:
        return DTensor.from_local(piece, mesh, state.placements, shape=state.shape, stride=state.stride())
    with torch.no_grad():
        state.to_local().copy_(piece)
    return state
