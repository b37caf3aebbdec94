"""Optional CPU kernels: small C++ files without torch headers, called through ctypes.

A kernel is compiled when it is first wanted, if there is a C++ compiler (``$CXX``, ``g++`` or ``clang++``), and kept in
``$XDG_CACHE_HOME/ragged_optim``; ``python -m ragged_optim.kernels`` builds them ahead. Without a compiler, or with
``RAGGED_OPTIM_KERNELS=0``, the eager code of the rule does the same work.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["MuonKernel", "adamw8bit_kernel", "build", "muon_kernel"]

# No -march=native: with 512-bit vectors g++ packs 64 bytes at a time, and a tile is 32 wide. Contraction off: see the
# source.
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
ROOM = 64  # bad tiles that are named


def _flags() -> tuple[str, ...]:
    wide = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    return (*FLAGS, "-mavx2", "-mfma") if wide else FLAGS


def build(name: str) -> Path | None:
    """The shared library of ``name``.cpp, compiled if it is not in the cache; ``None`` when it cannot be."""
    source = Path(__file__).with_name(f"{name}.cpp")
    compiler = next(
        (found for c in (os.environ.get("CXX"), "g++", "clang++") if c and (found := shutil.which(c))), None
    )
    if compiler is None or not source.exists():
        return None
    text = source.read_bytes()
    key = hashlib.sha256(b"\0".join([text, compiler.encode(), *map(str.encode, _flags())])).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ragged_optim"
    library = folder / f"{name}-{key}.so"
    if library.exists():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / library.name
            command = [compiler, *_flags(), str(source), "-o", str(made)]
            subprocess.run(command, check=True, capture_output=True, timeout=120)
            made.replace(library)  # atomic: ranks may build at the same time
    except (OSError, subprocess.SubprocessError):
        return None
    return library


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


@functools.cache
def adamw8bit_kernel() -> Callable[..., list[int]] | None:
    """The step of AdamW8bit on one segment, or ``None`` where the eager code has to do."""
    library = _load("adamw8bit")
    if library is None:
        return None
    function = library.ragged_adamw8bit
    function.restype = ctypes.c_int64
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [
        *[pointer] * 6,
        number,
        pointer,
        pointer,
        *[number] * 4,
        pointer,
        ctypes.c_int32,
        pointer,
        number,
    ]

    def step(
        tensors: Sequence[Tensor],
        scales: Sequence[Tensor],
        row_keys: Tensor,
        col_keys: Tensor,
        height: int,
        width: int,
        step: Scalars,
        *,
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
            int(skip),
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


@functools.cache
def muon_kernel() -> MuonKernel | None:
    """Muon's element-wise passes in one go over memory, or ``None`` where torch's operations have to do."""
    library = _load("muon")
    return None if library is None else MuonKernel(library)
