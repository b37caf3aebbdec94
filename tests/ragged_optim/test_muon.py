"""Muon against torch.optim.Muon and a float64 reference.

Fused weights, stacks and convolutions against separate matrices.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import ragged_optim
from ragged_optim import newton_schulz as ns
from ragged_optim.rules import muon
from tests import cluster
from tests.ragged_optim.models import full, shard


def train(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: int = 4) -> None:
    for step in range(steps):
        for i, param in enumerate(params):
            param.grad = full(param.shape, 100 * step + i, param.dtype)
        optimizer.step()


def reference(weight: Tensor, steps: int, **o: Any) -> tuple[Tensor, Tensor]:
    """Muon as written down, in float64, iterating in ``ns_dtype``."""
    p, buf = weight.double(), torch.zeros(weight.shape, dtype=torch.float64)
    for step in range(steps):
        g = full(weight.shape, 100 * step, weight.dtype).double()
        buf = o["momentum"] * buf + (1 - o["momentum"]) * g
        u = (1 - o["momentum"]) * g + o["momentum"] * buf if o["nesterov"] else buf
        update = ns.newton_schulz(u.to(o["ns_dtype"])).double()
        p = p * (1 - o["lr"] * o["weight_decay"]) - o["lr"] * math.sqrt(max(1, p.shape[0] / p.shape[1])) * update
    return p, buf


@pytest.mark.parametrize("shape", [(32, 48), (48, 32), (16, 16), (1, 16), (16, 1)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": False},
        {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.5},
        {"ns_steps": 3, "lr": torch.tensor(0.1)},
    ],
    ids=str,
)
def test_equals_torch_bit_for_bit(shape: tuple[int, int], options: dict[str, Any]) -> None:
    ours = [nn.Parameter(full(shape, 0))]
    theirs = copy.deepcopy(ours)
    train(ours, ragged_optim.Muon(ours, **options))
    train(theirs, torch.optim.Muon(theirs, **options))
    assert torch.equal(ours[0], theirs[0])


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_equals_a_float64_reference(shape: tuple[int, int], dtype: torch.dtype, nesterov: bool) -> None:
    # pytorch/pytorch#194664: with bf16 parameters and no nesterov torch normalises its momentum in place.
    param = nn.Parameter(full(shape, 5, dtype))
    options = {"lr": 0.02, "nesterov": nesterov, "momentum": 0.95, "weight_decay": 0.1}
    optimizer = ragged_optim.Muon([param], ns_dtype=torch.float32, state_dtype=torch.float32, **options)
    expected, buf = reference(param.detach(), 4, ns_dtype=torch.float64, **options)
    train([param], optimizer)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(param.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(optimizer.state[param]["momentum_buffer"].double(), buf, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_normuon_equals_its_formula_in_float64(shape: tuple[int, int]) -> None:
    lr, mu, beta2, decay = 0.02, 0.9, 0.8, 0.1
    param = nn.Parameter(full(shape, 5))
    options = {"lr": lr, "momentum": mu, "beta2": beta2, "weight_decay": decay, "ns_dtype": torch.float32}
    optimizer = ragged_optim.NorMuon([param], **options)
    p, buf, v = param.detach().double(), torch.zeros(shape).double(), torch.zeros(shape[0]).double()
    for step in range(4):
        g = full(shape, 100 * step).double()
        buf = mu * buf + (1 - mu) * g
        o = ns.newton_schulz((1 - mu) * g + mu * buf)
        v = beta2 * v + (1 - beta2) * (o * o).sum(1) / shape[1]
        by_row = o / v[:, None].sqrt()
        o = by_row * (torch.linalg.norm(o) / torch.linalg.norm(by_row))
        p = p * (1 - lr * decay) - lr * math.sqrt(max(1, shape[0] / shape[1])) * o
    train([param], optimizer)
    torch.testing.assert_close(param.double(), p, rtol=1e-5, atol=1e-5)
    found = optimizer.state[param]["second_momentum_buffer"].double()
    torch.testing.assert_close(found.flatten(), v, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", ["keller", "quintic", "polar_express", "deepseek"])
def test_the_applied_update_is_orthogonal_within_the_stated_bound(name: str) -> None:
    param = nn.Parameter(torch.zeros(24, 40))
    options = {"lr": 1.0, "weight_decay": 0.0, "ns_coefficients": name, "ns_steps": 8, "ns_dtype": torch.float32}
    optimizer = ragged_optim.Muon([param], **options)
    param.grad = full((24, 40), 1)
    optimizer.step()
    singular = torch.linalg.svdvals(param.grad)
    low, high = ns.singular_value_range(name, 8, float(singular.min() / singular.norm()))
    got = torch.linalg.svdvals(param.detach())
    assert got.min() > low - 1e-4 and got.max() < high + 1e-4


@given(
    slices=st.integers(1, 4),
    rows=st.integers(1, 12),
    cols=st.integers(1, 12),
    splits=st.lists(st.integers(1, 5), max_size=3),
)
def test_stacks_and_row_splits_are_separate_matrices(slices: int, rows: int, cols: int, splits: list[int]) -> None:
    sizes = [*splits, rows]
    stack = nn.Parameter(full((slices, sum(sizes), cols), 0))
    apart = [nn.Parameter(part.clone()) for slice_ in stack.detach() for part in slice_.split(sizes)]
    a = ragged_optim.Muon([stack], split_sizes=sizes)
    b = ragged_optim.Muon(apart)
    for step in range(2):
        stack.grad = full(stack.shape, step)
        parts = [part for slice_ in stack.grad for part in slice_.split(sizes)]
        for param, part in zip(apart, parts, strict=True):
            param.grad = part.clone()
        a.step()
        b.step()
    assert torch.equal(torch.cat([p.detach() for p in apart]), stack.detach().reshape(-1, cols))


def test_flattened_convolution_is_one_matrix() -> None:
    conv = nn.Parameter(full((8, 3, 2, 2), 0))
    flat = nn.Parameter(conv.detach().reshape(8, 12).clone())
    a, b = ragged_optim.Muon([conv], flatten=True), ragged_optim.Muon([flat])
    conv.grad = full(conv.shape, 1)
    flat.grad = conv.grad.reshape(8, 12)
    a.step()
    b.step()
    assert torch.equal(conv.detach().reshape(8, 12), flat.detach())


def test_cautious_decay_only_pulls_where_the_step_does() -> None:
    param = nn.Parameter(full((12, 12), 0))
    plain = nn.Parameter(param.detach().clone())
    start = param.detach().clone()
    a = ragged_optim.Muon([param], lr=0.1, weight_decay=1.0, weight_decay_mode="cautious")
    b = ragged_optim.Muon([plain], lr=0.1, weight_decay=0.0)
    train([param], a, 1)
    train([plain], b, 1)
    step = plain.detach() - start
    decayed = (param.detach() - plain.detach()).abs() > 1e-7
    assert torch.equal(decayed, step * start < 0)


@pytest.mark.parametrize(
    ("mode", "expected"), [(None, 2.0), ("original", 2.0), ("match_rms_adamw", 1.6), ("spectral", 2.0)]
)
def test_adjusted_learning_rates(mode: str | None, expected: float) -> None:
    assert muon.adjusted(mode, (64, 16)) == pytest.approx(expected)
    assert muon.adjusted("spectral", (16, 64)) == pytest.approx(0.5) and muon.adjusted(None, (16, 64)) == 1.0


def count_iterations(layout: str, accumulate: int) -> int:
    calls = 0
    real = ns.newton_schulz_all

    def counting(matrices: list[Tensor], *args: Any, **kwargs: Any) -> list[Tensor]:
        nonlocal calls
        calls += len(matrices)
        return real(matrices, *args, **kwargs)

    mesh = cluster.mesh((torch.distributed.get_world_size(),))
    shapes = [(8, 12), (12, 8), (3, 4, 4), (5, 5)]
    params = [nn.Parameter(shard(full(s, i), layout, mesh, i)) for i, s in enumerate(shapes)]
    optimizer = ragged_optim.Muon(params)
    ns.newton_schulz_all = counting
    try:
        for _ in range(2):
            for i, (param, s) in enumerate(zip(params, shapes, strict=True)):
                param.grad = None
                for _ in range(accumulate):
                    grad = shard(full(s, i), layout, mesh, i)
                    param.grad = grad if param.grad is None else param.grad + grad
            optimizer.step()
    finally:
        ns.newton_schulz_all = real
    return calls


@pytest.mark.parametrize("layout", ["shard0", "ragged"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_one_iteration_per_matrix_and_step_over_all_ranks(layout: str, accumulate: int) -> None:
    # Six matrices (one parameter is a stack of three), two steps.
    assert sum(cluster.run(3, count_iterations, layout, accumulate)) == 12
