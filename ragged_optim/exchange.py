"""Whole matrices at their owner: gather shards, update, scatter back.

A batch takes about one matrix per owner. One all-to-all-v brings every owner the shards of its matrix, one brings
every rank its shard of the updates; the transfers of the neighbouring batches overlap the iteration::

    gather   b+1       =====>
    update   b     ##########
    scatter  b-1       =====>

The shards of a matrix arrive in rank order, which for row shards is the order of its elements: with one matrix per
owner in a batch, the receive buffer *is* the matrix and its update *is* the send buffer. Matrices that lie whole on
their owner never enter a batch. Before the first batch the ranks agree on which gradients exist: one small
all-reduce, and none when nothing moves.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ragged_optim.layout import Fragment, Layout, Matrix
from ragged_optim.owners import Job
from ragged_optim.rule import MatrixRule
from ragged_optim.state import Tiled

__all__ = ["BATCH_BYTES", "Exchange", "Live", "MatrixParam"]

# Small matrices share a batch up to this size per owner: below it latency counts more than the copy that sharing costs.
BATCH_BYTES = 1 << 20


@dataclass(eq=False)
class MatrixParam:
    """A parameter under a ``MatrixRule``: its matrices, what each rank holds of them, and who owns them."""

    name: str
    rule: MatrixRule
    group: dict[str, Any]
    layout: Layout
    matrices: tuple[Matrix, ...]
    fragments: tuple[tuple[Fragment | None, ...], ...]
    wire: torch.dtype
    owners: list[int] = field(default_factory=list)

    def job(self, index: int) -> Job:
        """Matrix ``index`` as the balance of owners sees it."""
        matrix = self.matrices[index]
        held = tuple(fragment.numel * self.wire.itemsize if fragment else 0 for fragment in self.fragments[index])
        return Job(f"{self.name}[{index}]", self.rule.cost(matrix.rows, matrix.cols, self.group), held)

    def stays(self, index: int) -> bool:
        """Whether matrix ``index`` lies whole on its owner."""
        matrix, held = self.matrices[index], self.fragments[index][self.owners[index]]
        return held is not None and held.numel == matrix.rows * matrix.cols

    @property
    def moves(self) -> bool:
        """Whether any matrix of this parameter has to move."""
        return any(not self.stays(index) for index in range(len(self.matrices)))


@dataclass(eq=False)
class Live:
    """One step of one parameter: local tensors, and its direction once computed.

    ``grad`` may be ``None`` only where nothing of the parameter lies here. ``owned[i]``: the states of matrix i, if
    owned here. ``tiled``: the 8-bit states, by the rule's own key.
    """

    of: MatrixParam
    param: Tensor
    grad: Tensor | None
    state: dict[str, Tensor]
    owned: Mapping[int, dict[str, Tensor]]
    tiled: Mapping[str, Tiled] = field(default_factory=dict)
    _direction: Tensor | None = None

    def direction(self) -> Tensor:
        """This rank's shard of the direction in the wire dtype, computed once, in the parameter's local shape."""
        if self._direction is None:
            if self.grad is None or self.param.numel() == 0:
                self._direction = self.param.new_empty(self.param.shape, dtype=self.of.wire)
            else:
                read = {key: tiled.read() for key, tiled in self.tiled.items()}
                state = {**self.state, **read}
                direction = self.of.rule.direction(self.param, self.grad, state, self.of.group)
                for key, tiled in self.tiled.items():
                    tiled.write(state[key])
                self._direction = direction.to(self.of.wire)
        return self._direction

    def update(self, index: int, matrix: Tensor) -> Tensor:
        """At the owner of matrix ``index``: its update, contiguous, in the wire dtype."""
        if self.of.rule.needs_finite and not bool(matrix.isfinite().all()):
            # An error here would be one of this rank alone, while the others wait for its update.
            where = f"matrix {index} of " if len(self.of.matrices) > 1 else ""
            warnings.warn(
                f"non-finite gradient: {where}parameter {self.of.name!r} and its states are left alone in this step",
                RuntimeWarning,
                stacklevel=2,
            )
            return torch.zeros_like(matrix)
        update = self.of.rule.update(matrix, self.owned.get(index, {}), self.of.group)
        return update.to(self.of.wire).contiguous()

    def apply(self, index: int, fragment: Fragment, update: Tensor) -> None:
        """Apply the flat ``update`` of ``fragment`` of matrix ``index`` to what lies here."""
        matrix, here = self.of.matrices[index], slice(fragment.at, fragment.at + fragment.numel)
        if fragment.numel == self.param.numel():
            param, state, update = self.param, self.state, update.view(self.param.shape)
        else:
            param = _flat(self.param, self.of.name)[here]
            state = {
                key: _flat(value, self.of.name)[here] if value.shape == self.param.shape else value
                for key, value in self.state.items()
            }
        self.of.rule.apply(param, update, state, self.of.group, (matrix.rows, matrix.cols))

    def compute_here(self, index: int) -> None:
        """Direction, update and step of a matrix that lies whole on this rank."""
        fragment, matrix = self.of.fragments[index][self.of.layout.rank], self.of.matrices[index]
        assert fragment is not None and fragment.numel == matrix.rows * matrix.cols
        direction = self.direction()
        if fragment.numel != direction.numel():
            direction = _flat(direction, self.of.name)[fragment.at : fragment.at + fragment.numel]
        self.apply(
            index, fragment, self.update(index, direction.reshape(matrix.rows, matrix.cols).contiguous()).view(-1)
        )


def _flat(tensor: Tensor, name: str) -> Tensor:
    if not tensor.is_contiguous():
        raise ValueError(
            f"parameter {name!r} holds several matrices or a shard of one and is not contiguous; make it contiguous"
        )
    return tensor.view(-1)


@dataclass(frozen=True)
class _Move:
    """Matrix ``index`` of ``live`` in a batch."""

    live: Live
    index: int

    @property
    def owner(self) -> int:
        return self.live.of.owners[self.index]

    @property
    def matrix(self) -> Matrix:
        return self.live.of.matrices[self.index]

    @property
    def fragments(self) -> tuple[Fragment | None, ...]:
        return self.live.of.fragments[self.index]

    @property
    def in_order(self) -> bool:
        """Whether the fragments in rank order are the elements in order."""
        at = 0
        for fragment in self.fragments:
            if fragment is None:
                continue
            if fragment.width != self.matrix.cols or fragment.row * self.matrix.cols + fragment.start != at:
                return False
            at += fragment.numel
        return True


class Exchange:
    """The matrices that lie on the ranks of one process group."""

    def __init__(self, group: dist.ProcessGroup, params: Sequence[MatrixParam]) -> None:
        self.group = group
        self.size, self.rank = group.size(), group.rank()
        self.params = list(params)
        self.moving = [param for param in self.params if param.moves]
        # Of those, the ones that have a gradient in this step, on every rank that holds a part.
        self.present: set[MatrixParam] = set()

    def agree(self, grads: Sequence[Tensor | None], params: Sequence[Tensor]) -> None:
        """Raise the same error on every rank when a parameter that moves has a gradient on some ranks only.

        ``grads`` and ``params``: local, one for each of ``self.moving``. One all-reduce of two bytes per parameter.
        """
        if not self.moving:
            return
        # A rank that holds nothing of a parameter has no say.
        has = [grad is not None or param.numel() == 0 for grad, param in zip(grads, params, strict=True)]
        lacks = [grad is None or param.numel() == 0 for grad, param in zip(grads, params, strict=True)]
        votes = torch.tensor([has, lacks], dtype=torch.uint8, device=params[0].device)
        dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=self.group)
        all_have, all_lack = votes.tolist()
        self.present = {param for param, yes in zip(self.moving, all_have, strict=True) if yes}
        split = [
            param.name for param, yes, no in zip(self.moving, all_have, all_lack, strict=True) if not yes and not no
        ]
        if split:
            names = ", ".join(repr(name) for name in split[:5]) + (", ..." if len(split) > 5 else "")
            raise RuntimeError(
                f"{len(split)} parameter(s) under a matrix rule have a gradient on some ranks and None on others: "
                f"{names}. Their matrices are gathered from all ranks, so all must have one: use the parameter on "
                "every rank (multiply by 0 where it is not needed), or set its gradient to None everywhere before "
                "step()"
            )

    def run(self, lives: Sequence[Live]) -> None:
        """Update every parameter of ``lives`` (those of this group that have a gradient, in the same order on all
        ranks).
        """
        batches = self._batches(lives)
        gathers = deque([_Gather(self, batches[0])] if batches else [])
        scatters: deque[_Scatter] = deque()
        for live in lives:
            for index, owner in enumerate(live.of.owners):
                if owner == self.rank and live.of.stays(index):
                    live.compute_here(index)
        for number, batch in enumerate(batches):
            matrices = gathers.popleft().wait()
            if number + 1 < len(batches):
                gathers.append(_Gather(self, batches[number + 1]))
            mine = [move for move in batch if move.owner == self.rank]
            updates = [move.live.update(move.index, matrix) for move, matrix in zip(mine, matrices, strict=True)]
            scatters.append(_Scatter(self, batch, updates))
            if len(scatters) > 2:
                scatters.popleft().apply()
        for scatter in scatters:
            scatter.apply()

    def _batches(self, lives: Iterable[Live]) -> list[list[_Move]]:
        """Every owner's matrices, the expensive ones first, about ``BATCH_BYTES`` of them in a batch.

        One wire dtype a batch.
        """
        queues: dict[torch.dtype, list[list[_Move]]] = {}
        for live in lives:
            for index, owner in enumerate(live.of.owners):
                if not live.of.stays(index):
                    queues.setdefault(live.of.wire, [[] for _ in range(self.size)])[owner].append(_Move(live, index))
        batches = []
        for wire, queue_of in queues.items():
            for queue in queue_of:
                queue.sort(key=lambda move: -move.live.of.job(move.index).flops)
            heads = [0] * self.size
            while any(head < len(queue) for head, queue in zip(heads, queue_of, strict=True)):
                batch = []
                for owner, queue in enumerate(queue_of):
                    room = BATCH_BYTES
                    while heads[owner] < len(queue) and room > 0:
                        move = queue[heads[owner]]
                        numel = move.matrix.rows * move.matrix.cols * wire.itemsize
                        if room < BATCH_BYTES and numel > room:
                            break
                        room -= numel
                        batch.append(move)
                        heads[owner] += 1
                batches.append(batch)
        return batches


def _numels(moves: Sequence[_Move], rank: int) -> int:
    return sum(fragment.numel for move in moves if (fragment := move.fragments[rank]) is not None)


class _Gather:
    """Shards of a batch on their way to the owners."""

    def __init__(self, exchange: Exchange, batch: Sequence[_Move]) -> None:
        self.exchange, rank, size = exchange, exchange.rank, exchange.size
        self.mine = [move for move in batch if move.owner == rank]
        parts, send_sizes = [], [0] * size
        for move in batch:  # in the order of owners
            fragment = move.fragments[rank]
            if fragment is not None:
                flat = _flat(move.live.direction(), move.live.of.name)
                parts.append(flat[fragment.at : fragment.at + fragment.numel])
                send_sizes[move.owner] += fragment.numel
        sample = batch[0].live
        # Held until wait(): the transfer reads it.
        self.send = (
            torch.cat(parts)
            if len(parts) > 1
            else parts[0].contiguous()
            if parts
            else sample.param.new_empty(0, dtype=sample.of.wire)
        )
        self.sizes = [_numels(self.mine, source) for source in range(size)]
        self.received = self.send.new_empty(sum(self.sizes))
        self.work = dist.all_to_all_single(
            self.received, self.send, self.sizes, send_sizes, group=exchange.group, async_op=True
        )

    def wait(self) -> list[Tensor]:
        """The matrices owned here, in the batch's order."""
        self.work.wait()
        del self.send
        if len(self.mine) == 1 and self.mine[0].in_order:
            matrix = self.mine[0].matrix
            return [self.received.view(matrix.rows, matrix.cols)]
        parts: list[list[tuple[Fragment, Tensor]]] = [[] for _ in self.mine]
        for source, chunk in enumerate(torch.split(self.received, self.sizes)):
            at = 0
            for move, part in zip(self.mine, parts, strict=True):
                fragment = move.fragments[source]
                if fragment is not None:
                    part.append((fragment, chunk[at : at + fragment.numel]))
                    at += fragment.numel
        return [_assemble(move, part) for move, part in zip(self.mine, parts, strict=True)]


