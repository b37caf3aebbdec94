"""A byte-level GPT: RMSNorm, rotary positions, SwiGLU, no biases. Hidden weights are single matrices, as Muon wants."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256  # bytes


@dataclass(frozen=True)
class GPTConfig:
    layers: int
    width: int
    heads: int
    context: int  # tokens that the model sees
    tied: bool = False  # whether the head is the embedding

    @property
    def hidden(self) -> int:
        """Width of SwiGLU: 8/3 of the model's (three matrices then cost what two of 4x would), a multiple of 32."""
        return 32 * math.ceil(self.width * 8 / 3 / 32)


MODELS = {
    "micro": GPTConfig(layers=2, width=32, heads=2, context=32),  # 33 thousand parameters, for tests
    "tiny": GPTConfig(layers=3, width=96, heads=4, context=64),  # 0.4 million
    "small": GPTConfig(layers=6, width=384, heads=6, context=256),  # 11 million
    "medium": GPTConfig(layers=12, width=768, heads=12, context=512),  # 85 million
}


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(config.width, config.width, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(config.width, config.hidden, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(config.width), nn.RMSNorm(config.width)
        self.attention, self.mlp = Attention(config), SwiGLU(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self.reset_parameters()
        if config.tied:
            self.head.weight = self.embedding.weight

    def reset_parameters(self) -> None:
        """Normal weights of variance 1/fan_in; what is added to the residual stream is scaled down with depth."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                fan_in = parameter.shape[0] if name.startswith("embedding") else parameter.shape[1]
                depth = 2 * self.config.layers if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
                nn.init.normal_(parameter, std=0.02 if "embedding" in name else (fan_in * depth) ** -0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """``tokens`` [batch, time] integers -> logits [batch, time, 256]."""
        cos, sin = rotary_table(tokens.shape[1], self.config.width // self.config.heads, tokens.device)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def rotary_table(time: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos, sin [time, size / 2] in fp32 of position times frequency 10000^(-2 i / size)."""
    frequency = 10000.0 ** (-torch.arange(0, size, 2, device=device, dtype=torch.float32) / size)
    angle = torch.outer(torch.arange(time, device=device, dtype=torch.float32), frequency)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + size/2]) of the last dim by its position's angle. ``x`` [..., time, size]."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
