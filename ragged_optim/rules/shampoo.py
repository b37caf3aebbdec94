"""Shampoo (arXiv 1802.09568, 2309.06497): a preconditioner for each side of a matrix, grafted onto Adam's step size.

    L = beta2 L + (1 - beta2) G G^T          R = beta2 R + (1 - beta2) G^T G          beta2 = 1: sums
    m = beta1 m + (1 - beta1) G              v = beta2 v + (1 - beta2) G^2
    m', v', L', R' = m / (1 - beta1^t), v / (1 - beta2^t), ...                        beta2 = 1: v, L, R themselves
    U = (L' + e)^(-1/4) m' (R' + e)^(-1/4)   e: ``preconditioner_eps``; new roots every ``precondition_frequency`` steps
    U = U |A| / |U|                          A = m' / (sqrt(v') + eps): the step Adam would take
    p *= 1 - lr weight_decay,  p -= lr U     on the shard

Before ``start_preconditioning_step`` U = A. ``grafting="sgd"``: A = m'; ``None``: U is taken as it is, and is m' before
that step.

Everything but the last line happens at the owner of the matrix, on the whole matrix, so a step is the same for every
world size. A matrix larger than ``max_preconditioner_dim`` is cut into blocks that are preconditioned by themselves.
L, R and their roots are symmetric and stored packed.

With ``root_delay`` = d, roots of the factors of step t are first used in step t + d: until then they are computed in a
thread beside the training. A step uses the roots it would have used had they been computed at once, so timing changes
nothing, and no root is older than ``precondition_frequency + root_delay`` steps.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ragged_optim import matrix_roots as roots
from ragged_optim.groups import given
from ragged_optim.optimizer import RaggedOptimizer
from ragged_optim.rule import Group, MatrixRule, State, StateSpec, decay, learning_rate, wide
from ragged_shard.policy import OrigParamPolicy

__all__ = ["Shampoo", "ShampooRule"]

GRAFTING = ("adam", "sgd", None)


class ShampooRule(MatrixRule):
    """States, all at the owner, in fp32: ``step``, ``exp_avg``, ``exp_avg_sq`` (for grafting), and per block ``L``,
    ``R``, ``root_L``, ``root_R`` (packed); with ``root_delay`` also ``next_root_L``, ``next_root_R``.
    """

    name: ClassVar[str] = "shampoo"
    family: ClassVar[str] = "shampoo"
    defaults: ClassVar[Mapping[str, Any]] = {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "weight_decay_mode": "decoupled",
        "precondition_frequency": 10,
        "root_delay": 0,
        "start_preconditioning_step": 1,
        "max_preconditioner_dim": 1024,
        "preconditioner_eps": 1e-12,
        "grafting": "adam",
        "split_sizes": None,
        "flatten": False,
        "maximize": False,
    }

    needs_finite: ClassVar[bool] = True

    def check(self, group: Group) -> None:
        if group["betas"][1] == 1.0:
            super().check({**group, "betas": (group["betas"][0], 0.0)})
        else:
            super().check(group)
        for key in ("precondition_frequency", "start_preconditioning_step", "max_preconditioner_dim"):
            if not (isinstance(group[key], int) and group[key] >= 1):
                raise ValueError(f"shampoo: {key} must be a positive integer, got {group[key]!r}")
        delay = group["root_delay"]
        if not (isinstance(delay, int) and 0 <= delay < group["precondition_frequency"]):
            raise ValueError(
                f"shampoo: root_delay must be an integer from 0 to precondition_frequency - 1 = "
                f"{group['precondition_frequency'] - 1}, got {delay!r}"
            )
        if group["grafting"] not in GRAFTING:
            raise ValueError(f"shampoo: grafting must be one of {GRAFTING}, got {group['grafting']!r}")

    def init(self, shape: tuple[int, ...], group: Group) -> dict[str, StateSpec]:
        def owned(*size: int) -> StateSpec:
            return StateSpec(size, torch.float32, home="owner")

        rows, cols = shape[-2:]
        (down, height), (across, width) = (_cut(n, group["max_preconditioner_dim"]) for n in (rows, cols))
        left, right = (owned(down * across, roots.packed_numel(n)) for n in (height, width))
        states = {
            "step": owned(1),
            "exp_avg": owned(rows, cols),
            "L": left,
            "R": right,
            "root_L": left,
            "root_R": right,
        }
        if group["root_delay"]:
            states |= {"next_root_L": left, "next_root_R": right}
        if group["grafting"] == "adam":
            states["exp_avg_sq"] = owned(rows, cols)
        return states

    def cost(self, rows: int, cols: int, group: Group) -> float:
        (down, height), (across, width) = (_cut(n, group["max_preconditioner_dim"]) for n in (rows, cols))
        products = 2.0 * (height * height * width + height * width * width) * 2
        # A symmetric eigendecomposition takes about 9 n^3, and the root one more product.
        decompositions = 11.0 * (height**3 + width**3) / int(group["precondition_frequency"])
        return down * across * (products + decompositions)

    def direction(self, param: Tensor, grad: Tensor, state: State, group: Group) -> Tensor:
        return grad

    def update(self, matrix: Tensor, state: State, group: Group) -> Tensor:
        beta1, beta2 = group["betas"]
        state["step"] += 1
        step = int(state["step"])
        mean = state["exp_avg"].lerp_(matrix, 1 - beta1) / (1 - beta1**step)
        graft = self._graft(matrix, mean, state, group, step)
        delay = group["root_delay"]
        if delay and _roots_begin(step - delay, group):
            self.settle(state, group)
            for key in ("L", "R"):
                state[f"root_{key}"].copy_(state[f"next_root_{key}"])
        due = step >= group["start_preconditioning_step"] + delay
        preconditioned = torch.empty_like(matrix)
        for index, here in _blocks(matrix, group["max_preconditioner_dim"]):
            block = matrix[here]
            sides = (("L", block @ block.T), ("R", block.T @ block))
            for key, outer in sides:
                factor = state[key][index, : roots.packed_numel(outer.shape[0])]
                factor.mul_(beta2).add_(roots.pack(outer), alpha=1.0 if beta2 == 1 else 1 - beta2)
                if _roots_begin(step, group):
                    self._begin(key, index, factor, state, group, 1.0 if beta2 == 1 else 1 - beta2**step)
            if due:
                left, right = (
                    roots.unpack(state[f"root_{k}"][index, : roots.packed_numel(o.shape[0])]) for k, o in sides
                )
                preconditioned[here] = left @ mean[here] @ right
        if not due:
            return graft
        if group["grafting"] is None:
            return preconditioned
        return preconditioned.mul_(graft.norm() / (preconditioned.norm() + 1e-16))

    def _graft(self, grad: Tensor, mean: Tensor, state: State, group: Group, step: int) -> Tensor:
        """The step whose size is taken over."""
        if "exp_avg_sq" not in state:
            return mean
        beta2 = group["betas"][1]
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1.0 if beta2 == 1 else 1 - beta2)
        return mean / ((square / (1.0 if beta2 == 1 else 1 - beta2**step)).sqrt_().add_(group["eps"]))

    def _begin(self, key: str, index: int, factor: Tensor, state: State, group: Group, correction: float) -> None:
        """A new root of a block's factor, at once or in the background."""
        arguments = roots.unpack(factor) / correction, 4.0, float(group["preconditioner_eps"])
        if group["root_delay"]:
            roots.start(state[f"next_root_{key}"], index, roots.inverse_root, *arguments)
        else:
            self._keep(f"root_{key}", index, roots.inverse_root(*arguments), state)

    def settle(self, state: State, group: Group) -> None:
        for key in ("L", "R") if group["root_delay"] else ():
            for index, root in roots.finished(state[f"next_root_{key}"]):
                self._keep(f"next_root_{key}", index, root, state)

    def _keep(self, name: str, index: int, root: Tensor | None, state: State) -> None:
        """Store a root of block ``index``, or the last one with a warning when none could be found."""
        key, place = name[-1], state[name][index]
        if root is not None:
            place[: roots.packed_numel(root.shape[0])] = roots.pack(root)
            return
        last = state[f"root_{key}"][index]
        if bool(last.any()):
            place.copy_(last)
        else:
            size = (math.isqrt(8 * last.numel() + 1) - 1) // 2
            place.copy_(roots.pack(torch.eye(size, device=last.device)))
        warnings.warn(
            f"shampoo: no root of {key} of block {index}; the last one stays in use", RuntimeWarning, stacklevel=2
        )

    def apply(self, param: Tensor, update: Tensor, state: State, group: Group, shape: tuple[int, int]) -> None:
        work = wide(param)
        decay(work, update, group)
        work.add_(update, alpha=-learning_rate(group))
        if work is not param:
            param.copy_(work)


