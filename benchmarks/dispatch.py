"""CPU time per operator of a RaggedShard tensor against Shard(0), and of a gather to one rank against dist.gather.

    python benchmarks/dispatch.py                     60 rounds
    python benchmarks/dispatch.py --rounds 200 --json dispatch.json
    python benchmarks/dispatch.py --check             exit code 1 where a median is above 1.10 and so is its interval

Operators run in one process, in a world of four that only exists on paper, so nothing but dispatch is measured. Every
round runs each variant once, in shuffled order; the ratio is taken within the round. ``control`` is Shard(0) once more.
The gather runs on real gloo ranks, where both sides move the same bytes to the same rank.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # the import path of a script begins with its folder; the packages lie one above
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from benchmarks import ranks
from benchmarks.ratios import Ratio, paired_ratio
from ragged_shard import RaggedShard

LIMIT = 1.10
TENSORS = 50
GATHER_SIZES = (64, 4096, 16384)


def operators(placement: Any) -> dict[str, tuple[Callable[[], Any], int]]:
    """Name -> (operator, how often a round repeats it) on TENSORS tensors of [32, 4] laid out as ``placement``."""
    mesh = init_device_mesh("cpu", (4,))
    tensors = [distribute_tensor(torch.ones(32, 4), mesh, [placement], src_data_rank=None) for _ in range(TENSORS)]
    parameters = [torch.nn.Parameter(t.clone()) for t in tensors]
    for parameter, gradient in zip(parameters, tensors, strict=True):
        parameter.grad = gradient.clone()
    foreach, loop = (torch.optim.AdamW(parameters, foreach=choice) for choice in (True, False))
    x, y = tensors[0], tensors[1]
    return {
        "add": (lambda: x + y, 400),
        "add_": (lambda: x.add_(y), 400),
        "mul number": (lambda: x * 2.0, 200),
        "zeros_like": (lambda: torch.zeros_like(x), 400),
        "foreach_add": (lambda: torch._foreach_add(tensors, tensors), 30),
        "foreach_add_": (lambda: torch._foreach_add_(tensors, tensors), 30),
        "foreach_norm": (lambda: torch._foreach_norm(tensors), 30),
        "AdamW foreach": (foreach.step, 6),
        "AdamW loop": (loop.step, 3),
    }


def measure_operators(rounds: int, seed: int) -> Iterator[tuple[str, dict[str, list[float]]]]:
    """(operator, variant -> CPU seconds of each round)."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    shard, ragged = operators(Shard(0)), operators(RaggedShard((0,), (1, 1, 1, 1)))
    # The control is the same tensors once more: DTensor's cache answers faster for the spec objects that it has stored.
    variants = {"shard": shard, "control": shard, "ragged": ragged}
    shuffle = random.Random(seed)
    for operator in variants["shard"]:
        times: dict[str, list[float]] = {name: [] for name in variants}
        for step in range(rounds + 2):
            for name in shuffle.sample(list(variants), len(variants)):
                run, repetitions = variants[name][operator]
                began = time.process_time()
                for _ in range(repetitions):
                    run()
                if step >= 2:  # the first two warm caches
                    times[name].append((time.process_time() - began) / repetitions)
        yield operator, times
    dist.destroy_process_group()


def measure_gather(send: Callable[[Any], None], rounds: int, seed: int) -> None:
    """On each rank: ragged -> one-hot against dist.gather of even pieces; rank 0 sends wall seconds of the slowest
    rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    size, rank = dist.get_world_size(), dist.get_rank()
    shuffle = random.Random(seed)
    root = [RaggedShard.one_hot(0, size)]
    for rows in GATHER_SIZES:
        x = distribute_tensor(torch.ones(rows * size, 64), mesh, [RaggedShard((0,), (1,) * size)], src_data_rank=None)
        local = x.to_local()

        def gather(local: torch.Tensor = local) -> None:
            pieces = [torch.empty_like(local) for _ in range(size)] if rank == 0 else None
            dist.gather(local, pieces, dst=0)

        variants = {"gather": gather, "control": gather, "ragged": lambda x=x: x.redistribute(placements=root)}
        times: dict[str, list[float]] = {name: [] for name in variants}
        for step in range(rounds + 2):
            for name in shuffle.sample(list(variants), len(variants)):
                dist.barrier()
                began = time.perf_counter()
                for _ in range(4):
                    variants[name]()
                slowest = torch.tensor(time.perf_counter() - began)
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
                if step >= 2:
                    times[name].append(float(slowest) / 4)
        if rank == 0:
            send((f"gather of {rows * size * 256 // 1024} KiB", times))


def ratios(times: dict[str, list[float]]) -> dict[str, Ratio]:
    base = next(iter(times))
    return {name: paired_ratio(times[name], times[base]) for name in times if name != base}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60, help="of each operator (default: %(default)s)")
    parser.add_argument("--world-size", type=int, default=4, help="of the gather (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="write every figure")
    parser.add_argument("--check", action="store_true", help=f"exit code 1 above a ratio of {LIMIT}")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'':<18}{'us':>9}   ragged / Shard(0)      control      (medians of {arguments.rounds} rounds [95%])")
    slow, cells = [], {}
    gathers = ranks.stream(arguments.world_size, measure_gather, arguments.rounds, arguments.seed)
    for name, times in itertools.chain(measure_operators(arguments.rounds, arguments.seed), gathers):
        found = ratios(times)
        base = statistics.median(next(iter(times.values())))
        print(f"{name:<18}{base * 1e6:>9.1f}   {found['ragged']!s:<20}   {found['control']}", flush=True)
        cells[name] = {variant: one.to_json() for variant, one in found.items()}
        if found["ragged"].median > LIMIT and found["ragged"].ci95[0] > max(LIMIT, found["control"].ci95[1]):
            slow.append(name)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"rounds": arguments.rounds, "operators": cells}, indent=1))
    if slow:
        print("above the limit:", ", ".join(slow))
    return int(bool(arguments.check and slow))


if __name__ == "__main__":
    sys.exit(main())
