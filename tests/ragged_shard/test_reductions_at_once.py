"""Several reductions on their way at once, waited for in another order, and a message of somebody else's meanwhile."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ragged_shard.collectives import reduce_scatter_in_place, reduce_scatter_scratch_numel
from tests import cluster

CHUNK = 5 * 64 + 7


def addends(rank: int, which: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * which + rank)
    return torch.randint(-20, 21, (CHUNK * size,), generator=generator).float()


def two_at_once(own: bool, accumulate: bool) -> list[str]:
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    mine = slice(rank * CHUNK, (rank + 1) * CHUNK)
    fulls = [addends(rank, which, size) for which in range(2)]
    outs = [full[mine] if own else torch.full((CHUNK,), 3.0) for full in fulls]
    scratch = torch.full((reduce_scatter_scratch_numel(fulls[0], group),), float("nan"))
    found = []
    if scratch.numel() != CHUNK * (size - 1):
        found.append(f"{scratch.numel()} elements of scratch")
    pending = [
        reduce_scatter_in_place(full, out, group, scratch=place, divide_by=2.0, accumulate=accumulate)
        for full, out, place in zip(fulls, outs, (scratch, None), strict=True)
    ]
    # A message of somebody else's on the same group, meanwhile.
    other = torch.zeros(3)
    works = [
        dist.irecv(other, group_src=(rank - 1) % size),
        dist.isend(torch.full((3,), float(rank)), group_dst=(rank + 1) % size),
    ]
    for one in reversed(pending):
        one.wait()
    for work in works:
        work.wait()
    for which, out in enumerate(outs):
        expected = sum(addends(r, which, size) for r in range(size))[mine] / 2.0 + (3.0 if accumulate else 0.0)
        if not torch.equal(out, expected):
            found.append(f"reduction {which}: {(out != expected).sum().item()} of {CHUNK} elements are wrong")
    if other.tolist() != [(rank - 1) % size] * 3:
        found.append(f"the other message brought {other.tolist()}")
    return found


@pytest.mark.parametrize(("own", "accumulate"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("world_size", [2, 3])
def test_two_reductions_at_once(world_size: int, own: bool, accumulate: bool) -> None:
    assert cluster.run(world_size, two_at_once, own, accumulate) == [[]] * world_size
