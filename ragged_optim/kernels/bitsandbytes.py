"""bitsandbytes' own 8-bit AdamW on what lies here: flat blocks of 256 elements, its codes, its kernels on every device.

The library is optional (``pip install "ragged-optim[bitsandbytes]"``). Its public functions are called with its own
argument order; nothing of it is re-implemented.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

__all__ = ["BLOCK", "dequantize", "map_of", "quantize", "step_32bit", "step_8bit"]

BLOCK = 256  # elements under one scale, fixed in the library


@functools.cache
def library() -> Any:
    """``bitsandbytes.functional``, or ``ImportError`` that says how to get it."""
    try:
        import bitsandbytes.functional as functional
    except ImportError as error:
        raise ImportError(
            'AdamW8bit(format="bitsandbytes") calls the kernels of bitsandbytes, which cannot be imported here '
            f'({error}): pip install "ragged-optim[bitsandbytes]", or take format="float" or "dynamic"'
        ) from error
    return functional


@functools.cache
def map_of(device: torch.device, *, signed: bool) -> Tensor:
    """The library's 256 values of m (signed) or v."""
    made: Tensor = library().create_dynamic_map(signed=signed).to(device)
    return made


def step_8bit(
    param: Tensor, grad: Tensor, codes: tuple[Tensor, Tensor], scales: tuple[Tensor, Tensor], step: Any
) -> None:
    """One step on flat tensors whose first element begins a block; ``codes``, ``scales``: of m and of v."""
    library().optimizer_update_8bit_blockwise(
        "adam",
        grad,
        param,
        *codes,
        step.beta1,
        step.beta2,
        0.0,  # beta3 and alpha are AdEMAMix's
        0.0,
        step.given_eps,
        step.number,
        step.lr,
        map_of(param.device, signed=True),
        map_of(param.device, signed=False),
        *scales,
        weight_decay=step.decay,
    )


def step_32bit(param: Tensor, grad: Tensor, moments: tuple[Tensor, Tensor], step: Any) -> None:
    """One step with fp32 moments, as the library takes for small parameters."""
    library().optimizer_update_32bit(
        "adam",
        grad,
        param,
        moments[0],
        step.beta1,
        step.given_eps,
        step.number,
        step.lr,
        moments[1],
        step.beta2,
        weight_decay=step.decay,
    )


def quantize(value: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """(codes of ``value``'s shape, scales) by the library."""
    codes, state = library().quantize_blockwise(
        value.contiguous().float(), code=map_of(value.device, signed=signed), blocksize=BLOCK
    )
    return codes.view(value.shape), state.absmax


def dequantize(codes: Tensor, scales: Tensor, values: Tensor) -> Tensor:
    """fp32 of ``codes`` that stand for ``values`` (256), one scale per run of them."""
    flat: Tensor = values.to(codes.device)[codes.reshape(-1).long()]
    run = BLOCK
    while -(-flat.numel() // run) > scales.numel():
        run *= 2  # older versions have runs of 2048
    scaled: Tensor = flat * scales.reshape(-1).repeat_interleave(run)[: flat.numel()]
    return scaled.view(codes.shape)
