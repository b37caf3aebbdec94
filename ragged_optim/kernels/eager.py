"""AdamW8bit's step on one segment in eager torch: what runs where there is neither a C++ compiler nor a GPU.

The same arithmetic as the C++ kernel and as compiled.py, rounded in the same places. It goes over the segment in chunks
of whole bands of tiles, on one workspace that stays in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ragged_optim import quantize as q
from ragged_optim.kernels import Scalars

__all__ = ["eager_step"]

# Elements worked on at once, so that the workspace stays in the cache.
CHUNK = 128 * 1024
VECTOR = 64  # elements: a multiple of every vector register


class Step(Scalars, Protocol):
    def run(self, param: Tensor, grad: Tensor, m: Tensor, v: Tensor) -> None:
        """The step on flat fp32 tensors."""


def eager_step(
    tensors: Sequence[Tensor],
    scales: Sequence[Tensor],
    row_keys: Tensor,
    col_keys: Tensor,
    height: int,
    width: int,
    step: Step,
    *,
    dynamic: bool,
    skip: bool,
) -> list[int]:
    """``tensors``: parameter, gradient, codes of m and of v, each (rows, cols); ``scales``: of m and of v, (bands,
    across). Returns the numbers of the tiles with a gradient that is not finite.
    """
    (rows, cols), (bands, across) = tensors[0].shape, scales[0].shape
    device = tensors[0].device
    row_keys, col_keys = row_keys[:, None], col_keys[None, :]
    per_chunk = max(1, CHUNK // (height * across * width))
    found = []
    for band in range(0, bands, per_chunk):
        some = slice(band * height, min(rows, (band + per_chunk) * height))
        bad = _chunk(
            [t[some] for t in tensors],
            [s[band : band + per_chunk] for s in scales],
            row_keys[some],
            col_keys,
            _workspace(device, some.stop - some.start, cols, height, width),
            step,
            dynamic=dynamic,
            skip=skip,
        )
        found += [band * across + tile for tile in bad]
    return found


class _Workspace:
    """Buffers of one chunk of ``rows`` x ``cols`` elements, padded to whole tiles, and every view of them.

    Eager torch is as fast as it makes few calls, and its CPU kernels are slow where a tile's scale meets its elements
    in short runs: so scales are spread over the columns of a band of tiles first, and what is done to v and to |m|
    alike is done in one call.
    """

    def __init__(self, buffer: Tensor, rows: int, cols: int, height: int, width: int) -> None:
        bands, across = -(-rows // height), -(-cols // width)
        shape, device = (bands * height, across * width), buffer.device
        numel = shape[0] * shape[1]
        # torch's fused kernel rounds what is left after the last whole vector differently.
        self.whole = -(-numel // VECTOR) * VECTOR
        self.full = (rows, cols, numel) == (*shape, self.whole)
        parts = buffer[: 5 * self.whole].view(5, self.whole)
        self.m_flat, self.v_flat, _, self.g_flat, self.p_flat = parts
        self.m, self.v, self.t, self.g, self.p = (part[:numel].view(shape) for part in parts)
        self.i = self.p.view(torch.int32)  # the parameter's place is free before and after the step
        self.m_bits, self.v_bits, self.t_bits = (x.view(torch.int32) for x in (self.m, self.v, self.t))
        self.vt_bits = parts[1:3].view(torch.int32)
        banded = parts[:3, :numel].view(3, bands, height, shape[1])
        self.mv_bands, self.vt_bands, (self.m_bands, self.v_bands, _) = banded[:2], banded[1:], banded
        here = (slice(rows), slice(cols))
        self.m_here, self.v_here, self.g_here, self.p_here, self.i_here = (
            x[here] for x in (self.m, self.v, self.g, self.p, self.i)
        )
        self.v_bits_here, self.t_bits_here = self.v_bits[here], self.t_bits[here]
        self.edges = [edge for x in (self.g, self.i, self.v_bits) for edge in (x[rows:], x[:rows, cols:])]
        self.columns = buffer.new_empty(2, bands, shape[1])
        self.columns_of_tiles = self.columns.view(2, bands, across, width)
        self.most = buffer.new_empty(2, bands, across)
        self.most_v, self.most_m = self.most.unbind()
        self.scales = buffer.new_empty(2, bands, across)
        # What makes the next power of two of the largest, and of the largest of m that of 16 binades more.
        self.next = buffer.new_tensor([2 / q.LARGEST, 2 * q.M_OVER_V / q.LARGEST]).view(2, 1, 1)
        # The offset that is still in v when its scale is multiplied.
        self.minus = buffer.new_tensor([0.0, -q.OFFSET]).view(2, 1, 1, 1)
        self.spread = buffer.new_empty(2, bands, 1, shape[1])
        self.spread_flat, self.spread_one = self.spread.view(-1), self.spread[0]
        tile = torch.arange(2 * bands, dtype=torch.int32, device=device)[:, None] * across
        self.tile_of = (tile + torch.arange(shape[1], dtype=torch.int32, device=device) // width).view(-1)
        self.tile_of_one = self.tile_of[: bands * shape[1]]

    def spread_out(self, scales: Tensor) -> Tensor:
        """``scales`` (2, bands, across) over the columns of their tiles: (2, bands, 1, columns), till the next call."""
        torch.index_select(scales.view(-1), 0, self.tile_of, out=self.spread_flat)
        return self.spread

    def scale(self, bands: Tensor, scales: Tensor) -> None:
        """``bands`` (bands, height, columns) times the scale (bands, across) of their tile, in place."""
        torch.index_select(scales.reshape(-1), 0, self.tile_of_one, out=self.spread_one.view(-1))
        bands.mul_(self.spread_one)

    def largest(self) -> None:
        """The largest of v and of |m| in each tile."""
        torch.amax(self.vt_bands, 2, out=self.columns)
        torch.amax(self.columns_of_tiles, 3, out=self.most)


_BUFFERS: dict[torch.device, Tensor] = {}
_WORKSPACES: dict[tuple[object, ...], _Workspace] = {}


def _workspace(device: torch.device, rows: int, cols: int, height: int, width: int) -> _Workspace:
    """On one buffer, shared by all parameters, that grows to the largest chunk seen."""
    key = (device, rows, cols, height, width)
    size = 5 * (-(-rows // height) * height * -(-cols // width) * width + VECTOR)
    if device not in _BUFFERS or _BUFFERS[device].numel() < size:
        _WORKSPACES.clear()
        _BUFFERS[device] = torch.zeros(max(5 * CHUNK, size), dtype=torch.float32, device=device)
    if key not in _WORKSPACES:
        if len(_WORKSPACES) >= 64:
            _WORKSPACES.clear()
        _WORKSPACES[key] = _Workspace(_BUFFERS[device], rows, cols, height, width)
    return _WORKSPACES[key]


def _chunk(
    tensors: list[Tensor],
    scales: list[Tensor],
    row_keys: Tensor,
    col_keys: Tensor,
    w: _Workspace,
    step: Step,
    *,
    dynamic: bool,
    skip: bool,
    wrong: Tensor | None = None,
) -> list[int]:
    """One chunk of whole bands in eager torch.

    Returns the numbers of the tiles with a gradient that is not finite (or whose square has no place in the format).
    """
    param, grad, m_codes, v_codes = tensors
    m_scales, v_scales = scales
    if not w.full:
        for edge in w.edges:
            edge.zero_()
        if dynamic:
            w.i.fill_(q.DYNAMIC_ZERO)

    # decode
    w.i_here.copy_(m_codes)
    w.v_bits_here.copy_(v_codes)
    if dynamic:
        m_values, _, v_squares, _, _ = q.dynamic_tables(param.device)
        torch.index_select(m_values, 0, w.i.view(-1), out=w.m.view(-1))
        w.i.copy_(w.v_bits)
        torch.index_select(v_squares, 0, w.i.view(-1), out=w.v.view(-1))
        w.scale(w.v_bands, v_scales.square())
        w.scale(w.m_bands, m_scales)
    else:
        torch.index_select(q.m_values(param.device), 0, w.i.view(-1), out=w.m.view(-1))
        q.offset_v(w.v_bits)
        # Scales are powers of two: taking the offset off after they are multiplied rounds as before, and in one pass.
        by = w.spread_out(torch.stack((m_scales, v_scales), out=w.scales))
        torch.addcmul(by * w.minus, w.mv_bands, by, out=w.mv_bands)

    # step
    gradient, target = grad.view(-1), param.view(-1)
    if not (w.full and grad.dtype == torch.float32 and not step.l2 and wrong is None):
        if wrong is None or not step.l2:  # the second time the parameter may have made its step
            w.g_here.copy_(grad)
            if step.l2:
                w.g_here.add_(param, alpha=step.l2)
        if wrong is not None:
            w.g_here.masked_fill_(wrong, 0.0)
        gradient = w.g_flat
    in_place = w.full and not skip
    if not in_place or wrong is not None:
        w.p_here.copy_(param)
        target = w.p_flat
    step.run(target, gradient, w.m_flat, w.v_flat)
    torch.abs(w.m, out=w.t)
    w.largest()
    if wrong is None and not float(w.most_v.max()) <= q.LARGEST_V:
        # The moments once more without the bad elements, so that they do not take their tile along.
        wrong = ~(w.v_here <= q.LARGEST_V)
        bad = (~(w.most_v <= q.LARGEST_V)).flatten().nonzero().flatten().tolist()
        _chunk(tensors, scales, row_keys, col_keys, w, step, dynamic=dynamic, skip=skip, wrong=wrong)
        if not skip:
            param.masked_fill_(wrong, torch.nan)
        return bad
    if not in_place:
        param.copy_(w.p_here)

    # encode
    noise = q.noise(row_keys, col_keys, w.i_here)
    if dynamic:
        m_scales.copy_(w.most_m)
        v_scales.copy_(q.root_scale(w.most_v))
        w.scale(w.v_bands, q.inverse(v_scales.square()))
        v_codes.copy_(q.encode_dynamic_square(w.v_here, noise))
        w.scale(w.m_bands, q.inverse(m_scales))
        m_codes.copy_(q.encode_dynamic(w.m_here))
        return []
    new_scales = q.powers_of_two(w.most.mul_(w.next))
    v_scales.copy_(new_scales[0])
    m_scales.copy_(new_scales[1])
    torch.addcmul(q.offset(param.device), w.vt_bands, w.spread_out(new_scales.reciprocal()), out=w.vt_bands)
    w.v_bits_here.add_(noise)
    w.t_bits.add_(q.HALF)
    w.vt_bits.bitwise_right_shift_(20)
    v_codes.copy_(w.v_bits_here)
    w.t_bits.bitwise_xor_(w.m_bits.bitwise_right_shift_(31))
    m_codes.copy_(w.t_bits_here)
    return []
