"""What the benchmark commands share: arguments, the progress bar, ratios of rounds and how they are printed."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks import ranks
from benchmarks.heap import preload
from benchmarks.ratios import Ratio, paired_ratio
from benchmarks.rounds import Round

__all__ = [
    "Formatter",
    "add_common_arguments",
    "console",
    "matrix",
    "noise",
    "not_negative",
    "positive",
    "ratio",
    "ratio_text",
    "settings_text",
    "watch",
]


class Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def not_negative(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--world-size", type=positive, default=2, help="processes on this machine")
    parser.add_argument("--rounds", type=not_negative, default=30, help="0: counts only")
    parser.add_argument("--seconds", type=float, default=600.0, help="no round begins later than this")
    parser.add_argument("--malloc", choices=["tuned", "default"], default="tuned", help="glibc settings of all ranks")
    parser.add_argument("--batch", type=positive, default=2, help="sequences per rank")
    parser.add_argument("--seed", type=int, default=0, help="of the data and of the order within a round")


def watch(
    world_size: int, function: Callable[..., None], plan: Any, *, malloc: str, rounds: int
) -> Iterator[tuple[Any, ...]]:
    """Run ``function(send, plan)`` on local ranks under a progress bar and yield what they send.

    ("note", text) is shown and not yielded; every ("round", ...) advances the bar.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=Console(stderr=True))
    with progress, tempfile.TemporaryDirectory(prefix="benchmark-") as directory:
        environment = ranks.malloc_settings(malloc) | preload(directory)
        task = progress.add_task("start ranks", total=rounds or None)
        for message in ranks.stream(world_size, function, plan, environment=environment):
            if message[0] == "note":
                progress.update(task, description=message[1])
                continue
            if message[0] == "round":
                progress.update(task, advance=1, description="rounds")
            yield message


def console() -> Any:
    """Where tables go; wide where the output is no terminal."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 200, highlight=False)


def settings_text(malloc: str) -> str:
    settings = " ".join(f"{key}={value}" for key, value in ranks.malloc_settings(malloc).items())
    return f"malloc {malloc}: {settings or 'untouched'}"


def ratio(rounds: Sequence[Round], name: str, base: str, what: str) -> Ratio | None:
    """Of ``what`` ("cpu" or "wall"); ``None`` without rounds."""
    if not rounds:
        return None
    return paired_ratio([getattr(r, what)[name] for r in rounds], [getattr(r, what)[base] for r in rounds])


def ratio_text(one: Mapping[str, Any] | None) -> str:
    return "-" if one is None else str(Ratio(one["min"], one["median"], one["max"], tuple(one["ci95"])))


def matrix(figures: Mapping[str, Mapping[str, Any]]) -> Any:
    """A table of ``cpu_ratio_to`` of every variant against every other."""
    from rich.table import Table

    table = Table(title="CPU seconds of the row's variant / the column's: median [95% interval]")
    table.add_column("")
    for name in figures:
        table.add_column(name, justify="right")
    for name, own in figures.items():
        table.add_row(name, *(ratio_text(own["cpu_ratio_to"][other]) if other != name else "" for other in figures))
    return table


def ratios_of(rounds: Sequence[Round], name: str, names: Sequence[str]) -> dict[str, Any]:
    """``cpu_ratio`` and ``wall_ratio`` to the first of ``names``, ``cpu_ratio_to`` each of them; JSON-able."""
    cpu, wall = ratio(rounds, name, names[0], "cpu"), ratio(rounds, name, names[0], "wall")
    against = {other: ratio(rounds, name, other, "cpu") for other in names}
    return {
        "cpu_ratio": cpu and cpu.to_json(),
        "wall_ratio": wall and wall.to_json(),
        "cpu_ratio_to": {other: one.to_json() for other, one in against.items() if one},
    }


def noise(figures: Mapping[str, Mapping[str, Any]], rounds: int, control: str | None) -> list[str]:
    """What the number of rounds and the A/A control say against this run's times."""
    found = []
    if 0 < rounds < 30:
        found.append(f"{rounds} rounds: quote wall ratios from 30 on")
    if rounds and control is None:
        found.append("no A/A control in this run: the noise is unknown")
    if rounds and control:
        for what in ("cpu_ratio", "wall_ratio"):
            low, high = figures[control][what]["ci95"]
            if not low <= 1 <= high:
                found.append(
                    f"{what} of the A/A control {control} is [{low:.2f}, {high:.2f}], without 1: "
                    f"differences of that size are this machine's, not the variants'"
                )
    return found
