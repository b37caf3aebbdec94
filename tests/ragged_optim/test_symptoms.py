"""What users of other optimizers ran into, each named for its symptom, with the public report in the docstring.

The 8-bit ones are in test_adamw8bit.py and test_convert.py.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import math
import subprocess
import sys
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import ragged_optim
from ragged_optim import ParamPolicy, explain, policies
from ragged_optim.newton_schulz import newton_schulz, singular_value_range
from tests import cluster
from tests.ragged_optim.models import digest, full, shard, train
from tests.ragged_optim.test_exchange import Counting

ALL = ("AdamW", "Adam", "SGD", "Lion", "Muon", "NorMuon", "Shampoo", "SOAP", "AdamW8bit", "Adam8bit")


def trained(pairs: list[tuple[str, nn.Parameter]], name: str = "AdamW", **options: Any) -> Any:
    optimizer = getattr(ragged_optim, name)(pairs, **options)
    for seed in range(2):
        for i, (_, param) in enumerate(sorted(pairs)):
            param.grad = full(param.shape, 10 * seed + i, param.dtype)
        optimizer.step()
    return optimizer


# ---- state ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_momentum_is_not_normalised_in_place(dtype: torch.dtype, nesterov: bool) -> None:
    """pytorch/pytorch#194664: with bf16 parameters and nesterov=False the iteration scaled the momentum itself."""
    param = nn.Parameter(full((24, 16), 0, dtype))
    optimizer = ragged_optim.Muon([param], nesterov=nesterov)
    expected = torch.zeros(24, 16, dtype=dtype)
    for step in range(3):
        param.grad = full((24, 16), 1 + step, dtype)
        expected.lerp_(param.grad, 1 - 0.95)
        optimizer.step()
    assert torch.equal(optimizer.state[param]["momentum_buffer"], expected)


def test_fp32_states_of_bf16_parameters_are_not_cast_on_resume() -> None:
    """pytorch/pytorch#43706, pytorch/torchtitan#4615."""
    params = [nn.Parameter(full((8, 8), 0, torch.bfloat16)) for _ in range(2)]
    one, two = (ragged_optim.Muon([p], state_dtype=torch.float32) for p in params)
    for seed in range(4):
        for optimizer, param in ((one, params[0]), (two, params[1])):
            param.grad = full((8, 8), 1 + seed, torch.bfloat16)
            optimizer.step()
        if seed == 1:  # the second is saved and loaded on the way
            saved = copy.deepcopy(two.state_dict())
            two = ragged_optim.Muon([params[1]], state_dtype=torch.float32)
            two.load_state_dict(saved)
            assert two.state[params[1]]["momentum_buffer"].dtype == torch.float32
    assert torch.equal(params[0], params[1])


@pytest.mark.parametrize("name", ["AdamW", "Muon", "Shampoo", "Lion", "SGD"])
def test_gradients_of_another_dtype_than_the_state_do_not_crash(name: str) -> None:
    """deepspeedai/DeepSpeed#7746, #7748, #8433: fp32 momentum met a bf16 gradient on resume."""
    param = nn.Parameter(full((8, 8), 0))
    param.grad_dtype = None
    optimizer = getattr(ragged_optim, name)([param], **({"momentum": 0.9} if name == "SGD" else {}))
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        param.grad = full((8, 8), 1, dtype)
        optimizer.step()
    assert param.isfinite().all() and all(v.dtype == torch.float32 for v in optimizer.state[param].values())


def test_parameters_in_another_order_load_by_name() -> None:
    """NVIDIA/Megatron-LM#2625: a checkpoint with its groups in another order failed to load."""
    pairs = [("a", nn.Parameter(full((4, 3), 0))), ("b", nn.Parameter(full((4, 3), 1)))]
    saved = trained(pairs)
    again = ragged_optim.AdamW([pairs[1], pairs[0]])
    again.load_state_dict(saved.state_dict())
    for _, param in pairs:
        assert torch.equal(again.state[param]["exp_avg"], saved.state[param]["exp_avg"])
    assert again.param_groups[0]["param_names"] == ["b", "a"]


