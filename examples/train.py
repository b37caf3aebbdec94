"""Train a byte-level GPT on real text, sharded, on the GPUs of this machine or on local CPU processes.

    python examples/train.py --optimizer muon --steps 400 --name first      # writes runs/first/
    python examples/train.py --resume runs/first --world-size 3             # goes on from its last checkpoint
    torchrun --nproc-per-node 4 examples/train.py --sharding fsdp2          # the same under torchrun

Without torchrun it starts its own processes. Ctrl-C saves a checkpoint on all ranks and ends; twice ends at once.
The global batch of a step does not depend on the number of processes, so the losses do not either.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

# Set before torch is imported: ranks share the cores of one machine, and the profiler is not to talk.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from tqdm import tqdm

import checkpoint
import corpus
import launch
import optimizers
import plots
from gpt import GPT, MODELS, GPTConfig
from memory import PeakMemory, resident_bytes

SHARDINGS = ("fsdp", "fsdp2", "ddp", "none")
INTERRUPTED = 130  # exit status after Ctrl-C, as shells have it


class UserError(Exception):
    """Something that the user can put right; shown without a traceback, the same on every rank."""


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--model", choices=MODELS, default="tiny", help="size (default: %(default)s)")
    add("--tied", action="store_true", help="let the head be the embedding")
    add("--data", metavar="PATH", help="a text file, or a folder of them (default: Python's standard library)")
    add("--optimizer", choices=optimizers.LEARNING_RATES, default="adamw", help="(default: %(default)s)")
    add("--lr", type=float, help="learning rate of the hidden matrices (default: depends on the optimizer)")
    add("--aux-lr", type=float, default=6e-3, help="of AdamW for the rest, beside Muon (default: %(default)s)")
    add("--weight-decay", type=float, default=0.1)
    add("--clip", type=float, default=1.0, help="largest norm of the gradient (default: %(default)s; 0: any)")
    add("--ns-dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of Muon's Newton-Schulz")
    add("--sharding", choices=SHARDINGS, default="fsdp", help="(default: %(default)s)")
    add("--block", type=int, default=1, metavar="ROWS", help="of a matrix that --sharding fsdp keeps together")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="to compute in; parameters are float32")
    add("--world-size", type=int, help="processes to start (default: one per GPU, or 2 on the CPU)")
    add("--global-batch", type=int, default=16, help="samples per step, over all processes (default: %(default)s)")
    add("--steps", type=int, default=250, help="(default: %(default)s)")
    add("--seed", type=int, default=0)
    add("--eval-every", type=int, default=50, metavar="STEPS")
    add("--save-every", type=int, default=200, metavar="STEPS")
    add("--sample", type=int, default=200, metavar="BYTES", help="text to write at the end (default: %(default)s)")
    add("--runs", default="runs", metavar="FOLDER", help="where runs lie (default: %(default)s)")
    add("--name", default="train", help="of the run: results go to FOLDER/NAME/ (default: %(default)s)")
    add("--resume", metavar="RUN", help="run folder to go on with; its settings hold where no other is given")
    args = parser.parse_args(argv)
    if args.resume:
        # Once more, over the settings of that run. The run's folder may have been moved since.
        folder = Path(args.resume)
        parser.set_defaults(**checkpoint.read_config(folder)["arguments"])
        args = parser.parse_args(argv)
        args.runs, args.name = str(folder.parent), folder.name
    if args.lr is None:
        args.lr = optimizers.LEARNING_RATES[args.optimizer]
    if args.world_size is None:
        args.world_size = torch.cuda.device_count() if torch.cuda.is_available() else 2
        args.world_size = 1 if args.sharding == "none" else args.world_size
    args.world_size = int(os.environ.get("WORLD_SIZE", args.world_size))
    return args


def check(args: argparse.Namespace) -> corpus.Corpus:
    """What can be wrong with the arguments, found before anything is started or written, from what all ranks see."""
    config, folder = model_config(args), Path(args.runs, args.name)
    if args.block < 1:
        raise UserError(f"--block {args.block}: rows to keep together; use 1 or more")
    if args.world_size < 1 or args.global_batch < args.world_size:
        raise UserError(
            f"--global-batch {args.global_batch} gives {args.world_size} processes less than a sample each; "
            f"use --global-batch {max(1, args.world_size)} or more, or a smaller --world-size"
        )
    if args.sharding == "none" and args.world_size > 1:
        raise UserError(f"--sharding none is one process, not {args.world_size}; use --world-size 1, or ddp or fsdp")
    here = int(os.environ.get("LOCAL_WORLD_SIZE", args.world_size))
    if torch.cuda.is_available() and here > torch.cuda.device_count():
        raise UserError(f"{here} processes, but {torch.cuda.device_count()} GPUs here; use a smaller --world-size")
    text = corpus.load(args.data, config.context)
    if args.resume:
        checkpoint.check(folder, args.steps, text, config)
    elif folder.exists():
        raise UserError(f"{folder} exists; choose another --name, or go on with that run: --resume {folder}")
    return text


def model_config(args: argparse.Namespace) -> GPTConfig:
    return replace(MODELS[args.model], tied=args.tied)


def shard(model: GPT, args: argparse.Namespace) -> nn.Module:
    """The four ways to spread a model over processes."""
    if args.sharding == "none":
        return model
    if args.sharding == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if args.sharding == "fsdp":
        from fsdp import fully_shard

        options: dict[str, Any] = {"orig_param_policy": optimizers.policy(args)}
    else:
        from torch.distributed.fsdp import fully_shard

        options = {}
    if args.dtype == "bfloat16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def learning_rate(step: int, steps: int) -> float:
    """Trapezoid: up over the first 5 %, down over the last 30 %. A function of the step alone, so it needs no state."""
    return min(1.0, (step + 1) / max(1, steps // 20), (steps - step) / max(1, steps * 3 // 10))


class Trainer:
    """One rank of a run."""

    def __init__(self, args: argparse.Namespace, text: corpus.Corpus, device: torch.device) -> None:
        self.args, self.text, self.device = args, text, device
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size, self.folder, self.config = args.world_size, Path(args.runs, args.name), model_config(args)
        self.stop = False
        self.peak = PeakMemory(device)
        torch.manual_seed(args.seed)
        self.model = shard(GPT(self.config).to(device), args)
        self.optimizer = optimizers.build(args, self.model)
        self.base_lr = [group["lr"] for group in self.optimizer.param_groups]
        self.first = checkpoint.load(self.folder, self.model, self.optimizer) if args.resume else 0

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Summed cross-entropy in nats of the samples given."""
        autocast = self.args.dtype == "bfloat16" and not isinstance(self.model, FSDPModule)
        with torch.autocast(self.device.type, torch.bfloat16) if autocast else nullcontext():
            logits = self.model(tokens.to(self.device))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.to(self.device).flatten(), reduction="sum")

    def share(self, samples: int) -> range:
        """This rank's part of ``samples`` samples, as even as can be."""
        return range(samples * self.rank // self.world_size, samples * (self.rank + 1) // self.world_size)

    def total(self, *values: Tensor | float) -> list[float]:
        """Each value summed over the ranks."""
        both = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=self.device) for v in values])
        if dist.is_initialized():
            dist.all_reduce(both)
        return both.tolist()

    def step(self, step: int) -> tuple[float, bool]:
        """One step; the global batch's mean loss in nats per byte, and whether any rank was asked to stop."""
        tokens_per_step = self.args.global_batch * self.config.context
        for group, lr in zip(self.optimizer.param_groups, self.base_lr, strict=True):
            group["lr"] = lr * learning_rate(step, self.args.steps)
        samples = self.share(self.args.global_batch)
        loss = self.forward(*corpus.batch(self.text.train, self.config.context, self.args.seed, step, samples))
        # The mean over ranks of gradients scaled like this is the global batch's mean, even when shares are uneven.
        (loss * (self.world_size / tokens_per_step)).backward()
        if self.args.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        total, stop = self.total(loss.detach(), float(self.stop))
        return total / tokens_per_step, stop > 0

    @torch.no_grad()
    def evaluate(self, samples: int = 128) -> float:
        """Mean loss in nats per byte of ``samples`` windows of the held-out text."""
        total = torch.zeros((), device=self.device)
        for begin in range(0, samples, 32):
            part = [begin + i for i in self.share(min(32, samples - begin))]
            total += self.forward(*corpus.validation_batch(self.text.valid, self.config.context, part, samples))
        self.reshard()
        return self.total(total)[0] / (samples * self.config.context)

    @torch.no_grad()
    def write(self, count: int, prompt: bytes = b"def ") -> str:
        """``prompt`` and ``count`` bytes that the model goes on with. On every rank: a sharded model needs them all."""
        random = torch.Generator().manual_seed(self.args.seed)
        text = list(prompt)
        for _ in range(count):
            logits = self.model(torch.tensor([text[-self.config.context :]], device=self.device))[0, -1]
            text.append(int(torch.multinomial((logits.float().cpu() / 0.7).softmax(0), 1, generator=random)))
        self.reshard()
        # Bytes that are no text would not be shown, or would steer the terminal.
        return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in bytes(text).decode(errors="replace"))

    def reshard(self) -> None:
        """A forward without a backward leaves the root's parameters unsharded; release them."""
        if isinstance(self.model, FSDPModule):
            self.model.reshard()

    def run(self) -> int:
        args, rank0 = self.args, self.rank == 0
        if rank0:
            checkpoint.write_config(self.folder, vars(args) | {"resume": None}, self.config, self.text)
            size, place = sum(p.numel() for p in self.model.parameters()), f"{self.world_size} x {self.device.type}"
            said = f"{args.model}: {size:,} parameters, {args.optimizer}, {args.sharding} on {place}"
            print(f"{self.text}\n{said}; writes {self.folder}/", flush=True)
        metrics = (self.folder / "metrics.jsonl").open("a") if rank0 else None

        def record(**entry: Any) -> None:
            if metrics:
                metrics.write(json.dumps(entry) + "\n")
                metrics.flush()

        tokens, seconds, stopped, valid = 0, 0.0, False, float("nan")
        # On a terminal a bar; elsewhere a line at each evaluation.
        bar = tqdm(
            initial=self.first, total=args.steps, unit="step", disable=None if rank0 else True, dynamic_ncols=True
        )
        for step in range(self.first, args.steps):
            slowed, began = self.peak.recording, time.perf_counter()
            self.peak.step_begins()
            loss, stopped = self.step(step)
            self.peak.step_ends()
            if not slowed:
                seconds += time.perf_counter() - began
                tokens += args.global_batch * self.config.context
            record(step=step, train_loss=loss, lr=self.optimizer.param_groups[0]["lr"])
            done, last = step + 1, step + 1 == args.steps
            stopped = stopped and not last
            speed = tokens / seconds if seconds else 0.0
            known = f", {speed:,.0f} tokens/s, peak {self.peak.bytes / 2**20:.1f} MiB" if seconds else ""
            bar.set_postfix_str(f"loss {loss:.3f}{known}", refresh=False)
            bar.update()
            if last or stopped or done % args.save_every == 0:
                checkpoint.save(self.folder, done, self.model, self.optimizer)
            if stopped:
                break
            if last or done % args.eval_every == 0:
                valid = self.evaluate()
                record(step=step, valid_loss=valid, tokens_per_s=speed, peak_bytes=self.peak.bytes)
                if rank0:
                    with tqdm.external_write_mode():  # above the bar
                        said = f"step {done}: train {loss:.4f}, validation {valid:.4f}, {speed:,.0f} tokens/s"
                        print(said, flush=True)
        bar.close()
        if stopped:
            if rank0:
                print(f"stopped and saved after step {done}; go on with: --resume {self.folder}", flush=True)
            return INTERRUPTED
        text = self.write(args.sample) if args.sample else ""
        if rank0 and text:
            print(f"---- a sample ----\n{text}\n------------------", flush=True)
        self.summarize(valid, speed, text)
        return 0

    def summarize(self, valid: float, speed: float, text: str) -> None:
        """Figures and pictures of a finished run."""
        state = (value for states in self.optimizer.state.values() for value in states.values())
        sizes = torch.tensor(
            [self.peak.bytes, resident_bytes(self.model.parameters()), resident_bytes(state)], device=self.device
        )
        if dist.is_initialized():
            dist.all_reduce(sizes, dist.ReduceOp.MAX)
        if self.rank:
            return
        train = list(plots.read_metrics(self.folder, "train_loss").values())[-20:]
        summary = {"train_loss": sum(train) / len(train), "valid_loss": valid, "tokens_per_s": speed, "sample": text}
        summary |= zip(("peak_bytes", "parameter_bytes", "state_bytes"), sizes.tolist(), strict=True)
        (self.folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        plots.losses({self.args.name: self.folder}, self.folder / "loss.png")
        if self.args.sharding == "fsdp":
            self.draw_layout()
        print(f"wrote {self.folder}/: {', '.join(sorted(p.name for p in self.folder.iterdir()))}", flush=True)

    def draw_layout(self) -> None:
        """layout.png: the buffer of the first transformer block."""
        from ragged_shard import buffer_of

        parameters = dict(self.model.blocks[0].named_parameters())
        found = buffer_of(next(iter(parameters.values())))
        if found is not None:
            plan, shapes = found[0].plan, {name: tuple(p.shape) for name, p in parameters.items()}
            title = f"{self.args.name}: parameters of blocks.0 on {self.world_size} ranks"
            plots.layout(plan, shapes, self.folder / "layout.png", title)


def worker(args: argparse.Namespace) -> int:
    """One process of the run; its place in the world stands in the environment, as torchrun puts it there."""
    if launch.STORE in os.environ:
        launch.end_with_parent()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if args.sharding != "none":
        # Gloo is there on CUDA too: checkpoints coordinate over it.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend, os.environ.get(launch.STORE), rank=int(os.environ["RANK"]), world_size=args.world_size
        )
    text = check(args)
    if dist.is_initialized():
        dist.barrier()  # every rank has looked at the run's folder before rank 0 makes it
    trainer = Trainer(args, text, device)

    def ask_to_stop(number: int, frame: Any) -> None:
        trainer.stop = True

    signal.signal(signal.SIGTERM, ask_to_stop)
    if launch.STORE not in os.environ:
        signal.signal(signal.SIGINT, ask_to_stop)
    status = trainer.run()
    if dist.is_initialized():
        dist.barrier()  # a group destroyed while a peer still uses it aborts that peer
        dist.destroy_process_group()
    return status


def main(argv: list[str]) -> int:
    try:
        args = parse(argv)
        if "RANK" not in os.environ:
            check(args)
            if args.sharding != "none":
                return launch.run([__file__, *argv], args.world_size)
        return worker(args)
    except (UserError, corpus.CorpusError, checkpoint.CheckpointError) as error:
        sys.stderr.write(f"train.py: error: {error}\n")  # in one piece, since other ranks say the same
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
