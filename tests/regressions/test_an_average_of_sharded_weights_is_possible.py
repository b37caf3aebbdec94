"""A sharded model could not be deep-copied, and so not averaged (pytorch/pytorch#82070, pytorch/pytorch#149138,
hao-ai-lab/FastVideo#915, NCAR/miles-credit#414). Two ways are there: a copy, and the recipe of docs/fsdp.md.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fsdp import FSDPModule
from tests import cluster
from tests.fsdp.modules import Stack, data, squares
from tests.fsdp.reference import differences, full, step, twins

PAGE = Path(__file__).resolve().parents[2] / "docs/fsdp.md"


def averaged_model() -> list[str]:
    """torch.optim.swa_utils.AveragedModel, which deep-copies the model, on shards."""
    sharded, plain = twins(Stack)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=True) for m in (sharded, plain)]
    averages = [AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for m in (sharded, plain)]
    found = [] if isinstance(averages[0].module, FSDPModule) else ["class"]
    for number in range(3):
        found += step(sharded, plain, lambda m, n=number: squares(m, n), optimizers)
        for average, model in zip(averages, (sharded, plain), strict=True):
            average.update_parameters(model)
        with torch.no_grad():
            outputs = [average(data(9)) for average in averages]
        found += [f"step {number}: outputs"] * (not torch.allclose(*outputs, rtol=1e-6, atol=1e-7))
    ours, theirs = (dict(average.module.named_parameters()) for average in averages)
    return found + [n for n in ours if not torch.allclose(full(ours[n]), theirs[n], rtol=1e-6, atol=1e-7)]


def test_an_average_of_sharded_weights_is_possible_by_a_copy() -> None:
    assert cluster.run(2, averaged_model) == [[], []]


def recipe() -> list[str]:
    """What the page says: once, after each step, and to evaluate the average."""
    section = PAGE.read_text().split("## An average of the weights")[1]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found is not None
    pieces = found.group(1).split("\n\n")
    assert len(pieces) == 3, "the recipe has three parts, with an empty line between them"
    return pieces


def averaged_by_the_recipe() -> list[str]:
    once, after_each_step, to_evaluate = recipe()
    sharded, plain = twins(Stack)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=True) for m in (sharded, plain)]
    outputs: list[torch.Tensor] = []

    def evaluate(model: torch.nn.Module) -> None:
        with torch.no_grad():
            outputs.append(model(data(9)))

    names = [{"torch": torch, "model": m, "decay": 0.9, "evaluate": evaluate} for m in (sharded, plain)]
    for one in names:
        exec(once, one)
    reference = {n: p.detach().clone() for n, p in plain.named_parameters()}
    found = []
    for number in range(3):
        found += step(sharded, plain, lambda m, n=number: squares(m, n), optimizers)
        for one in names:
            exec(after_each_step, one)
            exec(to_evaluate, one)
        for name, parameter in plain.named_parameters():
            reference[name] = 0.9 * reference[name] + 0.1 * parameter.detach()
        # The weights of training are back.
        found += [f"step {number}: {d}" for d in differences(sharded, plain)]
        if not torch.equal(*outputs[-2:]):
            found.append(f"step {number}: the averaged model computes something else")
        averages = names[0]["average"]
        found += [
            f"step {number}: {n}"
            for n, value in reference.items()
            if not torch.allclose(full(averages[n]), value, rtol=1e-5, atol=1e-7)
        ]
    return found


def test_an_average_of_sharded_weights_is_possible_by_the_recipe_of_the_page() -> None:
    assert cluster.run(2, averaged_by_the_recipe) == [[], []]
