"""The collectives in place, against sums and concatenations on one process; exact, since integers have no order."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ragged_shard import collectives
from ragged_shard.collectives import (
    all_gather_in_place,
    all_gather_v,
    all_reduce_small,
    all_to_all_v,
    exchange,
    reduce_scatter_in_place,
    reduce_scatter_scratch_numel,
)
from tests import cluster
from tests.fsdp.counting import Counted

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def group() -> Any:
    return dist.group.WORLD


def addends(rank: int, n: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-20, 21, (n * size,), generator=generator).to(dtype)


def gather(n: int, dtype: torch.dtype) -> tuple[bool, bool]:
    rank, size = dist.get_rank(), dist.get_world_size()
    full = torch.full((n * size,), -1).to(dtype)
    full[rank * n : (rank + 1) * n] = rank + 1
    address = full.data_ptr()
    pending = all_gather_in_place(full, group())
    pending.wait()
    pending.wait()
    expected = torch.arange(1, size + 1).repeat_interleave(n).to(dtype)
    return torch.equal(full, expected), full.data_ptr() == address


@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint8, torch.int64])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_gather_in_place(world_size: int, dtype: torch.dtype) -> None:
    for n in (0, 1, 37):
        assert cluster.run(world_size, gather, n, dtype) == [(True, True)] * world_size


def reduce(
    n: int, dtype: torch.dtype, out_dtype: torch.dtype, divide_by: float, accumulate: bool, own: bool, given: bool
) -> list[str]:
    rank, size = dist.get_rank(), dist.get_world_size()
    full = addends(rank, n, size, dtype)
    out = full[rank * n : (rank + 1) * n] if own else torch.full((n,), 3.0, dtype=out_dtype)
    scratch_numel = reduce_scatter_scratch_numel(full, group())
    scratch = torch.empty(scratch_numel, dtype=dtype) if given else None
    before = out.double().clone() if accumulate else torch.zeros(n, dtype=torch.float64)
    pending = reduce_scatter_in_place(full, out, group(), scratch=scratch, divide_by=divide_by, accumulate=accumulate)
    pending.wait()
    pending.wait()
    total = sum(addends(r, n, size, dtype).double() for r in range(size))[rank * n : (rank + 1) * n]
    expected = (before + total / divide_by).to(out.dtype)
    found = [] if torch.equal(out, expected) else [f"{out.tolist()} is not {expected.tolist()}"]
    theirs = torch.ones(n * size, dtype=torch.bool)
    theirs[rank * n : (rank + 1) * n] = False
    if not torch.equal(full[theirs], addends(rank, n, size, dtype)[theirs]):
        found.append("chunks of others have changed")
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(("accumulate", "own"), [(False, False), (True, False), (False, True)])
def test_reduce_scatter_in_place(world_size: int, accumulate: bool, own: bool) -> None:
    for given in (False, True):
        for n, divide_by in ((0, 1.0), (5, 1.0), (33, 4.0)):
            case = partial(reduce, n, torch.float32, torch.float32, divide_by, accumulate, own, given)
            assert cluster.run(world_size, case) == [[]] * world_size


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", DTYPES)
def test_reduce_scatter_between_dtypes(dtype: torch.dtype, out_dtype: torch.dtype, accumulate: bool) -> None:
    """Small integers are exact in every one of them."""
    assert cluster.run(3, reduce, 7, dtype, out_dtype, 2.0, accumulate, False, True) == [[]] * 3


def rounding(dtype: torch.dtype, out_dtype: torch.dtype) -> list[float]:
    """1 + many small numbers that a narrow running sum loses."""
    rank, size = dist.get_rank(), dist.get_world_size()
    small = torch.finfo(dtype).eps / 4
    full = torch.full((size * 2,), 1.0 if rank == 0 else small, dtype=dtype)
    out = torch.zeros(2, dtype=out_dtype)
    reduce_scatter_in_place(full, out, group()).wait()
    return (out.double() - 1).div(small).tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_addends_are_summed_in_fp32(dtype: torch.dtype) -> None:
    """Rounded once at the end: four quarter-ulps that a narrow running sum would lose one by one."""
    for result in cluster.run(4, rounding, dtype, torch.float32):
        assert result == [3.0, 3.0]
    for result in cluster.run(4, rounding, dtype, dtype):
        assert result == [4.0, 4.0]


def several_in_flight() -> bool:
    """Two gathers and two reductions at once, waited for in another order than issued, alike on all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    fulls = [torch.full((size * 4,), -1.0) for _ in range(2)]
    for index, full in enumerate(fulls):
        full[rank * 4 : (rank + 1) * 4] = 10 * index + rank
    grads = [addends(rank, 3, size) * (index + 1) for index in range(2)]
    outs = [torch.empty(3) for _ in range(2)]
    pending = [
        all_gather_in_place(fulls[0], group()),
        reduce_scatter_in_place(grads[0], outs[0], group()),
        all_gather_in_place(fulls[1], group()),
        reduce_scatter_in_place(grads[1], outs[1], group()),
    ]
    for index in (3, 0, 2, 1):
        pending[index].wait()
    total = sum(addends(r, 3, size) for r in range(size))[rank * 3 : (rank + 1) * 3]
    fine = all(torch.equal(out, total * (index + 1)) for index, out in enumerate(outs))
    for index, full in enumerate(fulls):
        fine &= torch.equal(full, torch.arange(size).repeat_interleave(4) + 10.0 * index)
    return fine


@pytest.mark.parametrize("world_size", [2, 3])
def test_several_in_flight(world_size: int) -> None:
    assert cluster.run(world_size, several_in_flight) == [True] * world_size


