"""Shampoo and SOAP against their formulas in float64; roots against their definition; failures keep the last root."""

from __future__ import annotations

import copy
import functools
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import ragged_optim
from ragged_optim import matrix_roots as roots
from tests import cluster
from tests.ragged_optim.models import full, train

# After one step of a (6, 5) matrix L has rank 5 of 6: far above how each kind of CPU rounds the zero eigenvalue, whose
# root would else be anything.
EPS = 1e-2


def power(matrix: Tensor, exponent: float) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values.clamp(min=0).add(EPS).pow(exponent)) @ vectors.T


def shampoo_reference(
    weight: Tensor, grads: list[Tensor], frequency: int, beta2: float, grafting: str | None, delay: int = 0
) -> Tensor:
    lr, beta1, decay = 0.05, 0.9, 0.1
    p = weight.double()
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    left, right = torch.zeros(len(p), len(p)).double(), torch.zeros(p.shape[1], p.shape[1]).double()
    gain, made, root_left, root_right = 1.0 if beta2 == 1 else 1 - beta2, {}, None, None
    for step, grad in enumerate(grads, 1):
        g = grad.double()
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + gain * g * g
        left, right = beta2 * left + gain * g @ g.T, beta2 * right + gain * g.T @ g
        correction = 1.0 if beta2 == 1 else 1 - beta2**step
        if step == 1 or (step > 1 + delay and step % frequency == 0):
            made[step + delay] = power(left / correction, -0.25), power(right / correction, -0.25)
        root_left, root_right = made.get(step, (root_left, root_right))
        mean = m / (1 - beta1**step)
        update = mean if root_left is None else root_left @ mean @ root_right
        graft = mean / ((v / correction).sqrt() + 1e-8) if grafting == "adam" else mean
        if grafting is not None:
            update = update * graft.norm() / update.norm()
        p = p * (1 - lr * decay) - lr * update
    return p


@pytest.mark.parametrize("beta2", [0.95, 1.0])
@pytest.mark.parametrize(
    ("frequency", "delay", "grafting"),
    [(1, 0, "adam"), (1, 0, "sgd"), (1, 0, None), (3, 0, "adam"), (3, 0, "sgd"), (3, 0, None), (3, 2, "sgd")],
)
def test_shampoo_equals_its_formula(frequency: int, delay: int, grafting: str | None, beta2: float) -> None:
    param = nn.Parameter(full((6, 5), 0))
    grads = [full((6, 5), 1 + s) + torch.eye(6, 5) for s in range(7)]
    expected = shampoo_reference(param.detach(), grads, frequency, beta2, grafting, delay)
    optimizer = ragged_optim.Shampoo(
        [param],
        lr=0.05,
        betas=(0.9, beta2),
        weight_decay=0.1,
        precondition_frequency=frequency,
        root_delay=delay,
        preconditioner_eps=EPS,
        grafting=grafting,
    )
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    torch.testing.assert_close(param.double(), expected, rtol=1e-5, atol=1e-5)


def test_blocks_are_preconditioned_by_themselves() -> None:
    whole = nn.Parameter(full((7, 10), 0))
    blocks = [nn.Parameter(part.clone()) for rows in whole.detach().split(4) for part in rows.split(5, 1)]
    a = ragged_optim.Shampoo([whole], max_preconditioner_dim=5, grafting=None, precondition_frequency=2)
    b = ragged_optim.Shampoo(blocks, max_preconditioner_dim=5, grafting=None, precondition_frequency=2)
    for step in range(4):
        whole.grad = full((7, 10), 1 + step)
        parts = [part for rows in whole.grad.split(4) for part in rows.split(5, 1)]
        for param, part in zip(blocks, parts, strict=True):
            param.grad = part.clone()
        a.step()
        b.step()
    for param, part in zip(blocks, [x for rows in whole.detach().split(4) for x in rows.split(5, 1)], strict=True):
        torch.testing.assert_close(param.detach(), part, rtol=1e-5, atol=1e-6)


