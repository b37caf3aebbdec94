"""Pool: memory is swapped under fixed views, reused by size, and every byte is in the ledger."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ragged_shard.pool import Lease, Pool, storage_bytes

CPU = torch.device("cpu")


def lease(pool: Pool, numel: int = 100, dtype: torch.dtype = torch.float32, label: str = "") -> Lease:
    return pool.lease(numel, dtype, label)


def test_views_survive_release_and_acquire() -> None:
    pool = Pool(CPU)
    one = lease(pool)
    view, column = one.tensor[10:30], one.tensor[:64].view(8, 8)[:, 3]
    one.tensor.copy_(torch.arange(100.0))
    assert view[0] == 10 and column[1] == 11
    one.release()
    assert one.tensor.untyped_storage().nbytes() == 0
    assert one.acquire() is True
    one.tensor.fill_(7)
    assert view.tolist() == [7.0] * 20 and column.tolist() == [7.0] * 8
    assert view.data_ptr() == one.tensor.data_ptr() + 40


def test_a_lease_is_born_held_and_acquire_is_idempotent() -> None:
    pool = Pool(CPU)
    one = lease(pool)
    assert one.held and one.acquire() is False
    one.release()
    one.release()
    assert not one.held and pool.ledger.in_use == 0
    assert one.acquire() is True and one.acquire() is False
    assert pool.ledger.in_use == one.nbytes


def test_memory_of_one_size_is_handed_on() -> None:
    pool = Pool(CPU)
    one = lease(pool)
    address = one.tensor.data_ptr()
    one.release()
    two = lease(pool)
    assert two.tensor.data_ptr() == address
    assert (pool.ledger.grown, pool.ledger.held) == (1, one.nbytes)
    one.acquire()
    assert one.tensor.data_ptr() != two.tensor.data_ptr()
    assert (pool.ledger.grown, pool.ledger.held) == (2, 2 * one.nbytes)


def test_dtypes_share_memory_of_one_size() -> None:
    pool = Pool(CPU)
    one = lease(pool, 128, torch.float32)
    one.release()
    lease(pool, 256, torch.bfloat16)
    assert pool.ledger.grown == 1


@pytest.mark.parametrize("numel", [0, 1, 127, 128, 129])
def test_sizes_are_rounded_up_to_512_bytes(numel: int) -> None:
    one = lease(Pool(CPU), numel)
    assert one.nbytes % 512 == 0 and one.nbytes >= 512 and one.nbytes - numel * 4 <= 512
    assert one.tensor.shape == (numel,)


def test_labels() -> None:
    pool = Pool(CPU)
    one, two = lease(pool, label="parameters"), lease(pool, 1000, label="gradients")
    assert dict(pool.ledger.by_label) == {"parameters": one.nbytes, "gradients": two.nbytes}
    one.release()
    assert pool.ledger.by_label["parameters"] == 0


def test_trim_frees_what_is_not_in_use() -> None:
    pool = Pool(CPU)
    one, two = lease(pool), lease(pool)
    one.release()
    pool.trim()
    assert pool.ledger.held == two.nbytes
    one.acquire()
    assert pool.ledger.held == 2 * two.nbytes and pool.ledger.grown == 3


@given(st.lists(st.tuples(st.sampled_from(["new", "acquire", "release", "trim"]), st.integers(0, 7)), max_size=60))
def test_the_ledger_is_the_sum_of_the_leases(actions: list[tuple[str, int]]) -> None:
    """in_use, peak, held and grown after any sequence, against a recount."""
    pool = Pool(CPU)
    leases: list[Lease] = []
    peak = grown = 0
    for action, index in actions:
        before = pool.ledger.held
        if action == "new":
            leases.append(lease(pool, 100 * (index % 3 + 1)))
        elif action == "trim":
            pool.trim()
        elif leases:
            one = leases[index % len(leases)]
            one.acquire() if action == "acquire" else one.release()
        used = sum(one.nbytes for one in leases if one.held)
        peak = max(peak, used)
        grown += pool.ledger.held > before
        assert pool.ledger.in_use == used
        assert pool.ledger.peak_in_use == peak
        assert pool.ledger.held >= used
        assert pool.ledger.grown == grown
        addresses = [one.tensor.data_ptr() for one in leases if one.held]
        assert len(set(addresses)) == len(addresses)
        assert all(one.tensor.untyped_storage().nbytes() == 0 for one in leases if not one.held)


def test_no_two_held_leases_share_a_byte() -> None:
    pool = Pool(CPU)
    leases = [lease(pool, 100) for _ in range(4)]
    for one in leases[::2]:
        one.release()
    for one in leases[::2]:
        one.acquire()
    for value, one in enumerate(leases):
        one.tensor.fill_(value)
    assert [one.tensor.unique().tolist() for one in leases] == [[0.0], [1.0], [2.0], [3.0]]


def test_what_autograd_saved_is_right_again() -> None:
    """Views saved in forward, memory given away and restored: no version error, the right gradient."""
    pool = Pool(CPU)
    one = lease(pool, 12)
    write = one.tensor.data
    weight = nn.Parameter(one.tensor.view(3, 4))
    values = torch.arange(12.0)
    write.copy_(values)
    x = torch.ones(2, 4, requires_grad=True)
    loss = (x @ weight.t()).square().sum()
    one.release()
    other = lease(pool, 12)
    other.tensor.fill_(1e9)
    one.acquire()
    write.copy_(values)
    loss.backward()
    reference = torch.ones(2, 4, requires_grad=True)
    (reference @ values.view(3, 4).t()).square().sum().backward()
    assert torch.equal(x.grad, reference.grad)


def test_storage_bytes_counts_each_storage_once() -> None:
    flat = torch.zeros(100)
    assert storage_bytes([flat, flat[10:], flat.view(10, 10), torch.zeros(5, dtype=torch.float64)]) == 440
    assert storage_bytes([]) == 0


def acquired_in_a_cycle(pool: Pool, leases: list[Any]) -> None:
    for one in leases:
        one.acquire()
        one.release()


def test_a_repeated_schedule_grows_once() -> None:
    pool = Pool(CPU)
    leases = [lease(pool, 100) for _ in range(3)]
    for one in leases:
        one.release()
    grown = pool.ledger.grown
    for _ in range(5):
        acquired_in_a_cycle(pool, leases)
    assert pool.ledger.grown == grown
