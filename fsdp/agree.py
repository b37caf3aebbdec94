"""All ranks do the same, or all raise the same error: what each rank is about to do is compared before anything is
done.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["agree"]

_KNOWN: dict[str, type[Exception]] = {e.__name__: e for e in (TypeError, ValueError, RuntimeError, NotImplementedError)}


def agree(mesh: DeviceMesh, what: str, describe: Callable[[], str]) -> None:
    """Run ``describe`` on every rank of ``mesh`` and compare what it returns or raises.

    ``describe`` must not communicate. It returns one line per item (a parameter and its layout). If it raises on any
    rank, every rank raises that error; if the texts differ, every rank raises a ``ValueError`` with the first line that
    differs. In the usual case eight bytes per rank are exchanged.
    """
    error: Exception | None = None
    try:
        text = describe()
    except Exception as raised:
        error, text = raised, f"{type(raised).__name__}: {raised}"
    if mesh.get_coordinate() is None:
        # Not a part of any group of this mesh: nobody waits for this rank, and nobody would hear it.
        raise error or ValueError(f"{what}: this rank is not in {mesh}")
    mark = ("raised " if error else "agreed ") + text
    for dim in range(mesh.ndim):
        _compare(mesh, dim, what, mark, error)
    if error is not None:
        raise error


def _compare(mesh: DeviceMesh, dim: int, what: str, mark: str, error: Exception | None) -> None:
    size = mesh.size(dim)
    if size == 1:
        return
    group = mesh.get_group(dim)
    device = (
        "cpu" if mesh.device_type == "cpu" else torch.device(mesh.device_type, torch.accelerator.current_device_index())
    )
    number = int.from_bytes(hashlib.sha256(mark.encode()).digest()[:8], "little", signed=True)
    mine = torch.tensor([number], dtype=torch.int64, device=device)
    all_of_them = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(all_of_them, mine, group=group)
    if all(int(other) == number for other in all_of_them):
        return
    marks: list[str] = [""] * size
    dist.all_gather_object(marks, mark, group=group)
    for rank, other in enumerate(marks):
        if other.startswith("raised "):
            name, _, message = other.removeprefix("raised ").partition(": ")
            raise _KNOWN.get(name, RuntimeError)(f"{message} (on rank {rank} of mesh dimension {dim})") from error
    raise ValueError(f"{what}: the ranks of mesh dimension {dim} disagree; {_first_difference(marks)}")


def _first_difference(marks: list[str]) -> str:
    first = marks[0].removeprefix("agreed ").split("\n")
    for rank, mark in enumerate(marks):
        lines = mark.removeprefix("agreed ").split("\n")
        for ours, theirs in zip(first, lines, strict=False):
            if ours != theirs:
                return f"rank 0 has {ours!r}, rank {rank} has {theirs!r}; give every rank the same model and policy"
        if len(lines) != len(first):
            return f"rank 0 has {len(first)} entries, rank {rank} has {len(lines)}; give every rank the same model"
    raise AssertionError("unreachable: the marks differ")
