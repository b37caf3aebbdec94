"""What 8 bits cost, on the states of a small language model in training; the loss of a run scatters more than that."""

from __future__ import annotations

import argparse
import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ragged_optim
from ragged_optim import convert
from ragged_optim import quantize as q
from ragged_optim.layout import Extent

WIDTH, LENGTH, BATCH = 48, 32, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, 3, WIDTH // 3).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*parts.unbind(), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class CharModel(nn.Module):
    """Bytes of Python source; the tables and rare characters are what spreads v over many decades."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.place = nn.Embedding(128, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128, bias=False)

    def loss(self, step: int) -> Tensor:
        text = source()
        starts = torch.randint(len(text) - LENGTH - 1, (BATCH, 1), generator=torch.Generator().manual_seed(step))
        tokens = text[starts + torch.arange(LENGTH + 1)]
        x = self.embed(tokens[:, :-1]) + self.place.weight
        return F.cross_entropy(self.head(self.norm(self.blocks(x))).flatten(0, 1), tokens[:, 1:].flatten())


@functools.cache
def source() -> Tensor:
    return torch.tensor([byte for byte in Path(argparse.__file__).read_bytes() if byte < 128])


def train(model: CharModel, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model.loss(step).backward()
        optimizer.step()


@functools.cache
def dumped() -> tuple[CharModel, dict[str, Any]]:
    """A model after 300 fp32 steps, with the gradient of the next, and its optimizer's state dict."""
    model = CharModel()
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=3e-3, betas=(0.9, 0.95), fused=True)
    train(model, optimizer, range(300))
    optimizer.zero_grad()
    model.loss(300).backward()
    return model, optimizer.state_dict()


def clone(model: CharModel) -> CharModel:
    made = CharModel()
    made.load_state_dict(model.state_dict())
    for mine, other in zip(made.parameters(), model.parameters(), strict=True):
        mine.grad = other.grad.clone()
    return made


def updates(model: CharModel, before: CharModel, dims: int) -> Tensor:
    pairs = zip(model.parameters(), before.parameters(), strict=True)
    return torch.cat([(p - old).detach().flatten() for p, old in pairs if p.ndim == dims])


def error_of_the_next_update(optimizer_of: Any, dims: int = 2) -> float:
    """Norm of what the step of the same moments in 8 bits differs, relative to the step in fp32; in all matrices."""
    model, saved = dumped()
    exact, rough = clone(model), clone(model)
    options = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.0}
    reference = torch.optim.AdamW(exact.named_parameters(), **options)
    reference.load_state_dict(copy.deepcopy(saved))
    reference.param_groups[0]["weight_decay"] = 0.0
    reference.step()
    optimizer = optimizer_of(rough, options)
    optimizer.step()
    expected = updates(exact, model, dims)
    return float((updates(rough, model, dims) - expected).norm() / expected.norm())


def ours(model: CharModel, options: dict[str, Any], *, stochastic: bool = False, **more: Any) -> Any:
    optimizer = ragged_optim.AdamW8bit(model.named_parameters(), **{"min_8bit_size": 1024, **options, **more})
    optimizer.load_state_dict(convert.from_torch(dumped()[1], optimizer))
    if stochastic:  # as steps write v
        for name, param in model.named_parameters():
            state = optimizer.state[param]
            if "exp_avg_sq.codes" in state:
                encode_stochastically(dict(dumped_moments())[name], state)
    return optimizer


def dumped_moments() -> list[tuple[str, Tensor]]:
    names, states = dumped()[1]["param_groups"][0]["param_names"], dumped()[1]["state"]
    return [(name, states[i]["exp_avg_sq"]) for i, name in enumerate(names)]


def encode_stochastically(v: Tensor, state: dict[str, Tensor]) -> None:
    scales = state["exp_avg_sq.scales"].repeat_interleave(32, 0)[: v.shape[0]].repeat_interleave(32, 1)[:, : v.shape[1]]
    rows, columns = (q.keys(n, 0, (seed,), v.device) for seed, n in enumerate(v.shape))
    noise = q.noise(rows[:, None], columns[None, :], torch.empty(v.shape, dtype=torch.int32))
    state["exp_avg_sq.codes"].copy_(q.encode_v(v / scales, noise) & 255)


@pytest.mark.parametrize("stochastic", [False, True])
def test_the_next_update_is_within_3_5_percent_at_beta2_95(stochastic: bool) -> None:
    # 0.028 to nearest, 0.030 with v rounded stochastically; the dynamic map of v itself is off by 143 %.
    assert 0.005 < error_of_the_next_update(functools.partial(ours, stochastic=stochastic)) <= 0.035


def test_the_next_update_with_the_dynamic_map_of_the_root() -> None:
    assert 0.005 < error_of_the_next_update(functools.partial(ours, format="dynamic")) <= 0.045


def test_vectors_lose_no_more_than_matrices() -> None:
    # Norms and biases stay in fp32 by default only because they are small.
    assert 0.005 < error_of_the_next_update(functools.partial(ours, min_8bit_size=0), dims=1) <= 0.035


@pytest.mark.parametrize("format", ["float", pytest.param("dynamic", marks=pytest.mark.deep)])
def test_v_follows_500_steps_of_training_at_beta2_999(format: str) -> None:
    model = CharModel()
    optimizer = ragged_optim.AdamW8bit(model.named_parameters(), lr=3e-3, min_8bit_size=1024, format=format)
    exact = {param: torch.zeros_like(param) for param in model.parameters()}
    for step in range(500):
        train(model, optimizer, range(step, step + 1))
        for param, v in exact.items():
            v.mul_(0.999).addcmul_(param.grad, param.grad, value=0.001)
    ratios = []
    for param, v in exact.items():
        state, shape = optimizer.state[param], tuple(param.shape)
        if "exp_avg_sq.codes" in state:
            extent = Extent(shape, 0, param.numel())
            found = q.decode_tiles(
                state["exp_avg_sq.codes"],
                state["exp_avg_sq.scales"],
                q.tiling(shape, 32, 32),
                extent,
                signed=False,
                dynamic=format == "dynamic",
            )
            ratios.append((found / v)[v > v.max() * 1e-9])
    ratio = torch.cat(ratios)
    root = ratio.sqrt().sort().values
    assert 0.95 <= float(root[len(root) // 2]) <= 1.05
    assert float(root[len(root) // 100]) > 0.55
    assert 0.97 <= float(ratio.mean()) <= 1.03
