"""Ratios that a noisy machine cannot fool easily: paired within a round, a median, a bootstrap interval.

A round runs every variant once. Whatever slows one round slows all its variants, so the ratio is taken inside the
round and only then summarised over rounds.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

__all__ = ["Ratio", "bootstrap_interval", "paired_ratio"]

RESAMPLES = 4000


@dataclass(frozen=True)
class Ratio:
    """Summary of the per-round ratios of a variant to the base; ``ci95`` is the interval of the median."""

    min: float
    median: float
    max: float
    ci95: tuple[float, float]

    def contains(self, value: float) -> bool:
        return self.ci95[0] <= value <= self.ci95[1]

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "ci95": list(self.ci95)}

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.ci95[0]:.2f}, {self.ci95[1]:.2f}]"


def bootstrap_interval(
    values: Sequence[float], *, level: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of the median of ``values`` (linear interpolation between order statistics)."""
    if not values:
        raise ValueError("bootstrap_interval: no values")
    draw = random.Random(seed)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(resamples))
    return _quantile(medians, (1 - level) / 2), _quantile(medians, (1 + level) / 2)


def paired_ratio(values: Sequence[float], base: Sequence[float]) -> Ratio:
    """The ratios ``values[i] / base[i]``, summarised. Both hold one positive figure a round, in the same order."""
    if len(values) != len(base) or not values:
        raise ValueError(f"paired_ratio: needs equally many rounds, at least one; got {len(values)} and {len(base)}")
    ratios = [value / other for value, other in zip(values, base, strict=True)]
    return Ratio(min(ratios), statistics.median(ratios), max(ratios), bootstrap_interval(ratios))


def _quantile(ordered: Sequence[float], q: float) -> float:
    position = q * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)
