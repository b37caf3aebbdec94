"""Small modules, one per thing that a runtime gets wrong."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 8


def data(step: int = 0, rows: int = 4, width: int = WIDTH) -> Tensor:
    """Inputs that are a function of rank and step alone."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(rows, width, generator=generator)


def squares(model: nn.Module, step: int = 0) -> Tensor:
    """A scalar loss of ``model(data)``."""
    return model(data(step)).square().mean()


class Mlp(nn.Module):
    """Two odd-sized layers; shape preserving."""

    def __init__(self, width: int = WIDTH, hidden: int = 11) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Stack(nn.Module):
    """Three ``Mlp`` and a head of its own: four buckets, the last one the root's."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp() for _ in range(depth))
        self.head = nn.Parameter(torch.randn(WIDTH, 5))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x @ self.head


class Optional(nn.Module):
    """``skip`` names children that the forward does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Mlp(), Mlp(), Mlp()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.skip: tuple[str, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        for name, child in self.named_children():
            if name not in self.skip:
                x = child(x)
        return x if "scale" in self.skip else x * self.scale


class Half(nn.Module):
    """A block of which ``use`` says which of its two weights runs."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.use = "both"

    def forward(self, x: Tensor) -> Tensor:
        if self.use in ("both", "one"):
            x = x + self.one(x)
        if self.use in ("both", "two"):
            x = x + self.two(x)
        return x


class Adapted(nn.Module):
    """Frozen weights between low-rank adapters (LoRA): at the start, around, or at the end of the block."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.frozen_in, self.frozen_out = nn.Linear(WIDTH, 13), nn.Linear(13, WIDTH)
        self.A, self.B = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        for frozen in (self.frozen_in, self.frozen_out):
            frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "start":
            x = x + self.B(self.A(x))
        y = self.frozen_out(F.gelu(self.frozen_in(x)))
        if self.where == "around":
            y = y + self.B(self.A(x))
        if self.where == "end":
            y = y + self.B(self.A(y))
        return x + y


class Adapters(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Adapted(where) for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.head.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclasses.dataclass
class Output:
    hidden: Tensor
    extra: dict[str, Tensor]
    note: str = ""


class Structured(nn.Module):
    """Blocks that return tuples, dicts and dataclasses and take keyword arguments."""

    class Block(nn.Module):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.kind = kind
            self.body, self.side = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, *, shift: Tensor, flags: dict[str, Tensor] | None = None) -> object:
            if flags is not None:
                x = x * flags["gain"]
            hidden, extra = self.body(x + shift), self.side(x)
            if self.kind == "tuple":
                return hidden, [extra, None, 3]
            if self.kind == "dict":
                return {"hidden": hidden, "nested": {"extra": extra}}
            return Output(hidden, {"extra": extra}, "text")

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(self.Block(kind) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for block in self.blocks:
            out = block(x, shift=x.flip(0), flags={"gain": x.sigmoid()})
            if self.kind == "tuple":
                x, extra = out[0], out[1][0]
            elif self.kind == "dict":
                x, extra = out["hidden"], out["nested"]["extra"]
            else:
                x, extra = out.hidden, out.extra["extra"]
            total = total + extra.square().mean()
        return total + x
