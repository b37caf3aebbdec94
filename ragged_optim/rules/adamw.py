"""Adam and AdamW (arXiv 1412.6980, 1711.05101): torch.optim's maths, names and defaults.

    m = beta1 m + (1 - beta1) g                      Adam:   g += weight_decay p, before
    v = beta2 v + (1 - beta2) g^2                    AdamW:  p *= 1 - lr weight_decay, before
    p -= lr / (1 - beta1^t)  m / (sqrt(v / (1 - beta2^t)) + eps)       amsgrad: with the largest v so far

Elementwise, so it runs on whatever lies here: local tensors, or the flat shard of a bucket at once; by torch's fused
kernel, or on the CPU by one with the same bits that is less bound by memory (kernels/adamw.cpp).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ragged_optim.groups import refuse
from ragged_optim.kernels import AdamWKernel, adamw_kernel, plain
from ragged_optim.optimizer import RaggedOptimizer
from ragged_optim.rule import ElementwiseRule, Group, State, StateSpec, learning_rate
from ragged_shard.policy import OrigParamPolicy

__all__ = ["Adam", "AdamRule", "AdamW", "AdamWRule"]


class AdamWRule(ElementwiseRule):
    """States ``exp_avg``, ``exp_avg_sq`` (and ``max_exp_avg_sq`` with ``amsgrad``) in the parameter's dtype, or
    ``state_dtype``.
    """

    name: ClassVar[str] = "adamw"
    family: ClassVar[str] = "adamw"
    defaults: ClassVar[Mapping[str, Any]] = {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 1e-2,
        "amsgrad": False,
        "maximize": False,
        "state_dtype": None,
    }
    decoupled: ClassVar[bool] = True

    def init(self, shape: tuple[int, ...], group: Group) -> dict[str, StateSpec]:
        moment = StateSpec(shape, group["state_dtype"])
        states = {"step": StateSpec((), torch.float32, home="everywhere"), "exp_avg": moment, "exp_avg_sq": moment}
        return {**states, "max_exp_avg_sq": moment} if group["amsgrad"] else states

    def lacks(self, state: Mapping[str, Tensor], group: Group) -> bool:
        return bool(group["amsgrad"]) and "max_exp_avg_sq" not in state

    def update(self, param: Tensor, grad: Tensor, state: State, group: Group) -> None:
        self.update_all([param], [grad], [state], group)

    def update_all(self, params: list[Tensor], grads: list[Tensor], states: list[State], group: Group) -> None:
        torch._foreach_add_([state["step"] for state in states], 1)
        # Of a sharded model most small parameters lie elsewhere.
        rows = [row for row in zip(params, grads, states, strict=True) if row[0].numel()]
        if not rows:
            return
        params, grads, states = map(list, zip(*rows, strict=True))
        steps = [state["step"] for state in states]
        # By name: a state that ``amsgrad`` has left, or that a user keeps there, is no moment.
        keys = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))
        moments = {key: [state[key] for state in states] for key in keys}
        # The kernel wants one dtype, the wider of parameter and moments, and one memory layout, that of the moments:
        # what is narrower is rounded once, at the end.
        works = [
            _like(param, moment, torch.promote_types(param.dtype, moment.dtype))
            for param, moment in zip(params, moments["exp_avg"], strict=True)
        ]
        grads = [_like(grad, work, work.dtype) for grad, work in zip(grads, works, strict=True)]
        kept = moments
        moments = {k: [_like(v, work, work.dtype) for v, work in zip(kept[k], works, strict=True)] for k in kept}
        beta1, beta2 = betas_of(group)
        options: dict[str, Any] = {
            "lr": learning_rate(group),
            "beta1": beta1,
            "beta2": beta2,
            "eps": float(group["eps"]),
        }
        options["weight_decay"] = float(group["weight_decay"])
        for chosen in _by_device_and_dtype(works):
            columns = [[works[i] for i in chosen], [grads[i] for i in chosen]]
            columns += [[values[i] for i in chosen] for values in moments.values()]
            kernel = None if group["amsgrad"] else _kernel_for(*columns[0], *columns[1])
            if kernel is not None:
                for row, i in zip(zip(*columns, strict=True), chosen, strict=True):
                    kernel(row, steps[i].item(), decoupled=self.decoupled, **options)
                continue
            fused = torch._fused_adamw_ if self.decoupled else torch._fused_adam_
            with whole_vectors(columns) as (pieces, owner):
                fused(
                    pieces[0],
                    pieces[1],
                    pieces[2],
                    pieces[3],
                    pieces[4] if group["amsgrad"] else [],
                    [steps[chosen[i]] for i in owner],
                    amsgrad=bool(group["amsgrad"]),
                    maximize=False,  # the optimizer has negated the gradients
                    **options,
                )
        for rounded, used in ((params, works), *((kept[key], moments[key]) for key in kept)):
            for tensor, work in zip(rounded, used, strict=True):
                if work is not tensor:
                    tensor.copy_(work)


class AdamRule(AdamWRule):
    """AdamW with the decay coupled: added to the gradient, as torch.optim.Adam does."""

    name: ClassVar[str] = "adam"
    defaults: ClassVar[Mapping[str, Any]] = {**AdamWRule.defaults, "weight_decay": 0.0}
    decoupled: ClassVar[bool] = False


def betas_of(group: Group) -> tuple[float, float]:
    """beta1 and beta2 as numbers."""
    beta1, beta2 = group["betas"]
    return float(beta1), float(beta2)


def _kernel_for(first: Tensor, *others: Tensor) -> AdamWKernel | None:
    """The C++ step, where it fits; bit for bit that of torch's kernel."""
    fits = first.device.type == "cpu" and first.dtype == torch.float32 and plain(first, *others)
    return adamw_kernel() if fits else None


