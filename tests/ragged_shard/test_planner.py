"""The data types of a plan: invariants, formulas on hand-made layouts (ragged ones too), errors, text."""

from __future__ import annotations

import json
import pickle
import random
import subprocess
import sys
from dataclasses import replace

import pytest

from ragged_shard.planner import BucketPlan, BufferPlan, TensorSpec, plan_bucket, validate

# Two tensors over three ranks whose chunks have 8 elements: a: [0, 12) in blocks of 4, b: [12, 21) in blocks of 3.
#   chunks  |0      8|8     16|16    24|
#   cuts     0       8     15        24      rank 1 owns [8, 15), one element less than its chunk
RAGGED = BufferPlan(2, 8, (("a", 0), ("b", 12)), (12, 9), (0, 8, 15, 24), (4, 3))
SPECS = [TensorSpec("a", 12, 2, 4), TensorSpec("b", 9, 2, 3)]


def plan_of(*buffers: BufferPlan) -> BucketPlan:
    shard = sum(b.shard for b in buffers)
    numel, padding = sum(sum(b.numels) for b in buffers), sum(b.padding for b in buffers)
    return BucketPlan(buffers[0].world_size, buffers, numel, padding, shard, True)


def test_chunk_and_owned_are_two_things() -> None:
    assert RAGGED.world_size == 3
    assert RAGGED.numel == 24
    assert [RAGGED.chunk(rank) for rank in range(3)] == [(0, 8), (8, 16), (16, 24)]
    assert [RAGGED.owned(rank) for rank in range(3)] == [(0, 8), (8, 15), (15, 24)]
    assert [RAGGED.edges(rank) for rank in range(3)] == [(), (), ((1, 15, 16),)]
    assert not RAGGED.is_padded
    assert RAGGED.units("a") == (2, 1, 0)
    assert RAGGED.units("b") == (0, 1, 2)
    assert [RAGGED.local_range("a", rank) for rank in range(3)] == [(0, 8), (8, 12), (15, 15)]
    assert [RAGGED.local_range("b", rank) for rank in range(3)] == [(8, 8), (12, 15), (15, 21)]
    assert RAGGED.held == (8, 7, 6)
    assert RAGGED.padding == 3
    assert [RAGGED.owner(position) for position in (0, 7, 8, 14, 15, 23)] == [0, 0, 1, 1, 2, 2]
    assert RAGGED.block("b") == 3
    validate(plan_of(RAGGED), SPECS, alignment_bytes=16)


