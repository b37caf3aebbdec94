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
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ragged_optim import quantize as q
from ragged_optim.kernels import adamw8bit_kernel
from ragged_optim.layout import Extent
from ragged_optim.optimizer import RaggedOptimizer
from ragged_optim.rule import BlockwiseRule, Group, State, StateSpec, learning_rate, wide
from ragged_optim.rules.adamw import betas_of
from ragged_shard.block import Block
from ragged_shard.policy import OrigParamPolicy

__all__ = ["Adam8bit", "Adam8bitRule", "AdamW8bit", "AdamW8bitRule"]

FORMATS = ("float", "dynamic")
# Elements worked on at once, so that the workspace stays in the cache.
CHUNK = 128 * 1024


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
        tile = group["tile"]
        if len(tile) != 2 or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in tile):
            raise ValueError(f"{self.name}: tile must be two positive integers (rows, columns), got {tile!r}")

    def quantizes(self, shape: tuple[int, ...], group: Group) -> bool:
        """By the global number of elements alone, so that it is the same for every world size."""
        return math.prod(shape) >= max(1, int(group["min_8bit_size"]))

    def block(self, shape: tuple[int, ...], group: Group) -> Block:
        return q.tiling(shape, *group["tile"]).block if self.quantizes(shape, group) else Block.elements(1)

    def init(self, shape: tuple[int, ...], group: Group) -> dict[str, StateSpec]:
        counters = {
            "step": StateSpec((), torch.float32, home="everywhere"),
            "salt": StateSpec((), torch.int64, home="everywhere", fill="salt"),
        }
        if not self.quantizes(shape, group):
            moment = StateSpec(shape, torch.float32)
            return {**counters, "exp_avg": moment, "exp_avg_sq": moment}
        codes, scales = StateSpec(shape, torch.uint8), StateSpec(q.tiling(shape, *group["tile"]).scales, torch.float32)
        return {
            **counters,
            **{
                f"{moment}.{part}": spec
                for moment in ("exp_avg", "exp_avg_sq")
                for part, spec in (("codes", codes), ("scales", scales))
            },
        }

    def update(self, param: Tensor, grad: Tensor, state: State, group: Group, extent: Extent) -> None:
        state["step"] += 1
        step = _Step.of(group, int(state["step"]), self.decoupled)
        seeds = (int(group["seed"]), int(state["salt"]), step.number)
        tiles = q.tiling(extent.shape, *group["tile"])
        work = wide(param).contiguous()
        flat, gradient = work.view(-1), grad.reshape(-1)
        if "exp_avg" in state:
            _plain(flat, gradient.float(), state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1), step)
        else:
            columns = q.keys(tiles.cols, 0, (), param.device)
            for segment in tiles.segments(extent):
                _quantized(flat, gradient, state, tiles, segment, columns, seeds, step, group, extent)
        if work is not param:
            if param.dtype == torch.bfloat16 and group["bf16_stochastic_round"]:
                _round_stochastically(param, work, tiles, extent, seeds)
            else:
                param.copy_(work)


class Adam8bitRule(AdamW8bitRule):
    """AdamW8bit with the decay coupled: added to the gradient, as torch.optim.Adam does."""

    name: ClassVar[str] = "adam8bit"
    defaults: ClassVar[Mapping[str, Any]] = {**AdamW8bitRule.defaults, "weight_decay": 0.0}
    decoupled: ClassVar[bool] = False


class _Step:
    """The scalars of one step; python floats, rounded to fp32 where they meet a tensor."""

    def __init__(
        self, number: int, beta1: float, beta2: float, size: float, eps: float, shrink: float, l2: float
    ) -> None:
        self.number, self.beta1, self.beta2 = number, beta1, beta2
        self.size, self.eps, self.shrink, self.l2 = size, eps, shrink, l2

    @staticmethod
    def of(group: Group, number: int, decoupled: bool) -> _Step:
        beta1, beta2 = betas_of(group)
        lr, decay = learning_rate(group), float(group["weight_decay"])
        root = math.sqrt(1 - beta2**number)
        size, eps = lr * root / (1 - beta1**number), float(group["eps"]) * root
        return _Step(number, beta1, beta2, size, eps, 1 - lr * decay if decoupled else 1.0, 0.0 if decoupled else decay)


def _plain(param: Tensor, grad: Tensor, m: Tensor, v: Tensor, step: _Step) -> None:
    if step.l2:
        grad = grad.add(param, alpha=step.l2)
    m.lerp_(grad, 1 - step.beta1)
    v.mul_(step.beta2).addcmul_(grad, grad, value=1 - step.beta2)
    param.mul_(step.shrink).addcdiv_(m, v.sqrt().add_(step.eps), value=-step.size)


