"""DBuffer: what the plan says lies where it says, collectives in place, one operation for all tensors."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ragged_shard import DBuffer, RaggedShard, TensorSpec, buffer_of, plan_bucket
from ragged_shard.dbuffer import Layout
from ragged_shard.pool import Pool
from tests import cluster

SHAPES: tuple[tuple[int, ...], ...] = ((5, 7), (3,), (), (2, 3, 4), (0, 3), (16, 1))
BLOCKS = (7, 1, 1, 12, 1, 1)
NAMES = tuple(f"p{i}" for i in range(len(SHAPES)))


def layout(
    shapes: tuple[tuple[int, ...], ...] = SHAPES,
    blocks: tuple[int, ...] = BLOCKS,
    mesh: Any = None,
    itemsize: int = 4,
    alignment: int = 16,
) -> Layout:
    mesh = cluster.mesh((dist.get_world_size(),)) if mesh is None else mesh
    specs = [
        TensorSpec(f"p{i}", math.prod(shape), itemsize, block)
        for i, (shape, block) in enumerate(zip(shapes, blocks, strict=True))
    ]
    (plan,) = plan_bucket(specs, mesh.size(mesh.ndim - 1), alignment_bytes=alignment, max_buffers=1).buffers
    order = [int(name[1:]) for name, _ in plan.starts]
    return Layout(plan, tuple(shapes[i] for i in order), mesh, mesh.ndim - 1)


def values(name: str, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * int(name[1:]) + seed)
    return torch.randint(-30, 31, shape, generator=generator).float()


def fill(buffer: DBuffer, seed: int = 0) -> None:
    """Each tensor's own part of ``values`` into a sharded or whole buffer."""
    rank = buffer.layout.rank
    for index, (name, shape) in enumerate(zip(buffer.names, buffer.shapes, strict=True)):
        whole = values(name, shape, seed)
        if buffer.is_sharded:
            placement = buffer.layout.placements[index][buffer.layout.shard_dim]
            start, stop = placement.flat_range(shape, rank)
            buffer.views[index].view(-1).copy_(whole.reshape(-1)[start:stop])
        else:
            buffer.views[index].copy_(whole)


def sharded(**options: Any) -> DBuffer:
    return DBuffer.sharded(layout(**options), torch.float32, torch.device("cpu"))


def whole(where: Layout, dtype: torch.dtype = torch.float32, partial_: bool = False) -> DBuffer:
    buffer = DBuffer.whole(where, dtype, Pool(torch.device("cpu")), partial=partial_)
    buffer.acquire()
    return buffer


# ---- layout ----


def described() -> list[str]:
    """Views, DTensors, placements and gaps of a sharded buffer fit the plan and each other."""
    buffer, found = sharded(), []
    fill(buffer)
    for index, (name, shape) in enumerate(zip(buffer.names, buffer.shapes, strict=True)):
        tensor = buffer.dtensor(index)
        (placement,) = tensor.placements
        if not isinstance(placement, RaggedShard) or tuple(tensor.shape) != shape:
            found.append(f"{name}: {tensor}")
        if tuple(tensor.to_local().shape) != tuple(placement.local_shape(shape, buffer.layout.rank)):
            found.append(f"{name}: local shape {tuple(tensor.to_local().shape)}")
        if not torch.equal(tensor.full_tensor(), values(name, shape)):
            found.append(f"{name}: full_tensor")
        if tensor.stride() != torch.empty(shape).stride():
            found.append(f"{name}: stride {tensor.stride()}")
        if tensor.to_local().untyped_storage().data_ptr() != buffer.owned.untyped_storage().data_ptr():
            found.append(f"{name}: is no view")
    owned = buffer.plan.owned(buffer.layout.rank)
    if buffer.owned.numel() != owned[1] - owned[0] or buffer.owned.dim() != 1:
        found.append("owned")
    covered = sum(view.numel() for view in buffer.views)
    gaps = sum(max(0, min(hi, owned[1]) - max(lo, owned[0])) for lo, hi in buffer.layout.gaps)
    if covered + gaps != buffer.owned.numel():
        found.append(f"{covered} + {gaps} elements of {buffer.owned.numel()}")
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_views_and_dtensors_are_the_plan(world_size: int) -> None:
    assert cluster.run(world_size, described) == [[]] * world_size


