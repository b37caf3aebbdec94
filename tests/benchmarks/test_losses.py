"""The small GPT of `--parts loss`, shortened: Muon learns faster than AdamW, and AdamW8bit as AdamW."""

from __future__ import annotations

import pytest

from benchmarks import losses


def test_a_short_run_already_tells_the_optimizers_apart():
    runs = [losses.train(name, 0, 60, samples=128) for name in ("adamw", "adamw8bit", "muon")]
    (muon,), (eight_bit,) = losses.paired(runs, "muon"), losses.paired(runs, "adamw8bit")
    assert muon < -0.1  # -0.25 in 400 steps
    assert abs(eight_bit) < 0.03
    assert all(len(run.training) == 60 and run.training[-1] < run.training[0] for run in runs)


def test_differences_are_taken_seed_by_seed():
    def run(optimizer, seed, loss):
        return losses.Run(optimizer, seed, (), loss, 0, 0.0)

    runs = [run("adamw", 1, 2.0), run("muon", 0, 1.5), run("adamw", 0, 1.75), run("muon", 1, 1.0), run("lion", 1, 3.0)]
    assert losses.paired(runs, "muon") == pytest.approx([-0.25, -1.0])
    assert losses.paired(runs, "lion") == pytest.approx([1.0])
