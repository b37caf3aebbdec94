"""Which rank computes which matrix: deterministic, minimising what the slowest rank has to do.

A rank's load is the FLOPs of the matrices it owns plus, for those that move, the bytes it receives and sends back,
priced in FLOPs. Matrices that lie whole on a rank stay there and count only their FLOPs. Longest first onto the least
loaded rank, then single moves and swaps while they lower the slowest rank: for equal pieces that is within a few per
cent of the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["FLOPS_PER_BYTE", "Job", "assign", "loads"]

# A byte moved over a link costs about as much as this many FLOPs of a matrix product (bf16 on a CPU core against
# loopback TCP: 463 GFLOP/s and about 1 GB/s; an H100 over 50 GB/s: 800 TFLOP/s, some 10^4).
FLOPS_PER_BYTE = 500.0


@dataclass(frozen=True)
class Job:
    """One matrix: ``flops`` at its owner; ``held[k]``: bytes of it that lie on rank k. ``name`` breaks ties."""

    name: str
    flops: float
    held: tuple[int, ...]

    @property
    def local(self) -> int | None:
        """The rank on which the matrix lies whole, if there is one."""
        total = sum(self.held)
        for rank, held in enumerate(self.held):
            if held == total:
                return rank
        return None

    def load(self, rank: int) -> float:
        """What owning this matrix costs ``rank``."""
        return self.flops + 2.0 * FLOPS_PER_BYTE * (sum(self.held) - self.held[rank])


def loads(jobs: Sequence[Job], owners: Sequence[int], world_size: int) -> list[float]:
    """The load of every rank."""
    result = [0.0] * world_size
    for job, owner in zip(jobs, owners, strict=True):
        result[owner] += job.load(owner)
    return result


def assign(jobs: Sequence[Job], world_size: int, fixed: Sequence[int | None] | None = None) -> list[int]:
    """The owner of every job, in the order of ``jobs``; the same for every order of the same jobs.

    ``fixed[i]``: an owner that is already settled (its state lies there). A local job is owned where it lies.
    """
    settled = [job.local if fix is None else fix for job, fix in zip(jobs, fixed or [None] * len(jobs), strict=True)]
    owners = [-1 if owner is None else owner for owner in settled]
    # By name from here on: sums and ties must not depend on the order in which jobs were given.
    order = sorted(range(len(jobs)), key=lambda i: jobs[i].name)
    load = [0.0] * world_size
    for i in order:
        if owners[i] >= 0:
            load[owners[i]] += jobs[i].load(owners[i])
    movable = sorted((i for i in order if owners[i] < 0), key=lambda i: -jobs[i].flops)
    for i in movable:
        owners[i] = min(
            range(world_size), key=lambda rank: (load[rank] + jobs[i].load(rank), -jobs[i].held[rank], rank)
        )
        load[owners[i]] += jobs[i].load(owners[i])
    _improve(jobs, owners, load, movable)
    return owners


def _improve(jobs: Sequence[Job], owners: list[int], load: list[float], movable: Sequence[int]) -> None:
    """Moves and swaps that lower the load of the slowest rank, the best first, until there are none."""
    if len(load) < 2:
        return
    for _ in range(4 * len(movable)):
        slowest = max(range(len(load)), key=lambda rank: (load[rank], -rank))
        best = (load[slowest] * (1 - 1e-9), -1, -1, -1)  # (slowest load after, move this, swap it for that, with rank)
        for this, i in enumerate(movable):
            if owners[i] != slowest:
                continue
            without = load[slowest] - jobs[i].load(slowest)
            for rank in range(len(load)):
                if rank != slowest:
                    best = min(best, (max(without, load[rank] + jobs[i].load(rank)), this, -1, rank))
            # A swap is worth a look only while there are few: it is quadratic.
            for that, j in enumerate(movable) if len(movable) <= 256 else ():
                rank = owners[j]
                if rank != slowest:
                    here = without + jobs[j].load(slowest)
                    there = load[rank] - jobs[j].load(rank) + jobs[i].load(rank)
                    best = min(best, (max(here, there), this, that, rank))
        _, this, that, rank = best
        if this < 0:
            return
        for number, source, target in ((this, slowest, rank), (that, rank, slowest)):
            if number >= 0:
                job = jobs[movable[number]]
                load[source] -= job.load(source)
                load[target] += job.load(target)
                owners[movable[number]] = target
