"""A pool of gloo worker processes per world size, started once, with a deadline on every call.

    results = cluster.run(4, function, *args)      # [result of rank 0, ..., result of rank 3]

``function`` is a module-level function; it runs on every rank with the default process group set up. A call that
does not end in time, or that fails on any rank, raises ``ClusterError`` with the traceback of every rank (of a
rank that hangs: where each of its threads stands), and the pool of that world size is replaced by a fresh one.

Ranks are forked from one of two servers that have imported torch and these packages: seconds that are paid twice, not
for each rank. Two, because ranks with the same hash seed would iterate over a set in the same order.

``RAGGED_TEST_DEADLINE`` (seconds, default 20) is for slow machines; where pytest runs on several workers, each has a
part of the machine, and as much more time.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

DEADLINE = float(os.environ.get("RAGGED_TEST_DEADLINE", "20"))
# pytest-xdist says so in its workers.
SHARED_BY = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
# After one rank has failed, the others get this long to fail too before they count as hanging.
GRACE = SHARED_BY * DEADLINE / 10
STARTUP = 120.0 * SHARED_BY
REPOSITORY = str(Path(__file__).resolve().parent.parent)
# torch._dynamo is what DTensor imports at its first use.
IMPORTED = ["torch", "torch._dynamo", "torch.distributed.tensor", "torch.distributed.checkpoint", "fsdp.fully_shard"]
IMPORTED += ["ragged_optim.optimizer", "ragged_optim.exchange"]


class ClusterError(AssertionError):
    """A rank raised or hung; the message holds every rank's traceback."""


def run(
    world_size: int, function: Callable[..., Any], *args: Any, deadline: float | None = None, **kwargs: Any
) -> list[Any]:
    """Run ``function(*args, **kwargs)`` on every rank of a world of ``world_size``; the results in rank order."""
    pool = _POOLS.get(world_size)
    if pool is None:
        pool = _POOLS[world_size] = _Pool(world_size)
    try:
        return pool.run(function, args, kwargs, SHARED_BY * (DEADLINE if deadline is None else deadline))
    except BaseException:
        del _POOLS[world_size]
        pool.kill()
        raise


@functools.cache
def mesh(shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> Any:
    """On a rank: the CPU mesh of ``shape``, made once per process (every new mesh costs new groups)."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=names)


class _Pool:
    def __init__(self, world_size: int) -> None:
        self.directory = tempfile.TemporaryDirectory(prefix="cluster-")
        context = multiprocessing.get_context("forkserver")
        self.processes = []
        self.pipes: list[Connection] = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_worker,
                args=(rank, world_size, theirs, self.directory.name, dict(os.environ)),
                daemon=True,
                name=f"rank{rank}",
            )
            with mock.patch.object(forkserver, "connect_to_new_process", _server(rank % 2).connect_to_new_process):
                process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)
        for rank, answer in enumerate(self._collect(STARTUP)):
            if answer != ("ok", "ready"):
                self.kill()
                raise ClusterError(f"rank {rank} of {world_size} did not start:\n{answer[1]}")

    def run(self, function: Callable[..., Any], args: Any, kwargs: Any, deadline: float) -> list[Any]:
        for pipe in self.pipes:
            pipe.send((function, args, kwargs))
        answers = self._collect(deadline)
        if all(kind == "ok" for kind, _ in answers):
            return [value for _, value in answers]
        shown = "\n".join(
            f"---- rank {rank}: {kind} ----\n{value if kind != 'ok' else '(returned)'}"
            for rank, (kind, value) in enumerate(answers)
        )
        name = getattr(function, "__qualname__", repr(function))
        raise ClusterError(f"{name} on {len(answers)} ranks (deadline {deadline:g} s):\n{shown}")

    def _collect(self, deadline: float) -> list[tuple[str, Any]]:
        answers: dict[int, tuple[str, Any]] = {}
        end = time.monotonic() + deadline
        waiting = dict(enumerate(self.pipes))
        while waiting and (left := end - time.monotonic()) > 0:
            for pipe in wait(list(waiting.values()), timeout=left):
                rank = next(r for r, p in waiting.items() if p is pipe)
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    self.processes[rank].join(5)
                    answers[rank] = ("died", f"exit code {self.processes[rank].exitcode}")
                del waiting[rank]
                if answers[rank][0] != "ok":
                    end = min(end, time.monotonic() + GRACE)
        for rank in waiting:
            answers[rank] = ("hangs", self._where(rank))
        return [answers[rank] for rank in range(len(self.pipes))]

    def _where(self, rank: int) -> str:
        process, dump = self.processes[rank], Path(self.directory.name, f"rank{rank}.stack")
        if process.pid is None or not process.is_alive():
            return f"exit code {process.exitcode}"
        os.kill(process.pid, signal.SIGUSR1)
        end = time.monotonic() + 5
        while time.monotonic() < end:
            text = dump.read_text() if dump.exists() else ""
            if text.endswith("\n") and "File" in text:
                return text
            time.sleep(0.05)
        return "(no stack within 5 s)"

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self.directory.cleanup()

    def stop(self) -> None:
        for pipe in self.pipes:
            try:
                pipe.send(None)
            except OSError:
                continue
        for process in self.processes:
            process.join(5)
        self.kill()


@functools.cache
def _server(number: int) -> forkserver.ForkServer:
    server = forkserver.ForkServer()
    server.set_forkserver_preload(IMPORTED)
    return server


def _worker(rank: int, world_size: int, pipe: Connection, directory: str, environment: dict[str, str]) -> None:
    dump = open(Path(directory, f"rank{rank}.stack"), "w")  # noqa: SIM115  (open for the life of the process)
    faulthandler.register(signal.SIGUSR1, file=dump, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if REPOSITORY not in sys.path:
        sys.path.insert(0, REPOSITORY)
    try:
        os.environ.update(environment)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        # All ranks compile into one cache, as in a real job; not into that of the machine, which outlives a change.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(directory, "inductor"))
        for name in IMPORTED:  # where the server could not; these seconds belong to no test's deadline
            importlib.import_module(name)
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{directory}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=10 * SHARED_BY * max(DEADLINE, 60)),
        )
        pipe.send(("ok", "ready"))
    except BaseException:
        pipe.send(("raised", traceback.format_exc()))
        return
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            break
        except Exception:
            pipe.send(("raised", traceback.format_exc()))
            continue
        if task is None:
            break
        function, args, kwargs = task
        try:
            torch.manual_seed(0)
            answer: tuple[str, Any] = ("ok", function(*args, **kwargs))
        except BaseException:
            answer = ("raised", traceback.format_exc())
        try:
            pipe.send(answer)
        except Exception:
            pipe.send(("raised", "the result cannot be sent:\n" + traceback.format_exc()))
    # Destroying a gloo group while a peer still uses it aborts that peer: meet first.
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


_POOLS: dict[int, _Pool] = {}


@atexit.register
def _stop_all() -> None:
    for pool in _POOLS.values():
        pool.stop()
    _POOLS.clear()
