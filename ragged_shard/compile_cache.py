"""What the keys of torch's compile caches lack: a graph is traced for one rank, through the code of this package.

DTensor's key holds the global shape and the placements, which are the same on all ranks, and nothing of the libraries
that were traced. Without the rank, one with two rows ran the code that another had compiled for one; without the
version, code from before an update ran after it.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

import torch.distributed as dist

__all__ = ["cache_key"]


def cache_key() -> str:
    """The rank in the world and a digest of this package."""
    return f"{dist.get_rank() if dist.is_initialized() else 0}-{_sources()}"


@lru_cache(maxsize=1)
def _sources() -> str:
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
