"""Predict a step on a cluster from a profile of a few ranks.

    profile = record(model, step)                       # one step of the sharded model, on 1 to 8 ranks
    print(predict(profile, Cluster(ranks=1024)))        # its collectives, bytes, buffers and time on 1,024 ranks
    print(scaling(profile, Cluster(ranks=8), [8, 64, 512, 4096]))

``record`` keeps what the schedule did (which bucket was gathered, computed with, reduced and released, in order) and
the seconds of computation in between. ``predict`` lays every bucket out for the new number of ranks with the same
planner, and replays the same actions over the same memory pool, without memory. So collectives, bytes and communication
buffers are those of the real run with that number of ranks, not estimates.

Meshes grow with the ranks as follows. Replicas (HSDP): as many as ``Cluster.replicas`` says, each sharded over its part
of the ranks. A mesh that is n times smaller than the largest (experts, over the ranks that hold the same ones): n times
smaller again. ``reshard_after_forward=n``: groups of n, where there are more ranks than that.

Time is a model, with these assumptions, which every report prints:

    - computation takes what it took in the profile, divided by ``compute_scale``
    - a collective takes ``latency`` plus its bytes over the slowest link; gathers run one after another, and so do
      reductions, each kind beside computation
    - ranks do not wait for each other otherwise: no stragglers, no contention between gathers and reductions

(arXiv 2602.22437 reports that 64 GPUs predict thousands.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp.bucket import Bucket
from fsdp.hooks import State, state_of
from ragged_shard.planner import TensorSpec, plan_bucket
from ragged_shard.pool import Event, Lease, Pool

__all__ = ["Cluster", "Prediction", "Profile", "plot", "predict", "record", "scaling"]


@dataclass(frozen=True)
class Cluster:
    """``ranks`` in all. Bandwidths in bytes per second and rank, ``latency`` in seconds a collective.

    ``replicas``: copies of the parameters, each sharded over ``ranks / replicas`` (HSDP); ``None``: as many as in the
    profile.
    ``ranks_per_node``: a collective that leaves a node runs at ``inter_bandwidth``. ``compute_scale``: how many times
    faster a rank computes than in the profile. ``gloo``: reductions receive into memory beside the buffer, as on CPU.
    """

    ranks: int
    ranks_per_node: int = 8
    intra_bandwidth: float = 300e9
    inter_bandwidth: float = 50e9
    latency: float = 20e-6
    compute_scale: float = 1.0
    gloo: bool = False
    replicas: int | None = None

    def seconds(self, nbytes: int, group: int, span: int) -> float:
        """Of a gather or reduction that leaves ``nbytes`` on (or takes them from) each of ``group`` ranks.

        ``span``: the first and the last of them are so many ranks apart.
        """
        if group == 1 or nbytes == 0:
            return 0.0
        bandwidth = self.intra_bandwidth if span <= self.ranks_per_node else self.inter_bandwidth
        return self.latency + nbytes * (group - 1) / group / bandwidth


@dataclass(frozen=True)
class _Group:
    """Parameters of a bucket that share buffers: what ``fully_shard`` planned together.

    ``mesh``: which one of the bucket's. ``part``: how many times smaller it is than the profile's largest; ``stride``:
    by how many ranks two neighbours on it differ. ``replicated``: HSDP.
    """

    specs: tuple[TensorSpec, ...]
    param_itemsize: int
    full_itemsize: int
    reduce_itemsize: int
    trainable: bool
    mesh: int
    part: int
    stride: int
    replicated: bool


@dataclass(frozen=True)
class Profile:
    """One recorded step: the buckets by name, and (action, bucket, parameter, seconds of computation before it).

    ``smaller``: of a bucket with a number as ``reshard_after_forward``, that number.
    """

    ranks: int
    replicas: int
    groups: dict[str, tuple[_Group, ...]]
    smaller: dict[str, int]
    actions: tuple[tuple[str, str, str, float], ...]
    tail: float

    @property
    def compute_seconds(self) -> float:
        return sum(seconds for *_, seconds in self.actions) + self.tail

    def shape(self, group: _Group, cluster: Cluster) -> tuple[int, int]:
        """(replicas, ranks that share them) of a group's parameters on ``cluster``."""
        replicas = self.replicas if cluster.replicas is None else cluster.replicas
        if not group.replicated and any(other.replicated for groups in self.groups.values() for other in groups):
            # Sharded over all ranks, beside others that are not.
            replicas = 1
        shards, rest = divmod(cluster.ranks, replicas * group.part)
        if rest or not shards:
            raise ValueError(
                f"{cluster.ranks} ranks cannot hold {replicas} replicas of parameters that are sharded over one "
                f"{group.part}th of the ranks; choose a multiple of {replicas * group.part}"
            )
        return replicas, shards


