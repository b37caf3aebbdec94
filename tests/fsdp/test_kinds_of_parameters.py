"""Parameters of every kind: mixed dtypes in one module, 0-d, empty, non-contiguous, on the meta device, converted,
ignored, copied, loaded.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp import fully_shard
from ragged_shard import Block, ParamPolicy, buffer_of
from tests import cluster
from tests.fsdp.modules import WIDTH, Mlp, Stack, data, squares
from tests.fsdp.reference import average_gradients, differences, full, shard_children, step, train, twins


def check(world_size: int, function: Callable[..., list[str]], *args: Any, **kwargs: Any) -> None:
    assert cluster.run(world_size, function, *args, **kwargs) == [[]] * world_size


class Odd(nn.Module):
    """Everything that a flat layout may stumble over, in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.hollow = nn.Parameter(torch.zeros(3, 0))
        self.one = nn.Parameter(torch.ones(1, 1, 1))
        self.transposed = nn.Parameter(torch.randn(5, WIDTH).t())
        self.strided = nn.Parameter(torch.randn(2 * WIDTH)[::2])
        self.wide = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.randn(3, WIDTH, dtype=torch.bfloat16))
        self.cube = nn.Parameter(torch.randn(3, WIDTH, 2))
        self.fixed = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.indices = nn.Parameter(torch.arange(WIDTH), requires_grad=False)
        # Dtypes that gloo does not carry.
        self.codes = nn.Parameter(torch.arange(WIDTH).to(torch.int16), requires_grad=False)
        self.eighths = nn.Parameter(torch.randn(3, WIDTH).to(torch.float8_e4m3fn), requires_grad=False)
        self.register_buffer("buffer", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scalar * self.one[0, 0] + self.empty.sum() + self.hollow.sum(1).sum()
        x = x + self.strided + self.fixed[self.indices] * self.buffer
        x = x + self.codes.to(x.dtype) + self.eighths.to(x.dtype).sum(0)
        x = x + (x.double() * self.wide).float() + (x[:3].bfloat16() * self.narrow).float().sum(0)
        return torch.einsum("rw,ewd->red", x, self.cube).sum((1, 2))[:, None] + x @ self.transposed


class OddModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.odd, self.last = Mlp(), Odd(), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.odd(self.first(x)))


def whole_rows(name: str, parameter: Tensor) -> ParamPolicy:
    return ParamPolicy(block=Block.rows(2))


def odd(policy: Any) -> list[str]:
    # A transposed weight multiplies in another order than the contiguous one it becomes.
    return train(OddModel, squares, partial(shard_children, orig_param_policy=policy), tolerance=1e-4)


@pytest.mark.parametrize("policy", [None, whole_rows])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_odd_parameters_in_one_module(world_size: int, policy: Any) -> None:
    """Mixed dtypes, 0-d, empty, non-contiguous, frozen integers: FSDP2 refuses each of the first four."""
    check(world_size, odd, policy)


def values_and_attributes() -> list[str]:
    """Sharding changes no value, shape, dtype, attribute, buffer, name or order."""
    torch.manual_seed(0)
    plain = OddModel()
    model = copy.deepcopy(plain)
    model.odd.cube.is_expert = True
    shard_children(model)
    found = differences(model, plain)
    if list(dict(model.named_parameters())) != list(dict(plain.named_parameters())):
        found.append("order of parameters")
    if list(model.state_dict()) != list(plain.state_dict()):
        found.append("order of the state dict")
    if getattr(model.odd.cube, "is_expert", None) is not True:
        found.append("attribute of a parameter")
    if not torch.equal(model.odd.buffer, plain.odd.buffer):
        found.append("buffer")
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, nn.Parameter):
            found.append(f"{name} is no nn.Parameter")
        if parameter.numel() != dict(plain.named_parameters())[name].numel():
            found.append(f"{name}.numel()")
    return found


def test_sharding_changes_nothing_one_can_see() -> None:
    check(3, values_and_attributes)


# ---- conversions ----


def converted(how: str) -> list[str]:
    """module.to(...) after sharding: the shards stay views of one flat buffer, training goes on."""
    sharded, plain = twins(Stack)
    if how == "after a step":
        squares(sharded).backward()
        sharded.zero_grad()
    for model in (sharded, plain):
        model.half() if how == "half" else model.to(torch.bfloat16)
    dtype = torch.float16 if how == "half" else torch.bfloat16
    found = [f"{n} is {p.dtype}" for n, p in sharded.named_parameters() if p.dtype != dtype]
    found += differences(sharded, plain)
    for parameter in sharded.parameters():
        home = buffer_of(parameter)
        if home is None or home[0].dtype != dtype:
            found.append("no flat buffer of the new dtype")
    storages = {p._local_tensor.untyped_storage().data_ptr() for p in sharded.blocks[0].parameters()}
    if len(storages) != 1:
        found.append(f"a bucket in {len(storages)} storages")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (sharded, plain)]
    for number in range(2):
        # One unit in the last place of such a dtype: products into a strided view round otherwise.
        found += step(
            sharded, plain, lambda m, n=number: m(data(n).to(dtype)).square().mean(), optimizers, tolerance=2e-2
        )
    return found