def test_a_rank_that_owns_nothing_and_a_block_larger_than_a_chunk() -> None:
    buffer = BufferPlan(4, 4, (("w", 0), ("v", 10)), (10, 2), (0, 10, 10, 12), (10, 1))
    assert buffer.edges(0) == ((1, 4, 8), (2, 8, 10))
    assert buffer.edges(1) == ()
    assert buffer.edges(2) == ()
    assert buffer.units("w") == (1, 0, 0)
    assert buffer.units("v") == (0, 0, 1)
    assert buffer.local_range("w", 1) == (10, 10)
    assert plan_of(buffer).imbalance == pytest.approx(10 * 3 / 12 - 1)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"cuts": (0, 8, 14, 24)}, "the cut at 14 splits a block of 3 elements"),
        ({"cuts": (0, 15, 8, 24)}, "cuts must rise"),
        ({"cuts": (0, 8, 15, 23)}, "cuts must rise from 0 to the end of the buffer, 24"),
        ({"cuts": (1, 8, 15, 24)}, "cuts must rise"),
        ({"cuts": (0, 18, 21, 24)}, "rank 1 owns .18, 21., which does not meet its chunk"),
        ({"starts": (("a", 0), ("b", 11))}, "'b'.*begins before 12"),
        ({"starts": (("a", 0), ("a", 12))}, "same name"),
        ({"starts": (("a", 0), ("b", 16))}, "the tensors end at 25, the buffer at 24"),
        ({"numels": (12,)}, "one entry for each tensor"),
        ({"blocks": (4, 0)}, "in blocks of 0"),
        ({"itemsize": 0}, "itemsize"),
    ],
)
def test_a_buffer_refuses_what_breaks_an_invariant(change: dict[str, object], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        replace(RAGGED, **change)


def test_a_padded_buffer_is_checked_too() -> None:
    starts = (("a", 0),)
    assert BufferPlan(2, 8, starts, (24,), (0, 8, 16, 24), (4,)).is_padded
    with pytest.raises(ValueError, match="the cut at 8 splits a block of 6"):
        BufferPlan(2, 8, starts, (24,), (0, 8, 16, 24), (6,))
    with pytest.raises(ValueError, match="the cut at 16 splits a block of 4"):
        BufferPlan(2, 8, (("a", 2),), (20,), (0, 10, 16, 24), (4,))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"numel": 20}, "numel and padding are 21 and 3, not 20 and 3"),
        ({"padding": 4}, "not 21 and 4"),
        ({"lower_bound": 9}, "contradicts a bound of 9 for 8"),
        ({"optimal": False}, "optimal=False contradicts"),
        ({"world_size": 2}, "every buffer of a plan for 2 ranks needs 3 cuts"),
        ({"buffers": (RAGGED, RAGGED)}, "a tensor is in two buffers"),
    ],
)
def test_a_bucket_plan_refuses_what_does_not_add_up(change: dict[str, object], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        replace(plan_of(RAGGED), **change)


def test_json_digest_pickle() -> None:
    plans = [
        plan_of(RAGGED),
        plan_bucket(SPECS, 3, alignment_bytes=16),
        plan_bucket([TensorSpec("x", 0, 4)], 2),
        plan_bucket([], 5),
    ]
    for plan in plans:
        assert BucketPlan.from_json(plan.to_json()) == plan
        assert pickle.loads(pickle.dumps(plan)) == plan
        assert BucketPlan.from_json(plan.to_json()).digest() == plan.digest()
        assert len(plan.digest()) == 64
    assert len({plan.digest() for plan in plans}) == len(plans)


@pytest.mark.parametrize(
    "change",
    [
        {"shard": 9, "cuts": (0, 8, 15, 27)},
        {"starts": (("a", 0), ("c", 12))},
        {"starts": (("b", 0), ("a", 12)), "numels": (9, 12), "blocks": (3, 4), "cuts": (0, 9, 16, 24)},
        {"itemsize": 4},
        {"cuts": (0, 8, 18, 24)},
        {"blocks": (2, 3)},
        {"numels": (12, 8), "cuts": (0, 8, 15, 24)},
    ],
)
def test_the_digest_tells_layouts_apart(change: dict[str, object]) -> None:
    assert plan_of(replace(RAGGED, **change)).digest() != plan_of(RAGGED).digest()


def test_the_digest_is_the_same_on_every_machine() -> None:
    """A change here means that old and new ranks refuse to work together: do it on purpose."""
    assert plan_bucket(SPECS, 3, alignment_bytes=16).digest().startswith("d08e0e84fb20")


@pytest.mark.parametrize("text", ["", "{}", "[]", "3", '{"version": 2}', '{"version": 1, "world_size": 2}'])
def test_json_that_is_no_plan(text: str) -> None:
    with pytest.raises(ValueError):
        BucketPlan.from_json(text)


def test_json_that_was_tampered_with() -> None:
    data = json.loads(plan_bucket(SPECS, 3, alignment_bytes=16).to_json())
    data["buffers"][0]["tensors"][1][1] = 1
    with pytest.raises(ValueError, match="begins before"):
        BucketPlan.from_json(json.dumps(data))


def test_validate_names_the_culprit() -> None:
    plan = plan_bucket(SPECS, 3, alignment_bytes=16)
    validate(plan, SPECS, alignment_bytes=16)
    with pytest.raises(ValueError, match="not in the plan: c"):
        validate(plan, [*SPECS, TensorSpec("c", 1, 2)], alignment_bytes=16)
    with pytest.raises(ValueError, match="'b' is not in the bucket"):
        validate(plan, SPECS[:1], alignment_bytes=16)
    with pytest.raises(ValueError, match="not aligned to 512"):
        validate(plan, SPECS, alignment_bytes=512)
    with pytest.raises(ValueError, match="lies there as 12 elements"):
        validate(plan, [TensorSpec("a", 12, 2, 6), SPECS[1]], alignment_bytes=16)
    # a plan that claims smaller blocks than the bucket has
    lying = plan_of(BufferPlan(2, 8, (("a", 0), ("b", 12)), (12, 9), (0, 8, 16, 24), (1, 1)))
    with pytest.raises(ValueError, match=r"'a'|'b'"):
        validate(lying, SPECS, alignment_bytes=16)


@pytest.mark.parametrize(
    ("numel", "itemsize", "block", "what"),
    [
        (-1, 2, 1, "numel must be at least 0"),
        (4, 0, 1, "itemsize"),
        (4, 2, 0, "block must be at least 1"),
        (4, 2, -3, "-3"),
    ],
)
def test_a_tensor_that_cannot_be(numel: int, itemsize: int, block: int, what: str) -> None:
    with pytest.raises(ValueError, match=f"tensor 'w': .*{what}|{what}"):
        TensorSpec("w", numel, itemsize, block)


def test_a_tensor_of_the_wrong_type() -> None:
    with pytest.raises(TypeError, match="name of a tensor"):
        TensorSpec(3, 10, 2)  # type: ignore[arg-type]  # the wrong type is the case
    with pytest.raises(TypeError, match="tensor 'w': numel must be an integer"):
        TensorSpec("w", 4.0, 2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="block must be an integer"):
        TensorSpec("w", 4, 2, True)


def test_a_block_larger_than_its_tensor_means_the_whole_tensor() -> None:
    assert TensorSpec("w", 10, 2, 99) == TensorSpec("w", 10, 2, 10)
    assert TensorSpec("w", 0, 2, 99).block == 1


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"world_size": 0}, "world_size"),
        ({"world_size": -2}, "world_size"),
        ({"world_size": 2.0}, "world_size"),
        ({"alignment_bytes": 0}, "alignment_bytes=0 is no positive multiple"),
        ({"alignment_bytes": 127}, "alignment_bytes=127 is no positive multiple of the element size, 2 bytes"),
        ({"max_buffers": 0}, "max_buffers"),
        ({"min_saving": -0.1}, "min_saving"),
        ({"min_saving": float("nan")}, "min_saving"),
        ({"method": "best"}, "method must be 'ours' or 'paper', got 'best'"),
    ],
)
def test_parameters_out_of_range(options: dict[str, object], what: str) -> None:
    arguments = {"world_size": 4, **options}
    with pytest.raises(ValueError, match=what):
        plan_bucket(SPECS, **arguments)