@dataclass(frozen=True)
class Prediction:
    """A step on ``cluster``. Bytes on one rank; ``collectives``: (what, bucket, bytes of the whole buffer), in
    order.
    """

    cluster: Cluster
    collectives: tuple[tuple[str, str, int], ...]
    parameter_bytes: int
    gradient_bytes: int
    buffer_bytes: int
    peak_buffer_bytes: int
    compute_seconds: float
    communication_seconds: float
    step_seconds: float

    @property
    def collective_bytes(self) -> int:
        return sum(nbytes for *_, nbytes in self.collectives)

    @property
    def exposed_seconds(self) -> float:
        """Communication that computation does not hide."""
        return self.step_seconds - self.compute_seconds

    def __str__(self) -> str:
        return "\n".join(
            [
                f"{self.cluster.ranks} ranks: {len(self.collectives)} collectives, "
                f"{self.collective_bytes / 2**20:.1f} MiB in them; on each rank "
                f"{self.parameter_bytes / 2**20:.2f} MiB of parameters, "
                f"{self.gradient_bytes / 2**20:.2f} MiB of gradients, {self.buffer_bytes / 2**20:.2f} MiB of buffers",
                f"step {self.step_seconds * 1e3:.2f} ms = computation {self.compute_seconds * 1e3:.2f} ms + exposed "
                f"communication {self.exposed_seconds * 1e3:.2f} ms (of {self.communication_seconds * 1e3:.2f} ms)",
                _assumptions(self.cluster),
            ]
        )


def _assumptions(cluster: Cluster) -> str:
    intra, inter = cluster.intra_bandwidth / 1e9, cluster.inter_bandwidth / 1e9
    return (
        f"assumed: computation as profiled / {cluster.compute_scale:g}; collectives {cluster.latency * 1e6:g} us + "
        f"bytes at {intra:g} GB/s within {cluster.ranks_per_node} ranks, {inter:g} GB/s beyond; gathers and reductions "
        f"each in order, beside computation; replicas lie whole nodes apart; no stragglers"
    )


def record(model: nn.Module, step: Callable[[], object]) -> Profile:
    """Run ``step`` (forward, backward and optimizer on ``model``) twice and keep what the second run did.

    Memory of the pool that is free in between is given back: afterwards it holds what such a step needs, and no more.

    Raises ``ValueError`` if no part of ``model`` is sharded, or parameters have all-gather extensions.
    """
    buckets = _buckets(model)
    step()
    pools = {id(b.pool): b.pool for b in buckets if b.pool is not None}
    if len(pools) != 1:
        raise ValueError("record needs one root: run the whole model in `step`")
    (pool,) = pools.values()
    pool.trim()
    pool.ledger.peak_in_use = pool.ledger.in_use
    pool.timeline = []
    pool.note("begin", "", "", 0)
    try:
        step()
        pool.note("end", "", "", 0)
        events = pool.timeline
    finally:
        pool.timeline = None
    actions, tail = _actions(events)
    meshes = [mesh for bucket in buckets for mesh in bucket.meshes]
    ranks = max(mesh.size() for mesh in meshes)
    replicas = max(mesh.size(0) if mesh.ndim == 2 else 1 for mesh in meshes)
    smaller = {b.name: b.post_forward_size for b in buckets if b.post_forward_size is not None}
    return Profile(ranks, replicas, {b.name: _groups(b, ranks) for b in buckets}, smaller, actions, tail)


