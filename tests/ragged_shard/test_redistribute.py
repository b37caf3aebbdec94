"""RaggedShard to and from everything: values, gradients, dtypes, bytes; against plain indexing on one process."""

from __future__ import annotations

import itertools
import random
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from ragged_shard import RaggedShard, redistribute
from ragged_shard.redistribute import bytes_received
from tests import cluster
from tests.ragged_shard import oracle

SHAPE = (12, 6)


def layouts(size: int) -> list:
    """Row and element units, with empty ranks, one-hot, and the plain placements, for a mesh dim of ``size``."""
    rows = {1: (3,), 2: (1, 3), 3: (0, 5, 1), 4: (1, 2, 0, 3)}[size]
    elements = {1: (1,), 2: (5, 13), 3: (7, 0, 11), 4: (5, 0, 7, 24)}[size]
    return [
        RaggedShard((0,), rows),
        RaggedShard((0, 1), elements),
        RaggedShard.one_hot(size - 1, size),
        RaggedShard.one_hot(0, size, ()),
        Replicate(),
        Shard(0),
        Shard(1),
    ]


def pairs_of_placements(mesh_shape) -> list:
    """Every tuple of placements for the mesh with one RaggedShard at most."""
    if len(mesh_shape) == 1:
        return [(p,) for p in layouts(mesh_shape[0])]
    columns = [layouts(size) for size in mesh_shape]
    keep = [[p for p in column if not isinstance(p, RaggedShard)] for column in columns]
    found = list(itertools.product(*keep))
    for i in range(len(mesh_shape)):
        ragged = [p for p in columns[i] if isinstance(p, RaggedShard)][:3]
        # Two units divide what Shard(0) and Shard(1) leave on every rank.
        found += itertools.product(*(ragged if j == i else keep[j] for j in range(len(mesh_shape))))
    return found


def valid(shape, mesh_shape, placements) -> bool:
    from ragged_shard.placement import check_placements

    try:
        check_placements(shape, mesh_shape, placements)
    except ValueError:
        return False
    return True


def has_ragged(*specs) -> bool:
    return any(isinstance(p, RaggedShard) for spec in specs for p in spec)


class Wire:
    """Counts the bytes that this rank receives."""

    def __enter__(self):
        self.received = 0
        self.saved = {
            n: getattr(dist, n) for n in ("irecv", "broadcast", "all_to_all_single", "all_gather_into_tensor")
        }

        def irecv(tensor, *args, **kwargs):
            self.received += tensor.nbytes
            return self.saved["irecv"](tensor, *args, **kwargs)

        def broadcast(tensor, *args, **kwargs):
            if kwargs["group"].rank() != kwargs["group_src"]:
                self.received += tensor.nbytes
            return self.saved["broadcast"](tensor, *args, **kwargs)

        def all_to_all_single(out, tensor, received, sent, **kwargs):
            own = kwargs["group"].rank()
            assert received[own] == sent[own], "a rank's own piece does not travel"
            self.received += (sum(received) - received[own]) * out.element_size()
            return self.saved["all_to_all_single"](out, tensor, received, sent, **kwargs)

        def other(*args, **kwargs):
            raise AssertionError("an unexpected collective")

        dist.irecv, dist.broadcast, dist.all_to_all_single = irecv, broadcast, all_to_all_single
        dist.all_gather_into_tensor = other
        return self

    def __exit__(self, *_):
        for name, function in self.saved.items():
            setattr(dist, name, function)


def every_pair(mesh_shape, dtype):
    mesh = cluster.mesh(mesh_shape)
    here = mesh.get_coordinate()
    full = (torch.arange(72) % 50).reshape(SHAPE).to(dtype)
    count = 0
    all_placements = [p for p in pairs_of_placements(mesh_shape) if valid(SHAPE, mesh_shape, p)]
    for before in all_placements:
        local = oracle.held(full, mesh_shape, here, before)
        source = DTensor.from_local(local.clone(), mesh, before, shape=full.shape, stride=full.stride())
        for after in all_placements:
            if not has_ragged(before, after):
                continue
            with Wire() as wire:
                moved = source.redistribute(placements=after)
            expected = oracle.held(full, mesh_shape, here, after)
            assert moved.placements == after
            assert torch.equal(moved.to_local(), expected), (before, after, moved.to_local(), expected)
            least = oracle.missing_elements(SHAPE, mesh_shape, here, before, after) * full.element_size()
            assert wire.received == least, (before, after, wire.received, least)
            assert bytes_received(SHAPE, mesh_shape, tuple(here), before, after, full.element_size()) == least
            count += 1
        if has_ragged(before):
            assert torch.equal(source.full_tensor(), full)
        assert torch.equal(source.to_local(), local), "the source has changed"
    return count


