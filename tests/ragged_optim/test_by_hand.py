"""What users do to ``param_groups`` and ``state`` by hand, between steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ragged_optim
from ragged_optim import ParamPolicy, convert
from tests import cluster
from tests.ragged_optim.models import digest, full, shard

SHAPES = [(17, 31), (8, 8), (64, 64), (5,)]


def parameters(layout: str = "plain", seed: int = 0) -> list[nn.Parameter]:
    mesh = None if layout == "plain" else cluster.mesh((dist.get_world_size(),))
    return [nn.Parameter(shard(full(s, seed + i), layout, mesh, 3 * i)) for i, s in enumerate(SHAPES)]


def named(params: list[nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    return [(f"layer.{i}.weight", p) for i, p in enumerate(params)]


def step(optimizer: Any, params: list[nn.Parameter], number: int, layout: str = "plain") -> None:
    mesh = None if layout == "plain" else cluster.mesh((dist.get_world_size(),))
    for i, param in enumerate(params):
        param.grad = shard(full(tuple(param.shape), 100 * number + i), layout, mesh, 3 * i)
    optimizer.step()


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_amsgrad_switched_off_does_not_write_where_nothing_is(name: str) -> None:
    ours, theirs = full((64, 65), 0), nn.Parameter(full((64, 65), 0))
    mine = nn.Parameter(ours)
    optimizers = [getattr(package, name) for package in (ragged_optim, torch.optim)]
    a, b = (make([p], amsgrad=True, lr=0.1) for make, p in zip(optimizers, (mine, theirs), strict=True))
    for number, amsgrad in enumerate((True, False, True)):
        for optimizer, param in ((a, mine), (b, theirs)):
            optimizer.param_groups[0]["amsgrad"] = amsgrad
            param.grad = full((64, 65), number)
            optimizer.step()
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


def test_amsgrad_switched_on_begins_with_the_next_step() -> None:
    param = nn.Parameter(full((64, 65), 0))
    optimizer = ragged_optim.AdamW([param])
    for number, amsgrad in enumerate((False, True, True)):
        optimizer.param_groups[0]["amsgrad"] = amsgrad
        param.grad = full((64, 65), number)
        optimizer.step()
    assert bool((optimizer.state[param]["max_exp_avg_sq"] >= optimizer.state[param]["exp_avg_sq"]).all())


def test_a_tensor_of_the_users_own_may_lie_in_the_state() -> None:
    params = [nn.Parameter(full((64, 64), 0)) for _ in range(2)]
    for param in params:
        optimizer = ragged_optim.AdamW([param])
        if param is params[0]:
            optimizer.state[param]["ema"] = param.detach().clone()
        param.grad = full((64, 64), 1)
        optimizer.step()
    assert torch.equal(*params)


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Muon", "SOAP", "AdamW8bit"])
def test_states_that_were_looked_at_or_taken_away_are_made_again(name: str) -> None:
    fresh, used = parameters(), parameters()
    used[0].requires_grad_(False)
    first, second = (getattr(ragged_optim, name)(named(params)) for params in (fresh, used))
    for param in used:
        _ = second.state[param]  # of a frozen one, too: an empty dict in the defaultdict
    used[0].requires_grad_(True)
    step(second, used, 0)
    for param, start in zip(used, parameters(), strict=True):
        param.data.copy_(start.detach())
        second.state[param] = {}
    step(first, fresh, 1)
    step(second, used, 1)
    assert all(map(torch.equal, fresh, used))


def edited(name: str, layout: str) -> list[bool]:
    """Against an optimizer that was made for what is left: groups that are other dicts, fewer, and other parameters."""
    params, again = parameters(layout), parameters(layout)
    optimizer = getattr(ragged_optim, name)(named(params), lr=0.1)
    kept = {param: digest(param) for param in params}
    optimizer.param_groups = [{**group, "lr": 0.0} for group in optimizer.param_groups]
    step(optimizer, params, 0, layout)
    found = [digest(param) == start for param, start in kept.items()]

    left = optimizer.param_groups[0]["params"].pop(0)  # it keeps its state
    del optimizer.param_groups[0]["param_names"][0]
    state = {key: digest(value) for key, value in optimizer.state[left].items()}
    step(optimizer, params, 1, layout)
    found.append(digest(left) == kept[left])
    found.append(all(digest(optimizer.state[left][key]) == value for key, value in state.items()))
    number = sum(len(group["params"]) for group in optimizer.param_groups)
    found.append(len(optimizer.state_dict()["state"]) == number == len(params) - 1)

    # As accelerate does: made on a model whose parameters are then replaced by shards.
    optimizer = getattr(ragged_optim, name)(named(parameters(seed=7)), lr=0.1)
    expected = getattr(ragged_optim, name)(named(params := parameters(layout)), lr=0.1)
    by_name = dict(named(again))
    for group in optimizer.param_groups:
        group["params"] = [by_name[n] for n in group["param_names"]]
    for number in range(2):
        step(optimizer, again, number, layout)
        step(expected, params, number, layout)
    found += [digest(a) == digest(b) for a, b in zip(again, params, strict=True)]
    return [*found, len(optimizer.state) == len(params), len(optimizer.state_dict()["state"]) == len(params)]


@pytest.mark.parametrize("name", ["AdamW", "Muon", "SOAP"])
def test_groups_edited_by_hand_are_what_the_next_step_sees(name: str) -> None:
    assert all(edited(name, "plain"))
    for found in cluster.run(2, edited, name, "ragged"):
        assert all(found), found


def test_a_parameter_may_be_replaced_by_a_longer_one_with_its_states() -> None:
    """As Gaussian splatting does when it makes new points."""
    param = nn.Parameter(full((6, 3), 0))
    optimizer = ragged_optim.Adam([{"params": [param]}], lr=0.1, eps=1e-15)
    step(optimizer, [param], 0)
    (group,) = optimizer.param_groups
    state = optimizer.state.pop(param)
    more = nn.Parameter(torch.cat([param.detach(), full((2, 3), 1)]))
    for key in ("exp_avg", "exp_avg_sq"):
        state[key] = torch.cat([state[key], torch.zeros(2, 3)])
    group["params"][0] = more
    optimizer.state[more] = state
    theirs = nn.Parameter(more.detach().clone())
    reference = torch.optim.Adam([theirs], lr=0.1, eps=1e-15)
    reference.state[theirs] = copy.deepcopy(state)
    step(optimizer, [more], 1)
    step(reference, [theirs], 1)
    torch.testing.assert_close(more, theirs, rtol=1e-6, atol=1e-6)
    assert len(optimizer.state_dict()["state"]) == 1


@pytest.mark.parametrize("direction", ["from_torch", "to_bitsandbytes"])
def test_states_without_names_are_not_exchanged_between_parameters_of_one_shape(direction: str) -> None:
    """Groups that a policy has split are in another order than the model."""
    module = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(4)])

    def policy(name: str, parameter: Tensor) -> ParamPolicy | None:
        return ParamPolicy(weight_decay=0.0) if name in ("0.weight", "2.weight") else None

    ours = ragged_optim.AdamW(module.named_parameters(), orig_param_policy=policy)
    theirs: Any = torch.optim.AdamW(module.parameters())
    if direction == "to_bitsandbytes":
        theirs = pytest.importorskip("bitsandbytes").optim.AdamW8bit(module.parameters())
    for i, param in enumerate(module.parameters()):
        param.grad = torch.full_like(param, i + 1.0)
    if direction == "from_torch":
        theirs.step()
        ours.load_state_dict(convert.from_torch(theirs.state_dict(), ours))
        found = [ours.state[param]["exp_avg"] for param in module.parameters()]
    else:
        ours.step()
        theirs.load_state_dict(convert.to_bitsandbytes(ours, theirs))
        found = [theirs.state[param]["state1"] for param in module.parameters()]
    assert [round(float(m.mean()), 6) for m in found] == [0.1, 0.2, 0.3, 0.4]


def cut_tiles_by_hand() -> str:
    param = nn.Parameter(shard(full((96, 64), 0), "shard0", cluster.mesh((2,))))
    optimizer = ragged_optim.AdamW8bit([("w", nn.Parameter(full((96, 64), 0)))])
    optimizer.param_groups[0]["params"][0] = param
    param.grad = shard(full((96, 64), 1), "shard0", cluster.mesh((2,)))
    try:
        optimizer.step()
    except ValueError as error:
        return str(error)
    return ""


def test_shards_put_into_a_group_by_hand_may_not_cut_tiles_either() -> None:
    for said in cluster.run(2, cut_tiles_by_hand):
        assert "parameter 'w' of shape (96, 64)" in said and "cuts the block" in said


def test_parameters_appended_to_a_group_or_taken_out_without_their_names_are_stepped() -> None:
    params = parameters()
    optimizer = ragged_optim.AdamW(named(params[:2]), lr=0.1)
    optimizer.param_groups[0]["params"] += params[2:]
    before = [digest(param) for param in params]
    step(optimizer, params, 0)
    assert not any(map(str.__eq__, before, map(digest, params)))
    optimizer.param_groups[0]["params"].pop(0)
    step(optimizer, params, 1)
    assert len(optimizer.state_dict()["state"]) == len(params) - 1


def frozen_on_one_rank(local: bool) -> list[str]:
    """``local``: the frozen matrix lies whole on a rank."""
    mesh, said = cluster.mesh((2,)), []
    kinds = ("onehot" if local else "ragged", "ragged", "shard0")
    params = [nn.Parameter(shard(full((12, 8), i), kind, mesh, i)) for i, kind in enumerate(kinds)]
    params[0].requires_grad_(dist.get_rank() == 1)
    optimizer = ragged_optim.Muon(named(params))
    for changed in (False, True):
        for i, param in enumerate(params):
            param.grad = shard(full((12, 8), 9 + i), kinds[i], mesh, i) if i and not changed else None
        if changed:  # and now on all: the optimizer is made anew
            params[0].requires_grad_(True)
            optimizer = ragged_optim.Muon(named(params))
            params[0].grad = shard(full((12, 8), 9), kinds[0], mesh, 0)
        try:
            optimizer.step()
        except RuntimeError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("local", [False, True])
def test_a_matrix_that_is_frozen_on_one_rank_is_an_error_on_all(local: bool) -> None:
    first, second = cluster.run(2, frozen_on_one_rank, local)
    assert first == second and len(first) == 1
    assert "1 parameter(s) under a matrix rule are frozen on some ranks and not on others: 'layer.0.weight'" in first[0]