@pytest.mark.parametrize("how", ["half", "bfloat16", "after a step"])
def test_converted_after_sharding(how: str) -> None:
    check(2, converted, how)


class Resettable(nn.Module):
    """``reset_parameters`` fills without random numbers: constants that tell elements apart by shape alone."""

    def __init__(self, device: Any = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, device=device) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH, device=device)
        self.register_buffer("steps", torch.zeros(3, device=device))

    def reset_parameters(self) -> None:
        for index, block in enumerate(self.blocks):
            nn.init.constant_(block.weight, 0.1 * (index + 1))
            nn.init.zeros_(block.bias)
        self.norm.reset_parameters()
        nn.init.zeros_(self.steps)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x) + self.steps.sum()


def from_meta() -> list[str]:
    plain = Resettable()
    plain.reset_parameters()
    model = shard_children(Resettable(torch.device("meta")))
    found = [n for n, p in model.named_parameters() if p.device.type != "meta"]
    model.to_empty(device="cpu")
    model.reset_parameters()
    found += differences(model, plain)
    found += [f"{n} has no buffer" for n, p in model.named_parameters() if buffer_of(p) is None]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=True) for m in (model, plain)]
    for number in range(2):
        found += step(model, plain, lambda m, n=number: squares(m, n), optimizers)
    return found


def test_from_the_meta_device() -> None:
    check(2, from_meta)


def random_from_meta(world: int) -> list[str]:
    """The values of reset_parameters are those of a single process with the same seed (pytorch/pytorch#168058)."""
    model = Stack()
    with torch.device("meta"):
        sharded = Stack()
    shard_children(sharded, orig_param_policy=whole_rows)
    sharded.to_empty(device="cpu")
    torch.manual_seed(5)
    for module in sharded.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    with torch.no_grad():
        sharded.head.normal_()
    values = {n: full(p) for n, p in sharded.named_parameters()}
    del model
    return [(n, v.tolist()) for n, v in values.items()]


def test_random_initialisation_does_not_depend_on_the_number_of_ranks() -> None:
    alone = cluster.run(1, random_from_meta, 1)[0]
    for world_size in (2, 3):
        for values in cluster.run(world_size, random_from_meta, world_size):
            assert values == alone
    flat = [x for _, v in alone for row in (v if isinstance(v[0], list) else [v]) for x in row]
    assert len(set(flat)) > len(flat) * 0.9


def forgotten_on_meta() -> str:
    with torch.device("meta"):
        model = Stack()
    shard_children(model)
    try:
        model(data())
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_forward_on_the_meta_device_says_what_to_do() -> None:
    for message in cluster.run(2, forgotten_on_meta):
        assert "meta" in message and "to_empty" in message


# ---- copies and state dicts ----


def state_dict_round_trip() -> list[str]:
    """state_dict -> another sharded model; the same through torch.save of the local shards."""
    sharded, _ = twins(Stack)
    squares(sharded).backward()
    torch.optim.SGD(sharded.parameters(), lr=0.1).step()
    torch.manual_seed(99)
    other = shard_children(Stack())
    state = sharded.state_dict()
    found = [f"{n} is {type(v).__name__}" for n, v in state.items() if not isinstance(v, DTensor)]
    answer = other.load_state_dict(state)
    if answer.missing_keys or answer.unexpected_keys:
        found.append(str(answer))
    ours = {n: full(p) for n, p in sharded.named_parameters()}
    found += [n for n, p in other.named_parameters() if not torch.equal(full(p), ours[n])]
    # Loading is into the same memory: the parameters are still views of the flat buffer.
    found += [f"{n} has left its buffer" for n, p in other.named_parameters() if buffer_of(p) is None]
    buffer = io.BytesIO()
    torch.save(state, buffer)
    best = copy.deepcopy(state)
    expected = {n: v.to_local().clone() for n, v in state.items()}
    with torch.no_grad():
        for p in sharded.parameters():
            p.zero_()
    buffer.seek(0)
    for kept in (torch.load(buffer, weights_only=True), best):
        found += [n for n, v in expected.items() if not torch.equal(kept[n].to_local(), v)]
    return found


def test_state_dict_round_trip() -> None:
    check(2, state_dict_round_trip)


def assigned() -> list[str]:
    """load_state_dict(assign=True) must not leave the model computing with the values of before."""
    sharded, plain = twins(Stack)
    found = step(sharded, plain, squares)
    for model in (sharded, plain):
        model.zero_grad()
        state = {n: p.detach() * 0.5 for n, p in model.named_parameters()}
        try:
            model.load_state_dict(state, assign=True)
        except RuntimeError as error:
            # Refusing is as good, if it says so and changes nothing.
            return [] if model is sharded and "assign" in str(error) else [str(error)]
    return found + step(sharded, plain, partial(squares, step=1))


def test_load_state_dict_with_assign() -> None:
    check(2, assigned)


