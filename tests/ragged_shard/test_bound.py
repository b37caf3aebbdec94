"""The lower bound, the facts behind it, and the O(1) earliest start, each against the definition."""

from __future__ import annotations

import math
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragged_shard.bound import Kind, lower_bound, packing_bound, problems, targets, threshold, tightest
from ragged_shard.packing import Budget, earliest, pack, pack_exactly
from ragged_shard.planner import TensorSpec
from tests.ragged_shard.exact_solver import may_start, smallest_shard

MORE = 40 if os.environ.get("HYPOTHESIS_PROFILE") == "deep" else 1
sizes = st.tuples(st.integers(1, 60), st.integers(1, 25)).map(lambda size: (size[0], min(size)))


@settings(max_examples=3000 * MORE)
@given(st.integers(0, 200), sizes, st.integers(1, 70))
def test_earliest_start_is_the_first_that_the_definition_allows(p: int, size: tuple[int, int], shard: int) -> None:
    numel, block = size
    # positions repeat every shard, so two shards further there is nothing new
    expected = next((s for s in range(p, p + 2 * shard + 1) if may_start(s, numel, block, shard)), -1)
    assert earliest(p, numel, block, shard) == expected


@settings(max_examples=500 * MORE)
@given(st.integers(0, 100), st.integers(0, 100), sizes, st.integers(1, 70))
def test_earliest_start_is_monotone(p: int, q: int, size: tuple[int, int], shard: int) -> None:
    first, second = (earliest(x, *size, shard) for x in sorted((p, q)))
    assert first <= second


@settings(max_examples=500 * MORE)
@given(sizes, st.integers(1, 70))
def test_threshold_is_where_one_boundary_inside_becomes_enough(size: tuple[int, int], shard: int) -> None:
    numel, block = size
    enough = [s for s in range(block, numel + block + 1) if s + block * (s // block) >= numel]
    assert threshold(numel, block) == enough[0]
    if shard % block and shard < threshold(numel, block):
        assert all(not may_start(start, numel, block, shard) for start in range(shard)), "so the block must divide it"


@settings(max_examples=1000 * MORE)
@given(st.lists(sizes, min_size=1, max_size=6), st.integers(1, 9), st.sampled_from([1, 2, 4, 8]))
def test_the_bound_is_never_above_the_optimum(tensors: list[tuple[int, int]], world_size: int, alignment: int) -> None:
    specs = [TensorSpec(str(i), numel, 1, block) for i, (numel, block) in enumerate(tensors)]
    optimum = smallest_shard(tensors, world_size, alignment)
    bound = lower_bound(specs, world_size, alignment_bytes=alignment)
    assert bound <= optimum
    assert bound % alignment == 0
    assert bound * world_size >= sum(numel for numel, _ in tensors)
    assert packing_bound([Kind(numel, block, 1) for numel, block in tensors], world_size) <= optimum


@settings(max_examples=500 * MORE)
@given(st.lists(st.tuples(sizes, st.integers(1, 30)), min_size=1, max_size=8), st.integers(1, 200))
def test_the_fast_bound_is_the_least_target(found: list[tuple[tuple[int, int], int]], world_size: int) -> None:
    kinds = tuple(sorted({Kind(*size, copies) for size, copies in found}))
    every = targets(kinds, world_size, 4)
    assert tightest(kinds, world_size, 4) == every[0]
    assert [t.shard for t in every] == sorted(t.shard for t in every)
    for target in every:
        assert target.step == math.lcm(4, *target.forced)
        assert target.shard % target.step == 0
        assert target.shard >= target.need


@settings(max_examples=500 * MORE)
@given(st.lists(sizes, min_size=1, max_size=5), st.integers(1, 6), st.integers(1, 70))
def test_packers_only_return_what_fits(tensors: list[tuple[int, int]], world_size: int, shard: int) -> None:
    kinds = [Kind(*size, tensors.count(size)) for size in sorted(set(tensors))]
    limit = world_size * shard
    found = pack_exactly(kinds, shard, limit, budget=Budget(10**6))
    for runs in (found, greedy(kinds, shard, limit, None), greedy(kinds, shard, limit, 0)):
        if runs is None:
            continue
        assert found is not None, "greedy found what the exact packing did not"
        end = 0
        placed = dict.fromkeys(range(len(kinds)), 0)
        for kind, start, copies in sorted(runs, key=lambda run: run[1]):
            for copy in range(copies):
                position = start + copy * kinds[kind].numel
                assert position >= end
                assert may_start(position, kinds[kind].numel, kinds[kind].block, shard)
                end = position + kinds[kind].numel
            placed[kind] += copies
        assert end <= limit
        assert [placed[i] for i in range(len(kinds))] == [k.copies for k in kinds]


def greedy(kinds: list[Kind], shard: int, limit: int, tolerance: int | None) -> list[tuple[int, int, int]] | None:
    if any(earliest(0, k.numel, k.block, shard) < 0 for k in kinds):
        return None
    return pack(kinds, shard, limit, tolerance=tolerance, fillers=range(len(kinds)), budget=Budget(10**6))


@pytest.mark.parametrize(
    ("tensors", "world_size", "why", "shard"),
    [
        ([(100, 1)], 3, "average", 34),  # a fair share
        ([(100, 60)], 2, "largest block", 60),
        ([(90, 30)], 2, "packing", 60),  # three blocks on two ranks
        ([(100, 7), (100, 10)], 10, "threshold", 51),  # cut once each, or 70 divides the shard
        ([(40, 9)] * 5, 7, "chain", 30),  # three of them on four ranks, two on the other three
    ],
)
def test_what_a_bound_rests_on(tensors: list[tuple[int, int]], world_size: int, why: str, shard: int) -> None:
    kinds = tuple(Kind(*size, tensors.count(size)) for size in sorted(set(tensors)))
    target = tightest(kinds, world_size, 1)
    assert (target.why, target.shard) == (why, shard)


def test_the_bound_does_not_ask_more_than_memory_of_a_rank() -> None:
    """A tensor of one element per rank, and one with no element at all."""
    assert lower_bound([TensorSpec("a", 4, 2), TensorSpec("b", 0, 2)], 4, alignment_bytes=2) == 1
    assert lower_bound([TensorSpec("b", 0, 2)], 4) == 0
    assert lower_bound([], 4) == 0


def test_itemsizes_are_bounded_apart() -> None:
    specs = [TensorSpec("a", 640, 2), TensorSpec("b", 640, 4)]
    assert lower_bound(specs, 5, alignment_bytes=128) == 128 + 128
    assert [(p.itemsize, p.alignment, p.start_alignment) for p in problems(specs)] == [(2, 64, 8), (4, 32, 4)]


@pytest.mark.parametrize(
    ("world_size", "alignment", "what"),
    [(0, 128, "world_size"), (4, 3, "alignment_bytes=3"), (4, 0, "alignment_bytes=0")],
)
def test_bad_arguments(world_size: int, alignment: int, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        lower_bound([TensorSpec("a", 4, 2)], world_size, alignment_bytes=alignment)
