"""Pictures of a run: its losses, and how its first bucket of parameters lies on the ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from ragged_shard.planner import BufferPlan

COLOURS = ["#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#76b7b2", "#edc948", "#ff9da7", "#9c755f", "#e15759", "#bab0ac"]


def read_metrics(folder: Path, key: str) -> dict[int, float]:
    """``key`` of each step in metrics.jsonl; a step that was trained again after a resume counts as it was last."""
    entries = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return dict(sorted({entry["step"]: entry[key] for entry in entries if key in entry}.items()))


def smooth(values: list[float], weight: float = 0.8) -> list[float]:
    """Running mean with exponentially falling weights, without the pull towards the first value."""
    result, total, norm = [], 0.0, 0.0
    for value in values:
        total, norm = weight * total + value, weight * norm + 1.0
        result.append(total / norm)
    return result


def losses(runs: Mapping[str, Path], path: Path, title: str = "", pairs: int = 0) -> None:
    """Training loss (running mean) and validation loss (markers) of each run. The first ``pairs`` pairs of runs may
    coincide: the first of a pair is drawn wide and pale, the second thin on top of it.
    """
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.add_subplot()
    for i, (name, folder) in enumerate(runs.items()):
        train, valid = read_metrics(folder, "train_loss"), read_metrics(folder, "valid_loss")
        steps, curve = [step + 1 for step in train], smooth(list(train.values()))
        colour = COLOURS[(i // 2 if i < 2 * pairs else i - pairs) % len(COLOURS)]
        wide = i < 2 * pairs and i % 2 == 0
        if len(runs) == 1:
            axes.plot(steps, list(train.values()), color=colour, alpha=0.3, linewidth=0.8)
        label = name + (f", validation {list(valid.values())[-1]:.3f}" if valid else "")
        style = {"linewidth": 5, "alpha": 0.4} if wide else {"linewidth": 1.3}
        axes.plot(steps, curve, color=colour, label=label, **style)
        marker = {"markersize": 11, "alpha": 0.4} if wide else {"markersize": 5}
        axes.plot([step + 1 for step in valid], list(valid.values()), "o", color=colour, **marker)
        if i == 0:  # the first steps, which fall steeply, would squeeze all others
            axes.set_ylim(top=1.05 * max(curve[len(curve) // 25 :]))
    axes.set(xlabel="step", ylabel="loss, nats per byte", title=title)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, title="lines: training (running mean), dots: validation", alignment="left")
    figure.savefig(path, dpi=130)


def layout(plan: BufferPlan, shapes: Mapping[str, Sequence[int]], path: Path, title: str = "") -> None:
    """How the tensors of one flat buffer lie on the ranks: a row per rank, that rank's chunk of the buffer from left to
    right. Colours: tensors; white lines: blocks, which no rank boundary cuts; hatched: padding.
    """
    ranks, padding = plan.world_size, {"facecolor": "#eeeeee", "edgecolor": "#999999", "hatch": "////"}
    figure = Figure(
        figsize=(11, 1.4 + 0.62 * ranks + 0.26 * math.ceil((len(plan.starts) + 1) / 2)), layout="constrained"
    )
    axes = figure.add_subplot()
    patches = []
    for rank in range(ranks):
        low, high = plan.chunk(rank)
        axes.add_patch(Rectangle((0, rank + 0.1), high - low, 0.8, linewidth=0, **padding))
        axes.add_patch(
            Rectangle((0, rank + 0.1), high - low, 0.8, fill=False, edgecolor="black", linewidth=1.2, zorder=3)
        )
    for i, ((name, first), numel, block) in enumerate(zip(plan.starts, plan.numels, plan.blocks, strict=True)):
        colour, short = COLOURS[i % len(COLOURS)], name.removesuffix(".weight")
        for rank in range(ranks):
            low, high = plan.chunk(rank)
            start, stop = max(low, first), min(high, first + numel)
            if start >= stop:
                continue
            axes.add_patch(Rectangle((start - low, rank + 0.1), stop - start, 0.8, facecolor=colour, linewidth=0))
            if block * 250 > plan.shard:  # else the lines would hide the colour
                lines = range(start + -(start - first) % block, stop, block)
                axes.vlines(
                    [x - low for x in lines if x > start], rank + 0.1, rank + 0.9, colors="white", linewidth=0.6
                )
            if stop - start > plan.shard / 10:
                axes.text((start + stop) / 2 - low, rank + 0.5, short, ha="center", va="center", fontsize=9)
        size = "×".join(map(str, shapes[name]))
        patches.append(
            Patch(
                facecolor=colour, label=f"{name}  {size}, " + (f"blocks of {block:,}" if block > 1 else "cut anywhere")
            )
        )
    gaps, held = plan.padding, sum(plan.numels)
    patches.append(Patch(label=f"padding, {gaps:,} elements ({gaps / max(1, held):.2%} of the tensors)", **padding))
    axes.set(xlim=(-plan.shard * 0.004, plan.shard * 1.004), ylim=(ranks, 0), title=title)
    axes.set_xlabel(f"elements of the rank's chunk of {plan.shard:,}")
    axes.set_yticks([rank + 0.5 for rank in range(ranks)], [f"rank {rank}" for rank in range(ranks)])
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.tick_params(left=False)
    axes.spines[:].set_visible(False)
    figure.legend(handles=patches, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)
