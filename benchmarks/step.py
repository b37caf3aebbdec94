"""One training step, sharded in different ways: exact counts, and paired ratios of CPU and wall time.

    python benchmarks/step.py --model gpt15 --world-size 2 --variants fsdp2,ours --rounds 30 --json step.json

All variants live in one set of rank processes that this command starts; see README.md in this folder for the rules and
for what each figure means.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # the import path of a script begins with its folder; the packages lie one above
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
import torch.distributed as dist

from benchmarks import counting, models, ranks, variants
from benchmarks.heap import Heap, preload
from benchmarks.ratios import Ratio, paired_ratio
from benchmarks.rounds import Round, run_rounds

WARM_UPS = 2
FIGURES = (
    "collectives",
    "collective_bytes",
    "copied_bytes",
    "allocated_bytes",
    "live_param_bytes",
    "live_state_bytes",
    "high_water_bytes",
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What every rank is asked to do."""

    model: str
    variants: tuple[str, ...]
    options: variants.Options
    batch: int
    length: int
    rounds: int
    seconds: float
    seed: int


# ---- on every rank --------------------------------------------------------------------------------------------------


def measure(send: Callable[[Any], None], plan: Plan) -> None:
    """Build, warm up, count and time all variants, on every rank.

    Rank 0 sends ("note", text), ("counts", variant, figures), ("round", Round) and last ("losses", {variant: loss}).
    """
    tell = send if dist.get_rank() == 0 else lambda _: None
    batch = _batch(plan)
    # What a process allocates once (imports, the kernels' scratch memory) must not count as the first variant's.
    variants.build("local", models.build(plan.model), batch, plan.options).step()
    trainings: dict[str, variants.Training] = {}
    local: counting.OperationCounter | None = None
    # local goes first: its copies are what is subtracted from the others'.
    for name in ("local", *(name for name in plan.variants if name != "local")):
        tell(("note", f"build, warm up and count {name}"))
        training, counter, counts = _build_and_count(name, plan, batch)
        local = local or counter
        counts["copied_bytes"] = counting.copies_beyond(counter.copies, local.copies)
        tell(("counts", name, _worst_rank(counts)))
        if name in plan.variants:
            trainings[name] = training
        del training
    for name, training in trainings.items():
        tell(("note", f"warm up {name}"))
        training.step()
    run_rounds(
        {name: training.step for name, training in trainings.items()},
        rounds=plan.rounds,
        seconds=plan.seconds,
        seed=plan.seed,
        report=lambda one: tell(("round", one)),
    )
    tell(("losses", {name: _mean(training.loss) for name, training in trainings.items()}))


