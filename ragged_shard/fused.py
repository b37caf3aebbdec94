"""Fused optimizer kernels on the local tensors, without DTensor's dispatch.

``torch._fused_adamw_`` and its kin take lists with a row per parameter: itself, its gradient, its states, its step. On
the way to the kernel DTensor wraps, hashes and compares a spec for each of them, thousands of Python calls a step. But
a row whose tensors all lie alike is updated element by element, in place, and a 0-d step is the same everywhere: the
local tensors are the whole story. Anything else (another layout in one row, an addend still to be summed, a plain
tensor among DTensors) is left to DTensor, which brings it into line or refuses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from ragged_shard.placement import has_ragged

__all__ = ["OPERATORS", "run"]

# The fused optimizers of torch.optim, as far as this torch has them.
OPERATORS = tuple(
    getattr(packet, overload)
    for name in ("_fused_adamw_", "_fused_adam_", "_fused_sgd_", "_fused_adagrad_")
    if (packet := getattr(torch.ops.aten, name, None)) is not None
    for overload in packet.overloads()
    if overload in ("default", "tensor_lr")
)


def run(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What DTensor's dispatcher calls in the place of its own work on ``op``."""
    local = _local_arguments(args, kwargs)
    if local is not None:
        return op(*local, **kwargs)
    # The dispatcher asks this dictionary, so nothing stands in it during the call. Another thread that meets the gap
    # takes DTensor's own way, which is right too.
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers.pop(op, None)
    try:
        return op(*args, **kwargs)
    finally:
        handlers[op] = run


def _local_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
    """The arguments with local tensors; ``None`` where DTensor must decide."""
    parameters = args[0]
    if not all(isinstance(p, DTensor) for p in parameters) or any(isinstance(v, DTensor) for v in kwargs.values()):
        return None
    specs = [p._spec for p in parameters]
    if not any(has_ragged(spec.placements) for spec in specs) or any(
        placement.is_partial() for spec in specs for placement in spec.placements
    ):
        return None
    # A rank outside a tensor's mesh holds nothing of it, and computes nothing.
    if any(mesh.get_coordinate() is None for mesh in {id(spec.mesh): spec.mesh for spec in specs}.values()):
        return None
    local: list[Any] = []
    for column in args:
        rows = _local_column(column, specs) if column else column
        if rows is None:
            return None
        local.append(rows)
    return local


def _local_column(column: Sequence[Any], specs: Sequence[DTensorSpec]) -> list[Any] | None:
    if len(column) != len(specs):
        return None
    rows = []
    for tensor, spec in zip(column, specs, strict=True):
        if isinstance(tensor, DTensor):
            if tensor._spec is not spec and not _alike(tensor._spec, spec):
                return None
            rows.append(tensor._local_tensor)
        elif tensor.ndim == 0:
            rows.append(tensor)
        else:
            return None
    return rows


def _alike(one: DTensorSpec, other: DTensorSpec) -> bool:
    meta, expected = one.tensor_meta, other.tensor_meta
    return (
        one.placements == other.placements
        and (one.mesh is other.mesh or one.mesh == other.mesh)
        and meta is not None
        and expected is not None
        and meta.shape == expected.shape
    )
