"""Between forward and backward, and after a failed one, some modules show gathered parameters. ``model.zero_grad()``
cleared these, so that the gradients of the last step were added to; an optimizer built then trained copies of the
weights that the next gather overwrote.
"""

from __future__ import annotations

import contextlib

import torch

from tests import cluster
from tests.fsdp.modules import Stack, squares
from tests.fsdp.reference import average_gradients, differences, twins


def cleared(set_to_none: bool, fails: bool) -> list[str]:
    sharded, plain = twins(Stack)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (sharded, plain)]
    found = []
    for number in range(3):
        for model in (sharded, plain):
            loss = squares(model, number)
            if fails:
                handle = loss.register_hook(lambda _: 1 / 0)
                with contextlib.suppress(ZeroDivisionError):
                    loss.backward()
                handle.remove()
            model.zero_grad(set_to_none)
            (squares(model, number) if fails else loss).backward()
        average_gradients(plain)
        found += [f"step {number}: {d}" for d in differences(sharded, plain)]
        for optimizer in optimizers:
            optimizer.step()
    return found


def every_way() -> list[str]:
    return [f"{a} {b}: {d}" for a in (True, False) for b in (True, False) for d in cleared(a, b)]


def test_zero_grad_between_forward_and_backward_is_not_lost() -> None:
    assert cluster.run(2, every_way) == [[], []]


def optimizer_built_too_late() -> str:
    sharded, _ = twins(Stack)
    loss = squares(sharded)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    loss.backward()
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_an_optimizer_of_gathered_parameters_is_refused() -> None:
    for message in cluster.run(2, optimizer_built_too_late):
        assert "SGD holds the gathered parameter 'head'" in message and "before the first forward" in message
