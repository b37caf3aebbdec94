"""How a ragged DTensor comes into being: ``distribute_tensor``, ``DTensor.from_local``, and ``zeros``, ``rand`` and
their kin of ``torch.distributed.tensor``, with a RaggedShard.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, _mesh_resources
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import assert_no_mixed_partial_types
from torch.distributed.tensor.placement_types import Placement, Shard

from ragged_shard.placement import RaggedShard, Shape, check_placements, check_tensor, contiguous_stride, region_of
from ragged_shard.redistribute import distribute

__all__ = ["distribute_tensor", "from_local", "made_by"]


def _resolve(
    mesh: DeviceMesh | None, placements: Sequence[Placement], ndim: int, what: str
) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    mesh = mesh or _mesh_resources.get_current_mesh()
    if mesh.get_coordinate() is None:
        raise ValueError(f"{what}: rank {dist.get_rank()} is not in {mesh}; call it on the ranks of the mesh only")
    resolved = tuple(Shard(p.dim + ndim) if type(p) is Shard and p.dim < 0 else p for p in placements)
    assert_no_mixed_partial_types(resolved)
    return mesh, resolved


def distribute_tensor(
    tensor: Tensor, device_mesh: DeviceMesh | None, placements: Sequence[Placement], *, src_data_rank: int | None = 0
) -> DTensor:
    """``torch.distributed.tensor.distribute_tensor`` for placements that hold a RaggedShard."""
    mesh, resolved = _resolve(device_mesh, placements, tensor.ndim, "distribute_tensor")
    if isinstance(tensor, DTensor):
        if tensor.device_mesh != mesh:
            raise ValueError(f"cannot distribute a DTensor on {tensor.device_mesh} to another mesh {mesh}")
        if tensor.placements != resolved:
            raise ValueError(
                f"the tensor is a DTensor placed {tensor.placements}; call redistribute() to place it {resolved}"
            )
        return tensor
    check_tensor(tensor, "distribute_tensor")
    check_placements(tuple(tensor.shape), tuple(mesh.shape), resolved)
    if not tensor.is_leaf:
        raise RuntimeError(
            "distribute_tensor takes a leaf tensor; in the middle of a computation use DTensor.from_local"
        )
    if tensor.device.type != mesh.device_type and not tensor.is_meta:
        tensor = tensor.to(mesh.device_type)
    local = distribute(tensor.detach(), mesh, resolved, src_data_rank)
    meta = TensorMeta(tensor.shape, contiguous_stride(tensor.shape), tensor.dtype)
    spec = DTensorSpec(mesh, resolved, tensor_meta=meta)
    return DTensor(local.requires_grad_(tensor.requires_grad), spec, requires_grad=tensor.requires_grad)


def from_local(
    stock: Any,
    local_tensor: Tensor,
    device_mesh: DeviceMesh | None,
    placements: Sequence[Placement],
    *,
    run_check: bool = False,
    shape: Sequence[int] | None = None,
    stride: Sequence[int] | None = None,
    grad_placements: Sequence[Placement] | None = None,
    **options: Any,
) -> DTensor:
    """``DTensor.from_local``: checks the local tensor against the layout and views it in its canonical shape.

    Any contiguous local tensor with the right number of elements whose trailing dims are those of the tensor, or a 1-D
    one, is taken; it shares memory with the DTensor. ``shape`` is needed, as shards differ; with ``run_check=True`` it
    is exchanged when missing, and a wrong local tensor on one rank raises on all of them.
    """
    if isinstance(local_tensor, DTensor):
        raise RuntimeError("from_local takes the local torch.Tensor of this rank, got a DTensor")
    ndim = len(shape) if shape is not None else local_tensor.ndim
    mesh, resolved = _resolve(device_mesh, placements, ndim, "DTensor.from_local")
    check_tensor(local_tensor, "DTensor.from_local")
    if shape is None:
        shape = _exchanged_shape(local_tensor, mesh, resolved, run_check)
    shape = torch.Size(shape)
    check_placements(tuple(shape), tuple(mesh.shape), resolved)
    if stride is not None and torch.Size(shape).numel() and not _is_contiguous(shape, stride):
        raise ValueError(
            "DTensor.from_local: a RaggedShard splits the contiguous tensor, of stride "
            f"{contiguous_stride(shape)}, got {tuple(stride)}"
        )
    coordinate = mesh.get_coordinate()
    region = region_of(tuple(shape), tuple(mesh.shape), coordinate or (), resolved)
    wrong = _misfit(local_tensor, region.local_shape)
    if run_check:
        answers = _gather_objects((wrong, str(local_tensor.dtype)), mesh)
        bad = [f"rank {rank}: {text}" for rank, (text, _) in answers if text]
        kinds = {kind for _, (_, kind) in answers}
        if len(kinds) > 1:
            bad.append(f"dtypes differ between ranks: {', '.join(sorted(kinds))}")
        if bad:
            raise ValueError(
                f"DTensor.from_local of a tensor of shape {tuple(shape)} placed {resolved}: " + "; ".join(bad)
            )
    elif wrong:
        raise ValueError(
            f"DTensor.from_local of a tensor of shape {tuple(shape)} placed {resolved}: rank {dist.get_rank()}: {wrong}"
        )
    if local_tensor.device.type != mesh.device_type and not local_tensor.is_meta:
        local_tensor = local_tensor.to(mesh.device_type)
    local = local_tensor.contiguous().view(region.local_shape)
    if not shape:
        return _ScalarFromLocal.apply(local, mesh, resolved)  # type: ignore[no-any-return, no-untyped-call]
    if grad_placements is not None:  # an older torch has no such argument
        options["grad_placements"] = grad_placements
    made: DTensor = stock(local, mesh, resolved, shape=shape, stride=contiguous_stride(shape), **options)
    return made


def made_by(
    stock: Any,
    function: Any,
    size: torch.Size,
    device_mesh: DeviceMesh | None,
    placements: Sequence[Placement],
    **options: Any,
) -> DTensor:
    """What ``torch.distributed.tensor.zeros``, ``rand``, ... return; random values are those of one process."""
    mesh, resolved = _resolve(device_mesh, placements, len(size), f"torch.distributed.tensor.{function.__name__}")
    check_placements(tuple(size), tuple(mesh.shape), resolved)
    random = function in (torch.rand, torch.randn)
    made: DTensor = stock(torch.empty if random else function, size, mesh, resolved, **options)
    if random:
        with torch.no_grad():
            made.uniform_() if function is torch.rand else made.normal_()
    return made


class _ScalarFromLocal(torch.autograd.Function):
    """``from_local`` of a 0-d tensor: torch takes the empty shape for no shape at all, and tries to infer one."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Any:
        ctx.placements = placements
        spec = DTensorSpec(mesh, placements, tensor_meta=TensorMeta(torch.Size(()), (), local.dtype))
        return DTensor(local.view_as(local), spec, requires_grad=local.requires_grad)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0].redistribute(placements=ctx.placements).to_local(), None, None