def test_parameters_without_elements_keep_their_keys_on_resume() -> None:
    """PrimeIntellect-ai/prime-rl#3252: a missing key for a parameter of size zero."""
    pairs = [("empty", nn.Parameter(full((0, 5), 0))), ("full", nn.Parameter(full((3, 5), 1)))]
    for name in ("AdamW", "Lion", "Muon", "SOAP"):
        optimizer = trained(pairs, name)
        saved = copy.deepcopy(optimizer.state_dict())
        assert len(saved["state"]) == 2
        optimizer.load_state_dict(saved)


def states_on_ranks() -> list[Any]:
    mesh, found = cluster.mesh((3,)), []
    for layout in ("shard0", "ragged"):
        params = [nn.Parameter(shard(full(s, 0), layout, mesh, 5)) for s in ((2, 5), (7, 4), (2, 3))]
        optimizer = ragged_optim.NorMuon([(f"{i}.weight", p) for i, p in enumerate(params)])
        for param in params:
            momentum = optimizer.state[param]["momentum_buffer"]
            assert isinstance(momentum, DTensor) and momentum.placements == param.placements
            assert momentum.to_local().shape == param.to_local().shape
            found.append([(key, tuple(value.shape)) for key, value in optimizer.state[param].items()])
    return found


def test_every_rank_has_the_same_states_laid_out_as_the_parameter() -> None:
    """microsoft/dion#18, #21: states that only some ranks have break checkpoints; NVIDIA/TransformerEngine#2424,
    #2795: states were made with the global shape, and no DTensors.
    """
    first, *others = cluster.run(3, states_on_ranks)
    assert all(other == first for other in others)


@pytest.mark.parametrize("name", ["Shampoo", "SOAP"])
def test_preconditioners_stay_where_they_are_when_loaded(name: str) -> None:
    """facebookresearch/optimizers#3: loaded preconditioners were on another device than the parameter."""
    pairs = [("0.weight", nn.Parameter(full((6, 5), 0)))]
    optimizer = trained(pairs, name)
    before = {key: (value.device, value.dtype, value.data_ptr()) for key, value in optimizer.state[pairs[0][1]].items()}
    optimizer.load_state_dict({**copy.deepcopy(optimizer.state_dict())})
    after = {key: (value.device, value.dtype, value.data_ptr()) for key, value in optimizer.state[pairs[0][1]].items()}
    assert before == after


SURROUNDINGS: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {}),
    ("Muon", {"momentum_8bit": True, "gram": True, "ns_dtype": torch.float32}),
    ("Lion", {"momentum_8bit": True}),
    ("Shampoo", {"precondition_frequency": 2}),
    ("SOAP", {"precondition_frequency": 1}),
    ("AdamW8bit", {}),
    ("AdamW8bit", {"format": "dynamic"}),
]


def digests_of_steps(dtype: torch.dtype = torch.float32, eager: bool = False) -> list[list[str]]:
    from ragged_optim.rules import adamw8bit

    found = []
    for name, options in SURROUNDINGS:
        params = [nn.Parameter(full((64, 160), 0, dtype)), nn.Parameter(full((160, 70), 1, dtype))]
        pairs = [(f"{i}.weight", param) for i, param in enumerate(params)]
        with mock.patch.object(adamw8bit, "adamw8bit_kernel", lambda: None) if eager else nullcontext():
            trained(pairs, name, **options)
        found.append([digest(param) for param in params])
    return found


