"""States of torch, dion and bitsandbytes: training continues where theirs stopped."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import ragged_optim
from ragged_optim import convert
from ragged_optim import quantize as q
from ragged_optim.layout import Extent
from tests.ragged_optim.models import full

SHAPES = [(24, 16), (16, 24), (16,)]


def params() -> list[tuple[str, nn.Parameter]]:
    return [(f"layer.{i}.weight", nn.Parameter(full(shape, i))) for i, shape in enumerate(SHAPES)]


def step(pairs: list[tuple[str, nn.Parameter]], *optimizers: Any, seed: int) -> None:
    for i, (_, param) in enumerate(pairs):
        param.grad = full(param.shape, 10 * seed + i)
    for optimizer in optimizers:
        optimizer.step()


def copied(pairs: list[tuple[str, nn.Parameter]]) -> list[tuple[str, nn.Parameter]]:
    return [(name, nn.Parameter(param.detach().clone())) for name, param in pairs]


def test_torchs_muon_and_adamw_continue_in_one_optimizer() -> None:
    theirs = params()
    muon = torch.optim.Muon(theirs[:2], lr=0.02)
    adamw = torch.optim.AdamW(theirs[2:], lr=0.01)
    for seed in range(3):
        step(theirs, muon, adamw, seed=seed)
    ours = copied(theirs)
    optimizer = ragged_optim.Muon(ours, lr=0.02, adamw_lr=0.01)
    for other in (muon, adamw):
        optimizer.load_state_dict(convert.from_torch(other.state_dict(), optimizer))
    step(theirs, muon, adamw, seed=9)
    step(ours, optimizer, seed=9)
    for (_, a), (_, b) in zip(theirs, ours, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("theirs", "ours"), [("AdamW", "AdamW8bit"), ("Adam", "Adam8bit")])
@pytest.mark.parametrize("format", ["float", "dynamic"])
def test_torchs_adam_continues_in_8_bits(theirs: str, ours: str, format: str) -> None:
    a = [("w", nn.Parameter(full((96, 64), 0))), ("b", nn.Parameter(full((96,), 1)))]
    other = getattr(torch.optim, theirs)(a, lr=0.01)
    for seed in range(5):
        step(a, other, seed=seed)
    b = copied(a)
    optimizer = getattr(ragged_optim, ours)(b, lr=0.01, format=format)
    optimizer.load_state_dict(convert.from_torch(other.state_dict(), optimizer))
    before = [p.detach().clone() for _, p in a]
    step(a, other, seed=7)
    step(b, optimizer, seed=7)
    for (_, x), (_, y), old in zip(a, b, before, strict=True):
        assert float(optimizer.state[y]["step"]) == 6
        assert (x - y).norm() < 0.06 * (x - old).norm()


def test_dions_momentum_is_larger_by_one_over_one_minus_mu() -> None:
    ours = params()[:2]
    optimizer = ragged_optim.Muon(ours, momentum=0.95)
    for seed in range(3):
        step(ours, optimizer, seed=seed)
    heavy = {i: {"momentum": torch.zeros(shape)} for i, shape in enumerate(SHAPES[:2])}
    for seed in range(3):
        for i, shape in enumerate(SHAPES[:2]):
            heavy[i]["momentum"].mul_(0.95).add_(full(shape, 10 * seed + i))
    saved = {"state": heavy, "param_groups": [{"params": [0, 1], "algorithm": "muon"}]}
    again = ragged_optim.Muon(copied(ours), momentum=0.95)
    again.load_state_dict(convert.from_dion(saved, again))
    for a, b in zip(optimizer.state.values(), again.state.values(), strict=True):
        torch.testing.assert_close(a["momentum_buffer"], b["momentum_buffer"], rtol=1e-5, atol=1e-6)


def test_dions_adamw_continues_in_8_bits() -> None:
    param = nn.Parameter(full((96, 64), 0))
    m, v = full((96, 64), 1), full((96, 64), 2).square()
    saved = {
        "state": {0: {"step": 3, "momentum": m, "variance": v}},
        "param_groups": [{"params": [0], "algorithm": "adamw"}],
    }
    optimizer = ragged_optim.AdamW8bit([("w", param)])
    optimizer.load_state_dict(convert.from_dion(saved, optimizer))
    state = optimizer.state[param]
    assert float(state["step"]) == 3
    tiles, extent = q.tiling((96, 64), 32, 32), Extent((96, 64), 0, 96 * 64)
    for value, moment, signed in ((m, "exp_avg", True), (v, "exp_avg_sq", False)):
        found = q.decode_tiles(state[f"{moment}.codes"], state[f"{moment}.scales"], tiles, extent, signed=signed)
        torch.testing.assert_close(found, value, rtol=1 / 16, atol=1e-3 if signed else 1e-7)


@pytest.mark.parametrize("name", ["Muon", "NorMuon", "Lion"])
def test_a_momentum_that_is_kept_in_8_bits_is_rounded(name: str) -> None:
    for shape in ((64, 48), (2, 32, 40)):
        param, value = nn.Parameter(full(shape, 0)), full(shape, 1)
        optimizer = getattr(ragged_optim, name)([("w", param)], momentum_8bit=True, min_8bit_size=0)
        param.requires_grad_(False)  # has no state yet where it was frozen when the optimizer was built
        again = getattr(ragged_optim, name)([("w", param)], momentum_8bit=True, min_8bit_size=0)
        key = "exp_avg" if name == "Lion" else "momentum_buffer"
        scale = 1.0 if name == "Lion" else 1 - 0.95
        saved: dict[str, Any] = {"state": {0: {"momentum": value}}, "param_groups": [{"params": [0]}]}
        if name == "NorMuon":
            saved["state"][0]["variance_neuron"] = full((*shape[:-1], 1), 2)
        for each in (optimizer, again):
            each.load_state_dict(convert.from_dion(saved, each))
            state, tiles = each.state[param], q.tiling(shape, 32, 32)
            codes = state[f"{key}.codes"], state[f"{key}.scales"]
            found = q.decode_tiles(*codes, tiles, Extent(shape, 0, value.numel()))
            torch.testing.assert_close(found, scale * value, rtol=1 / 16, atol=1e-3 * scale)
        if name == "Muon":
            torchs = {**saved, "state": {0: {"momentum_buffer": value}}}
            again.load_state_dict(convert.from_torch(torchs, again))
            found = q.decode_tiles(*codes, tiles, Extent(shape, 0, value.numel()))
            torch.testing.assert_close(found, value, rtol=1 / 16, atol=1e-3)


def test_dions_normuon_goes_on_in_stacks_and_split_weights() -> None:
    stack, fused = nn.Parameter(full((2, 8, 5), 0)), nn.Parameter(full((12, 5), 1))
    rows = full((2, 8, 1), 2), full((12, 1), 3)
    for param, variance, options, expected in (
        (stack, rows[0], {}, list(rows[0])),
        (fused, rows[1], {"split_sizes": (4, 8)}, list(rows[1].split([4, 8]))),
    ):
        optimizer = ragged_optim.NorMuon([("w", param)], **options)
        state = {"momentum": full(param.shape, 4), "variance_neuron": variance}
        saved = {"state": {0: state}, "param_groups": [{"params": [0]}]}
        optimizer.load_state_dict(convert.from_dion(saved, optimizer))
        for index, value in enumerate(expected):
            assert torch.equal(optimizer.state[param][f"second_momentum_buffer.{index}"], value)


def test_amsgrad_is_not_dropped_on_the_way_into_8_bits() -> None:
    param = nn.Parameter(full((64, 64), 0))
    other = torch.optim.AdamW([param], amsgrad=True)
    param.grad = full((64, 64), 1)
    other.step()
    optimizer = ragged_optim.AdamW8bit([param])
    with pytest.raises(ValueError, match="Adam with amsgrad, which adamw8bit has not; take 'max_exp_avg_sq' out"):
        convert.from_torch(other.state_dict(), optimizer)


@pytest.mark.parametrize("ours", ["AdamW", "AdamW8bit"])
def test_bitsandbytes_states_continue(ours: str) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    theirs = [("w", nn.Parameter(full((96, 64), 0))), ("b", nn.Parameter(full((96,), 1)))]
    other = bnb.optim.AdamW8bit([p for _, p in theirs], lr=0.01)
    exact = copy.deepcopy(theirs)
    reference = torch.optim.AdamW([p for _, p in exact], lr=0.01)
    for seed in range(5):
        step(theirs, other, seed=seed)
        step(exact, reference, seed=seed)
    mine = copied(theirs)
    optimizer = getattr(ragged_optim, ours)([p for _, p in mine], lr=0.01)
    optimizer.load_state_dict(convert.from_bitsandbytes(other.state_dict(), optimizer))
    for (_, p), (_, r) in zip(mine, exact, strict=True):
        state, target = optimizer.state[p], reference.state[r]
        assert float(state["step"]) == 5
        if "exp_avg" in state:
            scale = target["exp_avg"].abs().max()
            assert (state["exp_avg"] - target["exp_avg"]).abs().max() < 0.05 * scale
    before = [p.detach().clone() for _, p in mine]
    step(theirs, other, seed=7)
    step(mine, optimizer, seed=7)
    for (_, a), (_, b), old in zip(theirs, mine, before, strict=True):
        moved = (a - old).norm()
        assert (a - b).norm() < 0.15 * moved


def test_a_map_of_codes_and_maxima_is_decoded() -> None:
    levels = torch.linspace(-1, 1, 256)
    states = {
        "step": 3,
        "state1": torch.full((300,), 255, dtype=torch.uint8),
        "qmap1": levels,
        "absmax1": torch.tensor([2.0, 4.0]),
        "state2": torch.ones(300),
    }
    param = nn.Parameter(torch.zeros(300))
    optimizer = ragged_optim.AdamW([param])
    saved = {"state": {0: states}, "param_groups": [{"params": [0]}]}
    optimizer.load_state_dict(convert.from_bitsandbytes(saved, optimizer))
    expected = torch.cat([torch.full((256,), 2.0), torch.full((44,), 4.0)])
    assert torch.equal(optimizer.state[param]["exp_avg"], expected)
    assert torch.equal(optimizer.state[param]["exp_avg_sq"], torch.ones(300))


@pytest.mark.parametrize(
    ("state", "group", "message"),
    [
        ({0: {"exp_avg": 1}}, {"params": [0]}, "has 1 parameters without names, this optimizer 2"),
        (
            {0: {"momentum": torch.zeros(24, 16)}},
            {"params": [0, 1], "param_names": ["x", "y"]},
            "none of which is a parameter",
        ),
        (
            {0: {"speed": torch.zeros(24, 16)}},
            {"params": [0, 1]},
            "parameter 'layer.0.weight' has no 'momentum'; it has speed",
        ),
    ],
)
def test_other_states_are_refused(state: Any, group: Any, message: str) -> None:
    optimizer = ragged_optim.Muon(params()[:2])
    with pytest.raises(ValueError, match=message):
        convert.from_dion({"state": state, "param_groups": [group]}, optimizer)
