"""Optimizer steps alone, gradients held: Muon against the cost of its iteration, AdamW against FSDP2's, 8-bit AdamW
per parameter, and bytes of state; and what a small GPT learns with them.

    python benchmarks/optimizers.py --parts muon,adamw,adamw8bit,state --world-size 2 --rounds 30 --json optimizers.json
    python benchmarks/optimizers.py --parts loss --seeds 0,1,2 --json losses.json

    muon       --model (gpt15): ratios to the Newton-Schulz iterations of 1/W of the matrices and nothing else
    adamw      --adamw-model (moe45): ratios to FSDP2 with torch.optim.AdamW(foreach=True)
    adamw8bit  one process, one core, a matrix of 1 M and one of 16 M parameters: CPU ns per parameter
    state      one process, --model: bytes of optimizer state per parameter
    loss       one process: validation loss of a small GPT by seed (losses.py); some minutes, only if asked for

Rounds, ratios and controls are those of benchmarks/step.py; see README.md in this folder.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import json
import signal
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ == "__main__":  # the import path of a script begins with its folder; the packages lie one above
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from benchmarks import counting, losses, models, ranks, report, variants
from benchmarks.rounds import Clock, Round, run_rounds
from benchmarks.step import Plan, make_batch

DEFAULT_PARTS = ("muon", "adamw", "adamw8bit", "state")
PARTS = (*DEFAULT_PARTS, "loss")
SIZES = {"1M": (1024, 16), "16M": (4096, 1)}  # side of a square matrix, steps a round
WARM_UPS = 2
STATES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ("AdamW", "AdamW8bit", "Muon", "NorMuon", "Lion", "SGD", "Shampoo", "SOAP")},
    # By default the vectors of a small model keep fp32 moments.
    "AdamW8bit, min_8bit_size=256": ("AdamW8bit", {"min_8bit_size": 256}),
    "Muon, momentum_8bit, hidden matrices": ("Muon", {"momentum_8bit": True}),
}


class HeldStep:
    """Optimizers that step again and again, ``times`` at a call, on the gradients of one backward."""

    def __init__(self, optimizer: Any, times: int = 1) -> None:
        self.optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
        self.times = times

    def __call__(self, clock: Clock | None = None) -> None:
        clock = clock or Clock()
        for optimizer in self.optimizers * self.times:
            optimizer.step()
        clock.lap("step")


# ---- Muon -----------------------------------------------------------------------------------------------------------


def hidden(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(matrices of the blocks, everything else), which is what Muon and AdamW get in every variant."""
    matrices, rest = [], []
    for name, parameter in model.named_parameters():
        (matrices if "blocks." in name and parameter.ndim == 2 else rest).append(parameter)
    return matrices, rest


class Floor:
    """The iterations of this rank's share of the matrices, by torch.optim.Muon's own function, and nothing else."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], world_size: int, rank: int) -> None:
        from torch.optim._muon import _zeropower_via_newtonschulz

        self.iterate = _zeropower_via_newtonschulz
        load, mine = [0.0] * world_size, []
        for shape in sorted(shapes, key=lambda s: -(min(s) ** 2) * max(s)):
            owner = load.index(min(load))
            load[owner] += min(shape) ** 2 * max(shape)
            if owner == rank:
                mine.append(shape)
        self.matrices = [torch.randn(shape, dtype=torch.bfloat16) for shape in mine]

    def step(self) -> None:
        for matrix in self.matrices:
            self.iterate(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7)


class NaiveMuon:
    """Muon on FSDP2 as one writes it first: every rank gathers every matrix, iterates on it, keeps its part."""

    def __init__(self, matrices: Sequence[nn.Parameter]) -> None:
        from torch.optim._muon import _zeropower_via_newtonschulz

        self.iterate = _zeropower_via_newtonschulz
        self.matrices = list(matrices)
        self.momentum: list[Any] = [torch.zeros_like(p) for p in self.matrices]

    @torch.no_grad()
    def step(self) -> None:
        from torch.distributed.tensor import distribute_tensor

        for parameter, momentum in zip(self.matrices, self.momentum, strict=True):
            assert parameter.grad is not None
            momentum.lerp_(parameter.grad, 0.05)
            direction: Any = parameter.grad.lerp(momentum, 0.95)
            update = self.iterate(direction.full_tensor(), (3.4445, -4.7750, 2.0315), 5, 1e-7).to(parameter.dtype)
            mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
            parameter.add_(distribute_tensor(update, mesh, placements, src_data_rank=None), alpha=-1e-3)


def muon_floor(model: nn.Module) -> HeldStep:
    shapes = [tuple(p.shape) for p in hidden(model)[0]]
    return HeldStep(Floor(shapes, dist.get_world_size(), dist.get_rank()))


def muon_ddp(model: nn.Module) -> HeldStep:
    """Every rank holds and updates everything; the gradients were reduced before the optimizer's step."""
    matrices, rest = hidden(model)
    return HeldStep([torch.optim.Muon(matrices), torch.optim.AdamW(rest, fused=True)])


