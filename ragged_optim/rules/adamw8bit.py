"""AdamW with both moments in 8 bits, in tiles of 32 x 32 (quantize.py): 2.008 bytes of state per parameter.

    m = beta1 decode(m) + (1 - beta1) g
    v = beta2 decode(v) + (1 - beta2) g^2
    p *= 1 - lr weight_decay
    p -= lr sqrt(1 - beta2^t) / (1 - beta1^t)  m / (sqrt(v) + eps sqrt(1 - beta2^t))
    m, v = encode(m) to nearest, encode(v) stochastically

The step uses the moments before they are rounded. Tiles never straddle ranks, their scales live where the tiles live,
and the random bits are a hash of global positions: the states are bit-identical for every world size and split.

A parameter of fewer than ``min_8bit_size`` elements (of the global tensor) keeps its moments in fp32.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ragged_optim import quantize as q
from ragged_optim.kernels import adamw8bit_kernel, plain
from ragged_optim.kernels import bitsandbytes as bnb
from ragged_optim.kernels.eager import eager_step
from ragged_optim.layout import Extent
from ragged_optim.optimizer import RaggedOptimizer
from ragged_optim.rule import BlockwiseRule, Group, State, StateSpec, learning_rate, wide
from ragged_optim.rules.adamw import betas_of
from ragged_shard.block import Block
from ragged_shard.policy import OrigParamPolicy

__all__ = ["Adam8bit", "Adam8bitRule", "AdamW8bit", "AdamW8bitRule"]

FORMATS = ("float", "dynamic", "bitsandbytes")


class AdamW8bitRule(BlockwiseRule):
    """States ``exp_avg.codes``, ``exp_avg_sq.codes`` (uint8, like the parameter), ``.scales`` (fp32, a row per band of
    tiles), ``step``, ``salt``; below ``min_8bit_size`` ``exp_avg``, ``exp_avg_sq`` in fp32.
    """

    name: ClassVar[str] = "adamw8bit"
    family: ClassVar[str] = "adamw"
    defaults: ClassVar[Mapping[str, Any]] = {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 1e-2,
        "format": "float",
        "tile": (32, 32),
        "min_8bit_size": 4096,
        "bf16_stochastic_round": False,
        "skip_nonfinite": False,
        "seed": 0,
        "maximize": False,
    }
    decoupled: ClassVar[bool] = True

    def check(self, group: Group) -> None:
        super().check(group)
        if group["format"] not in FORMATS:
            raise ValueError(f"{self.name}: format must be one of {FORMATS}, got {group['format']!r}")
        if type(group["seed"]) is not int:
            raise ValueError(f"{self.name}: seed must be an integer, got {group['seed']!r}")
        if group["format"] == "bitsandbytes":
            ours = [key for key in ("bf16_stochastic_round", "skip_nonfinite") if group[key]]
            if ours:
                raise ValueError(
                    f"{self.name}: {', '.join(ours)} cannot be had with format='bitsandbytes', whose kernels do the "
                    "whole step; take format='float' or 'dynamic'"
                )
            bnb.library()

    def quantizes(self, shape: tuple[int, ...], group: Group) -> bool:
        """By the global number of elements alone, so that it is the same for every world size."""
        return math.prod(shape) >= max(1, int(group["min_8bit_size"]))

    def block(self, shape: tuple[int, ...], group: Group) -> Block:
        if not self.quantizes(shape, group):
            return Block.elements(1)
        return Block.elements(bnb.BLOCK) if group["format"] == "bitsandbytes" else q.tiling(shape, *group["tile"]).block

    def init(self, shape: tuple[int, ...], group: Group) -> dict[str, StateSpec]:
        counters = {
            "step": StateSpec((), torch.float32, home="everywhere"),
            "salt": StateSpec((), torch.int64, home="everywhere", fill="salt"),
        }
        if not self.quantizes(shape, group):
            moment = StateSpec(shape, torch.float32)
            return {**counters, "exp_avg": moment, "exp_avg_sq": moment}
        blocks = q.tiling(shape, *group["tile"]).scales
        if group["format"] == "bitsandbytes":
            blocks = (-(-math.prod(shape) // bnb.BLOCK),)
        codes, scales = StateSpec(shape, torch.uint8), StateSpec(blocks, torch.float32)
        return {
            **counters,
            **{
                f"{moment}.{part}": spec
                for moment in ("exp_avg", "exp_avg_sq")
                for part, spec in (("codes", codes), ("scales", scales))
            },
        }

    def update(self, param: Tensor, grad: Tensor, state: State, group: Group, extent: Extent) -> None:
        if param.dtype == torch.float64:
            self._in_fp32(param, grad, state, group, extent)
            return
        state["step"] += 1
        step = _Step(group, state["step"], self.decoupled)
        if group["format"] == "bitsandbytes":
            _by_the_library(param, grad, state, step)
            return
        seeds = (int(group["seed"]), int(state["salt"]), step.number)
        tiles = q.tiling(extent.shape, *group["tile"])
        work = wide(param).contiguous()
        flat, gradient = work.view(-1), grad.reshape(-1)
        if "exp_avg" in state:
            moments = state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1)
            bad = _plain(flat, gradient.float(), *moments, step, skip=bool(group["skip_nonfinite"]))
            cols = extent.shape[-1] if extent.shape else 1
            q.report([divmod(extent.start + at, cols) for at in bad], "element(s)", extent.name)
        else:
            for segment in tiles.segments(extent):
                _quantized(flat, gradient, state, tiles, segment, seeds, step, group, extent)
        if work is not param:
            if param.dtype == torch.bfloat16 and group["bf16_stochastic_round"]:
                _round_stochastically(param, work, tiles, extent, seeds)
            else:
                param.copy_(work)

    def _in_fp32(self, param: Tensor, grad: Tensor, state: State, group: Group, extent: Extent) -> None:
        """The step of an fp64 ``param``: what the fp32 code makes of zeros, added in fp64."""
        decay, moved = float(group["weight_decay"]), torch.zeros_like(param, dtype=torch.float32)
        if decay and not self.decoupled:
            grad = grad.add(param, alpha=decay)
        self.update(moved, grad.float(), state, {**group, "weight_decay": 0.0}, extent)
        if decay and self.decoupled:
            param.mul_(1 - learning_rate(group) * decay)
        param.add_(moved)


class Adam8bitRule(AdamW8bitRule):
    """AdamW8bit with the decay coupled: added to the gradient, as torch.optim.Adam does."""

    name: ClassVar[str] = "adam8bit"
    defaults: ClassVar[Mapping[str, Any]] = {**AdamW8bitRule.defaults, "weight_decay": 0.0}
    decoupled: ClassVar[bool] = False


class _Step:
    """The scalars of one step; python floats, rounded to fp32 where they meet a tensor."""

    def __init__(self, group: Group, count: Tensor, decoupled: bool) -> None:
        self.count, self.number = count, int(count)
        self.beta1, self.beta2 = betas_of(group)
        self.lr, decay = learning_rate(group), float(group["weight_decay"])
        # AdamW shrinks the parameter, Adam adds to the gradient.
        self.decay, self.l2 = (decay, 0.0) if decoupled else (0.0, decay)
        root = math.sqrt(1 - self.beta2**self.number)
        # As the C++ kernel takes them: the step's size, with eps for the root of the uncorrected v.
        self.size, self.eps = self.lr * root / (1 - self.beta1**self.number), float(group["eps"]) * root
        self.given_eps = float(group["eps"])
        self.shrink = 1 - self.lr * self.decay

    def run(self, param: Tensor, grad: Tensor, m: Tensor, v: Tensor) -> None:
        """On flat fp32 tensors, by torch's fused kernel: m and v are rounded as in C++, in whole vectors."""
        torch._fused_adamw_(
            [param],
            [grad],
            [m],
            [v],
            [],
            [self.count],
            lr=self.lr,
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=self.decay,
            eps=self.given_eps,
            amsgrad=False,
            maximize=False,
        )


