"""A bucket whose plan has several flat buffers trains like any other, also with the collectives that NCCL runs.

Those run here on gloo, which has them too (it stages another buffer for each, so they are not what it uses by itself).
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

from fsdp import fully_shard
from fsdp.hooks import state_of
from ragged_shard import Block, ParamPolicy, collectives
from tests import cluster
from tests.models import LanguageModel, loss_of, tokens


def train(as_on_nccl: bool) -> tuple[float, list[int], dict[str, int]]:
    """The largest difference from one process, the buffers of each bucket, and the collectives that were issued."""
    torch.manual_seed(3)
    # Of these shapes and blocks, four ranks save padding by two buffers a block.
    reference = LanguageModel(width=48, hidden=112, depth=2)
    model = copy.deepcopy(reference)
    calls: dict[str, int] = {}

    def counted(name: str):
        original = getattr(dist.ProcessGroup, name)

        def method(*args, **kwargs):
            calls[name] = calls.get(name, 0) + 1
            return original(*args, **kwargs)

        return original, method

    names = [n for n in dir(dist.ProcessGroup) if n.endswith("_coalesced")]
    originals = {}
    is_gloo = collectives.is_gloo
    try:
        if as_on_nccl:
            collectives.is_gloo = lambda group, tensor: False
            for name in names:
                originals[name], method = counted(name)
                setattr(dist.ProcessGroup, name, method)
        for block in model.blocks:
            fully_shard(block, orig_param_policy=lambda name, parameter: ParamPolicy(block=Block.rows(16)))
        fully_shard(model)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (reference, model)]
        world = dist.get_world_size()
        for step in range(3):
            (sum(loss_of(reference, tokens(19, rank, step)) for rank in range(world)) / world).backward()
            loss_of(model, tokens(19, dist.get_rank(), step)).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    finally:
        collectives.is_gloo = is_gloo
        for name, original in originals.items():
            setattr(dist.ProcessGroup, name, original)
    theirs = dict(reference.named_parameters())
    off = [(p.detach().full_tensor() - theirs[n].detach()).abs().max() for n, p in model.named_parameters()]
    worst = torch.stack(off).max().item()  # Python's max passes by a nan
    state = state_of(model)
    assert state is not None and state.schedule is not None
    return worst, [len(bucket.buffers) for bucket in state.schedule.buckets], calls


@pytest.mark.parametrize("as_on_nccl", [False, True])
def test_several_buffers_train_like_one_process(as_on_nccl: bool) -> None:
    for worst, buffers, calls in cluster.run(4, train, as_on_nccl):
        assert worst < 1e-5
        assert max(buffers) > 1
        if as_on_nccl:
            # Of three buckets, those with several buffers issue one collective for all of them.
            several = sum(count > 1 for count in buffers)
            gathers = sum(n for name, n in calls.items() if "gather" in name)
            reductions = sum(n for name, n in calls.items() if "reduce_scatter" in name)
            assert reductions == 3 * several and gathers >= 3 * several
