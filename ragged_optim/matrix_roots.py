"""Inverse roots and eigenbases of symmetric positive semi-definite matrices, and their packed storage.

``eigh`` on the CPU is both faster and safer than coupled Newton iterations (which diverge on rank-deficient factors). A
failure goes down a chain: fp32, fp64, and then the caller keeps what it had.

``start`` and ``finished`` run them in a thread of their own, on the CPU, beside the steps that go on. When a result is
taken is the caller's choice and must not depend on whether it is ready, so that timing changes nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["eigenbasis", "finished", "inverse_root", "pack", "packed_numel", "refresh_basis", "start", "unpack"]


def packed_numel(dim: int) -> int:
    """Elements of the lower triangle of a (dim, dim) matrix."""
    return dim * (dim + 1) // 2


@functools.lru_cache(maxsize=64)
def _triangle(dim: int, device: torch.device) -> Tensor:
    places: Tensor = torch.tril_indices(dim, dim, device=device)
    return places[0] * dim + places[1]


@functools.lru_cache(maxsize=64)
def _places(dim: int, device: torch.device) -> Tensor:
    """For every element of the full matrix, where it stands in the packed one."""
    places = torch.empty(dim * dim, dtype=torch.int64, device=device)
    triangle = _triangle(dim, device)
    places[triangle] = torch.arange(triangle.numel(), device=device)
    square = places.view(dim, dim)
    return torch.where(torch.ones(dim, dim, dtype=torch.bool, device=device).tril(), square, square.T).reshape(-1)


def pack(matrix: Tensor) -> Tensor:
    """The lower triangle of a symmetric (dim, dim) matrix as a vector: half the bytes."""
    return matrix.reshape(-1).index_select(0, _triangle(matrix.shape[0], matrix.device))


def unpack(packed: Tensor) -> Tensor:
    """The symmetric matrix of a packed vector."""
    dim = (math.isqrt(8 * packed.numel() + 1) - 1) // 2
    return packed.index_select(0, _places(dim, packed.device)).view(dim, dim)


def _eigh(matrix: Tensor) -> tuple[Tensor, Tensor] | None:
    """Ascending eigenvalues and vectors in fp32 or, if that fails, by way of fp64; ``None`` if both fail."""
    if not bool(matrix.isfinite().all()):
        return None
    for dtype in (matrix.dtype, torch.float64):
        try:
            values, vectors = torch.linalg.eigh(matrix.to(dtype))
        except RuntimeError:  # torch.linalg.LinAlgError is one
            continue
        if bool(values.isfinite().all()) and bool(vectors.isfinite().all()):
            return values.to(matrix.dtype), vectors.to(matrix.dtype)
    return None


def inverse_root(matrix: Tensor, root: float, eps: float) -> Tensor | None:
    """(matrix + eps)^(-1 / root), eigenvalues below zero (rounding) moved up to zero first.

    ``None`` if it cannot be found.
    """
    found = _eigh(matrix)
    if found is None:
        return None
    values, vectors = found
    values = values - values.min().clamp(max=0.0) + eps
    inverse = (vectors * values.pow(-1.0 / root)) @ vectors.T
    return inverse if bool(inverse.isfinite().all()) else None


def eigenbasis(matrix: Tensor) -> Tensor | None:
    """Eigenvectors as columns, the largest eigenvalue first; ``None`` if they cannot be found."""
    found = _eigh(matrix)
    return None if found is None else found[1].flip(1)


def refresh_basis(matrix: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """One step of orthogonal iteration from ``basis``, its columns first sorted by their Rayleigh quotients.

    Returns the new basis and the order of the old columns.
    """
    order = (basis * (matrix @ basis)).sum(0).argsort(descending=True, stable=True)
    refreshed, _ = torch.linalg.qr(matrix @ basis[:, order])
    return refreshed, order


# For each tensor that will receive results: (which part of it, the result to come).
_PENDING: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


@functools.cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="matrix-roots")


def start(place: Tensor, part: int, function: Callable[..., Any], *arguments: Any) -> None:
    """Begin ``function(*arguments)``, whose result is for part ``part`` of ``place``.

    Tensors among the arguments are copied to the CPU first.
    """
    copies = [a.detach().to("cpu", copy=True) if isinstance(a, Tensor) else a for a in arguments]
    _PENDING.setdefault(place, []).append((part, _thread().submit(function, *copies)))


def finished(place: Tensor) -> Iterator[tuple[int, Any]]:
    """(part, result) of everything begun for ``place``, waited for; each is given once."""
    pending: list[tuple[int, Future[Any]]] = _PENDING.pop(place, [])
    for part, future in pending:
        yield part, future.result()
