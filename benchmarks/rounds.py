"""Rounds: every variant runs one step in each, in a shuffled order, after a barrier. Runs on every rank at once."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Clock", "Round", "run_rounds"]


@dataclass
class Clock:
    """CPU and wall seconds of one step on one rank, cut into named laps. CPU seconds are those of all its threads."""

    cpu: dict[str, float] = field(default_factory=dict)
    wall: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def lap(self, name: str) -> None:
        """End a lap that began at the previous one (or at the start)."""
        cpu, wall = time.process_time(), time.perf_counter()
        self.cpu[name] = self.cpu.get(name, 0.0) + cpu - self._cpu
        self.wall[name] = self.wall.get(name, 0.0) + wall - self._wall
        self._cpu, self._wall = cpu, wall


@dataclass(frozen=True)
class Round:
    """``cpu[variant]``: seconds summed over ranks and laps; ``wall[variant]``: the slowest rank's.

    ``laps[variant][lap]``: (CPU seconds summed over ranks, wall seconds of the slowest rank).
    """

    order: tuple[str, ...]
    cpu: dict[str, float]
    wall: dict[str, float]
    laps: dict[str, dict[str, tuple[float, float]]]


def run_rounds(
    steps: Mapping[str, Callable[[Clock], Any]],
    *,
    rounds: int,
    seconds: float,
    seed: int = 0,
    report: Callable[[Round], None] | None = None,
) -> list[Round]:
    """At most ``rounds`` rounds, and none begun after ``seconds`` (at least one round is run if ``rounds`` > 0).

    Every rank gets the same list. ``report`` is called with each round as it ends. Build and warm up first.
    """
    shuffle = random.Random(seed)
    begin = time.monotonic()
    done: list[Round] = []
    while len(done) < rounds:
        order = list(steps)
        shuffle.shuffle(order)
        mine: dict[str, tuple[dict[str, float], dict[str, float]]] = {}
        for name in order:
            dist.barrier()
            clock = Clock()
            steps[name](clock)
            mine[name] = (clock.cpu, clock.wall)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        done.append(_combine(tuple(order), everyone))
        if report is not None:
            report(done[-1])
        late = torch.tensor([time.monotonic() - begin > seconds], dtype=torch.int32)
        dist.broadcast(late, 0)
        if late.item():
            break
    return done


def _combine(order: tuple[str, ...], everyone: list[dict[str, tuple[dict[str, float], dict[str, float]]]]) -> Round:
    cpu, wall, laps = {}, {}, {}
    for name in sorted(order):
        ranks = [mine[name] for mine in everyone]
        cpu[name] = sum(sum(seconds.values()) for seconds, _ in ranks)
        wall[name] = max(sum(seconds.values()) for _, seconds in ranks)
        laps[name] = {lap: (sum(c[lap] for c, _ in ranks), max(w[lap] for _, w in ranks)) for lap in ranks[0][0]}
    return Round(order, cpu, wall, laps)
