"""What the optimizer tests share: parameters of odd shapes, gradients that do not depend on the world, and ways to
shard them.

A case is a list of shapes and a seed; every rank makes the same full tensors and takes its shard of them, so any layout
must end with the same full parameters and states, bit for bit.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests import cluster

MIXED = ("shard0", "plain", "ragged", "shard1", "replicate", "ragged7", "onehot")


def full(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32).to(dtype)


def ragged_units(numel: int, world: int, seed: int, row: int = 1) -> tuple[int, ...]:
    """Elements per rank: random cuts at multiples of ``row`` (or the end), ranks may be empty."""
    generator = torch.Generator().manual_seed(seed)
    blocks = -(-numel // row)
    cuts = sorted(int(x) for x in torch.randint(0, blocks + 1, (world - 1,), generator=generator))
    edges = [0, *(min(numel, cut * row) for cut in cuts), numel]
    return tuple(b - a for a, b in itertools.pairwise(edges))


def shard(tensor: Tensor, layout: str, mesh: Any, seed: int = 0) -> Tensor:
    """``tensor``, the same on every rank, laid out on the last mesh dim.

    ``layout``: plain, shard0, shard1, replicate, ragged (cuts anywhere), ragged7 (at multiples of 7 elements), onehot
    (whole on one rank), tiles (between tiles of 32 rows); or, on a mesh of two dims, tensor0 / tensor1: tensor parallel
    on the last, by rows / columns (even numbers), and what is left of it ragged on the first.
    """
    from torch.distributed.tensor import Replicate

    if layout == "plain":
        return tensor.clone()
    world = mesh.size(mesh.ndim - 1)
    placements: list[Any] = [Replicate()] * mesh.ndim
    if layout.startswith("tensor"):
        from ragged_shard.placement import RaggedShard

        tensor_dim = int(layout[6:]) if tensor.ndim > 1 else 0
        left = tensor.numel() // world
        placements = [RaggedShard(tuple(range(tensor.ndim)), ragged_units(left, mesh.size(0), seed)), Shard(tensor_dim)]
    elif layout == "onehot":
        from ragged_shard.placement import RaggedShard

        placements[-1] = RaggedShard.one_hot(seed % world, world, dims=(0,))
    elif layout.startswith("shard"):
        placements[-1] = Shard(int(layout[5:])) if tensor.ndim > int(layout[5:]) else Shard(0)
    elif layout.startswith(("ragged", "tiles")):
        from ragged_optim.quantize import tiling
        from ragged_shard.placement import RaggedShard

        if layout == "tiles":
            row = tiling(tuple(tensor.shape), 32, 32).block.numel(tensor.shape)
        else:
            row = int(layout[6:] or 1)
        if tensor.numel() == 0:
            placements[-1] = RaggedShard.one_hot(seed % world, world, dims=(0,))
        else:
            units = ragged_units(tensor.numel(), world, seed, row)
            placements[-1] = RaggedShard(tuple(range(tensor.ndim)), units)
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def digest(tensor: Tensor) -> str:
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return hashlib.sha256(tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[
        :16
    ] + str(tensor.dtype)


def train(
    make: Callable[..., torch.optim.Optimizer],
    shapes: Sequence[tuple[int, ...]],
    layout: str = "plain",
    mesh_shape: tuple[int, ...] | None = None,
    *,
    steps: int = 3,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    lacking: Sequence[tuple[int, int]] = (),
    groups: Sequence[int] = (),
    **options: Any,
) -> dict[str, list[str]]:
    """Digests of each full parameter and its full states after ``steps`` steps.

    ``lacking``: (step, parameter) without a gradient. ``layout``: also "mixed": one of each, in turn. ``groups``: in
    which param group each parameter is; each has a rate and a decay of its own.
    """
    mesh = None
    if layout != "plain":
        names = ("data", "tensor") if layout.startswith("tensor") else None
        mesh = cluster.mesh(mesh_shape or (dist.get_world_size(),), names)
    layouts = list(itertools.islice(itertools.cycle(MIXED if layout == "mixed" else [layout]), len(shapes)))
    params = [
        torch.nn.Parameter(shard(full(shape, seed + i, dtype), layouts[i], mesh, seed + 31 * i))
        for i, shape in enumerate(shapes)
    ]
    named: list[Any] = [(f"layer.{i}.weight", p) for i, p in enumerate(params)]
    if groups:
        of = [groups[i % len(groups)] for i in range(len(params))]
        named = [{"params": [p for p, at in zip(named, of, strict=True) if at == k]} for k in sorted(set(of))]
    optimizer = make(named, **options)
    for number, group in enumerate(optimizer.param_groups if groups else ()):
        group.update(lr=0.1 / (1 + number), weight_decay=number / 8)
    for step in range(steps):
        for i, (param, shape) in enumerate(zip(params, shapes, strict=True)):
            if (step, i) in lacking:
                param.grad = None
                continue
            grad = full(shape, 1000 + 100 * step + i + seed, dtype)
            param.grad = shard(grad, layouts[i], mesh, seed + 31 * i)
        optimizer.step()
    return {
        f"layer.{i}.weight": [
            digest(param),
            *(f"{key}:{digest(value)}" for key, value in sorted(optimizer.state[param].items())),
        ]
        for i, param in enumerate(params)
    }
