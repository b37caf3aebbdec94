"""SGD against torch.optim.SGD; Lion against the formula of its paper."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import ragged_optim
from tests.ragged_optim.models import full

SHAPES = [(17, 31), (1,), (), (0, 3), (2, 3, 5)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.9, "dampening": 0.5, "maximize": True},
        {"lr": torch.tensor(0.5), "weight_decay": 0.5},
    ],
    ids=str,
)
def test_sgd_equals_torch(options: dict[str, Any]) -> None:
    ours = [nn.Parameter(full(shape, i)) for i, shape in enumerate(SHAPES)]
    theirs = copy.deepcopy(ours)
    a, b = ragged_optim.SGD(ours, **options), torch.optim.SGD(theirs, **options)
    for step in range(4):
        for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
            p.grad = full(p.shape, 100 * step + i)
            q.grad = p.grad.clone()
        a.step()
        b.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


def test_nesterov_needs_momentum() -> None:
    with pytest.raises(ValueError, match="Nesterov momentum requires a momentum and zero dampening"):
        ragged_optim.SGD([nn.Parameter(torch.ones(1))], nesterov=True)


def test_lion_is_the_sign_of_the_interpolated_momentum_with_decoupled_decay() -> None:
    param = nn.Parameter(full((17, 31), 0))
    optimizer = ragged_optim.Lion([param], lr=0.01, betas=(0.8, 0.95), weight_decay=0.5)
    p, m = param.detach().double(), torch.zeros(17, 31, dtype=torch.float64)
    for step in range(4):
        param.grad = full((17, 31), 1 + step)
        g = param.grad.double()
        p = p * (1 - 0.01 * 0.5) - 0.01 * torch.sign(0.8 * m + 0.2 * g)
        m = 0.95 * m + 0.05 * g
        optimizer.step()
    torch.testing.assert_close(param.double(), p, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(optimizer.state[param]["exp_avg"].double(), m, rtol=1e-5, atol=1e-6)