def test_grafting_takes_over_the_size_of_adams_step() -> None:
    ours, adam = nn.Parameter(full((12, 8), 0)), nn.Parameter(full((12, 8), 0))
    a = ragged_optim.Shampoo([ours], lr=0.1, weight_decay=0.0)
    b = torch.optim.Adam([adam], lr=0.1)
    start = ours.detach().clone()
    ours.grad = full((12, 8), 1)
    adam.grad = ours.grad.clone()
    a.step()
    b.step()
    torch.testing.assert_close((ours - start).norm(), (adam - start).norm(), rtol=1e-4, atol=0)
    assert (ours - adam).norm() > 0.1 * (adam - start).norm()


def soap_reference(weight: Tensor, grads: list[Tensor], frequency: int) -> Tensor:
    lr, (beta1, beta2), beta, decay = 0.05, (0.9, 0.95), 0.8, 0.1
    p = weight.double()
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    first = grads[0].double()
    left, right = (1 - beta) * first @ first.T, (1 - beta) * first.T @ first
    q_left, q_right = torch.linalg.eigh(left)[1].flip(1), torch.linalg.eigh(right)[1].flip(1)
    for step, grad in enumerate(grads[1:], 1):
        g = grad.double()
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * (q_left.T @ g @ q_right) ** 2
        hat = (q_left.T @ m @ q_right) / (1 - beta1**step) / ((v / (1 - beta2**step)).sqrt() + 1e-8)
        p = p * (1 - lr * decay) - lr * q_left @ hat @ q_right.T
        left, right = beta * left + (1 - beta) * g @ g.T, beta * right + (1 - beta) * g.T @ g
        if step % frequency == 0:
            order = torch.diag(q_left.T @ left @ q_left).argsort(descending=True)
            q_left, v = torch.linalg.qr(left @ q_left[:, order])[0], v[order]
            order = torch.diag(q_right.T @ right @ q_right).argsort(descending=True)
            q_right, v = torch.linalg.qr(right @ q_right[:, order])[0], v[:, order]
    return p


@pytest.mark.parametrize("frequency", [1, 3])
def test_soap_equals_its_formula(frequency: int) -> None:
    param = nn.Parameter(full((5, 5), 0))
    grads = [full((5, 5), 1 + s) for s in range(8)]
    expected = soap_reference(param.detach(), grads, frequency)
    optimizer = ragged_optim.SOAP(
        [param],
        lr=0.05,
        betas=(0.9, 0.95),
        shampoo_beta=0.8,
        weight_decay=0.1,
        precondition_frequency=frequency,
    )
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    torch.testing.assert_close(param.double(), expected, rtol=1e-4, atol=1e-4)


def test_soap_leaves_a_long_side_alone() -> None:
    param = nn.Parameter(full((4, 9), 0))
    optimizer = ragged_optim.SOAP([param], max_preconditioner_dim=8)
    assert set(optimizer.state[param]) == {"step", "exp_avg", "exp_avg_sq", "L", "Q_L"}
    for step in range(3):
        param.grad = full((4, 9), step)
        optimizer.step()
    assert param.isfinite().all()


@pytest.mark.parametrize("name", ["SOAP", "Shampoo", "NorMuon"])
def test_splits_of_which_some_have_no_factor_end_as_separate_matrices(name: str) -> None:
    options = {} if name == "NorMuon" else {"max_preconditioner_dim": 8}
    whole = nn.Parameter(full((16, 6), 0))
    parts = [nn.Parameter(part.clone()) for part in whole.detach().split([4, 12])]
    one = getattr(ragged_optim, name)([whole], split_sizes=(4, 12), **options)
    two = getattr(ragged_optim, name)(parts, **options)
    for seed in range(3):
        whole.grad = full((16, 6), 1 + seed)
        parts[0].grad, parts[1].grad = whole.grad.split([4, 12])
        one.step()
        two.step()
    assert torch.equal(whole, torch.cat([part.detach() for part in parts]))


