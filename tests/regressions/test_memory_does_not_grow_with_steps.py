"""record_stream made memory depend on timing: more was reserved than needed, fragmentation grew until an out-of-memory
error (pytorch/pytorch#147168, pytorch/pytorch#135513, pytorch/torchtitan#735). Here it is a function of the schedule.
"""

from __future__ import annotations

import ast
from pathlib import Path

import torch
from torch import Tensor, nn

from tests import cluster
from tests.fsdp.modules import WIDTH, Mlp, data, squares
from tests.fsdp.reference import twins
from tests.fsdp.test_memory import pool_of, stack

PACKAGES = ("fsdp", "ragged_shard")


def events() -> list[list[tuple[str, str, str, int]]]:
    """Of each step: every block of memory that was taken and given back, by whom and how large."""
    model = stack(reshard_after_forward=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    pool, steps = None, []
    for number in range(5):
        if pool is not None:
            pool.timeline = []
        squares(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()
        pool = pool_of(model)
        if pool.timeline is not None:
            steps.append([(e.action, e.label, e.owner, e.nbytes) for e in pool.timeline])
    return steps


def test_memory_does_not_grow_with_steps() -> None:
    """Byte for byte the same in every step, on every rank."""
    ranks = cluster.run(2, events)
    steps = [step for rank in ranks for step in rank]
    assert len(steps) == 8 and all(step == steps[0] for step in steps)
    assert any(action == "acquire" for action, *_ in steps[0])


class Positions(nn.Module):
    """A parameter of the root goes into every block, and one hands it through."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(WIDTH))
        self.blocks = nn.ModuleList(AddThenMlp() for _ in range(2))
        self.shift = Shift()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.position)
        return x + self.shift(self.position)


class AddThenMlp(Mlp):
    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return super().forward(x + other)


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.randn(WIDTH))

    def forward(self, other: Tensor) -> Tensor:
        return other


def hooks_on_leaves() -> list[int]:
    """After each step: hooks on leaves that live on, a soft prompt and a parameter that modules take and return."""
    sharded, plain = twins(Positions)
    prompt = data().requires_grad_()
    counts = []
    for number in range(5):
        for model in (sharded, plain):
            model((prompt + 0) if number == 1 else prompt).square().mean().backward()
            if model is sharded and number == 2:
                # A backward that the graph outlives, and a forward that none follows.
                model(prompt).sum().backward(retain_graph=True)
                model(prompt)
        sharded.unshard()
        counts.append(sum(len(leaf._backward_hooks or ()) for leaf in (prompt, sharded.position)))
        sharded.reshard()
    return counts


def test_hooks_do_not_pile_up_on_inputs_that_live_on() -> None:
    for counts in cluster.run(2, hooks_on_leaves):
        assert counts[-1] <= counts[0] + 4


def test_nothing_calls_record_stream() -> None:
    root = Path(__file__).resolve().parents[2]
    for file in [file for package in PACKAGES for file in (root / package).rglob("*.py")]:
        names = {node.attr for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)}
        assert "record_stream" not in names, file
