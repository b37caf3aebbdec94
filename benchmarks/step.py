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
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # the import path of a script begins with its folder; the packages lie one above
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
import torch.distributed as dist

from benchmarks import counting, models, ranks, report, variants
from benchmarks.heap import Heap
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
    batch = make_batch(plan)
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


def make_batch(plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets of this rank, (batch, length) each."""
    config = models.MODELS[plan.model]
    generator = torch.Generator().manual_seed(plan.seed * 1000 + dist.get_rank())
    tokens = torch.randint(config.vocabulary, (plan.batch, plan.length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _build_and_count(
    name: str, plan: Plan, batch: tuple[torch.Tensor, torch.Tensor]
) -> tuple[variants.Training, counting.OperationCounter, dict[str, Any]]:
    # Nor must what the variant itself imports.
    tiny = dataclasses.replace(plan, model="tiny", length=8)
    variants.build(name, models.build("tiny"), make_batch(tiny), plan.options).step()
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
        "peak_bytes": held + high_water,
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
    made = _report(plan, args, found, control if control in names else None)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(made, indent=1) + "\n")
    _show(made)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks/step.py", description=__doc__, formatter_class=report.Formatter)
    parser.add_argument("--model", choices=list(models.MODELS), default="gpt15", help="see benchmarks/models.py")
    report.add_common_arguments(parser)
    parser.add_argument("--variants", default="fsdp2,ours", help="comma separated; ratios are to the first one")
    parser.add_argument("--optimizer", choices=variants.OPTIMIZERS, default=variants.OPTIMIZERS[0])
    parser.add_argument(
        "--reshard",
        choices=list(variants.RESHARD),
        default="always",
        help="reshard_after_forward of every block and the root: True, None or False",
    )
    parser.add_argument("--length", type=report.positive, default=None, help="tokens per sequence (all positions)")
    parser.add_argument("--no-control", action="store_true", help="leave out the second instance of the first variant")
    parser.add_argument("--json", type=Path, default=None, help="file for every round and every figure")
    return parser


@dataclasses.dataclass
class _Found:
    """What the ranks have sent so far."""

    counts: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    rounds: list[Round] = dataclasses.field(default_factory=list)
    losses: dict[str, float] = dataclasses.field(default_factory=dict)


def _watch(plan: Plan, args: argparse.Namespace, found: _Found) -> None:
    for kind, *content in report.watch(args.world_size, measure, plan, malloc=args.malloc, rounds=plan.rounds):
        if kind == "counts":
            found.counts[content[0]] = content[1]
        elif kind == "round":
            found.rounds.append(content[0])
        elif kind == "losses":
            found.losses = content[0]


def _report(plan: Plan, args: argparse.Namespace, found: _Found, control: str | None) -> dict[str, Any]:
    base = plan.variants[0]
    params_bytes = found.counts["local"]["live_param_bytes"]
    figures: dict[str, dict[str, Any]] = {}
    for name in plan.variants:
        figures[name] = {**found.counts[name], **report.ratios_of(found.rounds, name, plan.variants)}
    made: dict[str, Any] = {
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
    made["warnings"] = _warnings(made)
    return made


def _warnings(made: dict[str, Any]) -> list[str]:
    """What makes this run's figures less than they seem."""
    found = report.noise(made["variants"], len(made["rounds"]), made["control"])
    first = {name: figures["losses"] for name, figures in made["variants"].items()}
    first["local"] = made["local"]["losses"]
    reference = first[made["base"]]
    for name, losses in first.items():
        # local does not share gradients, so only its first loss, before any update, is the same.
        steps = 1 if name.removesuffix("_b") == "local" or made["base"].startswith("local") else len(reference)
        if not all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(losses[:steps], reference[:steps], strict=True)):
            found.append(f"{name} computes other losses ({losses[:steps]}) than {made['base']} ({reference[:steps]})")
    return found


def _show(made: dict[str, Any]) -> None:
    from rich.table import Table

    size = made["params_bytes"]
    console = report.console()
    console.print(
        f"{made['model']}: P = {size:,} bytes of parameters, {made['world_size']} ranks, {made['optimizer']}, "
        f"reshard_after_forward {made['reshard']}, {len(made['rounds'])} rounds, torch {made['torch']}\n"
        f"{report.settings_text(made['malloc']['choice'])}"
    )
    table = Table(title="per step and rank (the largest over ranks); ratios to " + made["base"])
    for column in (
        "variant", "collectives", "moved P", "copied P", "written P", "allocated P", "buffers new", "params P",
        "state P", "held P", "high water P", "peak P", "cpu ratio [95%]", "wall ratio [95%]",
    ):  # fmt: skip
        table.add_column(column, justify="left" if column == "variant" else "right")
    rows = dict(made["variants"])
    rows.setdefault("local", {**made["local"], "cpu_ratio": None, "wall_ratio": None})
    for name, figures in rows.items():
        in_p = [
            f"{figures[key] / size:.2f}"
            for key in ("collective_bytes", "copied_bytes", "written_bytes", "allocated_bytes")
        ]
        held = [
            f"{figures[key] / size:.2f}"
            for key in ("live_param_bytes", "live_state_bytes", "held_bytes", "high_water_bytes", "peak_bytes")
        ]
        times = [report.ratio_text(figures[key]) for key in ("cpu_ratio", "wall_ratio")]
        buffers = str(figures["communication_buffers_allocated"])
        table.add_row(name, str(figures["collectives"]), *in_p, buffers, *held, *times)
    console.print(table)
    if made["rounds"]:
        console.print(report.matrix(made["variants"]))
    for name, figures in made["variants"].items():
        operations = ", ".join(f"{times} {op}" for op, times in Counter(figures["operations"]).most_common())
        console.print(f"  {name}: {operations or 'no collective'}")
    for warning in made["warnings"]:
        console.print(f"warning: {warning}", style="yellow")


if __name__ == "__main__":
    sys.exit(main())
