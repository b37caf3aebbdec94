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

import math
from collections.abc import Sequence
from types import MappingProxyType

import torch
from torch import Tensor

__all__ = ["COEFFICIENTS", "Coefficients", "flops", "newton_schulz", "schedule", "singular_value_range"]

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
    zero. Works on the smaller side. The result is contiguous.

    ``gram``: iterate on X X^T where that is cheaper (one side at least twice the other), in fp32 and fp64 only: in
    bf16 it explodes. The small singular values come out less accurate, since those of X X^T are their squares: in
    fp32 by about 1e-3 where they are 1/100 of the largest.
    """
    triples = schedule(coefficients, steps)
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    # Out of place: the matrix may be a momentum buffer (pytorch/pytorch#194664).
    x = wide / wide.norm().clamp(min=eps)
    if triples and gram and _by_gram(x.shape[0], x.shape[1], x.dtype):
        x = _gram_iteration(x, triples)
    else:
        for a, b, c in triples:
            product = x @ x.T
            x = torch.addmm(x, _polynomial(product, b, c), x, beta=a)
    result: Tensor = x if wide is matrix else x.T.contiguous()
    return result


def _polynomial(gram: Tensor, b: float, c: float) -> Tensor:
    """b G + c G G, and at c = 0 one product less."""
    return torch.addmm(gram, gram, gram, beta=b, alpha=c) if c else b * gram


def _by_gram(small: int, large: int, dtype: torch.dtype) -> bool:
    return large >= 2 * small and dtype in (torch.float32, torch.float64)


def _gram_iteration(x: Tensor, triples: Sequence[Triple]) -> Tensor:
    """The same polynomials of R = X X^T, gathered in Q, which is applied to X once."""
    gram, q = x @ x.T, None
    for step, (a, b, c) in enumerate(triples, 1):
        factor = _polynomial(gram, b, c)
        factor.diagonal().add_(a)
        q = factor if q is None else factor @ q
        if step < len(triples):
            gram = factor @ gram @ factor
    assert q is not None
    return q @ x


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