@pytest.mark.parametrize("mesh_shape", [(1,), (2,), (3,), (4,), (2, 2), (1, 4), (4, 1)], ids=str)
def test_every_ordered_pair_moves_right_values_and_fewest_bytes(mesh_shape):
    world = 1
    for size in mesh_shape:
        world *= size
    (count,) = set(cluster.run(world, every_pair, mesh_shape, torch.float32, deadline=90))
    assert count >= 24


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int64, torch.bool, torch.int16], ids=str
)
def test_every_ordered_pair_in_other_dtypes(dtype):
    cluster.run(3, every_pair, (3,), dtype, deadline=60)


def float8_moves():
    mesh = cluster.mesh((2,))
    full = torch.arange(16.0).to(torch.float8_e4m3fn).reshape(8, 2)
    moved = distribute_tensor(full, mesh, [RaggedShard((0,), (1, 3))]).redistribute(
        placements=[RaggedShard((0,), (3, 1))]
    )
    assert torch.equal(moved.full_tensor().float(), full.float())


def test_float8_travels_as_bytes():
    cluster.run(2, float8_moves)


def every_partial(mesh_shape, kinds, dtype):
    mesh = cluster.mesh(mesh_shape)
    here = mesh.get_coordinate()
    full = (torch.arange(72) % 7).reshape(SHAPE).to(dtype)
    targets = [p for p in pairs_of_placements(mesh_shape) if valid(SHAPE, mesh_shape, p)]
    sources = []
    for kind in kinds:
        for spec in targets:
            for i in range(len(mesh_shape)):
                sources.append(tuple(Partial(kind) if j == i else p for j, p in enumerate(spec)))
        sources.append((Partial(kind),) * len(mesh_shape))
    for before in dict.fromkeys(sources):
        if not valid(SHAPE, mesh_shape, before):
            continue
        local = oracle.addend(full, mesh_shape, here, before)
        source = DTensor.from_local(local, mesh, before, shape=full.shape, stride=full.stride())
        value = oracle.reduced(full, mesh_shape, before)
        for after in targets:
            if not has_ragged(before, after):
                continue
            with Wire() as wire:
                moved = source.redistribute(placements=after)
            expected = oracle.held(value, mesh_shape, here, after)
            assert torch.equal(moved.to_local(), expected), (before, after, moved.to_local(), expected)
            if len(mesh_shape) == 1:
                least = oracle.missing_elements(SHAPE, mesh_shape, here, before, after) * full.element_size()
                assert wire.received == (0 if after[0].is_replicate() else least), (before, after)


@pytest.mark.parametrize("mesh_shape", [(1,), (2,), (3,), (4,)], ids=str)
def test_partial_to_every_placement(mesh_shape):
    cluster.run(mesh_shape[0], every_partial, mesh_shape, ("sum", "avg", "max", "min"), torch.float32, deadline=60)


@pytest.mark.parametrize("mesh_shape", [(2, 2), (4, 1)], ids=str)
def test_partial_to_every_placement_on_two_mesh_dims(mesh_shape):
    cluster.run(4, every_partial, mesh_shape, ("sum",), torch.float32, deadline=120)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64], ids=str)
def test_partial_in_other_dtypes(dtype):
    cluster.run(2, every_partial, (2,), ("sum", "max"), dtype)


def partial_partial_bytes():
    mesh = cluster.mesh((2, 2))
    here = mesh.get_coordinate()
    full = torch.arange(72.0).reshape(SHAPE)
    after = (Replicate(), RaggedShard((0,), (1, 3)))
    source = DTensor.from_local(full, mesh, [Partial(), Partial()])
    with Wire() as wire:
        moved = source.redistribute(placements=after)
    assert torch.equal(moved.full_tensor(), full * 4)
    # The reduce-scatter moves one other rank's addends of the own piece; the all-reduce then works on that piece.
    return wire.received, oracle.held(full, (2, 2), here, after).nbytes


def test_partial_partial_reduce_scatters_before_it_all_reduces():
    for received, piece in cluster.run(4, partial_partial_bytes):
        assert received == piece


