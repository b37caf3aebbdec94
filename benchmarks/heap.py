"""The C heap of this process, exactly: bytes held now, and the most since a mark. Needs ``heap.c`` preloaded.

The process that starts the ranks gives them the environment of ``preload``; in a rank, ``Heap.here()`` reads it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

__all__ = ["Heap", "preload"]


def preload(directory: str) -> dict[str, str]:
    """Compile the ledger into ``directory`` (which must outlive the ranks); empty without a C compiler and glibc."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
        return {}
    library = Path(directory, "heap.so")
    source = Path(__file__).with_name("heap.c")
    built = subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(source)], capture_output=True)
    if built.returncode:
        return {}
    return {"LD_PRELOAD": f"{library} {os.environ.get('LD_PRELOAD', '')}".strip()}


class Heap:
    """Reads the preloaded ledger; blocks under 4 KiB are not in it."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._live, self._peak = library.heap_live, library.heap_peak
        self._live.restype = self._peak.restype = ctypes.c_long
        self.mark = library.heap_mark  # forget the peak: it is what is held now

    @staticmethod
    def here() -> Heap | None:
        library = ctypes.CDLL(None)
        return Heap(library) if hasattr(library, "heap_mark") else None

    @property
    def live_bytes(self) -> int:
        return int(self._live())

    @property
    def peak_bytes(self) -> int:
        """The most bytes held at one time since ``mark()``."""
        return int(self._peak())