def _quantized(
    param: Tensor,
    grad: Tensor,
    state: State,
    tiles: q.Tiling,
    segment: q.Segment,
    columns: Tensor,
    seeds: tuple[int, ...],
    step: _Step,
    group: Group,
    extent: Extent,
) -> None:
    """One segment, chunk by chunk of whole bands."""
    rows, cols, height = segment.rows, segment.cols, tiles.height
    row_keys = q.keys(rows, segment.row, seeds, param.device)
    across = -(-cols // tiles.width)
    here = slice(segment.start, segment.start + rows * cols)
    tensors = [
        t.view(-1)[here].view(rows, cols) for t in (param, grad, state["exp_avg.codes"], state["exp_avg_sq.codes"])
    ]
    bands = -(-rows // height)
    scales = [
        state[f"{moment}.scales"].view(-1, tiles.tiles_across)[segment.band : segment.band + bands, :across]
        for moment in ("exp_avg", "exp_avg_sq")
    ]
    dynamic = group["format"] == "dynamic"
    kernel = adamw8bit_kernel() if param.device.type == "cpu" and not dynamic else None
    if kernel is not None:
        bad = kernel(
            tensors, scales, row_keys, columns[:cols], height, tiles.width, step, skip=bool(group["skip_nonfinite"])
        )
        _report(bad, extent, segment, across, tiles)
        return
    per_chunk = max(1, CHUNK // (height * across * tiles.width))
    for band in range(0, bands, per_chunk):
        some = slice(band * height, min(rows, (band + per_chunk) * height))
        bad = _chunk(
            [t[some] for t in tensors],
            [s[band : band + per_chunk] for s in scales],
            row_keys[some],
            columns[:cols],
            height,
            tiles.width,
            step,
            dynamic=dynamic,
            skip=bool(group["skip_nonfinite"]),
        )
        _report([band * across + tile for tile in bad], extent, segment, across, tiles)


def _chunk(
    tensors: list[Tensor],
    scales: list[Tensor],
    row_keys: Tensor,
    col_keys: Tensor,
    height: int,
    width: int,
    step: _Step,
    *,
    dynamic: bool,
    skip: bool,
    wrong: Tensor | None = None,
) -> list[int]:
    """One chunk of whole bands in eager torch, in a workspace padded with zeros to whole tiles.

    Returns the numbers of the tiles with a gradient that is not finite (or whose square has no place in the format).
    """
    param, grad, m_codes, v_codes = tensors
    m_scales, v_scales = scales
    rows, cols = param.shape
    bands, across = m_scales.shape
    full, tiled = (bands * height, across * width), (bands, height, across, width)
    numel = full[0] * full[1]
    m, v, t, g, i = (x[:numel].view(full) for x in _workspace(param.device, numel))
    if full != (rows, cols):
        for x in (v, g, i):
            x.zero_()

    g[:rows, :cols].copy_(grad)
    if step.l2:
        g[:rows, :cols].add_(param, alpha=step.l2)
    if wrong is not None:
        g[:rows, :cols].masked_fill_(wrong, 0.0)
    if dynamic:
        i.fill_(q.DYNAMIC_ZERO)
        i[:rows, :cols].copy_(m_codes)
        torch.index_select(q.dynamic_map(param.device, signed=True), 0, i.view(-1), out=m.view(-1))
        i.zero_()
        i[:rows, :cols].copy_(v_codes)
        torch.index_select(q.dynamic_map(param.device, signed=False), 0, i.view(-1), out=v.view(-1))
        v.view(tiled).mul_(v_scales[:, None, :, None])
        v.square_().mul_(step.beta2)
    else:
        i[:rows, :cols].copy_(m_codes)
        q.decode_m(i.view(-1), m.view(-1))
        bits = v.view(torch.int32)
        bits[:rows, :cols].copy_(v_codes)
        q.decode_v(bits)
        v.view(tiled).mul_(v_scales.mul(step.beta2)[:, None, :, None])
    m.view(tiled).mul_(m_scales[:, None, :, None])
    m.lerp_(g, 1 - step.beta1)
    v.addcmul_(g, g, value=1 - step.beta2)
    largest = v.view(tiled).amax((1, 3))
    if wrong is None and not bool((largest <= q.LARGEST_V).all()):
        # Once more without the bad elements, so that they do not take their tile along.
        wrong = ~(v <= q.LARGEST_V)[:rows, :cols]
        bad = (~(largest <= q.LARGEST_V)).flatten().nonzero().flatten().tolist()
        _chunk(tensors, scales, row_keys, col_keys, height, width, step, dynamic=dynamic, skip=skip, wrong=wrong)
        if not skip:
            param.masked_fill_(wrong, torch.nan)
        return bad

    torch.sqrt(v, out=t).add_(step.eps)
    param.mul_(step.shrink).addcdiv_(m[:rows, :cols], t[:rows, :cols], value=-step.size)

    noise = q.noise(row_keys, col_keys, i[:rows, :cols])
    if dynamic:
        torch.sqrt(v, out=t)
        v_scales.copy_(t.view(tiled).amax((1, 3)))
        t.view(tiled).mul_(q.inverse(v_scales)[:, None, :, None])
        v_codes.copy_(q.encode_dynamic_root(t[:rows, :cols], noise))
        m_scales.copy_(m.view(tiled).abs().amax((1, 3)))
        m.view(tiled).mul_(q.inverse(m_scales)[:, None, :, None])
        m_codes.copy_(q.encode_dynamic(m[:rows, :cols]))
        return []

    exponents = q.scale_exponents(largest, q.V_SHIFT)
    v_scales.copy_(q.power_of_two(exponents))
    v.view(tiled).mul_(q.power_of_two(254 - exponents)[:, None, :, None])
    v_codes.copy_(q.encode_v(v[:rows, :cols], noise))

    torch.abs(m, out=t)
    exponents = q.scale_exponents(t.view(tiled).amax((1, 3)), q.M_SHIFT)
    m_scales.copy_(q.power_of_two(exponents))
    t.view(tiled).mul_(q.power_of_two(254 - exponents)[:, None, :, None])
    m_codes.copy_(q.encode_m(t, m)[:rows, :cols])
    return []


_WORKSPACES: dict[torch.device, tuple[Tensor, ...]] = {}


def _workspace(device: torch.device, numel: int) -> tuple[Tensor, ...]:
    """Four fp32 and one int32 buffers, shared by all parameters; they grow to the largest chunk seen."""
    space = _WORKSPACES.get(device)
    if space is None or space[0].numel() < numel:
        size = max(CHUNK, numel)
        floats = tuple(torch.empty(size, device=device) for _ in range(4))
        space = _WORKSPACES[device] = (*floats, torch.empty(size, dtype=torch.int32, device=device))
    return space


def _report(bad: list[int], extent: Extent, segment: q.Segment, across: int, tiles: q.Tiling) -> None:
    if bad:
        places = ", ".join(
            f"(row {segment.row + tile // across * tiles.height}, column {tile % across * tiles.width})"
            for tile in bad[:5]
        )
        warnings.warn(
            f"non-finite gradient of parameter {extent.name!r} in {len(bad)} tile(s) of {tiles.height} x "
            f"{tiles.width}, at {places}{', ...' if len(bad) > 5 else ''}; the other elements and the states are "
            "unharmed",
            RuntimeWarning,
            stacklevel=2,
        )


def _round_stochastically(param: Tensor, work: Tensor, tiles: q.Tiling, extent: Extent, seeds: tuple[int, ...]) -> None:
    """bf16 ``param`` from fp32 ``work``.

    Up with the probability of the distance, by 16 bits of a hash of the position.
    """
    columns = q.keys(tiles.cols, 0, (1,), param.device)
    flat, target = work.view(-1), param.view(-1)
    for segment in tiles.segments(extent):
        here = slice(segment.start, segment.start + segment.rows * segment.cols)
        rows = q.keys(segment.rows, segment.row, (*seeds, 1), param.device)
        values = flat[here].view(segment.rows, segment.cols)
        dither = q.noise(rows, columns[: segment.cols], torch.empty_like(values, dtype=torch.int32))
        bits = values.view(torch.int32).add(dither.bitwise_right_shift_(4)).bitwise_and_(-65536)
        rounded = torch.where(values.isfinite(), bits.view(torch.float32), values)
        target[here].view_as(values).copy_(rounded)


class AdamW8bit(RaggedOptimizer):
    """AdamW with 8-bit moments in tiles that no rank boundary cuts.

    ``format``: ``"float"``, mini-floats of m and v with power-of-two scales, or ``"dynamic"``, the dynamic map of
    8-bit Adam (arXiv 2110.02861) of m and of the root of v, slower (no C++ kernel). ``tile``: rows and columns under
    one scale; a vector's tiles are as many consecutive elements. ``min_8bit_size``: smaller parameters (counted
    globally) keep fp32 moments. ``bf16_stochastic_round``: round bf16 parameters stochastically, so that steps below
    half a unit are not lost. ``skip_nonfinite``: take a non-finite gradient element as 0 (else its own parameter
    element becomes nan); its tile is reported either way and the rest is unharmed. ``seed``: of the random bits.
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
