"""Optional CPU kernels: small C++ files without torch headers, called through ctypes.

A kernel comes with the package when there was a C++ compiler where it was built. Else it is compiled when it is first
wanted, if there is one now (``$CXX``, ``g++`` or ``clang++``), and kept in ``$XDG_CACHE_HOME/ragged_optim``;
``python -m ragged_optim.kernels`` does so ahead. Without a compiler, or with ``RAGGED_OPTIM_KERNELS=0``, the eager code
of the rule does the same work.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import os
import platform
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ragged_optim.kernels.compile import build
from ragged_optim.quantize import dynamic_tables

__all__ = ["AdamWKernel", "MuonKernel", "adamw8bit_kernel", "adamw_kernel", "muon_kernel", "plain"]

ROOM = 64  # bad tiles that are named


class Scalars(Protocol):
    """The numbers of one step; see rules/adamw8bit.py."""

    beta1: float
    beta2: float
    shrink: float
    size: float
    eps: float
    l2: float


def _load(name: str) -> ctypes.CDLL | None:
    if os.environ.get("RAGGED_OPTIM_KERNELS", "1") == "0":
        return None
    library = build(name)
    try:
        return None if library is None else ctypes.CDLL(str(library))
    except OSError:
        return None


def _level() -> int:
    """Which vectors torch's own kernels use: the kernels must round as these do, and run where these run."""
    return {"AVX512": 2, "AVX2": 1}.get(torch.backends.cpu.get_cpu_capability(), 0)


class AdamWKernel:
    """One step of Adam (``decoupled=False``) or AdamW on fp32 tensors of one dense layout, in place."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._step = library.ragged_adamw
        self._step.restype = None
        self._step.argtypes = [*[ctypes.c_void_p] * 4, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64]

    def __call__(
        self,
        tensors: Sequence[Tensor],
        step: float,
        *,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        decoupled: bool,
    ) -> None:
        """``tensors``: parameter, gradient, both moments. ``step`` counts from 1."""
        shrink, l2 = (1 - lr * weight_decay, 0.0) if decoupled else (1.0, weight_decay)
        size, root = -lr / (1 - beta1**step), math.sqrt(1 - beta2**step)
        scalars = (ctypes.c_float * 8)(1 - beta1, beta2, 1 - beta2, shrink, size, root, eps, l2)
        pointers = (tensor.data_ptr() for tensor in tensors)
        self._step(*pointers, tensors[0].numel(), ctypes.addressof(scalars), torch.get_num_threads())

    def rounds_as_torch(self) -> bool:
        """Whether a step gives the bits of torch's fused kernel, on some random numbers."""
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(4, 1024, generator=generator, dtype=torch.float32)  # whatever the default dtype
        start[1:].mul_(1e-2)
        start[3].square_()
        for decoupled, beta1, weight_decay in itertools.product((True, False), (0.9, 0.3), (0.0, 0.1)):
            ours, theirs = start.clone(), start.clone()
            options: dict[str, Any] = {
                "lr": 0.1,
                "beta1": beta1,
                "beta2": 0.95,
                "eps": 1e-8,
                "weight_decay": weight_decay,
            }
            self(ours.unbind(), 3.0, decoupled=decoupled, **options)
            p, g, m, v = ([tensor] for tensor in theirs.unbind())
            kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
            kernel(p, g, m, v, [], [start.new_tensor(3.0)], amsgrad=False, maximize=False, **options)
            if not torch.equal(ours, theirs):
                return False
        return True


@functools.cache
def adamw_kernel() -> AdamWKernel | None:
    """Adam's step in one go over memory, or ``None`` where torch's fused kernel has to do: without the library, and
    where that kernel rounds otherwise.
    """
    library = _load("adamw") if _fuses() else None
    kernel = None if library is None else AdamWKernel(library)
    return kernel if kernel is not None and kernel.rounds_as_torch() else None


@functools.cache
def adamw8bit_kernel() -> Callable[..., list[int]] | None:
    """The step of AdamW8bit on one segment, or ``None`` where the eager code has to do."""
    library = _load("adamw8bit")
    if library is None:
        return None
    function = library.ragged_adamw8bit
    function.restype = ctypes.c_int64
    pointer, number, small = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    function.argtypes = [*[pointer] * 6, number, *[pointer] * 2, *[number] * 4, *[pointer] * 2, small, small]
    function.argtypes += [number, pointer, number]
    tables = dynamic_tables(torch.device("cpu"))
    maps = (ctypes.c_void_p * len(tables))(*(table.data_ptr() for table in tables))
    level = _level()

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
        param, grad, m_codes, v_codes = tensors
        grad = grad.to(torch.float32).contiguous()
        rows, cols = param.shape
        values = (1 - step.beta1, step.beta2, 1 - step.beta2, step.shrink, step.size, step.eps, step.l2)
        scalars = (ctypes.c_float * len(values))(*values)
        bad = (ctypes.c_int64 * ROOM)()
        found = function(
            *(t.data_ptr() for t in (param, grad, m_codes, v_codes, *scales)),
            scales[0].stride(0),
            row_keys.data_ptr(),
            col_keys.data_ptr(),
            *(rows, cols, height, width),
            ctypes.addressof(scalars),
            ctypes.addressof(maps) if dynamic else None,
            int(skip),
            level,
            torch.get_num_threads(),
            ctypes.addressof(bad),
            ROOM,
        )
        return list(bad[: min(found, ROOM)])

    return step


class MuonKernel:
    """Muon's two element-wise passes on contiguous fp32 tensors with bf16 directions and updates."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._direction, self._apply = library.ragged_muon_direction, library.ragged_muon_apply
        self._direction.restype = self._apply.restype = None
        self._direction.argtypes = [pointer, pointer, pointer, number, ctypes.c_double, ctypes.c_int32]
        self._apply.argtypes = [pointer, pointer, number, ctypes.c_float, ctypes.c_float]

    def direction(self, buf: Tensor, grad: Tensor, momentum: float, *, nesterov: bool) -> Tensor:
        """Advances ``buf``; returns the bf16 direction."""
        out = torch.empty(grad.shape, dtype=torch.bfloat16)
        self._direction(buf.data_ptr(), grad.data_ptr(), out.data_ptr(), grad.numel(), momentum, int(nesterov))
        return out

    def apply(self, param: Tensor, update: Tensor, shrink: float, alpha: float) -> None:
        """``param = param * shrink + alpha * update``."""
        self._apply(param.data_ptr(), update.data_ptr(), param.numel(), shrink, alpha)


def plain(*tensors: Tensor) -> bool:
    """Whether the elements lie where ``data_ptr`` says: not in a subclass that wraps other tensors."""
    return all(type(tensor) in (Tensor, torch.nn.Parameter) for tensor in tensors)


def _fuses() -> bool:
    """Whether this machine, and torch on it, fuse multiply-adds."""
    return _level() > 0 or platform.machine() not in ("x86_64", "AMD64")


@functools.cache
def muon_kernel() -> MuonKernel | None:
    """Muon's element-wise passes in one go over memory, or ``None`` where torch's operations have to do (as where they
    do not fuse multiply-adds).
    """
    library = _load("muon") if _fuses() else None
    return None if library is None else MuonKernel(library)