def large_messages():
    """As if everything that moves to or from one rank were large: point to point."""
    with mock.patch.object(redistribute, "_LARGE_MESSAGE", 1):
        pairs = every_pair((4,), torch.bfloat16)
        every_partial((4,), ("sum", "max"), torch.float32)
        whole = distribute_tensor(torch.arange(72.0).reshape(SHAPE), cluster.mesh((4,)), [Replicate()])
        for after in layouts(4):
            with mock.patch.object(redistribute, "exchange", wraps=redistribute.exchange) as exchanged:
                cut = whole.redistribute(placements=[RaggedShard((0,), (1, 2, 0, 3))])
                moved = cut.redistribute(placements=[after], async_op=True)
            assert torch.equal(moved.full_tensor(), whole.to_local())
            assert exchanged.call_count == (isinstance(after, RaggedShard) and sum(map(bool, after.local_units)) == 1)
    return pairs


def test_large_moves_to_and_from_one_rank_are_messages():
    assert min(cluster.run(4, large_messages, deadline=120)) >= 24


# ---- gradients ----


def gradients(mesh_shape):
    mesh = cluster.mesh(mesh_shape)
    full = torch.arange(72.0).reshape(SHAPE)
    weight = torch.linspace(-1, 1, 72).reshape(SHAPE)
    specs = [p for p in pairs_of_placements(mesh_shape) if valid(SHAPE, mesh_shape, p)]
    for before, after in itertools.product(specs, specs):
        if not has_ragged(before, after):
            continue
        leaf = distribute_tensor(full, mesh, before, src_data_rank=None).requires_grad_()
        target = leaf.redistribute(placements=after)
        (target * distribute_tensor(weight, mesh, after, src_data_rank=None)).backward(
            distribute_tensor(full, mesh, after, src_data_rank=None)
        )
        assert leaf.grad.placements == before
        expected = oracle.held(weight * full, mesh_shape, mesh.get_coordinate(), before)
        assert torch.equal(leaf.grad.to_local(), expected), (before, after)


@pytest.mark.parametrize("mesh_shape", [(3,), (2, 2)], ids=str)
def test_gradients_flow_back_through_every_pair(mesh_shape):
    cluster.run(3 if mesh_shape == (3,) else 4, gradients, mesh_shape, deadline=90)


def second_derivatives():
    """d2/dx2 of sum(redistribute(x)^3 * w), and gradcheck of the local function of one rank's view."""
    mesh = cluster.mesh((3,))
    full = torch.linspace(0.5, 2, 72, dtype=torch.float64).reshape(SHAPE)
    specs = [(p,) for p in layouts(3)]
    for before, after in itertools.product(specs, specs):
        if not has_ragged(before, after):
            continue
        x = distribute_tensor(full, mesh, before, src_data_rank=None).requires_grad_()
        y = x.redistribute(placements=after)
        ones = distribute_tensor(torch.ones_like(full), mesh, after, src_data_rank=None)
        (first,) = torch.autograd.grad(y * y * y, x, ones, create_graph=True)
        assert first.placements == before
        ones = distribute_tensor(torch.ones_like(full), mesh, before, src_data_rank=None)
        (second,) = torch.autograd.grad(first, x, ones)
        here = mesh.get_coordinate()
        torch.testing.assert_close(first.to_local(), oracle.held(3 * full**2, (3,), here, before))
        torch.testing.assert_close(second.to_local(), oracle.held(6 * full, (3,), here, before))


def test_double_backward_through_every_pair():
    cluster.run(3, second_derivatives, deadline=60)


