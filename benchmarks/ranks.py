"""Local rank processes that stream what they find to the process that started them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

__all__ = ["RankFailed", "malloc_settings", "stream"]

# glibc gives buffers above 32 MiB back to the kernel and faults them in again, step after step. These keep them.
_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
    "MALLOC_TOP_PAD_": str(2**26),
}
_GRACE = 10.0  # seconds for ranks that have ended to exit
_AFTERMATH = 2.0  # seconds for the other ranks to say what they saw after one has failed


class RankFailed(RuntimeError):
    """A rank raised or died; the message holds its traceback or exit code."""


def malloc_settings(choice: str) -> dict[str, str]:
    """Environment of the ranks for ``--malloc``: ``tuned`` or ``default`` (nothing is set)."""
    return dict(_MALLOC) if choice == "tuned" else {}


def stream(
    world_size: int,
    function: Callable[..., None],
    *args: Any,
    environment: dict[str, str] | None = None,
    silence: float = 600.0,
) -> Iterator[Any]:
    """Run ``function(send, *args)`` on ``world_size`` processes and yield what they send, until all have ended.

    ``function`` is a module-level function; it runs with the default gloo group set up, one thread a rank.
    ``environment`` is set before a rank's interpreter starts (the C library reads it there). Raises ``RankFailed`` as
    soon as a rank raises or dies, or when none says anything for ``silence`` seconds. Closing the iterator ends the
    ranks.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="benchmark-") as directory:
        saved = dict(os.environ)
        # The profiler and the allocator write a line to stderr for every step they watch.
        os.environ.update(environment or {}, OMP_NUM_THREADS="1", KINETO_LOG_LEVEL="99", TORCH_CPP_LOG_LEVEL="ERROR")
        ranks: dict[Connection, Any] = {}
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(
                    target=_run,
                    args=(rank, world_size, directory, theirs, function, args),
                    daemon=True,
                    name=f"rank {rank}",
                )
                process.start()
                theirs.close()
                ranks[ours] = process
        finally:
            os.environ.clear()
            os.environ.update(saved)
        processes = list(ranks.values())
        failures: list[str] = []
        try:
            while ranks:
                ready = wait(list(ranks), timeout=_AFTERMATH if failures else silence)
                if not ready and not failures:
                    failures.append(f"no rank said anything for {silence:g} s; those still running were ended")
                if not ready:
                    break
                for pipe in ready:
                    kind, value = _receive(pipe, ranks[pipe])
                    if kind == "sent":
                        yield value
                        continue
                    if kind == "failed":
                        failures.append(value)
                    del ranks[pipe]
            if failures:
                raise RankFailed("\n".join(failures))
        finally:
            _end(processes, patience=0.0 if ranks else _GRACE)


def _receive(pipe: Any, process: Any) -> tuple[str, Any]:
    try:
        kind, value = pipe.recv()
    except EOFError:
        process.join(5)
        return "failed", f"{process.name} died with exit code {process.exitcode}"
    return kind, f"{process.name} failed:\n{value}" if kind == "failed" else value


def _end(processes: list[Any], patience: float) -> None:
    deadline = time.monotonic() + patience
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def _run(
    rank: int, world_size: int, directory: str, pipe: Connection, function: Callable[..., None], args: tuple[Any, ...]
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{directory}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(minutes=10),
        )
        function(lambda value: pipe.send(("sent", value)), *args)
        # Destroying a gloo group that a peer still uses aborts the peer: meet first.
        dist.barrier()
        pipe.send(("ended", None))
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
    os._exit(0)
