"""A forward under inference_mode, then training, raised "Inplace update to inference tensor outside InferenceMode"
(pytorch/pytorch#113203).
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests import cluster
from tests.fsdp.modules import Stack, data, squares
from tests.fsdp.reference import average_gradients, differences, shard_children, twins


def evaluated(mode: str, when: str, reshard_after_forward: bool | None) -> list[str]:
    """Evaluation before the first step, between steps, and between forward and backward."""
    sharded, plain = twins(Stack, partial(shard_children, reshard_after_forward=reshard_after_forward))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=True) for m in (sharded, plain)]
    context = torch.inference_mode if mode == "inference_mode" else torch.no_grad
    found: list[str] = []

    def evaluate() -> None:
        outputs = []
        for model in (sharded, plain):
            model.eval()
            with context():
                outputs.append(model(data(77)))
            model.train()
        if not torch.equal(*outputs):
            found.append("evaluation differs")

    if when == "first":
        evaluate()
    for number in range(3):
        if when == "before each step":
            evaluate()
        losses = []
        for model in (sharded, plain):
            loss = squares(model, number)
            losses.append(loss)
        if when == "between forward and backward":
            evaluate()
        for loss in losses:
            loss.backward()
        average_gradients(plain)
        found += [f"step {number}: {d}" for d in differences(sharded, plain)]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    evaluate()
    return found


@pytest.mark.parametrize("when", ["first", "before each step", "between forward and backward"])
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_evaluation_does_not_break_training(mode: str, when: str) -> None:
    for reshard_after_forward in (None, False):
        assert cluster.run(2, evaluated, mode, when, reshard_after_forward) == [[], []]