def _buckets(model: nn.Module) -> list[Bucket]:
    states: dict[int, State] = {}
    for module in model.modules():
        if (state := state_of(module)) is not None:
            states[id(state)] = state
    buckets = [state.bucket for state in states.values() if state.bucket.buffers]
    if not buckets:
        raise ValueError(f"{type(model).__name__} has no fully_shard module; call fully_shard on it first")
    for bucket in buckets:
        if any(buffer.extended for buffer in bucket.buffers):
            raise ValueError(
                f"bucket {bucket.name!r} has parameters with fsdp_pre_all_gather: what these gather on another number "
                f"of ranks only they know"
            )
    return buckets


def _groups(bucket: Bucket, ranks: int) -> tuple[_Group, ...]:
    groups: dict[tuple[torch.dtype, DeviceMesh, bool], list[TensorSpec]] = {}
    for buffer in bucket.buffers:
        plan, dtype = buffer.layout.plan, buffer.params.dtype
        for (name, _), numel in zip(plan.starts, plan.numels, strict=True):
            spec = TensorSpec(name, numel, dtype.itemsize, plan.block(name))
            groups.setdefault((dtype, buffer.layout.mesh, buffer.trainable), []).append(spec)
    found = []
    for (dtype, mesh, trainable), specs in groups.items():
        full = bucket.param_dtype if bucket.param_dtype is not None and dtype.is_floating_point else dtype
        reduce = bucket.reduce_dtype or full
        neighbours = mesh.mesh.reshape(-1, mesh.size(mesh.ndim - 1))[0].tolist()
        found.append(
            _Group(
                specs=tuple(specs),
                param_itemsize=dtype.itemsize,
                full_itemsize=full.itemsize,
                reduce_itemsize=reduce.itemsize,
                trainable=trainable,
                mesh=bucket.meshes.index(mesh),
                part=ranks // mesh.size(),
                stride=neighbours[1] - neighbours[0] if len(neighbours) > 1 else 1,
                replicated=mesh.ndim == 2,
            )
        )
    return tuple(found)


_ACTIONS = (
    "unshard", "wait_gather", "gathered", "reshard", "keep", "drop", "gradient", "reduce", "wait_reduce", "reduced",
)  # fmt: skip
# Between these two the rank waits (and, for a reduction, adds what it received): communication, not computation.
_WAITS = {"gathered": "wait_gather", "reduced": "wait_reduce"}


def _actions(events: Sequence[Event]) -> tuple[tuple[tuple[str, str, str, float], ...], float]:
    kept = [e for e in events if e.action in _ACTIONS or e.action in ("begin", "end")]
    actions: list[tuple[str, str, str, float]] = []
    last = kept[0]
    for event in kept[1:]:
        seconds = 0.0 if _WAITS.get(event.action) == last.action else event.seconds - last.seconds
        if event.action == "end":
            return tuple(actions), seconds
        actions.append((event.action, event.owner, event.label, seconds))
        last = event
    raise AssertionError("unreachable: the last event is the end")


@dataclass(frozen=True)
class _Shape:
    """Over which ranks a buffer's parameters lie: ``shards`` in each of ``replicas``, ``span`` ranks apart in all."""

    replicas: int
    shards: int
    span: int


class _Gradients(NamedTuple):
    """A whole buffer of gradients, the bytes of a rank's chunk of it, those of its sharded gradient, and its mesh."""

    lease: Lease
    chunk: int
    shard: int
    shape: _Shape
    mesh: int


