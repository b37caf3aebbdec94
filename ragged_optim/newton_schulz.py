"""Newton-Schulz: the polar factor U V^T of a matrix U S V^T by matrix products alone.

Each step maps every singular value x to a x + b x^3 + c x^5. A set of coefficients is a triple per step; a set that is
shorter than the number of steps repeats its last triple. Sets, and what they are for (``ns_steps`` 5 unless said):

    keller         one triple with the steepest slope at zero; the result lies in about [0.68, 1.13], not at 1
    quintic        five tuned triples; accurate to 2 % on well-conditioned matrices
    polar_express  minimax for singular values >= 1e-3 (arXiv 2505.16932); use 6 to 8 steps for ill-conditioned ones
    deepseek       eight steps of keller, then two that converge: nearly exact, 10 steps
    cubic          minimax without the x^5 term: a third fewer FLOPs on squares, less accurate

``singular_value_range`` states the bound of a set: what range a range of singular values is mapped to.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Sequence
from types import MappingProxyType

import torch
from torch import Tensor

__all__ = [
    "COEFFICIENTS",
    "Coefficients",
    "flops",
    "newton_schulz",
    "newton_schulz_all",
    "schedule",
    "singular_value_range",
]

Triple = tuple[float, float, float]
Coefficients = str | Triple | Sequence[Triple]

_KELLER: Triple = (3.4445, -4.7750, 2.0315)
_POLAR_EXPRESS: tuple[Triple, ...] = (
    (8.28721, -23.59589, 17.30039),
    (4.10706, -2.94785, 0.54484),
    (3.94869, -2.90890, 0.55182),
    (3.31842, -2.48849, 0.51005),
    (2.30065, -1.66890, 0.41881),
    (1.89130, -1.26800, 0.37680),
)


def _safe(triple: Triple, margin: float = 1.01) -> Triple:
    """Shrinks the argument by ``margin``, so that rounding cannot push a singular value out of the interval."""
    a, b, c = triple
    return a / margin, b / margin**3, c / margin**5


def _minimax_cubic(steps: int, lowest: float) -> tuple[Triple, ...]:
    """The odd cubics that in turn bring [lowest, 1] closest to 1 in the maximum norm, in closed form."""
    triples = []
    low, high = lowest, 1.0
    for _ in range(steps):
        alpha = math.sqrt(3.0 / (high * high + low * high + low * low))
        beta = 4.0 / (2.0 + low * high * (low + high) * alpha**3)
        a, b = 1.5 * alpha * beta, -0.5 * alpha**3 * beta
        triples.append((a, b, 0.0))
        low = a * low + b * low**3
        high = 2.0 - low
    return tuple(triples)


COEFFICIENTS: MappingProxyType[str, tuple[Triple, ...]] = MappingProxyType(
    {
        "keller": (_KELLER,),
        "quintic": (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        "polar_express": (*map(_safe, _POLAR_EXPRESS), (1.875, -1.25, 0.375)),
        "deepseek": (*(_KELLER,) * 8, (2.0, -1.5, 0.5)),
        "cubic": (*map(_safe, _minimax_cubic(8, 1e-3)), (1.5, -0.5, 0.0)),
    }
)


def schedule(coefficients: Coefficients, steps: int) -> tuple[Triple, ...]:
    """The triple of each of ``steps`` steps. Raises ``ValueError`` for an unknown name, a bad triple or bad steps."""
    if isinstance(steps, bool) or not isinstance(steps, int) or not 0 <= steps < 100:
        raise ValueError(f"ns_steps must be an integer in [0, 100), got {steps!r}")
    if isinstance(coefficients, str):
        if coefficients not in COEFFICIENTS:
            raise ValueError(f"unknown ns_coefficients {coefficients!r}; known sets: {', '.join(COEFFICIENTS)}")
        triples = COEFFICIENTS[coefficients]
    elif len(coefficients) == 3 and all(isinstance(x, (int, float)) for x in coefficients):
        a, b, c = (float(x) for x in coefficients)  # type: ignore[arg-type]
        triples = ((a, b, c),)
    else:
        triples = tuple(coefficients)  # type: ignore[arg-type]
        if not triples or any(isinstance(t, (int, float)) or len(t) != 3 for t in triples):
            raise ValueError(
                f"ns_coefficients must be three numbers, a list of triples or a name, got {coefficients!r}"
            )
    return triples[:steps] + (triples[-1],) * (steps - len(triples))


def newton_schulz(
    matrix: Tensor,
    coefficients: Coefficients = "keller",
    steps: int = 5,
    eps: float = 1e-7,
    *,
    gram: bool = False,
) -> Tensor:
    """About the polar factor of ``matrix`` (rows, cols), in its dtype; ``matrix`` itself is left alone.

    The spectral norm is brought to at most 1 by dividing by the Frobenius norm, at least ``eps``: a zero matrix stays
    zero. Works on the smaller side. The result is contiguous; it has no gradient.

    ``gram``: iterate on X X^T where that is cheaper (one side at least twice the other), in fp32 and fp64 only: in
    bf16 it explodes. The small singular values come out less accurate, since those of X X^T are their squares: in
    fp32 by about 1e-3 where they are 1/100 of the largest.
    """
    (result,) = newton_schulz_all([matrix], coefficients, steps, eps, gram=gram)
    return result.clone()


@torch.no_grad()
def newton_schulz_all(
    matrices: Sequence[Tensor],
    coefficients: Coefficients = "keller",
    steps: int = 5,
    eps: float = 1e-7,
    *,
    gram: bool = False,
) -> list[Tensor]:
    """``newton_schulz`` of matrices of one shape and dtype, with the same bits, in batched products.

    On the CPU the results lie in scratch memory of this thread, **until the next call**.
    """
    triples = schedule(coefficients, steps)
    rows, cols = matrices[0].shape
    if triples and gram and _by_gram(min(rows, cols), max(rows, cols), matrices[0].dtype):
        return [_by_gram_iteration(matrix, triples, eps) for matrix in matrices]
    kind = len(matrices), rows, cols, matrices[0].dtype, matrices[0].device
    if len(matrices) > 1 and not _batches_exactly(*kind, torch.get_num_threads()):
        # Each call would overwrite the scratch of the last one.
        return [newton_schulz(matrix, coefficients, steps, eps) for matrix in matrices]
    x, spare, product, polynomial = _scratch(*kind)
    for matrix, place in zip(matrices, x.unbind(), strict=True):
        # Out of place: the matrix may be a momentum buffer (pytorch/pytorch#194664).
        torch.div(matrix, torch.linalg.vector_norm(matrix).clamp_(min=eps), out=place)
    for triple in triples:
        _step(x, product, polynomial, spare, triple)
        x, spare = spare, x
    return list(x.unbind())


def _step(x: Tensor, product: Tensor, polynomial: Tensor, out: Tensor, triple: Triple) -> None:
    """out = a X + (b G + c G G) X with G = X X^T, or from the right with G = X^T X if that is smaller.

    ``x`` and ``out``: stacks of (rows, cols); ``product`` and ``polynomial``: scratch of the smaller side.
    """
    a, b, c = triple
    tall = x.shape[-2] > x.shape[-1]
    torch.bmm(*((x.mT, x) if tall else (x, x.mT)), out=product)
    if c:
        torch.baddbmm(product, product, product, beta=b, alpha=c, out=polynomial)
    else:  # a product less
        torch.mul(product, b, out=polynomial)
    torch.baddbmm(x, *((x, polynomial) if tall else (polynomial, x)), beta=a, out=out)


class _Kept(threading.local):
    """Scratch memory of a thread on the CPU, where fresh memory costs a page fault for every 4 KiB."""

    def __init__(self) -> None:
        self.memory: dict[torch.dtype, Tensor] = {}
        self.views: dict[tuple[torch.dtype, int, int, int], tuple[Tensor, ...]] = {}


_KEPT = _Kept()


def _scratch(
    count: int, rows: int, cols: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two of (count, rows, cols) and two of (count, small, small)."""
    key = dtype, count, rows, cols
    found = _KEPT.views.get(key) if device.type == "cpu" else None
    if found is None:
        small = min(rows, cols)
        shapes = [(count, rows, cols)] * 2 + [(count, small, small)] * 2
        sizes = [math.prod(shape) for shape in shapes]
        memory = None if device.type != "cpu" else _KEPT.memory.get(dtype)
        if memory is None or memory.numel() < sum(sizes):
            memory = torch.empty(sum(sizes), dtype=dtype, device=device)
            if device.type == "cpu":
                _KEPT.memory[dtype] = memory
                _KEPT.views.clear()
        parts = memory[: sum(sizes)].split(sizes)
        found = tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True))
        if device.type == "cpu":
            _KEPT.views[key] = found
    return found  # type: ignore[return-value]  # as many as asked for