def bad_layouts() -> list[str]:
    good = layout()
    messages = []
    for arguments in (
        (good.plan, (*good.shapes[:-1], (9, 9)), good.mesh, 0),
        (good.plan, good.shapes, cluster.mesh((1, dist.get_world_size()), ("a", "b")), 0),
    ):
        try:
            Layout(*arguments)
            messages.append("no error")
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_a_layout_that_does_not_fit() -> None:
    for shape, mesh in cluster.run(2, bad_layouts):
        assert "(9, 9)" in shape and "81" in shape
        assert "2 ranks" in mesh and "has 1" in mesh


# ---- collectives ----


def gathered(dtype: torch.dtype) -> list[str]:
    shards = sharded()
    fill(shards)
    full = whole(shards.layout, dtype)
    full.flat.fill_(99)
    addresses, versions = [view.data_ptr() for view in full.views], [view._version for view in full.views]
    shards.all_gather(full).wait()
    found = [
        name
        for name, shape, view in zip(full.names, full.shapes, full.views, strict=True)
        if not torch.equal(view, values(name, shape).to(dtype))
    ]
    if [view.data_ptr() for view in full.views] != addresses:
        found.append("views have moved")
    # A gather that restores the same values is no modification to autograd.
    return found + ([] if [view._version for view in full.views] == versions else ["versions"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 3])
def test_all_gather(world_size: int, dtype: torch.dtype) -> None:
    assert cluster.run(world_size, gathered, dtype) == [[]] * world_size


