"""Lion (arXiv 2302.06675): the sign of an interpolated momentum.

    u   = beta1 m + (1 - beta1) g
    p  *= 1 - lr weight_decay
    p  -= lr sign(u)
    m   = beta2 m + (1 - beta2) g

Its steps are about ten times as large as AdamW's in RMS, so take lr 3 to 10 times smaller and weight_decay as much
larger.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ragged_optim.optimizer import RaggedOptimizer
from ragged_optim.rule import ElementwiseRule, Group, State, StateSpec, decay, learning_rate, wide
from ragged_optim.rules.adamw import betas_of
from ragged_shard.policy import OrigParamPolicy

__all__ = ["Lion", "LionRule"]


class LionRule(ElementwiseRule):
    """State ``exp_avg`` in the parameter's dtype, or in 8 bits."""

    name: ClassVar[str] = "lion"
    family: ClassVar[str] = "lion"
    defaults: ClassVar[Mapping[str, Any]] = {
        "lr": 1e-4,
        "betas": (0.9, 0.99),
        "weight_decay": 0.0,
        "weight_decay_mode": "decoupled",
        "maximize": False,
        "skip_nonfinite": False,
        "momentum_8bit": False,
        "tile": (32, 32),
        "min_8bit_size": 4096,
    }

    def init(self, shape: tuple[int, ...], group: Group) -> dict[str, StateSpec]:
        if group["momentum_8bit"] and math.prod(shape) >= group["min_8bit_size"]:
            return {"exp_avg": StateSpec(shape, torch.float32, tile=tuple(group["tile"]))}
        return {"exp_avg": StateSpec(shape)}

    def update(self, param: Tensor, grad: Tensor, state: State, group: Group) -> None:
        beta1, beta2 = betas_of(group)
        work, momentum = wide(param), wide(state["exp_avg"])
        grad = grad.to(momentum.dtype)
        mixed = momentum.lerp(grad, 1 - beta1)
        # The sign of a nan is 0: the element would stop for ever, and nobody see it. 0 times it is nan.
        sign = mixed.sign().add_(mixed, alpha=0)
        decay(work, sign, group)
        work.add_(sign, alpha=-learning_rate(group))
        momentum.lerp_(grad, 1 - beta2)
        if work is not param:
            param.copy_(work)
        if momentum is not state["exp_avg"]:
            state["exp_avg"].copy_(momentum)


class Lion(RaggedOptimizer):
    """Lion for plain, ``Shard(0)`` and ``RaggedShard`` parameters; the weight decay is decoupled.

    ``skip_nonfinite``: take a gradient element that is nan or inf as 0, and warn; otherwise its element of the
    parameter becomes nan. ``momentum_8bit``: keep the momentum of parameters of ``min_8bit_size`` elements or more in
    8 bits, in tiles.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        weight_decay_mode: str = "decoupled",
        maximize: bool = False,
        skip_nonfinite: bool = False,
        momentum_8bit: bool = False,
        tile: tuple[int, int] = (32, 32),
        min_8bit_size: int = 4096,
        orig_param_policy: OrigParamPolicy | None = None,
    ) -> None:
        super().__init__(
            params,
            LionRule,
            orig_param_policy=orig_param_policy,
            lr=lr,
            betas=betas,
            weight_decay=weight_decay,
            weight_decay_mode=weight_decay_mode,
            maximize=maximize,
            skip_nonfinite=skip_nonfinite,
            momentum_8bit=momentum_8bit,
            tile=tile,
            min_8bit_size=min_8bit_size,
        )
