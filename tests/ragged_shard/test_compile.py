"""torch.compile of ragged tensors on real ranks whose local shapes differ, one of them empty."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from ragged_shard import RaggedShard
from tests import cluster
from tests.ragged_shard import oracle

FULL = torch.arange(24.0).reshape(6, 4) / 8
ROWS = RaggedShard((0,), (1, 2, 0, 3))
ELEMENTS = RaggedShard((0, 1), (5, 0, 7, 12))
ROOT = RaggedShard.one_hot(2, 4)

MOVES = {
    "gather": (ROWS, Replicate()),
    "gather elements": (ELEMENTS, Replicate()),
    "to Shard(0)": (ROWS, Shard(0)),
    "to Shard(1)": (ELEMENTS, Shard(1)),
    "from Shard(1)": (Shard(1), ROWS),
    "cut": (Replicate(), ELEMENTS),
    "to a root": (ROWS, ROOT),
    "between layouts": (ROWS, ELEMENTS),
}


def compiled(function, backend):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=backend)


def one_graph(backend, moves, operations, orders):
    """The moves, the reductions of addends, and norms, in one graph."""
    # The ranks share two cores: no pool of compile workers each.
    torch._inductor.config.compile_threads = 1
    mesh = cluster.mesh((4,))
    here = mesh.get_coordinate()
    goals = [MOVES[name][1] for name in moves]
    values = {"sum": FULL * 10, "max": FULL * 4, "avg": FULL * 2.5}

    def many(sources, partials):
        moved = [(x * 2).redistribute(placements=[after]) + 1 for x, after in zip(sources, goals, strict=True)]
        reduced = [x.redistribute(placements=[ROWS]) * 2 for x in partials]
        norms = [torch.linalg.vector_norm(sources[0] * 2, order).full_tensor() for order in orders]
        return moved, reduced, norms, (sources[0] - 1).sum().full_tensor()

    sources = [distribute_tensor(FULL, mesh, [MOVES[name][0]], src_data_rank=None) for name in moves]
    partials = [DTensor.from_local(FULL * (here[0] + 1), mesh, [Partial(operation)]) for operation in operations]
    moved, reduced, norms, total = compiled(many, backend)(sources, partials)
    for name, after, result in zip(moves, goals, moved, strict=True):
        assert result.placements == (after,)
        assert torch.equal(result.to_local(), oracle.held(FULL * 2 + 1, (4,), here, [after])), name
    for operation, result in zip(operations, reduced, strict=True):
        assert torch.equal(result.to_local(), oracle.held(values[operation] * 2, (4,), here, [ROWS])), operation
    for order, result in zip(orders, norms, strict=True):
        torch.testing.assert_close(result, torch.linalg.vector_norm(FULL * 2, order))
    torch.testing.assert_close(total, (FULL - 1).sum())


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.deep)])
def test_redistributions_and_norms_in_one_graph(backend):
    """A plain torch.distributed call in the traced path gives wrong values under aot_eager, without an error."""
    orders = (1.0, 2.0, float("inf"))
    cluster.run(4, one_graph, backend, tuple(MOVES), ("sum", "max", "avg"), orders, deadline=400)


def twice_with_one_cache():
    """The second time from the cache on disk, which all ranks share."""
    found = []
    for _ in range(2):
        torch._dynamo.utils.counters.clear()
        one_graph("inductor", ("gather", "cut"), ("sum",), (float("inf"),))
        found.append(torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"])
    assert found == [0, 1], found


def test_ranks_do_not_run_what_another_rank_compiled():
    """Ranks with equal layouts and other local shapes found each other's code in a warm cache: wrong values, or a crash
    on the empty rank. Cold, padding an empty tensor with cat crashed in the code that inductor made."""
    cluster.run(4, twice_with_one_cache, deadline=250)


def other_shapes():
    """The second shape marks the sizes as dynamic; the layout, whose units divide every one of them, stays."""
    mesh = cluster.mesh((3,))
    here = mesh.get_coordinate()

    def moved(x):
        whole = (x * 2).redistribute(placements=[Replicate()])
        return whole.redistribute(placements=[RaggedShard((0,), (1, 0, 2))]) + 1, torch.linalg.vector_norm(x)

    def cut(x):
        return (x * 2).redistribute(placements=[RaggedShard((0,), (1, 0, 2))]) + 1

    run, run_cut = compiled(moved, "aot_eager"), torch.compile(cut, fullgraph=True, backend="aot_eager")
    for rows in (6, 12, 18, 6):
        full = torch.arange(rows * 4.0).reshape(rows, 4)
        x = distribute_tensor(full, mesh, [RaggedShard((0,), (2, 1, 0))], src_data_rank=None)
        result, norm = run(x)
        assert torch.equal(result.to_local(), oracle.held(full * 2 + 1, (3,), here, [RaggedShard((0,), (1, 0, 2))]))
        torch.testing.assert_close(norm.full_tensor(), torch.linalg.vector_norm(full))
        whole = distribute_tensor(full, mesh, [Replicate()], src_data_rank=None)
        assert torch.equal(run_cut(whole).to_local(), result.to_local())


def test_tensors_of_other_shapes_are_right_in_a_compiled_function():
    cluster.run(3, other_shapes, deadline=120)


def gradients(backend):
    mesh = cluster.mesh((4,))
    here = mesh.get_coordinate()
    x = distribute_tensor(FULL, mesh, [ROWS], src_data_rank=None).requires_grad_()

    def loss(t):
        whole = t.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        return (whole * whole).sum()

    compiled(loss, backend)(x).backward()
    assert x.grad.placements == (ROWS,)
    assert torch.equal(x.grad.to_local(), oracle.held(FULL * 8, (4,), here, [ROWS]))


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_gradients_through_a_compiled_gather(backend):
    cluster.run(4, gradients, backend, deadline=120)


def graph_breaks(placement):
    mesh = cluster.mesh((4,))
    parameters = [torch.nn.Parameter(distribute_tensor(FULL.clone(), mesh, [placement])) for _ in range(3)]
    plain = [torch.nn.Parameter(FULL.clone()) for _ in range(3)]
    gradient = FULL.flip(0).contiguous()
    for p, q in zip(parameters, plain, strict=True):
        p.grad, q.grad = distribute_tensor(gradient, mesh, [placement]), gradient.clone()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    optimizer, other = torch.optim.AdamW(parameters, foreach=True), torch.optim.AdamW(plain, foreach=True)
    step = torch.compile(optimizer.step, backend="aot_eager")
    for _ in range(2):
        step()
        other.step()
    for p, q in zip(parameters, plain, strict=True):
        torch.testing.assert_close(p.full_tensor(), q.detach())
    return sum(torch._dynamo.utils.counters["graph_break"].values())


def test_adamw_breaks_the_graph_no_more_than_with_shard():
    ragged = cluster.run(4, graph_breaks, ROWS, deadline=120)
    stock = cluster.run(4, graph_breaks, Shard(0), deadline=120)
    assert ragged == stock
