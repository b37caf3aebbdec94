"""Two 8-bit formats for optimizer states in tiles with a power-of-two scale each: offset mini-floats.

    v >= 0   5 exponent + 3 mantissa bits      32 binades below the tile's largest value, then 0
    m        sign + 4 exponent + 3 mantissa    16 binades, then 0

The trick is one addition. With y = x / scale + 2^-31, the bits of the float y, shifted right by 20, are a mini-float
whose smallest value is exactly zero (2^-31 itself), without subnormals, tables or roots::

    float32  s eeeeeeee mmmmmmmmmmmmmmmmmmmmmmm          low 8 bits of  bits >> 20  =  eeeee mmm
                   ^^^^ ^^^^

Within a binade codes are linear in the bits, so a uniform 20-bit number added before the shift is stochastic rounding,
unbiased in v itself. v needs it: with beta2 = .999 a step changes v by far less than half a code, and rounding to
nearest would freeze it. Scales are powers of two, so scaling is exact and the grid stays when a scale moves. The
random number is a hash of (seed, salt, step, global row) and (global column): it does not depend on who computes it.

Every operation here is exact or a single IEEE rounding, so eager, compiled and C++ agree in every code and scale.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ragged_optim.layout import Extent
from ragged_shard.block import Block

__all__ = [
    "DYNAMIC_ZERO",
    "Segment",
    "Tiling",
    "column_keys",
    "decode_m",
    "decode_tiles",
    "decode_v",
    "dynamic_map",
    "dynamic_tables",
    "encode_dynamic",
    "encode_dynamic_square",
    "encode_m",
    "encode_tiles",
    "encode_v",
    "inverse",
    "keys",
    "m_values",
    "noise",
    "offset",
    "offset_v",
    "powers_of_two",
    "report",
    "root_scale",
    "tiling",
]

OFFSET = 2.0**-31
OFFSET_BITS = (127 - 31) << 23
# Where rounding up cannot carry past the top code (1.875 would).
LARGEST = 1.86
HALF = 1 << 19  # of what a code's bits leave out: rounds to nearest
M_OVER_V = 2.0**16  # m uses the lowest 16 of v's 32 binades
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-60, 2.0**60
# The largest v that has a code; a gradient beyond its root is as good as infinite.
LARGEST_V = LARGEST * 2.0**60
SMALLEST_NORMAL = 2.0**-126
ONE_BITS = 127 << 23
CELL = 17  # lower bits of a float that the dynamic map's table leaves out
_MASK = 0xFFFFFFFF


# ---- tiles ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Segment:
    """``rows`` rows of ``cols`` elements from element ``start`` of the local flat tensor: whole bands of tiles.

    ``row``: global number of the first row; ``band``: local number of the first band (row of scales).
    """

    start: int
    rows: int
    cols: int
    row: int
    band: int


@dataclass(frozen=True)
class Tiling:
    """How a parameter of global ``shape`` is cut into tiles of ``height`` x ``width``.

    ``slices`` matrices of ``rows`` x ``cols``, tiles restart with each. A vector is rows of ``width`` elements, one
    tile each. ``block``: what must stay on one rank; ``scales``: global shape of the scales.
    """

    shape: tuple[int, ...]
    slices: int
    rows: int
    cols: int
    height: int
    width: int
    block: Block
    scales: tuple[int, ...]

    @property
    def tiles_across(self) -> int:
        return -(-self.cols // self.width)

    def segments(self, extent: Extent) -> Iterator[Segment]:
        """The local elements as runs of whole bands, never across a slice that ends with a short band."""
        if extent.stop == extent.start:
            return
        if len(self.shape) < 2:
            first, stop = extent.start // self.cols, extent.stop // self.cols
            if stop > first:
                yield Segment(0, stop - first, self.cols, first, 0)
            rest = extent.stop - stop * self.cols
            if rest:
                yield Segment((stop - first) * self.cols, 1, rest, stop, stop - first)
            return
        row, end, first = extent.start // self.cols, extent.stop // self.cols, extent.start
        band = 0
        while row < end:
            # Slices of whole bands follow each other like one tall matrix.
            last = end if self.rows % self.height == 0 else min(end, (row // self.rows + 1) * self.rows)
            yield Segment(row * self.cols - first, last - row, self.cols, row, band)
            band += -(-(last - row) // self.height)
            row = last


@functools.lru_cache(maxsize=4096)
def tiling(shape: tuple[int, ...], height: int, width: int) -> Tiling:
    """The tiles of a parameter. A stack whose matrices are no whole number of bands is kept together by slices."""
    if len(shape) < 2:
        numel, run = math.prod(shape), height * width
        rows = -(-numel // run)
        return Tiling(shape, 1, rows, run, 1, run, Block.elements(run), (rows, 1))
    slices, rows, cols = math.prod(shape[:-2]), shape[-2], shape[-1]
    height = max(1, min(height, rows))
    bands, across = -(-rows // height), -(-cols // width)
    if slices > 1 and rows % height:
        return Tiling(shape, slices, rows, cols, height, width, Block.rows(rows), (slices, bands, across))
    return Tiling(shape, slices, rows, cols, height, width, Block.rows(height), (slices * bands, across))


# ---- random bits ----------------------------------------------------------------------------------------------------


def _mix_int(x: int) -> int:
    x = (x ^ x >> 16) * 0x85EBCA6B & _MASK
    x = (x ^ x >> 13) * 0xC2B2AE35 & _MASK
    return x ^ x >> 16


def keys(count: int, first: int, seeds: Sequence[int], device: torch.device) -> Tensor:
    """int32 of ``count`` hashes of (seeds, first), (seeds, first + 1), ...: murmur3's finaliser of a counter."""
    seed = 0
    for value in seeds:
        seed = _mix_int((seed + 0x9E3779B9 + value) & _MASK)
    # int64 so that products keep their low 32 bits.
    x = torch.arange(first + seed, first + seed + count, dtype=torch.int64, device=device).bitwise_and_(_MASK)
    x = (x ^ (x >> 16)).mul_(0x85EBCA6B).bitwise_and_(_MASK)
    x = (x ^ (x >> 13)).mul_(0xC2B2AE35).bitwise_and_(_MASK)
    return (x ^ (x >> 16)).to(torch.int32)