def reduced(accumulate: bool, divide_by: float, dtype: torch.dtype) -> list[str]:
    shards = sharded()
    grads = whole(shards.layout, dtype, True)
    grads.flat.zero_()
    fill(grads, seed=dist.get_rank() + 1)
    if accumulate:
        fill(shards)
    scratch = torch.empty(grads.scratch_nbytes() // dtype.itemsize, dtype=dtype)
    grads.reduce_scatter(shards, divide_by=divide_by, accumulate=accumulate, scratch=scratch).wait()
    found = []
    for index, (name, shape) in enumerate(zip(shards.names, shards.shapes, strict=True)):
        total = sum(values(name, shape, rank + 1) for rank in range(dist.get_world_size())) / divide_by
        expected = total + values(name, shape) if accumulate else total
        if not torch.equal(shards.dtensor(index).full_tensor(), expected):
            found.append(name)
    return found


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_reduce_scatter(world_size: int, dtype: torch.dtype, accumulate: bool) -> None:
    assert cluster.run(world_size, reduced, accumulate, 2.0, dtype) == [[]] * world_size


def hybrid() -> list[str]:
    """(Partial, Partial) -> (Replicate, Shard) on a 2x2 mesh."""
    mesh = cluster.mesh((2, 2), ("replicate", "shard"))
    where = layout(mesh=mesh)
    shards = DBuffer.sharded(where, torch.float32, torch.device("cpu"))
    grads = whole(where, torch.float32, True)
    found = []
    if [type(p) for p in shards.placements] != [Replicate, Shard] or not isinstance(grads.placements[1], Partial):
        found.append(f"{shards.placements} {grads.placements}")
    grads.flat.zero_()
    fill(grads, seed=dist.get_rank() + 1)
    grads.reduce_scatter(shards, divide_by=4.0, replicate_dim=0).wait()
    for index, (name, shape) in enumerate(zip(shards.names, shards.shapes, strict=True)):
        tensor = shards.dtensor(index)
        if not isinstance(tensor.placements[0], Replicate):
            found.append(f"{name}: {tensor.placements}")
        expected = sum(values(name, shape, rank + 1) for rank in range(4)) / 4
        if not torch.equal(tensor.full_tensor(), expected):
            found.append(name)
    return found


def test_hybrid_reduction() -> None:
    assert cluster.run(4, hybrid) == [[]] * 4


def other_layout() -> list[str]:
    one = sharded()
    two = DBuffer.sharded(layout(alignment=64), torch.float32, torch.device("cpu"))
    messages = []
    for call in (one.add_, one.copy_, lambda other: one.all_gather(whole(other.layout))):
        try:
            call(two)
            messages.append("no error")
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_buffers_of_different_layouts_do_not_mix() -> None:
    for message in cluster.run(1, other_layout)[0]:
        assert "layout" in message


# ---- one operation for all ----


def fused() -> list[str]:
    buffer = sharded()
    other = buffer.like()
    narrow = buffer.like(torch.bfloat16)
    fill(buffer)
    fill(other, seed=1)
    found = []

    def compare(what: str, tested: DBuffer, expected: Any) -> None:
        for index, (name, shape) in enumerate(zip(buffer.names, buffer.shapes, strict=True)):
            if not torch.equal(tested.dtensor(index).full_tensor(), expected(name, shape)):
                found.append(f"{what}: {name}")

    buffer.add_(other, alpha=2.0)
    compare("add_", buffer, lambda n, s: values(n, s) + 2 * values(n, s, 1))
    buffer.scale_(0.5)
    compare("scale_", buffer, lambda n, s: (values(n, s) + 2 * values(n, s, 1)) / 2)
    buffer.scale_(torch.tensor(2.0))
    narrow.copy_(other)
    compare("copy_", narrow, lambda n, s: values(n, s, 1).bfloat16())
    buffer.copy_(narrow)
    compare("copy_ back", buffer, lambda n, s: values(n, s, 1))
    buffer.zero_()
    compare("zero_", buffer, lambda n, s: torch.zeros(s))
    if narrow.dtype != torch.bfloat16 or narrow.layout is not buffer.layout or buffer.like().owned.any():
        found.append("like")
    return found


@pytest.mark.parametrize("world_size", [1, 3])
def test_fused_operations(world_size: int) -> None:
    assert cluster.run(world_size, fused) == [[]] * world_size


def norms() -> list[str]:
    buffer = sharded()
    fill(buffer)
    flat = torch.cat([values(n, s).flatten() for n, s in zip(buffer.names, buffer.shapes, strict=True)])
    found = []
    for order in (1.0, 2.0, 3.0, math.inf):
        mine, expected = buffer.norm(order), torch.linalg.vector_norm(flat, order)
        if mine.dim() or mine.dtype != torch.float32 or not torch.isclose(mine, expected, rtol=1e-6):
            found.append(f"{order}: {mine}, not {expected}")
        everywhere = [torch.zeros(()) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, mine)
        if any(not torch.equal(e, mine) for e in everywhere):
            found.append(f"{order}: ranks disagree")
    for order in (0.0, -1.0):
        try:
            buffer.norm(order)
            found.append(f"{order}: no error")
        except ValueError:
            pass
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_norm(world_size: int) -> None:
    assert cluster.run(world_size, norms) == [[]] * world_size


def narrow_norm() -> float:
    """A bf16 buffer's norm is accumulated in fp32."""
    buffer = DBuffer.sharded(layout(((4096,),), (1,), itemsize=2), torch.bfloat16, torch.device("cpu"))
    buffer.views[0].fill_(1.0)
    return buffer.norm(1.0).item()


def test_norm_of_narrow_buffers() -> None:
    assert cluster.run(2, narrow_norm) == [4096.0] * 2


def gaps() -> list[float]:
    """zero_gaps_ touches what belongs to no tensor, and nothing else, sharded and whole."""
    shards = sharded()
    full = whole(shards.layout)
    worst = []
    for buffer in (shards, full):
        buffer.flat.fill_(7.0)
        buffer.zero_gaps_()
        inside = sum(view.sum().item() for view in buffer.views)
        worst += [buffer.flat.sum().item() - inside, inside - 7.0 * sum(v.numel() for v in buffer.views)]
    return worst


@pytest.mark.parametrize("world_size", [1, 3])
def test_zero_gaps(world_size: int) -> None:
    assert cluster.run(world_size, gaps) == [[0.0] * 4] * world_size


# ---- buffer_of, lifetime ----


def found_again() -> list[str]:
    buffer, found = sharded(), []
    for index in range(len(buffer.names)):
        tensor = buffer.dtensor(index)
        home = buffer_of(tensor)
        if home is None or home[0] is not buffer or home[1] != index:
            found.append(f"{index}: {home}")
        # Another tensor that merely looks like it is at home nowhere.
        for stranger in (tensor.clone(), tensor + 0, tensor.to_local(), tensor.full_tensor()):
            if buffer_of(stranger) is not None:
                found.append(f"{index}: a stranger has a home")
    if buffer_of(torch.zeros(2)) is not None:
        found.append("a plain tensor has a home")
    whole_buffer = whole(buffer.layout)
    try:
        whole_buffer.dtensor(0)
        found.append("a whole buffer has DTensors")
    except ValueError:
        pass
    return found


def test_buffer_of() -> None:
    assert cluster.run(2, found_again) == [[], []]


def released() -> list[str]:
    pool = Pool(torch.device("cpu"))
    buffer = DBuffer.whole(layout(), torch.float32, pool)
    found = [] if not buffer.held and pool.ledger.in_use == 0 else ["born held"]
    if not buffer.acquire() or buffer.acquire() or not buffer.held:
        found.append("acquire")
    fill(buffer)
    views = buffer.views
    buffer.release()
    if buffer.held or pool.ledger.in_use or any(v.untyped_storage().nbytes() for v in views):
        found.append("release")
    buffer.acquire()
    if buffer.views is not views or views[0].untyped_storage().nbytes() == 0:
        found.append("views are not the same after acquire")
    return found


def test_whole_buffers_lease_their_memory() -> None:
    assert cluster.run(1, released) == [[]]


def random_bucket(shapes: list[tuple[int, ...]], blocks: list[int], alignment: int, dtype: torch.dtype) -> list[str]:
    """Gather what is sharded, reduce it back: every element returns to its place."""
    where = layout(
        tuple(shapes),
        tuple(min(b, max(1, math.prod(s))) for s, b in zip(shapes, blocks, strict=True)),
        itemsize=dtype.itemsize,
        alignment=alignment,
    )
    shards = DBuffer.sharded(where, dtype, torch.device("cpu"))
    fill(shards)
    full = whole(where, dtype)
    shards.all_gather(full).wait()
    found = [
        f"gather {n}"
        for n, s, v in zip(full.names, full.shapes, full.views, strict=True)
        if not torch.equal(v, values(n, s).to(dtype))
    ]
    back = shards.like()
    full.reduce_scatter(back, divide_by=float(dist.get_world_size())).wait()
    found += [
        f"reduce {n}"
        for i, (n, s) in enumerate(zip(full.names, full.shapes, strict=True))
        if not torch.allclose(back.dtensor(i).full_tensor(), values(n, s).to(dtype), rtol=1e-6)
    ]
    return found


@settings(max_examples=12)
@given(
    world_size=st.sampled_from([1, 2, 3, 4]),
    tensors=st.lists(
        st.tuples(st.lists(st.integers(0, 5), max_size=3).map(tuple), st.integers(1, 12)), min_size=1, max_size=6
    ),
    alignment=st.sampled_from([4, 16, 128]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_any_bucket_there_and_back(
    world_size: int, tensors: list[tuple[tuple[int, ...], int]], alignment: int, dtype: torch.dtype
) -> None:
    if not any(math.prod(shape) for shape, _ in tensors):
        return
    shapes, blocks = [s for s, _ in tensors], [b for _, b in tensors]
    assert (
        cluster.run(world_size, random_bucket, shapes, blocks, max(alignment, dtype.itemsize), dtype)
        == [[]] * world_size
    )


def test_repr_says_what_it_is() -> None:
    (text,) = cluster.run(1, partial(repr_of))
    assert "6 tensors" in text and "torch.float32" in text


def repr_of() -> str:
    assert isinstance(sharded().dtensor(0), DTensor)
    return repr(sharded())
