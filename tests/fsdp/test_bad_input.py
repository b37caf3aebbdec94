"""Wrong input is one error: the same on every rank, before anything has changed, naming the parameter or module and
what to do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_module

import fsdp
from fsdp import DataParallelMeshDims, fully_shard
from ragged_shard import Block, ParamPolicy
from tests import cluster
from tests.fsdp.modules import WIDTH, Mlp, Stack, data, squares
from tests.fsdp.reference import message_of, shard_children


def same_everywhere(messages: list[str], kind: str, *words: str) -> None:
    """One message on all ranks, of this type, with all these words."""
    assert len(set(messages)) == 1, messages
    assert messages[0].startswith(kind + ":"), messages[0]
    for word in words:
        assert word in messages[0], f"{word!r} is not in {messages[0]!r}"


def then_untouched(model: nn.Module) -> str:
    """What is left of a module whose sharding failed: nothing has changed, and sharding it properly works."""
    if any(isinstance(p, DTensor) for p in model.parameters()) or isinstance(model, fsdp.FSDPModule):
        return "; the module was changed"
    fully_shard(model)
    squares(model).backward()
    return ""


# ---- policies ----


def bad_policy(kind: str) -> str:
    rank = dist.get_rank()

    def policy(name: str, parameter: nn.Parameter) -> Any:
        if name != "down.weight":
            return None
        if kind == "string":
            return "muon"
        if kind == "block itself":
            return Block.rows(2)
        if kind == "dict":
            return {"block": 4}
        if kind == "raises":
            raise KeyError("no rule for this one")
        if kind == "raises on rank 1" and rank == 1:
            raise ValueError("rank 1 does not like it")
        if kind == "nonsense on rank 1" and rank == 1:
            return 7
        if kind == "other block on rank 1":
            return ParamPolicy(block=Block.rows(2 + rank))
        if kind == "no block":
            return ParamPolicy(block=4)
        if kind == "zero":
            return ParamPolicy(block=Block.rows(0))
        if kind == "fraction":
            return ParamPolicy(block=Block.rows(1.5))
        if kind == "unknown":
            return ParamPolicy(block=Block("columns", (3,)))
        return None

    model = Mlp()
    return message_of(fully_shard, model, orig_param_policy=policy) + then_untouched(model)


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("string", "TypeError", ("'down.weight'", "'muon'", "ParamPolicy")),
        ("block itself", "TypeError", ("'down.weight'", "Block", "ParamPolicy")),
        ("dict", "TypeError", ("'down.weight'", "ParamPolicy")),
        ("no block", "TypeError", ("block", "4", "Block.rows")),
        ("zero", "ValueError", ("Block.rows", "at least 1", "0")),
        ("fraction", "TypeError", ("Block.rows", "integer", "1.5")),
        ("unknown", "ValueError", ("'columns'", "rows")),
        ("raises on rank 1", "ValueError", ("rank 1 does not like it",)),
        ("nonsense on rank 1", "TypeError", ("'down.weight'", "7", "rank 1")),
        ("other block on rank 1", "ValueError", ("down.weight", "block=22", "block=33", "rank 0", "rank 1")),
    ],
)
def test_a_policy_that_returns_nonsense(kind: str, error: str, words: tuple[str, ...]) -> None:
    same_everywhere(cluster.run(2, bad_policy, kind), error, *words)


@pytest.mark.parametrize("kind", ["zero", "fraction", "unknown", "no block", "raises on rank 1", "raises"])
def test_an_error_inside_the_policy_names_the_parameter(kind: str) -> None:
    """What the policy itself raises says nothing of the parameter it was asked about; we must."""
    messages = cluster.run(2, bad_policy, kind)
    assert len(set(messages)) == 1
    assert "down.weight" in messages[0]


def tile_that_does_not_fit() -> str:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = nn.Parameter(torch.zeros(3, 10, 4))

    return message_of(fully_shard, Experts(), orig_param_policy=lambda n, p: ParamPolicy(block=Block.tile(4, 4)))


def test_a_block_that_does_not_fit_its_tensor() -> None:
    same_everywhere(cluster.run(2, tile_that_does_not_fit), "ValueError", "'stack'", "tile(4, 4)", "divisor of 10")


# ---- models that differ ----


def different_models(kind: str) -> str:
    rank = dist.get_rank()
    if kind == "shape":
        model = Mlp(hidden=11 + rank)
    elif kind == "names":
        model = Mlp()
        if rank:
            model.extra = nn.Parameter(torch.zeros(2))
    elif kind == "dtype":
        model = Mlp().to(torch.float64 if rank else torch.float32)
    elif kind == "frozen":
        model = Mlp()
        model.up.weight.requires_grad_(rank == 0)
    else:
        model = Mlp()
        if rank:
            model.up, model.down = nn.Linear(WIDTH, 11), nn.Linear(11, WIDTH)
            model._modules = {"down": model.down, "up": model.up}
    return message_of(fully_shard, model)


@pytest.mark.parametrize("kind", ["shape", "names", "dtype", "frozen", "order"])
def test_models_that_differ_between_ranks(kind: str) -> None:
    """Else a hang or silent garbage much later."""
    messages = cluster.run(2, different_models, kind)
    same_everywhere(messages, "ValueError", "rank 0", "rank 1")
    if kind in ("shape", "dtype", "frozen"):
        assert "up.weight" in messages[0]


# ---- meshes ----


def bad_mesh(kind: str) -> str:
    if kind == "three dimensions":
        return message_of(fully_shard, Mlp(), mesh=init_device_mesh("cpu", (2, 2, 1)))
    return message_of(fully_shard, Mlp(), mesh=kind)


def test_a_mesh_of_three_dimensions() -> None:
    same_everywhere(cluster.run(4, bad_mesh, "three dimensions"), "ValueError", "two", "(replicate, shard)")


def mesh_without_me() -> str:
    mesh = DeviceMesh("cpu", [0, 1])
    model = Mlp()
    message = message_of(fully_shard, model, mesh=mesh)
    return message if dist.get_rank() == 2 else ("ok" if message == "no error" else message)


def test_a_mesh_of_which_this_rank_is_no_part() -> None:
    *members, outsider = cluster.run(3, mesh_without_me)
    assert members == ["ok", "ok"]
    assert outsider.startswith("ValueError") and "rank" in outsider


def no_mesh() -> str:
    return message_of(fully_shard, Mlp(), mesh="cpu")


def test_a_mesh_that_is_none() -> None:
    for message in cluster.run(2, no_mesh):
        assert message.startswith(("TypeError", "ValueError")) and "mesh" in message.lower() and "'cpu'" in message


def wrong_on_one_rank(what: str) -> str:
    here = dist.get_rank() == 1
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if what == "module":
        return message_of(fully_shard, "blocks" if here else Mlp(), mesh=mesh)
    if what == "mesh of all":
        return message_of(fully_shard, Mlp(), mesh="cpu" if here else mesh)
    # Rank 1's partners wait in a group that it was not told of.
    both = cluster.mesh((dist.get_world_size() // 2, 2), ("outer", "inner"))
    if what == "dimensions":
        found = message_of(fully_shard, Mlp(), mesh=both, reshard_after_forward="no" if here else None)
    elif what == "names":
        dims = DataParallelMeshDims(shard="other" if here else "inner")
        model = distribute_module(Mlp(), both)
        found = message_of(fully_shard, model, mesh=both, dp_mesh_dims=dims)
    else:
        found = message_of(fully_shard, Mlp(), mesh="cpu" if here else both if what == "both" else both[what])
    # The groups are as they were.
    fully_shard(Mlp(), mesh=both)
    fully_shard(Mlp(), mesh=both["inner"])
    return found


@pytest.mark.parametrize(("what", "word"), [("module", "'blocks'"), ("mesh of all", "'cpu'")])
def test_a_wrong_type_on_one_rank_is_an_error_on_all(what: str, word: str) -> None:
    """It was an error there, while the others waited to compare notes."""
    for message in cluster.run(2, wrong_on_one_rank, what):
        assert message.startswith("TypeError") and word in message


@pytest.mark.parametrize(
    ("what", "word", "hear"),
    [
        ("inner", "'cpu'", {0, 1}),
        ("both", "'cpu'", {0, 1, 2, 3}),
        ("dimensions", "'no'", {0, 1, 2, 3}),
        ("names", "'other'", {0, 1}),
    ],
)
def test_on_a_part_of_the_mesh_all_its_ranks_hear_of_it(what: str, word: str, hear: set[int]) -> None:
    """The ranks of the groups that the wrong one is in, and of those that these are in."""
    messages = cluster.run(4, wrong_on_one_rank, what)
    assert {rank for rank, message in enumerate(messages) if word in message} == hear, messages
    assert all(message == "no error" for rank, message in enumerate(messages) if rank not in hear)


def everybody_wrong() -> str:
    return message_of(fully_shard, Mlp(), mesh="cpu")


def crossed() -> str:
    """One rank passes the whole mesh, its partner the part that they share."""
    whole, pair = DeviceMesh.from_group(dist.new_group(), "cpu"), dist.new_group([0, 1])
    mesh = DeviceMesh.from_group(pair, "cpu") if dist.get_rank() == 1 else whole
    return message_of(fully_shard, Mlp(), mesh=mesh)


def test_meshes_that_cross_are_an_error_not_a_hang() -> None:
    assert all("'cpu'" in message for message in cluster.run(3, everybody_wrong))
    messages = cluster.run(3, crossed)
    assert all(m.startswith("ValueError") and "give every rank the same mesh" in m for m in messages), messages
    assert len(set(messages)) == 1


# ---- modules ----


def twice(kind: str) -> str:
    model = Stack(2)
    shard_children(model)
    if kind == "root":
        return message_of(fully_shard, model)
    if kind == "child":
        return message_of(fully_shard, model.blocks[1])
    return message_of(fully_shard, [model.blocks[0], model.blocks[1]])


@pytest.mark.parametrize("kind", ["root", "child", "list"])
def test_a_module_sharded_twice(kind: str) -> None:
    words = ("FSDPStack", "head") if kind == "root" else ("FSDPMlp", "up.weight")
    same_everywhere(cluster.run(2, twice, kind), "ValueError", "sharded before", *words)


def sharded_by_torch() -> str:
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    model = Stack(2)
    torch_fully_shard(model.blocks[0])
    return message_of(fully_shard, model) + message_of(fully_shard, model.blocks[0])


def test_a_module_that_torch_has_sharded() -> None:
    for message in cluster.run(2, sharded_by_torch):
        assert "blocks.0" in message and message.count("ValueError") == 2 and "no error" not in message


def not_a_module(kind: str) -> str:
    thing: Any = {
        "parameter": nn.Parameter(torch.zeros(2)),
        "empty list": [],
        "list of parameters": [nn.Parameter(torch.zeros(2))],
        "ModuleList": nn.ModuleList([Mlp()]),
        "ModuleDict": nn.ModuleDict({"a": Mlp()}),
        "None": None,
    }[kind]
    return message_of(fully_shard, thing)


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        ("parameter", "module"),
        ("empty list", "empty list"),
        ("list of parameters", "module"),
        ("ModuleList", "ModuleList"),
        ("ModuleDict", "ModuleDict"),
        ("None", "module"),
    ],
)
def test_what_is_no_module_with_a_forward(kind: str, word: str) -> None:
    messages = cluster.run(2, not_a_module, kind)
    assert len(set(messages)) == 1
    assert messages[0].startswith(("TypeError", "ValueError")) and word in messages[0]


def same_module_twice_in_a_list() -> str:
    block = Mlp()
    return message_of(fully_shard, [block, block])


def test_a_module_twice_in_one_list() -> None:
    messages = cluster.run(2, same_module_twice_in_a_list)
    assert messages in (["no error"] * 2, messages[:1] * 2)


@pytest.mark.parametrize("value", ["yes", 1.5, 3])
def test_reshard_after_forward_of_a_wrong_kind(value: Any) -> None:
    messages = cluster.run(2, wrong_reshard, value)
    assert len(set(messages)) == 1 and "reshard_after_forward" in messages[0] and "no error" not in messages[0]


def wrong_reshard(value: Any) -> str:
    model = Mlp()
    return message_of(fully_shard, model, reshard_after_forward=value) + then_untouched(model)


def unknown_argument() -> str:
    return message_of(fully_shard, Mlp(), reshard_after_backward=True)


def test_an_unknown_argument() -> None:
    same_everywhere(cluster.run(1, unknown_argument), "TypeError", "reshard_after_backward")


# ---- optimizers ----

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "groups": lambda p: torch.optim.AdamW([{"params": [q]} for q in p], lr=0.1),
    "named": lambda p: torch.optim.SGD(list(p), lr=0.1),
}


def optimizer_before_sharding(name: str, stepped: bool) -> str:
    torch.manual_seed(0)
    model = Stack(2)
    optimizer = OPTIMIZERS[name](model.parameters())
    if stepped:
        squares(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    shard_children(model)
    squares(model).backward()
    return message_of(optimizer.step)


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_built_before_sharding(name: str, stepped: bool) -> None:
    """It would train parameters that nothing uses, without a word."""
    same_everywhere(
        cluster.run(2, optimizer_before_sharding, name, stepped), "RuntimeError", "before fully_shard", "'head'"
    )


def optimizer_of_another_model() -> str:
    """Only the sharded model's old optimizer is refused."""
    torch.manual_seed(0)
    other, model = nn.Linear(WIDTH, 2), Stack(2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    shard_children(model)
    other(data()).sum().backward()
    first = message_of(optimizer.step)
    late = torch.optim.SGD(model.parameters(), lr=0.1)
    squares(model).backward()
    return first + "; " + message_of(late.step)


def test_other_optimizers_are_left_alone() -> None:
    assert cluster.run(2, optimizer_of_another_model) == ["no error; no error"] * 2


def added_group() -> str:
    """A parameter group added later is looked at too."""
    model = Stack(2)
    old = model.head
    shard_children(model)
    optimizer = torch.optim.SGD(model.blocks.parameters(), lr=0.1)
    squares(model).backward()
    optimizer.step()
    optimizer.add_param_group({"params": [old]})
    return message_of(optimizer.step)


def test_a_superseded_parameter_in_a_later_group() -> None:
    same_everywhere(cluster.run(2, added_group), "RuntimeError", "before fully_shard", "'head'")


# ---- methods ----


def bad_calls() -> list[str]:
    model = shard_children(Stack(2))
    return [
        message_of(model.set_modules_to_forward_prefetch, [nn.Linear(2, 2)]),
        message_of(model.set_modules_to_backward_prefetch, [model.blocks]),
        message_of(model.set_gradient_divide_factor, 0.0),
        message_of(model.set_gradient_divide_factor, -2.0),
    ]


def test_methods_check_their_arguments() -> None:
    forward, backward, zero, negative = cluster.run(1, bad_calls)[0]
    assert "Linear" in forward and forward.startswith("ValueError")
    assert "ModuleList" in backward and backward.startswith("ValueError")
    assert "positive" in zero and "0.0" in zero and "-2.0" in negative


def reset_of_a_child() -> str:
    model = shard_children(Stack(2))
    squares(model).backward()
    return message_of(model.blocks[0].reset_iter_state)


def test_reset_iter_state_of_a_child() -> None:
    same_everywhere(cluster.run(2, reset_of_a_child), "RuntimeError", "root")


def first_forward_through_a_list() -> str:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Mlp(), Mlp()

    model = Model()
    fully_shard([model.a, model.b])
    return message_of(model.a, data())


def test_a_list_without_a_root() -> None:
    same_everywhere(cluster.run(2, first_forward_through_a_list), "RuntimeError", "root", "Mlp")
