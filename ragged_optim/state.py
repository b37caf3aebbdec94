"""Optimizer states: made complete before the first gradient, as DTensors that lie like their parameter or at an owner.

A state of the parameter's own shape has the parameter's placements, so plain DCP saves and reshards it. A state that
belongs to one matrix lies whole at that matrix's owner: a one-hot ``RaggedShard``. Counters are plain 0-d tensors,
the same on all ranks.
"""

from __future__ import annotations

import math
import operator
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from ragged_optim.layout import Extent, Layout
from ragged_optim.policies import bare_name
from ragged_optim.quantize import Tiling, decode_tiles, encode_tiles, report, tiling
from ragged_optim.rule import StateSpec

__all__ = [
    "Tiled",
    "check_loadable",
    "keep_tensors",
    "load_state",
    "local",
    "make_block_state",
    "make_owned_state",
    "make_param_state",
    "make_tiled_state",
]


def local(tensor: Tensor) -> Tensor:
    """What lies on this rank (under ``no_grad``), arrived."""
    if not isinstance(tensor, DTensor):
        return tensor
    here = tensor._local_tensor
    wait = getattr(here, "wait", None)  # an AsyncCollectiveTensor
    return here if wait is None else wait()


def _fill(spec: StateSpec, name: str) -> float | int:
    # Under DDP or torch.compile parameters have other names, but the same random bits.
    return zlib.crc32(bare_name(name).encode()) & 0x7FFFFFFF if spec.fill == "salt" else spec.fill


@dataclass(frozen=True)
class Tiled:
    """A state kept in 8 bits: what lies here of its codes and scales."""

    codes: Tensor
    scales: Tensor
    tiles: Tiling
    extent: Extent

    def read(self) -> Tensor:
        """The state in fp32, of the local shape."""
        return decode_tiles(self.codes, self.scales, self.tiles, self.extent)

    def write(self, value: Tensor) -> None:
        """Round ``value`` to nearest; elements that are not finite become 0, and their tiles are reported."""
        spoilt = encode_tiles(value, self.codes, self.scales, self.tiles, self.extent)
        report(spoilt, f"tile(s) of {self.tiles.height} x {self.tiles.width}", self.extent.name)


def make_tiled_state(spec: StateSpec, param: Tensor, name: str, key: str, layout: Layout) -> dict[str, Tensor]:
    """``key.codes``, shaped and placed like ``param``, and ``key.scales``, a row per band of tiles."""
    assert spec.tile is not None
    tiles = tiling(spec.shape, *spec.tile)
    scales = StateSpec(tiles.scales, torch.float32)
    return {
        f"{key}.codes": make_param_state(StateSpec(spec.shape, torch.uint8), param, name, contiguous=True),
        f"{key}.scales": make_block_state(scales, param, name, layout, tiles.block.numel(spec.shape)),
    }


def make_param_state(spec: StateSpec, param: Tensor, name: str, *, contiguous: bool = False) -> Tensor:
    """The state ``spec`` of ``param``: shaped and placed like it, or a counter.

    ``contiguous``: in row-major order even where ``param`` has other strides, as blocks and tiles are counted.
    """
    dtype = param.dtype if spec.dtype is None else spec.dtype
    if spec.home == "everywhere":
        return torch.full(spec.shape, _fill(spec, name), dtype=dtype, device=local(param).device)
    if spec.shape != tuple(param.shape):
        raise ValueError(
            f"a state of parameter {name!r} has shape {spec.shape}; it must be that of the parameter, "
            f"{tuple(param.shape)}"
        )
    memory_format = torch.contiguous_format if contiguous else torch.preserve_format
    state = torch.zeros_like(param.detach(), dtype=dtype, memory_format=memory_format)
    if spec.fill:
        local(state).fill_(_fill(spec, name))
    return state