def muon_fsdp2_naive(model: nn.Module) -> HeldStep:
    from torch.distributed.fsdp import fully_shard

    variants.wrap(fully_shard, model, variants.Options())
    matrices, rest = hidden(model)
    return HeldStep([NaiveMuon(matrices), torch.optim.AdamW(rest, fused=True)])


def muon_fsdp2_ours(model: nn.Module) -> HeldStep:
    from torch.distributed.fsdp import fully_shard

    import ragged_optim

    variants.wrap(fully_shard, model, variants.Options())
    return HeldStep(ragged_optim.Muon(model.named_parameters()))


def muon_ours(model: nn.Module) -> HeldStep:
    import ragged_optim
    from fsdp import fully_shard

    variants.wrap(fully_shard, model, variants.Options())
    return HeldStep(ragged_optim.Muon(model.named_parameters()))


def muon_ours_whole(model: nn.Module) -> HeldStep:
    """Matrices that no rank boundary cuts: what moves is what the balance of work asks for."""
    import ragged_optim
    from fsdp import fully_shard
    from ragged_optim import policies
    from ragged_shard.block import Block

    policy = policies.muon(block=Block.whole())
    variants.wrap(fully_shard, model, variants.Options(), orig_param_policy=policy)
    return HeldStep(ragged_optim.Muon(model.named_parameters(), orig_param_policy=policy))


MUON = {
    "floor": muon_floor,
    "floor_b": muon_floor,
    "ours": muon_ours,
    "ours_whole": muon_ours_whole,
    "fsdp2_ours": muon_fsdp2_ours,
    "fsdp2_naive": muon_fsdp2_naive,
    "ddp_torch": muon_ddp,
}

# ---- AdamW ----------------------------------------------------------------------------------------------------------


def adamw_of(variant: str, optimizer: str) -> Callable[[nn.Module], HeldStep]:
    def build(model: nn.Module) -> HeldStep:
        _, made = variants.VARIANTS[variant](model, variants.Options(optimizer))
        return HeldStep(made)

    return build


ADAMW = {
    "fsdp2_foreach": adamw_of("fsdp2", "foreach_adamw"),
    "fsdp2_foreach_b": adamw_of("fsdp2", "foreach_adamw"),
    "fsdp2_fused": adamw_of("fsdp2", "fused_adamw"),
    "ours_fused": adamw_of("ours", "fused_adamw"),
    "ours_ragged": adamw_of("ours_ragged", "fused_adamw"),
}


def measure_sharded(send: Callable[[Any], None], plan: tuple[str, Plan]) -> None:
    """Rank 0 sends ("counts", variant, {...}) and ("round", Round)."""
    part, options = plan
    tell = send if dist.get_rank() == 0 else lambda _: None
    steps: dict[str, HeldStep] = {}
    batch = make_batch(options)
    for name, build in (MUON if part == "muon" else ADAMW).items():
        tell(("note", f"{part}: build, warm up and count {name}"))
        model = models.build(options.model)
        steps[name] = build(model)
        model(*batch).backward()
        for _ in range(WARM_UPS):
            steps[name]()
        counter = counting.OperationCounter()
        with counter:
            steps[name]()
        counts = {
            "collectives": counter.collectives,
            "collective_bytes": counter.collective_bytes,
            "copied_bytes": counter.copied_bytes,
            "operations": dict(counter.operations),
        }
        tell(("counts", name, counts))
    run_rounds(
        steps,
        rounds=options.rounds,
        seconds=options.seconds,
        seed=options.seed,
        report=lambda one: tell(("round", one)),
    )


