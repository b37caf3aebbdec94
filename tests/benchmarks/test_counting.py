"""The counters count known programs exactly, so a figure that they print can be believed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import Shard, distribute_tensor

from benchmarks.counting import OperationCounter, copies_beyond, is_copy, live_bytes, record_allocations, replay
from tests import cluster


@pytest.mark.parametrize(
    ("program", "nbytes"),
    [
        (lambda x, y: y.copy_(x), 400),
        (lambda x, y: x.clone(), 400),
        (lambda x, y: torch.cat([x, y]), 800),
        (lambda x, y: torch.stack([x, y]), 800),
        (lambda x, y: x.to(torch.bfloat16), 200),
        (lambda x, y: torch._foreach_copy_([x, y], [y, x]), 800),
        (lambda x, y: torch.split_with_sizes_copy(x, [40, 60]), 400),
        (lambda x, y: x.view(10, 10).t().contiguous(), 400),
        (lambda x, y: x.view(10, 10).contiguous(), 0),
        (lambda x, y: x.view(50, 2)[3], 0),
        (lambda x, y: x + y, 0),
        (lambda x, y: torch.mul(x, 2, out=y), 0),
        (lambda x, y: torch.empty(100), 0),
    ],
)
def test_copies_of_one_kernel(program, nbytes):
    x, y = torch.ones(100), torch.zeros(100)
    with OperationCounter() as counter:
        program(x, y)
    assert counter.copied_bytes == nbytes
    assert counter.collectives == counter.collective_bytes == 0


def test_written_bytes_see_what_is_no_copy():
    x, y = torch.ones(100), torch.zeros(100)
    with OperationCounter() as counter:
        torch.mul(x, 2, out=y)
        x.add_(y)
        x.view(10, 10).t()
        torch.empty(1000)
    assert counter.written_bytes == 800
    assert counter.copied_bytes == 0


def test_copies_in_backward_are_seen():
    w = torch.ones(4, 8, requires_grad=True)
    with OperationCounter() as counter:
        sum((part * part).sum() for part in w.unbind(0)).backward()
    assert ("stack (4, 8)", 128) in counter.copies


def test_copy_names():
    assert is_copy("copy_") and is_copy("split_with_sizes_copy") and is_copy("all_gather_copy_in")
    assert not is_copy("add_") and not is_copy("fill_")


def test_a_saved_copy_of_the_model_pays_for_none_on_the_way():
    x = torch.ones(100)
    with OperationCounter() as local:
        torch.stack([x, x])
        x.clone()
    with OperationCounter() as ours:
        torch.zeros(100).copy_(x)
        x.clone()
    assert ours.copied_bytes < local.copied_bytes
    assert copies_beyond(ours.copies, local.copies) == 400
    assert copies_beyond(local.copies, local.copies) == 0


def collectives_of_a_world():
    size, rank, n = dist.get_world_size(), dist.get_rank(), 1000
    full, shard, other = torch.ones(size * n), torch.ones(n), torch.ones(size * n)
    peers = [peer for peer in range(size) if peer != rank]
    figures = {}

    def count(name, program):
        with OperationCounter() as counter:
            program()
        figures[name] = (counter.collectives, counter.collective_bytes, sum(counter.operations.values()))

    def broadcasts(buffer):
        for root, chunk in enumerate(buffer.chunk(size)):
            dist.broadcast(chunk, root)

    def exchange():
        works = [dist.irecv(other[p * n : (p + 1) * n], p) for p in peers]
        works += [dist.isend(full[p * n : (p + 1) * n], p) for p in peers]
        for work in works:
            work.wait()

    count("all_gather", lambda: dist.all_gather_into_tensor(full, shard))
    count("reduce_scatter", lambda: dist.reduce_scatter_tensor(shard, full))
    count("all_reduce", lambda: dist.all_reduce(full))
    count("all_to_all", lambda: dist.all_to_all_single(other, full))
    count("broadcasts", lambda: broadcasts(full))
    count("two gathers", lambda: (broadcasts(full), broadcasts(full), broadcasts(other)))
    count("exchange", exchange)
    count("two exchanges", lambda: (exchange(), exchange()))
    count("gather, exchange, gather", lambda: (broadcasts(full), exchange(), broadcasts(full)))
    count("barrier", dist.barrier)
    mesh = cluster.mesh((size,))
    sharded = distribute_tensor(torch.ones(size * n), mesh, [Shard(0)])
    count("DTensor", lambda: sharded.full_tensor())
    return figures


def test_collectives():
    size = 3
    full, messages = size * 4000, (size - 1) * 4000
    for figures in cluster.run(size, collectives_of_a_world):
        assert figures == {
            "all_gather": (1, full, 1),
            "reduce_scatter": (1, full, 1),
            "all_reduce": (1, full, 1),
            "all_to_all": (1, full, 1),
            "broadcasts": (1, full, size),
            "two gathers": (3, 3 * full, 3 * size),
            "exchange": (1, messages, 2 * (size - 1)),
            "two exchanges": (2, 2 * messages, 4 * (size - 1)),
            "gather, exchange, gather": (3, 2 * full + messages, 2 * size + 2 * (size - 1)),
            "barrier": (0, 0, 0),
            "DTensor": (1, full, 1),
        }


def buffers_of_a_world():
    size = dist.get_world_size()
    persistent, shard = torch.ones(size * 1000), torch.ones(1000)

    def program():
        dist.all_reduce(persistent)  # was there before
        dist.all_gather_into_tensor(torch.empty(size * 1000), shard)  # is new
        torch.empty(500)  # is new, but moves nothing

    return record_allocations(program)


def test_only_new_buffers_of_collectives_count_as_new():
    for allocations in cluster.run(3, buffers_of_a_world):
        assert (allocations.buffers, allocations.buffer_bytes) == (1, 12000)
        assert allocations.nbytes >= 10000


def test_allocations_of_a_known_program():
    x = torch.ones(1 << 16)

    def program():
        y = x + x
        z = y.clone()
        del y, z
        torch.empty(1 << 15)

    allocations = record_allocations(program)
    assert (allocations.nbytes, allocations.times) == ((1 << 18) * 2 + (1 << 17), 3)
    assert allocations.high_water == 1 << 19
    assert allocations.buffers == 0


def test_replay_of_a_block_that_a_thread_freed_unseen():
    events = [("block", 1, 100), ("block", 1, 100), ("collective", 1, 0), ("block", 1, -100), ("collective", 1, 0)]
    allocations = replay(events)
    assert (allocations.nbytes, allocations.times, allocations.high_water) == (200, 2, 100)
    assert (allocations.buffers, allocations.buffer_bytes) == (1, 100)


def test_live_bytes_counts_a_storage_once():
    flat = torch.zeros(100)
    assert live_bytes([flat[:10], flat[10:], nn.Parameter(flat)]) == 400
    assert live_bytes([flat, torch.zeros(3)]) == 412


def bytes_of_a_dtensor():
    mesh = cluster.mesh((dist.get_world_size(),))
    tensor = distribute_tensor(torch.zeros(96), mesh, [Shard(0)])
    return live_bytes([tensor, nn.Parameter(tensor)])


def test_live_bytes_of_a_dtensor_are_those_of_its_shard():
    assert cluster.run(3, bytes_of_a_dtensor) == [128, 128, 128]
