"""What users of other 8-bit optimizers ran into, a test for each symptom."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim import lr_scheduler

import ragged_optim
from ragged_optim import Block, ParamPolicy, policies
from tests import cluster
from tests.ragged_optim.models import digest, full, shard

FORMATS = ("float", "dynamic")
CODES = {"exp_avg.codes", "exp_avg.scales", "exp_avg_sq.codes", "exp_avg_sq.scales"}


def stepped(optimizer: Any, params: list[nn.Parameter], steps: range, dtype: torch.dtype | None = None) -> None:
    for step in steps:
        for i, param in enumerate(params):
            param.grad = full(param.shape, 10 * step + i, dtype or param.dtype)
        optimizer.step()


def is_8bit(optimizer: Any, param: Tensor) -> bool:
    return set(optimizer.state[param]) >= CODES


# ---- which parameters are kept in 8 bits ---------------------------------------------------------------------------


def kinds(mesh_shape: tuple[int, ...]) -> list[bool]:
    # 5120 elements and 4064: every shard of both is smaller than 4096.
    params = [nn.Parameter(shard(full(s, 0), "tiles", cluster.mesh(mesh_shape), 3)) for s in ((160, 32), (127, 32))]
    optimizer = ragged_optim.AdamW8bit(params)
    return [is_8bit(optimizer, p) for p in params]


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)])
def test_the_precision_of_a_state_depends_on_the_mesh(mesh_shape: tuple[int, ...]) -> None:
    """pytorch/ao#4912: with FSDP the local size decided, so ranks differed; here the global one does, everywhere."""
    assert cluster.run(4, kinds, mesh_shape) == [[True, False]] * 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 40)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))).square().mean()


def precision_by_name(wrapped: bool) -> dict[str, bool]:
    from fsdp import fully_shard

    model = Model()
    if wrapped:
        fully_shard(model, mesh=cluster.mesh((2,)), orig_param_policy=policies.adamw8bit())
    optimizer = ragged_optim.AdamW8bit(model.named_parameters(), min_8bit_size=4000)
    return {name: is_8bit(optimizer, p) for name, p in model.named_parameters()}


def test_wrapping_with_fsdp_flips_parameters_between_8_bit_and_fp32() -> None:
    """bitsandbytes-foundation/bitsandbytes#2080: the same decision for each original parameter, wrapped or not."""
    plain = precision_by_name(False)
    assert plain == {"up.weight": True, "up.bias": False, "down.weight": False, "down.bias": False}
    assert cluster.run(2, precision_by_name, True) == [plain] * 2


def test_an_override_for_one_parameter_is_dead() -> None:
    """bitsandbytes-foundation/bitsandbytes#1269: a policy's override is seen in the dtype of the state."""
    pairs = [(name, nn.Parameter(torch.zeros(64, 64))) for name in ("exempt", "usual")]

    def policy(name: str, parameter: Tensor) -> ParamPolicy | None:
        return ParamPolicy(min_8bit_size=10**9) if name == "exempt" else None

    optimizer = ragged_optim.AdamW8bit(pairs, orig_param_policy=policy)
    dtypes = [{optimizer.state[p][key].dtype for key in optimizer.state[p] if "exp" in key} for _, p in pairs]
    assert dtypes == [{torch.float32}, {torch.uint8, torch.float32}]


@pytest.mark.parametrize("name", ["AdamW8bit", "Adam8bit"])
def test_unsupported_arguments_are_silently_ignored(name: str) -> None:
    """bitsandbytes-foundation/bitsandbytes#1261: amsgrad and optim_bits were taken and did nothing."""
    make: Any = getattr(ragged_optim, name)
    param = nn.Parameter(torch.zeros(64, 64))
    for key in ("amsgrad", "optim_bits", "is_paged", "percentile_clipping"):
        with pytest.raises(TypeError, match=key):
            make([param], **{key: 8})
        with pytest.raises(ValueError, match=f"unknown hyperparameter '{key}'"):
            make([{"params": [param], key: 8}])


SIGNATURE = (
    "params, lr, betas, eps, weight_decay, format, tile, min_8bit_size, bf16_stochastic_round, skip_nonfinite, seed, "
    "maximize, orig_param_policy"
)


