"""States are DTensors.

Plain DCP saves them and reshards them to other worlds and layouts, and training continues exactly.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

import ragged_optim
from tests import cluster
from tests.ragged_optim.models import digest, full, shard

SHAPES = {"embed.weight": (11, 6), "a.weight": (17, 6), "a.bias": (17,), "experts": (3, 5, 4), "b.weight": (5, 17)}


class Model(nn.Module):
    """Parameters only; the tests write the gradients."""

    def __init__(self, layout: str, seed: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        mesh = None if layout == "plain" else cluster.mesh((dist.get_world_size(),))
        for i, (name, shape) in enumerate(SHAPES.items()):
            owner: nn.Module = self
            *parents, leaf = name.split(".")
            for parent in parents:
                if not hasattr(owner, parent):
                    owner.add_module(parent, nn.Module())
                owner = getattr(owner, parent)
            whole = full(shape, seed + i, dtype)
            owner.register_parameter(leaf, nn.Parameter(shard(whole, layout, mesh, seed + 7 * i)))


def grad_step(model: nn.Module, optimizer: Any, step: int) -> None:
    for i, (name, param) in enumerate(model.named_parameters()):
        grad = full(SHAPES[name], 1000 * step + i, param.dtype)
        if isinstance(param, DTensor):
            grad = torch.distributed.tensor.distribute_tensor(
                grad, param.device_mesh, param.placements, src_data_rank=None
            )
        param.grad = grad
    optimizer.step()


def digests(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    return {
        name: [digest(param), *(f"{key}={digest(value)}" for key, value in sorted(optimizer.state[param].items()))]
        for name, param in model.named_parameters()
    }


def train(
    name: str,
    options: dict[str, Any],
    layout: str,
    seed: int,
    steps: range,
    load: str | None,
    save: str | None,
    flatten: bool,
    dtype: torch.dtype,
) -> dict[str, Any]:
    model = Model(layout, 0 if load is None else seed, dtype)
    optimizer = getattr(ragged_optim, name)(model.named_parameters(), **options)
    state_options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    if load is not None:
        weights, states = get_state_dict(model, optimizer, options=state_options)
        saved = {"model": weights, "optimizer": states}
        dcp.load(saved, checkpoint_id=load)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=saved["model"],
            optim_state_dict=saved["optimizer"],
            options=state_options,
        )
    for step in steps:
        grad_step(model, optimizer, step)
    if save is not None:
        weights, states = get_state_dict(model, optimizer, options=state_options)
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=save)
    return digests(model, optimizer)


ALGORITHMS = [("AdamW", {"lr": 0.01, "amsgrad": True}), ("Muon", {"lr": 0.02, "adamw_lr": 0.003})]
ALGORITHMS += [
    (name, options)
    for name, options in (
        ("SGD", {"lr": 0.01, "momentum": 0.9}),
        ("Lion", {"lr": 0.01}),
        ("NorMuon", {"lr": 0.02}),
        ("Shampoo", {"lr": 0.02, "precondition_frequency": 2}),
        ("SOAP", {"lr": 0.02, "precondition_frequency": 2}),
    )
    if name in dir(ragged_optim)
]


@pytest.mark.parametrize(("name", "options"), ALGORITHMS, ids=[name for name, _ in ALGORITHMS])
@pytest.mark.parametrize(
    ("flatten", "dtype", "last"),
    [(False, torch.float32, 1), (True, torch.bfloat16, 3)],
    ids=["nested-fp32", "flat-bf16"],
)
def test_training_continues_exactly_over_other_worlds(
    name: str, options: dict[str, Any], flatten: bool, dtype: torch.dtype, last: int, tmp_path: Path
) -> None:
    """Begun by 2, resharded to 4 in rows, then to 1 or 3: the states of one process that was never interrupted."""
    first, second, how = str(tmp_path / "first"), str(tmp_path / "second"), (flatten, dtype)
    (expected,) = cluster.run(1, train, name, options, "ragged", 0, range(6), None, None, *how)
    cluster.run(2, train, name, options, "ragged", 0, range(2), None, first, *how)
    cluster.run(4, train, name, options, "shard0", 1, range(2, 4), first, second, *how)
    for got in cluster.run(last, train, name, options, "ragged", 2, range(4, 6), second, None, *how):
        assert got == expected


def full_states(name: str) -> list[Any]:
    model = Model("ragged", 0)
    optimizer = getattr(ragged_optim, name)(model.named_parameters())
    for step in range(2):
        grad_step(model, optimizer, step)
    whole = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    model2 = Model("shard0", 0)
    for p, q in zip(model.parameters(), model2.parameters(), strict=True):
        with torch.no_grad():
            q.copy_(p.redistribute(placements=q.placements))
    optimizer2 = getattr(ragged_optim, name)(model2.named_parameters())
    set_optimizer_state_dict(
        model2, optimizer2, whole, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    )
    for m, o in ((model, optimizer), (model2, optimizer2)):
        grad_step(m, o, 5)
    return [digests(model, optimizer), digests(model2, optimizer2)]


@pytest.mark.parametrize("name", ["AdamW", "Muon"])
def test_a_full_state_dict_loads_into_another_layout(name: str) -> None:
    for a, b in cluster.run(2, full_states, name):
        assert a == b


def keys_and_placements() -> list[Any]:
    model = Model("ragged", 0)
    optimizer = ragged_optim.Muon(model.named_parameters())
    return [
        (
            name,
            {
                k: (tuple(v.shape), v.to_local().shape == p.to_local().shape)
                for k, v in optimizer.state[p].items()
                if v.ndim
            },
        )
        for name, p in model.named_parameters()
    ]


def test_every_rank_has_every_key_and_states_lie_as_their_parameter() -> None:
    answers = cluster.run(4, keys_and_placements)
    assert all(answer == answers[0] for answer in answers)
    assert dict(answers[0])["a.weight"] == {"momentum_buffer": ((17, 6), True)}
    assert all(same for _, states in answers[0] for _, same in states.values())


def over_two_dims(layout: str, steps: range, load: str | None, save: str | None) -> list[str]:
    shapes = [(16, 30), (2, 6, 8), (14,)]
    mesh = {"plain": lambda: None, "ragged": lambda: cluster.mesh((3,))}.get(
        layout, lambda: cluster.mesh((2, 2), ("data", "tensor"))
    )()
    params = [nn.Parameter(shard(full(shape, i), layout, mesh, 5)) for i, shape in enumerate(shapes)]
    optimizer = ragged_optim.SOAP([(f"{i}.weight", p) for i, p in enumerate(params)], precondition_frequency=1)
    saved = {"params": dict(enumerate(params)), "state": optimizer.state_dict()["state"]}
    if load:
        dcp.load(saved, checkpoint_id=load)
    for step in steps:
        for i, (param, shape) in enumerate(zip(params, shapes, strict=True)):
            param.grad = shard(full(shape, 100 * step + i), layout, mesh, 5)
        optimizer.step()
    if save:
        dcp.save(saved, checkpoint_id=save)
    return [digest(t) for p in params for t in (p, *optimizer.state[p].values())]


def test_owned_states_of_tensor_parallel_weights_are_resharded(tmp_path: Path) -> None:
    (expected,) = cluster.run(1, over_two_dims, "plain", range(4), None, None)
    cluster.run(4, over_two_dims, "tensor1", range(2), None, str(tmp_path / "four"))
    assert cluster.run(3, over_two_dims, "ragged", range(2, 4), str(tmp_path / "four"), None) == [expected] * 3