def test_the_default_dtype_changes_nothing() -> None:
    """In a process of its own, whose tables are made under it."""
    code = (
        "import torch; torch.set_default_dtype(torch.bfloat16)\n"
        "from tests.ragged_optim.test_symptoms import digests_of_steps as run\n"
        "print(repr([run(), run(eager=True), run(torch.float64)]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=cluster.REPOSITORY)
    assert done.returncode == 0, done.stderr
    expected = [digests_of_steps(), digests_of_steps(eager=True), digests_of_steps(torch.float64)]
    assert ast.literal_eval(done.stdout) == expected


def test_autocast_around_a_step_changes_nothing() -> None:
    expected = digests_of_steps()
    with torch.autocast("cpu", torch.bfloat16):
        assert digests_of_steps() == expected


# ---- hyperparameters ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_a_float_may_be_assigned_to_an_lr_that_was_a_tensor(name: str) -> None:
    """pytorch/ao#730, #736, #2574: schedulers that assign a float to lr raised or recompiled."""
    params = [nn.Parameter(full((64, 64), 0)) for _ in range(2)]
    one = getattr(ragged_optim, name)([("0.weight", params[0])], lr=torch.tensor(0.5))
    two = getattr(ragged_optim, name)([("0.weight", params[1])], lr=0.25)
    one.param_groups[0]["lr"] = 0.25
    for optimizer, param in ((one, params[0]), (two, params[1])):
        param.grad = full((64, 64), 1)
        optimizer.step()
    assert torch.equal(params[0], params[1])


@pytest.mark.parametrize("name", ["AdamW", "AdamW8bit", "Muon", "Lion"])
def test_a_large_decay_is_applied_to_the_parameter_before_the_step(name: str) -> None:
    """bitsandbytes-foundation/bitsandbytes#2010: before or after the update, by backend; #1992: Lion's was coupled."""
    param = nn.Parameter(torch.ones(64, 64))
    optimizer = getattr(ragged_optim, name)([param], lr=0.1, weight_decay=5.0)
    param.grad = torch.zeros_like(param)
    optimizer.step()
    torch.testing.assert_close(param.detach(), torch.full((64, 64), 0.5), rtol=1e-6, atol=0)


def test_lions_decay_is_decoupled() -> None:
    """bitsandbytes-foundation/bitsandbytes#1992: the decay went into the sign."""
    params = [nn.Parameter(full((8, 8), 0)) for _ in range(2)]
    start = params[0].detach().clone()
    for param, decay in zip(params, (0.0, 0.5), strict=True):
        optimizer = ragged_optim.Lion([param], lr=0.1, weight_decay=decay)
        param.grad = full((8, 8), 1)
        optimizer.step()
    torch.testing.assert_close(params[1].detach(), params[0].detach() - 0.1 * 0.5 * start, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ALL)
def test_an_argument_that_does_nothing_is_an_error(name: str) -> None:
    """bitsandbytes-foundation/bitsandbytes#1261: amsgrad and optim_bits were accepted and ignored."""
    param = nn.Parameter(full((4, 4), 0))
    with pytest.raises(TypeError, match="optim_bits"):
        getattr(ragged_optim, name)([param], optim_bits=8)
    with pytest.raises(ValueError, match="unknown hyperparameter 'optim_bits'"):
        getattr(ragged_optim, name)([{"params": [param], "optim_bits": 8}])


ADAMW = "adamw_lr adamw_betas adamw_eps adamw_weight_decay orig_param_policy"
MUON = (
    "ns_dtype wire_dtype gram weight_decay_mode split_sizes flatten skip_nonfinite maximize state_dtype momentum_8bit "
    f"tile min_8bit_size {ADAMW}"
)
ADAM = "params lr betas eps weight_decay amsgrad maximize foreach capturable differentiable fused"
TORCH_MUON = "params lr weight_decay momentum nesterov ns_coefficients eps ns_steps adjust_lr_fn"
SIGNATURES = {
    "AdamW": f"{ADAM} state_dtype orig_param_policy",
    "Adam": f"{ADAM} decoupled_weight_decay state_dtype orig_param_policy",
    "SGD": "params lr momentum dampening weight_decay nesterov maximize foreach differentiable fused orig_param_policy",
    "Lion": "params lr betas weight_decay weight_decay_mode maximize skip_nonfinite momentum_8bit tile min_8bit_size "
    "orig_param_policy",
    "Muon": f"{TORCH_MUON} {MUON}",
    "NorMuon": f"{TORCH_MUON} beta2 {MUON}",
    "Shampoo": "params lr betas eps weight_decay weight_decay_mode precondition_frequency root_delay "
    "start_preconditioning_step max_preconditioner_dim preconditioner_eps grafting split_sizes flatten maximize "
    f"{ADAMW}",
    "SOAP": "params lr betas shampoo_beta eps weight_decay weight_decay_mode precondition_frequency basis_delay "
    f"max_preconditioner_dim split_sizes flatten maximize {ADAMW}",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_no_constructor_argument_disappears_unnoticed(name: str) -> None:
    """Nerogar/OneTrainer#1708, #1519: arguments were removed without a deprecation. That changes this test."""
    assert " ".join(inspect.signature(getattr(ragged_optim, name)).parameters) == SIGNATURES[name]


def test_the_head_is_stepped_with_the_lr_of_its_own_group() -> None:
    """microsoft/dion#94, allenai/OLMo-core#854: the head's lr was scaled by the rule of another algorithm."""
    head = nn.Parameter(torch.zeros(40, 8))
    optimizer = ragged_optim.Muon([("lm_head.weight", head)], lr=0.5, adamw_lr=0.125, adamw_weight_decay=0.0)
    head.grad = torch.ones_like(head)
    optimizer.step()
    torch.testing.assert_close(head.detach(), torch.full((40, 8), -0.125), rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", ["AdamW", "Muon"])
def test_schedulers_do_not_recompile_the_step(name: str) -> None:
    """pytorch/pytorch#130467, #163093, #133898: a graph for every value of lr."""
    graphs = 0

    def counting(graph: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    torch._dynamo.reset()
    module = nn.Linear(8, 8)
    optimizer = getattr(ragged_optim, name)([("0.weight", module.weight), ("0.bias", module.bias)], lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    step = torch.compile(optimizer.step, backend=counting)
    for seed in range(5):
        module(full((2, 8), seed)).sum().backward()
        step()
        scheduler.step()
    assert graphs <= 2


# ---- sharding -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Muon", "NorMuon", "AdamW", "SOAP"])
def test_ranks_that_hold_nothing_of_a_matrix_do_not_hang(name: str) -> None:
    """microsoft/dion#74: (1, D) and (18, D) over more ranks than rows; #83: topk of an empty shard. The cluster's
    deadline is the test; torch.optim.Muon raises for such a DTensor.
    """
    shapes = [(1, 8), (18, 8), (3, 5), (2, 1, 4)]
    make = functools.partial(getattr(ragged_optim, name))
    assert cluster.run(4, train, make, shapes, "shard0") == [train(make, shapes)] * 4


@given(
    lead=st.lists(st.integers(1, 3), max_size=3), rows=st.integers(1, 9), cols=st.integers(1, 9), heads=st.booleans()
)
def test_any_number_of_batch_dims_and_heads(lead: list[int], rows: int, cols: int, heads: bool) -> None:
    """microsoft/dion#82: a stack with heads of its own crashed."""
    stack = nn.Parameter(full((*lead, 2 * rows, cols), 0))
    optimizer = ragged_optim.Muon([stack], split_sizes=(rows, rows) if heads else None)
    stack.grad = full(stack.shape, 1)
    optimizer.step()
    parts = [half for one in stack.grad.reshape(-1, 2 * rows, cols) for half in (one.split(rows) if heads else (one,))]
    apart = [
        nn.Parameter(part.clone())
        for one in full(stack.shape, 0).reshape(-1, 2 * rows, cols)
        for part in (one.split(rows) if heads else (one,))
    ]
    other = ragged_optim.Muon(apart)
    for param, part in zip(apart, parts, strict=True):
        param.grad = part.clone()
    other.step()
    assert torch.equal(torch.cat([p.detach() for p in apart]), stack.detach().reshape(-1, cols))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(4, 8, 3)
        self.depthwise_conv = nn.Conv1d(8, 8, 4, groups=8)
        self.experts = nn.Parameter(torch.zeros(3, 8, 6))


def test_convolutions_and_stacks_are_accepted() -> None:
    """pytorch/pytorch#166209, #180561: torch.optim.Muon takes matrices only. AI-Hypercomputer/maxtext#4843: a
    depthwise convolution went to Muon.
    """
    optimizer = ragged_optim.Muon(Convolutions().named_parameters())
    rules = {row.name: row.rule for row in explain(optimizer).rows}
    assert rules["conv1.weight"] == rules["experts"] == "muon"
    assert rules["depthwise_conv.weight"] == rules["conv1.bias"] == "adamw"
    (flat,) = (group for group in optimizer.param_groups if group.get("flatten"))
    assert flat["param_names"] == ["conv1.weight"]


def replicas(sharded: bool) -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20, bias=False), nn.Tanh(), nn.Linear(20, 7, bias=False))
    rank = dist.get_rank()
    if sharded:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=cluster.mesh((2,)))
        optimizer: Any = ragged_optim.Muon(model.named_parameters(), lr=0.1, ns_dtype=torch.float32)
    else:
        model = nn.parallel.DistributedDataParallel(model)  # type: ignore[assignment]
        optimizer = ragged_optim.Muon(model.parameters(), lr=0.1, ns_dtype=torch.float32)
    for step in range(3):
        optimizer.zero_grad()
        # Powers of two, so that the mean over ranks is exact however it is summed.
        data = (full((4, 12), 10 * step + rank) * 4).round() / 4
        model(data).square().sum().backward()
        optimizer.step()
    return [digest(p) for p in model.parameters()]


def test_ranks_do_not_diverge_when_gradients_are_only_reduce_scattered() -> None:
    """deepspeedai/DeepSpeed#8090, #7807: each rank iterated on its own part of a gradient."""
    one, two = cluster.run(2, replicas, True)
    ddp, _ = cluster.run(2, replicas, False)
    assert one == two == ddp


def flat_shards() -> list[str]:
    weight = nn.Parameter(shard(full((16, 8), 0), "ragged7", cluster.mesh((2,)), 3))
    assert weight.to_local().ndim < 2  # what lies here is a run of elements
    optimizer = ragged_optim.Muon([("layers.0.q_proj.weight", weight)])
    return [row.rule for row in explain(optimizer).rows]


def test_a_matrix_that_lies_here_as_a_vector_is_still_muons() -> None:
    """deepspeedai/DeepSpeed#8438: parameters look 1-D under partitioning, and Muon was silently off."""
    assert cluster.run(2, flat_shards) == [["muon"]] * 2


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (2, 16, 16)])
def test_the_iteration_runs_on_parameters_that_are_not_sharded(shape: tuple[int, ...]) -> None:
    """deepspeedai/DeepSpeed#8442: at stage 0 no Newton-Schulz ran, and nothing said so."""
    param = nn.Parameter(torch.zeros(shape))
    optimizer = ragged_optim.Muon([param], lr=1.0, weight_decay=0.0, ns_coefficients="deepseek", ns_steps=10)
    param.grad = full(shape, 1)
    optimizer.step()
    for matrix in param.detach().reshape(-1, *shape[-2:]):
        size = math.sqrt(max(1, shape[-2] / shape[-1]))
        singular = torch.linalg.svdvals(matrix) / size
        assert singular.min() > 0.9 and singular.max() < 1.1