def _plain(param: Tensor, grad: Tensor, m: Tensor, v: Tensor, step: _Step, *, skip: bool) -> list[int]:
    """With fp32 moments. Returns which elements of the gradient are not finite: they count as 0, and make a nan of the
    parameter unless they are to be skipped.
    """
    if step.l2:
        grad = grad.add(param, alpha=step.l2)
    # A sum that is finite is one of finite numbers, and the cheapest look at them.
    bad = None if math.isfinite(float(grad.sum())) else ~grad.isfinite()
    if bad is not None:
        grad = grad.masked_fill(bad, 0.0)
    m.lerp_(grad, 1 - step.beta1)
    v.mul_(step.beta2).addcmul_(grad, grad, value=1 - step.beta2)
    param.mul_(step.shrink).addcdiv_(m, v.sqrt().add_(step.eps), value=-step.size)
    if bad is None:
        return []
    if not skip:
        param.masked_fill_(bad, torch.nan)
    found: list[int] = bad.nonzero().flatten().tolist()
    return found


def _by_the_library(param: Tensor, grad: Tensor, state: State, step: _Step) -> None:
    if param.numel() == 0:
        return
    work = param.contiguous()
    flat, gradient = work.view(-1), grad.to(param.dtype).reshape(-1)
    if step.l2:
        gradient = gradient.add(flat, alpha=step.l2)
    if "exp_avg" in state:
        bnb.step_32bit(flat, gradient, (state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1)), step)
    else:
        codes = (state["exp_avg.codes"].view(-1), state["exp_avg_sq.codes"].view(-1))
        bnb.step_8bit(flat, gradient, codes, (state["exp_avg.scales"], state["exp_avg_sq.scales"]), step)
    if work is not param:
        param.copy_(work)