def _roots_begin(step: int, group: Group) -> bool:
    """Whether roots are made of the factors of ``step``: of the first one that preconditions, and of every multiple of
    the frequency after the first roots are in use.
    """
    first, delay = int(group["start_preconditioning_step"]), int(group["root_delay"])
    return step == first or (step > first + delay and step % int(group["precondition_frequency"]) == 0)


def _cut(size: int, largest: int) -> tuple[int, int]:
    """How many blocks of at most ``largest``, and the size of the first: as even as can be."""
    count = max(1, -(-size // largest))
    return count, -(-size // count)


def _blocks(matrix: Tensor, largest: int) -> Iterator[tuple[int, tuple[slice, slice]]]:
    (down, height), (across, width) = (_cut(n, largest) for n in matrix.shape)
    for i in range(down):
        for j in range(across):
            here = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
            if matrix[here].numel():
                yield i * across + j, here


class Shampoo(RaggedOptimizer):
    """Shampoo for the hidden matrices of a model, AdamW (``adamw_*``) for the rest; see the module for the maths.

    ``betas[1] == 1`` sums the factors (AdaGrad). ``grafting``: whose step size to take, ``"adam"``, ``"sgd"`` or
    ``None``. ``precondition_frequency``: steps between new roots. ``root_delay``: steps that a new root may take in the
    background before it is used (no root is older than the sum). ``split_sizes``, ``flatten``: as in ``Muon``.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        weight_decay_mode: str = "decoupled",
        precondition_frequency: int = 10,
        root_delay: int = 0,
        start_preconditioning_step: int = 1,
        max_preconditioner_dim: int = 1024,
        preconditioner_eps: float = 1e-12,
        grafting: str | None = "adam",
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

        super().__init__(params, ShampooRule, default_policy=policies.shampoo(), **arguments)