def collectives_of(layout: str, mesh_shape: tuple[int, ...]) -> dict[str, int]:
    mesh = cluster.mesh(mesh_shape)
    params = [nn.Parameter(shard(full((16, 24), i), layout, mesh, 7)) for i in range(3)]
    optimizer = ragged_optim.Muon([(f"{i}.weight", p) for i, p in enumerate(params)])
    for i, param in enumerate(params):
        param.grad = shard(full((16, 24), 9 + i), layout, mesh, 7)
    with Counting() as counting:
        optimizer.step()
    return dict(counting.calls)


@pytest.mark.parametrize("layout", ["shard0", "ragged"])
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)])
def test_no_mesh_falls_back_to_gathering_every_parameter(layout: str, mesh_shape: tuple[int, ...]) -> None:
    """ByteDance-Seed/VeOmni#1011: under HSDP every parameter went through full_tensor(). NVIDIA/Megatron-LM#5961: on
    DTensors generic operations hide collectives. Here: a vote for each other rank of the group, and two all-to-alls a
    batch, whatever the mesh.
    """
    for calls in cluster.run(4, collectives_of, layout, mesh_shape):
        assert calls == {"isend": mesh_shape[-1] - 1, "all_to_all_single": 2}


# ---- routing --------------------------------------------------------------------------------------------------------


