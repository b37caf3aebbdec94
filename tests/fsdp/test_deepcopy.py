"""A deep copy of a sharded model is a sharded model of its own; torch's AveragedModel works on it."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from fsdp.hooks import state_of
from ragged_shard import Block, ParamPolicy, buffer_of
from tests import cluster
from tests.fsdp.modules import WIDTH, Mlp, Stack, data, squares
from tests.fsdp.reference import differences, shard_children, step, twins


def check(world_size: int, function: Callable[..., list[str]], *args: Any, **kwargs: Any) -> None:
    assert cluster.run(world_size, function, *args, **kwargs) == [[]] * world_size


def both_train(when: str, options: dict[str, Any]) -> list[str]:
    """Original and copy go on on their own, each as its plain twin."""
    sharded, plain = twins(Stack, partial(shard_children, **options))
    found = []
    if when == "after a step":
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (sharded, plain)]
        found += step(sharded, plain, squares, optimizers)
    twin, plain_twin = copy.deepcopy(sharded), copy.deepcopy(plain)
    found += [f"copy: {d}" for d in differences(twin, plain_twin)]
    if list(twin.state_dict()) != list(sharded.state_dict()) or type(twin) is not type(sharded):
        found.append("names or class")
    shared = {p.data_ptr() for p in map(DTensor.to_local, sharded.parameters()) if p.numel()}
    shared &= {p.data_ptr() for p in map(DTensor.to_local, twin.parameters()) if p.numel()}
    if shared:
        found.append("memory is shared")
    if any(buffer_of(p) is None for p in twin.parameters()):
        found.append("a shard of the copy lies in no buffer")
    for model, reference, start in ((sharded, plain, 1), (twin, plain_twin, 5)):
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=True) for m in (model, reference)]
        for number in range(start, start + 2):
            found += [
                f"{start} {number}: {d}"
                for d in step(model, reference, lambda m, n=number: squares(m, n), optimizers, tolerance=1e-6)
            ]
    return found + differences(sharded, plain, 1e-6) + differences(twin, plain_twin, 1e-6)


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "resharded": {"reshard_after_forward": True},
    "kept": {"reshard_after_forward": False},
}


@pytest.mark.parametrize("when", ["before any step", "after a step"])
@pytest.mark.parametrize("options", OPTIONS)
def test_original_and_copy_train_on_their_own(when: str, options: str) -> None:
    check(2, both_train, when, OPTIONS[options])


def blocks_and_precision() -> list[str]:
    """Layout, policies and settings are the original's."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = shard_children(Stack(), mp_policy=policy, orig_param_policy=lambda n, p: ParamPolicy(block=Block.rows(3)))
    model.set_requires_gradient_sync(False)
    model.blocks[0].set_gradient_divide_factor(3.0)
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
    model.head.tag = "kept"
    twin = copy.deepcopy(model)
    found = [] if getattr(twin.head, "tag", None) == "kept" else ["attribute of a parameter"]
    for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        if one.placements != other.placements or one.dtype != other.dtype:
            found.append(name)
    if twin(data()).dtype != torch.bfloat16 or not torch.equal(twin(data()), model(data())):
        found.append("output")
    bucket, states = state_of(twin.blocks[0]).bucket, [state_of(b) for b in twin.blocks]
    if bucket.requires_gradient_sync or bucket.divide_factor != 3.0 or states[0].forward_prefetch != [states[1]]:
        found.append("settings")
    return found


def test_layout_and_settings_are_copied() -> None:
    check(3, blocks_and_precision)


class Tied(nn.Module):
    """Tied weights, a list of modules as one bucket, a frozen and an ignored parameter, and a custom method."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, WIDTH)
        self.mlp, self.head = Mlp(), nn.Linear(WIDTH, 13, bias=False)
        self.head.weight = self.embed.weight
        self.mlp.up.bias.requires_grad_(False)
        self.plain = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("shift", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.score(torch.arange(6), x)

    def score(self, tokens: Tensor, x: Tensor) -> Tensor:
        return self.head(self.mlp(self.embed(tokens)) * self.plain + self.shift + x.sum() * 0)


def shard_tied(model: Tied) -> Tied:
    fully_shard(model.mlp)
    fully_shard([model.embed, model.head])
    fully_shard(model, ignored_params={model.plain})
    register_fsdp_forward_method(model, "score")
    return model


def tied() -> list[str]:
    sharded, plain = twins(Tied, shard_tied)
    twin = copy.deepcopy(sharded)
    found = [] if twin.head.weight is twin.embed.weight else ["untied"]
    found += ["the ignored parameter is shared"] * (twin.plain is sharded.plain)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(0.5)
    outputs = [m.score(torch.arange(4), data()) for m in (twin, sharded, plain)]
    found += ["the copy's method is the original's"] * torch.equal(outputs[0], outputs[1])
    found += ["the original changed"] * (not torch.equal(outputs[1], outputs[2]))
    for model, reference in ((sharded, plain), (twin, copy.deepcopy(plain))):
        if model is twin:
            with torch.no_grad():
                for parameter in reference.parameters():
                    parameter.mul_(0.5)
        model.zero_grad()
        found += step(model, reference, squares, tolerance=1e-6)
    return found


def test_tied_frozen_and_ignored_parameters_lists_and_methods() -> None:
    check(2, tied)


def inside_a_container() -> list[str]:
    """The copy of a plain module that holds sharded ones, and of a child alone."""
    sharded, plain = twins(Stack)
    outer = copy.deepcopy(nn.Sequential(sharded, nn.Identity()))
    found = differences(outer[0], plain)
    child = copy.deepcopy(sharded.blocks[1])
    found += differences(child, plain.blocks[1])
    outputs = [m(data()) for m in (child, plain.blocks[1])]
    return found + ["output"] * (not torch.equal(*outputs))


def test_copies_of_a_container_and_of_a_child() -> None:
    check(2, inside_a_container)


def in_an_iteration() -> list[str]:
    sharded, plain = twins(Stack)
    messages = []

    def attempt(*_: Any) -> None:
        try:
            copy.deepcopy(sharded)
        except RuntimeError as error:
            messages.append(str(error))

    handle = sharded.blocks[0].register_forward_hook(attempt)
    loss = squares(sharded)
    handle.remove()
    loss.register_hook(attempt)
    loss.backward()
    sharded.zero_grad()
    found = [m for m in messages if "in the middle of an iteration" not in m]
    return found + ["accepted"] * (len(messages) != 2) + step(sharded, plain, squares)


def test_in_the_middle_of_an_iteration_it_is_an_error() -> None:
    check(2, in_an_iteration)


def freed() -> list[bool]:
    model = shard_children(Stack())
    twin = copy.deepcopy(model)
    squares(twin).backward()
    references = [weakref.ref(twin), weakref.ref(state_of(twin)), weakref.ref(next(twin.parameters()))]
    del twin
    gc.collect()
    return [reference() is None for reference in references]


def test_a_deleted_copy_frees_its_memory() -> None:
    assert cluster.run(2, freed) == [[True] * 3] * 2