def traffic(n: int) -> tuple[int, int, int]:
    """Copies of a gather and a reduction with scratch, and the bytes sent by the reduction."""
    size = dist.get_world_size()
    full, out = torch.zeros(n * size), torch.zeros(n)
    scratch = torch.empty(reduce_scatter_scratch_numel(full, group()))
    with Counted() as gathered:
        all_gather_in_place(full, group()).wait()
    with Counted() as reduced:
        reduce_scatter_in_place(full, out, group(), scratch=scratch, divide_by=float(size)).wait()
    sent = sum(size for name, size in reduced.collectives if name.startswith("alltoall"))
    return gathered.copied_bytes, reduced.copied_bytes, sent


@pytest.mark.parametrize("world_size", [2, 4])
def test_nothing_is_copied_and_only_foreign_chunks_are_sent(world_size: int) -> None:
    n = 64
    for result in cluster.run(world_size, traffic, n):
        assert result == (0, 0, (world_size - 1) * n * 4)


# ---- unequal pieces ----


def pieces(lengths: list[int], dtype: torch.dtype) -> bool:
    rank = dist.get_rank()
    expected = [(torch.arange(n) + r).to(dtype) for r, n in enumerate(lengths)]
    parts = [torch.full((n,), -1).to(dtype) for n in lengths]
    parts[rank].copy_(expected[rank])
    all_gather_v(parts, group()).wait()
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(parts, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.int16])
def test_all_gather_v(dtype: torch.dtype) -> None:
    """gloo knows no fp8, int16 and so on: they travel as bytes."""
    for lengths in ([3, 0, 5], [0, 0, 1], [2, 2, 2], [0, 0, 0]):
        assert cluster.run(3, pieces, lengths, dtype) == [True] * 3


def to_all(table: list[list[int]], dtype: torch.dtype) -> bool:
    """``table[source][target]`` elements go from source to target."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sent = table[rank]
    received = [table[source][rank] for source in range(size)]
    flat = torch.cat([torch.full((n,), 10 * rank + target) for target, n in enumerate(sent)]).to(dtype)
    got = all_to_all_v(flat, sent, received, group())
    expected = torch.cat([torch.full((n,), 10 * source + rank) for source, n in enumerate(received)]).to(dtype)
    return got.dtype == dtype and torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16])
def test_all_to_all_v(dtype: torch.dtype) -> None:
    for table in ([[1, 2, 3], [0, 4, 0], [5, 0, 1]], [[0, 0, 0], [0, 0, 7], [0, 0, 0]]):
        assert cluster.run(3, to_all, table, dtype) == [True] * 3


def exchanged(table: list[list[int]]) -> bool:
    """Messages around, several to the same peer in order, and ranks with nothing to do."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sends = [
        (t, torch.full((n,), 10.0 * rank + i)) for t in range(size) for i, n in enumerate(table[rank]) if t != rank
    ]
    receives = [(s, torch.full((n,), -1.0)) for s in range(size) for i, n in enumerate(table[s]) if s != rank]
    exchange(sends, receives, group()).wait()
    expected = [10.0 * s + i for s in range(size) for i, _ in enumerate(table[s]) if s != rank]
    return all(torch.equal(place, torch.full_like(place, e)) for (_, place), e in zip(receives, expected, strict=True))


def test_exchange() -> None:
    assert cluster.run(3, exchanged, [[2, 5], [1], []]) == [True] * 3
    assert cluster.run(3, exchanged, [[], [], []]) == [True] * 3
    assert cluster.run(2, exchanged, [[3, 1, 4], [1, 5]]) == [True] * 2


def small(rows: list[list[int]], dtype: torch.dtype) -> list[list[int]]:
    found = []
    for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX):
        mine = torch.tensor(rows[dist.get_rank()], dtype=dtype)
        all_reduce_small(mine, op, group())
        found.append(mine.tolist())
    return found


@pytest.mark.parametrize("size_of_a_mesh", [0, 8])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_all_reduce_small(size_of_a_mesh: int, dtype: torch.dtype) -> None:
    for rows in ([[3]], [[1, 0, 5], [0, 9, 5]], [[7, 1], [2, 2], [5, 0], [9, 9]], [[], []]):
        expected = [[*map(min, zip(*rows, strict=True))], [*map(max, zip(*rows, strict=True))]]
        found = cluster.run(len(rows), with_mesh_size, size_of_a_mesh, small, rows, dtype)
        assert found == [expected] * len(rows)


def with_mesh_size(size: int, function: Any, *args: Any) -> Any:
    before, collectives._MESH_SIZE = collectives._MESH_SIZE, size
    try:
        return function(*args)
    finally:
        collectives._MESH_SIZE = before


def through_a_subgroup() -> list[float]:
    """Group ranks, not global ones."""
    world = cluster.mesh((2, 2), ("a", "b"))
    found = []
    for name in ("a", "b"):
        sub = world.get_group(name)
        full = torch.zeros(2)
        full[sub.rank()] = dist.get_rank() + 1
        all_gather_in_place(full, sub).wait()
        out = torch.zeros(1)
        reduce_scatter_in_place(full.clone(), out, sub).wait()
        found += [*full.tolist(), out.item()]
    return found


def test_subgroups() -> None:
    assert cluster.run(4, through_a_subgroup) == [
        [1, 3, 2, 1, 2, 2],
        [2, 4, 4, 1, 2, 4],
        [1, 3, 6, 3, 4, 6],
        [2, 4, 8, 3, 4, 8],
    ]