def test_a_model_without_a_matrix_for_muon_is_seen_in_explain() -> None:
    """hiyouga/LLaMA-Factory#8041: "0 Muon params" went unnoticed."""
    optimizer = ragged_optim.Muon(nn.LayerNorm(8).named_parameters())
    assert {row.rule for row in explain(optimizer).rows} == {"adamw"}
    assert "muon" not in str(explain(optimizer)) and "adamw: 2 parameters" in str(explain(optimizer))


def test_a_pattern_is_a_pattern_and_one_that_matches_nothing_an_error() -> None:
    """ByteDance-Seed/VeOmni#1011: patterns were looked up literally and matched nothing."""
    pairs = [("layers.0.q_proj.weight", nn.Parameter(full((4, 4), 0)))]
    policy = policies.by_name({"layers.*.q_proj.weight": ParamPolicy(optimizer="muon")})
    assert ragged_optim.AdamW(pairs, orig_param_policy=policy).param_groups[0]["rule"] == "muon"
    with pytest.raises(ValueError, match=r"'layers.\*.k_proj.weight' match no parameter"):
        ragged_optim.AdamW(
            pairs, orig_param_policy=policies.by_name({"layers.*.k_proj.weight": ParamPolicy(optimizer="muon")})
        )


def test_a_vector_added_later_is_refused_as_at_construction() -> None:
    """torch.optim.Muon's add_param_group skips the check of its constructor (torch 2.13)."""
    optimizer = ragged_optim.Muon([nn.Parameter(full((4, 4), 0))])
    with pytest.raises(ValueError, match="cannot be updated by muon: it needs a matrix"):
        optimizer.add_param_group({"params": [nn.Parameter(full((4,), 0))]})


