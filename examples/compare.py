"""What `make train` runs: one model, trained four ways on the same text, batches and seed.

    DDP + torch.optim.AdamW     the usual way: every rank holds everything
    fsdp + AdamW                sharded; the same losses are due
    DDP + Muon                  our Muon on whole tensors, every rank orthogonalizes every matrix
    fsdp + Muon                 sharded, every matrix orthogonalized once; the same losses are due

Prints a table, and whether the losses agree; writes runs/compare*/: a folder per run (see train.py), loss.png with the
curves, and table.json. `make train ARGS="--optimizers all"` (or names: lion,soap) trains with further optimizers too,
sharded, some 15 s each. Other arguments go to every run: `make train ARGS="--steps 800 --model small"`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

import plots

TRAIN = Path(__file__).with_name("train.py")
RUNS = {
    "DDP + torch.optim.AdamW": ("ddp-torch-adamw", ["--sharding", "ddp", "--optimizer", "torch-adamw"]),
    "fsdp + AdamW": ("fsdp-adamw", ["--sharding", "fsdp", "--optimizer", "adamw"]),
    # fp32, because bf16 products round differently for a difference in the last bit of a gradient.
    "DDP + Muon": ("ddp-muon", ["--sharding", "ddp", "--optimizer", "muon", "--ns-dtype", "float32"]),
    "fsdp + Muon": ("fsdp-muon", ["--sharding", "fsdp", "--optimizer", "muon", "--ns-dtype", "float32"]),
}
AGREE = 1e-4  # largest relative difference of a training loss between DDP and fsdp
LOWER = 0.1  # nats per byte that Muon's validation loss is expected to lie below AdamW's


def chosen_runs(wanted: str) -> dict[str, tuple[str, list[str]]]:
    """The four runs, and a sharded one for every further optimizer of ``wanted``: names with commas, or ``all``.

    Raises ``ValueError`` for an unknown name.
    """
    runs, names = dict(RUNS), [name.strip() for name in wanted.split(",") if name.strip()]
    if names:
        from optimizers import LEARNING_RATES

        every = [name for name in LEARNING_RATES if name != "torch-adamw"]
        names = every if names == ["all"] else names
        if unknown := [name for name in names if name not in every]:
            raise ValueError(f"--optimizers: unknown: {', '.join(unknown)}; choose from all, {', '.join(every)}")
        for name in names:
            if f"fsdp-{name}" not in {short for short, _ in runs.values()}:
                runs[f"fsdp + {name}"] = f"fsdp-{name}", ["--sharding", "fsdp", "--optimizer", name]
    return runs


def free_folder(parent: Path) -> Path:
    """runs/compare, or the first of runs/compare-2, -3, ... that does not exist: no earlier result is lost."""
    names = ("compare" + (f"-{n}" if n > 1 else "") for n in range(1, 10**6))
    return next(parent / name for name in names if not (parent / name).exists())


def largest_difference(one: Path, other: Path) -> float:
    a, b = plots.read_metrics(one, "train_loss"), plots.read_metrics(other, "train_loss")
    if a.keys() != b.keys():
        return float("inf")
    return max(abs(a[step] - b[step]) / abs(a[step]) for step in a)


def table_of(results: dict[str, dict[str, float]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold")
    table.add_column("run", no_wrap=True)
    for heading in ("training\nloss", "validation\nloss", "tokens/s", "peak\nKiB", "parameters\nKiB", "states\nKiB"):
        table.add_column(heading, justify="right")
    for name, result in results.items():
        sizes = (f"{result[key] / 1024:,.0f}" for key in ("peak_bytes", "parameter_bytes", "state_bytes"))
        losses = (f"{result[key]:.4f}" for key in ("train_loss", "valid_loss"))
        table.add_row(name, *losses, f"{result['tokens_per_s']:,.0f}", *sizes)
    return table


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--optimizers", default="")
    known, arguments = parser.parse_known_args(arguments)
    try:
        runs = chosen_runs(known.optimizers)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    began, width = time.monotonic(), None if sys.stdout.isatty() else 100
    console = Console(highlight=False, soft_wrap=True, width=width)
    folder = free_folder(Path("runs"))
    folders, results = {}, {}
    for name, (short, options) in runs.items():
        console.rule(f"[bold]{name}")
        command = [
            sys.executable,
            str(TRAIN),
            *options,
            "--sample",
            "0",
            *arguments,
            "--runs",
            str(folder),
            "--name",
            short,
        ]
        if status := subprocess.call(command):
            return status
        folders[name] = folder / short
        results[name] = json.loads((folders[name] / "summary.json").read_text())
    count = {4: "four"}.get(len(runs), str(len(runs)))
    plots.losses(folders, folder / "loss.png", f"One model, {count} ways", pairs=2)
    (folder / "table.json").write_text(json.dumps(results, indent=1) + "\n")

    console.rule("[bold]Comparison")
    console.print(table_of(results))
    console.print("losses in nats per byte (training: mean of the last 20 steps); bytes of the fullest rank")
    ddp_adamw, fsdp_adamw, ddp_muon, fsdp_muon = (folders[name] for name in RUNS)
    agree = True
    for rule, one, other in (("AdamW", ddp_adamw, fsdp_adamw), ("Muon", ddp_muon, fsdp_muon)):
        difference = largest_difference(one, other)
        agree &= difference <= AGREE
        verdict = "[green]agree[/]" if difference <= AGREE else "[red]DISAGREE[/]"
        console.print(
            f"{rule}: DDP and fsdp {verdict} in every training loss: they differ by {difference:.1e} of it at most "
            f"({AGREE:g} allowed)"
        )
    gain = results["fsdp + AdamW"]["valid_loss"] - results["fsdp + Muon"]["valid_loss"]
    verdict = "[green]yes[/]" if gain >= LOWER else "[yellow]no[/]"
    console.print(
        f"Muon's validation loss lies {gain:.3f} nats below AdamW's ({LOWER} expected of the default run: {verdict})"
    )
    console.print(
        f"{time.monotonic() - began:.0f} s; pictures and figures: {folder}/loss.png, {folder}/table.json, {folder}/*/"
    )
    return 0 if agree else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
