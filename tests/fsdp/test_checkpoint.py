"""torch.distributed.checkpoint without any preparation: saved on some ranks, loaded on others, model and optimizer."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

import ragged_optim
from ragged_shard import Block, ParamPolicy
from tests import cluster
from tests.fsdp.modules import WIDTH, Stack
from tests.fsdp.reference import full, shard_children

ROWS = 12
OPTIMIZERS: dict[str, Any] = {
    "torch.AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
    "torch.AdamW fused": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True),
    "torch.SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "ragged_optim.AdamW": lambda m: ragged_optim.AdamW(m.parameters(), lr=1e-2),
}
POLICIES: dict[str, Any] = {
    "elements": None,
    "rows": lambda n, p: ParamPolicy(block=Block.rows(3)),
    "whole": lambda n, p: ParamPolicy(block=Block.whole()),
}


def build(optimizer: str, policy: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = shard_children(Stack(), orig_param_policy=POLICIES[policy])
    return model, OPTIMIZERS[optimizer](model)


def global_loss(model: nn.Module, number: int) -> tuple[Tensor, float]:
    """This rank's share of a global batch that does not depend on the number of ranks, and the global loss."""
    generator = torch.Generator().manual_seed(number)
    batch = torch.randn(ROWS, WIDTH, generator=generator)
    mine = batch.chunk(dist.get_world_size())[dist.get_rank()]
    loss = model(mine).square().mean()
    everywhere = loss.detach().clone()
    if dist.get_world_size() > 1:
        dist.all_reduce(everywhere)
    return loss, everywhere.item() / dist.get_world_size()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for number in steps:
        loss, everywhere = global_loss(model, number)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(everywhere)
    return losses


def save(directory: str, optimizer: str, policy: str) -> tuple[list[float], dict[str, list[float]]]:
    """Train, save, go on: the losses after saving and the values at saving."""
    model, opt = build(optimizer, policy, 0)
    train(model, opt, range(3))
    values = {n: full(p).flatten().tolist() for n, p in model.named_parameters()}
    model_state, optimizer_state = get_state_dict(model, opt)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=directory)
    return train(model, opt, range(3, 6)), values


def load(directory: str, optimizer: str, policy: str) -> tuple[list[float], dict[str, list[float]]]:
    """Another model and optimizer, other values: load, compare, go on."""
    model, opt = build(optimizer, policy, 99)
    model_state, optimizer_state = get_state_dict(model, opt)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=directory)
    set_state_dict(model, opt, model_state_dict=model_state, optim_state_dict=optimizer_state)
    values = {n: full(p).flatten().tolist() for n, p in model.named_parameters()}
    return train(model, opt, range(3, 6)), values


@pytest.mark.parametrize(
    ("optimizer", "saved_on", "loaded_on", "policies"),
    [
        ("torch.AdamW", 2, 3, ("rows", "rows")),
        ("torch.AdamW", 3, 1, ("rows", "elements")),
        ("torch.AdamW", 1, 4, ("elements", "whole")),
        ("torch.AdamW", 4, 2, ("whole", "rows")),
        ("torch.AdamW fused", 2, 4, ("elements", "rows")),
        ("torch.SGD", 3, 2, ("whole", "elements")),
        ("ragged_optim.AdamW", 2, 3, ("rows", "whole")),
        ("ragged_optim.AdamW", 4, 1, ("whole", "rows")),
    ],
)
def test_training_goes_on_on_another_number_of_ranks(
    tmp_path: Path, optimizer: str, saved_on: int, loaded_on: int, policies: tuple[str, str]
) -> None:
    """pytorch/torchtitan#811, NVIDIA/Megatron-LM#6024: no preparation, no silent corruption."""
    saved = cluster.run(saved_on, save, str(tmp_path), optimizer, policies[0])
    loaded = cluster.run(loaded_on, load, str(tmp_path), optimizer, policies[1])
    losses, values = saved[0]
    for others, other_values in [*saved, *loaded]:
        assert other_values == values
        assert others == pytest.approx(losses, rel=1e-5)


def save_plain_state(directory: str) -> dict[str, list[float]]:
    """dcp.save(model.state_dict()) with nothing around it."""
    model, opt = build("torch.AdamW", "rows", 0)
    train(model, opt, range(2))
    dcp.save(model.state_dict(), checkpoint_id=directory)
    return {n: full(p).flatten().tolist() for n, p in model.named_parameters()}


def load_into(directory: str, kind: str) -> dict[str, list[float]]:
    """Into ours, into torch's FSDP2, into a plain module, or into a flat dictionary of tensors."""
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    torch.manual_seed(99)
    model: nn.Module = Stack()
    if kind == "ours":
        shard_children(model)
    elif kind == "fsdp2":
        for block in model.blocks:
            torch_fully_shard(block)
        torch_fully_shard(model)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=directory)
    model.load_state_dict(state)
    return {n: full(p).flatten().tolist() for n, p in model.named_parameters()}


@pytest.mark.parametrize("kind", ["ours", "fsdp2", "plain"])
def test_the_plain_state_dict_is_the_checkpoint(tmp_path: Path, kind: str) -> None:
    values = cluster.run(3, save_plain_state, str(tmp_path))[0]
    for loaded in cluster.run(2, load_into, str(tmp_path), kind):
        assert loaded == values


def save_other(directory: str, kind: str) -> dict[str, list[float]]:
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    torch.manual_seed(7)
    model = Stack()
    values = {n: p.detach().flatten().tolist() for n, p in model.named_parameters()}
    if kind == "fsdp2":
        for block in model.blocks:
            torch_fully_shard(block)
        torch_fully_shard(model)
    dcp.save(model.state_dict(), checkpoint_id=directory)
    return values


