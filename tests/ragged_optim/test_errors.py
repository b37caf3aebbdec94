"""Bad input: one clear error that names the parameter or key and says what to do; nothing is changed before it."""

from __future__ import annotations

import copy
import re
import warnings
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial

import ragged_optim
from ragged_optim import Block, MatrixRule, ParamPolicy, RaggedOptimizer, StateSpec, policies
from tests import cluster
from tests.ragged_optim.models import digest, full, shard


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(full(shape, 0))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ragged_optim.AdamW([]), ValueError, "empty parameter list"),
        (lambda: ragged_optim.AdamW(parameter(2)), TypeError, "iterable of Tensors"),
        (lambda: ragged_optim.AdamW([3]), TypeError, "can only optimize Tensors"),
        (lambda: ragged_optim.AdamW([parameter(2)], lr=-1.0), ValueError, "lr must be at least 0, got -1"),
        (lambda: ragged_optim.AdamW([parameter(2)], lr=float("nan")), ValueError, "lr must be at least 0, got nan"),
        (lambda: ragged_optim.AdamW([parameter(2)], lr=torch.ones(2)), ValueError, "tensor of one element"),
        (lambda: ragged_optim.AdamW([parameter(2)], betas=(1.0, 0.9)), ValueError, "betas must be two numbers"),
        (lambda: ragged_optim.AdamW([parameter(2)], capturable=True), ValueError, "does not support capturable"),
        (
            lambda: ragged_optim.AdamW([parameter(2)], differentiable=True),
            ValueError,
            "does not support differentiable",
        ),
        (lambda: ragged_optim.AdamW([parameter(2)], foreach=True), ValueError, "does not support foreach"),
        (lambda: ragged_optim.SGD([parameter(2)], fused=True), ValueError, "fused; leave it out .it chooses its own"),
        (lambda: ragged_optim.AdamW([parameter(2)], lr=None), ValueError, "lr must be a number, got None"),
        (lambda: ragged_optim.AdamW([parameter(2)], lr="0.1"), ValueError, "lr must be a number, got '0.1'"),
        (lambda: ragged_optim.AdamW([parameter(2)], betas=0.9), ValueError, "betas must be two numbers"),
        (lambda: ragged_optim.AdamW8bit([parameter(2)], tile=32), ValueError, "tile must be two positive integers"),
        (lambda: ragged_optim.Muon([parameter(2, 2)], tile=(0, 3)), ValueError, "tile must be two positive integers"),
        (lambda: ragged_optim.Lion([parameter(2)], min_8bit_size=-1), ValueError, "min_8bit_size must be at least 0"),
        (lambda: ragged_optim.AdamW8bit([parameter(2)], seed=None), ValueError, "seed must be an integer, got None"),
        (lambda: ragged_optim.Muon([parameter(8, 2)], split_sizes=8), ValueError, "split_sizes must be positive int"),
        (lambda: ragged_optim.SOAP([parameter(8, 2)], split_sizes=(4.0, 4.0)), ValueError, "split_sizes must be posi"),
        (lambda: ragged_optim.Muon([parameter(2, 2)], adamw_lr=-1.0), ValueError, "adamw: lr must be at least 0"),
        (lambda: policies.by_name({"a": "muon"}), TypeError, "'a' must go to a ParamPolicy"),
        (lambda: ragged_optim.explain(nn.Linear(2, 2)), TypeError, "takes an optimizer .*named_parameters"),
        (lambda: ragged_optim.explain(nn.Linear(2, 2).parameters()), TypeError, "takes an optimizer"),
        (lambda: RaggedOptimizer([parameter(2)], type("None", (Tiles,), {"name": None})), TypeError, "None needs a"),
        (
            lambda: RaggedOptimizer([parameter(2)], type("T", (Tiles,), {"init": lambda *_: {"m": torch.zeros(2)}})),
            TypeError,
            r"rule 'tiles': init\(\) returns a dict of StateSpec",
        ),
        (lambda: ragged_optim.AdamW([parameter(2)], learning_rate=1), TypeError, "learning_rate"),
        (
            lambda: ragged_optim.AdamW([{"params": [parameter(2)], "learning_rate": 1}]),
            ValueError,
            "unknown hyperparameter 'learning_rate' for rule 'adamw' in this param group; it takes lr, betas",
        ),
        (
            lambda: ragged_optim.Muon(
                [("a.weight", parameter(2, 2))], orig_param_policy=lambda n, p: ParamPolicy(foo=1)
            ),
            ValueError,
            "unknown hyperparameter 'foo' for rule 'muon' in the policy of parameter 'a.weight'",
        ),
        (
            lambda: ragged_optim.AdamW([("a", parameter(2))], orig_param_policy=lambda n, p: "muon"),
            TypeError,
            r"orig_param_policy\('a', ...\) returned 'muon'",
        ),
        (
            lambda: ragged_optim.AdamW(
                [("a", parameter(2))], orig_param_policy=lambda n, p: ParamPolicy(optimizer="lamb")
            ),
            ValueError,
            "unknown optimizer rule 'lamb'; known: ",
        ),
        (
            lambda: ragged_optim.Muon([parameter(2)]),
            ValueError,
            r"parameter 'number 0 of shape \(2,\)'.*named_parameters",
        ),
        (
            lambda: ragged_optim.Muon(
                [("b", parameter(2))], orig_param_policy=lambda n, p: ParamPolicy(optimizer="muon")
            ),
            ValueError,
            r"parameter 'b' of shape \(2,\) cannot be updated by muon: it needs a matrix",
        ),
        (
            lambda: ragged_optim.AdamW([parameter(2)], orig_param_policy=policies.muon()),
            ValueError,
            "pass model.named_parameters",
        ),
        (
            lambda: ragged_optim.Muon(
                [("head.weight", parameter(2, 2)), ("b", parameter(2))],
                orig_param_policy=policies.by_name({"head.weight": ParamPolicy(optimizer="adamw")}),
            ),
            ValueError,
            r"parameter 'b' .* Your policy leaves it to muon: fall back on policies.muon\(\), as in policies.by_name",
        ),
        (
            lambda: ragged_optim.Muon([("q.weight", parameter(8, 4))], split_sizes=(4, 5)),
            ValueError,
            r"parameter 'q.weight': split_sizes=\(4, 5\) must be positive and sum to the 8 rows",
        ),
        (lambda: ragged_optim.Muon([parameter(2, 2)], ns_coefficients="jordan"), ValueError, "unknown ns_coefficients"),
        (lambda: ragged_optim.Muon([parameter(2, 2)], adjust_lr_fn="rms"), ValueError, "adjust_lr_fn must be one of"),
        (lambda: ragged_optim.Muon([parameter(2, 2)], weight_decay_mode="l2"), ValueError, "weight_decay_mode must be"),
        (lambda: ragged_optim.Muon([parameter(2, 2)], ns_dtype=torch.int8), ValueError, "ns_dtype must be a floating"),
        (
            lambda: ragged_optim.AdamW(
                [("a", parameter(2))], orig_param_policy=policies.by_name({"*.q_proj.weight": ParamPolicy()})
            ),
            ValueError,
            r"pattern\(s\) '\*.q_proj.weight' match no parameter; the names are such as 'a'",
        ),
        (
            lambda: ragged_optim.AdamW([("c", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))]),
            ValueError,
            "parameter 'c' is complex",
        ),
        (lambda: ragged_optim.AdamW([("a", parameter(2)), parameter(2)]), ValueError, "with/without names"),
        (lambda: ragged_optim.AdamW([{"params": {parameter(2)}}]), TypeError, "sets have no order"),
    ],
)
def test_construction(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_two_rules_for_one_parameter() -> None:
    param = parameter(2, 2)
    with pytest.raises(ValueError, match="more than one parameter group"):
        ragged_optim.Muon([{"params": [param]}, {"params": [param], "rule": "adamw"}])


class Wrapping(torch.Tensor):
    """Holds another tensor, and has no storage of its own."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapping:
        made: Wrapping = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.utils._pytree import tree_map_only

        inner_args, inner_kwargs = tree_map_only(Wrapping, lambda t: t.inner, (args, kwargs or {}))
        out = op(*inner_args, **inner_kwargs)
        written = op.overloadpacket.__name__.endswith("_") and isinstance(args[0], torch.Tensor)
        return args[0] if written else tree_map_only(torch.Tensor, Wrapping, out)


@pytest.mark.parametrize("name", ["AdamW", "Adam", "Muon", "AdamW8bit"])
def test_parameters_that_wrap_other_tensors_are_not_read_at_an_address_they_have_not(name: str) -> None:
    plain, wrapping = nn.Parameter(full((64, 64), 0)), nn.Parameter(Wrapping(full((64, 64), 0)))
    plain.grad, wrapping.grad = full((64, 64), 1), Wrapping(full((64, 64), 1))
    for param in (plain, wrapping):
        getattr(ragged_optim, name)([("w", param)], lr=0.01).step()
    torch.testing.assert_close(wrapping.detach().inner, plain.detach(), rtol=1e-6, atol=1e-6)


def test_sparse_gradients_are_refused_by_name() -> None:
    embedding = nn.Embedding(4, 3, sparse=True)
    optimizer = ragged_optim.AdamW(embedding.named_parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="gradient of parameter 'weight' is sparse"):
        optimizer.step()


def test_parameters_on_the_meta_device_take_neither_gradient_nor_state() -> None:
    param, other = nn.Parameter(torch.empty(2, 2, device="meta")), parameter(2, 2)
    optimizer, saved = ragged_optim.AdamW([("w", param)]), ragged_optim.AdamW([("w", other)])
    with pytest.raises(ValueError, match="'w' is on the meta device: load its state when it is materialised"):
        optimizer.load_state_dict(saved.state_dict())
    param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError, match="'w' is on the meta device and has a gradient: materialise it"):
        optimizer.step()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["param_groups"].pop(), "different number of parameter groups: 1, this optimizer has 2"),
        (
            lambda s: s["param_groups"][0].update(state_version=99),
            "state version 99; this library knows versions up to 1",
        ),
        (lambda s: s["param_groups"][0].update(rule="shampoo"), "updated by muon, the state dict is of shampoo"),
        (lambda s: s["param_groups"][0].update(params=[0, 1]), "2 parameters instead of 1"),
        (lambda s: s["param_groups"][0].update(speed=1), "unknown hyperparameters for muon: speed"),
        (
            lambda s: s["state"][0].update(exp_avg=torch.zeros(3, 4)),
            "'exp_avg' for parameter 'w.weight', which muon does not",
        ),
        (
            lambda s: s["state"][0].update(momentum_buffer=torch.zeros(4, 3)),
            r"'momentum_buffer' of shape \(4, 3\) for parameter",
        ),
        (lambda s: s["state"][1].pop("step"), "lacks 'step' of parameter 'w.bias'"),
    ],
)
def test_state_dicts_of_another_optimizer_change_nothing(change: Any, message: str) -> None:
    params = [("w.weight", parameter(3, 4)), ("w.bias", parameter(3))]
    optimizer = ragged_optim.Muon(params)
    for _, param in params:
        param.grad = full(param.shape, 1)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(saved)
    change(saved)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    now = optimizer.state_dict()
    assert now["param_groups"] == kept["param_groups"]
    for i in kept["state"]:
        assert all(torch.equal(now["state"][i][key], value) for key, value in kept["state"][i].items())


def on_ranks(kind: str) -> str:
    mesh = cluster.mesh((2,))
    try:
        if kind == "partial":
            tensor = DTensor.from_local(torch.ones(4, 4), mesh, [Partial()])
            ragged_optim.AdamW([("p", nn.Parameter(tensor))])
        elif kind == "gradient":
            param = nn.Parameter(shard(full((4, 4), 0), "shard0", mesh))
            optimizer = ragged_optim.AdamW([("p", param)])
            param.grad = shard(full((4, 4), 0), "replicate", mesh)
            optimizer.step()
        elif kind == "sparse":
            matrix, table = nn.Parameter(shard(full((4, 6), 0), "shard0", mesh)), parameter(4, 3)
            optimizer = ragged_optim.Muon([("w.weight", matrix), ("embed.weight", table)])
            matrix.grad, table.grad = shard(full((4, 6), 1), "shard0", mesh), torch.ones(4, 3)
            if torch.distributed.get_rank() == 1:
                table.grad = table.grad.to_sparse()
            optimizer.step()
        elif kind == "tile":
            param = nn.Parameter(shard(full((33, 4), 0), "shard0", mesh))
            RaggedOptimizer([("p", param)], Tiles)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def nan_on_one_rank(layout: str, skip: bool) -> list[Any]:
    mesh = None if layout == "plain" else cluster.mesh((torch.distributed.get_world_size(),))
    shapes = [(8, 6), (4, 5, 3), (9,)]
    params = [nn.Parameter(shard(full(s, i), layout, mesh, 3)) for i, s in enumerate(shapes)]
    optimizer = ragged_optim.Muon([(f"{i}.weight", p) for i, p in enumerate(params)], skip_nonfinite=skip)
    said = []
    for step in range(2):
        for i, (param, s) in enumerate(zip(params, shapes, strict=True)):
            grad = full(s, 10 * step + i)
            if step == 1 and i < 2:
                grad.view(-1)[-1] = float("nan" if i else "inf")
            param.grad = shard(grad, layout, mesh, 3)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        said.append([str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)])
    whole = [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in params]
    return [
        said,
        [bool(w.isfinite().all()) for w in whole],
        [digest(t) for p in params for t in (p, *optimizer.state[p].values())],
    ]


@pytest.mark.parametrize("layout", ["shard0", "ragged"])
def test_gradients_that_are_not_finite_harm_their_parameter_or_are_skipped_on_all_ranks(layout: str) -> None:
    said, finite, expected = nan_on_one_rank("plain", True)
    assert finite == [True] * 3
    assert said == [
        [],
        [f"non-finite gradient: parameter '{i}.weight' and its states are left alone in this step" for i in range(2)],
    ]
    for sharded in cluster.run(3, nan_on_one_rank, layout, True):
        assert [sharded[0][0], sorted(sharded[0][1]), *sharded[1:]] == [*said, finite, expected]
    # As in torch: a matrix spoils itself, and no other.
    for sharded in cluster.run(3, nan_on_one_rank, layout, False):
        assert sharded[1] == [False, False, True]


class Tiles(ragged_optim.BlockwiseRule):
    name = "tiles"
    defaults: ClassVar[dict[str, float]] = {"lr": 1.0}

    def init(self, shape: tuple[int, ...], group: Any) -> dict[str, StateSpec]:
        return {}

    def block(self, shape: tuple[int, ...], group: Any) -> Block:
        return Block.tile(32, 32)

    def update(self, param: Any, grad: Any, state: Any, group: Any, extent: Any) -> None:
        param.sub_(grad)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("partial", "parameter 'p' is P(sum) on mesh dim 0: redistribute it before"),
        ("gradient", "redistribute the gradient to the parameter's placements"),
        ("sparse", "the gradient of parameter 'embed.weight' is sparse"),  # on one rank alone
        ("tile", "a rank boundary at element 68 cuts the block of elements 0 to 128. Shard it with fsdp.fully_shard"),
    ],
)
def test_layouts_are_refused_alike_on_all_ranks(kind: str, message: str) -> None:
    messages = cluster.run(2, on_ranks, kind)
    assert messages[0] == messages[1]
    assert message in messages[0]


class Sign(MatrixRule):
    """The sign of the momentum: as short as a rule gets."""

    name = "sign"
    defaults: ClassVar[dict[str, float]] = {"lr": 0.5, "momentum": 0.5}

    def init(self, shape: tuple[int, ...], group: Any) -> dict[str, StateSpec]:
        return {"momentum_buffer": StateSpec(shape)}

    def direction(self, param: Any, grad: Any, state: Any, group: Any) -> Any:
        return state["momentum_buffer"].lerp_(grad, 1 - group["momentum"]).clone()

    def update(self, matrix: Any, state: Any, group: Any) -> Any:
        return matrix.sign()

    def apply(self, param: Any, update: Any, state: Any, group: Any, shape: tuple[int, int]) -> None:
        param.sub_(update, alpha=group["lr"])


def test_a_rule_of_ones_own_runs_and_is_checked() -> None:
    param = parameter(3, 4)
    start = param.detach().clone()
    optimizer = RaggedOptimizer([param], Sign, lr=0.25)
    param.grad = full((3, 4), 1)
    optimizer.step()
    assert torch.equal(param.detach(), start - 0.25 * param.grad.sign())
    with pytest.raises(ValueError, match="unknown hyperparameter 'nesterov' for rule 'sign'"):
        RaggedOptimizer([parameter(3, 4)], Sign, nesterov=True)
    with pytest.raises(TypeError, match="a rule is a name or a subclass"):
        RaggedOptimizer([parameter(3, 4)], int)  # type: ignore[arg-type]


class Rebinding(Sign):
    """Binds a new tensor to its states where it should write in place."""

    name = "rebinding"

    def init(self, shape: tuple[int, ...], group: Any) -> dict[str, StateSpec]:
        return {"momentum_buffer": StateSpec(shape), "mean": StateSpec((1,), torch.float32, home="owner")}

    def direction(self, param: Any, grad: Any, state: Any, group: Any) -> Any:
        state["momentum_buffer"] = state["momentum_buffer"].lerp(grad, 1 - group["momentum"])
        return state["momentum_buffer"].clone()

    def update(self, matrix: Any, state: Any, group: Any) -> Any:
        state["mean"] = matrix.mean().reshape(1)
        return matrix.sign()


class ByBlocks(Tiles):
    name = "by_blocks"

    def init(self, shape: tuple[int, ...], group: Any) -> dict[str, StateSpec]:
        return {"m": StateSpec(shape, torch.float32, tile=(32, 32)), "plain": StateSpec(shape)}

    def update(self, param: Any, grad: Any, state: Any, group: Any, extent: Any) -> None:
        state["m"] = state["m"].lerp(grad, 0.5)
        state["plain"] = state["plain"].lerp(grad, 0.5)
        param.sub_(state["m"])


def test_states_that_a_rule_binds_anew_are_kept_and_may_lie_in_tiles() -> None:
    grad = full((64, 32), 1)
    for rule in (Rebinding, ByBlocks):
        param = nn.Parameter(full((64, 32), 0))
        optimizer = RaggedOptimizer([param], rule)
        tensors = dict(optimizer.state[param])
        param.grad = grad
        optimizer.step()
        state = optimizer.state[param]
        assert all(state[key] is tensor for key, tensor in tensors.items())
        key = "momentum_buffer" if rule is Rebinding else "plain"
        torch.testing.assert_close(state[key], 0.5 * grad)
        if rule is Rebinding:
            torch.testing.assert_close(state["mean"], (0.5 * grad).mean().reshape(1))
        else:
            torch.testing.assert_close(param.detach(), full((64, 32), 0) - 0.5 * grad)
            assert state["m.codes"].dtype == torch.uint8 and bool(state["m.codes"].any())


@pytest.mark.parametrize(
    ("method", "returns", "message"),
    [
        ("update", lambda matrix: None, r"update\(\) returns a tensor of shape \(3, 4\) here, not None"),
        ("update", lambda matrix: matrix[:1], r"not a tensor of shape \(1, 4\)"),
        ("direction", lambda param: None, r"rule 'wrong': direction\(\) returns a tensor of shape"),
    ],
)
def test_what_a_matrix_rule_must_return_is_said(method: str, returns: Any, message: str) -> None:
    changed = {"name": "wrong", method: lambda self, first, *rest: returns(first)}
    optimizer = RaggedOptimizer([parameter(3, 4)], type("Wrong", (Sign,), changed))
    (param,) = optimizer.param_groups[0]["params"]
    param.grad = full((3, 4), 1)
    with pytest.raises(ValueError, match=message):
        optimizer.step()


def test_states_that_init_does_not_name_are_refused() -> None:
    def direction(self: Any, param: Any, grad: Any, state: Any, group: Any) -> Any:
        state["count"] = torch.ones(())
        return grad

    optimizer = RaggedOptimizer([parameter(3, 4)], type("Making", (Sign,), {"name": "making", "direction": direction}))
    (param,) = optimizer.param_groups[0]["params"]
    param.grad = full((3, 4), 1)
    with pytest.raises(ValueError, match="rule 'making' has made or removed states; its init"):
        optimizer.step()


def test_the_rule_that_the_docs_write_runs_as_it_stands_there() -> None:
    text = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text()
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "SpectralSign" in block)
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))
    names: dict[str, Any] = {"torch": torch, "ParamPolicy": ParamPolicy, "policies": policies, "model": model}
    exec(code, names)
    optimizer = names["optimizer"]
    assert {group["rule"] for group in optimizer.param_groups} == {"spectral_sign", "adamw"}
    start = model[0].weight.detach().clone()
    model[0].weight.grad = torch.outer(torch.ones(6), torch.arange(8.0))
    optimizer.step()
    singular = torch.linalg.svdvals(start - model[0].weight.detach())
    torch.testing.assert_close(singular[:2], torch.tensor([0.02, 0.0]), rtol=1e-4, atol=1e-6)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