def fsdp2_checkpoint() -> list[str]:
    """A state dict of torch's FSDP2 (Shard(0) DTensors) loads through DCP's state-dict API; so does a plain one."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    torch.manual_seed(1)
    source = Stack()
    theirs = copy.deepcopy(source)
    for block in theirs.blocks:
        torch_fully_shard(block)
    torch_fully_shard(theirs)
    torch.manual_seed(2)
    ours = shard_children(Stack())
    ours.load_state_dict(theirs.state_dict())
    found = differences(ours, source)
    torch.manual_seed(3)
    ours = shard_children(Stack())
    set_model_state_dict(ours, source.state_dict(), options=StateDictOptions(full_state_dict=True))
    return found + differences(ours, source)


def test_state_dicts_of_fsdp2_and_of_plain_models_load() -> None:
    check(2, fsdp2_checkpoint)


def broadcast_from_rank_0() -> list[str]:
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        set_model_state_dict,
    )

    torch.manual_seed(1)
    source = Stack()
    ours = shard_children(Stack())
    state = source.state_dict() if torch.distributed.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(ours, state, options=options)
    found = differences(ours, source)
    answer = get_model_state_dict(ours, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if torch.distributed.get_rank() == 0:
        found += [n for n, v in source.state_dict().items() if not torch.equal(answer[n], v)]
    elif answer:
        found.append("ranks other than 0 got a state dict")
    return found


def test_full_state_dict_from_and_to_rank_0() -> None:
    check(2, broadcast_from_rank_0)
    check(3, broadcast_from_rank_0)


# ---- ignored ----


def ignored() -> list[str]:
    sharded, plain = twins(Stack, lambda model: model)
    skip = {sharded.blocks[1].up.weight, sharded.head}
    for block in sharded.blocks:
        fully_shard(block, ignored_params=skip)
    fully_shard(sharded, ignored_params=skip)
    found = [
        n for n, p in sharded.named_parameters() if isinstance(p, DTensor) == (n in ("blocks.1.up.weight", "head"))
    ]
    losses = []
    for model in (sharded, plain):
        loss = squares(model)
        loss.backward()
        losses.append(loss.item())
    # Ignored gradients are not reduced: they are this rank's own.
    for name in ("blocks.1.up.weight", "head"):
        own = dict(plain.named_parameters())[name].grad
        if not torch.equal(dict(sharded.named_parameters())[name].grad, own):
            found.append(f"{name}.grad")
    average_gradients(plain)
    found += [d for d in differences(sharded, plain) if not d.startswith(("blocks.1.up.weight.grad", "head.grad"))]
    return found if losses[0] == losses[1] else [*found, "loss"]


def test_ignored_parameters_stay_plain() -> None:
    check(2, ignored)


def nested_policies() -> list[str]:
    """Every block kind, in models where ranks own nothing of a bucket."""
    found = []
    for block in (Block.whole(), Block.slices(2), Block.elements(7), Block.tile(3, 2), Block.rows(100)):
        found += [
            f"{block}: {d}"
            for d in train(
                Stack,
                squares,
                partial(shard_children, orig_param_policy=lambda n, p, b=block: ParamPolicy(block=b)),
                steps=2,
                tolerance=1e-6,
            )
        ]
    return found


def test_blocks_that_leave_ranks_empty() -> None:
    check(4, nested_policies)


def policy_calls() -> list[str]:
    """The policy gets each parameter once, by its name relative to the module, plain and whole."""
    seen: list[str] = []

    def policy(name: str, parameter: Tensor) -> ParamPolicy | None:
        if isinstance(parameter, DTensor) or not isinstance(parameter, nn.Parameter):
            seen.append(f"{name} is {type(parameter)}")
        seen.append(f"{name} {tuple(parameter.shape)}")
        return None

    model = Stack(2)
    fully_shard(model.blocks[0], orig_param_policy=policy)
    first, seen[:] = list(seen), []
    fully_shard([model.blocks[1].up, model.blocks[1].down], orig_param_policy=policy)
    second, seen[:] = list(seen), []
    fully_shard(model, orig_param_policy=policy)
    expected = [
        ["up.weight (11, 8)", "up.bias (11,)", "down.weight (8, 11)", "down.bias (8,)"],
        ["0.weight (11, 8)", "0.bias (11,)", "1.weight (8, 11)", "1.bias (8,)"],
        ["head (8, 5)"],
    ]
    return [] if [first, second, seen] == expected else [str([first, second, seen])]


def test_what_the_policy_is_called_with() -> None:
    check(1, policy_calls)


def blocks_are_respected(world: int) -> list[str]:
    """No rank boundary cuts a block."""
    model = Stack()
    block = Block.rows(3)
    shard_children(model, orig_param_policy=lambda n, p: ParamPolicy(block=block))
    found = []
    for name, parameter in model.named_parameters():
        atom = block.numel(parameter.shape)
        placement = parameter.placements[0]
        for rank in range(world):
            start, stop = placement.flat_range(parameter.shape, rank)
            for cut in (start, stop):
                if stop > start and cut % atom and cut != parameter.numel():
                    found.append(f"{name}: rank {rank} holds [{start}, {stop}), blocks of {atom}")
    return found


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_no_boundary_cuts_a_block(world_size: int) -> None:
    check(world_size, blocks_are_respected, world_size)
