"""Meshes of more than one dimension, smaller groups after forward, torch.compile and torch.autograd.grad."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import DataParallelMeshDims
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp import fully_shard
from tests import cluster
from tests.models import LanguageModel, loss_of, tokens

VOCABULARY = 19


def difference(model: nn.Module, reference: nn.Module) -> float:
    theirs = dict(reference.named_parameters())
    with torch.no_grad():
        # Python's max passes by a nan.
        return (
            torch.tensor(
                [
                    ((p.full_tensor() if isinstance(p, DTensor) else p) - theirs[name]).abs().max().item()
                    for name, p in model.named_parameters()
                ]
            )
            .max()
            .item()
        )


def train(model: LanguageModel, reference: LanguageModel, micro_batches: int = 1) -> float:
    """Three steps of ``model``, each rank on its data, against the reference on everybody's."""
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (reference, model)]
    world = dist.get_world_size()
    for step in range(3):
        for micro in range(micro_batches):
            number = step * micro_batches + micro
            (sum(loss_of(reference, tokens(VOCABULARY, rank, number)) for rank in range(world)) / world).backward()
            model.set_requires_all_reduce(micro == micro_batches - 1)
            loss_of(model, tokens(VOCABULARY, dist.get_rank(), number)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return difference(model, reference)


def two_copies(depth: int = 2) -> tuple[LanguageModel, LanguageModel]:
    torch.manual_seed(3)
    reference = LanguageModel(VOCABULARY, depth=depth)
    return reference, copy.deepcopy(reference)


def hsdp(micro_batches: int) -> float:
    reference, model = two_copies()
    mesh = cluster.mesh((2, 2), ("replicate", "shard"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return train(fully_shard(model, mesh=mesh), reference, micro_batches)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_hsdp_equals_one_process_also_when_replicas_are_reduced_last(micro_batches: int) -> None:
    assert all(worst < 1e-5 for worst in cluster.run(4, hsdp, micro_batches))


def smaller_group() -> tuple[float, int]:
    reference, model = two_copies()
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=2)
    fully_shard(model)
    worst = train(model, reference)
    return worst, model._get_fsdp_state().schedule.pool.ledger.in_use


def test_reshard_after_forward_to_a_smaller_group() -> None:
    for worst, in_use in cluster.run(4, smaller_group):
        assert worst < 1e-5 and in_use == 0


def tensor_parallel() -> tuple[float, list[str]]:
    mesh = cluster.mesh((2, 2), ("dp", "tp"))
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    model = copy.deepcopy(reference)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (reference, model)]
    for step in range(3):
        inputs = [torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(2)]
        (sum(reference(x).square().mean() for x in inputs) / 2).backward()
        model(inputs[mesh.get_local_rank("dp")]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return difference(model, reference), [str(p.placements[1]) for p in model.parameters()]


def test_tensor_parallel_parameters_are_sharded_further() -> None:
    for worst, placements in cluster.run(4, tensor_parallel):
        assert worst < 1e-5
        assert placements == ["S(0)", "S(0)", "S(1)", "R"]


def on_one_mesh(dims: DataParallelMeshDims, names: tuple[str, ...]) -> list[str]:
    """Every parameter is a DTensor on the mesh of all parallelisms; torch's FSDP2 is the oracle."""
    mesh = cluster.mesh((2, 2), names)
    losses, grads, placements = [], [], []
    for wrap in (fully_shard, torch_fully_shard):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        cuts = {"0.weight": Shard(0), "0.bias": Shard(0), "2.weight": Shard(1)}
        for name, parameter in list(model.named_parameters()):
            where = [cuts.get(name, Replicate()) if dim == "tp" else Replicate() for dim in names]
            sharded = nn.Parameter(distribute_tensor(parameter.detach(), mesh, where))
            setattr(model.get_submodule(name[0]), name[2:], sharded)
        wrap(model, mesh=mesh, dp_mesh_dims=dims)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            batch = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
            x = distribute_tensor(batch, mesh, [Replicate() if dim == "tp" else Shard(0) for dim in names])
            loss = model(x).square().mean()
            loss.backward()
            losses.append(loss.full_tensor().item())
            grads.append({n: p.grad.full_tensor() for n, p in model.named_parameters()})
            optimizer.step()
            optimizer.zero_grad()
        placements.append({n: [str(q) for q in p.placements] for n, p in model.named_parameters()})
    found = [] if losses[:3] == pytest.approx(losses[3:], rel=1e-5) else [f"losses {losses}"]
    for ours, theirs in zip(grads[:3], grads[3:], strict=True):
        found += [n for n in ours if not torch.allclose(ours[n], theirs[n], rtol=1e-5, atol=1e-7)]
    kinds = [p.split("(")[0] for p in placements[0]["2.weight"]]
    expected = {
        ("dp", "tp"): ["Ragged", "S"],
        ("dp", "cp"): ["Ragged"],
        ("replicate", "shard"): ["R", "Ragged"],
    }
    return found if kinds == expected[names] else [*found, str(placements)]


@pytest.mark.parametrize(
    ("shard", "replicate", "names"),
    [
        ("dp", None, ("dp", "tp")),
        (("dp", "cp"), None, ("dp", "cp")),
        ("shard", "replicate", ("replicate", "shard")),
    ],
)
def test_dp_mesh_dims_as_torch(shard: str | tuple[str, ...], replicate: str | None, names: tuple[str, ...]) -> None:
    dims = DataParallelMeshDims(shard=shard, replicate=replicate)
    assert cluster.run(4, on_one_mesh, dims, names) == [[]] * 4


def misused_dims(kind: str) -> str:
    mesh = cluster.mesh((2, 2), ("dp", "tp"))
    model = nn.Linear(4, 4)
    dims = DataParallelMeshDims(shard="fsdp" if kind == "unknown" else "dp")
    if kind == "sharded":
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0), Replicate()]))
        model.bias = None
    try:
        fully_shard(model, mesh=mesh if kind != "unnamed" else cluster.mesh((4,)), dp_mesh_dims=dims)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("kind", "word"),
    [("unknown", "fsdp"), ("plain", "'weight' is no DTensor"), ("sharded", "'weight'"), ("unnamed", "named")],
)
def test_misused_dp_mesh_dims_are_the_same_error_on_all_ranks(kind: str, word: str) -> None:
    messages = cluster.run(4, misused_dims, kind)
    assert len({m.split(" (on rank")[0] for m in messages}) == 1 and word in messages[0], messages