def test_complex_parameters_are_refused() -> None:
    """bitsandbytes drops the imaginary part without a word (0.50.2)."""
    for name in ALL:
        with pytest.raises(ValueError, match="parameter 'z' is complex"):
            getattr(ragged_optim, name)([("z", nn.Parameter(torch.zeros(64, 64, dtype=torch.complex64)))])


# ---- numerics -------------------------------------------------------------------------------------------------------


def keller(grads: list[Tensor], weight: Tensor, lr: float, momentum: float) -> Tensor:
    """KellerJordan/Muon as published: muon.py in a dozen lines, in fp32."""
    buf, p = torch.zeros_like(weight), weight.clone()
    for grad in grads:
        buf.lerp_(grad, 1 - momentum)
        x = grad.lerp(buf, momentum)
        tall = x.shape[0] > x.shape[1]
        x = x.T if tall else x
        x = x / (x.norm() + 1e-7)
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        x = x.T if tall else x
        p -= lr * max(1, weight.shape[0] / weight.shape[1]) ** 0.5 * x
    return p


@pytest.mark.parametrize("shape", [(32, 48), (48, 32)])
def test_muon_does_not_drift_from_its_reference(shape: tuple[int, int]) -> None:
    """kozistr/pytorch_optimizer#408: a port diverged. Against Keller Jordan's formula in fp32 here, against
    torch.optim.Muon bit for bit in test_muon.py.
    """
    grads = [full(shape, 1 + step) for step in range(5)]
    param = nn.Parameter(full(shape, 0))
    expected = keller(grads, param.detach(), 0.02, 0.95)
    optimizer = ragged_optim.Muon([param], lr=0.02, weight_decay=0.0, ns_dtype=torch.float32)
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    moved = (expected - full(shape, 0)).norm()
    assert (param.detach() - expected).norm() < 1e-4 * moved


@given(condition=st.floats(1.0, 1e6), seed=st.integers(0, 1000), name=st.sampled_from(["keller", "polar_express"]))
def test_the_gram_iteration_has_no_nan_at_any_condition(condition: float, seed: int, name: str) -> None:
    """microsoft/dion#55, #76, #78: NaN from the iteration on the Gram matrix. In bf16 it is not used at all."""
    u, _, v = torch.linalg.svd(full((12, 48), seed), full_matrices=False)
    matrix = u @ torch.diag(torch.logspace(0, -math.log10(condition), 12)) @ v
    for dtype in (torch.float32, torch.bfloat16):
        singular = torch.linalg.svdvals(newton_schulz(matrix.to(dtype), name, 6, gram=True).double())
        assert bool(singular.isfinite().all()) and singular.max() < 1.3
    plain = newton_schulz(matrix.bfloat16(), name, 6)
    assert torch.equal(newton_schulz(matrix.bfloat16(), name, 6, gram=True), plain)


@pytest.mark.parametrize("rows", [32, 64])
def test_bf16_polar_express_has_no_outliers(rows: int) -> None:
    """NVIDIA-NeMo/Emerging-Optimizers#228: singular values far above 1 in bf16. The stated range widens by 4 %."""
    for seed in range(8):
        matrix = full((rows, 64), seed)
        lowest = float(torch.linalg.svdvals(matrix).min() / matrix.norm())
        _, high = singular_value_range("polar_express", 8, min(lowest, 1e-3))
        assert torch.linalg.svdvals(newton_schulz(matrix.bfloat16(), "polar_express", 8).float()).max() < 1.04 * high
        narrow = newton_schulz(matrix, "polar_express", 8)
        assert torch.linalg.svdvals(narrow).max() < high + 1e-3
