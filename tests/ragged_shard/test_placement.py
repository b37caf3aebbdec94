"""The placement itself: arithmetic against plain indexing, identity, and what bad input says."""

from __future__ import annotations

import copy
import io
import itertools
import math
import pickle
import random
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from ragged_shard import RaggedShard
from ragged_shard.placement import check_placements, range_boxes, region_of
from tests import cluster
from tests.ragged_shard import oracle


@pytest.mark.parametrize(
    "name", ["Block", "ParamPolicy", "TensorSpec", "plan_bucket", "plan_model", "lower_bound", "validate", "BucketPlan"]
)
def test_planning_imports_no_torch(name):
    code = f"import sys, ragged_shard; ragged_shard.{name}; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=cluster.REPOSITORY)


def test_public_names_are_listed_and_unknown_ones_refused():
    import ragged_shard

    assert set(ragged_shard.__all__) <= set(dir(ragged_shard))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = ragged_shard.Nothing


# ---- arithmetic ----


@given(st.integers(0, 2**32 - 1), st.sampled_from(oracle.MESHES))
def test_regions_agree_with_plain_indexing(seed, mesh_shape):
    for shift in range(20):
        rng = random.Random(seed + shift)
        shape = oracle.shapes(rng)
        placements = oracle.placements(rng, shape, mesh_shape)
        check_placements(shape, mesh_shape, placements)
        index = torch.arange(math.prod(shape)).reshape(shape)
        seen = []
        for coordinate in oracle.coordinates(mesh_shape):
            expected = oracle.held(index, mesh_shape, coordinate, placements)
            region = region_of(shape, mesh_shape, coordinate, placements)
            assert region.local_shape == tuple(expected.shape)
            boxes = region.boxes()
            assert len(boxes) <= max(1, 2 * len(shape) - 1)
            flat = [
                index[tuple(slice(o, o + s) for o, s in zip(b.offsets, b.sizes, strict=True))].reshape(-1)
                for b in boxes
            ]
            assert [b.start for b in boxes] == [0, *itertools.accumulate(len(f) for f in flat)][: len(boxes)]
            assert torch.equal(torch.cat(flat) if flat else index.new_empty(0), expected.reshape(-1))
            seen += expected.reshape(-1).tolist()
        copies = math.prod(n for n, p in zip(mesh_shape, placements, strict=True) if p.is_replicate())
        assert sorted(seen) == sorted(list(range(math.prod(shape))) * copies)


@pytest.mark.parametrize("sizes", [(), (7,), (3, 4), (2, 3, 4), (2, 1, 3, 2)], ids=str)
def test_every_flat_range_is_few_boxes(sizes):
    index = torch.arange(math.prod(sizes)).reshape(sizes)
    for start, stop in itertools.combinations_with_replacement(range(math.prod(sizes) + 1), 2):
        boxes = list(range_boxes(sizes, start, stop))
        assert len(boxes) <= max(1, 2 * len(sizes) - 1)
        found = [
            int(i)
            for o, s in boxes
            for i in index[tuple(slice(a, a + b) for a, b in zip(o, s, strict=True))].reshape(-1)
        ]
        assert found == list(range(start, stop))


def test_local_shape_and_flat_range():
    p = RaggedShard((0,), (1, 2, 0, 3))
    assert [p.local_shape((12, 5), r) for r in range(4)] == [(2, 5), (4, 5), (0, 5), (6, 5)]
    assert [p.flat_range((12, 5), r) for r in range(4)] == [(0, 10), (10, 30), (30, 30), (30, 60)]
    q = RaggedShard((0, 1), (5, 55))
    assert q.local_shape((12, 5), 0) == (5,) and q.flat_range((12, 5), 1) == (5, 60)
    # A short last block is nothing special.
    assert [RaggedShard((0,), (800, 801)).local_shape((1601, 3), r) for r in (0, 1)] == [(800, 3), (801, 3)]
    assert RaggedShard.one_hot(1, 3).local_shape((5, 2), 1) == (5, 2)
    scalar = RaggedShard((), (0, 1))
    assert [scalar.local_shape((), r) for r in (0, 1)] == [(0,), (1,)]
    assert [scalar.flat_range((), r) for r in (0, 1)] == [(0, 0), (0, 1)]
    assert p.local_shape((0, 5), 3) == (0, 5)


