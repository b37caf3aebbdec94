"""SGD against torch.optim.SGD; Lion against the formula of its paper."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import ragged_optim
from ragged_optim import convert
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


def by_hand(optimizer: Any, seed: int) -> None:
    optimizer.param_groups[0]["momentum"] = (0.0, 0.9, 0.9, 0.0, 0.5, 0.5)[seed]


@pytest.mark.parametrize("dampening", [0.0, 0.3])
@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),
        lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
        None,
    ],
    ids=["onecycle", "cyclic", "by hand"],
)
def test_momentum_that_is_set_after_construction_is_taken_up_as_in_torch(make: Any, dampening: float) -> None:
    ours, theirs = nn.Parameter(full((5, 7), 0)), nn.Parameter(full((5, 7), 0))
    optimizers = ragged_optim.SGD([ours], dampening=dampening), torch.optim.SGD([theirs], dampening=dampening)
    schedulers = [make(optimizer) for optimizer in optimizers] if make else []
    for seed in range(6):
        for optimizer, param in zip(optimizers, (ours, theirs), strict=True):
            param.grad = full((5, 7), 1 + seed)
            if make is None:
                by_hand(optimizer, seed)
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert "momentum_buffer" in optimizers[0].state[ours]


@pytest.mark.parametrize("built_with", [{}, {"momentum": 0.9, "dampening": 0.3}], ids=str)
def test_a_state_dict_of_torch_with_momentum_and_dampening_goes_on(built_with: dict[str, Any]) -> None:
    theirs = nn.Parameter(full((5, 7), 0))
    other = torch.optim.SGD([theirs], momentum=0.9, dampening=0.3)
    for seed in range(2):
        theirs.grad = full((5, 7), seed)
        other.step()
    ours = [nn.Parameter(theirs.detach().clone()) for _ in range(2)]
    optimizers = [ragged_optim.SGD([p], **built_with) for p in ours]
    optimizers[0].load_state_dict(other.state_dict())
    optimizers[1].param_groups[0].update(momentum=0.9, dampening=0.3)
    optimizers[1].load_state_dict(convert.from_torch(other.state_dict(), optimizers[1]))
    for param, optimizer in ((theirs, other), *zip(ours, optimizers, strict=True)):
        param.grad = full((5, 7), 9)
        optimizer.step()
        torch.testing.assert_close(param, theirs, rtol=1e-6, atol=1e-6)


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


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("eight_bit", [False, True])
def test_lions_bad_gradient_shows_in_its_element_and_spoils_no_momentum(
    value: float, skip: bool, eight_bit: bool
) -> None:
    param = nn.Parameter(full((64, 64), 0))
    optimizer = ragged_optim.Lion([("w", param)], lr=0.01, momentum_8bit=eight_bit, skip_nonfinite=skip)
    param.grad = full((64, 64), 1)
    optimizer.step()
    before = {key: state.clone() for key, state in optimizer.state[param].items()}
    param.grad = torch.zeros(64, 64)
    param.grad[3, 40] = value
    finite = value == 1e30
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    said = [str(one.message) for one in caught if "non-finite" in str(one.message)]
    if finite or not (skip or eight_bit):
        assert not said
    elif skip:
        assert said == ["non-finite gradient of parameter 'w' in 1 element(s), which are taken as 0"]
    else:
        assert "'w' in 1 tile(s) of 32 x 32, at (row 0, column 32); the states of all other" in said[0]
    assert int(param.isnan().sum()) == int(not (finite or skip)) == int(param[3, 40].isnan())
    key = "exp_avg.codes" if eight_bit else "exp_avg"
    lost = (optimizer.state[param][key] == 0) != (before[key] == 0)
    # A finite one that is 2^16 times as large as its tile leaves no bits for the others, as in any format of its kind.
    assert int(lost.sum()) <= (1024 if finite and eight_bit else 1)
    param.grad = torch.zeros(64, 64)
    optimizer.step()
    assert int(param.isnan().sum()) == int(not (finite or skip))
