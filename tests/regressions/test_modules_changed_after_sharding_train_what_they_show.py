"""A child that was not itself passed to fully_shard was converted, materialised or given other parameters: what was
shown, and trained by the optimizer, and what computed came apart without a word. The modules of a list could not be
converted at all, nor could a model on the meta device be loaded by ``assign=True`` in FSDP2's ways.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import distribute_tensor

from fsdp import fully_shard
from ragged_shard import buffer_of
from tests import cluster
from tests.fsdp.modules import WIDTH, Mlp, data, squares
from tests.fsdp.reference import average_gradients, differences, step, twins


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Mlp()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.block(x.to(self.norm.weight.dtype))))


def shard(model: Model) -> Model:
    """The norm and the head lie in the root's bucket."""
    fully_shard(model.block)
    return fully_shard(model)


def shard_list(model: Model) -> Model:
    fully_shard(model.block)
    fully_shard([model.norm, model.head])
    return fully_shard(model)


def trained(sharded: nn.Module, plain: nn.Module, tolerance: float = 0.0) -> list[str]:
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (sharded, plain)]
    found = [
        d for n in range(2) for d in step(sharded, plain, partial(squares, step=n), optimizers, tolerance=tolerance)
    ]
    return found + [f"{n} has left its buffer" for n, p in sharded.named_parameters() if buffer_of(p) is None]


def rounded(model: Model) -> None:
    model.head.half().float()


def assigned_by_child(model: Model) -> None:
    torch.manual_seed(5)
    model.head.load_state_dict(nn.Linear(WIDTH, 5).state_dict(), assign=True)


def another_parameter(model: Model) -> None:
    model.norm.weight = nn.Parameter(torch.linspace(-1, 1, WIDTH), requires_grad=False)


def another_while_gathered(model: Model) -> None:
    squares(model)
    another_parameter(model)


def frozen_while_gathered(model: Model) -> None:
    squares(model)
    model.head.requires_grad_(False)
    model.block.up.requires_grad_(False)


def tied(model: Model) -> None:
    model.norm.bias = model.norm.weight


CHANGES: dict[str, Callable[[Model], object]] = {
    "a child rounded": rounded,
    "load_state_dict(assign=True) of a child": assigned_by_child,
    "another parameter": another_parameter,
    "another parameter while gathered": another_while_gathered,
    "frozen while gathered": frozen_while_gathered,
    "tied": tied,
}


def changed() -> list[str]:
    found = []
    for name, change in CHANGES.items():
        for stepped in (False, True):
            sharded, plain = twins(Model, shard)
            if stepped:
                trained(sharded, plain)
            for model in (sharded, plain):
                change(model)
                # The optimizer is built after the forward that takes it up: see `refused`.
                with torch.no_grad():
                    model(data())
            found += [f"{name}, {stepped}: {d}" for d in trained(sharded, plain)]
    return found


def frozen_before_backward() -> list[str]:
    """Root and last block show gathered parameters between forward and backward."""
    sharded, plain = twins(Model, shard)
    found = trained(sharded, plain)
    for names in (("head", "block"), ("norm",)):
        for model in (sharded, plain):
            model.zero_grad()
            loss = squares(model)
            for name in names:
                getattr(model, name).requires_grad_(False)
            loss.backward()
        average_gradients(plain)
        found += [f"{names}: {d}" for d in differences(sharded, plain)]
    return found


def test_freezing_between_forward_and_backward_lasts() -> None:
    assert cluster.run(2, frozen_before_backward) == [[], []]


def borrowed() -> list[str]:
    """Parameters of another model are given: that one trains on, and this one has the values and memory of its own."""
    found = []
    for source in twins(Model, shard):
        with torch.no_grad():
            source.head.bias.add_(1)
        optimizer = torch.optim.SGD(source.parameters(), lr=0.1)
        target, _ = twins(Model, shard)
        target.head.load_state_dict(dict(source.head.named_parameters()), assign=True)
        target.block.load_state_dict(dict(source.block.named_parameters()), assign=True)
        before = target(data()).detach().clone()
        if not torch.equal(before, source(data())):
            found.append("other values")
        squares(source).backward()
        optimizer.step()
        if not torch.equal(target(data()), before):
            found.append("the same memory")
    return found


def test_parameters_of_another_model_stay_its_own() -> None:
    assert cluster.run(2, borrowed) == [[], []]


def test_what_happened_to_a_child_is_taken_up() -> None:
    assert cluster.run(2, changed) == [[], []]


def converted() -> list[str]:
    """A list of modules becomes another dtype; gradients are converted with their parameters."""
    found = []
    for how in (shard, shard_list):
        sharded, plain = twins(Model, how)
        for model in (sharded, plain):
            squares(model).backward()
        average_gradients(plain)
        for model in (sharded, plain):
            model.to(torch.float64)
        found += [f"{how.__name__}: {d}" for d in differences(sharded, plain)]
        for model in (sharded, plain):
            squares(model, 1).backward()
            for parameter in model.parameters():
                parameter.grad = None
        found += [f"{how.__name__}: {d}" for d in trained(sharded, plain, 1e-15)]
    return found