def _quantized(
    param: Tensor,
    grad: Tensor,
    state: State,
    tiles: q.Tiling,
    segment: q.Segment,
    seeds: tuple[int, ...],
    step: _Step,
    group: Group,
    extent: Extent,
) -> None:
    """One segment."""
    rows, cols, height = segment.rows, segment.cols, tiles.height
    across, bands = -(-cols // tiles.width), -(-rows // height)
    here = slice(segment.start, segment.start + rows * cols)
    tensors = [
        t.view(-1)[here].view(rows, cols) for t in (param, grad, state["exp_avg.codes"], state["exp_avg_sq.codes"])
    ]
    scales = [
        state[f"{moment}.scales"].view(-1, tiles.tiles_across)[segment.band : segment.band + bands, :across]
        for moment in ("exp_avg", "exp_avg_sq")
    ]
    row_keys = q.keys(rows, segment.row, seeds, param.device)
    col_keys = q.column_keys(tiles.cols, param.device)[:cols]
    options = {"dynamic": group["format"] == "dynamic", "skip": bool(group["skip_nonfinite"])}
    kernel = (_kernel(param.device) if plain(param, grad) else None) or eager_step
    bad = kernel(tensors, scales, row_keys, col_keys, height, tiles.width, step, **options)
    _report(bad, extent, segment, across, tiles)


def _kernel(device: torch.device) -> Callable[..., list[int]] | None:
    """C++ on the CPU, compiled torch elsewhere; ``None``: eager torch."""
    if device.type == "cpu":
        return adamw8bit_kernel()
    if os.environ.get("RAGGED_OPTIM_KERNELS", "1") == "0":
        return None
    from ragged_optim.kernels.compiled import compiled_step

    return compiled_step()


def _report(bad: list[int], extent: Extent, segment: q.Segment, across: int, tiles: q.Tiling) -> None:
    places = [(segment.row + tile // across * tiles.height, tile % across * tiles.width) for tile in bad]
    note = " (a gradient is as good as infinite where no code of v can hold its square)"
    q.report(places, f"tile(s) of {tiles.height} x {tiles.width}", extent.name, note)


def _round_stochastically(param: Tensor, work: Tensor, tiles: q.Tiling, extent: Extent, seeds: tuple[int, ...]) -> None:
    """bf16 ``param`` from fp32 ``work``, which is rounded in place.

    Up with the probability of the distance, by 16 bits of a hash of the position.
    """
    columns = q.keys(tiles.cols, 0, (1,), param.device)
    at, flat = extent.start, work.view(-1)
    while at < extent.stop:
        # Whole rows, or what lies here of one: a parameter without tiles may be cut anywhere.
        row, col = divmod(at, tiles.cols)
        count = max(1, (extent.stop - at) // tiles.cols) if col == 0 else 1
        stop = min(extent.stop, (row + count) * tiles.cols)
        values = flat[at - extent.start : stop - extent.start].view(count, -1)
        rows = q.keys(count, row, (*seeds, 1), param.device)
        dither = q.noise(
            rows[:, None], columns[None, col : col + values.shape[1]], torch.empty_like(values, dtype=torch.int32)
        )
        bits = values.view(torch.int32).add(dither.bitwise_right_shift_(4)).bitwise_and_(-65536)
        values.copy_(torch.where(values.isfinite(), bits.view(torch.float32), values))
        at = stop
    param.copy_(work)


class AdamW8bit(RaggedOptimizer):
    """AdamW with 8-bit moments in tiles that no rank boundary cuts.

    ``format``: ``"float"``, mini-floats of m and v with power-of-two scales, or ``"dynamic"``, the dynamic map of
    8-bit Adam (arXiv 2110.02861) of m and of the root of v, slower, or ``"bitsandbytes"``, that library's own kernels
    and states in flat blocks of 256 elements (ask ``fully_shard`` for ``Block.elements(256)``). ``tile``: rows and
    columns under one scale; a vector's tiles are as many consecutive elements. ``min_8bit_size``: smaller parameters
    (counted globally) keep fp32 moments. ``bf16_stochastic_round``: round bf16 parameters stochastically, so that
    steps below half a unit are not lost. ``skip_nonfinite``: take a non-finite gradient element as 0 (else its own
    parameter element becomes nan); its tile is reported either way and the rest is unharmed. ``seed``: of the random
    bits.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        format: str = "float",
        tile: tuple[int, int] = (32, 32),
        min_8bit_size: int = 4096,
        bf16_stochastic_round: bool = False,
        skip_nonfinite: bool = False,
        seed: int = 0,
        maximize: bool = False,
        orig_param_policy: OrigParamPolicy | None = None,
    ) -> None:
        super().__init__(
            params,
            AdamW8bitRule,
            orig_param_policy=orig_param_policy,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            format=format,
            tile=tile,
            min_8bit_size=min_8bit_size,
            bf16_stochastic_round=bf16_stochastic_round,
            skip_nonfinite=skip_nonfinite,
            seed=seed,
            maximize=maximize,
        )


class Adam8bit(RaggedOptimizer):
    """As ``AdamW8bit``, with the weight decay added to the gradient (bitsandbytes' Adam8bit decays as AdamW)."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        format: str = "float",
        tile: tuple[int, int] = (32, 32),
        min_8bit_size: int = 4096,
        bf16_stochastic_round: bool = False,
        skip_nonfinite: bool = False,
        seed: int = 0,
        maximize: bool = False,
        orig_param_policy: OrigParamPolicy | None = None,
    ) -> None:
        super().__init__(
            params,
            Adam8bitRule,
            orig_param_policy=orig_param_policy,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            format=format,
            tile=tile,
            min_8bit_size=min_8bit_size,
            bf16_stochastic_round=bf16_stochastic_round,
            skip_nonfinite=skip_nonfinite,
            seed=seed,
            maximize=maximize,
        )