@pytest.mark.parametrize("name", ["AdamW8bit", "Adam8bit"])
def test_constructor_arguments_vanish_in_a_new_version(name: str) -> None:
    """Nerogar/OneTrainer#1708, #1519: what stands here may grow, but nothing may be taken away or reordered."""
    assert ", ".join(inspect.signature(getattr(ragged_optim, name)).parameters) == SIGNATURE


# ---- states -------------------------------------------------------------------------------------------------------


def reshard(path: str, load: bool, layout: str, seed: int, steps: range, dtype: torch.dtype) -> list[Any]:
    mesh = cluster.mesh((dist.get_world_size(),))
    shapes = [(96, 100), (3, 50, 8), (5000,)]
    params = [nn.Parameter(shard(full(s, i, dtype), layout, mesh, seed + i)) for i, s in enumerate(shapes)]
    optimizer = ragged_optim.AdamW8bit(
        [(f"{i}.weight", p) for i, p in enumerate(params)], min_8bit_size=256, bf16_stochastic_round=True
    )
    saved = {f"p{i}": p for i, p in enumerate(params)}
    saved |= {f"{i}.{key}": value for i, p in enumerate(params) for key, value in optimizer.state[p].items()}
    if load:
        dcp.load(saved, checkpoint_id=path)
        for i, p in enumerate(params):
            for key in optimizer.state[p]:
                optimizer.state[p][key] = saved[f"{i}.{key}"]
    for step in steps:
        for i, (p, s) in enumerate(zip(params, shapes, strict=True)):
            p.grad = shard(full(s, 100 * step + i, dtype), layout, mesh, seed + i)
        optimizer.step()
    if not load:
        dcp.save(saved, checkpoint_id=path)
    return [[digest(p), *(digest(v) for _, v in sorted(optimizer.state[p].items()))] for p in params]


@pytest.mark.parametrize(("dtype", "saving", "loading"), [(torch.float32, 2, 3), (torch.bfloat16, 4, 1)])
def test_8_bit_states_cannot_be_gathered_or_saved_under_fsdp(
    dtype: torch.dtype, saving: int, loading: int, tmp_path: Path
) -> None:
    """bitsandbytes-foundation/bitsandbytes#89, #1403, #1732, #1840: saved with plain DCP, loaded by other ranks, every
    later update and state is bit-equal.
    """
    path = str(tmp_path / "checkpoint")
    (expected,) = cluster.run(1, reshard, str(tmp_path / "unused"), False, "tiles", 0, range(4), dtype)
    cluster.run(saving, reshard, path, False, "tiles", 0, range(2), dtype)
    for got in cluster.run(loading, reshard, path, True, "tiles", 11, range(2, 4), dtype):
        assert got == expected


def placements_and_sizes() -> list[bool]:
    param = nn.Parameter(shard(full((96, 100), 0), "tiles", cluster.mesh((2,)), 1))
    state = ragged_optim.AdamW8bit([param]).state[param]
    assert isinstance(param, DTensor)
    return [
        isinstance(state[key], DTensor)
        and state[key].shape == param.shape
        and state[key].placements == param.placements
        and state[key].to_local().numel() == param.to_local().numel()
        for key in ("exp_avg.codes", "exp_avg_sq.codes")
    ]


def test_states_are_made_with_the_global_shape_instead_of_the_shard() -> None:
    """NVIDIA/TransformerEngine#2424, #2795: states are DTensors that lie like the parameter."""
    assert cluster.run(2, placements_and_sizes) == [[True, True]] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", FORMATS)
