"""The models that are measured: decoder-only transformers, dense and with a mixture of experts.

    gpt15    13.8 M parameters   6 layers, d 384
    gpt60    63.0 M              8 layers, d 768
    moe45    43.3 M              4 layers, d 384, 16 experts (two 3-D stacks a layer), top-2
    tiny     42 K                2 layers, d 32: for the tests
    tinymoe  46 K                2 layers, d 32, 4 experts

All have learned positions, LayerNorm with bias, an untied head and no buffer, so that what moves between ranks is
parameters and gradients alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

__all__ = ["MODELS", "Config", "Transformer", "build"]


@dataclass(frozen=True)
class Config:
    """Sizes of a model: ``experts == 0`` is a dense one with an MLP of 4 d; an expert's hidden size is 2 d."""

    layers: int
    width: int
    heads: int
    vocabulary: int = 4096
    positions: int = 64
    experts: int = 0
    active_experts: int = 2


MODELS: dict[str, Config] = {
    "gpt15": Config(layers=6, width=384, heads=6),
    "gpt60": Config(layers=8, width=768, heads=12),
    "moe45": Config(layers=4, width=384, heads=6, experts=16),
    "tiny": Config(layers=2, width=32, heads=2, vocabulary=256, positions=16),
    "tinymoe": Config(layers=2, width=32, heads=2, vocabulary=64, positions=16, experts=4),
}


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Experts(nn.Module):
    """Top-k routing over two stacks, ``up [experts, d, 2 d]`` and ``down [experts, 2 d, d]``."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.active = config.active_experts
        self.router = nn.Linear(config.width, config.experts, bias=False)
        self.up = nn.Parameter(torch.empty(config.experts, config.width, 2 * config.width))
        self.down = nn.Parameter(torch.empty(config.experts, 2 * config.width, config.width))
        for stack in (self.up, self.down):
            nn.init.normal_(stack, std=stack.shape[1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, choices = self.router(tokens).softmax(-1).topk(self.active, dim=-1)
        y = torch.zeros_like(tokens)
        for expert, (up, down) in enumerate(zip(self.up.unbind(0), self.down.unbind(0), strict=True)):
            rows, slots = (choices == expert).nonzero(as_tuple=True)
            out = F.gelu(tokens[rows] @ up) @ down
            y = y.index_add(0, rows, out * weights[rows, slots, None])
        return y.view_as(x)


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = Experts(config) if config.experts else MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """``forward(tokens [batch, length], targets [batch, length]) -> mean cross entropy`` (0-d)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.positions, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build(name: str, seed: int = 0) -> Transformer:
    """A model of ``MODELS`` with the same random values on every rank and in every variant."""
    torch.manual_seed(seed)
    return Transformer(MODELS[name])
