"""Which parameters a module shows, and when: torch's table of ``reshard_after_forward`` over root and child."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp import fully_shard
from tests import cluster
from tests.fsdp.modules import Stack, squares

SHARDED, WHOLE = "sharded", "whole"


def shown(module: nn.Module) -> str:
    kinds = {SHARDED if isinstance(p, DTensor) else WHOLE for p in module.parameters(recurse=False)}
    for child in module.children():
        kinds |= (
            {shown(child)} if not isinstance(child, nn.ModuleList) and any(True for _ in child.parameters()) else set()
        )
    (kind,) = kinds
    return kind


def after_evaluation(reshard_after_forward: bool | None) -> list[str]:
    torch.manual_seed(0)
    model = Stack()
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard_after_forward)
    fully_shard(model, reshard_after_forward=reshard_after_forward)
    seen = []
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            squares(model)
        seen.append(shown(model.blocks[0]))
    model.state_dict()
    seen.append(shown(model.blocks[0]))
    return seen


def test_evaluation_and_state_dict_show_sharded_parameters() -> None:
    for reshard_after_forward in (True, None):
        assert cluster.run(2, after_evaluation, reshard_after_forward) == [[SHARDED] * 3] * 2
    # `False` keeps them whole, until somebody asks for the state.
    assert cluster.run(2, after_evaluation, False) == [[WHOLE, WHOLE, SHARDED]] * 2


def set_later() -> list[tuple[str, str]]:
    """set_reshard_after_forward and set_reshard_after_backward, recursive or not."""
    torch.manual_seed(0)
    model = Stack()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    seen = []

    def note() -> None:
        (root,) = {SHARDED if isinstance(p, DTensor) else WHOLE for p in model.parameters(recurse=False)}
        seen.append((shown(model.blocks[0]), root))

    model.set_reshard_after_forward(False)
    loss = squares(model)
    note()
    loss.backward()
    note()
    model.set_reshard_after_forward(True, recurse=False)
    loss = squares(model)
    note()
    loss.backward()
    model.set_reshard_after_forward(True)
    model.set_reshard_after_backward(False)
    squares(model).backward()
    note()
    squares(model).backward()
    model.set_reshard_after_backward(True)
    squares(model).backward()
    note()
    return seen


def test_setters() -> None:
    expected = [(WHOLE, WHOLE), (SHARDED, SHARDED), (WHOLE, SHARDED), (WHOLE, WHOLE), (SHARDED, SHARDED)]
    assert cluster.run(2, set_later) == [expected] * 2


def accumulation_without_resharding() -> tuple[float, float]:
    """Micro-batches that keep the parameters whole gather them once; the gradients are those of resharding ones."""
    from tests.fsdp.counting import Counted

    grads, gathers = [], []
    for keep in (False, True):
        torch.manual_seed(0)
        model = Stack()
        for block in model.blocks:
            fully_shard(block, reshard_after_forward=not keep)
        fully_shard(model, reshard_after_forward=not keep)
        with Counted() as counted:
            for micro in range(3):
                last = micro == 2
                model.set_requires_gradient_sync(last)
                model.set_reshard_after_backward(last or not keep)
                squares(model, micro).backward()
        gathers.append(counted.gathers(2))
        grads.append(torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()]))
    assert gathers == [24, 4], gathers
    return (grads[0] - grads[1]).abs().max().item(), grads[0].abs().max().item()


def test_accumulation_can_keep_parameters_whole() -> None:
    for difference, size in cluster.run(2, accumulation_without_resharding):
        assert difference == 0.0 and size > 0


def refused() -> str:
    model = fully_shard(nn.Linear(4, 4))
    try:
        model.set_reshard_after_forward(2)
    except ValueError as error:
        return str(error)
    return "no error"


def test_set_reshard_after_forward_takes_a_bool() -> None:
    assert "bool" in cluster.run(1, refused)[0]