@functools.lru_cache(maxsize=64)
def column_keys(count: int, device: torch.device) -> Tensor:
    """int32 of hashes of the columns 0 to ``count``."""
    return keys(count, 0, (), device)


def noise(row_keys: Tensor, col_keys: Tensor, out: Tensor) -> Tensor:
    """Uniform 20-bit integers in the int32 ``out`` (rows, cols) of keys (rows, 1) and (1, cols)."""
    torch.bitwise_xor(row_keys, col_keys, out=out)
    return out.mul_(0x2C1B3C6D).bitwise_and_(0xFFFFF)


# ---- codes ----------------------------------------------------------------------------------------------------------


def powers_of_two(values: Tensor) -> Tensor:
    """In place: the powers of two at or below ``values`` >= 0, but no smaller than 2^-60 and no larger than 2^60.

    Of 2 / 1.86 times the largest v of a tile it is v's scale, and of 2^16 times as much of |m|'s m's (it uses the
    lowest 16 of the 32 binades): the smallest with largest / scale < 1.86.
    """
    values.view(torch.int32).bitwise_and_(0x7F800000)
    return values.clamp_(SMALLEST_SCALE, LARGEST_SCALE)


def decode_v(bits: Tensor) -> Tensor:
    """In place: int32 codes 0..255 of v become fp32 values, still to be multiplied by the scale."""
    return offset_v(bits).sub_(OFFSET)


def offset_v(bits: Tensor) -> Tensor:
    """As ``decode_v``, with ``OFFSET`` still to be taken off."""
    return torch.add(_offset_bits(bits.device), bits, alpha=1 << 20, out=bits).view(torch.float32)


@functools.cache
def offset(device: torch.device) -> Tensor:
    """``OFFSET`` as a tensor without dims."""
    return torch.tensor(OFFSET, dtype=torch.float32, device=device)


@functools.cache
def _offset_bits(device: torch.device) -> Tensor:
    return torch.tensor(OFFSET_BITS, dtype=torch.int32, device=device)


def encode_v(value: Tensor, dither: Tensor) -> Tensor:
    """In place: fp32 v / scale become int32 whose low 8 bits are the codes; ``dither``: 20-bit integers."""
    return value.add_(OFFSET).view(torch.int32).add_(dither).bitwise_right_shift_(20)


@functools.cache
def m_values(device: torch.device) -> Tensor:
    """The 256 values of m, by code."""
    codes = torch.arange(128, dtype=torch.int32)
    positive = decode_v(codes)
    # Code 255 - c is minus code c.
    return torch.cat([positive, -positive.flip(0)]).to(device)


def decode_m(codes: Tensor, out: Tensor) -> Tensor:
    """int32 codes 0..255 of m (1-D) to fp32 values in ``out`` (1-D), still to be multiplied by the scale."""
    return torch.index_select(m_values(codes.device), 0, codes, out=out)