def _batch(plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    config = models.MODELS[plan.model]
    generator = torch.Generator().manual_seed(plan.seed * 1000 + dist.get_rank())
    tokens = torch.randint(config.vocabulary, (plan.batch, plan.length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _build_and_count(
    name: str, plan: Plan, batch: tuple[torch.Tensor, torch.Tensor]
) -> tuple[variants.Training, counting.OperationCounter, dict[str, Any]]:
    # Nor must what the variant itself imports.
    tiny = dataclasses.replace(plan, model="tiny", length=8)
    variants.build(name, models.build("tiny"), _batch(tiny), plan.options).step()
    heap = Heap.here()
    before = _resting(heap)
    training = variants.build(name, models.build(plan.model), batch, plan.options)
    losses = []
    for _ in range(WARM_UPS):
        training.step()
        losses.append(_mean(training.loss))
    held = _resting(heap) - before
    high_water = max(_high_water(heap, training.step) for _ in range(WARM_UPS))
    allocations = counting.record_allocations(training.step)
    dist.barrier()
    counter = counting.OperationCounter()
    with counter:
        training.step()
    counts = {
        "collectives": counter.collectives,
        "collective_bytes": counter.collective_bytes,
        "copied_bytes": 0,
        "allocated_bytes": allocations.nbytes,
        "live_param_bytes": counting.live_bytes(training.parameters()),
        "live_state_bytes": counting.live_bytes(training.state()),
        "high_water_bytes": allocations.high_water if heap is None else high_water,
        "held_bytes": held,
        "allocations": allocations.times,
        "communication_buffers_allocated": allocations.buffers,
        "communication_bytes_allocated": allocations.buffer_bytes,
        "copied_bytes_with_model": counter.copied_bytes,
        "written_bytes": counter.written_bytes,
        "operations": dict(counter.operations),
        "losses": losses,
    }
    return training, counter, counts


def _resting(heap: Heap | None) -> int:
    """Bytes held between steps, on this rank; 0 where the heap is not watched."""
    gc.collect()
    dist.barrier()
    return 0 if heap is None else heap.live_bytes


def _high_water(heap: Heap | None, step: Callable[[], object]) -> int:
    """Most bytes held in a step beyond those held before it."""
    before = _resting(heap)
    if heap is not None:
        heap.mark()
    step()
    return 0 if heap is None else heap.peak_bytes - before


def _worst_rank(counts: dict[str, Any]) -> dict[str, Any]:
    """The largest of each figure over ranks (ragged shards differ by rank); operations and losses are rank 0's."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, counts)
    return {
        key: max(other[key] for other in everyone) if isinstance(value, int) else value
        for key, value in everyone[0].items()
    }


def _mean(loss: float) -> float:
    total = torch.tensor([loss], dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


# ---- in the process that was started by hand ------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0; 2 for a wrong argument (one line on stderr); 1 when a rank failed."""
    args = _parser().parse_args(arguments)
    names = [name.strip() for name in args.variants.split(",") if name.strip()]
    try:
        variants.check_names(names)
    except ValueError as error:
        _parser().error(f"--variants: {error}")
    positions = models.MODELS[args.model].positions
    length = args.length or positions
    if length > positions:
        _parser().error(f"--length {length}: {args.model} has {positions} positions")
    control = None if args.no_control or args.rounds == 0 else f"{names[0].removesuffix('_b')}_b"
    if control and control not in names and names[0] != control:
        names.append(control)
    plan = Plan(
        args.model,
        tuple(names),
        variants.Options(args.optimizer, args.reshard),
        args.batch,
        length,
        args.rounds,
        args.seconds,
        args.seed,
    )
    found = _Found()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, which ends the ranks
    try:
        _watch(plan, args, found)
    except KeyboardInterrupt:
        print("interrupted: what follows is what was measured until then", file=sys.stderr)
    except ranks.RankFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if not set(plan.variants) <= set(found.counts):
        print("error: ended before every variant was counted; nothing is written", file=sys.stderr)
        return 1
    report = _report(plan, args, found, control if control in names else None)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    _show(report)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks/step.py", description=__doc__, formatter_class=_Formatter)
    parser.add_argument("--model", choices=list(models.MODELS), default="gpt15", help="see benchmarks/models.py")
    parser.add_argument("--world-size", type=_positive, default=2, help="processes on this machine")
    parser.add_argument("--variants", default="fsdp2,ours", help="comma separated; ratios are to the first one")
    parser.add_argument("--rounds", type=_not_negative, default=30, help="0: counts only")
    parser.add_argument("--seconds", type=float, default=600.0, help="no round begins later than this")
    parser.add_argument("--optimizer", choices=variants.OPTIMIZERS, default=variants.OPTIMIZERS[0])
    parser.add_argument(
        "--reshard",
        choices=list(variants.RESHARD),
        default="always",
        help="reshard_after_forward of every block and the root: True, None or False",
    )
    parser.add_argument("--malloc", choices=["tuned", "default"], default="tuned", help="glibc settings of all ranks")
    parser.add_argument("--batch", type=_positive, default=2, help="sequences per rank")
    parser.add_argument("--length", type=_positive, default=None, help="tokens per sequence (all positions)")
    parser.add_argument("--seed", type=int, default=0, help="of the data and of the order within a round")
    parser.add_argument("--no-control", action="store_true", help="leave out the second instance of the first variant")
    parser.add_argument("--json", type=Path, default=None, help="file for every round and every figure")
    return parser


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def _not_negative(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


@dataclasses.dataclass
class _Found:
    """What the ranks have sent so far."""

    counts: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    rounds: list[Round] = dataclasses.field(default_factory=list)
    losses: dict[str, float] = dataclasses.field(default_factory=dict)


def _watch(plan: Plan, args: argparse.Namespace, found: _Found) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=Console(stderr=True))
    with progress, tempfile.TemporaryDirectory(prefix="benchmark-") as directory:
        environment = ranks.malloc_settings(args.malloc) | preload(directory)
        task = progress.add_task("start ranks", total=plan.rounds or None)
        for kind, *content in ranks.stream(args.world_size, measure, plan, environment=environment):
            if kind == "note":
                progress.update(task, description=content[0])
            elif kind == "counts":
                found.counts[content[0]] = content[1]
            elif kind == "round":
                found.rounds.append(content[0])
                progress.update(task, advance=1, description="rounds")
            elif kind == "losses":
                found.losses = content[0]


def _report(plan: Plan, args: argparse.Namespace, found: _Found, control: str | None) -> dict[str, Any]:
    base = plan.variants[0]
    params_bytes = found.counts["local"]["live_param_bytes"]
    figures: dict[str, dict[str, Any]] = {}
    for name in plan.variants:
        cpu = _ratio(found.rounds, name, base, "cpu")
        wall = _ratio(found.rounds, name, base, "wall")
        against = {other: _ratio(found.rounds, name, other, "cpu") for other in plan.variants if found.rounds}
        figures[name] = {
            **found.counts[name],
            "cpu_ratio": cpu and cpu.to_json(),
            "wall_ratio": wall and wall.to_json(),
            "cpu_ratio_to": {other: ratio.to_json() for other, ratio in against.items() if ratio},
        }
    report: dict[str, Any] = {
        "model": plan.model,
        "world_size": args.world_size,
        "params_bytes": params_bytes,
        "base": base,
        "optimizer": plan.options.optimizer,
        "reshard": plan.options.reshard,
        "batch": plan.batch,
        "length": plan.length,
        "seed": plan.seed,
        "malloc": {"choice": args.malloc, "environment": ranks.malloc_settings(args.malloc)},
        "torch": torch.__version__,
        "control": control,
        "local": found.counts["local"],
        "variants": figures,
        "losses": found.losses,
        "rounds": [dataclasses.asdict(one) for one in found.rounds],
    }
    report["warnings"] = _warnings(report)
    return report


def _ratio(rounds: Sequence[Round], name: str, base: str, what: str) -> Ratio | None:
    if not rounds:
        return None
    return paired_ratio([getattr(r, what)[name] for r in rounds], [getattr(r, what)[base] for r in rounds])


def _warnings(report: dict[str, Any]) -> list[str]:
    """What makes this run's figures less than they seem."""
    found = []
    rounds, control = len(report["rounds"]), report["control"]
    if 0 < rounds < 30:
        found.append(f"{rounds} rounds: quote wall ratios from 30 on")
    if rounds and control is None:
        found.append("no A/A control in this run: the noise is unknown")
    if control:
        for what in ("cpu_ratio", "wall_ratio"):
            low, high = report["variants"][control][what]["ci95"]
            if not low <= 1 <= high:
                found.append(
                    f"{what} of the A/A control {control} is [{low:.2f}, {high:.2f}], without 1: "
                    f"differences of that size are this machine's, not the variants'"
                )
    first = {name: figures["losses"] for name, figures in report["variants"].items()}
    first["local"] = report["local"]["losses"]
    reference = first[report["base"]]
    for name, losses in first.items():
        # local does not share gradients, so only its first loss, before any update, is the same.
        steps = 1 if name.removesuffix("_b") == "local" or report["base"].startswith("local") else len(reference)
        if not all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(losses[:steps], reference[:steps], strict=True)):
            found.append(f"{name} computes other losses ({losses[:steps]}) than {report['base']} ({reference[:steps]})")
    return found


def _show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    size = report["params_bytes"]
    console = Console(width=None if sys.stdout.isatty() else 200)
    malloc = report["malloc"]
    settings = " ".join(f"{key}={value}" for key, value in malloc["environment"].items()) or "untouched"
    console.print(
        f"{report['model']}: P = {size:,} bytes of parameters, {report['world_size']} ranks, {report['optimizer']}, "
        f"reshard_after_forward {report['reshard']}, {len(report['rounds'])} rounds, torch {report['torch']}\n"
        f"malloc {malloc['choice']}: {settings}",
        highlight=False,
    )
    table = Table(title="per step and rank (the largest over ranks); ratios to " + report["base"])
    for column in (
        "variant", "collectives", "moved P", "copied P", "written P", "allocated P", "buffers new", "params P",
        "state P", "held P", "high water P", "cpu ratio [95%]", "wall ratio [95%]",
    ):  # fmt: skip
        table.add_column(column, justify="left" if column == "variant" else "right")
    rows = dict(report["variants"])
    rows.setdefault("local", {**report["local"], "cpu_ratio": None, "wall_ratio": None})
    for name, figures in rows.items():
        in_p = [
            f"{figures[key] / size:.2f}"
            for key in ("collective_bytes", "copied_bytes", "written_bytes", "allocated_bytes")
        ]
        held = [
            f"{figures[key] / size:.2f}"
            for key in ("live_param_bytes", "live_state_bytes", "held_bytes", "high_water_bytes")
        ]
        times = [_ratio_text(figures[key]) for key in ("cpu_ratio", "wall_ratio")]
        buffers = str(figures["communication_buffers_allocated"])
        table.add_row(name, str(figures["collectives"]), *in_p, buffers, *held, *times)
    console.print(table)
    if report["rounds"]:
        console.print(_matrix(report["variants"]))
    for name, figures in report["variants"].items():
        operations = ", ".join(f"{times} {op}" for op, times in Counter(figures["operations"]).most_common())
        console.print(f"  {name}: {operations or 'no collective'}", highlight=False)
    for warning in report["warnings"]:
        console.print(f"warning: {warning}", style="yellow", highlight=False)


def _matrix(figures: dict[str, dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table(title="CPU seconds of the row's variant / the column's: median [95% interval]")
    table.add_column("")
    for name in figures:
        table.add_column(name, justify="right")
    for name, own in figures.items():
        table.add_row(name, *(_ratio_text(own["cpu_ratio_to"][other]) if other != name else "" for other in figures))
    return table


def _ratio_text(ratio: dict[str, Any] | None) -> str:
    return "-" if ratio is None else str(Ratio(ratio["min"], ratio["median"], ratio["max"], tuple(ratio["ci95"])))


if __name__ == "__main__":
    sys.exit(main())