def test_two_tensors_of_one_name() -> None:
    with pytest.raises(ValueError, match="'a'; names must be unique"):
        plan_bucket([SPECS[0], SPECS[0]], 2)


def test_corner_cases() -> None:
    alone = plan_bucket([TensorSpec("w", 1601 * 3, 4, 96), TensorSpec("s", 1, 4)], 1)
    assert alone.optimal
    assert alone.shard == 4832
    empty = plan_bucket([TensorSpec("e", 0, 2), TensorSpec("f", 0, 2)], 4)
    assert empty.shard == 0
    assert [b.units("f") for b in empty.buffers] == [(1, 0, 0, 0)]
    scalar = plan_bucket([TensorSpec("s", 1, 8)], 4)
    assert scalar.buffers[0].units("s") == (1, 0, 0, 0)
    assert plan_bucket([], 3).buffers == ()
    mixed = plan_bucket([TensorSpec("a", 100, 2), TensorSpec("b", 0, 4), TensorSpec("c", 5, 4)], 2)
    assert [(b.itemsize, [name for name, _ in b.starts]) for b in mixed.buffers] == [(2, ["a"]), (4, ["b", "c"])]


def test_a_short_last_block_is_nothing_special() -> None:
    """1601 rows of 3 in blocks of 32 rows over two ranks."""
    plan = plan_bucket([TensorSpec("w", 1601 * 3, 4, 32 * 3)], 2, alignment_bytes=4)
    first, second = plan.buffers[0].units("w")
    assert plan.optimal
    assert (first, second) == (832, 769) or (second, first) == (832, 769) or max(first, second) * 3 == plan.shard


