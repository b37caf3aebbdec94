"""torch's fused optimizers on ragged parameters: the values of whole ones, by the local kernel where rows lie alike."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ragged_shard import RaggedShard, fused
from tests import cluster

ROWS, OTHER_ROWS, ALL_ON_ONE = (RaggedShard((0,), units) for units in ((1, 2), (2, 1), (0, 1)))
KINDS = {
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.1, "amsgrad": True}),
    "Adam": (torch.optim.Adam, {"lr": torch.tensor(0.1)}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "plain SGD": (torch.optim.SGD, {}),
    "Adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1}),
}


def without_handlers():
    stock = {op: h for op, h in DTensor._op_dispatcher._custom_op_handlers.items() if h is not fused.run}
    return mock.patch.object(DTensor._op_dispatcher, "_custom_op_handlers", stock)


def trains(kind, layouts):
    """Three steps on whole parameters, on parameters of these layouts, and on the same as DTensor alone runs them.

    Returns which of the calls went to the local kernel.
    """
    make, options = KINDS[kind]
    mesh, generator = cluster.mesh((2,)), torch.Generator().manual_seed(0)
    values = [torch.randn(6, 4, generator=generator) for _ in layouts]
    whole = [nn.Parameter(value.clone()) for value in values]
    mine, dtensors = (
        [nn.Parameter(distribute_tensor(v.clone(), mesh, [p])) for v, p in zip(values, layouts, strict=True)]
        for _ in range(2)
    )
    optimizers = [make(parameters, **{"lr": 0.1, "fused": True, **options}) for parameters in (whole, mine, dtensors)]
    local, stock = [], fused._local_arguments
    for _ in range(3):
        for a, b, c, placement in zip(whole, mine, dtensors, layouts, strict=True):
            a.grad = torch.randn(6, 4, generator=generator)
            b.grad, c.grad = (distribute_tensor(a.grad, mesh, [placement]) for _ in range(2))
        optimizers[0].step()
        with mock.patch.object(fused, "_local_arguments", lambda *call: local.append(stock(*call)) or local[-1]):
            optimizers[1].step()
        with without_handlers():
            optimizers[2].step()
    for a, b, c in zip(whole, mine, dtensors, strict=True):
        assert torch.equal(b.to_local(), c.to_local())
        # Where a tensor is cut decides which of its elements the kernel's vector body takes.
        torch.testing.assert_close(b.full_tensor(), a.detach())
        for key, value in optimizers[1].state[b].items():
            one, other = (x.to_local() if isinstance(x, DTensor) else x for x in (value, optimizers[2].state[c][key]))
            assert torch.equal(one, other), key
    return [arguments is not None for arguments in local]


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_the_step_of_whole_tensors(kind):
    layouts = [ROWS, ALL_ON_ONE, RaggedShard((0, 1), (5, 7))]
    assert cluster.run(2, trains, kind, layouts) == [[True] * 3] * 2


def test_other_layouts_beside_a_ragged_one():
    assert cluster.run(2, trains, "AdamW", [Shard(0), ROWS, Replicate()]) == [[True] * 3] * 2


def test_without_a_ragged_tensor_it_is_torchs_own_step():
    assert cluster.run(2, trains, "AdamW", [Shard(0), Shard(1)]) == [[False] * 3] * 2
    handlers = DTensor._op_dispatcher._custom_op_handlers
    assert all(handlers[op] is fused.run for op in fused.OPERATORS)


def refuses():
    """What DTensor says of a row whose tensors lie differently, with the handler and without it."""
    mesh = cluster.mesh((2,))
    rows = [[distribute_tensor(torch.ones(6, 4), mesh, [p])] for p in (ROWS, OTHER_ROWS, ROWS, ROWS)]
    call = (*rows, [], [torch.tensor(1.0)])
    options = {
        "lr": 0.1, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1e-8, "amsgrad": False, "maximize": False,
    }  # fmt: skip
    said = []
    for handlers in (contextlib.nullcontext(), without_handlers()):
        with handlers, pytest.raises(RuntimeError) as error:
            torch._fused_adamw_(*call, **options)
        said.append(str(error.value))
    return said


def test_rows_that_lie_differently_are_dtensors_business():
    for with_handler, without in cluster.run(2, refuses):
        assert with_handler == without and "redistribute()" in without