def _like(tensor: Tensor, pattern: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor`` in ``dtype`` and the strides of ``pattern``: itself, or a copy."""
    if tensor.dtype == dtype and tensor.stride() == pattern.stride():
        return tensor
    return torch.empty_like(pattern, dtype=dtype).copy_(tensor)


@contextmanager
def whole_vectors(columns: list[list[Tensor]]) -> Iterator[tuple[list[list[Tensor]], list[int]]]:
    """The same elements in pieces that fill vector registers; yields (columns of pieces, the row each piece came from).

    torch's fused CPU kernels round the scalar tail of a tensor (its last numel mod 16 elements in fp32) differently
    from the vector body, so a result would depend on where a tensor is cut. The tails are therefore worked on in
    padded copies. ``columns``: lists of tensors of one dtype and device; tensors of one row have the same strides and
    leave no holes.
    """
    if columns[0][0].device.type != "cpu":
        yield columns, list(range(len(columns[0])))
        return
    lanes = 64 // columns[0][0].element_size()
    flat = [[t if t.ndim == 1 else t.as_strided((t.numel(),), (1,)) for t in column] for column in columns]
    bodies = [i for i, t in enumerate(flat[0]) if t.numel() >= lanes]
    ragged = [i for i, t in enumerate(flat[0]) if t.numel() % lanes]
    pieces, places, tails = [], [], []
    for column in flat:
        padded = column[0].new_zeros(len(ragged), lanes)
        tail = [column[i][column[i].numel() // lanes * lanes :] for i in ragged]
        place = [row[: t.numel()] for row, t in zip(padded, tail, strict=True)]
        if tail:
            torch._foreach_copy_(place, tail)
        whole = [t if t.numel() % lanes == 0 else t[: t.numel() // lanes * lanes] for t in (column[i] for i in bodies)]
        pieces.append([*whole, *padded])
        places += place
        tails += tail
    yield pieces, [*bodies, *ragged]
    if tails:
        torch._foreach_copy_(tails, places)


def _by_device_and_dtype(tensors: list[Tensor]) -> list[list[int]]:
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, tensor in enumerate(tensors):
        kinds.setdefault((tensor.device, tensor.dtype), []).append(i)
    return list(kinds.values())


class AdamW(RaggedOptimizer):
    """``torch.optim.AdamW`` for plain, ``Shard(0)`` and ``RaggedShard`` parameters, in one go over memory: by torch's
    fused kernel, or on the CPU by one of our own with the same bits.

    ``state_dtype``: dtype of the moments (default: the parameter's, as torch). ``orig_param_policy`` routes single
    parameters to other rules or hyperparameters.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state_dtype: torch.dtype | None = None,
        orig_param_policy: OrigParamPolicy | None = None,
    ) -> None:
        refuse("AdamW", foreach=foreach, capturable=capturable, differentiable=differentiable)
        refuse("AdamW", **{"fused=False": fused is False})
        super().__init__(
            params,
            AdamWRule,
            orig_param_policy=orig_param_policy,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            maximize=maximize,
            state_dtype=state_dtype,
        )


class Adam(RaggedOptimizer):
    """``torch.optim.Adam``: as ``AdamW``, with the weight decay added to the gradient."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        state_dtype: torch.dtype | None = None,
        orig_param_policy: OrigParamPolicy | None = None,
    ) -> None:
        refuse("Adam", foreach=foreach, capturable=capturable, differentiable=differentiable)
        refuse("Adam", **{"fused=False": fused is False})
        super().__init__(
            params,
            AdamWRule if decoupled_weight_decay else AdamRule,
            orig_param_policy=orig_param_policy,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            maximize=maximize,
            state_dtype=state_dtype,
        )
