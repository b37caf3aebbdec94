"""A byte-level GPT of 0.36 million parameters, trained in one process with one optimizer after another.

Three layers of width 96 (models.py); the text (Python's standard library, bytes beyond ASCII as one), the batches and
the trapezoid of learning rates of examples/train.py; 400 steps of 16 x 64 bytes. Embeddings, head, norms and biases get
AdamW with one learning rate in every run; the hidden matrices get the optimizer's own.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models import Config, Transformer

__all__ = ["OPTIMIZERS", "Run", "paired", "train"]

EXAMPLES = str(Path(__file__).resolve().parent.parent / "examples")
MODEL = Config(layers=3, width=96, heads=4, vocabulary=128, positions=64)
ADAMW_LR = 3e-3
# Learning rates of the hidden matrices: the best of a few tried with seed 0.
OPTIMIZERS: Mapping[str, float] = {"adamw": 3e-3, "adamw8bit": 3e-3, "muon": 1e-2}


@dataclass(frozen=True)
class Run:
    """Losses in nats per byte: of every training step, and of held-out text at the end."""

    optimizer: str
    seed: int
    training: tuple[float, ...]
    validation: float
    state_bytes: int
    step_seconds: float  # CPU, of optimizer.step() alone, the median


def train(optimizer: str, seed: int, steps: int = 400, *, lr: float | None = None, samples: int = 512) -> Run:
    """Train with an optimizer of examples/optimizers.py; no process group is needed."""
    if EXAMPLES not in sys.path:
        sys.path.append(EXAMPLES)
    import corpus
    import optimizers
    from memory import resident_bytes
    from train import learning_rate

    context = MODEL.positions
    text = _text()
    torch.manual_seed(seed)
    net = Transformer(MODEL)
    for table in (net.tokens, net.positions):
        nn.init.normal_(table.weight, std=0.02)
    chosen = OPTIMIZERS.get(optimizer, optimizers.LEARNING_RATES[optimizer]) if lr is None else lr
    options = argparse.Namespace(
        optimizer=optimizer, lr=chosen, aux_lr=ADAMW_LR, weight_decay=0.1, ns_dtype="bfloat16", block=1
    )
    stepper = optimizers.build(options, net)
    base = [group["lr"] for group in stepper.param_groups]
    losses, seconds = [], []
    for step in range(steps):
        for group, rate in zip(stepper.param_groups, base, strict=True):
            group["lr"] = rate * learning_rate(step, steps)
        loss = _loss(net, corpus.batch(text.train, context, seed, step, range(16)))
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        began = time.process_time()
        stepper.step()
        seconds.append(time.process_time() - began)
        stepper.zero_grad()
        losses.append(loss.item())
    states = (value for state in stepper.state.values() for value in state.values())
    with torch.no_grad():
        batches = [
            corpus.validation_batch(text.valid, context, range(i, i + 32), samples) for i in range(0, samples, 32)
        ]
        validation = statistics.fmean(_loss(net, batch).item() for batch in batches)
    return Run(optimizer, seed, tuple(losses), validation, resident_bytes(states), statistics.median(seconds))


@functools.cache
def _text() -> Any:
    import corpus

    return corpus.load(None, MODEL.positions)


def _loss(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    tokens, targets = (part.clamp(max=MODEL.vocabulary - 1) for part in batch)
    loss: Tensor = net(tokens, targets)
    return loss


def train_all(
    seeds: Iterable[int], steps: int, report: Callable[[Run], None], optimizers: Sequence[str] = tuple(OPTIMIZERS)
) -> None:
    """Every optimizer with every seed; ``report`` is called with each run as it ends."""
    for seed in seeds:
        for optimizer in optimizers:
            report(train(optimizer, seed, steps))


def paired(runs: Iterable[Run], optimizer: str, base: str = "adamw") -> list[float]:
    """Validation loss of ``optimizer`` minus that of ``base``, seed by seed."""
    by_seed: dict[int, dict[str, float]] = {}
    for run in runs:
        by_seed.setdefault(run.seed, {})[run.optimizer] = run.validation
    return [found[optimizer] - found[base] for _, found in sorted(by_seed.items()) if optimizer in found]
