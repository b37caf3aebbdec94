"""Owners: deterministic, near the best possible balance, and nothing moves that lies whole on a rank."""

from __future__ import annotations

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from ragged_optim.owners import Job, assign, loads

JOBS = st.lists(
    st.tuples(st.integers(1, 1000), st.lists(st.integers(0, 50), min_size=3, max_size=3)), min_size=1, max_size=7
).map(lambda items: [Job(f"j{i}", flops * 1000.0, tuple(held)) for i, (flops, held) in enumerate(items)])


@given(jobs=JOBS)
def test_near_the_best_of_all_assignments(jobs: list[Job]) -> None:
    owners = assign(jobs, 3)
    free = [i for i, job in enumerate(jobs) if job.local is None]
    for i, job in enumerate(jobs):
        if job.local is not None:
            assert owners[i] == job.local
    best = float("inf")
    for choice in itertools.product(range(3), repeat=len(free)):
        trial = list(owners)
        for i, owner in zip(free, choice, strict=True):
            trial[i] = owner
        best = min(best, max(loads(jobs, trial, 3)))
    assert max(loads(jobs, owners, 3)) <= 4 / 3 * best + 1e-6


@given(jobs=JOBS, seed=st.integers(0, 100))
def test_any_order_of_the_jobs_gives_the_same_owners(jobs: list[Job], seed: int) -> None:
    shuffled = list(jobs)
    random.Random(seed).shuffle(shuffled)
    by_name = dict(zip([job.name for job in shuffled], assign(shuffled, 3), strict=True))
    assert [by_name[job.name] for job in jobs] == assign(jobs, 3)


@given(jobs=JOBS, data=st.data())
def test_settled_owners_stay(jobs: list[Job], data: st.DataObject) -> None:
    fixed = [data.draw(st.one_of(st.none(), st.integers(0, 2))) for _ in jobs]
    owners = assign(jobs, 3, fixed)
    assert all(fix is None or fix == owner for fix, owner in zip(fixed, owners, strict=True))


def test_local_work_counts_in_the_balance() -> None:
    local = [Job(f"local{i}", 1e6, (8, 0)) for i in range(3)]
    moving = [Job(f"moving{i}", 1e6, (1, 1)) for i in range(3)]
    owners = assign([*local, *moving], 2)
    assert owners[:3] == [0, 0, 0] and owners[3:] == [1, 1, 1]


def test_between_equals_the_rank_that_holds_more_owns() -> None:
    assert assign([Job("a", 1e9, (10, 30, 20))], 3) == [1]


def test_many_equal_matrices_are_spread_evenly() -> None:
    jobs = [Job(f"layer.{i}", 1e9, (64, 64, 64, 64)) for i in range(48)]
    owners = assign(jobs, 4)
    assert [owners.count(rank) for rank in range(4)] == [12] * 4


@given(jobs=JOBS)
def test_no_move_and_no_swap_helps_the_slowest_rank(jobs: list[Job]) -> None:
    """Equal matrices too: of two layers' alike, each goes where more of it lies."""
    owners = assign(jobs, 3)
    slowest = max(loads(jobs, owners, 3))
    free = [i for i, job in enumerate(jobs) if job.local is None]
    moves = [{i: rank} for i in free for rank in range(3)]
    swaps = [{i: owners[j], j: owners[i]} for i, j in itertools.combinations(free, 2)]
    for change in moves + swaps:
        trial = [change.get(i, owner) for i, owner in enumerate(owners)]
        assert max(loads(jobs, trial, 3)) >= slowest * (1 - 1e-6)
