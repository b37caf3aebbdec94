"""The prediction for n ranks, from a profile of any number of ranks, equals what n ranks count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp import MixedPrecisionPolicy, fully_shard, memory_report
from fsdp.hooks import state_of
from fsdp.simulate import Cluster, Profile, plot, predict, record, scaling
from ragged_shard import Block, ParamPolicy
from tests import cluster
from tests.models import LanguageModel, loss_of, tokens


def profile_and_counts(reshard_after_forward: bool | None, mixed: bool) -> tuple[Profile, dict[str, Any]]:
    """A profile of this many ranks, and what they really did in one step after it."""
    torch.manual_seed(0)
    model = LanguageModel(width=24, hidden=70, depth=4)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
    options: dict[str, Any] = {
        "orig_param_policy": lambda name, parameter: ParamPolicy(block=Block.rows(3)),
        "reshard_after_forward": reshard_after_forward,
        "mp_policy": policy,
    }
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters())

    gradients = 0

    def step() -> None:
        nonlocal gradients
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
        "collectives": [(e.action, e.owner, e.nbytes) for e in events if e.action in ("all_gather", "reduce_scatter")],
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
            prediction = predict(found[profiled][0], Cluster(ranks=ranks, gloo=True))
            assert list(prediction.collectives) == counted["collectives"]
            assert prediction.parameter_bytes == counted["parameters"]
            assert prediction.gradient_bytes == counted["gradients"]
            assert prediction.buffer_bytes == counted["held"]
            assert prediction.peak_buffer_bytes == counted["peak"]


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