def numeric_gradients():
    """gradcheck of local tensor -> redistribute -> local tensor; every rank perturbs every global element in turn."""
    mesh = cluster.mesh((2,))
    rank = dist.get_rank()
    shape = (4, 3)
    full = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(shape)
    specs = [
        RaggedShard((0,), (1, 3)),
        RaggedShard((0, 1), (5, 7)),
        RaggedShard.one_hot(1, 2),
        Replicate(),
        Shard(1),
        Partial(),
    ]
    for before, after in itertools.product(specs, specs):
        if after == Partial() or not has_ragged([before, after]):
            continue
        local = oracle.held(full, (2,), (rank,), [before]).clone().requires_grad_()
        leaf = DTensor.from_local(local, mesh, [before], shape=full.shape, stride=full.stride())
        out = leaf.redistribute(placements=[after]).to_local()
        weight = torch.linspace(1, 2, 12, dtype=torch.float64).reshape(shape)
        objective = (out.sin() * oracle.held(weight, (2,), (rank,), [after])).sum()
        objective.backward()
        # The objective of all ranks; a replicated result counts once.
        total = objective.detach().clone()
        if not after.is_replicate():
            dist.all_reduce(total)
        for owner in range(2):
            count = torch.tensor(local.numel())
            dist.broadcast(count, owner)
            for element in range(int(count)):
                moved = local.detach().clone()
                step = 1e-6
                if rank == owner or before.is_replicate():
                    moved.view(-1)[element] += step
                other = DTensor.from_local(moved, mesh, [before], shape=full.shape, stride=full.stride())
                value = (
                    other.redistribute(placements=[after]).to_local().sin()
                    * oracle.held(weight, (2,), (rank,), [after])
                ).sum()
                if not after.is_replicate():
                    dist.all_reduce(value)
                if rank == owner:
                    slope = float(value - total) / step
                    assert abs(slope - float(local.grad.view(-1)[element])) < 1e-4, (before, after, element)


def test_gradients_agree_with_finite_differences():
    cluster.run(2, numeric_gradients, deadline=60)


def torch_gradcheck(mesh_shape):
    """On all ranks in step: a replicated input, cut into ``before``, moved to ``after``, and made whole again."""
    mesh = cluster.mesh(mesh_shape)
    full = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3).requires_grad_()
    specs = [p for p in pairs_of_placements(mesh_shape) if valid(full.shape, mesh_shape, p)]
    everywhere = [Replicate()] * len(mesh_shape)
    torch.manual_seed(0)  # fast mode perturbs along random directions: the same ones on all ranks
    pairs = [pair for pair in itertools.product(specs, specs) if has_ragged(*pair)]
    for before, after in random.Random(0).sample(pairs, min(40, len(pairs))):

        def moved(x, before=before, after=after):
            cut = DTensor.from_local(x, mesh, everywhere).redistribute(placements=before)
            return (cut * cut).redistribute(placements=after).full_tensor().sin()

        # An undefined gradient reaches Redistribute.backward as a plain tensor of zeros, for stock placements too.
        assert torch.autograd.gradcheck(moved, (full,), check_undefined_grad=False, fast_mode=True), (before, after)
        assert torch.autograd.gradgradcheck(moved, (full,), check_undefined_grad=False, fast_mode=True), (before, after)
    return len(pairs)


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 1)], ids=str)
def test_gradcheck_and_gradgradcheck(mesh_shape):
    """Every pair on one mesh dim, forty on two."""
    assert min(cluster.run(2, torch_gradcheck, mesh_shape, deadline=120)) >= 24


def forward_and_backward_dtype():
    mesh = cluster.mesh((3,))
    full = torch.arange(72.0).reshape(SHAPE)
    ragged = RaggedShard((0,), (0, 5, 1))
    leaf = distribute_tensor(full, mesh, [ragged]).requires_grad_()
    with Wire() as wire:
        whole = leaf.redistribute(placements=[Replicate()], forward_dtype=torch.bfloat16, backward_dtype=torch.float32)
    assert whole.dtype == torch.bfloat16
    assert wire.received == 2 * (72 - leaf.to_local().numel()), "the gather must run in the forward dtype"
    gradient = whole.to_local(grad_placements=[Partial()])
    gradient.backward(torch.full(SHAPE, 2.0, dtype=torch.bfloat16))
    assert leaf.grad.dtype == torch.float32 and leaf.grad.placements == (ragged,)
    assert torch.equal(leaf.grad.full_tensor(), torch.full(SHAPE, 6.0))


def test_forward_and_backward_dtypes_and_zero_style_gradients():
    cluster.run(3, forward_and_backward_dtype)


# ---- async ----


def async_results():
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    mesh = cluster.mesh((4,))
    full = torch.arange(72.0).reshape(SHAPE)
    for before, after in itertools.product(layouts(4), layouts(4)):
        if not has_ragged([before, after]) or before == after:
            continue
        source = distribute_tensor(full, mesh, [before], src_data_rank=None)
        with torch.no_grad():
            pending = source.redistribute(placements=[after], async_op=True)
            local = pending.to_local()
        assert isinstance(local, AsyncCollectiveTensor), (before, after)
        expected = oracle.held(full, (4,), mesh.get_coordinate(), [after])
        assert torch.equal(local + 0, expected), (before, after)
        assert torch.equal(source.redistribute(placements=[after], async_op=True).full_tensor(), full)


