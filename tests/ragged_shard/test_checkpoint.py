"""torch.distributed.checkpoint of ragged tensors: any world size, any placement, in place, no preprocessing."""

from __future__ import annotations

import copy
import math
import random

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ragged_shard import RaggedShard
from tests import cluster
from tests.ragged_shard import oracle

SHAPES = {"matrix": (12, 5), "cube": (3, 4, 5), "vector": (13,), "deep": (2, 3, 2, 5), "row": (1, 30), "none": (0, 4)}


def value(name: str) -> torch.Tensor:
    shape = SHAPES[name]
    return torch.arange(math.prod(shape)).reshape(shape) + 100.0 * sorted(SHAPES).index(name)


def layouts(shape, mesh_shape, seed: int, count: int) -> list:
    """``count`` random ragged layouts of the tensor, then the plain ones."""
    rng = random.Random(seed)
    found = []
    while len(found) < count:
        placements = oracle.placements(rng, shape, mesh_shape)
        if any(isinstance(p, RaggedShard) for p in placements):
            found.append(placements)
    plain = [Replicate(), Shard(0), *([Shard(1)] if len(shape) > 1 else [])]
    return found + [(p,) + (Replicate(),) * (len(mesh_shape) - 1) for p in plain]


def state(mesh_shape, seed: int, fill) -> dict:
    mesh = cluster.mesh(mesh_shape)
    made = {}
    for name, shape in SHAPES.items():
        for number, placements in enumerate(layouts(shape, mesh_shape, seed, 3)):
            made[f"{name}.{number}"] = distribute_tensor(fill(name), mesh, placements, src_data_rank=None)
    return made


def save(mesh_shape, directory) -> list:
    tensors = state(mesh_shape, 1, value)
    dcp.save(tensors, checkpoint_id=directory)
    for name, tensor in tensors.items():
        chunks = tensor.__create_chunk_list__()
        assert len(chunks) <= max(1, 2 * tensor.ndim - 1), name
    return sorted(tensors)


def load(mesh_shape, directory) -> None:
    tensors = state(mesh_shape, 2, lambda name: torch.full(SHAPES[name], -1.0))
    # The number of layouts of a 1-d tensor is the same everywhere, so that the keys are those that were saved.
    addresses = {name: tensor.to_local().data_ptr() for name, tensor in tensors.items()}
    dcp.load(tensors, checkpoint_id=directory)
    for name, tensor in tensors.items():
        assert tensor.to_local().data_ptr() == addresses[name], f"{name} was not loaded in place"
        assert torch.equal(tensor.full_tensor(), value(name.partition(".")[0])), (name, tensor.placements)
    plain = {name: torch.full(SHAPES[name.partition(".")[0]], -1.0) for name in tensors}
    dcp.load(plain, checkpoint_id=directory)
    for name, tensor in plain.items():
        assert torch.equal(tensor, value(name.partition(".")[0])), name


MESHES = {1: (1,), 2: (2,), 3: (3,), 4: (2, 2), 5: (4,)}


@pytest.mark.parametrize("before", [1, 2, 3, 4, 5])
def test_every_world_size_and_layout_to_every_other(before, tmp_path):
    """torchtitan#811, Megatron-LM#4129, #6024: 1, 2, 3, 4 ranks and 2x2, ragged, Shard, Replicate and plain."""
    world = math.prod(MESHES[before])
    (keys, *others) = cluster.run(world, save, MESHES[before], str(tmp_path))
    assert all(other == keys for other in others), "ranks without elements must have the same keys"
    for after in MESHES.values():
        cluster.run(math.prod(after), load, after, str(tmp_path), deadline=40)


def save_plain(directory):
    dcp.save({f"{name}.{n}": value(name) for name in SHAPES for n in range(6)}, checkpoint_id=directory)


def test_a_checkpoint_of_plain_tensors_loads_into_ragged_ones(tmp_path):
    cluster.run(2, save_plain, str(tmp_path))
    cluster.run(3, load, (3,), str(tmp_path))


def boxes_are_views():
    mesh = cluster.mesh((3,))
    full = value("deep")
    x = distribute_tensor(full, mesh, [RaggedShard((0, 1, 2, 3), (7, 0, 53))], src_data_rank=None)
    local = x.to_local()
    count = 0
    for item in x.__create_write_items__("x", x):
        box = x.__get_tensor_shard__(item.index)
        assert box.untyped_storage().data_ptr() == local.untyped_storage().data_ptr(), "a box must not be a copy"
        chunk = item.tensor_data.chunk
        assert torch.equal(box, full[tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))])
        count += box.numel()
    assert count == local.numel()
    partial = DTensor.from_local(full, mesh, [Replicate()])
    assert len(partial.__create_chunk_list__()) == 1


def test_boxes_are_views_of_the_shard():
    cluster.run(3, boxes_are_views)


