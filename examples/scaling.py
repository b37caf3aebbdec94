"""Predict how training of a model would scale on a cluster, from one step on this machine.

    python examples/scaling.py --model medium --ranks 8,64,512,4096 --tflops 400 --tokens 16384 --out scaling.png

One process runs one sharded step on the CPU. Its collectives, bytes and buffers are then those of any number of ranks
(fsdp.simulate); its computation is scaled to ranks that reach ``--tflops`` on ``--tokens`` tokens each, at 6 FLOPs per
parameter and token. Prints a table of weak and strong scaling with what it assumes, and draws both.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from fsdp import MixedPrecisionPolicy, fully_shard
from fsdp.simulate import Cluster, plot, record, scaling
from gpt import GPT, MODELS


def ranks_of(text: str) -> list[int]:
    ranks = [int(part) for part in text.split(",")]
    if not ranks or min(ranks) < 1:
        raise ValueError
    return ranks


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="medium")
    parser.add_argument("--ranks", type=ranks_of, default=[8, 64, 512, 4096], help="numbers, with commas")
    parser.add_argument("--tflops", type=float, default=400.0, help="that a rank reaches, 1e12 FLOP/s")
    parser.add_argument("--tokens", type=int, default=16384, help="of a step, on each rank")
    parser.add_argument("--inter-bandwidth", type=float, default=50.0, help="between nodes of 8, GB/s and rank")
    parser.add_argument("--intra-bandwidth", type=float, default=300.0, help="within a node, GB/s and rank")
    parser.add_argument("--out", default="scaling.png", help="the picture (default: %(default)s)")
    args = parser.parse_args(argv)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        config = MODELS[args.model]
        model = GPT(config)
        parameters = sum(p.numel() for p in model.parameters())
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        tokens = torch.randint(0, 256, (1, config.context))

        def step() -> None:
            cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten()).backward()

        step()
        model.zero_grad()
        profile = record(model, step)
    finally:
        dist.destroy_process_group()
    flops = 6.0 * parameters * args.tokens
    cluster = Cluster(
        ranks=args.ranks[0],
        intra_bandwidth=args.intra_bandwidth * 1e9,
        inter_bandwidth=args.inter_bandwidth * 1e9,
        compute_scale=profile.compute_seconds * args.tflops * 1e12 / flops,
    )
    print(f"{args.model}: {parameters:,} parameters, {args.tokens:,} tokens on each rank at {args.tflops:g} TFLOP/s")
    print(scaling(profile, cluster, args.ranks))
    plot(profile, cluster, args.ranks, args.out)
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
