"""SGD with momentum: torch.optim.SGD's maths, names and defaults.

g  += weight_decay p
buf = momentum buf + (1 - dampening) g           the first time: buf = g
p  -= lr (g + momentum buf)                      nesterov; else lr buf
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ragged_optim.groups import refuse
from ragged_optim.optimizer import RaggedOptimizer
from ragged_optim.rule import ElementwiseRule, Group, State, StateSpec, learning_rate, wide
from ragged_shard.policy import OrigParamPolicy

__all__ = ["SGD", "SGDRule"]


class SGDRule(ElementwiseRule):
    """State ``momentum_buffer``, and a counter ``step`` where ``dampening`` makes the first step different."""

    name: ClassVar[str] = "sgd"
    family: ClassVar[str] = "sgd"
    defaults: ClassVar[Mapping[str, Any]] = {
        "lr": 1e-3,
        "momentum": 0.0,
        "dampening": 0.0,
        "weight_decay": 0.0,
        "nesterov": False,
        "maximize": False,
    }

    def check(self, group: Group) -> None:
        super().check(group)
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError("sgd: Nesterov momentum requires a momentum and zero dampening")

    def init(self, shape: tuple[int, ...], group: Group) -> dict[str, StateSpec]:
        states = {"momentum_buffer": StateSpec(shape)} if group["momentum"] else {}
        if group["momentum"] and group["dampening"]:
            states["step"] = StateSpec((), torch.float32, home="everywhere")
        return states

    def lacks(self, state: Mapping[str, Tensor], group: Group) -> bool:
        return bool(group["momentum"]) and "momentum_buffer" not in state

    def implied(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        # torch makes the buffer in the first step.
        return {"step": 1.0} if "momentum_buffer" in state else {}

    def update(self, param: Tensor, grad: Tensor, state: State, group: Group) -> None:
        work = wide(param)
        grad = grad.to(work.dtype)
        if group["weight_decay"]:
            grad = grad.add(work, alpha=float(group["weight_decay"]))
        momentum, dampening = float(group["momentum"]), float(group["dampening"])
        if momentum:
            if "step" in state:
                dampening = dampening if float(state["step"]) else 0.0
                state["step"] += 1
            buf = wide(state["momentum_buffer"]).mul_(momentum).add_(grad, alpha=1 - dampening)
            if buf is not state["momentum_buffer"]:
                state["momentum_buffer"].copy_(buf)
            grad = grad.add(buf, alpha=momentum) if group["nesterov"] else buf
        work.add_(grad, alpha=-learning_rate(group))
        if work is not param:
            param.copy_(work)


class SGD(RaggedOptimizer):
    """``torch.optim.SGD`` for plain, ``Shard(0)`` and ``RaggedShard`` parameters."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        orig_param_policy: OrigParamPolicy | None = None,
    ) -> None:
        refuse("SGD", foreach=foreach, differentiable=differentiable, fused=fused)
        super().__init__(
            params,
            SGDRule,
            orig_param_policy=orig_param_policy,
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            maximize=maximize,
        )