def asynchronous(directory):
    tensors = state((3,), 1, value)
    future = dcp.async_save(tensors, checkpoint_id=directory)
    # The snapshot is taken before async_save returns.
    for tensor in tensors.values():
        tensor.fill_(-5.0)
    future.result()
    load((3,), directory)


def test_async_save_takes_a_snapshot(tmp_path):
    cluster.run(3, asynchronous, str(tmp_path), deadline=40)


# ---- the state dict interface ----


def model(layout_seed: int | None) -> nn.Module:
    torch.manual_seed(4)
    module = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 7, bias=False))
    if layout_seed is None:
        return module
    world = dist.get_world_size()
    mesh, rng = cluster.mesh((world,)), random.Random(layout_seed)
    for part in module:
        for name, parameter in list(part.named_parameters(recurse=False)):
            total = rng.choice(oracle.divisors(parameter.numel()))
            p = RaggedShard(tuple(range(parameter.ndim)), oracle.units(rng, total, world))
            setattr(part, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [p])))
    return module


def trained(module: nn.Module, steps: int = 2) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    for step in range(steps):
        for number, parameter in enumerate(module.parameters()):
            torch.manual_seed(100 * step + number)
            gradient = torch.randn(parameter.shape)
            if isinstance(parameter, DTensor):
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.grad = gradient
        optimizer.step()
    return optimizer


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same(module, optimizer, plain, plain_optimizer):
    for mine, other in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(mine), whole(other), rtol=0, atol=1e-6)
        for key in ("exp_avg", "exp_avg_sq", "step"):
            torch.testing.assert_close(
                whole(optimizer.state[mine][key]), whole(plain_optimizer.state[other][key]), rtol=0, atol=1e-6
            )


def state_dict_interface(directory):
    plain = model(None)
    plain_optimizer = trained(plain)
    source = model(1)
    source_optimizer = trained(source)
    assert_same(source, source_optimizer, plain, plain_optimizer)
    for offload in (False, True):
        full = StateDictOptions(full_state_dict=True, cpu_offload=offload)
        weights = get_model_state_dict(source, options=full)
        moments = get_optimizer_state_dict(source, source_optimizer, options=full)
        if offload and dist.get_rank() > 0:
            assert not weights and not moments.get("state"), "only rank 0 keeps an offloaded full state"
        for broadcast in (False, True):
            if offload and not broadcast:
                continue
            target = model(2)
            optimizer = trained(target, steps=1)
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
            # torch writes what it distributes into the dict that it was given.
            giver = dict(weights) if not broadcast or dist.get_rank() == 0 else {}
            set_model_state_dict(target, giver, options=options)
            giver = copy.deepcopy(moments) if not broadcast or dist.get_rank() == 0 else {}
            set_optimizer_state_dict(target, optimizer, giver, options=options)
            assert_same(target, optimizer, plain, plain_optimizer)
    # Sharded, through a checkpoint, into another layout.
    weights, moments = get_state_dict(source, source_optimizer, options=StateDictOptions(cpu_offload=True))
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=directory)
    target = model(3)
    optimizer = trained(target, steps=1)
    weights, moments = get_state_dict(target, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=directory)
    set_state_dict(target, optimizer, model_state_dict=weights, optim_state_dict=moments)
    assert_same(target, optimizer, plain, plain_optimizer)


def test_model_and_optimizer_state_dicts(tmp_path):
    """Megatron-LM#3510, #6215: shards without elements take part with the same keys."""
    cluster.run(3, state_dict_interface, str(tmp_path), deadline=40)


# ---- FSDP2 ----


def fsdp2(directory, action):
    from torch.distributed.fsdp import fully_shard

    mesh = cluster.mesh((dist.get_world_size(),))
    plain = model(None)
    plain_optimizer = trained(plain)
    if action == "save":
        module = model(None)
        fully_shard(module, mesh=mesh)
        optimizer = trained(module)
    elif action == "load":
        module = model(None)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        fully_shard(module, mesh=mesh)
        optimizer = trained(module, steps=1)
    else:
        module = model(5)
        optimizer = trained(module, steps=2 if action == "save ragged" else 1)
    weights, moments = get_state_dict(module, optimizer)
    if action.startswith("save"):
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=directory)
    else:
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=directory)
        set_state_dict(module, optimizer, model_state_dict=weights, optim_state_dict=moments)
    assert_same(module, optimizer, plain, plain_optimizer)


@pytest.mark.parametrize(("saved", "loaded"), [("save", "load ragged"), ("save ragged", "load")])
def test_checkpoints_of_fsdp2_and_of_ragged_modules_are_interchangeable(saved, loaded, tmp_path):
    cluster.run(2, fsdp2, str(tmp_path), saved)
    cluster.run(3, fsdp2, str(tmp_path), loaded)
