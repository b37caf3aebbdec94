"""AdamW8bit(format="bitsandbytes"): the library's own blocks, kernels and states, on shards cut between its blocks."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import ragged_optim
from ragged_optim import Block, ParamPolicy, convert
from ragged_optim.kernels import bitsandbytes as library
from tests import cluster
from tests.ragged_optim.models import full, shard, train

SHAPES = [(96, 100), (3, 50, 40), (5000,), (17, 31), (0, 5)]
needs_library = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None,
    reason='bitsandbytes is not installed: pip install "ragged-optim[bitsandbytes]"',
)


def theirs(params: Any, name: str = "AdamW8bit", **options: Any) -> Any:
    import bitsandbytes

    return getattr(bitsandbytes.optim, name)(params, **options)


def gradients(params: list[nn.Parameter], step: int) -> None:
    for i, param in enumerate(params):
        param.grad = full(param.shape, 100 * step + i, param.dtype)


@needs_library
@pytest.mark.parametrize("name", ["AdamW8bit", "Adam8bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_library_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    a, b = ([nn.Parameter(full(shape, i, dtype)) for i, shape in enumerate(SHAPES)] for _ in range(2))
    options = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1 if name == "AdamW8bit" else 0.0}
    ours = getattr(ragged_optim, name)(a, format="bitsandbytes", **options)
    other = theirs(b, name, **options)
    for step in range(4):
        gradients(a, step)
        gradients(b, step)
        ours.step()
        other.step()
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert torch.equal(ours.state[a[0]]["exp_avg_sq.codes"], other.state[b[0]]["state2"])
    assert torch.equal(ours.state[a[0]]["exp_avg_sq.scales"], other.state[b[0]]["absmax2"])


@needs_library
def test_cuts_between_blocks_change_nothing_for_worlds_2_to_4() -> None:
    expected = train(ragged_optim.AdamW8bit, SHAPES, format="bitsandbytes")
    for world in (2, 3, 4):
        for got in cluster.run(world, blocks, SHAPES):
            assert got == expected, world


def blocks(shapes: list[tuple[int, ...]]) -> dict[str, list[str]]:
    return train(ragged_optim.AdamW8bit, shapes, "ragged256", format="bitsandbytes")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(48, 190), nn.Linear(190, 24, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))).square().mean()


def block_of_256(name: str, parameter: Tensor) -> ParamPolicy:
    return ParamPolicy(block=Block.elements(256))


def under(runtime: str) -> list[Tensor]:
    """Parameters after some steps, each rank with its own half of every batch."""
    model: nn.Module = Model()
    rank = torch.distributed.get_rank()
    options = {"lr": 0.01, "weight_decay": 0.1}
    if runtime == "ddp":
        model = DistributedDataParallel(model)
        optimizer = theirs(model.parameters(), **options)
    else:
        from fsdp import fully_shard

        fully_shard(model, mesh=cluster.mesh((2,)), orig_param_policy=block_of_256)
        optimizer = ragged_optim.AdamW8bit(model.named_parameters(), format="bitsandbytes", **options)
        assert any(p.to_local().numel() not in (0, p.numel()) for p in model.parameters())
    for step in range(4):
        optimizer.zero_grad()
        model(full((8, 48), 10 * step + rank)).backward()
        optimizer.step()
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach() for p in model.parameters()]


@needs_library
def test_equals_the_library_under_ddp() -> None:
    # The mean of two gradients does not depend on their order: not a bit may differ.
    (expected, _), (got, other) = cluster.run(2, under, "ddp"), cluster.run(2, under, "fsdp")
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(expected, other, strict=True))


@needs_library
def test_states_go_both_ways_without_a_change() -> None:
    a, b, c = ([nn.Parameter(full(shape, i)) for i, shape in enumerate(SHAPES[:4])] for _ in range(3))
    first, ours, last = (
        theirs(a, lr=0.01),
        ragged_optim.AdamW8bit(b, lr=0.01, format="bitsandbytes"),
        theirs(c, lr=0.01),
    )
    for step in range(3):
        gradients(a, step)
        first.step()
    for x, y in zip(a, b, strict=True):
        y.data.copy_(x)
    ours.load_state_dict(convert.from_bitsandbytes(first.state_dict(), ours))
    for step in range(3, 5):
        for params, optimizer in ((a, first), (b, ours)):
            gradients(params, step)
            optimizer.step()
    for x, y in zip(b, c, strict=True):
        y.data.copy_(x)
    last.load_state_dict(convert.to_bitsandbytes(ours, last))
    for params, optimizer in ((a, first), (c, last)):
        gradients(params, 5)
        optimizer.step()
    assert all(torch.equal(x, y) for x, y in zip(a, c, strict=True))


@needs_library
@pytest.mark.parametrize("format", ["float", "dynamic", "fp32"])
def test_states_of_other_formats_continue_in_the_library(format: str) -> None:
    a, b = ([nn.Parameter(full(shape, i)) for i, shape in enumerate(SHAPES[:4])] for _ in range(2))
    ours = ragged_optim.AdamW(a, lr=0.01) if format == "fp32" else ragged_optim.AdamW8bit(a, lr=0.01, format=format)
    other = theirs(b, lr=0.01)
    for step in range(5):
        gradients(a, step)
        ours.step()
    for x, y in zip(a, b, strict=True):
        y.data.copy_(x)
    other.load_state_dict(convert.to_bitsandbytes(ours, other))
    before = [x.detach().clone() for x in a]
    for params, optimizer in ((a, ours), (b, other)):
        gradients(params, 5)
        optimizer.step()
    for x, y, old in zip(a, b, before, strict=True):
        assert (x - y).norm() < 0.15 * (x - old).norm()


@needs_library
def test_to_bitsandbytes_refuses_what_the_library_cannot_take() -> None:
    matrix = nn.Parameter(full((64, 96), 0))
    muon = ragged_optim.Muon([("up.weight", matrix)])
    with pytest.raises(ValueError, match=r"parameter 'up.weight' is updated by muon, which is none of bitsandbytes'"):
        convert.to_bitsandbytes(muon, theirs([matrix]))
    with pytest.raises(ValueError, match="the target has 2 parameters, this optimizer 1"):
        convert.to_bitsandbytes(muon, theirs([matrix, nn.Parameter(torch.zeros(3))]))


def test_without_the_library_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    monkeypatch.setattr(library, "library", library.library.__wrapped__)
    with pytest.raises(ImportError, match=r'pip install "ragged-optim\[bitsandbytes\]"'):
        ragged_optim.AdamW8bit([nn.Parameter(torch.zeros(64, 64))], format="bitsandbytes")


@pytest.mark.parametrize("option", ["bf16_stochastic_round", "skip_nonfinite"])
def test_what_the_library_cannot_do_is_refused(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} cannot be had with format='bitsandbytes'"):
        ragged_optim.AdamW8bit([nn.Parameter(torch.zeros(64, 64))], format="bitsandbytes", **{option: True})


def cut() -> str:
    param = nn.Parameter(shard(full((96, 100), 0), "ragged7", cluster.mesh((2,)), 1))
    try:
        ragged_optim.AdamW8bit([("w", param)], format="bitsandbytes")
    except ValueError as error:
        return str(error)
    return ""


@needs_library
def test_a_cut_block_is_refused_with_the_block_to_ask_for() -> None:
    first, second = cluster.run(2, cut)
    assert first == second and "ParamPolicy(block=Block.elements(256))" in first