def _assemble(move: _Move, parts: Sequence[tuple[Fragment, Tensor]]) -> Tensor:
    matrix = move.matrix
    if move.in_order:
        return torch.cat([part for _, part in parts]).view(matrix.rows, matrix.cols)
    boxes: dict[tuple[int, int, int, int], list[tuple[Fragment, Tensor]]] = {}
    for fragment, part in parts:
        boxes.setdefault((fragment.row, fragment.height, fragment.col, fragment.width), []).append((fragment, part))
    whole = parts[0][1].new_empty(matrix.rows, matrix.cols)
    for (row, height, col, width), pieces in boxes.items():
        pieces.sort(key=lambda piece: piece[0].start)
        whole[row : row + height, col : col + width] = torch.cat([part for _, part in pieces]).view(height, width)
    return whole


def _cut(update: Tensor, fragment: Fragment) -> Tensor:
    """The flat elements of ``fragment`` in the whole ``update``."""
    box = update[fragment.row : fragment.row + fragment.height, fragment.col : fragment.col + fragment.width]
    return box.reshape(-1)[fragment.start : fragment.start + fragment.numel]


class _Scatter:
    """Updates of a batch on their way back to the shards."""

    def __init__(self, exchange: Exchange, batch: Sequence[_Move], updates: Sequence[Tensor]) -> None:
        self.exchange, rank, size = exchange, exchange.rank, exchange.size
        self.batch = batch
        mine = [move for move in batch if move.owner == rank]
        send_sizes = [_numels(mine, target) for target in range(size)]
        if len(mine) == 1 and mine[0].in_order:
            self.send = updates[0].view(-1)
        elif mine:
            parts = [
                _cut(update, fragment)
                for target in range(size)
                for move, update in zip(mine, updates, strict=True)
                if (fragment := move.fragments[target]) is not None
            ]
            self.send = torch.cat(parts)
        else:
            self.send = batch[0].live.param.new_empty(0, dtype=batch[0].live.of.wire)
        sizes = [0] * size
        for move in batch:
            fragment = move.fragments[rank]
            if fragment is not None:
                sizes[move.owner] += fragment.numel
        self.received = self.send.new_empty(sum(sizes))
        self.work = dist.all_to_all_single(
            self.received, self.send, sizes, send_sizes, group=exchange.group, async_op=True
        )

    def apply(self) -> None:
        """Wait, and step what lies here."""
        self.work.wait()
        del self.send
        at = 0
        for move in self.batch:  # in the order of owners, as sent
            fragment = move.fragments[self.exchange.rank]
            if fragment is not None:
                move.live.apply(move.index, fragment, self.received[at : at + fragment.numel])
                at += fragment.numel