def test_loading_an_8_bit_state_meets_a_dtype_mismatch(format: str, dtype: torch.dtype) -> None:
    """pytorch/ao#3314: torch's own load_state_dict casts every state to the parameter's dtype, codes too."""
    params = [nn.Parameter(full((96, 64), 0, dtype)), nn.Parameter(full((7,), 1, dtype))]
    optimizer = ragged_optim.AdamW8bit(params, format=format)
    stepped(optimizer, params, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    again = ragged_optim.AdamW8bit(params, format=format)
    again.load_state_dict(saved)
    for param in params:
        for key, value in again.state[param].items():
            expected = torch.uint8 if "codes" in key else torch.int64 if key == "salt" else torch.float32
            assert value.dtype == expected, key
            assert torch.equal(value, optimizer.state[param][key])


def test_a_resumed_run_differs_from_an_uninterrupted_one() -> None:
    """pytorch/pytorch#43706, pytorch/torchtitan#4615: moments of bf16 parameters lost their precision on resume."""
    ends = []
    for interrupted in (False, True):
        params = [nn.Parameter(full(shape, i, torch.bfloat16)) for i, shape in enumerate([(96, 64), (40,)])]
        optimizer = ragged_optim.AdamW8bit(params, bf16_stochastic_round=True)
        stepped(optimizer, params, range(2))
        if interrupted:
            saved = copy.deepcopy(optimizer.state_dict())
            params = [nn.Parameter(p.detach().clone()) for p in params]
            optimizer = ragged_optim.AdamW8bit(params, bf16_stochastic_round=True)
            optimizer.load_state_dict(saved)
        stepped(optimizer, params, range(2, 4))
        ends.append([digest(p) for p in params])
    assert ends[0] == ends[1]


@pytest.mark.parametrize("param_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_another_dtype_crash_after_a_resume(param_dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    """deepspeedai/DeepSpeed#7746, #7748, #8433: any dtype is taken, and rounded to the same codes as its fp32 value."""
    params = [nn.Parameter(full((96, 64), 0, param_dtype)) for _ in range(2)]
    states = []
    for param, dtype in zip(params, (grad_dtype, torch.float32), strict=True):
        param.grad_dtype = None
        optimizer = ragged_optim.AdamW8bit([param])
        param.grad = full((96, 64), 1, grad_dtype).to(dtype)
        optimizer.step()
        states.append(optimizer.state[param])
    assert torch.equal(*params)
    assert all(torch.equal(states[0][key], states[1][key]) for key in CODES)


def test_wrappers_of_a_model_change_random_bits() -> None:
    """DDP, torch.compile and activation checkpointing put parts into the names of parameters."""
    ends = []
    for name in ("0.weight", "module._orig_mod.0.weight", "0._checkpoint_wrapped_module.weight"):
        param = nn.Parameter(full((96, 64), 0))
        stepped(ragged_optim.AdamW8bit([(name, param)]), [param], range(3))
        ends.append(digest(param))
    assert len(set(ends)) == 1


# ---- the step -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.5**step),
        lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
        lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=6, cycle_momentum=False),
        lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    ],
    ids=["lambda", "cosine", "one-cycle", "plateau"],
)
def test_a_scheduler_or_a_float_learning_rate_breaks_or_recompiles(make: Any, tensor_lr: bool) -> None:
    """pytorch/ao#730, #736, #2574: lr had to stay a tensor; here each step is of the scheduler's size."""
    param = nn.Parameter(torch.zeros(64, 64))
    optimizer = ragged_optim.AdamW8bit([param], lr=torch.tensor(0.05) if tensor_lr else 0.05, weight_decay=0.0)
    scheduler = make(optimizer)
    for _ in range(4):
        before, lr = param.detach().clone(), float(optimizer.param_groups[0]["lr"])
        param.grad = torch.ones_like(param)
        optimizer.step()
        moved = float((before - param.detach()).mean())
        assert moved == pytest.approx(lr, rel=0.1)  # with a constant gradient; codes of m are exact to 1/16
        scheduler.step(1.0) if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else scheduler.step()