class Experts(nn.Module):
    """Experts in the same module as dense weights; only their parameters have another mesh."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(3, 8, 8) / 3)
        self.dense, self.unused = nn.Linear(8, 8), nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.einsum("bi,eij->bj", self.dense(x).tanh(), self.experts)


def mesh_per_parameter(hybrid: bool, reshard_after_forward: bool | None) -> list[str]:
    names = ("outer", "inner")
    mesh = cluster.mesh((2, 2), names) if hybrid else cluster.mesh((4,))
    # Experts over pairs of ranks; or, with replicas, over all four.
    other = cluster.mesh((1, 4), names) if hybrid else cluster.mesh((2, 2), names)["inner"]
    info = HSDPMeshInfo(other, 1, 0) if hybrid else FSDPMeshInfo(other, 0)

    def place(parameter: nn.Parameter) -> Any:
        return ShardPlacementResult(Shard(0), info) if parameter.ndim == 3 else None

    losses, grads, seen = [], [], []
    for wrap in (fully_shard, torch_fully_shard):
        torch.manual_seed(0)
        model = nn.Sequential(Experts(), Experts())
        options = {"shard_placement_fn": place, "reshard_after_forward": reshard_after_forward, "mesh": mesh}
        for layer in model:
            wrap(layer, **options)
        wrap(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            loss = model(torch.randn(4, 8, generator=generator)).square().mean()
            loss.backward()
            losses.append(loss.item())
            grads.append({n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None})
            optimizer.step()
            optimizer.zero_grad()
        seen.append({n: p.device_mesh for n, p in model.named_parameters()})
    found = [] if losses[:3] == pytest.approx(losses[3:], rel=1e-5) else [f"losses {losses}"]
    for ours, theirs in zip(grads[:3], grads[3:], strict=True):
        found += [
            n for n in ours.keys() | theirs.keys() if not torch.allclose(ours[n], theirs[n], rtol=1e-5, atol=1e-6)
        ]
    return found if seen[0] == seen[1] and "0.unused" not in grads[0] else [*found, f"meshes {seen}"]


@pytest.mark.parametrize("reshard_after_forward", [True, None])
@pytest.mark.parametrize("hybrid", [False, True])
def test_a_mesh_per_parameter_as_torch(hybrid: bool, reshard_after_forward: bool | None) -> None:
    assert cluster.run(4, mesh_per_parameter, hybrid, reshard_after_forward) == [[]] * 4


def misplaced(kind: str) -> str:
    mesh = cluster.mesh((2, 2), ("outer", "inner"))
    result = ShardPlacementResult(None, FSDPMeshInfo(mesh["inner"], 0))
    options = {"reshard_after_forward": 2} if kind == "number" else {}
    call = mesh if kind == "dimensions" else cluster.mesh((4,))
    try:
        fully_shard(nn.Linear(4, 4), mesh=call, shard_placement_fn=lambda p: result, **options)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(("kind", "word"), [("dimensions", "as many dimensions"), ("number", "reshard_after_forward")])
def test_a_misplaced_parameter_is_an_error_that_names_it(kind: str, word: str) -> None:
    messages = cluster.run(4, misplaced, kind)
    assert all("'weight'" in message and word in message for message in messages), messages


def compiled(what: str) -> float:
    reference, model = two_copies()
    for block in model.blocks:
        if what == "blocks":
            block.compile(backend="aot_eager")
        fully_shard(block)
    fully_shard(model)
    if what == "model":
        model.compile(backend="aot_eager")
    return train(model, reference)


@pytest.mark.parametrize("what", ["blocks", "model"])
def test_compiled_blocks_and_models_train_alike(what: str) -> None:
    assert all(worst < 1e-6 for worst in cluster.run(2, compiled, what, deadline=120))


def grad_of_a_weight() -> bool:
    """Gradients that torch.autograd.grad hands out must not lie in memory that a later backward writes."""
    reference, model = two_copies()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model, reshard_after_forward=False)
    data = tokens(VOCABULARY, dist.get_rank(), 0)
    weight = model.head.weight
    model(data[0])  # registers the unsharded parameters
    weight = model.head.weight
    (gradient,) = torch.autograd.grad(loss_of(model, data), [weight])
    (expected,) = torch.autograd.grad(loss_of(reference, data), [reference.head.weight])
    for step in range(2):
        loss_of(model, tokens(VOCABULARY, dist.get_rank(), step)).backward()
    return torch.equal(gradient, expected)


def test_autograd_grad_of_an_unsharded_weight_is_not_overwritten() -> None:
    assert all(cluster.run(2, grad_of_a_weight))