# ---- identity ----


class Marker(RaggedShard):
    pass


def test_identity():
    p = RaggedShard((0,), (2, 4, 0, 6))
    assert p == RaggedShard([0], [1, 2, 0, 3]) and hash(p) == hash(RaggedShard((0,), (3, 6, 0, 9)))
    assert p.local_units == (1, 2, 0, 3)
    assert p != RaggedShard((0, 1), (1, 2, 0, 3)) and p != RaggedShard((0,), (1, 2, 3, 0))
    assert p != Replicate() and p != Shard(0) and Shard(0) != p and p != Partial()
    assert p != Marker((0,), (1, 2, 0, 3)) and Marker((0,), (1, 2, 0, 3)) != p
    assert eval(repr(p)) == p
    assert copy.deepcopy(p) is p and copy.copy(p) is p
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(p, protocol)) == p
    assert not (p.is_shard() or p.is_replicate() or p.is_partial())
    assert RaggedShard.one_hot(2, 4) == RaggedShard((0,), (0, 0, 7, 0))
    with pytest.raises(AttributeError, match="immutable"):
        p.dims = (0, 1)
    expression, names = p.__fx_repr__()
    assert eval(expression, dict(names)) == p


def test_torch_save_with_weights_only():
    file = io.BytesIO()
    torch.save({"placement": RaggedShard((0, 1), (3, 0, 1))}, file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["placement"] == RaggedShard((0, 1), (3, 0, 1))


def saved_tensors():
    mesh = cluster.mesh((2,))
    full = torch.arange(24.0).reshape(6, 4)
    x = distribute_tensor(full, mesh, [RaggedShard((0,), (1, 2))])
    file = io.BytesIO()
    torch.save({"x": x, "p": torch.nn.Parameter(x)}, file)
    for weights_only in (True, False):
        file.seek(0)
        loaded = torch.load(file, weights_only=weights_only)
        for y in loaded.values():
            assert y.placements == x.placements and torch.equal(y.full_tensor(), full)
    y = copy.deepcopy(torch.nn.Parameter(x))
    assert y.placements == x.placements and y.to_local().data_ptr() != x.to_local().data_ptr()
    assert "RaggedShard(dims=(0,), local_units=(1, 2))" in repr(x)
    module = torch.nn.Linear(4, 6, bias=False)
    module.weight = torch.nn.Parameter(x)
    module.load_state_dict(copy.deepcopy(module.state_dict()))
    assert module.to(torch.bfloat16).weight.placements == x.placements
    module.weight.to_local().sum().backward()
    assert module.weight.grad.placements == x.placements


def test_tensors_are_saved_copied_and_loaded():
    cluster.run(2, saved_tensors)


# ---- bad input ----


@pytest.mark.parametrize(
    ("dims", "units", "error", "says"),
    [
        ((1,), (1, 1), ValueError, "leading dims"),
        ((1, 0), (1, 1), ValueError, "leading dims"),
        ((0, 0), (1, 1), ValueError, "leading dims"),
        ((0,), (1, -1), ValueError, "non-negative"),
        ((0,), (0, 0), ValueError, "at least one"),
        ((0,), (), ValueError, "at least one"),
        ((), (1, 1), ValueError, "dims=\\(0,\\) to cut rows"),
        ((0,), (1, 1.0), TypeError, "ints"),
        ((0,), (True, 1), TypeError, "ints"),
        (0, (1, 1), TypeError, "tuple of ints"),
        ((0,), (2**62, 2**62), ValueError, "overflows"),
        ((0,), (2**63 - 1, 1), ValueError, "overflows"),
    ],
)
def test_impossible_placements(dims, units, error, says):
    with pytest.raises(error, match=says):
        RaggedShard(dims, units)


def test_one_hot_root_out_of_range():
    with pytest.raises(ValueError, match="root 4"):
        RaggedShard.one_hot(4, 4)


@pytest.mark.parametrize(
    ("shape", "mesh_shape", "placements", "says"),
    [
        ((7, 3), (2,), [RaggedShard((0,), (1, 2))], "3 units do not divide the 7 leading entries"),
        ((6,), (2,), [RaggedShard((0, 1), (1, 2))], "1-d"),
        ((6, 3), (3,), [RaggedShard((0,), (1, 2))], "describes 2 ranks"),
        ((6, 3), (2,), [RaggedShard((0,), (1, 2)), Replicate()], "name 2 mesh dims"),
        ((6, 3), (2, 2), [RaggedShard((0,), (1, 2)), RaggedShard((0,), (1, 2))], "2 RaggedShards"),
        ((6, 3), (2, 2), [RaggedShard((0,), (1, 5)), Shard(0)], "6 units do not divide the 3"),
        # Shard(0) leaves 3 and 2 rows: units must divide both.
        ((5, 3), (2, 2), [RaggedShard((0,), (1, 2)), Shard(0)], "3 units do not divide the 2"),
        ((6, 3), (2, 2), [RaggedShard((0,), (1, 2)), Shard(2)], "does not have"),
        ((2**40, 2**40), (2,), [RaggedShard((0,), (1, 1))], "overflows"),
    ],
)
def test_placements_that_do_not_fit_a_tensor(shape, mesh_shape, placements, says):
    with pytest.raises(ValueError, match=says):
        check_placements(shape, mesh_shape, placements)


def raised(function) -> str:
    """The error, and proof that the ranks are still in step: nobody is inside a collective."""
    try:
        function()
    except Exception as error:
        dist.barrier()
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was raised")


def bad_calls():
    mesh, square = cluster.mesh((4,)), cluster.mesh((2, 2))
    x = torch.arange(24.0).reshape(6, 4)
    good = distribute_tensor(x, mesh, [RaggedShard((0,), (1, 2, 0, 3))])
    tall = RaggedShard((0,), (1, 3))
    calls = [
        lambda: distribute_tensor(x, mesh, [RaggedShard((0,), (1, 2, 0, 4))]),
        lambda: distribute_tensor(x, mesh, [tall]),
        lambda: distribute_tensor(x, square, [tall, tall]),
        lambda: distribute_tensor(x.to_sparse(), mesh, [good.placements[0]]),
        lambda: distribute_tensor(x.to(torch.complex64), mesh, [good.placements[0]]),
        lambda: distribute_tensor(x.requires_grad_() * 2, mesh, [good.placements[0]]),
        lambda: distribute_tensor(good, mesh, [RaggedShard.one_hot(0, 4)]),
        lambda: good.redistribute(placements=[RaggedShard((0,), (1, 2, 0, 4))]),
        lambda: good.redistribute(placements=[RaggedShard((0,), (1, 2))]),
        lambda: good.redistribute(placements=[RaggedShard((0, 1, 2), (1, 2, 0, 3))]),
        lambda: good.redistribute(placements=[Partial()]),
        lambda: good.redistribute(device_mesh=square, placements=[tall, Replicate()]),
        lambda: DTensor.from_local(x, mesh, good.placements),
        lambda: DTensor.from_local(good, mesh, good.placements, shape=x.shape, stride=x.stride()),
        lambda: DTensor.from_local(good.to_local(), mesh, good.placements, shape=x.shape, stride=(1, 6)),
        lambda: DTensor.from_local(
            torch.zeros(9), mesh, good.placements, shape=x.shape, stride=x.stride(), run_check=True
        ),
    ]
    return [raised(call) for call in calls]


def test_bad_calls_raise_the_same_error_on_all_ranks_before_any_collective():
    answers = cluster.run(4, bad_calls)
    for rank in answers[1:]:
        assert rank == answers[0]
    for answer, says in zip(
        answers[0],
        (
            "do not divide",
            "describes 2 ranks",
            "2 RaggedShards",
            "to_dense",
            "view_as_real",
            "leaf",
            "redistribute",
            "do not divide",
            "describes 2 ranks",
            "2-d",
            "Replicate instead",
            "another mesh|Cross device|torch.distributed.checkpoint",
            "needs shape",
            "DTensor",
            "contiguous",
            "rank 0: the local tensor has shape",
        ),
        strict=True,
    ):
        assert any(part in answer for part in says.split("|")), (answer, says)


def wrong_on_one_rank(run_check):
    mesh = cluster.mesh((3,))
    placement = RaggedShard((0,), (1, 2, 0))
    rank = dist.get_rank()
    rows = (2, 4, 1 if rank == 2 else 0)[rank]
    try:
        DTensor.from_local(
            torch.zeros(rows, 4), mesh, [placement], shape=torch.Size((6, 4)), stride=(4, 1), run_check=run_check
        )
    except ValueError as error:
        return str(error)
    return ""


def test_a_local_tensor_of_the_wrong_size_on_one_rank():
    answers = cluster.run(3, wrong_on_one_rank, True)
    assert len(set(answers)) == 1 and "rank 2: the local tensor has shape (1, 4), expected (0, 4)" in answers[0]
    answers = cluster.run(3, wrong_on_one_rank, False)
    assert answers[:2] == ["", ""] and "rank 2" in answers[2]


def canonical_layout():
    mesh = cluster.mesh((3,))
    placement = RaggedShard((0, 1), (1, 5, 0))
    full = torch.arange(18.0).reshape(3, 2, 3)
    mine = oracle.held(full, (3,), mesh.get_coordinate(), [placement])
    whole = RaggedShard.one_hot(1, 3)
    forms = [mine.clone(), mine.reshape(-1).clone()]
    for local in forms:
        made = DTensor.from_local(local, mesh, [placement], shape=full.shape, stride=full.stride(), run_check=True)
        assert made.to_local().shape == mine.shape and made.to_local().data_ptr() == local.data_ptr()
        assert torch.equal(made.full_tensor(), full)
        leaf = local.clone().requires_grad_()
        DTensor.from_local(leaf, mesh, [placement], shape=full.shape, stride=full.stride()).to_local().sum().backward()
        assert leaf.grad.shape == leaf.shape
    local = full if dist.get_rank() == 1 else torch.empty(0, 2, 3)
    assert torch.equal(
        DTensor.from_local(local, mesh, [whole], shape=full.shape, stride=full.stride()).full_tensor(), full
    )
    # The two shapes of one layout must never meet: [n] + [n, 1] broadcasts to [n, n].
    column = torch.arange(6.0)[:, None]
    p = RaggedShard((0,), (2, 4, 0))
    part = oracle.held(column, (3,), mesh.get_coordinate(), [p])
    a = DTensor.from_local(part.reshape(-1).clone(), mesh, [p], shape=column.shape, stride=(1, 1))
    b = DTensor.from_local(part.clone(), mesh, [p], shape=column.shape, stride=(1, 1))
    assert torch.equal((a + b).full_tensor(), column * 2)
    # Without a shape, rows can be exchanged.
    exchanged = DTensor.from_local(part.clone(), mesh, [p], run_check=True)
    assert exchanged.shape == column.shape and torch.equal(exchanged.full_tensor(), column)


def zero_dims():
    mesh = cluster.mesh((3,))
    p = RaggedShard((), (0, 1, 0))
    local = torch.full((int(dist.get_rank() == 1),), 2.5).requires_grad_()
    x = DTensor.from_local(local, mesh, [p], shape=torch.Size(()), stride=(), run_check=True)
    assert x.shape == () and x.full_tensor().item() == 2.5
    (x * 3).to_local().sum().backward()
    assert torch.equal(local.grad, torch.full_like(local, 3.0))
    parameter = torch.nn.Parameter(distribute_tensor(torch.tensor(2.0), mesh, [p]))
    parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD([parameter], 0.5).step()
    assert parameter.full_tensor().item() == 1.5


def test_tensors_without_dims():
    cluster.run(3, zero_dims)


def test_from_local_views_every_form_in_the_canonical_layout():
    cluster.run(3, canonical_layout)


def outside_the_mesh():
    mesh = DeviceMesh("cpu", [0, 1])
    p = RaggedShard((0,), (1, 2))
    full = torch.arange(24.0).reshape(6, 4)
    if dist.get_rank() == 2:
        for call in (
            lambda: distribute_tensor(full, mesh, [p]),
            lambda: DTensor.from_local(full, mesh, [p], shape=full.shape, stride=full.stride()),
        ):
            with pytest.raises(ValueError, match="rank 2 is not in"):
                call()
    else:
        assert torch.equal(distribute_tensor(full, mesh, [p]).full_tensor(), full)
    dist.barrier()


def test_a_mesh_that_this_rank_is_not_in():
    cluster.run(3, outside_the_mesh)


def odd_meshes():
    """Ranks in an order that is not sorted, and a mesh smaller than the world whose two dims change at once."""
    full = torch.arange(72.0).reshape(12, 6)
    order = DeviceMesh("cpu", [2, 0, 3, 1])
    x = distribute_tensor(full if dist.get_rank() == 2 else full * 0, order, [RaggedShard((0,), (1, 2, 0, 3))])
    assert torch.equal(x.full_tensor(), full)
    for p in (RaggedShard((0, 1), (5, 0, 7, 60)), Shard(1), RaggedShard.one_hot(1, 4), Replicate()):
        y = x.redistribute(placements=[p])
        assert torch.equal(y.to_local(), oracle.held(full, (4,), order.get_coordinate(), [p]))
        assert torch.equal(y.redistribute(placements=x.placements).to_local(), x.to_local())
    square = DeviceMesh("cpu", [[3, 1], [2, 0]])
    a, b = (RaggedShard((0,), (1, 3)), Shard(1)), (Shard(0), RaggedShard((0, 1), (5, 1)))
    y = distribute_tensor(full if dist.get_rank() == 3 else full * 0, square, a).redistribute(placements=b)
    assert torch.equal(y.to_local(), oracle.held(full, (2, 2), square.get_coordinate(), b))


def test_meshes_whose_ranks_are_not_in_order():
    cluster.run(4, odd_meshes)


def smaller_mesh():
    """A 1x2 mesh in a world of three, whose both dims change at once."""
    full = torch.arange(72.0).reshape(12, 6)
    mesh = DeviceMesh("cpu", [[0, 2]])
    if dist.get_rank() != 1:
        a, b = (RaggedShard((0,), (1,)), Shard(1)), (Shard(0), RaggedShard((0, 1), (5, 1)))
        y = distribute_tensor(full, mesh, a, src_data_rank=None).redistribute(placements=b)
        assert torch.equal(y.to_local(), oracle.held(full, (1, 2), mesh.get_coordinate(), b))
        assert torch.equal(y.full_tensor(), full)
    dist.barrier()


def test_a_mesh_smaller_than_the_world():
    cluster.run(3, smaller_mesh)


def test_a_world_that_is_set_up_anew():
    """A mesh equal to one of an earlier world must not find that world's groups."""
    code = """
    import torch, torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
    from ragged_shard import RaggedShard
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1, 1))
        one = RaggedShard((0,), (1,))
        x = distribute_tensor(torch.ones(4, 2), mesh, [one, Shard(1)])
        assert torch.equal(x.redistribute(placements=[Shard(0), one]).full_tensor(), torch.ones(4, 2))
        dist.destroy_process_group()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, cwd=cluster.REPOSITORY, timeout=120)
