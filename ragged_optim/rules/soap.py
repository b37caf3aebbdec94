"""SOAP (arXiv 2409.11321): Adam in the eigenbasis of Shampoo's factors.

    G' = Q_L^T G Q_R
    m  = beta1 m + (1 - beta1) G                    kept in the original space, m' = Q_L^T m Q_R
    v  = beta2 v + (1 - beta2) G'^2                 in the eigenbasis
    U  = Q_L ( m' / (sqrt(v) + eps) ) Q_R^T         bias-corrected as in Adam
    p *= 1 - lr weight_decay,  p -= lr U            on the shard
    L  = shampoo_beta L + (1 - shampoo_beta) G G^T,  R alike
    Q_L, Q_R: one step of orthogonal iteration every ``precondition_frequency`` steps

The first step only initialises L, R and the bases and leaves the parameter alone, decay included, as the authors' code
does. All but the step of the parameters happens at the owner of the matrix. A side longer than
``max_preconditioner_dim`` (theirs: ``max_precond_dim``) keeps its own basis (it has no factor).

With ``basis_delay`` = d, the basis made of the factors of step t is first used after step t + d: until then it is
computed in a thread beside the training. When it is used does not depend on when it is ready.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ragged_optim import matrix_roots as roots
from ragged_optim.groups import given
from ragged_optim.optimizer import RaggedOptimizer
from ragged_optim.rule import Group, MatrixRule, State, StateSpec, decay, learning_rate, wide
from ragged_shard.policy import OrigParamPolicy

__all__ = ["SOAP", "SOAPRule"]


class SOAPRule(MatrixRule):
    """States, all at the owner, in fp32.

    ``step``, ``exp_avg``, ``exp_avg_sq``; ``L``, ``R`` packed, ``Q_L``, ``Q_R``; with ``basis_delay`` also
    ``next_Q_L``, ``next_Q_R`` and, as the columns are sorted anew, ``next_order_L``, ``next_order_R``.
    """

    name: ClassVar[str] = "soap"
    family: ClassVar[str] = "soap"
    defaults: ClassVar[Mapping[str, Any]] = {
        "lr": 3e-3,
        "betas": (0.95, 0.95),
        "shampoo_beta": 0.95,
        "eps": 1e-8,
        "weight_decay": 0.01,
        "weight_decay_mode": "decoupled",
        "precondition_frequency": 10,
        "basis_delay": 0,
        "max_preconditioner_dim": 10000,
        "split_sizes": None,
        "flatten": False,
        "maximize": False,
    }

    needs_finite: ClassVar[bool] = True

    def check(self, group: Group) -> None:
        super().check(group)
        for key in ("precondition_frequency", "max_preconditioner_dim"):
            if not (isinstance(group[key], int) and group[key] >= 1):
                raise ValueError(f"soap: {key} must be a positive integer, got {group[key]!r}")
        delay = group["basis_delay"]
        if not (isinstance(delay, int) and 0 <= delay < group["precondition_frequency"]):
            raise ValueError(
                f"soap: basis_delay must be an integer from 0 to precondition_frequency - 1 = "
                f"{group['precondition_frequency'] - 1}, got {delay!r}"
            )

    def init(self, shape: tuple[int, ...], group: Group) -> dict[str, StateSpec]:
        def owned(*size: int) -> StateSpec:
            return StateSpec(size, torch.float32, home="owner")

        rows, cols = shape[-2:]
        states = {"step": owned(1), "exp_avg": owned(rows, cols), "exp_avg_sq": owned(rows, cols)}
        for side, size in (("L", rows), ("R", cols)):
            if size <= group["max_preconditioner_dim"]:
                states |= {side: owned(roots.packed_numel(size)), f"Q_{side}": owned(size, size)}
                if group["basis_delay"]:
                    states |= {f"next_Q_{side}": owned(size, size), f"next_order_{side}": owned(size)}
        return states

    def cost(self, rows: int, cols: int, group: Group) -> float:
        total = 0.0
        for size in (rows, cols):
            if size <= group["max_preconditioner_dim"]:
                # The outer product, rotations of G, m and back; now and then a product and a QR.
                total += 8.0 * rows * cols * size + (2 + 4 / 3) * size**3 / int(group["precondition_frequency"])
        return total

    def direction(self, param: Tensor, grad: Tensor, state: State, group: Group) -> Tensor:
        return grad

    def update(self, matrix: Tensor, state: State, group: Group) -> Tensor:
        beta1, beta2 = group["betas"]
        state["step"] += 1
        step = int(state["step"]) - 1
        if step == 0:
            self._accumulate(matrix, state, group)
            for side in ("L", "R"):
                if side in state:
                    basis = roots.eigenbasis(roots.unpack(state[side]))
                    if basis is None:
                        basis = torch.eye(state[f"Q_{side}"].shape[0], device=matrix.device)
                        _warn(side, "the identity is used")
                    state[f"Q_{side}"].copy_(basis)
            return torch.full_like(matrix, torch.nan)  # the parameter is left alone
        rotated = _rotate(matrix, state)
        mean = state["exp_avg"].lerp_(matrix, 1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(rotated, rotated, value=1 - beta2)
        scale = (1 - beta2**step) ** 0.5 / (1 - beta1**step)
        update = _rotate_back(_rotate(mean, state) / (square.sqrt() + group["eps"]), state).mul_(scale)
        self._accumulate(matrix, state, group)
        delay, frequency = group["basis_delay"], group["precondition_frequency"]
        for side in ("L", "R") if step % frequency == 0 else ():
            if side in state:
                # The basis itself is still in use, and changes no more until the new one takes its place.
                begun = roots.refresh_basis, roots.unpack(state[side]), state[f"Q_{side}"]
                if delay:
                    roots.start(state[f"next_Q_{side}"], 0, *begun)
                else:
                    self._turn(side, *roots.refresh_basis(*begun[1:]), state)
        if delay and step > delay and (step - delay) % frequency == 0:
            self.settle(state, group)
            for side in ("L", "R"):
                if side in state:
                    self._turn(side, state[f"next_Q_{side}"], state[f"next_order_{side}"].long(), state)
        return update

    def settle(self, state: State, group: Group) -> None:
        for side in ("L", "R") if group["basis_delay"] else ():
            for _, (basis, order) in roots.finished(state[f"next_Q_{side}"]) if side in state else ():
                state[f"next_Q_{side}"].copy_(basis)
                state[f"next_order_{side}"].copy_(order)

    def _turn(self, side: str, basis: Tensor, order: Tensor, state: State) -> None:
        """Take over a new basis, made of the columns of the last one in ``order``."""
        if not bool(basis.isfinite().all()):
            _warn(side, "the last one stays in use")
            return
        state[f"Q_{side}"].copy_(basis)
        state["exp_avg_sq"].copy_(state["exp_avg_sq"].index_select("LR".index(side), order))

    def _accumulate(self, matrix: Tensor, state: State, group: Group) -> None:
        if "L" in state:
            state["L"].lerp_(roots.pack(matrix @ matrix.T), 1 - group["shampoo_beta"])
        if "R" in state:
            state["R"].lerp_(roots.pack(matrix.T @ matrix), 1 - group["shampoo_beta"])

    def apply(self, param: Tensor, update: Tensor, state: State, group: Group, shape: tuple[int, int]) -> None:
        work = wide(param)
        decay(work, update, group)
        work.add_(update, alpha=-learning_rate(group))
        if work is not param:
            param.copy_(work)


def _warn(side: str, instead: str) -> None:
    warnings.warn(f"soap: no basis of {side}; {instead}", RuntimeWarning, stacklevel=3)


def _rotate(matrix: Tensor, state: State) -> Tensor:
    matrix = state["Q_L"].T @ matrix if "Q_L" in state else matrix
    return matrix @ state["Q_R"] if "Q_R" in state else matrix


def _rotate_back(matrix: Tensor, state: State) -> Tensor:
    matrix = state["Q_L"] @ matrix if "Q_L" in state else matrix
    return matrix @ state["Q_R"].T if "Q_R" in state else matrix


class SOAP(RaggedOptimizer):
    """SOAP for the hidden matrices of a model, AdamW (``adamw_*``) for the rest; the authors' defaults.

    ``precondition_frequency``: steps between new bases. ``basis_delay``: steps that one may take in the background
    before it is used. ``split_sizes``, ``flatten``: as in ``Muon``.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        shampoo_beta: float = 0.95,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        weight_decay_mode: str = "decoupled",
        precondition_frequency: int = 10,
        basis_delay: int = 0,
        max_preconditioner_dim: int = 10000,
        split_sizes: tuple[int, ...] | None = None,
        flatten: bool = False,
        maximize: bool = False,
        adamw_lr: float | Tensor = 1e-3,
        adamw_betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float = 1e-2,
        orig_param_policy: OrigParamPolicy | None = None,
    ) -> None:
        arguments = given(locals())
        from ragged_optim import policies

        super().__init__(params, SOAPRule, default_policy=policies.soap(), **arguments)
