"""The harness itself: results in rank order, a raising and a hanging rank fail in time with every traceback shown."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests import cluster


def sum_of_ranks() -> tuple[int, float]:
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return dist.get_rank(), float(total)


def one_rank_raises() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the second rank raises")
    dist.barrier()


def one_rank_sleeps() -> None:
    if dist.get_rank() == 0:
        time.sleep(600)  # a hang, longer than any deadline; the cluster kills this rank
    dist.barrier()


def one_rank_dies() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_results_come_in_rank_order(world_size: int) -> None:
    total = float(sum(range(world_size)))
    assert cluster.run(world_size, sum_of_ranks) == [(rank, total) for rank in range(world_size)]


def test_a_raising_rank_fails_the_call_and_shows_where_the_others_wait() -> None:
    with pytest.raises(cluster.ClusterError) as error:
        cluster.run(2, one_rank_raises)
    assert "the second rank raises" in str(error.value)
    assert "barrier" in str(error.value)
    assert cluster.run(2, sum_of_ranks) == [(0, 1.0), (1, 1.0)]


def test_a_hanging_rank_fails_within_its_deadline_with_all_tracebacks() -> None:
    with pytest.raises(cluster.ClusterError) as error:
        cluster.run(2, one_rank_sleeps, deadline=3)
    message = str(error.value)
    assert "rank 0: hangs" in message and "one_rank_sleeps" in message
    assert "rank 1: hangs" in message and "barrier" in message


def test_a_dying_rank_is_reported_with_its_exit_code() -> None:
    with pytest.raises(cluster.ClusterError, match="rank 1: died ----\nexit code 7"):
        cluster.run(2, one_rank_dies)