# ---- AdamW8bit, and bytes of state ----------------------------------------------------------------------------------


@contextlib.contextmanager
def eager_kernels() -> Iterator[None]:
    """The rule as it runs where there is no C++ compiler."""
    with mock.patch("ragged_optim.rules.adamw8bit.adamw8bit_kernel", lambda: None):
        yield


class EagerStep(HeldStep):
    def __call__(self, clock: Clock | None = None) -> None:
        clock = clock or Clock()
        with eager_kernels():
            super().__call__(clock)


def eight_bit_steps(side: int, times: int) -> dict[str, HeldStep]:
    import ragged_optim

    def parameter() -> nn.Parameter:
        generator = torch.Generator().manual_seed(0)
        made = nn.Parameter(torch.randn(side, side, generator=generator) * 0.02)
        made.grad = torch.randn(side, side, generator=generator) * 1e-3
        return made

    steps: dict[str, HeldStep] = {
        "torch_fused_fp32": HeldStep(torch.optim.AdamW([parameter()], fused=True), times),
        "ours": HeldStep(ragged_optim.AdamW8bit([parameter()]), times),
        "ours_b": HeldStep(ragged_optim.AdamW8bit([parameter()]), times),
        "ours_eager": EagerStep(ragged_optim.AdamW8bit([parameter()]), times),
        "ours_dynamic": HeldStep(ragged_optim.AdamW8bit([parameter()], format="dynamic"), times),
    }
    if importlib.util.find_spec("bitsandbytes"):
        import bitsandbytes

        steps["bitsandbytes"] = HeldStep(bitsandbytes.optim.AdamW8bit([parameter()]), times)
    return steps


def measure_eight_bit(send: Callable[[Any], None], plan: tuple[str, Plan]) -> None:
    """Sends ("kernel", whether the C++ kernel is there) and ("round", Round) of variants named ``size/variant``."""
    from ragged_optim.kernels import adamw8bit_kernel

    send(("kernel", adamw8bit_kernel() is not None))
    steps: dict[str, HeldStep] = {}
    for size, (side, times) in SIZES.items():
        send(("note", f"adamw8bit: build and warm up {size}"))
        for name, step in eight_bit_steps(side, times).items():
            steps[f"{size}/{name}"] = step
            for _ in range(WARM_UPS):
                step()
    _, options = plan
    run_rounds(
        steps,
        rounds=options.rounds,
        seconds=options.seconds,
        seed=options.seed,
        report=lambda one: send(("round", one)),
    )


def measure_state(send: Callable[[Any], None], plan: tuple[str, Plan]) -> None:
    """Sends ("state", optimizer, bytes of state per parameter)."""
    import ragged_optim

    _, options = plan
    for label, (name, more) in STATES.items():
        model = models.build(options.model)
        optimizer = getattr(ragged_optim, name)(model.named_parameters(), **more)
        model(*make_batch(options)).backward()
        optimizer.step()
        counted = hidden(model)[0] if "hidden" in label else list(model.parameters())
        state = [v for p in counted for v in optimizer.state[p].values() if isinstance(v, Tensor)]
        send(("state", label, counting.live_bytes(state) / sum(p.numel() for p in counted)))


def measure_losses(send: Callable[[Any], None], plan: tuple[str, Plan], seeds: Sequence[int], steps: int) -> None:
    """Sends ("run", losses.Run)."""

    def tell(run: losses.Run) -> None:
        send(("note", f"loss: {run.optimizer}, seed {run.seed}: {run.validation:.3f}"))
        send(("run", run))

    send(("note", f"loss: {len(losses.OPTIMIZERS) * len(seeds)} runs of {steps} steps"))
    losses.train_all(seeds, steps, tell)