@functools.lru_cache(maxsize=1024)
def _batches_exactly(count: int, rows: int, cols: int, dtype: torch.dtype, device: torch.device, threads: int) -> bool:
    """Whether a batched step on this device gives the bits of single ones.

    Products add in an order that depends on shape and kernel, not on values, so one step on random numbers tells.
    """
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(count, rows, cols, generator=generator) / math.sqrt(rows * cols)).to(device, dtype)
    small = min(rows, cols)

    def step(x: Tensor) -> Tensor:
        out, square = torch.empty_like(x), x.new_empty(*x.shape[:-2], small, small)
        _step(x, square, torch.empty_like(square), out, _KELLER)
        return out

    return bool(torch.equal(step(x), torch.cat([step(one) for one in x.split(1)])))


def _by_gram(small: int, large: int, dtype: torch.dtype) -> bool:
    return large >= 2 * small and dtype in (torch.float32, torch.float64)


def _by_gram_iteration(matrix: Tensor, triples: Sequence[Triple], eps: float) -> Tensor:
    """The same polynomials of R = X X^T, gathered in Q, which is applied to X once."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix / torch.linalg.vector_norm(matrix).clamp(min=eps)
    gram, q = x.T @ x if tall else x @ x.T, None
    for step, (a, b, c) in enumerate(triples, 1):
        factor = torch.addmm(gram, gram, gram, beta=b, alpha=c) if c else b * gram
        factor.diagonal().add_(a)
        q = factor if q is None else factor @ q
        if step < len(triples):
            gram = factor @ gram @ factor
    assert q is not None
    result: Tensor = x @ q.T if tall else q @ x
    return result


def flops(
    rows: int,
    cols: int,
    coefficients: Coefficients = "keller",
    steps: int = 5,
    dtype: torch.dtype = torch.bfloat16,
    *,
    gram: bool = False,
) -> float:
    """Multiplications and additions of the iteration on a (rows, cols) matrix of ``dtype``."""
    small, large = sorted((rows, cols))
    square, product = 2.0 * small**3, 2.0 * small * small * large
    triples = schedule(coefficients, steps)
    if triples and gram and _by_gram(small, large, dtype):
        return 2 * product + sum(3 * square + (square if c else 0.0) for _, _, c in triples) - 3 * square
    return sum(2 * product + (square if c else 0.0) for _, _, c in triples)


def singular_value_range(
    coefficients: Coefficients = "keller", steps: int = 5, lowest: float = 1e-3, points: int = 20001
) -> tuple[float, float]:
    """The smallest and largest value to which exact arithmetic maps singular values in [lowest, 1].

    ``lowest`` is relative to the Frobenius norm. In bfloat16 the range widens by about 4 %.
    """
    x = torch.logspace(math.log10(lowest), 0.0, points, dtype=torch.float64)
    for a, b, c in schedule(coefficients, steps):
        x = x * (a + x * x * (b + c * x * x))
    return float(x.min()), float(x.max())