def test_decay_comes_before_the_update_in_one_backend_and_after_it_in_another() -> None:
    """bitsandbytes-foundation/bitsandbytes#2010: one order, that of torch.optim.AdamW, seen at a large decay."""
    for format in (*FORMATS, "fp32"):
        ours, theirs = (nn.Parameter(torch.ones(64, 64)) for _ in range(2))
        size = 10**9 if format == "fp32" else 0
        options: dict[str, Any] = {"lr": 0.1, "weight_decay": 5.0}
        mine = "float" if format == "fp32" else format
        a = ragged_optim.AdamW8bit([ours], format=mine, min_8bit_size=size, **options)
        b = torch.optim.AdamW([theirs], **options)
        ours.grad, theirs.grad = full((64, 64), 0), full((64, 64), 0)
        a.step()  # moments of the first step have not been rounded yet
        b.step()
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_adam8bit_is_adamw(name: str) -> None:
    """huggingface/transformers#18946: bitsandbytes' Adam8bit decays as AdamW; ours as the torch class of its name."""
    ours, theirs = (nn.Parameter(full((64, 64), 0)) for _ in range(2))
    a = getattr(ragged_optim, f"{name}8bit")([ours], lr=0.1, weight_decay=0.5)
    b = getattr(torch.optim, name)([theirs], lr=0.1, weight_decay=0.5)
    ours.grad, theirs.grad = full((64, 64), 1), full((64, 64), 1)
    a.step()
    b.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_the_decay_of_lion_is_coupled() -> None:
    """bitsandbytes-foundation/bitsandbytes#1992: with 8-bit momentum, too, it only shrinks the parameter."""
    param = nn.Parameter(torch.full((64, 64), 2.0))
    optimizer = ragged_optim.Lion([param], lr=0.1, weight_decay=0.5, momentum_8bit=True)
    param.grad = torch.full((64, 64), -1e-3)  # a coupled decay would turn the sign
    optimizer.step()
    torch.testing.assert_close(param.detach(), torch.full((64, 64), 2.0 * 0.95 + 0.1))


@pytest.mark.parametrize("format", FORMATS)
def test_an_inf_in_one_element_turns_its_whole_block_into_nan(format: str) -> None:
    """bitsandbytes 0.50 makes 256 NaNs of it: here only that element is lost, and the tile is reported."""
    param = nn.Parameter(full((64, 64), 0))
    optimizer = ragged_optim.AdamW8bit([("w", param)], format=format)
    for value in (math.inf, 0.0):
        param.grad = full((64, 64), 1)
        param.grad[3, 40] = value
        if value:
            with pytest.warns(RuntimeWarning, match=r"parameter 'w' in 1 tile\(s\) .* at \(row 0, column 32\)"):
                optimizer.step()
        else:
            optimizer.step()
    assert int(param.isnan().sum()) == 1 and bool(param[3, 40].isnan())
    assert all(bool(value.isfinite().all()) for key, value in optimizer.state[param].items() if "scales" in key)


def collectives_of_a_step(format: str) -> int:
    mesh = cluster.mesh((2,))
    params = [nn.Parameter(shard(full(s, i), "tiles", mesh, i)) for i, s in enumerate([(96, 100), (5000,), (7, 3)])]
    optimizer = ragged_optim.AdamW8bit(params, format=format)
    for i, param in enumerate(params):
        param.grad = shard(full(tuple(param.shape), 10 + i), "tiles", mesh, i)
    params[0].grad.to_local()[:1] = math.nan  # whose report is local too
    with CommDebugMode() as mode, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step()
    return mode.get_total_counts()


@pytest.mark.parametrize("format", FORMATS)
def test_a_step_communicates(format: str) -> None:
    """volcengine/VeOmni#1011: optimizers on DTensors gather behind the user's back; here no collective is called."""
    assert cluster.run(2, collectives_of_a_step, format) == [0, 0]


def on_stock_fsdp2() -> str:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(100, 96, bias=False))
    fully_shard(model, mesh=cluster.mesh((2,)))
    try:
        ragged_optim.AdamW8bit(model.named_parameters())
    except ValueError as error:
        return str(error)
    return ""


def test_shards_are_quantized_in_blocks_that_the_cut_made() -> None:
    """pytorch/ao#4912, too: a tile that FSDP2's Shard(0) cuts is refused on every rank, with the cut and the fix."""
    first, second = cluster.run(2, on_stock_fsdp2)
    assert first == second
    assert "parameter '0.weight' of shape (96, 100)" in first and "cuts the block of elements 3200 to 6400" in first
    assert str(Block.rows(32)) in first and "fsdp.fully_shard" in first
