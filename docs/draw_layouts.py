"""The pictures of docs/ragged_shard.md: python docs/draw_layouts.py  (writes docs/images/ragged_*.png)

Everything drawn is computed by ``ragged_shard.placement.region_of`` and ``ragged_shard.redistribute.plan_exchange``,
the functions that the library itself uses.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # the import path of a script begins with its folder; the packages lie one above
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import matplotlib.pyplot as plt
from torch.distributed.tensor import Replicate, Shard

from ragged_shard import RaggedShard
from ragged_shard.placement import region_of
from ragged_shard.redistribute import plan_exchange

IMAGES = Path(__file__).resolve().parent / "images"
COLOURS = ("#4878a8", "#e0883a", "#5f9e6e", "#c0504d", "#8172b2", "#937860")


def draw_tensor(
    axes: Any, shape: tuple[int, int], mesh_shape: tuple[int, ...], placements: tuple[Any, ...], title: str
) -> None:
    """A matrix, one square an element, coloured and numbered by the rank that holds it."""
    rows, columns = shape
    holders: dict[tuple[int, int], list[int]] = {}
    for number, coordinate in enumerate(itertools.product(*map(range, mesh_shape))):
        for box in region_of(shape, mesh_shape, coordinate, placements).boxes():
            for i, j in itertools.product(*(range(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))):
                holders.setdefault((i, j), []).append(number)
    for (i, j), ranks in holders.items():
        axes.add_patch(plt.Rectangle((j, i), 1, 1, facecolor=COLOURS[ranks[0]], edgecolor="white", alpha=0.85))
        axes.text(j + 0.5, i + 0.5, ",".join(map(str, ranks)), ha="center", va="center", fontsize=7, color="white")
    axes.set(xlim=(0, columns), ylim=(rows, 0), aspect="equal")
    axes.set_title(title, fontsize=8)
    axes.axis("off")


def layouts() -> Any:
    """One matrix of [6, 4] in several layouts over four ranks, and on a 2x2 mesh."""
    line, square = (4,), (2, 2)
    cases = [
        (line, (Shard(0),), "Shard(0)\nequal chunks: rank 3 is empty"),
        (line, (RaggedShard((0,), (1, 2, 0, 3)),), "RaggedShard((0,), (1, 2, 0, 3))\nunits are rows"),
        (line, (RaggedShard((0, 1), (5, 0, 7, 12)),), "RaggedShard((0, 1), (5, 0, 7, 12))\nunits are elements"),
        (line, (RaggedShard.one_hot(2, 4),), "RaggedShard.one_hot(2, 4)\neverything on one rank"),
        (
            square,
            (RaggedShard((0,), (1, 2)), Shard(1)),
            "2x2: (RaggedShard((0,), (1, 2)), Shard(1))\nragged cuts what Shard leaves",
        ),
        (
            square,
            (Replicate(), RaggedShard((0,), (1, 2))),
            "2x2: (Replicate(), RaggedShard((0,), (1, 2)))\nreplicas, each ragged",
        ),
    ]
    figure, grid = plt.subplots(2, 3, figsize=(9, 6.6))
    for axes, (mesh_shape, placements, title) in zip(grid.flat, cases, strict=True):
        draw_tensor(axes, (6, 4), mesh_shape, placements, title)
    figure.tight_layout()
    return figure


def start_of(region: Any) -> int:
    """Where the region of a 1-d tensor begins in it."""
    return int(region.offsets[0] + region.start)


def draw_move(axes: Any, shape: tuple[int], size: int, before: Any, after: Any, title: str) -> None:
    """Two bars, before and after; each stroke is one message and as wide as what it carries."""
    mesh_shape = (size,)
    regions = {
        where: [region_of(shape, mesh_shape, (rank,), (placement,)) for rank in range(size)]
        for where, placement in (("before", before), ("after", after))
    }
    for height, where in ((1.0, "before"), (0.0, "after")):
        for rank, region in enumerate(regions[where]):
            if region.numel:
                axes.add_patch(
                    plt.Rectangle(
                        (start_of(region), height), region.numel, 0.22, facecolor=COLOURS[rank], edgecolor="white"
                    )
                )
                axes.text(
                    start_of(region) + region.numel / 2,
                    height + 0.11,
                    str(rank),
                    ha="center",
                    va="center",
                    color="white",
                    fontsize=8,
                )
    moved = 0
    for rank in range(size):
        plan = plan_exchange(shape, mesh_shape, (rank,), (before,), (after,))
        own = start_of(regions["after"][rank])
        for (source,), _, pieces in plan.receives:
            for piece in pieces:
                start = own + piece.start
                moved += piece.numel
                axes.fill_between(
                    [start, start + piece.numel], 0.22, 1.0, color=COLOURS[source], alpha=0.45, linewidth=0
                )
    axes.set(xlim=(0, shape[0]), ylim=(-0.05, 1.3))
    axes.set_title(f"{title}: {moved} of {shape[0]} elements move", fontsize=8)
    axes.axis("off")


def moves() -> Any:
    """What is sent between layouts of 24 rows; shaded: elements that change their rank."""
    a, b = RaggedShard((0,), (8, 10, 3, 3)), RaggedShard((0,), (12, 6, 3, 3))
    figure, grid = plt.subplots(3, 1, figsize=(8, 4.6))
    draw_move(grid[0], (24,), 4, a, b, "ragged to ragged")
    draw_move(grid[1], (24,), 4, a, Shard(0), "ragged to Shard(0)")
    draw_move(grid[2], (24,), 4, a, RaggedShard.one_hot(1, 4), "ragged to one rank")
    figure.tight_layout()
    return figure


def main() -> None:
    plt.switch_backend("Agg")
    IMAGES.mkdir(exist_ok=True)
    for name, figure in (("ragged_layouts", layouts()), ("ragged_moves", moves())):
        path = IMAGES / f"{name}.png"
        figure.savefig(path, dpi=110, metadata={"Software": None})
        print(path)


if __name__ == "__main__":
    main()
