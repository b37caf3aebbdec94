"""AdamW8bit's step on one segment as a function for ``torch.compile``: what runs on GPUs, where there is no C++ kernel.

The same arithmetic as kernels/eager.py and as the C++ kernel, rounded in the same places. Inductor
makes of it a reduction over each tile and a pass that writes, so nothing but the new moments' maxima is kept; the whole
segment is one call, since a GPU has no use for chunks. Numbers that change from step to step are tensors: one graph
serves all steps, and dynamic shapes all parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ragged_optim import quantize as q
from ragged_optim.kernels import ROOM, Scalars

__all__ = ["compiled_step", "step_of_tiles"]

# Graphs of one process: options, tiles and sizes of 1 each make others. Beyond torch's own 8 a whole graph is an error.
GRAPHS = 256


def step_of_tiles(
    param: Tensor,
    grad: Tensor,
    m_codes: Tensor,
    v_codes: Tensor,
    m_scales: Tensor,
    v_scales: Tensor,
    row_keys: Tensor,
    col_keys: Tensor,
    scalars: Tensor,
    tables: Sequence[Tensor],
    height: int,
    width: int,
    near: bool,
    coupled: bool,
    dynamic: bool,
    skip: bool,
) -> Tensor:
    """In place on (rows, cols) tensors and (bands, across) scales; ``scalars``: as the C++ kernel takes them.

    ``near``: 1 - beta1 < 0.5; ``tables``: of the dynamic map. Returns which tiles had a gradient that is not finite.
    """
    rows, cols = param.shape
    bands, across = m_scales.shape
    lerp, beta2, gain, shrink, size, eps, l2 = scalars.unbind()
    m_values, middles, squares, m_cells, v_cells = tables

    def tiled(x: Tensor, padding: int = 0) -> Tensor:
        whole = F.pad(x, (0, across * width - cols, 0, bands * height - rows), value=padding)
        return whole.view(bands, height, across, width)

    def untiled(x: Tensor) -> Tensor:
        return x.reshape(bands * height, across * width)[:rows, :cols]

    def by_tile(x: Tensor) -> Tensor:
        return x[:, None, :, None]

    p, g = tiled(param), tiled(grad.float())
    if coupled:
        g = _fma(l2, p, g)
    codes, v_bits = tiled(m_codes, q.DYNAMIC_ZERO if dynamic else 0).int(), tiled(v_codes).int()
    if dynamic:
        m_old, v_old = m_values[codes] * by_tile(m_scales), squares[v_bits] * by_tile(v_scales.square())
    else:
        label = torch.where(codes > 127, 255 - codes, codes)
        size_of_m = _floats((label << 20) + q.OFFSET_BITS) - q.OFFSET
        m_old = torch.where(codes > 127, -size_of_m, size_of_m) * by_tile(m_scales)
        v_old = (_floats((v_bits << 20) + q.OFFSET_BITS) - q.OFFSET) * by_tile(v_scales)
    decayed = v_old * beta2
    # An element whose gradient is not finite counts as 0, so that it does not take its tile along.
    wrong = ~(_fma(gain * g, g, decayed) <= q.LARGEST_V)
    g = torch.where(wrong, 0.0, g)
    m = _fma(lerp, g - m_old, m_old) if near else _fma(lerp - 1.0, g - m_old, g)
    v = _fma(gain * g, g, decayed)

    new = p * shrink - size * m / (v.sqrt() + eps)
    param.copy_(untiled(new if skip else torch.where(wrong, torch.nan, new)))

    noise = tiled(((row_keys[:, None] ^ col_keys[None, :]) * 0x2C1B3C6D) & 0xFFFFF)
    most_m, most_v = m.abs().amax((1, 3)), v.amax((1, 3))
    if dynamic:
        m_scales.copy_(most_m)
        v_scales.copy_(q.root_scale(most_v))
        x, y = m * by_tile(q.inverse(most_m)), v * by_tile(q.inverse(q.root_scale(most_v).square()))
        found = m_cells[(_bits(x) >> q.CELL) + (1 << 14)].int()
        low = v_cells[_bits(y) >> q.CELL].int()
        low = (low + (y >= squares[low + 1])).clamp(max=254)
        below, above = squares[low], squares[low + 1]
        m_codes.copy_(untiled(found + (x > middles[found])))
        v_codes.copy_(untiled(low + (y - below > (above - below) * (noise.float() * 2.0**-20))))
    else:
        new_m = _power_of_two(most_m * (2 * q.M_OVER_V / q.LARGEST))
        new_v = _power_of_two(most_v * (2 / q.LARGEST))
        label = (_bits(m.abs() * by_tile(1.0 / new_m) + q.OFFSET) + q.HALF) >> 20
        m_codes.copy_(untiled(torch.where(_bits(m) < 0, 255 - label, label)))
        v_codes.copy_(untiled(((_bits(v * by_tile(1.0 / new_v) + q.OFFSET) + noise) >> 20) & 255))
        m_scales.copy_(new_m)
        v_scales.copy_(new_v)
    return wrong.any(3).any(1)


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a b + c, rounded once: as torch's kernels and the C++ one do. Inductor's decompositions would round twice."""
    from torch._inductor.inductor_prims import fma

    made: Tensor = fma(*torch.broadcast_tensors(a, b, c))
    return made


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def _floats(x: Tensor) -> Tensor:
    return x.view(torch.float32)


def _power_of_two(x: Tensor) -> Tensor:
    return _floats(_bits(x) & 0x7F800000).clamp(q.SMALLEST_SCALE, q.LARGEST_SCALE)


@functools.cache
def compiled_step() -> Callable[..., list[int]]:
    """``step_of_tiles`` compiled, in the form of the C++ kernel."""
    run: Callable[..., Tensor] = torch.compile(step_of_tiles, fullgraph=True, dynamic=True)

    def step(
        tensors: Sequence[Tensor],
        scales: Sequence[Tensor],
        row_keys: Tensor,
        col_keys: Tensor,
        height: int,
        width: int,
        step: Scalars,
        *,
        dynamic: bool,
        skip: bool,
    ) -> list[int]:
        device = tensors[0].device
        values = (1 - step.beta1, step.beta2, 1 - step.beta2, step.shrink, step.size, step.eps, step.l2)
        scalars = torch.tensor(values, dtype=torch.float32).to(device, non_blocking=True)
        options = (height, width, 1 - step.beta1 < 0.5, step.l2 != 0.0, dynamic, skip)
        with torch._dynamo.config.patch(recompile_limit=GRAPHS):
            wrong = run(*tensors, *scales, row_keys, col_keys, scalars, q.dynamic_tables(device), *options)
        return wrong.flatten().nonzero().flatten()[:ROOM].tolist() if bool(wrong.any()) else []

    return step
