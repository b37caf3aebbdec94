"""Layouts keep matrices whole where that costs no padding."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from ragged_shard.bound import Kind
from ragged_shard.packing import Run
from ragged_shard.planner import BufferPlan, TensorSpec, drawn, plan_bucket, validate
from ragged_shard.whole import apart, keep_whole

# One block of a GPT of width 384.
LAYER = {
    "attention.qkv.weight": 1152 * 384,
    "attention.out.weight": 384 * 384,
    "mlp.up.weight": 1536 * 384,
    "mlp.down.weight": 384 * 1536,
    "attention.qkv.bias": 1152,
    "mlp.up.bias": 1536,
    **dict.fromkeys(
        ("attention.out.bias", "mlp.down.bias", "norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"), 384
    ),
}


def counted(starts: list[tuple[int, int]], shard: int) -> int:
    """Element by element: those that lie on another rank than most of their tensor, and 16384 elements, or all of it,
    for every rank beyond one.
    """
    total = 0
    for start, numel in starts:
        ranks = [element // shard for element in range(start, start + numel)]
        total += numel - max(map(ranks.count, set(ranks))) + (len(set(ranks)) - 1) * min(numel, 16384)
    return total


def apart_in(buffer: BufferPlan) -> int:
    total = 0
    for (_, start), numel in zip(buffer.starts, buffer.numels, strict=True):
        ends = [max(0, min(start + numel, cut + buffer.shard) - max(start, cut)) for cut in buffer.cuts[:-1]]
        total += numel - max(ends)
    return total


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[Kind], list[tuple[int, int, int]], int, int]:
    """Kinds, one after another in a drawn order, in shards that hold them all."""
    blocks = st.integers(1, 6)
    kinds = [
        Kind(numel, min(draw(blocks), numel), draw(st.integers(1, 4)))
        for numel in draw(st.lists(st.integers(1, 60), min_size=1, max_size=5, unique=True))
    ]
    world_size = draw(st.integers(1, 6))
    total = sum(kind.numel * kind.copies for kind in kinds)
    shard = -(-total // world_size) + draw(st.integers(0, 9))
    runs, at = [], 0
    for index in draw(st.permutations(range(len(kinds)))):
        runs.append((index, at, kinds[index].copies))
        at += kinds[index].numel * kinds[index].copies
    return kinds, runs, shard, world_size


def spread(kinds: list[Kind], runs: Sequence[Run]) -> list[tuple[int, int]]:
    return [(start + i * kinds[kind].numel, kinds[kind].numel) for kind, start, count in runs for i in range(count)]


@given(layouts())
def test_what_lies_apart_is_counted_and_never_becomes_more(
    case: tuple[list[Kind], list[tuple[int, int, int]], int, int],
) -> None:
    kinds, runs, shard, world_size = case
    before = apart(kinds, runs, shard)
    assert before == counted(spread(kinds, runs), shard)
    kept = keep_whole(kinds, runs, shard, world_size)
    places = sorted(spread(kinds, kept))
    assert counted(places, shard) <= before
    assert sorted(numel for _, numel in places) == sorted(numel for _, numel in spread(kinds, runs))
    ends = [start + numel for start, numel in places]
    assert (
        all(end <= start for end, (start, _) in zip(ends, places[1:], strict=False)) and ends[-1] <= shard * world_size
    )
    if kept is not runs:
        for kind, start, count in kept:
            numel, block, _ = kinds[kind]
            for at in range(start, start + count * numel, numel):
                inside = [cut for cut in range(shard, shard * world_size, shard) if at < cut < at + numel]
                assert all((cut - at) % block == 0 for cut in inside)


def test_half_of_what_muon_moved_stays() -> None:
    """Placed by size alone, 292,416 and 589,824 elements of a layer lay apart. On two ranks no layout has fewer now: no
    choice of whole matrices fills either of them. On four, two matrices are larger than a chunk; 3,840 elements more
    than what must lie apart keep every matrix from lying on three ranks.
    """
    specs = [TensorSpec(name, numel, 4, 1) for name, numel in LAYER.items()]
    for world_size, expected in ((2, 144_960), (4, 2 * (589_824 - 443_616) + 3840)):
        plan = plan_bucket(specs, world_size)
        validate(plan, specs)
        assert plan.padding == 0
        assert apart_in(plan.buffers[0]) == expected, "\n".join(drawn(plan.buffers[0]))