def make_block_state(spec: StateSpec, param: Tensor, name: str, layout: Layout, block: int) -> Tensor:
    """The state ``spec`` with one row per block of ``block`` elements of ``param``, cut where the parameter is cut."""
    dtype = param.dtype if spec.dtype is None else spec.dtype
    device, fill = local(param).device, _fill(spec, name)
    if not isinstance(param, DTensor):
        return torch.full(spec.shape, fill, dtype=dtype, device=device)
    extents = [layout.extent(rank) for rank in range(len(layout.pieces))]
    counts = [-(-extent.stop // block) - -(-extent.start // block) for extent in extents if extent is not None]
    if layout.group is None:
        whole = torch.full(spec.shape, fill, dtype=dtype, device=device)
        return DTensor.from_local(whole, param.device_mesh, [Replicate()] * param.device_mesh.ndim, run_check=False)
    if len(counts) != len(extents) or sum(counts) != spec.shape[0]:
        raise ValueError(f"a state of parameter {name!r} has {spec.shape[0]} rows; its blocks are {sum(counts)}")
    mine = torch.full((counts[layout.rank], *spec.shape[1:]), fill, dtype=dtype, device=device)
    return _assembled(mine, spec.shape, layout, counts if any(counts) else [1, *[0] * (len(counts) - 1)])


def _assembled(mine: Tensor, shape: tuple[int, ...], layout: Layout, rows: Sequence[int]) -> DTensor:
    """The state of which rank k of the layout's group holds ``rows[k]`` units of dim 0, and this rank ``mine``."""
    from ragged_shard.placement import RaggedShard

    assert layout.mesh is not None
    placements: list[Any] = [Replicate()] * layout.mesh.ndim
    placements[layout.dim] = RaggedShard((0,), rows)
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return DTensor.from_local(mine, layout.mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def make_owned_state(spec: StateSpec, param: Tensor, name: str, layout: Layout, owner: int) -> Tensor:
    """The state ``spec`` of one matrix of ``param``, whole on rank ``owner`` of the layout's group and empty
    elsewhere.
    """
    dtype = param.dtype if spec.dtype is None else spec.dtype
    device = local(param).device
    if not isinstance(param, DTensor):
        return torch.full(spec.shape, _fill(spec, name), dtype=dtype, device=device)
    if layout.group is None:
        whole = torch.full(spec.shape, _fill(spec, name), dtype=dtype, device=device)
        return DTensor.from_local(whole, param.device_mesh, [Replicate()] * param.device_mesh.ndim, run_check=False)
    rows = spec.shape if layout.rank == owner else (0, *spec.shape[1:])
    mine = torch.full(rows, _fill(spec, name), dtype=dtype, device=device)
    return _assembled(mine, spec.shape, layout, [int(rank == owner) for rank in range(len(layout.pieces))])


def keep_tensors(state: dict[str, Tensor], before: Mapping[str, Tensor], rule: str) -> None:
    """Put the tensors that ``state`` had ``before`` a rule's method saw it back, with the values that it has now.

    Raises ``ValueError`` naming the rule when that cannot be.
    """
    if len(state) == len(before) and all(map(operator.is_, state.values(), before.values())):
        return
    if state.keys() != before.keys():
        raise ValueError(f"rule {rule!r} has made or removed states; its init() names all that a parameter has")
    for key, tensor in before.items():
        value = state[key]
        if value is not tensor:
            if value.shape != tensor.shape:
                raise ValueError(
                    f"rule {rule!r} has set its state {key!r} to shape {tuple(value.shape)}, not {tuple(tensor.shape)}"
                )
            tensor.copy_(value)
            state[key] = tensor


def check_loadable(key: str, value: object, state: Mapping[str, Tensor], name: str, rule: str) -> None:
    """Raise ``ValueError`` when ``value`` cannot become the state ``key`` of parameter ``name``."""
    if key not in state:
        raise ValueError(
            f"the state dict has {key!r} for parameter {name!r}, which {rule} does not keep (it keeps "
            f"{', '.join(state) or 'none'}); it is the state of another algorithm"
        )
    shape = tuple(value.shape) if isinstance(value, Tensor) else ()
    if shape != tuple(state[key].shape):
        raise ValueError(
            f"the state dict has {key!r} of shape {shape} for parameter {name!r}, whose state has shape "
            f"{tuple(state[key].shape)}; it is the state of another model or optimizer"
        )


def load_state(target: Tensor, value: Any) -> None:
    """Copy ``value`` (a tensor, DTensor or number) into ``target``, which keeps its dtype, placement and address."""
    if not isinstance(value, Tensor):
        target.fill_(value)
        return
    if isinstance(target, DTensor):
        if not isinstance(value, DTensor):
            from torch.distributed.tensor import distribute_tensor

            # Every rank has the whole value: cut it here, without communication.
            value = distribute_tensor(
                value.to(local(target).device), target.device_mesh, target.placements, src_data_rank=None
            )
        elif value.placements != target.placements:
            value = value.redistribute(target.device_mesh, target.placements)
        local(target).copy_(local(value))
        return
    if isinstance(value, DTensor):
        value = value.full_tensor()
    target.copy_(value)