# ---- in the process that was started by hand ------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0; 2 for a wrong argument; 1 when a rank failed."""
    parser = _parser()
    args = parser.parse_args(arguments)
    parts = [part.strip() for part in args.parts.split(",") if part.strip()]
    unknown = [part for part in parts if part not in PARTS]
    if unknown or not parts:
        what = f"unknown parts: {', '.join(unknown)}" if unknown else "no part given"
        parser.error(f"--parts: {what}; choose from {', '.join(PARTS)}")
    if "muon" in parts and models.MODELS[args.model].experts:
        parser.error(f"--model {args.model}: torch.optim.Muon, a peer here, takes no stacks of experts")
    made: dict[str, Any] = {"world_size": args.world_size, "seed": args.seed, "torch": torch.__version__}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, which ends the ranks
    try:
        for part in parts:
            made[part] = _run_part(part, args)
            _write(args.json, made)  # each part as it ends: the next may be long
            _SHOW[part](made[part])
    except KeyboardInterrupt:
        print(f"interrupted; finished parts: {', '.join(p for p in parts if p in made) or 'none'}", file=sys.stderr)
    except ranks.RankFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks/optimizers.py", description=__doc__, formatter_class=report.Formatter
    )
    parser.add_argument("--parts", default=",".join(DEFAULT_PARTS), help="comma separated, of " + ", ".join(PARTS))
    parser.add_argument("--model", choices=list(models.MODELS), default="gpt15", help="of muon and state")
    parser.add_argument("--adamw-model", choices=list(models.MODELS), default="moe45")
    parser.add_argument("--seeds", default="0,1,2", help="of loss, comma separated")
    parser.add_argument("--steps", type=int, default=400, help="of each run of loss")
    report.add_common_arguments(parser)
    parser.add_argument("--json", type=Path, default=None, help="file for every round and every figure")
    return parser


def _run_part(part: str, args: argparse.Namespace) -> dict[str, Any]:
    model = args.adamw_model if part == "adamw" else args.model
    plan = Plan(
        model=model,
        variants=(),
        options=variants.Options(),
        batch=args.batch,
        length=models.MODELS[model].positions,
        rounds=args.rounds,
        seconds=args.seconds,
        seed=args.seed,
    )
    measure: Callable[..., None] = {"adamw8bit": measure_eight_bit, "state": measure_state}.get(part, measure_sharded)
    if part == "loss":
        seeds = [int(seed) for seed in args.seeds.split(",")]
        measure = functools.partial(measure_losses, seeds=seeds, steps=args.steps)
    world_size = args.world_size if measure is measure_sharded else 1
    runs: list[losses.Run] = []
    made: dict[str, Any] = {"model": model, "world_size": world_size, "malloc": args.malloc}
    counts: dict[str, Any] = {}
    rounds: list[Round] = []
    for kind, *content in report.watch(world_size, measure, (part, plan), malloc=args.malloc, rounds=plan.rounds):
        if kind == "round":
            rounds.append(content[0])
        elif kind == "counts":
            counts[content[0]] = content[1]
        elif kind == "state":
            made.setdefault("bytes_per_parameter", {})[content[0]] = content[1]
        elif kind == "kernel":
            made["kernel"] = content[0]
        elif kind == "run":
            runs.append(content[0])
    if part == "loss":
        return _losses(runs)
    if part == "state":
        return made
    made["rounds"] = [dataclasses.asdict(one) for one in rounds]
    if part == "adamw8bit":
        made["sizes"] = _per_parameter(rounds)
        return made
    names = list(counts)
    made["variants"] = {name: {**counts[name], **report.ratios_of(rounds, name, names)} for name in names}
    made["warnings"] = report.noise(made["variants"], len(rounds), names[0] + "_b")
    return made


