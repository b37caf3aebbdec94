"""Start the ranks of a run as processes of this machine, where torchrun has not done so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

STORE = "RUN_STORE"  # environment variable by which a rank knows that it was started here; holds where ranks meet


def run(command: list[str], world_size: int) -> int:
    """Run ``command`` as each rank and wait for all; the status of the first that fails. SIGINT and SIGTERM go on to
    each rank once, as SIGTERM; a second one ends them all.
    """
    ranks: list[subprocess.Popen[bytes]] = []

    def forward(number: int, frame: Any) -> None:
        for process in ranks:
            process.send_signal(signal.SIGTERM)
        for known in handlers:
            signal.signal(known, end)

    def end(number: int, frame: Any) -> None:
        for process in ranks:
            process.kill()

    handlers = {known: signal.getsignal(known) for known in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited by the ranks: a terminal sends it to them too
    try:
        with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
            for rank in range(world_size):
                place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, STORE: f"file://{folder}/store"}
                environment = os.environ | {key: str(value) for key, value in place.items()}
                process = subprocess.Popen([sys.executable, *command], env=environment, stdin=subprocess.PIPE)
                ranks.append(process)
            for known in handlers:
                signal.signal(known, forward)
            while not (status := failure(ranks)) and any(process.poll() is None for process in ranks):
                time.sleep(0.05)
            # The others have the same error, or miss the one that failed: give them time to say so.
            until = time.monotonic() + 10.0
            while any(process.poll() is None for process in ranks) and time.monotonic() < until:
                time.sleep(0.05)
            status = status or failure(ranks)
            return status if status >= 0 else 128 - status
    finally:
        for process in ranks:
            process.kill()
            process.wait()
        for known, handler in handlers.items():
            signal.signal(known, handler)


def failure(ranks: list[subprocess.Popen[bytes]]) -> int:
    return next((process.returncode for process in ranks if process.poll()), 0)


def end_with_parent() -> None:
    """In a rank: end at once when the process that started it is gone, which closes our standard input."""

    def watch() -> None:
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
