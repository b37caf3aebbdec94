"""The prediction for n ranks, from a profile of any number of ranks, equals what n ranks count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

from fsdp import MixedPrecisionPolicy, fully_shard, memory_report
from fsdp.hooks import state_of
from fsdp.simulate import Cluster, Profile, plot, predict, record, scaling
from ragged_shard import Block, ParamPolicy
from tests import cluster
from tests.models import LanguageModel, loss_of, tokens

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")


def meshes(kind: str, block: int) -> dict[str, Any]:
    """What ``fully_shard`` is told of the meshes of a block (-1: the root)."""
    ranks = dist.get_world_size()
    if "replicas" in kind and block != 2:
        return {"mesh": cluster.mesh((2, ranks // 2), ("replicate", "shard"))}
    if kind == "experts":
        experts = cluster.mesh((ranks // 2, 2), ("dp", "ep"))["dp"]
        if block == 1:
            return {"mesh": experts}
        apart = ShardPlacementResult(None, FSDPMeshInfo(experts, 0))
        return {"shard_placement_fn": lambda p: apart if block == 2 and p.shape == (24, 70) else None}
    return {"mesh": cluster.mesh((ranks,))}


def profile_and_counts(
    reshard_after_forward: bool | int | None, mixed: bool, kind: str = "plain"
) -> tuple[Profile, dict[str, Any]]:
    """A profile of this many ranks, and what they really did in one step after it."""
    torch.manual_seed(0)
    model = LanguageModel(width=24, hidden=70, depth=4)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
    options: dict[str, Any] = {
        "orig_param_policy": lambda name, parameter: ParamPolicy(block=Block.rows(3)),
        "reshard_after_forward": reshard_after_forward,
        "mp_policy": policy,
    }
    for index, block in enumerate(model.blocks):
        fully_shard(block, **options, **meshes(kind, index))
    fully_shard(model, **options, **meshes(kind, -1))
    optimizer = torch.optim.AdamW(model.parameters())

    gradients = 0

    def step() -> None:
        nonlocal gradients
        if "late" in kind:
            model.set_requires_all_reduce(False)
            loss_of(model, tokens(19, dist.get_rank(), 1)).backward()
            model.set_requires_all_reduce(True)
        loss_of(model, tokens(19, dist.get_rank(), 0)).backward()
        optimizer.step()
        gradients = memory_report(model).gradients
        optimizer.zero_grad()

    profile = record(model, step)
    state = state_of(model)
    assert state is not None and state.schedule is not None
    pool = state.schedule.pool
    # The first steps of a schedule hold at most what later ones do; count a pool that has only seen this one.
    pool.trim()
    pool.ledger.peak_in_use = pool.ledger.in_use
    pool.timeline = []
    step()
    events, pool.timeline = pool.timeline, None
    buckets = state.schedule.buckets
    counted = {
        "collectives": [(e.action, e.owner, e.nbytes) for e in events if e.action in COLLECTIVES],
        "parameters": sum(b.live_bytes()["parameters"] for b in buckets),
        "gradients": gradients,
        "held": pool.ledger.held,
        "peak": pool.ledger.peak_in_use,
    }
    return profile, counted


@pytest.mark.parametrize(("reshard_after_forward", "mixed"), [(None, False), (True, True), (False, False)])
def test_predictions_equal_counts_for_every_pair_of_world_sizes(
    reshard_after_forward: bool | None, mixed: bool
) -> None:
    found = {n: cluster.run(n, profile_and_counts, reshard_after_forward, mixed)[0] for n in (1, 2, 3, 4)}
    for profiled in found:
        for ranks, (_, counted) in found.items():
            assert equal(found[profiled][0], Cluster(ranks=ranks, gloo=True), counted)


def equal(profile: Profile, cluster: Cluster, counted: dict[str, Any]) -> bool:
    prediction = predict(profile, cluster)
    assert list(prediction.collectives) == counted["collectives"]
    assert prediction.parameter_bytes == counted["parameters"]
    assert prediction.gradient_bytes == counted["gradients"]
    assert prediction.buffer_bytes == counted["held"]
    assert prediction.peak_buffer_bytes == counted["peak"]
    return True


def several_kinds() -> dict[str, tuple[Profile, dict[str, Any]]]:
    """Replicas, some with a block without and some reduced over late; smaller groups; experts on a mesh of their own,
    as a bucket and within one.
    """
    return {
        "plain": profile_and_counts(True, True),
        "replicas": profile_and_counts(True, True, "replicas"),
        "replicas, late": profile_and_counts(None, False, "replicas, late"),
        "smaller": profile_and_counts(2, False),
        "experts": profile_and_counts(True, False, "experts"),
    }


def test_predictions_of_replicas_smaller_groups_and_experts() -> None:
    found = {ranks: cluster.run(ranks, several_kinds)[0] for ranks in (2, 4)}
    assert any(what == "all_reduce" for what, *_ in found[4]["replicas"][1]["collectives"])
    for profiled in found:
        for kind, (profile, _) in found[profiled].items():
            for ranks in found:
                assert equal(profile, Cluster(ranks=ranks, gloo=True), found[ranks][kind][1]), (kind, profiled, ranks)
    # A profile without replicas has none that one block is without.
    plain, replicas = found[2]["plain"], found[4]["replicas"]
    assert predict(plain[0], Cluster(ranks=4, replicas=2)).collectives != replicas[1]["collectives"]
    assert predict(replicas[0], Cluster(ranks=4, replicas=1)).collectives == tuple(found[4]["plain"][1]["collectives"])
    with pytest.raises(ValueError, match="choose a multiple of 2"):
        predict(found[4]["experts"][0], Cluster(ranks=5))
    with pytest.raises(ValueError, match="no groups of 2"):
        predict(found[4]["smaller"][0], Cluster(ranks=5))


def test_times_obey_the_model_and_reports_name_its_assumptions(tmp_path: Any) -> None:
    profile = cluster.run(2, profile_and_counts, True, False)[0][0]
    free = predict(profile, Cluster(ranks=64, intra_bandwidth=1e30, inter_bandwidth=1e30, latency=0.0))
    assert free.exposed_seconds == pytest.approx(0.0, abs=1e-9)
    slow = predict(profile, Cluster(ranks=64, inter_bandwidth=1e3))
    assert slow.step_seconds > slow.compute_seconds
    assert slow.step_seconds <= slow.compute_seconds + slow.communication_seconds + 1e-9
    table = scaling(profile, Cluster(ranks=8), [8, 64, 512])
    assert "assumed:" in table and "512" in table
    plot(profile, Cluster(ranks=8), [8, 64, 512], tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").stat().st_size > 10_000


def test_recording_an_unsharded_model_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="call fully_shard on it first"):
        record(LanguageModel(), lambda: None)