@given(dim=st.integers(1, 12), seed=st.integers(0, 100), root=st.sampled_from([2.0, 4.0]))
def test_inverse_root_is_one(dim: int, seed: int, root: float) -> None:
    half = full((dim, dim), seed).double()
    matrix = half @ half.T + 0.1 * torch.eye(dim).double()
    found = roots.inverse_root(matrix, root, 0.0)
    assert found is not None
    identity = matrix @ torch.linalg.matrix_power(found, int(root))
    torch.testing.assert_close(identity, torch.eye(dim).double(), rtol=0, atol=1e-8)


@given(dim=st.integers(1, 20), seed=st.integers(0, 100))
def test_packing_keeps_a_symmetric_matrix_in_half_the_bytes(dim: int, seed: int) -> None:
    half = full((dim, dim), seed)
    matrix = half + half.T
    packed = roots.pack(matrix)
    assert packed.numel() == roots.packed_numel(dim) and torch.equal(roots.unpack(packed), matrix)


def test_rank_deficient_and_zero_factors_have_finite_roots() -> None:
    thin = full((16, 2), 0)
    for matrix in (thin @ thin.T, torch.zeros(16, 16)):
        found = roots.inverse_root(matrix, 4.0, 1e-6)
        assert found is not None and bool(found.isfinite().all())


def test_a_failing_decomposition_is_tried_in_fp64_and_then_keeps_the_last_root(monkeypatch: pytest.MonkeyPatch) -> None:
    real, tried = torch.linalg.eigh, []

    def failing(matrix: Tensor) -> Any:
        tried.append(matrix.dtype)
        raise torch.linalg.LinAlgError("no convergence")

    param = nn.Parameter(full((6, 5), 0))
    optimizer = ragged_optim.Shampoo([param], precondition_frequency=1)
    param.grad = full((6, 5), 1)
    optimizer.step()
    kept = optimizer.state[param]["root_L"].clone()
    monkeypatch.setattr(torch.linalg, "eigh", failing)
    with pytest.warns(RuntimeWarning, match="no root of L of block 0; the last one stays in use"):
        optimizer.step()
    assert tried[:2] == [torch.float32, torch.float64]
    assert torch.equal(kept, optimizer.state[param]["root_L"])
    monkeypatch.setattr(torch.linalg, "eigh", lambda m: real(m) if m.dtype == torch.float64 else failing(m))
    optimizer.step()
    assert not torch.equal(kept, optimizer.state[param]["root_L"])


