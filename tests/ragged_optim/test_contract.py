"""The torch.optim contract: what schedulers, scalers, hooks, checkpoints and users of param groups rely on."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import warnings
from collections import UserList
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import ragged_optim
from ragged_optim import ParamPolicy, StateSpec, policies
from tests import cluster
from tests.ragged_optim.models import digest, full, shard

NAMES = [
    name
    for name in ("AdamW", "Adam", "SGD", "Lion", "Muon", "NorMuon", "Shampoo", "SOAP", "AdamW8bit", "Adam8bit")
    if name in dir(ragged_optim)
]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4, bias=False))


def build(name: str, module: nn.Module, **options: Any) -> Any:
    return getattr(ragged_optim, name)(module.named_parameters(), **options)


def loss_of(module: nn.Module, seed: int = 0) -> Tensor:
    return module(full((6, 8), seed)).square().mean()


def step(optimizer: Any, module: nn.Module, seed: int = 0) -> None:
    optimizer.zero_grad()
    loss_of(module, seed).backward()
    optimizer.step()


def weights(module: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def assert_same(a: list[Tensor], b: list[Tensor]) -> None:
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_training_lowers_the_loss(name: str) -> None:
    module = model()
    optimizer = build(name, module, lr=0.02)
    before = loss_of(module).item()
    for _ in range(10):
        step(optimizer, module)
    assert loss_of(module).item() < 0.9 * before


@pytest.mark.parametrize("name", NAMES)
def test_closure_is_called_with_gradients_enabled_and_its_loss_returned(name: str) -> None:
    module = model()
    optimizer = build(name, module)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(module)
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert loss.item() > 0
    assert optimizer.step() is None


@pytest.mark.parametrize("name", NAMES)
def test_state_is_complete_before_any_gradient(name: str) -> None:
    module = model()
    optimizer = build(name, module)
    before = {k: {key: value.shape for key, value in v.items()} for k, v in optimizer.state_dict()["state"].items()}
    assert len(before) == 3
    step(optimizer, module)
    after = {k: {key: value.shape for key, value in v.items()} for k, v in optimizer.state_dict()["state"].items()}
    assert before == after


@pytest.mark.parametrize("name", NAMES)
def test_a_parameter_without_gradient_is_left_alone_with_its_state(name: str) -> None:
    module = model()
    optimizer = build(name, module)
    step(optimizer, module)
    param = next(module.parameters())
    kept = param.detach().clone(), copy.deepcopy(optimizer.state[param])
    loss_of(module, 1).backward()
    param.grad = None
    optimizer.step()
    assert torch.equal(param, kept[0])
    assert all(torch.equal(optimizer.state[param][key], value) for key, value in kept[1].items())


@pytest.mark.parametrize("name", NAMES)
def test_maximize_is_minimising_the_negative(name: str) -> None:
    a, b = model(), model()
    up, down = build(name, a, maximize=True), build(name, b)
    for seed in range(3):
        up.zero_grad()
        down.zero_grad()
        (-loss_of(a, seed)).backward()
        loss_of(b, seed).backward()
        up.step()
        down.step()
    assert_same(weights(a), weights(b))
    assert float(next(a.parameters()).grad.abs().sum()) > 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.5**epoch),
        lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
        lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),
        lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.1, step_size_up=2),
        lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.9)], [2]
        ),
    ],
    ids=["lambda", "cosine", "onecycle", "cyclic", "plateau", "sequential"],
)
def test_schedulers(name: str, tensor_lr: bool, schedule: Any) -> None:
    module = model()
    lr = torch.tensor(0.02) if tensor_lr else 0.02
    optimizer = build(name, module, lr=lr)
    scheduler = schedule(optimizer)
    seen = []
    for seed in range(5):
        step(optimizer, module, seed)
        scheduler.step(1.0) if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else scheduler.step()
        seen.append([float(group["lr"]) for group in optimizer.param_groups])
    assert len({tuple(lrs) for lrs in seen}) > 1
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("first", ["Muon", "AdamW", "Shampoo"])
def test_momentum_cycling_reaches_groups_of_other_algorithms(first: str) -> None:
    module = model()
    policy = policies.shampoo() if first == "Shampoo" else policies.muon()
    optimizer = build(first, module, orig_param_policy=policy)
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8, base_momentum=0.7, max_momentum=0.8)
    step(optimizer, module)
    cycled = [group["betas"][0] if "betas" in group else group["momentum"] for group in optimizer.param_groups]
    assert cycled == [0.8, 0.8]
    bias, weight = module[0].bias, module[0].weight
    torch.testing.assert_close(optimizer.state[bias]["exp_avg"], (1 - 0.8) * bias.grad)
    key = "exp_avg" if first == "Shampoo" else "momentum_buffer"
    torch.testing.assert_close(optimizer.state[weight][key], (1 - 0.8) * weight.grad)
    # What a scheduler has left there neither wins over a later assignment nor goes into checkpoints.
    scheduler.step()
    assert all(("momentum" in g) == (g["rule"] == "muon") for g in optimizer.state_dict()["param_groups"])
    (group,) = (group for group in optimizer.param_groups if group["rule"] == "adamw")
    group["betas"] = (0.25, 0.999)
    before = optimizer.state[bias]["exp_avg"].clone()
    step(optimizer, module)
    torch.testing.assert_close(optimizer.state[bias]["exp_avg"], 0.25 * before + 0.75 * bias.grad)
    assert group["betas"] == (0.25, 0.999)


@pytest.mark.parametrize("name", NAMES)
def test_state_dict_round_trip_continues_exactly(name: str) -> None:
    module = model()
    optimizer = build(name, module, lr=0.05)
    for seed in range(3):
        step(optimizer, module, seed)
    file = io.BytesIO()
    torch.save([module.state_dict(), optimizer.state_dict()], file)
    for seed in range(3, 5):
        step(optimizer, module, seed)
    file.seek(0)
    module2 = model()
    optimizer2 = build(name, module2)
    saved = torch.load(file, weights_only=True)
    module2.load_state_dict(saved[0])
    addresses = {(p, key): value.data_ptr() for p, state in optimizer2.state.items() for key, value in state.items()}
    optimizer2.load_state_dict(saved[1])
    assert addresses == {
        (p, key): value.data_ptr() for p, state in optimizer2.state.items() for key, value in state.items()
    }
    assert [group["lr"] for group in optimizer2.param_groups] == [group["lr"] for group in optimizer.param_groups]
    for seed in range(3, 5):
        step(optimizer2, module2, seed)
    assert_same(weights(module), weights(module2))


def test_a_hook_may_put_something_else_in_place_of_the_state_dict() -> None:
    optimizer = build("Muon", model())
    optimizer.register_state_dict_post_hook(lambda optimizer, state_dict: {"inner": state_dict})
    assert list(optimizer.state_dict()) == ["inner"]


@pytest.mark.parametrize("name", NAMES)
def test_deepcopy_and_pickle_continue_exactly(name: str) -> None:
    module = model()
    optimizer = build(name, module)
    step(optimizer, module)
    module2, optimizer2 = copy.deepcopy((module, optimizer))
    module3, optimizer3 = pickle.loads(pickle.dumps((module, optimizer)))
    for m, o in ((module, optimizer), (module2, optimizer2), (module3, optimizer3)):
        step(o, m, 1)
    assert_same(weights(module), weights(module2))
    assert_same(weights(module), weights(module3))


def test_states_keep_their_dtype_when_loaded_into_parameters_of_another() -> None:
    # pytorch/pytorch#43706: torch casts fp32 moments to the parameter's bf16.
    param = nn.Parameter(full((8, 8), 0, torch.bfloat16))
    optimizer = ragged_optim.AdamW([param], state_dtype=torch.float32)
    param.grad = full((8, 8), 1, torch.bfloat16)
    optimizer.step()
    again = ragged_optim.AdamW([nn.Parameter(param.detach().clone())], state_dtype=torch.float32)
    again.load_state_dict(optimizer.state_dict())
    (state,) = again.state.values()
    assert state["exp_avg"].dtype == torch.float32 and torch.equal(state["exp_avg"], optimizer.state[param]["exp_avg"])


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_state_dicts_of_torch_load_and_ours_load_into_torch(name: str) -> None:
    module, module2 = model(), model()
    theirs = getattr(torch.optim, name)(module.parameters(), lr=0.03)
    for seed in range(2):
        step(theirs, module, seed)
    ours = getattr(ragged_optim, name)(module2.parameters())
    module2.load_state_dict(module.state_dict())
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["lr"] == 0.03
    step(theirs, module, 2)
    step(ours, module2, 2)
    for a, b in zip(weights(module), weights(module2), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    theirs.load_state_dict(ours.state_dict())
    assert float(theirs.state[next(module.parameters())]["step"]) == 3


def test_groups_keep_their_own_hyperparameters() -> None:
    module = model()
    first, bias, last = module.named_parameters()
    optimizer = ragged_optim.Muon(
        [{"params": [first], "lr": 0.5, "momentum": 0.1}, {"params": [bias, last], "adamw_lr": 0.25}], lr=0.02
    )
    got = [(g["rule"], g["lr"], g.get("momentum"), g["param_names"]) for g in optimizer.param_groups]
    assert got == [
        ("muon", 0.5, 0.1, ["0.weight"]),
        ("muon", 0.02, 0.95, ["2.weight"]),
        ("adamw", 0.25, None, ["0.bias"]),
    ]


def test_a_group_that_is_not_to_decay_does_not_whatever_updates_it() -> None:
    first, bias, last = model().named_parameters()
    groups: list[dict[str, Any]] = [{"params": [first]}, {"params": [bias, last], "weight_decay": 0.0}]
    optimizer = ragged_optim.Muon(groups, adamw_weight_decay=0.5)
    got = [(g["rule"], g["weight_decay"], g["param_names"]) for g in optimizer.param_groups]
    assert got == [("muon", 0.1, ["0.weight"]), ("muon", 0.0, ["2.weight"]), ("adamw", 0.0, ["0.bias"])]
    optimizer = ragged_optim.Muon([{"params": [bias], "weight_decay": 0.0, "adamw_lr": 0.25}])
    assert [(g["rule"], g["weight_decay"], g["lr"]) for g in optimizer.param_groups] == [("adamw", 0.0, 0.25)]


def test_hyperparameters_that_reach_no_parameter_of_their_group_are_refused() -> None:
    first, bias, last = model().named_parameters()
    group = {"params": [bias], "weight_decay": 0.1, "lr": 7e-4}
    with pytest.raises(ValueError, match=r"'weight_decay', 'lr' of the param group of '0.bias'.*adamw_lr, or give"):
        ragged_optim.Muon([{"params": [first, last]}, group])
    with pytest.raises(ValueError, match="of this group to muon; give the group rule='muon', or say so in the policy"):
        ragged_optim.AdamW([{"params": [first], "lr": 0.1}], orig_param_policy=policies.muon())
    with pytest.raises(ValueError, match="unknown hyperparameter 'adamw_weigth_decay' in this param group"):
        ragged_optim.Muon([{"params": [first], "adamw_weigth_decay": 0.1}])
    ragged_optim.Muon([{"params": [first, last]}, {**group, "rule": "adamw"}])
    ragged_optim.Muon([{"params": [bias], "lr": 0.1, "adamw_lr": 0.1}])  # layer-wise rates for both kinds
    for rule in ("AdamW", "Shampoo", "SOAP", "Lion"):
        with pytest.raises(ValueError, match="unknown hyperparameter 'momentum' for rule"):
            getattr(ragged_optim, rule)([{"params": [first], "momentum": 0.5}])


def test_a_group_may_name_its_rule() -> None:
    module = model()
    first, bias, last = module.named_parameters()
    optimizer = ragged_optim.Muon(
        [{"params": [first]}, {"params": [bias, last], "rule": "adamw", "lr": 0.125}], lr=0.02
    )
    assert [(g["rule"], g["lr"], len(g["params"])) for g in optimizer.param_groups] == [
        ("muon", 0.02, 1),
        ("adamw", 0.125, 2),
    ]


def test_policy_sets_rule_and_hyperparameters_per_parameter() -> None:
    def policy(name: str, parameter: Tensor) -> ParamPolicy | None:
        return ParamPolicy(optimizer="muon", lr=0.5) if name == "0.weight" else None

    optimizer = build("AdamW", model(), lr=0.125, orig_param_policy=policy)
    assert [(g["rule"], g["lr"], g["param_names"]) for g in optimizer.param_groups] == [
        ("adamw", 0.125, ["0.bias", "2.weight"]),
        ("muon", 0.5, ["0.weight"]),
    ]


def test_add_param_group_splits_by_rule_and_checks() -> None:
    module, more = model(), model()
    optimizer = build("Muon", module, lr=0.02)
    optimizer.add_param_group({"params": [("more." + n, p) for n, p in more.named_parameters()], "lr": 0.01})
    assert [(g["rule"], g["lr"], len(g["params"])) for g in optimizer.param_groups] == [
        ("muon", 0.02, 2),
        ("adamw", 1e-3, 1),
        ("muon", 0.01, 2),
        ("adamw", 1e-3, 1),
    ]
    step(optimizer, module)
    step(optimizer, more)
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [("again", next(module.parameters()))]})


def test_a_group_that_cannot_be_added_leaves_nothing_behind() -> None:
    module = model()
    optimizer = build("Muon", module)
    new = nn.Parameter(full((8, 8), 0))
    for bad in (module[0].bias, nn.Parameter(torch.zeros(3, dtype=torch.complex64))):
        with pytest.raises(ValueError):
            optimizer.add_param_group({"params": [("new.weight", new), ("bad.bias", bad)]})
        assert len(optimizer.param_groups) == 2 and new not in optimizer.state
    lr_scheduler.LambdaLR(optimizer, [lambda epoch: 1.0] * 2)
    step(optimizer, module)
    optimizer.add_param_group({"params": [("new.weight", new)]})
    optimizer.load_state_dict(optimizer.state_dict())


def by_shape(name: str, parameter: Tensor) -> ParamPolicy:
    return ParamPolicy(optimizer="lion" if parameter.ndim == 1 else "muon")


@pytest.mark.parametrize("policy", [None, by_shape, lambda name, parameter: by_shape(name, parameter)])
def test_a_copied_optimizer_still_knows_its_policy(policy: Any) -> None:
    optimizer = build("Muon", model(), orig_param_policy=policy)
    embedding = ("embed.weight", nn.Parameter(full((8, 4), 0)))
    expected = [["adamw"], ["adamw"]] if policy is None else [["muon"], ["lion"]]
    for again in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        got = []
        for pair in (embedding, ("x.bias", nn.Parameter(full((8,), 1)))):
            count = len(again.param_groups)
            try:
                again.add_param_group({"params": [pair]})
            except ValueError as error:  # a lambda cannot be pickled
                assert "could not be pickled" in str(error) and policy not in (None, by_shape)
                continue
            got.append([group["rule"] for group in again.param_groups[count:]])
        assert got == expected or (not got and policy not in (None, by_shape))


def test_hooks_fire() -> None:
    module, seen = model(), []
    optimizer = build("AdamW", module)
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    optimizer.register_state_dict_post_hook(lambda *_: seen.append("saved"))
    optimizer.register_load_state_dict_pre_hook(lambda *_: seen.append("loading"))
    optimizer.register_load_state_dict_post_hook(lambda *_: seen.append("loaded"))
    step(optimizer, module)
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["pre", "post", "saved", "loading", "loaded"]


@pytest.mark.parametrize("name", NAMES)
def test_grad_scaler_skips_a_step_with_an_inf(name: str) -> None:
    module = model()
    optimizer = build(name, module)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = weights(module)
    scaler.scale(loss_of(module)).backward()
    next(module.parameters()).grad[0, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert_same(before, weights(module))
    for _ in range(2):  # SOAP moves nothing in its first step
        optimizer.zero_grad()
        scaler.scale(loss_of(module)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert not torch.equal(before[0], weights(module)[0])


def scaled_steps(layout: str, infinite_rank: int) -> list[Any]:
    mesh = cluster.mesh((2,))
    params = [nn.Parameter(shard(full((8, 6), i), layout, mesh, 4)) for i in range(2)]
    optimizer = ragged_optim.Muon([(f"{i}.weight", p) for i, p in enumerate(params)])
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))  # makes the scale
    moved = []
    for bad in (True, False):
        before = [p.detach().to_local().clone() for p in params]
        for i, param in enumerate(params):
            param.grad = shard(full((8, 6), 9 + i), layout, mesh, 4)
        if bad and torch.distributed.get_rank() == infinite_rank:
            params[0].grad.to_local().view(-1)[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        moved.append([not torch.equal(p.detach().to_local(), b) for p, b in zip(params, before, strict=True)])
    return [moved, scaler.get_scale()]


@pytest.mark.parametrize("layout", ["shard0", "ragged"])
def test_an_inf_on_one_rank_skips_the_step_on_all(layout: str) -> None:
    for moved, scale in cluster.run(2, scaled_steps, layout, 1):
        assert moved == [[False, False], [True, True]] and scale == 4.0


def copied_and_reloaded(name: str) -> list[list[bool]]:
    mesh, shapes = cluster.mesh((2,)), [(8, 8), (24, 24), (20, 16), (4, 6, 5)]

    def go(optimizer: Any, params: Any, seed: int, spoil: bool = False) -> None:
        for i, (param, shape) in enumerate(zip(params, shapes, strict=True)):
            grad = full(shape, seed + i)
            grad[-1, 0] = float("nan") if spoil else 0.0
            param.grad = shard(grad, "shard0", mesh)
        optimizer.step()

    params = [nn.Parameter(shard(full(shape, i), "shard0", mesh)) for i, shape in enumerate(shapes)]
    pairs = [(f"{i}.weight", p) for i, p in enumerate(params)]
    # Owners chosen in two goes are not those chosen in one.
    optimizer = getattr(ragged_optim, name)(pairs[:1])
    optimizer.add_param_group({"params": pairs[1:]})
    go(optimizer, params, 10)
    copied_params, copied = copy.deepcopy((params, optimizer))
    go(copied, copied_params, 20)
    go(optimizer, params, 20)
    after = [digest(p) for p in params]
    found = [[digest(p) == kept for p, kept in zip(copied_params, after, strict=True)]]
    if name == "NorMuon":
        saved = optimizer.state_dict()
        for group in saved["param_groups"]:
            group["skip_nonfinite"] = True
        optimizer.load_state_dict(saved)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            go(optimizer, params, 30, spoil=True)
        found.append([digest(p) == kept for p, kept in zip(params, after, strict=True)])
    return found


@pytest.mark.parametrize("name", ["NorMuon", "SOAP"])
def test_a_copied_or_reloaded_optimizer_goes_on_alike_on_all_ranks(name: str) -> None:
    """Owners are chosen anew for none, and what is to be skipped is agreed where a state dict has asked for it."""
    for found in cluster.run(2, copied_and_reloaded, name):
        assert all(map(all, found))


@pytest.mark.parametrize("name", ["AdamW", "Muon"])
def test_step_under_torch_compile_is_the_same_step(name: str) -> None:
    a, b = model(), model()
    compiled, eager = build(name, a, lr=0.01), build(name, b, lr=0.01)
    scheduler = lr_scheduler.ExponentialLR(compiled, 0.5), lr_scheduler.ExponentialLR(eager, 0.5)
    run = torch.compile(compiled.step, backend="eager")
    for seed in range(3):
        for module, optimizer, go in ((a, compiled, run), (b, eager, eager.step)):
            optimizer.zero_grad()
            loss_of(module, seed).backward()
            go()
        scheduler[0].step()
        scheduler[1].step()
    assert_same(weights(a), weights(b))


def test_meta_parameters_get_their_state_when_materialised() -> None:
    with torch.device("meta"):
        module = nn.Linear(4, 4)
    future = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        optimizer = ragged_optim.AdamW(module.parameters())
        assert not optimizer.state
        module.to_empty(device="cpu")
    finally:
        torch.__future__.set_swap_module_params_on_conversion(future)
    nn.init.ones_(module.weight)
    assert len(optimizer.state_dict()["state"]) == 2
    module(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert module.weight.max().item() < 1


def test_frozen_parameters_have_no_state_until_they_get_a_gradient() -> None:
    module = model()
    module[0].weight.requires_grad_(False)
    optimizer = build("AdamW", module)
    assert len(optimizer.state) == 2
    step(optimizer, module)
    module[0].weight.requires_grad_(True)
    step(optimizer, module)
    assert len(optimizer.state) == 3


@pytest.mark.parametrize("name", ["AdamW", "Muon", "SOAP", "AdamW8bit"])
def test_a_state_dict_loads_into_a_model_that_has_been_frozen_since(name: str) -> None:
    first, second = model(), model()
    saved = build(name, first)
    step(saved, first)
    for param in (second[0].weight, second[0].bias):
        param.requires_grad_(False)
    optimizer = build(name, second)
    second.load_state_dict(first.state_dict())
    optimizer.load_state_dict(saved.state_dict())
    for param in (second[0].weight, second[0].bias):
        param.requires_grad_(True)
    step(saved, first, 1)
    step(optimizer, second, 1)
    assert_same(weights(first), weights(second))


def test_amsgrad_comes_with_a_state_dict_as_in_torch() -> None:
    first, second = model(), model()
    theirs = torch.optim.AdamW(first.parameters(), amsgrad=True)
    step(theirs, first)
    second.load_state_dict(first.state_dict())
    ours = build("AdamW", second)
    ours.load_state_dict(theirs.state_dict())
    step(theirs, first, 1)
    step(ours, second, 1)
    for a, b in zip(weights(first), weights(second), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_loading_leaves_how_a_weight_is_cut_into_matrices() -> None:
    fused, whole = (nn.Parameter(full((8, 4), 0)) for _ in range(2))
    saved = ragged_optim.Muon([("w", whole)], lr=0.5).state_dict()
    optimizer = ragged_optim.Muon([("w", fused)], split_sizes=(4, 4), min_8bit_size=8)
    optimizer.load_state_dict(saved)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["split_sizes"], group["min_8bit_size"]) == (0.5, (4, 4), 8)


def test_states_that_mean_something_else_here_are_not_loaded() -> None:
    param = nn.Parameter(full((64, 64), 0))
    coupled, decoupled = ({"weight_decay": decay} for decay in (0.1, 0.0))
    for theirs, ours in (("Adam", "AdamW"), ("AdamW", "Adam")):
        saved = getattr(torch.optim, theirs)([param], **coupled).state_dict()
        with pytest.raises(ValueError, match=f"decoupled_weight_decay=(True|False): load it into {theirs}"):
            getattr(ragged_optim, ours)([param]).load_state_dict(saved)
        getattr(ragged_optim, ours)([param]).load_state_dict(
            getattr(torch.optim, theirs)([param], **decoupled).state_dict()
        )
    # Tiles of 32 x 32 and of 40 x 40 have as many scales.
    for name, options in (("AdamW8bit", {}), ("Muon", {"momentum_8bit": True})):
        saved = getattr(ragged_optim, name)([param], tile=(40, 40), **options).state_dict()
        with pytest.raises(ValueError, match=r"saved in tiles of \(40, 40\), .* make it with tile=\(40, 40\)"):
            getattr(ragged_optim, name)([param], **options).load_state_dict(saved)
    saved = ragged_optim.Muon([param], momentum_8bit=True).state_dict()
    optimizer = ragged_optim.Muon([param])
    with pytest.raises(ValueError, match=r"'momentum_buffer.codes' .* which muon does not keep"):
        optimizer.load_state_dict(saved)
    assert list(optimizer.state[param]) == ["momentum_buffer"]


def test_hyperparameters_may_be_lists_of_a_configuration_library() -> None:
    param = nn.Parameter(full((8, 4), 0))
    optimizer = ragged_optim.AdamW([{"params": [param], "betas": UserList([0.5, 0.9])}])
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert float(optimizer.state[param]["exp_avg"].mean()) == 0.5
    ragged_optim.Muon([param], split_sizes=UserList([4, 4])).step()


@pytest.mark.parametrize("name", ["Muon", "NorMuon", "SOAP"])
def test_stacks_and_fused_matrices_need_not_be_contiguous(name: str) -> None:
    kinds: list[tuple[tuple[int, ...], dict[str, Any]]] = [((3, 5, 4), {}), ((8, 6), {"split_sizes": (2, 6)})]
    for shape, options in kinds:
        params = [nn.Parameter(full(shape, 0)), nn.Parameter(full(shape, 0).mT.contiguous().mT)]
        optimizers = [getattr(ragged_optim, name)([param], lr=0.1, **options) for param in params]
        for seed in range(3):
            for param, optimizer in zip(params, optimizers, strict=True):
                param.grad = full(shape, 1 + seed)
                optimizer.step()
        assert not params[1].is_contiguous() and torch.equal(*params)


class Started(ragged_optim.ElementwiseRule):
    name = "started"
    defaults: ClassVar[dict[str, Any]] = {"lr": 1.0}

    def init(self, shape: tuple[int, ...], group: Any) -> dict[str, StateSpec]:
        return {"scale": StateSpec(shape, fill=2.0), "salt": StateSpec((), torch.int64, home="everywhere", fill="salt")}

    def update(self, param: Any, grad: Any, state: Any, group: Any) -> None:
        param.sub_(state["scale"].mul_(0.5))


def test_what_a_state_dict_has_no_state_for_starts_as_its_rule_says() -> None:
    param = nn.Parameter(full((3,), 0))
    optimizer = ragged_optim.RaggedOptimizer([("w", param)], Started)
    fresh = {key: value.clone() for key, value in optimizer.state[param].items()}
    param.grad = torch.ones(3)
    optimizer.step()
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
    assert all(torch.equal(optimizer.state[param][key], value) for key, value in fresh.items())


def test_constructors_name_every_hyperparameter() -> None:
    for name in NAMES:
        parameters = inspect.signature(getattr(ragged_optim, name)).parameters
        assert not any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters.values()), name
        theirs = getattr(torch.optim, name, None)
        if theirs is None:
            continue
        for key, parameter in inspect.signature(theirs).parameters.items():
            assert key in parameters, (name, key)
            if isinstance(parameter.default, (int, float, tuple)):
                assert parameters[key].default == parameter.default, (name, key)


def test_public_names_are_there() -> None:
    for name in ragged_optim.__all__:
        assert getattr(ragged_optim, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Adagrad'"):
        _ = ragged_optim.Adagrad
