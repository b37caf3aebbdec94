"""Block: the atom of a parameter that no rank boundary may cut.

A block is declared against the shape of the *original* parameter and becomes a number of consecutive elements of
the flattened tensor, which is all the planner needs:

    Block.elements(n)   n elements
    Block.rows(n)       n rows of ``shape[-1]`` elements; rows run on across leading slices
    Block.tile(r, c)    r rows of a matrix, restarting with each leading slice
    Block.slices(n)     n slices of dim 0
    Block.whole()       the whole tensor

No torch is imported here, so that the planner runs on a laptop without it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Block"]

Kind = Literal["elements", "rows", "tile", "slices", "whole"]
_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "elements": ("n",),
    "rows": ("n",),
    "tile": ("r", "c"),
    "slices": ("n",),
    "whole": (),
}


@dataclass(frozen=True)
class Block:
    """What stays together on one rank.

    Construct it with one of the static methods. A block larger than its tensor means the whole tensor; sizes that
    are not positive integers raise ``ValueError`` (``TypeError`` for a non-integer).
    """

    kind: Kind
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        names = _ARGUMENTS.get(self.kind)
        if names is None:
            raise ValueError(f"unknown block kind {self.kind!r}; use one of {', '.join(_ARGUMENTS)}")
        if len(self.sizes) != len(names):
            raise ValueError(f"Block.{self.kind} takes {len(names)} sizes ({', '.join(names)}), got {self.sizes!r}")
        for name, size in zip(names, self.sizes, strict=True):
            if isinstance(size, bool) or not isinstance(size, int):
                raise TypeError(f"Block.{self.kind}: {name} must be an integer, got {size!r}")
            if size < 1:
                raise ValueError(f"Block.{self.kind}: {name} must be at least 1, got {size}")

    @staticmethod
    def elements(n: int) -> Block:
        return Block("elements", (n,))

    @staticmethod
    def rows(n: int) -> Block:
        return Block("rows", (n,))

    @staticmethod
    def tile(r: int, c: int) -> Block:
        return Block("tile", (r, c))

    @staticmethod
    def slices(n: int) -> Block:
        return Block("slices", (n,))

    @staticmethod
    def whole() -> Block:
        return Block("whole")

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(map(str, self.sizes))})"

    def numel(self, shape: Sequence[int]) -> int:
        """Elements of one block in the flattened tensor of ``shape``, between 1 and ``max(1, prod(shape))``.

        A vector is a matrix of one row for ``rows`` and ``tile``; a 0-d tensor is one element.

        Raises ``ValueError`` for a tile whose rows neither divide the rows of a leading slice nor cover it whole: tiles
        restart with each slice, and evenly spaced cuts would then fall inside a tile.
        """
        total = math.prod(shape)
        columns = shape[-1] if len(shape) else 1
        if self.kind == "elements":
            size = self.sizes[0]
        elif self.kind == "rows":
            size = self.sizes[0] * columns
        elif self.kind == "tile":
            size = self._tile_numel(shape)
        elif self.kind == "slices":
            size = self.sizes[0] * math.prod(shape[1:])
        else:
            size = total
        return max(1, min(size, total))

    def _tile_numel(self, shape: Sequence[int]) -> int:
        rows = shape[-2] if len(shape) >= 2 else 1
        columns = shape[-1] if len(shape) else 1
        slices = math.prod(shape[:-2])
        tall = min(self.sizes[0], rows)
        if slices > 1 and rows and rows % tall:
            raise ValueError(
                f"{self}: tiles of {tall} rows do not divide the {rows} rows of each slice of a tensor of shape "
                f"{tuple(shape)}; use a divisor of {rows}, Block.rows({self.sizes[0]}) if rows may run on across "
                f"slices, or Block.slices(1)"
            )
        return tall * columns