def test_soap_says_when_there_is_no_basis(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(matrix: Tensor) -> Any:
        raise torch.linalg.LinAlgError("no convergence")

    param = nn.Parameter(full((6, 5), 0))
    optimizer = ragged_optim.SOAP([param], precondition_frequency=1)
    param.grad = full((6, 5), 1)
    monkeypatch.setattr(torch.linalg, "eigh", failing)
    with pytest.warns(RuntimeWarning, match="soap: no basis of [LR]; the identity is used"):
        optimizer.step()
    monkeypatch.setattr(roots, "refresh_basis", lambda m, basis: (basis * float("nan"), torch.arange(len(m))))
    with pytest.warns(RuntimeWarning, match="soap: no basis of [LR]; the last one stays in use"):
        optimizer.step()
    assert torch.equal(optimizer.state[param]["Q_L"], torch.eye(6))


@pytest.mark.parametrize("name", ["Shampoo", "SOAP"])
def test_a_gradient_that_is_not_finite_leaves_its_matrix_and_states_alone(name: str) -> None:
    stack = nn.Parameter(full((2, 6, 5), 0))
    optimizer = getattr(ragged_optim, name)([("experts.w1", stack)], weight_decay=0.1, precondition_frequency=1)
    for step in range(2):
        stack.grad = full((2, 6, 5), 1 + step)
        optimizer.step()
    before, kept = stack.detach().clone(), {k: v.clone() for k, v in optimizer.state[stack].items()}
    stack.grad = full((2, 6, 5), 3)
    stack.grad[1, 0, 0] = float("nan")
    with pytest.warns(
        RuntimeWarning, match="non-finite gradient: matrix 1 of parameter 'experts.w1' and its states are left alone"
    ):
        optimizer.step()
    assert torch.equal(stack[1], before[1]) and not torch.equal(stack[0], before[0])
    for key, value in kept.items():
        assert torch.equal(optimizer.state[stack][key], value) == key.endswith(".1"), key


class Slow:
    """Runs what is begun when its result is wanted, or at once."""

    def __init__(self, *, at_once: bool) -> None:
        self.at_once = at_once

    def submit(self, function: Any, *arguments: Any) -> Any:
        result = function(*arguments) if self.at_once else None
        return SimpleNamespace(result=lambda: result if self.at_once else function(*arguments))


DELAYED = {
    "Shampoo": {"precondition_frequency": 3, "root_delay": 2, "max_preconditioner_dim": 5},
    "SOAP": {"precondition_frequency": 3, "basis_delay": 2},
}


def delayed(name: str, steps: int, reload: bool = False) -> list[Tensor]:
    param = nn.Parameter(full((2, 7, 6), 0))
    optimizer = getattr(ragged_optim, name)([param], lr=0.1, **DELAYED[name])
    for step in range(steps):
        if reload:
            saved = copy.deepcopy(optimizer.state_dict())
            param = nn.Parameter(param.detach().clone())
            optimizer = getattr(ragged_optim, name)([param], lr=0.1, **DELAYED[name])
            optimizer.load_state_dict(saved)
        param.grad = full((2, 7, 6), 1 + step)
        optimizer.step()
    states = optimizer.state_dict()["state"][0]
    return [param.detach(), *states.values()]


@pytest.mark.parametrize("name", ["Shampoo", "SOAP"])
def test_when_a_root_is_ready_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = delayed(name, 9)
    for at_once in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr(roots, "_thread", lambda at_once=at_once: Slow(at_once=at_once))
            assert all(torch.equal(a, b) for a, b in zip(delayed(name, 9), expected, strict=True))
    monkeypatch.setitem(DELAYED, name, {**DELAYED[name], next(k for k in DELAYED[name] if "delay" in k): 0})
    assert not torch.equal(delayed(name, 9)[0], expected[0])


@pytest.mark.parametrize("name", ["Shampoo", "SOAP"])
def test_a_run_that_is_saved_and_loaded_while_roots_are_computed_goes_on_exactly(name: str) -> None:
    for steps in (4, 9):
        assert all(torch.equal(a, b) for a, b in zip(delayed(name, steps, True), delayed(name, steps), strict=True))


@pytest.mark.parametrize("name", ["Shampoo", "SOAP"])
def test_roots_in_the_background_end_alike_in_every_world(name: str) -> None:
    shapes = [(17, 9), (3, 5, 7)]
    make = functools.partial(getattr(ragged_optim, name), **DELAYED[name])
    expected = train(make, shapes, steps=8)
    assert cluster.run(3, train, make, shapes, "ragged", steps=8) == [expected] * 3


@pytest.mark.parametrize(("name", "option"), [("Shampoo", "root_delay"), ("SOAP", "basis_delay")])
@pytest.mark.parametrize("delay", [-1, 3, 0.5])
def test_a_delay_as_long_as_the_time_between_roots_is_refused(name: str, option: str, delay: Any) -> None:
    with pytest.raises(ValueError, match=f"{option} must be an integer from 0 to precondition_frequency - 1 = 2"):
        getattr(ragged_optim, name)([nn.Parameter(full((3, 3), 0))], precondition_frequency=3, **{option: delay})


@pytest.mark.parametrize("name", ["Shampoo", "SOAP"])
def test_one_gradient_whose_square_overflows_does_not_stop_a_matrix_for_good(name: str) -> None:
    params = [nn.Parameter(full((6, 5), 0)) for _ in range(2)]
    optimizers = [getattr(ragged_optim, name)([("w", param)], precondition_frequency=2) for param in params]
    for seed, size in enumerate((1.0, 1.0, 1e20, 1.0, 1.0)):
        for param, optimizer in zip(params, optimizers, strict=True):
            param.grad = None if size > 1 and param is params[1] else size * full((6, 5), 1 + seed)
            with pytest.warns(RuntimeWarning, match="left alone") if size > 1 and param is params[0] else nullcontext():
                optimizer.step()
    assert torch.equal(*params)