class _Replay:
    """One bucket's buffers for the new number of ranks: leases of a pool on the meta device, which hold no memory."""

    def __init__(self, name: str, profile: Profile, cluster: Cluster, pool: Pool) -> None:
        self.full: list[tuple[Lease, _Shape]] = []
        self.grads: list[_Gradients] = []
        # Between forward and backward, in groups of so many ranks.
        self.smaller = 0
        self.kept: list[Lease] = []
        self.scratch_bytes = 0
        self.scratch: Lease | None = None
        self.home: dict[str, int] = {}
        self.parameter_bytes = self.gradient_bytes = 0
        for group in profile.groups[name]:
            replicas, ranks = profile.shape(group, cluster)
            shape = _Shape(replicas, ranks, (ranks - 1) * group.stride + 1)
            smaller = profile.smaller.get(name, ranks)
            if smaller < ranks:
                if ranks % smaller:
                    raise ValueError(f"bucket {name!r}: {ranks} ranks have no groups of {smaller}")
                self.smaller = smaller
            for plan in plan_bucket(group.specs, ranks).buffers:
                numel = plan.shard * ranks
                self.parameter_bytes += plan.shard * group.param_itemsize
                self.full.append((_released(pool, numel * group.full_itemsize, "parameters", name), shape))
                if self.smaller:
                    self.kept.append(_released(pool, numel * group.full_itemsize // self.smaller, "parameters", name))
                if not group.trainable:
                    continue
                shard = plan.shard * group.param_itemsize
                self.gradient_bytes += shard
                self.home |= {tensor: len(self.grads) for tensor, _ in plan.starts}
                lease = _released(pool, numel * group.reduce_itemsize, "gradients", name)
                self.grads.append(_Gradients(lease, plan.shard * group.reduce_itemsize, shard, shape, group.mesh))
                if cluster.gloo:
                    received = plan.shard * (ranks - 1) * group.reduce_itemsize
                    self.scratch_bytes += -(-received // 128) * 128


def _released(pool: Pool, nbytes: int, label: str, owner: str) -> Lease:
    lease = pool.lease(nbytes, torch.uint8, label, owner)
    lease.release()
    return lease


def _release(leases: Sequence[Lease]) -> None:
    for lease in leases:
        lease.release()


def predict(profile: Profile, cluster: Cluster) -> Prediction:
    """The recorded step on ``cluster``."""
    pool = Pool(torch.device("meta"))
    replays = {name: _Replay(name, profile, cluster, pool) for name in profile.groups}
    pool.trim()
    pool.ledger.peak_in_use = 0

    collectives: list[tuple[str, str, int]] = []
    now = gather_free = reduce_free = busy = computed = 0.0
    arrives: dict[str, float] = {}
    lent: list[torch.UntypedStorage] = []
    for action, name, label, seconds in profile.actions:
        now += seconds / cluster.compute_scale
        computed += seconds / cluster.compute_scale
        bucket = replays[name]
        if action == "unshard":
            again = any(lease.held for lease in bucket.kept)
            for lease, shape in bucket.full:
                lease.acquire()
                nbytes = lease.tensor.numel()
                took = cluster.seconds(nbytes, *((bucket.smaller,) * 2 if again else (shape.shards, shape.span)))
                gather_free = max(now, gather_free) + took
                busy += took
                collectives.append(("all_gather", name, nbytes))
            arrives[name] = gather_free
            _release(bucket.kept)
        elif action == "gathered":
            now = max(now, arrives.get(name, now))
        elif action == "keep":
            for lease in bucket.kept:
                lease.acquire()
        elif action == "drop":
            _release(bucket.kept)
        elif action == "reshard":
            _release([lease for lease, _ in bucket.full])
        elif action == "gradient":
            bucket.grads[bucket.home[label]].lease.acquire()
        elif action == "reduce":
            if bucket.scratch_bytes:
                bucket.scratch = pool.scratch(bucket.scratch_bytes, name)
            for each in sorted(bucket.grads, key=lambda grads: grads.mesh):
                each.lease.acquire()
                nbytes, shape = each.lease.tensor.numel(), each.shape
                took = cluster.seconds(nbytes, shape.shards, shape.span)
                collectives.append(("reduce_scatter", name, nbytes))
                if shape.replicas > 1 and label != "carries":
                    # A reduction and a gather of the chunk.
                    took += 2 * cluster.seconds(each.chunk, shape.replicas, shape.replicas * shape.span)
                    collectives.append(("all_reduce", name, each.chunk))
                reduce_free = max(now, reduce_free) + took
                busy += took
            arrives["reduce " + name] = reduce_free
        elif action == "reduced":
            now = max(now, arrives.get("reduce " + name, now))
            for each in bucket.grads:
                if label == "stays":
                    lent.append(each.lease.lend())
                    bucket.gradient_bytes += each.lease.nbytes - each.shard
                each.lease.release()
            if bucket.scratch is not None:
                bucket.scratch.release()
    return Prediction(
        cluster=cluster,
        collectives=tuple(collectives),
        parameter_bytes=sum(r.parameter_bytes for r in replays.values()),
        gradient_bytes=sum(r.gradient_bytes for r in replays.values()),
        buffer_bytes=pool.ledger.held,
        peak_buffer_bytes=pool.ledger.peak_in_use,
        compute_seconds=computed + profile.tail / cluster.compute_scale,
        communication_seconds=busy,
        step_seconds=now + profile.tail / cluster.compute_scale,
    )


def scaling(profile: Profile, cluster: Cluster, ranks: Sequence[int]) -> str:
    """A table of weak scaling (each rank computes as in the profile) and strong scaling (all together as in it)."""
    header = ("ranks", "collectives", "MiB moved", "buffers MiB", "weak ms", "efficiency", "strong ms", "speed-up")
    rows: list[tuple[str, ...]] = [header]
    for weak, strong in _both(profile, cluster, ranks):
        rows.append(
            (
                f"{weak.cluster.ranks:,}",
                str(len(weak.collectives)),
                f"{weak.collective_bytes / 2**20:.1f}",
                f"{weak.buffer_bytes / 2**20:.1f}",
                f"{weak.step_seconds * 1e3:.2f}",
                f"{weak.compute_seconds / weak.step_seconds:.1%}",
                f"{strong.step_seconds * 1e3:.2f}",
                f"{profile.compute_seconds / cluster.compute_scale / strong.step_seconds:.2f}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([*lines, _assumptions(cluster), f"speed-up: over {_ranks(profile)} without communication"])


def _ranks(profile: Profile) -> str:
    return "1 rank" if profile.ranks == 1 else f"{profile.ranks} ranks"


def _both(profile: Profile, cluster: Cluster, ranks: Sequence[int]) -> list[tuple[Prediction, Prediction]]:
    found = []
    for count in ranks:
        weak = replace(cluster, ranks=count)
        strong = replace(weak, compute_scale=cluster.compute_scale * count / profile.ranks)
        found.append((predict(profile, weak), predict(profile, strong)))
    return found


def plot(profile: Profile, cluster: Cluster, ranks: Sequence[int], path: str | Path) -> None:
    """Draw predicted weak and strong scaling to ``path`` (needs matplotlib: the ``train`` extra)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pairs = _both(profile, cluster, ranks)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    computation = [weak.compute_seconds * 1e3 for weak, _ in pairs]
    exposed = [weak.exposed_seconds * 1e3 for weak, _ in pairs]
    labels = [f"{count:,}" for count in ranks]
    left.bar(labels, computation, label="computation", color="#4c72b0")
    left.bar(labels, exposed, bottom=computation, label="exposed communication", color="#dd8452")
    left.set(xlabel="ranks", ylabel="ms per step", title="weak scaling: the same work on each rank")
    left.margins(y=0.25)  # room for the legend
    left.legend(loc="upper left")
    base = profile.compute_seconds / cluster.compute_scale
    right.loglog(ranks, [base / strong.step_seconds for _, strong in pairs], "o-", label="predicted", color="#4c72b0")
    right.loglog(ranks, [count / profile.ranks for count in ranks], "--", label="ideal", color="grey")
    right.set(xlabel="ranks", ylabel=f"speed-up over {_ranks(profile)}", title="strong scaling: the same work in all")
    right.legend()
    figure.suptitle(_assumptions(cluster).replace("; ", "\n", 1), fontsize=7)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
