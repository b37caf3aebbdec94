"""Compiling a kernel: a C++ file without headers of its own to a shared library, named for its source.

Without torch, so that setup.py can build the kernels into a wheel.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

__all__ = ["KERNELS", "build", "compile_to"]

KERNELS = ("adamw", "adamw8bit", "muon")

# Nothing of this machine's: a wheel runs elsewhere, and the sources choose their vectors when they are called.
# Contraction off: see the sources.
FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-shared",
    "-pthread",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
)
HERE = Path(__file__).parent


def build(name: str) -> Path | None:
    """The shared library of ``name``.cpp: the one installed, the one in the cache, or one compiled now; ``None`` when
    it cannot be.
    """
    source = HERE / f"{name}.cpp"
    if not source.exists():
        return None
    file = _file_name(source)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ragged_optim"
    for folder in (HERE, cache):
        if (folder / file).exists():
            return folder / file
    return compile_to(cache, source)


def compile_to(folder: Path, source: Path) -> Path | None:
    """Compile ``source`` with ``$CXX``, g++ or clang++; ``None`` without a compiler, or when it fails."""
    compilers = (shutil.which(name) for name in (os.environ.get("CXX"), "g++", "clang++") if name)
    compiler = next((found for found in compilers if found), None)
    if compiler is None:
        return None
    library = folder / _file_name(source)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / library.name
            subprocess.run(
                [compiler, *FLAGS, str(source), "-o", str(made)], check=True, capture_output=True, timeout=120
            )
            made.replace(library)  # atomic: ranks may build at the same time
    except (OSError, subprocess.SubprocessError):
        return None
    return library


def _file_name(source: Path) -> str:
    # By its content: a library of an older source is not taken for this one.
    key = hashlib.sha256(b"\0".join([source.read_bytes(), *map(str.encode, FLAGS)])).hexdigest()[:16]
    return f"{source.stem}-{key}.so"
