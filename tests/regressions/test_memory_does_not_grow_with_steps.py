"""record_stream made memory depend on timing: more was reserved than needed, fragmentation grew until an out-of-memory
error (pytorch/pytorch#147168, pytorch/pytorch#135513, pytorch/torchtitan#735). Here it is a function of the schedule.
"""

from __future__ import annotations

import ast
from pathlib import Path

import torch

from tests import cluster
from tests.fsdp.modules import squares
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


def test_nothing_calls_record_stream() -> None:
    root = Path(__file__).resolve().parents[2]
    for file in [file for package in PACKAGES for file in (root / package).rglob("*.py")]:
        names = {node.attr for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)}
        assert "record_stream" not in names, file