def test_async_redistribute_waits_and_unpacks_on_first_use():
    cluster.run(4, async_results)


# ---- distribute_tensor ----


def scattered(mesh_shape):
    mesh = cluster.mesh(mesh_shape)
    full = torch.arange(72.0).reshape(SHAPE)
    for placements in pairs_of_placements(mesh_shape):
        if not valid(SHAPE, mesh_shape, placements) or not has_ragged(placements):
            continue
        mine = full if dist.get_rank() == 0 else torch.full(SHAPE, -1.0)
        with Wire() as wire:
            made = distribute_tensor(mine, mesh, placements)
        assert torch.equal(made.full_tensor(), full), placements
        assert wire.received == (0 if dist.get_rank() == 0 else made.to_local().nbytes), (
            "each rank receives its own piece only"
        )
        other = distribute_tensor(
            full if dist.get_rank() == dist.get_world_size() - 1 else mine * 0, mesh, placements, src_data_rank=None
        )
        assert other.to_local().untyped_storage().nbytes() == made.to_local().nbytes, (
            "a piece must not keep the whole alive"
        )
        parameter = distribute_tensor(torch.nn.Parameter(full), mesh, placements)
        assert parameter.requires_grad
        meta = distribute_tensor(full.to("meta"), mesh, placements)
        assert meta.is_meta and meta.to_local().shape == made.to_local().shape


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)], ids=str)
def test_distribute_tensor_scatters_each_rank_its_piece(mesh_shape):
    cluster.run(4, scattered, mesh_shape, deadline=40)


def partial_and_ragged_distribution():
    mesh = cluster.mesh((2, 2))
    full = torch.arange(72.0).reshape(SHAPE)
    made = distribute_tensor(full, mesh, [Partial(), RaggedShard((0,), (1, 3))])
    assert torch.equal(made.full_tensor(), full)


def test_distribute_tensor_with_a_partial_dim():
    cluster.run(4, partial_and_ragged_distribution)


# ---- any chain, against plain indexing ----


def chain(seed: int, mesh_shape):
    rng = random.Random(seed)
    shape = oracle.shapes(rng)
    dtype = rng.choice((torch.float32, torch.float32, torch.bfloat16, torch.int64, torch.uint8))
    # torch cannot average integers.
    kinds = ("sum", "max", "min", "avg") if dtype.is_floating_point else ("sum", "max", "min")
    first = oracle.placements(rng, shape, mesh_shape, kinds if dtype != torch.uint8 and rng.random() < 0.4 else ())
    return shape, dtype, [first, *(oracle.placements(rng, shape, mesh_shape) for _ in range(rng.randint(1, 4)))]


def run_chains(mesh_shape, seeds):
    mesh = cluster.mesh(mesh_shape)
    here = mesh.get_coordinate()
    for seed in seeds:
        shape, dtype, specs = chain(seed, mesh_shape)
        value = (torch.randint(0, 8, shape, generator=torch.Generator().manual_seed(seed))).to(dtype)
        local = oracle.addend(value, mesh_shape, here, specs[0])
        stride = torch.empty(shape, device="meta").stride()
        at = DTensor.from_local(local, mesh, specs[0], shape=torch.Size(shape), stride=stride)
        value = oracle.reduced(value, mesh_shape, specs[0]).to(dtype)
        for step, spec in enumerate(specs[1:]):
            if not has_ragged(at.placements, spec):
                continue
            at = at.redistribute(placements=spec)
            expected = oracle.held(value, mesh_shape, here, spec)
            assert at.to_local().shape == expected.shape and torch.equal(at.to_local(), expected), (
                f"seed {seed}, step {step}: {shape} {dtype} {specs}\n{at.to_local()}\n{expected}"
            )
    return len(seeds)


EXAMPLES_IN_A_BATCH = 80


@given(
    mesh_shape=st.sampled_from(oracle.MESHES),
    seeds=st.lists(st.integers(0, 2**32 - 1), min_size=EXAMPLES_IN_A_BATCH, max_size=EXAMPLES_IN_A_BATCH),
)
def test_redistribute_chains_agree_with_plain_indexing(mesh_shape, seeds):
    """25 batches of 80 chains in CI; ``make test-deep`` runs 1,000 batches."""
    world = 1
    for size in mesh_shape:
        world *= size
    assert set(cluster.run(world, run_chains, mesh_shape, seeds, deadline=120)) == {EXAMPLES_IN_A_BATCH}
