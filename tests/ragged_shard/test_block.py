"""Block: sizes in elements, against a brute-force reading of what each kind keeps together."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragged_shard import Block

SHAPES = st.lists(st.integers(0, 6), max_size=4).map(tuple)
SIZES = st.integers(1, 9)


@given(shape=SHAPES, n=SIZES)
def test_elements_rows_slices_and_whole(shape: tuple[int, ...], n: int) -> None:
    total = math.prod(shape)
    row = shape[-1] if shape else 1
    plane = math.prod(shape[1:])
    for block, size in [
        (Block.elements(n), n),
        (Block.rows(n), n * row),
        (Block.slices(n), n * plane),
        (Block.whole(), total),
    ]:
        assert block.numel(shape) == max(1, min(size, total))


@given(shape=st.lists(st.integers(1, 6), max_size=4).map(tuple), r=SIZES, c=SIZES)
def test_tiles_restart_with_each_slice(shape: tuple[int, ...], r: int, c: int) -> None:
    """Evenly spaced blocks of numel(shape) elements from the start of the tensor must be the tiles of every slice."""
    rows = shape[-2] if len(shape) > 1 else 1
    row = shape[-1] if shape else 1
    slices = math.prod(shape[:-2])
    starts = {s * rows * row + i * row for s in range(slices) for i in range(0, rows, r)}
    try:
        size = Block.tile(r, c).numel(shape)
    except ValueError as error:
        assert slices > 1 and rows % min(r, rows)
        assert f"divisor of {rows}" in str(error) and str(shape) in str(error)
        return
    assert set(range(0, math.prod(shape), size)) == starts


@given(shape=SHAPES, n=st.integers(1, 10**9))
def test_a_block_larger_than_its_tensor_is_the_whole_tensor(shape: tuple[int, ...], n: int) -> None:
    total = max(1, math.prod(shape))
    for block in (Block.elements(n), Block.rows(n), Block.slices(n)):
        assert 1 <= block.numel(shape) <= total
    assert Block.elements(10**12).numel(shape) == total
    assert Block.tile(10**9, 1).numel(shape) in (total, max(1, math.prod(shape[-2:])))


@pytest.mark.parametrize("make", [Block.elements, Block.rows, Block.slices, lambda n: Block.tile(n, 4)])
@pytest.mark.parametrize(
    ("value", "error"),
    [(0, ValueError), (-3, ValueError), (1.5, TypeError), ("2", TypeError), (None, TypeError), (True, TypeError)],
)
def test_only_positive_integers(make: Any, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"Block\.\w+: \w must be"):
        make(value)


def test_tiles_check_both_sizes() -> None:
    with pytest.raises(ValueError, match="c must be at least 1, got 0"):
        Block.tile(4, 0)


@pytest.mark.parametrize(("kind", "sizes"), [("columns", (2,)), ("", ()), (None, ())])
def test_unknown_kinds(kind: Any, sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="unknown block kind"):
        Block(kind, sizes)


@pytest.mark.parametrize(("kind", "sizes"), [("rows", ()), ("rows", (1, 2)), ("whole", (1,)), ("tile", (3,))])
def test_wrong_number_of_sizes(kind: Any, sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=f"Block.{kind} takes"):
        Block(kind, sizes)


def test_blocks_are_values() -> None:
    blocks = [Block.elements(2), Block.rows(2), Block.tile(2, 3), Block.slices(2), Block.whole()]
    assert len({*blocks, *blocks}) == len(blocks)
    assert [pickle.loads(pickle.dumps(b)) for b in blocks] == blocks
    assert [str(b) for b in blocks] == ["elements(2)", "rows(2)", "tile(2, 3)", "slices(2)", "whole()"]
    with pytest.raises(AttributeError):
        blocks[0].sizes = (3,)


def test_the_docstring_case() -> None:
    """1601 rows of 7 in blocks of 32 rows."""
    assert Block.rows(32).numel((1601, 7)) == 224
    assert Block.tile(32, 7).numel((1601, 7)) == 224


def test_block_and_policy_import_no_torch() -> None:
    """The planner runs on a laptop without torch."""
    code = (
        "import sys; from ragged_shard.block import Block; from ragged_shard.policy import ParamPolicy; "
        "ParamPolicy(block=Block.rows(2)); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
