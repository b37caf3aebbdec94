"""fully_shard trains as DDP does: losses, gradients and parameters, step by step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fsdp import MixedPrecisionPolicy, fully_shard
from ragged_shard import Block, ParamPolicy
from tests import cluster
from tests.models import LanguageModel, loss_of, tokens

VOCABULARY = 19


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def block_policy(block: Block | None) -> Any:
    return None if block is None else lambda name, parameter: ParamPolicy(block=block)


def shard(model: LanguageModel, policy: Any = None, wrap: str = "blocks", **options: Any) -> LanguageModel:
    if wrap != "root":
        for block in model.blocks:
            fully_shard(block, orig_param_policy=policy, **options)
    if wrap == "list":
        fully_shard([model.norm, model.head], orig_param_policy=policy, **options)
    return fully_shard(model, orig_param_policy=policy, **options)


def train_against_ddp(
    *,
    tied: bool = False,
    depth: int = 2,
    block: Block | None = None,
    wrap: str = "blocks",
    reshard_after_forward: bool | None = None,
    steps: int = 3,
    micro_batches: int = 1,
    synchronise_each: bool = False,
    frozen: tuple[str, ...] = (),
    clip: float | None = None,
) -> tuple[float, float]:
    """The largest differences of losses and of parameters from DDP's, on this rank."""
    torch.manual_seed(3)
    rank = dist.get_rank()
    reference = LanguageModel(VOCABULARY, depth=depth, tied=tied)
    for name, parameter in reference.named_parameters():
        parameter.requires_grad_(not name.endswith(frozen) if frozen else True)
    model = shard(copy.deepcopy(reference), block_policy(block), wrap, reshard_after_forward=reshard_after_forward)
    ddp = DistributedDataParallel(reference)
    optimizers = [torch.optim.AdamW((p for p in m.parameters() if p.requires_grad), lr=1e-2) for m in (ddp, model)]
    off = []
    for step in range(steps):
        losses = []
        for module, optimizer in zip((ddp, model), optimizers, strict=True):
            for micro in range(micro_batches):
                last = micro == micro_batches - 1
                data = tokens(VOCABULARY, rank, step * micro_batches + micro)
                if module is ddp:
                    module.require_backward_grad_sync = last or synchronise_each
                else:
                    model.set_requires_gradient_sync(last or synchronise_each)
                loss = loss_of(module, data)
                loss.backward()
                losses.append(loss.detach())
            if clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
        half = len(losses) // 2
        off += [(a - b).abs() for a, b in zip(losses[:half], losses[half:], strict=True)]
    ours = dict(model.named_parameters())
    theirs = dict(reference.named_parameters())
    assert ours.keys() == theirs.keys()
    worst = [(full(ours[n].detach()) - theirs[n].detach()).abs().max() for n in theirs]
    # Python's max passes by a nan.
    return torch.stack(off).max().item(), torch.stack(worst).max().item()


@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
@pytest.mark.parametrize("wrap", ["blocks", "root", "list"])
def test_bit_identical_to_ddp_on_two_ranks(wrap: str, reshard_after_forward: bool | None) -> None:
    for loss, parameters in cluster.run(
        2, train_against_ddp, wrap=wrap, reshard_after_forward=reshard_after_forward, block=Block.rows(3)
    ):
        assert (loss, parameters) == (0.0, 0.0)


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_equal_to_ddp_up_to_summation_order(world_size: int) -> None:
    for loss, parameters in cluster.run(world_size, train_against_ddp, tied=True, block=Block.rows(2)):
        assert loss < 1e-5 and parameters < 1e-5


def test_accumulates_without_communication_bit_identically() -> None:
    for result in cluster.run(2, train_against_ddp, micro_batches=3):
        assert result == (0.0, 0.0)


def test_accumulates_reduced_gradients() -> None:
    for loss, parameters in cluster.run(2, train_against_ddp, micro_batches=3, synchronise_each=True):
        assert loss < 1e-5 and parameters < 1e-5


def test_clips_as_ddp_does() -> None:
    for loss, parameters in cluster.run(3, train_against_ddp, clip=0.1):
        assert loss < 1e-5 and parameters < 1e-5


def test_frozen_parameters_stay_and_do_not_release_weights_too_early() -> None:
    """A frozen weight at the start of a block is needed by backward after every gradient of the block has come."""
    for result in cluster.run(2, train_against_ddp, frozen=("up.weight", "norm.weight", "norm.bias")):
        assert result == (0.0, 0.0)


@given(
    world_size=st.sampled_from([1, 2, 3, 4]),
    tied=st.booleans(),
    depth=st.integers(0, 3),
    block=st.one_of(
        st.none(),
        st.builds(Block.elements, st.integers(1, 40)),
        st.builds(Block.rows, st.integers(1, 20)),
        st.builds(Block.tile, st.integers(1, 20), st.integers(1, 20)),
        st.just(Block.whole()),
    ),
    wrap=st.sampled_from(["blocks", "root"]),
    reshard_after_forward=st.sampled_from([None, True, False]),
    steps=st.integers(1, 3),
    micro_batches=st.integers(1, 2),
)
def test_any_model_blocks_and_steps(world_size: int, **case: Any) -> None:
    for loss, parameters in cluster.run(world_size, train_against_ddp, **case):
        assert loss < 1e-5 and parameters < 1e-5


def train_in_low_precision(
    param_dtype: torch.dtype, reduce_dtype: torch.dtype | None
) -> tuple[list[float], list[float], set]:
    """Losses of ours and of torch's fully_shard under one mixed-precision policy, and the dtypes of our gradients."""
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    torch.manual_seed(3)
    source = LanguageModel(VOCABULARY)
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    root_policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, output_dtype=torch.float32)
    losses, dtypes = [], set()
    for wrap in (fully_shard, torch_fully_shard):
        model = copy.deepcopy(source)
        if wrap is torch_fully_shard:  # which refuses 0-d parameters
            for b in model.blocks:
                b.gate = nn.Parameter(b.gate.detach().view(1))
        for b in model.blocks:
            wrap(b, mp_policy=policy)
        wrap(model, mp_policy=root_policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        mine = []
        for step in range(4):
            loss = loss_of(model, tokens(VOCABULARY, dist.get_rank(), step))
            loss.backward()
            if wrap is fully_shard:
                dtypes |= {p.grad.dtype for p in model.parameters()}
            optimizer.step()
            optimizer.zero_grad()
            mine.append(loss.item())
        losses.append(mine)
    return losses[0], losses[1], dtypes


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
def test_mixed_precision_trains_as_fsdp2(reduce_dtype: torch.dtype | None) -> None:
    for ours, theirs, dtypes in cluster.run(2, train_in_low_precision, torch.bfloat16, reduce_dtype):
        assert dtypes == {torch.float32}
        assert ours == pytest.approx(theirs, rel=0 if reduce_dtype is torch.float32 else 1e-2)