def test_conversion_takes_lists_and_gradients_along() -> None:
    assert cluster.run(2, converted) == [[], []]


def module_by_module(model: Model, values: dict[str, Tensor]) -> None:
    for module in model.modules():
        if module._parameters:
            module.to_empty(device="cpu", recurse=False)
    model.load_state_dict(
        {
            n: distribute_tensor(t, p.device_mesh, p.placements)
            for (n, t), p in zip(values.items(), model.state_dict().values(), strict=True)
        }
    )


def at_once(model: Model, values: dict[str, Tensor]) -> None:
    model.to_empty(device="cpu")
    set_model_state_dict(model, values, options=StateDictOptions(full_state_dict=True))


def distributed(model: Model, values: dict[str, Tensor]) -> None:
    """FSDP2's recipe."""
    meta = model.state_dict()
    shards = {n: nn.Parameter(distribute_tensor(t, meta[n].device_mesh, meta[n].placements)) for n, t in values.items()}
    model.load_state_dict(shards, assign=True)


def broadcast(model: Model, values: dict[str, Tensor]) -> None:
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, values if torch.distributed.get_rank() == 0 else {}, options=options)


def materialised() -> list[str]:
    found = []
    for how in (shard, shard_list):
        for fill in (module_by_module, at_once, distributed, broadcast):
            torch.manual_seed(3)
            plain = Model()
            with torch.device("meta"):
                sharded = how(Model())
            fill(sharded, copy.deepcopy(plain.state_dict()))
            found += [f"{how.__name__}, {fill.__name__}: {d}" for d in trained(sharded, plain)]
    return found


def test_every_way_from_the_meta_device() -> None:
    assert cluster.run(2, materialised) == [[], []]


def message(function: Callable[[], Any]) -> str:
    try:
        function()
    except RuntimeError as error:
        return str(error)
    return "no error"


def removed(model: Model) -> None:
    model.head.bias = None


def of_another_shape(model: Model) -> None:
    model.head.weight = nn.Parameter(torch.randn(7, WIDTH))


def of_another_dtype(model: Model) -> None:
    model.norm.double()


def half_on_meta(model: Model) -> None:
    model.norm.to_empty(device="meta")


def tied_across_buckets(model: Model) -> None:
    model.norm.weight = model.block.down.bias


def refused() -> list[str]:
    found = []
    for change in (removed, of_another_shape, of_another_dtype, half_on_meta, tied_across_buckets):
        model = shard(Model())
        change(model)
        found.append(message(lambda model=model: model(data())))
    model = shard(Model())
    another_parameter(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    squares(model).backward()
    found.append(message(optimizer.step))
    for lost in (lambda: model(data()), model.state_dict, model.reshard):
        squares(model)
        with torch.no_grad():
            model.head.weight.mul_(0.5)
        found.append(message(lost))
        # It has been said once; nothing is left of it.
        squares(model).backward()
    return found


def test_what_cannot_be_taken_up_is_an_error_that_names_the_parameter() -> None:
    for gone, shape, dtype, meta, tie, optimizer, *lost in cluster.run(2, refused):
        assert "'head.bias' of shape (5,) was removed from its Linear" in gone
        assert "'head.weight' of shape (5, 8) was replaced" in shape and "(7, 8)" in shape
        assert "'norm.weight': ('torch.float64'" in dtype and "convert" in dtype
        assert "'norm.weight': ('torch.float32', 'meta')" in meta and "materialise" in meta
        assert "'norm.weight'" in tie and "was tied after fully_shard to 'down.bias' of 'block'" in tie
        assert "SGD holds the tensor that was assigned to 'norm.weight'" in optimizer
        assert len(lost) == 3 and all("of 'Model' were changed in place while" in one for one in lost)


def called_with_other_tensors() -> list[str]:
    """Once they overwrote the parameters, for good."""
    sharded, plain = twins(Model, shard)
    found = step(sharded, plain, squares)
    for others in (
        {name: p.detach() * 0.5 for name, p in sharded.named_parameters()},
        {"head.weight": nn.Parameter(torch.zeros(5, WIDTH))},
    ):
        text = message(lambda others=others: torch.func.functional_call(sharded, others, (data(),)))
        if "functional_call got other tensors than parameter" not in text:
            found.append(text)
    for model in (sharded, plain):
        model.zero_grad()
    return found + step(sharded, plain, squares)


def test_functional_calls_with_other_tensors_are_refused() -> None:
    assert cluster.run(2, called_with_other_tensors) == [[], []]
