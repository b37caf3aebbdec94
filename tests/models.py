"""Small models that cover what a runtime meets: tied weights, 0-d and odd shapes, unused and frozen parameters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Pre-norm attention-free block with odd sizes, a vector, and a scalar parameter."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)
        self.gate = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.down(F.gelu(self.up(self.norm(x))))


class LanguageModel(nn.Module):
    """Embedding, blocks, norm, head; the head may share the embedding's weight."""

    def __init__(
        self, vocabulary: int = 19, width: int = 12, hidden: int = 28, depth: int = 3, tied: bool = False
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def tokens(vocabulary: int, rank: int, step: int, batch: int = 2, length: int = 5) -> tuple[Tensor, Tensor]:
    """Inputs and targets that are a function of rank and step alone."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    drawn = torch.randint(vocabulary, (batch, length + 1), generator=generator)
    return drawn[:, :-1], drawn[:, 1:]


def loss_of(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    logits = model(data[0])
    return F.cross_entropy(logits.flatten(0, 1).float(), data[1].flatten())