def _is_contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Strides of dims of size 1 mean nothing."""
    return len(shape) == len(stride) and all(
        size == 1 or have == want for size, have, want in zip(shape, stride, contiguous_stride(shape), strict=True)
    )


def _misfit(local: Tensor, expected: Shape) -> str:
    """What is wrong with a local tensor, or nothing."""
    suffix = expected[1:]
    fits = local.numel() == math.prod(expected) and (
        local.ndim <= 1 or not suffix or tuple(local.shape[-len(suffix) :]) == suffix
    )
    if fits:
        return ""
    return (
        f"the local tensor has shape {tuple(local.shape)}, expected {expected} (or 1-D with "
        f"{math.prod(expected)} elements)"
    )


def _gather_objects(value: Any, mesh: DeviceMesh) -> list[tuple[int, Any]]:
    """``(global rank, value)`` of every rank of the mesh, in the order of ranks; gathered mesh dim by mesh dim."""
    values: list[Any] = [(dist.get_rank(), value)]
    for mesh_dim in range(mesh.ndim):
        rows: list[Any] = [None] * mesh.size(mesh_dim)
        dist.all_gather_object(rows, values, group=mesh.get_group(mesh_dim))
        values = [item for row in rows for item in row]
    return sorted(values, key=lambda item: item[0])


def _exchanged_shape(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], run_check: bool) -> Shape:
    """The global shape that the rows of all ranks add up to."""
    mesh_dim, ragged = next((i, p) for i, p in enumerate(placements) if isinstance(p, RaggedShard))
    if not run_check or any(isinstance(p, Shard) for p in placements) or len(ragged.dims) != 1:
        raise ValueError(
            "DTensor.from_local with a RaggedShard needs shape= and stride= of the global tensor: shards differ "
            "between ranks, and a rank without elements cannot tell them (with dims=(0,), no Shard beside it, and "
            "run_check=True they are exchanged)"
        )
    check_placements((0,), tuple(mesh.shape), placements)
    rows: list[Any] = [None] * mesh.size(mesh_dim)
    dist.all_gather_object(rows, tuple(local.shape), group=mesh.get_group(mesh_dim))
    # Not every rank can tell how many rows a unit has, but all that can must agree.
    told = {
        (sizes[0] * ragged.total_units / units, sizes[1:])
        for sizes, units in zip(rows, ragged.local_units, strict=True)
        if units and sizes
    }
    if len(told) != 1 or not next(iter(told))[0].is_integer():
        raise ValueError(f"DTensor.from_local: the local shapes {rows} on mesh dim {mesh_dim} do not fit {ragged!r}")
    ((count, suffix),) = told
    return (int(count), *suffix)