def test_a_bucket_of_many_different_blocks_does_not_take_forever() -> None:
    # 25 blocks can be put into three buffers in 141 thousand million ways.
    rng = random.Random(0)
    specs = [TensorSpec(f"t{i}", rng.randint(1, 10**7), 2, rng.randint(1, 10**5)) for i in range(25)]
    one, several = plan_bucket(specs, 1000, max_buffers=1), plan_bucket(specs, 1000)
    validate(several, specs)
    assert several.shard < one.shard and len(several.buffers) > 1


def test_experts_stay_in_natural_order() -> None:
    specs = [TensorSpec(f"experts.{i}.w", 640, 2, 32) for i in range(12)]
    names = [name for name, _ in plan_bucket(specs[::-1], 4).buffers[0].starts]
    assert names == [f"experts.{i}.w" for i in range(12)]


def test_ordinal_changes_nothing_in_a_padded_plan() -> None:
    assert plan_bucket(SPECS, 3, ordinal=5) == plan_bucket(SPECS, 3)


def test_reasons() -> None:
    forced = plan_bucket(
        [TensorSpec("o_proj", 4096 * 40, 2, 4096), TensorSpec("gate", 5760 * 30, 2, 5760)], 24, max_buffers=1
    )
    assert any("forced to a multiple of" in reason or "cut only once" in reason for reason in forced.forced_by)
    assert all("o_proj" in r or "gate" in r or "elements" in r for r in forced.forced_by)
    block = plan_bucket([TensorSpec("head", 1000, 2, 1000), TensorSpec("b", 10, 2)], 4, max_buffers=1)
    assert any("a block of head has 1,000 elements" in reason for reason in block.forced_by)
    spread = plan_bucket([TensorSpec("w", 96 * 9, 2, 96)], 8)
    assert any("do not spread evenly over 8 ranks" in reason for reason in spread.forced_by)


def test_the_picture() -> None:
    text = str(plan_bucket([TensorSpec("q", 640, 2, 64), TensorSpec("k", 320, 2, 64), TensorSpec("b", 64, 2)], 4))
    assert "1,024 elements over 4 ranks" in text
    assert "rank" in text
    picture = next(line for line in text.splitlines() if line.startswith("  |"))
    cells = picture.strip().strip("|").split("|")
    assert len(cells) == 4
    assert len({len(cell) for cell in cells}) == 1
    assert set("".join(cells)) == {"a", "b", "c"} or "." in picture
    for name in ("q", "k", "b"):
        assert any(line.split()[1:2] == [name] for line in text.splitlines() if line.startswith("  "))
    for world_size in (1, 2, 7, 31, 32, 33, 500):
        plan = plan_bucket([TensorSpec(f"layer.{i}", 3000 * i + 5, 2, 30) for i in range(60)], world_size)
        lines = str(plan).splitlines()
        assert max(map(len, lines)) < 180
        assert "and" in lines[-1] or len(lines) < 100


def test_the_planner_imports_no_torch() -> None:
    program = "import sys, ragged_shard.planner, ragged_shard.bound, ragged_shard.plan; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