@pytest.mark.parametrize("kind", ["fsdp2", "plain"])
def test_checkpoints_of_others_load(tmp_path: Path, kind: str) -> None:
    values = cluster.run(2, save_other, str(tmp_path), kind)[0]
    for loaded in cluster.run(3, load_into, str(tmp_path), "ours"):
        assert loaded == values


def full_and_sharded_states() -> list[str]:
    """get/set_model_state_dict and get/set_optimizer_state_dict, full and sharded, are what torch says."""
    model, opt = build("torch.AdamW", "whole", 0)
    train(model, opt, range(2))
    found = []
    sharded = get_model_state_dict(model)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    found += [f"{n} is {type(v).__name__}" for n, v in sharded.items() if not isinstance(v, DTensor)]
    found += [f"{n} is {type(v).__name__} in the full state" for n, v in whole.items() if isinstance(v, DTensor)]
    found += [n for n, p in model.named_parameters() if not torch.equal(full(p), whole[n])]
    optimizer_whole = get_optimizer_state_dict(model, opt, options=StateDictOptions(full_state_dict=True))
    optimizer_sharded = get_optimizer_state_dict(model, opt)
    keys = {n: sorted(s) for n, s in optimizer_sharded["state"].items()}
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, json.dumps(keys, sort_keys=True))
    if len(set(everywhere)) != 1:
        found.append("ranks have different optimizer state keys")
    if set(keys) != {n for n, _ in model.named_parameters()}:
        found.append(f"states of {sorted(keys)}")
    other, other_opt = build("torch.AdamW", "rows", 5)
    set_model_state_dict(other, whole, options=StateDictOptions(full_state_dict=True))
    # Full state dicts share plain tensors (`step`) with the optimizer they are of.
    set_optimizer_state_dict(
        other, other_opt, copy.deepcopy(optimizer_whole), options=StateDictOptions(full_state_dict=True)
    )
    losses = [train(m, o, range(2, 4)) for m, o in ((model, opt), (other, other_opt))]
    if losses[0] != pytest.approx(losses[1], rel=1e-6):
        found.append(f"losses {losses}")
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_full_and_sharded_state_dicts(world_size: int) -> None:
    """NVIDIA/Megatron-LM#3510, #6573: ranks with empty shards have the same keys as the others."""
    assert cluster.run(world_size, full_and_sharded_states) == [[]] * world_size


def load_of_another_model(directory: str) -> str:
    model = shard_children(Stack(2))
    model.extra = nn.Parameter(torch.zeros(3))
    before = {n: full(p) for n, p in model.named_parameters()}
    state = model.state_dict()
    try:
        dcp.load(state, checkpoint_id=directory)
    except BaseException as error:  # CheckpointException is no Exception
        untouched = all(torch.equal(full(p), before[n]) for n, p in model.named_parameters())
        return f"{untouched} {error}"
    return "no error"


def test_a_checkpoint_of_another_model_is_an_error_that_names_the_parameter(tmp_path: Path) -> None:
    cluster.run(2, save_plain_state, str(tmp_path))
    for message in cluster.run(2, load_of_another_model, str(tmp_path)):
        assert message.startswith("True") and "extra" in message


def asynchronous(directory: str) -> list[str]:
    """dcp.async_save stages copies: training goes on at once, the file holds the values of before."""
    model, opt = build("torch.AdamW", "rows", 0)
    train(model, opt, range(2))
    before = {n: full(p) for n, p in model.named_parameters()}
    # Its own group: the saver communicates from a thread while training does.
    future = dcp.async_save(model.state_dict(), checkpoint_id=directory, process_group=dist.new_group())
    train(model, opt, range(2, 4))
    future.result()
    state = {n: torch.zeros_like(v) for n, v in before.items()}
    dcp.load(state, checkpoint_id=directory)
    found = [n for n, v in before.items() if not torch.equal(v, state[n])]
    return found + ([] if any(not torch.equal(full(p), before[n]) for n, p in model.named_parameters()) else ["idle"])


def test_async_save(tmp_path: Path) -> None:
    assert cluster.run(2, asynchronous, str(tmp_path)) == [[], []]


def bytes_written(directory: str) -> int:
    model, _ = build("torch.AdamW", "elements", 0)
    dcp.save(model.state_dict(), checkpoint_id=directory)
    return sum(p.numel() * 4 for p in model.parameters())


def test_a_checkpoint_holds_each_element_once(tmp_path: Path) -> None:
    """Neither padding nor a shared flat buffer is written with each view of it."""
    size = cluster.run(2, bytes_written, str(tmp_path))[0]
    written = sum(f.stat().st_size for f in tmp_path.glob("*.distcp"))
    # torch.save wraps each piece in a zip of about a kilobyte.
    pieces = 2 * 13 * 2
    assert size <= written <= size + 2048 * pieces


@functools.cache
def hsdp_mesh() -> Any:
    return cluster.mesh((2, 2), ("replicate", "shard"))


def save_hsdp(directory: str) -> list[float]:
    torch.manual_seed(0)
    model = shard_children(Stack(), mesh=hsdp_mesh(), orig_param_policy=POLICIES["rows"])
    opt = OPTIMIZERS["torch.AdamW"](model)
    train(model, opt, range(3))
    model_state, optimizer_state = get_state_dict(model, opt)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=directory)
    return train(model, opt, range(3, 6))


def test_saved_on_a_2x2_mesh_loaded_on_three_ranks(tmp_path: Path) -> None:
    losses = cluster.run(4, save_hsdp, str(tmp_path))[0]
    for others, _ in cluster.run(3, load, str(tmp_path), "torch.AdamW", "elements"):
        assert others == pytest.approx(losses, rel=1e-5)
