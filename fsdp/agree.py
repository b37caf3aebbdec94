"""All ranks do the same, or all raise the same error: what each rank is about to do is compared before anything is
done.

A rank that was given no mesh at all (a wrong type) does not know in which group the others compare. Who has waited for
a while says so in the store of the process group, where that rank looks; it then takes part in their comparison, with
its error. Likewise two ranks that wait for each other in different groups find out there.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["agree", "tell"]

_KNOWN: dict[str, type[Exception]] = {e.__name__: e for e in (TypeError, ValueError, RuntimeError, NotImplementedError)}
# Seconds after which a rank says that it waits / for which one looks for the ranks that wait for it, at first and after
# it has found some / between looks.
_PATIENCE, _SEARCH, _MORE, _PAUSE = 0.2, 20.0, 1.0, 0.05
# How many comparisons this rank has begun in each group, and how many calls of ``agree`` in all (under "").
_turns: Counter[str] = Counter()


def agree(mesh: DeviceMesh, what: str, describe: Callable[[], str]) -> None:
    """Run ``describe`` on every rank of ``mesh`` and compare what it returns or raises.

    ``describe`` must not communicate. It returns one line per item (a parameter and its layout). If it raises on any
    rank, every rank raises that error; if the texts differ, every rank raises a ``ValueError`` with the first line that
    differs. In the usual case eight bytes per rank are exchanged.
    """
    error: Exception | None = None
    _turns[""] += 1
    try:
        text = describe()
    except Exception as raised:
        error, text = raised, f"{type(raised).__name__}: {raised}"
    if mesh.get_coordinate() is None:
        # Not a part of any group of this mesh: nobody waits for this rank, and nobody would hear it.
        raise error or ValueError(f"{what}: this rank is not in {mesh}")
    mark = ("raised " if error else "agreed ") + text
    agreed: Exception | None = None
    for dim in range(mesh.ndim):
        if mesh.size(dim) > 1:
            found = _compare(mesh.get_group(dim), f"mesh dimension {dim}", what, mark)
            if found is not None and agreed is None:
                # The ranks along the other dimensions wait for this one too, and hear of it from here.
                agreed, mark = found, f"raised {type(found).__name__}: {found}"
    if agreed is not None:
        raise agreed from error
    if error is not None:
        raise error


def tell(error: Exception, what: str) -> NoReturn:
    """Raise ``error``, here and on the ranks that wait for this one to compare, in whatever group they do."""
    mark = f"raised {type(error).__name__}: {error}"
    store, me, world = c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    joined: set[tuple[str, int]] = set()
    _turns[""] += 1
    begun = time.monotonic()
    end = begun + _SEARCH
    # Who waits in a later call, having heard of this error or not, is not waiting for it. Ranks usually count alike.
    call: int | None = _turns[""]
    with _notice(store, "?"):
        while world > 1 and time.monotonic() < end:
            notices = {rank: _read(store, rank) for rank in range(world) if rank != me}
            if not joined and all(name == "?" for name, *_ in notices.values()):
                # Everybody made this mistake, or another.
                _compare(dist.group.WORLD, "the world", what, mark)
                break
            if not joined and time.monotonic() - begun > _SEARCH / 2:
                call = None
            for rank, (name, turn, their_call) in notices.items():
                group = _group_of(name, rank)
                if group is not None and (name, turn) not in joined and call in (None, their_call):
                    joined.add((name, turn))
                    call = their_call
                    _compare(group, "its group", what, mark)
                    end = time.monotonic() + _MORE
                    break
            else:
                time.sleep(_PAUSE)  # as in _wait
    raise error


def _compare(group: Any, where: str, what: str, mark: str) -> Exception | None:
    """The error of the first rank of ``group`` that has one, or what the ranks disagree about."""
    size, device = group.size(), c10d._get_object_coll_device(group)
    number = int.from_bytes(hashlib.sha256(mark.encode()).digest()[:8], "little", signed=True)
    mine = torch.tensor([number], dtype=torch.int64, device=device)
    all_of_them = [torch.empty_like(mine) for _ in range(size)]
    _turns[group.group_name] += 1
    _wait(dist.all_gather(all_of_them, mine, group=group, async_op=True), group, what)
    if all(int(other) == number for other in all_of_them):
        return None
    marks: list[str] = [""] * size
    dist.all_gather_object(marks, mark, group=group)
    for rank, other in enumerate(marks):
        if other.startswith("raised "):
            name, _, message = other.removeprefix("raised ").partition(": ")
            return _KNOWN.get(name, RuntimeError)(f"{message} (on rank {rank} of {where})")
    return ValueError(f"{what}: the ranks of {where} disagree; {_first_difference(marks)}")


def _wait(work: Any, group: Any, what: str) -> None:
    """Wait for a comparison; if that takes long, tell in the store in which group, and look who waits elsewhere."""
    begun = time.monotonic()
    while not work.is_completed() and time.monotonic() - begun < _PATIENCE:
        time.sleep(1e-5)  # about what the comparison itself takes; Work.wait would not let this rank look elsewhere
    if not work.is_completed():
        store, name, look = c10d._get_default_store(), group.group_name, 2.0
        with _notice(store, f"{name}|{_turns[name]}|{_turns['']}"):
            while not work.is_completed():
                if time.monotonic() - begun > look:
                    look *= 1.5
                    if (crossed := _crossed(store, group)) is not None:
                        raise ValueError(f"{what}: {crossed}")
                time.sleep(_PAUSE)  # the store is one process's, which all ranks would ask without pause
    work.wait()


def _crossed(store: Store, group: Any) -> str | None:
    """Two ranks that wait for each other in two groups, one of which is ``group``: neither will ever come."""
    me, name, ranks = dist.get_rank(), group.group_name, dist.get_process_group_ranks(group)
    if store.check([_KEY + "crossed"]):
        names, _, message = store.get(_KEY + "crossed").decode().partition("|")
        if name in names.split(","):
            return message
    for rank in ranks[:64]:
        other_name, turn, _ = _read(store, rank) if rank != me else ("", 0, 0)
        other = _group_of(other_name, rank)
        # Not one in which this rank has been before: the other has not cleared its notice yet.
        if other is None or other_name == name or _turns[other_name] >= turn:
            continue
        pair = sorted([(me, ranks), (rank, dist.get_process_group_ranks(other))])
        told = " and ".join(f"rank {one} with a mesh that joins it to ranks {others}" for one, others in pair)
        message = f"{told} wait for each other; give every rank the same mesh. These groups cannot be used any more"
        store.set(_KEY + "crossed", f"{name},{other_name}|{message}")
        return message
    return None


_KEY = "fsdp.agree/"


@contextmanager
def _notice(store: Store, text: str) -> Iterator[None]:
    """Where this rank waits: ``name|turn|call`` of a group, or ``?`` for whoever cannot know."""
    key = f"{_KEY}{dist.get_rank()}"
    store.set(key, text)
    try:
        yield
    finally:
        store.set(key, "")


def _read(store: Store, rank: int) -> tuple[str, int, int]:
    key = f"{_KEY}{rank}"
    if not store.check([key]):
        return "", 0, 0
    name, turn, call, *_ = [*store.get(key).decode().split("|"), "0", "0"]
    return name, int(turn), int(call)


def _group_of(name: str, rank: int) -> Any:
    """The group of that name, if ``rank`` and this one are in it."""
    if name in ("", "?"):
        return None
    try:
        group = c10d._resolve_process_group(name)  # type: ignore[attr-defined,arg-type]  # private, and typed for its own names
    except (RuntimeError, ValueError):
        return None
    return group if {rank, dist.get_rank()} <= set(dist.get_process_group_ranks(group)) else None


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