def encode_m(magnitude: Tensor, signed: Tensor) -> Tensor:
    """In place: fp32 |m| / scale become int32 whose low 8 bits are the codes; ``signed``: m (destroyed)."""
    sign = signed.view(torch.int32).bitwise_right_shift_(31)
    return magnitude.add_(OFFSET).view(torch.int32).add_(HALF).bitwise_right_shift_(20).bitwise_xor_(sign)


# ---- the dynamic map ------------------------------------------------------------------------------------------------

# Where the signed map holds zero; the unsigned one holds it at 0.
DYNAMIC_ZERO = 127


@functools.cache
def dynamic_map(device: torch.device, *, signed: bool) -> Tensor:
    """The 256 ascending values of the dynamic map (arXiv 2110.02861): seven decades, a bit more of precision in each.

    signed: [-0.993, 1]; unsigned: [0, 1], for roots of v.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1.0, 2 ** (decade + (not signed)) + 1, dtype=torch.float64)
        means = ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)).tolist()
        values += means + ([-x for x in means] if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float64).float().to(device)


@functools.cache
def dynamic_tables(device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """How a code of the dynamic map is found without a search: by the upper 15 bits of the float, and one comparison.

    ``values`` (256): those of m; ``middles`` (256): where m goes to the next code, the last infinite; ``squares``
    (257): the values of the map of the root of v, squared, and infinity. ``m_cells``, ``v_cells`` (uint8): for every
    number of upper bits, from -2^14 for m, from 0 for v, the code of the smallest float that has them. Such a cell is
    so narrow that it holds one threshold at most.
    """
    values, roots = dynamic_map(torch.device("cpu"), signed=True), dynamic_map(torch.device("cpu"), signed=False)
    infinite = torch.tensor([math.inf], dtype=torch.float32)
    middles = torch.cat([(values[1:] + values[:-1]) / 2, infinite])
    squares = torch.cat([roots.square(), infinite])
    largest = ONE_BITS >> CELL
    cells = torch.arange(-(1 << 14), largest + 1, dtype=torch.int32) << CELL
    # The smallest of negative floats has the largest magnitude.
    smallest = torch.where(cells < 0, cells | ((1 << CELL) - 1), cells).view(torch.float32).nan_to_num(-1.0)
    m_cells = torch.bucketize(smallest, middles[:-1]).to(torch.uint8)
    v_cells = torch.bucketize(smallest[1 << 14 :], squares[:-1], right=True).sub_(1).to(torch.uint8)
    return tuple(table.to(device) for table in (values, middles, squares, m_cells, v_cells))  # type: ignore[return-value]


@functools.cache
def _cell_codes(device: torch.device) -> tuple[Tensor, Tensor]:
    return tuple(cells.to(torch.int32) for cells in dynamic_tables(device)[3:])  # type: ignore[return-value]


def inverse(scale: Tensor) -> Tensor:
    """1 / scale, and 0 for a scale too small for that."""
    return torch.where(scale >= SMALLEST_NORMAL, 1.0 / scale, 0.0)


def root_scale(largest: Tensor) -> Tensor:
    """The root of ``largest``, correctly rounded (torch.sqrt of fp32 is not, on CPU): it goes into the state."""
    return largest.double().sqrt_().float()


def encode_dynamic(value: Tensor) -> Tensor:
    """Codes (int32) of fp32 ``value`` in [-1, 1], to nearest."""
    _, middles, *_ = dynamic_tables(value.device)
    cells = (value.view(torch.int32) >> CELL).add_(1 << 14)
    codes = _look_up(_cell_codes(value.device)[0], cells)
    return codes.sub_(_minus_one_where_negative(_look_up(middles, codes).sub_(value)))


def encode_dynamic_square(square: Tensor, dither: Tensor) -> Tensor:
    """Codes (int32) of the roots of fp32 ``square`` in [0, 1], up or down with the probability of the distance of the
    squares: unbiased in v.

    ``dither``: 20-bit integers.
    """
    _, _, squares, _, _ = dynamic_tables(square.device)
    low = _look_up(_cell_codes(square.device)[1], square.view(torch.int32) >> CELL)
    low.add_(1).add_(_minus_one_where_negative(square - _look_up(squares, low))).clamp_(max=254)
    below, above = _look_up(squares, low), _look_up(squares, low + 1)
    # Up where square - below > (above - below) dither.
    left = above.sub_(below).mul_(dither.float().mul_(2.0**-20)).sub_(square - below)
    return low.sub_(_minus_one_where_negative(left))


def _minus_one_where_negative(difference: Tensor) -> Tensor:
    # In place of a comparison, whose booleans cost more to add than to make. A difference of equals is +0.
    return difference.view(torch.int32).bitwise_right_shift_(31)


def _look_up(table: Tensor, index: Tensor) -> Tensor:
    # table[index], which goes through int64 on the CPU and takes three times as long.
    return torch.index_select(table, 0, index.reshape(-1)).view(index.shape)


# ---- whole tensors --------------------------------------------------------------------------------------------------


def decode_tiles(
    codes: Tensor, scales: Tensor, tiles: Tiling, extent: Extent, *, signed: bool = True, dynamic: bool = False
) -> Tensor:
    """fp32 of the shape of the local ``codes``, whose elements are ``extent`` of the global tensor.

    ``signed``: of m, else of v; ``dynamic``: by the dynamic map.
    """
    out = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    for segment in tiles.segments(extent):
        here, bands, across = _place(segment, tiles)
        some = codes.view(-1)[here].to(torch.int32)
        by = scales.view(-1, tiles.tiles_across)[bands, :across]
        if dynamic:
            m_values, _, v_squares, _, _ = dynamic_tables(codes.device)
            values, by = (m_values if signed else v_squares)[some], by if signed else by.square()
        else:
            values = decode_m(some, torch.empty_like(some, dtype=torch.float32)) if signed else decode_v(some)
        spread = by.repeat_interleave(tiles.height, 0)[: segment.rows].repeat_interleave(tiles.width, 1)
        out.view(-1)[here] = values.mul_(spread[:, : segment.cols].reshape(-1))
    return out


def encode_tiles(
    value: Tensor,
    codes: Tensor,
    scales: Tensor,
    tiles: Tiling,
    extent: Extent,
    *,
    signed: bool = True,
    dynamic: bool = False,
) -> list[tuple[int, int]]:
    """Write fp32 ``value`` to the local ``codes`` and ``scales``, rounded to nearest; options as above.

    What is not finite is taken as 0, and what is too large for the format as the largest that is not. Returns where
    tiles begin (global row, column) that hold something not finite.
    """
    half = torch.full((1, 1, 1, 1), HALF, dtype=torch.int32, device=value.device)
    largest = torch.finfo(torch.float32).max if dynamic else LARGEST_V / M_OVER_V if signed else LARGEST_V
    spoilt = []
    for segment in tiles.segments(extent):
        here, bands, across = _place(segment, tiles)
        rows = bands.stop - bands.start
        full = value.new_zeros(rows * tiles.height, across * tiles.width, dtype=torch.float32)
        full[: segment.rows, : segment.cols] = value.reshape(-1)[here].view(segment.rows, segment.cols)
        tiled = full.view(rows, tiles.height, across, tiles.width)
        magnitude = tiled.abs()
        most = magnitude.amax((1, 3))
        if not bool((most <= largest).all()):
            bad = (~most.isfinite()).nonzero().tolist()
            spoilt += [(segment.row + band * tiles.height, tile * tiles.width) for band, tile in bad]
            # They would take the other elements of their tile along.
            torch.abs(tiled.nan_to_num_(0.0, 0.0, 0.0).clamp_(-largest, largest), out=magnitude)
            most = magnitude.amax((1, 3))
        if dynamic:
            found = most if signed else root_scale(most)
            tiled.mul_(inverse(found if signed else found.square())[:, None, :, None])
            bits = encode_dynamic(tiled) if signed else encode_dynamic_square(tiled, half)
        else:
            found = powers_of_two(most.mul_(2 * M_OVER_V / LARGEST if signed else 2 / LARGEST))
            magnitude.mul_(found.reciprocal()[:, None, :, None])
            bits = encode_m(magnitude, tiled) if signed else encode_v(magnitude, half)
        scales.view(-1, tiles.tiles_across)[bands, :across] = found
        codes.view(-1)[here] = bits.view(full.shape)[: segment.rows, : segment.cols].reshape(-1).to(torch.uint8)
    return spoilt


def report(spoilt: Sequence[tuple[int, int]], of: str, name: str, note: str = "") -> None:
    """Warn of a gradient of parameter ``name`` that is not finite: in which tiles or elements (``of``)."""
    if spoilt:
        places = ", ".join(f"(row {row}, column {column})" for row, column in spoilt[:5])
        warnings.warn(
            f"non-finite gradient of parameter {name!r} in {len(spoilt)} {of}, at {places}"
            f"{', ...' if len(spoilt) > 5 else ''}; the states of all other elements are unharmed{note}",
            RuntimeWarning,
            stacklevel=3,
        )


def _place(segment: Segment, tiles: Tiling) -> tuple[slice, slice, int]:
    """Where a segment's elements are, where its bands are, and how many tiles lie beside each other."""
    here = slice(segment.start, segment.start + segment.rows * segment.cols)
    bands = slice(segment.band, segment.band - (-segment.rows // tiles.height))
    return here, bands, -(-segment.cols // tiles.width)
