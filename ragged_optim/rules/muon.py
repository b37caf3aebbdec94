"""Muon (github.com/KellerJordan/Muon): momentum, orthogonalised by Newton-Schulz. torch.optim.Muon's names and
defaults.

    buf = momentum buf + (1 - momentum) g            on the shard (an average, as in torch's code)
    u   = (1 - momentum) g + momentum buf            nesterov; else u = buf
    O   = newton_schulz(u)                           at the owner, on the whole matrix
    p  *= 1 - lr weight_decay                        on the shard
    p  -= lr ratio O                                 ratio: see ``adjusted``

NorMuon (arXiv 2510.05491) goes on from O at the owner:

    v = beta2 v + (1 - beta2) mean of the squares of each row of O
    O = |O| normalised(O / (sqrt(v) + 1e-8))

so it keeps the size of O, as microsoft/dion's does, where the paper's own step has an RMS of 0.2 lr: that is what
``adjust_lr_fn="match_rms_adamw"`` is for.

Only the direction u and the update O travel, in ``ns_dtype``, in which the iteration would round them anyway, or in
``wire_dtype``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ragged_optim import newton_schulz as ns
from ragged_optim.groups import given
from ragged_optim.kernels import MuonKernel, muon_kernel, plain
from ragged_optim.optimizer import RaggedOptimizer
from ragged_optim.rule import Group, MatrixRule, State, StateSpec, decay, learning_rate, wide
from ragged_shard.policy import OrigParamPolicy

__all__ = ["Muon", "MuonRule", "NorMuon", "NorMuonRule", "adjusted"]

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
ADJUST_LR = (None, "original", "match_rms_adamw", "spectral")


class MuonRule(MatrixRule):
    """State ``momentum_buffer``, sharded like the parameter, in its dtype or ``state_dtype``."""

    name: ClassVar[str] = "muon"
    family: ClassVar[str] = "muon"
    defaults: ClassVar[Mapping[str, Any]] = {
        "lr": 1e-3,
        "weight_decay": 0.1,
        "momentum": 0.95,
        "nesterov": True,
        "ns_coefficients": (3.4445, -4.7750, 2.0315),
        "eps": 1e-7,
        "ns_steps": 5,
        "adjust_lr_fn": None,
        "ns_dtype": torch.bfloat16,
        "wire_dtype": None,
        "gram": False,
        "weight_decay_mode": "decoupled",
        "split_sizes": None,
        "flatten": False,
        "skip_nonfinite": False,
        "maximize": False,
        "state_dtype": None,
        "momentum_8bit": False,
        "tile": (32, 32),
        "min_8bit_size": 4096,
    }

    def check(self, group: Group) -> None:
        super().check(group)
        if not 0.0 <= float(group.get("beta2", 0.0)) < 1.0:
            raise ValueError(f"{self.name}: beta2 must lie in [0, 1), got {group['beta2']!r}")
        ns.schedule(group["ns_coefficients"], group["ns_steps"])
        if group["adjust_lr_fn"] not in ADJUST_LR:
            raise ValueError(f"muon: adjust_lr_fn must be one of {ADJUST_LR}, got {group['adjust_lr_fn']!r}")
        if group["ns_dtype"] not in DTYPES:
            raise ValueError(f"muon: ns_dtype must be a floating dtype, got {group['ns_dtype']!r}")
        if group["wire_dtype"] not in (None, *DTYPES):
            raise ValueError(f"muon: wire_dtype must be None or a floating dtype, got {group['wire_dtype']!r}")

    def init(self, shape: tuple[int, ...], group: Group) -> dict[str, StateSpec]:
        if group["momentum_8bit"] and math.prod(shape) >= group["min_8bit_size"]:
            return {"momentum_buffer": StateSpec(shape, torch.float32, tile=tuple(group["tile"]))}
        return {"momentum_buffer": StateSpec(shape, group["state_dtype"])}

    def cost(self, rows: int, cols: int, group: Group) -> float:
        return ns.flops(rows, cols, group["ns_coefficients"], group["ns_steps"], group["ns_dtype"], gram=group["gram"])

    def wire_dtype(self, dtype: torch.dtype, group: Group) -> torch.dtype:
        wire: torch.dtype = group["wire_dtype"] or group["ns_dtype"]
        return wire

    def direction(self, param: Tensor, grad: Tensor, state: State, group: Group) -> Tensor:
        buf, momentum = state["momentum_buffer"], float(group["momentum"])
        grad = grad.to(buf.dtype)
        kernel = _kernel_for(buf, grad) if self.wire_dtype(param.dtype, group) == torch.bfloat16 else None
        if kernel is not None:
            return kernel.direction(buf, grad, momentum, nesterov=bool(group["nesterov"]))
        buf.lerp_(grad, 1 - momentum)
        if group["nesterov"]:
            return grad.lerp(buf, momentum)
        return buf.to(self.wire_dtype(param.dtype, group), copy=True)

    def update(self, matrix: Tensor, state: State, group: Group) -> Tensor:
        return self.update_all([matrix], [state], group)[0]

    def update_all(self, matrices: Sequence[Tensor], states: Sequence[State], group: Group) -> list[Tensor]:
        matrices = [matrix.to(group["ns_dtype"]) for matrix in matrices]
        eps, gram = float(group["eps"]), bool(group["gram"])
        return ns.newton_schulz_all(matrices, group["ns_coefficients"], group["ns_steps"], eps, gram=gram)

    def apply(self, param: Tensor, update: Tensor, state: State, group: Group, shape: tuple[int, int]) -> None:
        alpha = -learning_rate(group) * adjusted(group["adjust_lr_fn"], shape)
        if group["weight_decay_mode"] == "decoupled" and update.dtype == torch.bfloat16:
            kernel = _kernel_for(param, update)
            if kernel is not None:
                kernel.apply(param, update, 1 - learning_rate(group) * float(group["weight_decay"]), alpha)
                return
        work = wide(param)
        decay(work, update, group)
        work.add_(update, alpha=alpha)
        if work is not param:
            param.copy_(work)


def _kernel_for(fp32: Tensor, other: Tensor) -> MuonKernel | None:
    """The C++ passes, where they fit; they round as the torch operations beside them, bit for bit."""
    fits = fp32.device.type == "cpu" and fp32.dtype == torch.float32 and plain(fp32, other)
    return muon_kernel() if fits and fp32.is_contiguous() and other.is_contiguous() else None


class NorMuonRule(MuonRule):
    """Adds ``second_momentum_buffer`` (rows, 1) at the owner: the running mean square of each row of the update."""

    name: ClassVar[str] = "normuon"
    family: ClassVar[str] = "muon"
    defaults: ClassVar[Mapping[str, Any]] = {**MuonRule.defaults, "beta2": 0.95}

    def init(self, shape: tuple[int, ...], group: Group) -> dict[str, StateSpec]:
        return {
            **super().init(shape, group),
            "second_momentum_buffer": StateSpec((shape[-2], 1), torch.float32, home="owner"),
        }

    def update_all(self, matrices: Sequence[Tensor], states: Sequence[State], group: Group) -> list[Tensor]:
        updates = super().update_all(matrices, states, group)
        return [self._normalised(update, state, group) for update, state in zip(updates, states, strict=True)]

    def _normalised(self, update: Tensor, state: State, group: Group) -> Tensor:
        update = update.to(torch.promote_types(update.dtype, torch.float32))
        square = state["second_momentum_buffer"].lerp_(
            update.square().mean(1, keepdim=True).float(), 1 - group["beta2"]
        )
        normalised = update / (square.sqrt() + 1e-8)
        return normalised.mul_(update.norm() / (normalised.norm() + 1e-8))


def adjusted(adjust_lr_fn: str | None, shape: tuple[int, int]) -> float:
    """By how much the step of a (rows, cols) matrix is scaled.

    ``None`` / ``"original"``: sqrt(max(1, rows / cols)); ``"match_rms_adamw"``: 0.2 sqrt(max(rows, cols)), the RMS of
    an AdamW step (arXiv 2502.16982); ``"spectral"``: sqrt(rows / cols), which bounds the change of outputs.
    """
    rows, cols = shape
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, cols))
    if adjust_lr_fn == "spectral":
        return math.sqrt(rows / cols)
    return math.sqrt(max(1.0, rows / cols))


class Muon(RaggedOptimizer):
    """``torch.optim.Muon`` for whole models, sharded or not: hidden matrices by Muon, the rest by AdamW.

    With named parameters, ``orig_param_policy`` decides who gets what (default: ``policies.muon()``), and ``adamw_*``
    are the hyperparameters of the rest; every group has its own lr. Without names every parameter must be a matrix,
    as in torch.

    ``ns_coefficients``: three numbers, a list of triples or a name (``newton_schulz.COEFFICIENTS``). ``ns_dtype``:
    dtype of the iteration. ``wire_dtype``: dtype of what travels (default: the same, which loses nothing). ``gram``:
    iterate on the Gram matrix where that is cheaper, see ``newton_schulz``. ``split_sizes``: rows of independent
    matrices in a fused weight. ``flatten``: treat (out, in, ...) as (out, in * ...), otherwise leading dims are a
    stack of matrices.

    ``skip_nonfinite``: leave a parameter with nan or inf in its gradient alone for that step, on all ranks, and warn;
    otherwise they spread over its matrix, as in torch.

    ``momentum_8bit``: keep the momentum of parameters of ``min_8bit_size`` elements or more in 8 bits, in tiles (1.004
    bytes a number; ``policies.muon(block=Block.tile(32, 32))`` keeps the tiles whole).
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: ns.Coefficients = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        ns_dtype: torch.dtype = torch.bfloat16,
        wire_dtype: torch.dtype | None = None,
        gram: bool = False,
        weight_decay_mode: str = "decoupled",
        split_sizes: Sequence[int] | None = None,
        flatten: bool = False,
        skip_nonfinite: bool = False,
        maximize: bool = False,
        state_dtype: torch.dtype | None = None,
        momentum_8bit: bool = False,
        tile: tuple[int, int] = (32, 32),
        min_8bit_size: int = 4096,
        adamw_lr: float | Tensor = 1e-3,
        adamw_betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float = 1e-2,
        orig_param_policy: OrigParamPolicy | None = None,
    ) -> None:
        arguments = given(locals())
        from ragged_optim import policies

        super().__init__(params, MuonRule, default_policy=policies.muon(), **arguments)


class NorMuon(RaggedOptimizer):
    """``Muon`` with its update normalised by rows; ``beta2``: decay of their mean squares. Everything else as there."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: ns.Coefficients = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        beta2: float = 0.95,
        ns_dtype: torch.dtype = torch.bfloat16,
        wire_dtype: torch.dtype | None = None,
        gram: bool = False,
        weight_decay_mode: str = "decoupled",
        split_sizes: Sequence[int] | None = None,
        flatten: bool = False,
        skip_nonfinite: bool = False,
        maximize: bool = False,
        state_dtype: torch.dtype | None = None,
        momentum_8bit: bool = False,
        tile: tuple[int, int] = (32, 32),
        min_8bit_size: int = 4096,
        adamw_lr: float | Tensor = 1e-3,
        adamw_betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float = 1e-2,
        orig_param_policy: OrigParamPolicy | None = None,
    ) -> None:
        arguments = given(locals())
        from ragged_optim import policies

        super().__init__(params, NorMuonRule, default_policy=policies.normuon(), **arguments)