def _per_parameter(rounds: Sequence[Round]) -> dict[str, dict[str, Any]]:
    """CPU ns per parameter (min, median), and the ratio to torch's fused fp32 AdamW."""
    made: dict[str, dict[str, Any]] = {}
    for size, (side, times) in SIZES.items():
        names = [name for name in (rounds[0].cpu if rounds else {}) if name.startswith(f"{size}/")]
        made[size] = {}
        for name in names:
            ns = [one.cpu[name] / times / side**2 * 1e9 for one in rounds]
            ratio = report.ratio(rounds, name, f"{size}/torch_fused_fp32", "cpu")
            made[size][name.split("/")[1]] = {
                "ns_min": min(ns),
                "ns_median": statistics.median(ns),
                "cpu_ratio": ratio and ratio.to_json(),
            }
    return made


def _losses(runs: Sequence[losses.Run]) -> dict[str, Any]:
    made: dict[str, Any] = {"runs": [dataclasses.asdict(run) for run in runs], "optimizers": {}}
    for name in dict.fromkeys(run.optimizer for run in runs):
        found = [run.validation for run in runs if run.optimizer == name]
        made["optimizers"][name] = {"validation": found, "to_adamw": losses.paired(runs, name)}
    return made


def _write(path: Path | None, made: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(made, indent=1) + "\n")


def _show_sharded(made: dict[str, Any]) -> None:
    from rich.table import Table

    console = report.console()
    base = next(iter(made["variants"]))
    table = Table(title=f"{made['model']}, {made['world_size']} ranks, optimizer step alone; ratios to {base}")
    for column in ("variant", "collectives", "MB moved", "cpu ratio [95%]", "wall ratio [95%]"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for name, figures in made["variants"].items():
        times = [report.ratio_text(figures[key]) for key in ("cpu_ratio", "wall_ratio")]
        table.add_row(name, str(figures["collectives"]), f"{figures['collective_bytes'] / 1e6:.1f}", *times)
    console.print(table)
    if made["rounds"]:
        console.print(report.matrix(made["variants"]))
    for warning in made["warnings"]:
        console.print(f"warning: {warning}", style="yellow")


def _show_eight_bit(made: dict[str, Any]) -> None:
    from rich.table import Table

    kernel = "C++ kernel" if made["kernel"] else "no C++ kernel here: `ours` is eager"
    table = Table(title=f"CPU ns per parameter, one core, {len(made['rounds'])} rounds; {kernel}")
    for column in ("size", "variant", "min", "median", "ratio to torch fused fp32 [95%]"):
        table.add_column(column, justify="left" if column in ("size", "variant") else "right")
    for size, figures in made["sizes"].items():
        for name, one in figures.items():
            ns = [f"{one[key]:.2f}" for key in ("ns_min", "ns_median")]
            table.add_row(size, name, *ns, report.ratio_text(one["cpu_ratio"]))
    report.console().print(table)


def _show_state(made: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(title=f"bytes of optimizer state per parameter, {made['model']}")
    table.add_column("optimizer")
    table.add_column("bytes", justify="right")
    for name, nbytes in made["bytes_per_parameter"].items():
        table.add_row(name, f"{nbytes:.3f}")
    report.console().print(table)


def _show_losses(made: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(title="validation loss of the small GPT, nats per byte")
    for column in ("optimizer", "by seed", "mean", "to adamw, by seed", "mean"):
        table.add_column(column, justify="left" if column == "optimizer" else "right")
    for name, figures in made["optimizers"].items():
        cells = []
        for key, digits in (("validation", "{:.3f}"), ("to_adamw", "{:+.3f}")):
            cells += [" ".join(map(digits.format, figures[key])), digits.format(statistics.fmean(figures[key]))]
        table.add_row(name, *cells)
    report.console().print(table)


_SHOW: dict[str, Callable[[dict[str, Any]], None]] = {
    "muon": _show_sharded,
    "adamw": _show_sharded,
    "adamw8bit": _show_eight_bit,
    "state": _show_state,
    "loss": _show_losses,
}

if __name__ == "__main__":
    sys.exit(main())
