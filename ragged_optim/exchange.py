"""Whole matrices at their owner: gather shards, update, scatter back.

A batch takes about one matrix per owner. One all-to-all-v brings every owner the shards of its matrix, one brings
every rank its shard of the updates; the transfers of the neighbouring batches overlap the iteration::

    gather   b+1       =====>
    update   b     ##########
    scatter  b-1       =====>

The shards of a matrix arrive in rank order, which for row shards is the order of its elements. What lies at the owner
already does not travel, and matrices that lie whole there never enter a batch.
Before the first batch the ranks agree on which gradients exist: one small reduction, and none when nothing moves
(unless gradients that are not finite are to be skipped).

Matrices of one shape are handed to their rule together, which may multiply them in batches. What travels lies in
buffers that are used again and again.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ragged_optim.layout import Fragment, Layout, Matrix
from ragged_optim.owners import Job
from ragged_optim.rule import MatrixRule
from ragged_optim.state import Tiled, keep_tensors
from ragged_shard.collectives import Pending, all_reduce_small, all_to_all_v_into

__all__ = ["BATCH_BYTES", "TOGETHER_BYTES", "Exchange", "Live", "MatrixParam", "compute_here"]

# Matrices share a batch up to this size per owner: smaller transfers cost latency, and fewer matrices iterate together.
BATCH_BYTES = 4 << 20
# Matrices that go to their rule together: more of them would not stay in a core's cache.
TOGETHER_BYTES = 4 << 20


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
        """Whether any matrix of this parameter has to move; the same before its owners are chosen."""
        if not self.owners:
            return any(self.job(index).local is None for index in range(len(self.matrices)))
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
    _taken: int = 0

    def direction(self) -> Tensor:
        """This rank's shard of the direction in the wire dtype, computed once, in the parameter's local shape."""
        if self._direction is None:
            if self.grad is None or self.param.numel() == 0:
                self._direction = self.param.new_empty(self.param.shape, dtype=self.of.wire)
            else:
                read = {key: tiled.read() for key, tiled in self.tiled.items()}
                state = {**self.state, **read} if read else self.state
                before = dict(state)
                direction = self.of.rule.direction(self.param, self.grad, state, self.of.group)
                _check(direction, "direction", self.param.shape, self.of.rule)
                keep_tensors(state, before, self.of.rule.name)
                for key, tiled in self.tiled.items():
                    tiled.write(state[key])
                self._direction = direction.to(self.of.wire)
        return self._direction

    def take(self, fragment: Fragment) -> Tensor:
        """The flat direction of ``fragment``, which is asked for once; the direction goes with the last one."""
        direction = self.direction()
        self._taken += fragment.numel
        if self._taken == self.param.numel():
            self._direction = None
        if fragment.numel == direction.numel():
            return direction.reshape(-1)
        return _flat(direction, self.of.name)[fragment.at : fragment.at + fragment.numel]

    def apply(self, index: int, fragment: Fragment, update: Tensor) -> None:
        """Apply the flat ``update`` of ``fragment`` of matrix ``index`` to what lies here."""
        if self.of.rule.needs_finite and bool(update.isnan().all()):
            return
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


Part = tuple[Live, int]  # matrix ``int`` of a parameter, in one step


def _alike(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Matrices of one shape and param group together, up to ``TOGETHER_BYTES``."""
    kinds: dict[tuple[int, int, int, torch.dtype], list[Part]] = {}
    for live, index in parts:
        matrix = live.of.matrices[index]
        kinds.setdefault((id(live.of.group), matrix.rows, matrix.cols, live.of.wire), []).append((live, index))
    for (_, rows, cols, wire), alike in kinds.items():
        several = max(1, TOGETHER_BYTES // (rows * cols * wire.itemsize))
        for start in range(0, len(alike), several):
            yield alike[start : start + several]


def _updates(parts: Sequence[Part], matrices: Sequence[Tensor]) -> list[Tensor]:
    """At the owner of ``parts``, which are alike: their updates, in the wire dtype.

    The next call may overwrite them.
    """
    of = parts[0][0].of
    states = [live.owned.get(index, {}) for live, index in parts]
    before = [dict(state) for state in states]
    if not of.rule.needs_finite:
        updates = of.rule.update_all(matrices, states, of.group)
        for update, state, tensors in zip(updates, states, before, strict=True):
            _check(update, "update", matrices[0].shape, of.rule)
            keep_tensors(state, tensors, of.rule.name)
        return [update.to(of.wire) for update in updates]
    updates = []
    for (live, index), matrix, state, tensors in zip(parts, matrices, states, before, strict=True):
        # A norm whose square overflows is as bad as an infinite one: so would the products that the rule sums up.
        if float(torch.linalg.vector_norm(matrix)) <= math.sqrt(torch.finfo(matrix.dtype).max):
            update = of.rule.update(matrix, state, of.group)
            _check(update, "update", matrix.shape, of.rule)
            keep_tensors(state, tensors, of.rule.name)
            updates.append(update.to(of.wire))
            continue
        # An error here would be one of this rank alone, while the others wait for its update.
        where = f"matrix {index} of " if len(live.of.matrices) > 1 else ""
        warnings.warn(
            f"non-finite gradient: {where}parameter {live.of.name!r} and its states are left alone in this step",
            RuntimeWarning,
            stacklevel=2,
        )
        updates.append(torch.full_like(matrix, torch.nan))
    return updates


def _check(returned: object, by: str, shape: torch.Size, rule: MatrixRule) -> None:
    if not isinstance(returned, Tensor) or returned.shape != shape:
        found = f"a tensor of shape {tuple(returned.shape)}" if isinstance(returned, Tensor) else repr(returned)
        raise ValueError(f"rule {rule.name!r}: {by}() returns a tensor of shape {tuple(shape)} here, not {found}")


def compute_here(parts: Iterable[Part]) -> None:
    """Direction, update and step of matrices that lie whole on this rank."""
    for alike in _alike(parts):
        matrices, fragments = [], []
        for live, index in alike:
            fragment, matrix = live.of.fragments[index][live.of.layout.rank], live.of.matrices[index]
            assert fragment is not None and fragment.numel == matrix.rows * matrix.cols
            matrices.append(live.take(fragment).view(matrix.rows, matrix.cols))
            fragments.append(fragment)
        for (live, index), fragment, update in zip(alike, fragments, _updates(alike, matrices), strict=True):
            live.apply(index, fragment, update.reshape(-1))


def _flat(tensor: Tensor, name: str) -> Tensor:
    if not tensor.is_contiguous():
        raise ValueError(
            f"parameter {name!r} holds several matrices or a shard of one and is not contiguous; make it contiguous"
        )
    return tensor.view(-1)


@dataclass(frozen=True)
class _Move:
    """Matrix ``index`` of ``of`` in a batch."""

    of: MatrixParam
    index: int

    @property
    def owner(self) -> int:
        return self.of.owners[self.index]

    @property
    def matrix(self) -> Matrix:
        return self.of.matrices[self.index]

    @property
    def fragments(self) -> tuple[Fragment | None, ...]:
        return self.of.fragments[self.index]

    @property
    def numel(self) -> int:
        return self.matrix.rows * self.matrix.cols

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


class _Batch:
    """Some matrices on their way together, about one per owner: who sends whom how much."""

    def __init__(self, moves: Sequence[_Move], rank: int, size: int) -> None:
        self.moves, self.wire = list(moves), moves[0].of.wire  # in the order of owners
        self.mine = [move for move in moves if move.owner == rank]
        # What lies here of the others' matrices, in the order of owners, and how much of it is each owner's.
        here = [(move, fragment) for move in moves if (fragment := move.fragments[rank]) is not None]
        self.away = [(move, fragment) for move, fragment in here if move.owner != rank]
        self.out = [sum(f.numel for move, f in self.away if move.owner == owner) for owner in range(size)]
        # What lies at each rank of the matrices owned here: how much, and where in what is received (and sent back);
        # ``None`` for what lies here, which does not travel.
        self.into = [0] * size
        self.places: list[list[tuple[int | None, Fragment]]] = [[] for _ in self.mine]
        at = 0
        for source in range(size):
            for places, move in zip(self.places, self.mine, strict=True):
                fragment = move.fragments[source]
                if fragment is None:
                    continue
                places.append((None if source == rank else at, fragment))
                if source != rank:
                    self.into[source] += fragment.numel
                    at += fragment.numel
        # Then what is received is the matrix.
        self.is_matrix = len(self.mine) == 1 and self.mine[0].in_order and self.mine[0].fragments[rank] is None


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:5])) + (", ..." if len(names) > 5 else "")


class Exchange:
    """The matrices that lie on the ranks of one process group."""

    def __init__(self, group: dist.ProcessGroup, params: Sequence[MatrixParam]) -> None:
        self.group = group
        self.size, self.rank = group.size(), group.rank()
        # Those about which the ranks agree before a step; where one moves, all: owners were chosen by what is frozen.
        all_vote = any(param.moves for param in params)
        self.voting = [param for param in params if all_vote or param.group.get("skip_nonfinite")]
        # Of those, the ones that have a gradient in this step, on every rank that holds a part ...
        self.present: set[MatrixParam] = set()
        # ... and the ones to leave alone, because it is not finite on some rank.
        self.spoilt: set[MatrixParam] = set()
        self._planned: tuple[list[tuple[MatrixParam, torch.dtype]], list[_Batch]] | None = None
        # Buffers that no transfer uses, by dtype.
        self._free: dict[torch.dtype, list[Tensor]] = {}

    def agree(
        self,
        has: Sequence[bool],
        lacks: Sequence[bool],
        finite: Sequence[bool],
        frozen: Sequence[bool],
        refused: str,
        device: torch.device,
    ) -> str:
        """Why no rank can make this step: a parameter that moves has a gradient on some ranks only, one is frozen on
        some ranks only, or some rank has ``refused`` a gradient, here or elsewhere; the same on every rank, and empty
        where all is well.

        One for each of ``self.voting``: whether it can be updated as far as this rank is concerned, whether it can be
        left alone, whether its gradient here is finite, and whether it has no states here. A rank that holds nothing of
        a parameter agrees to the first two. One reduction of six bytes per parameter.
        """
        self.spoilt = set()
        if not self.voting:
            return refused
        taken = [not refused] * len(has)
        trained = [not here for here in frozen]
        votes = torch.tensor([has, lacks, finite, taken, frozen, trained], dtype=torch.uint8, device=device)
        all_reduce_small(votes.view(-1), dist.ReduceOp.MIN, self.group)
        all_have, all_lack, all_finite, all_taken, all_frozen, all_trained = votes.tolist()
        if not all(all_taken):
            said: list[str] = [""] * self.size
            dist.all_gather_object(said, refused, group=self.group)
            return next(filter(None, said))
        apart = [
            param.name
            for param, yes, no in zip(self.voting, all_frozen, all_trained, strict=True)
            if not yes and not no
        ]
        if apart:
            return (
                f"{len(apart)} parameter(s) under a matrix rule are frozen on some ranks and not on others: "
                f"{_some(apart)}. Which rank computes which matrix depends on that, so requires_grad must be the same "
                "on every rank when the optimizer is made, and be changed on all of them"
            )
        self.spoilt = {param for param, yes in zip(self.voting, all_finite, strict=True) if not yes}
        self.present = {param for param, yes in zip(self.voting, all_have, strict=True) if yes} - self.spoilt
        split = [
            param.name
            for param, yes, no in zip(self.voting, all_have, all_lack, strict=True)
            if param.moves and not yes and not no
        ]
        if split:
            return (
                f"{len(split)} parameter(s) under a matrix rule have a gradient on some ranks and None on others: "
                f"{_some(split)}. Their matrices are gathered from all ranks, so all must have one: use the parameter "
                "on every rank (multiply by 0 where it is not needed), or set its gradient to None everywhere before "
                "step()"
            )
        return ""

    def run(self, lives: Sequence[Live]) -> None:
        """Update every parameter of ``lives`` (those of this group that have a gradient, in the same order on all
        ranks).
        """
        live_of = {live.of: live for live in lives}
        batches = [_Transit(self, batch, live_of) for batch in self._batches(list(live_of))]
        if batches:
            batches[0].gather()
        compute_here(
            (live, index)
            for live in lives
            for index, owner in enumerate(live.of.owners)
            if owner == self.rank and live.of.stays(index)
        )
        for number, batch in enumerate(batches):
            matrices = batch.arrive()
            if number + 1 < len(batches):
                batches[number + 1].gather()
            batch.scatter(matrices)
            if number > 1:
                batches[number - 2].apply()
        for batch in batches[-2:]:
            batch.apply()

    def buffer(self, numel: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        """``numel`` elements that no transfer uses; ``give_back`` them."""
        free = self._free.setdefault(dtype, [])
        fits = min((i for i, t in enumerate(free) if t.numel() >= numel), key=lambda i: free[i].numel(), default=None)
        whole = free.pop(fits) if fits is not None else like.new_empty(max(numel, 1), dtype=dtype)
        return whole[:numel]

    def give_back(self, buffer: Tensor) -> None:
        """``buffer`` is free again: its transfer has been waited for."""
        assert buffer._base is not None
        self._free[buffer.dtype].append(buffer._base)

    def _batches(self, params: Sequence[MatrixParam]) -> list[_Batch]:
        """Every owner's matrices, the expensive ones first, about ``BATCH_BYTES`` of them in a batch.

        One wire dtype a batch. Planned anew when other parameters have a gradient than in the last step.
        """
        key = [(param, param.wire) for param in params]
        if self._planned is None or self._planned[0] != key:
            self._planned = key, self._plan(params)
        return self._planned[1]

    def _plan(self, params: Sequence[MatrixParam]) -> list[_Batch]:
        queues: dict[torch.dtype, list[list[_Move]]] = {}
        for param in params:
            for index, owner in enumerate(param.owners):
                if not param.stays(index):
                    queues.setdefault(param.wire, [[] for _ in range(self.size)])[owner].append(_Move(param, index))
        batches = []
        for wire, queue_of in queues.items():
            for queue in queue_of:
                queue.sort(key=lambda move: -move.of.job(move.index).flops)
            heads = [0] * self.size
            while any(head < len(queue) for head, queue in zip(heads, queue_of, strict=True)):
                batch = []
                for owner, queue in enumerate(queue_of):
                    room = BATCH_BYTES
                    while heads[owner] < len(queue) and room > 0:
                        move = queue[heads[owner]]
                        nbytes = move.numel * wire.itemsize
                        if room < BATCH_BYTES and nbytes > room:
                            break
                        room -= nbytes
                        batch.append(move)
                        heads[owner] += 1
                batches.append(_Batch(batch, self.rank, self.size))
        return batches


class _Transit:
    """A batch under way in one step: ``gather``, ``arrive``, ``scatter``, ``apply``."""

    def __init__(self, exchange: Exchange, batch: _Batch, live_of: Mapping[MatrixParam, Live]) -> None:
        self.exchange, self.of, self.live_of = exchange, batch, live_of
        self.like = live_of[batch.moves[0].of].param
        self.under_way = Pending(())
        # The buffer that it reads: held until it has been waited for.
        self.sent: Tensor | None = None

    def gather(self) -> None:
        """Send the shards that lie here to the owners."""
        batch = self.of
        self.shards = self._buffer(sum(batch.into))
        parts = [self.live_of[move.of].take(fragment) for move, fragment in batch.away]
        self.kept = [
            self.live_of[move.of].take(fragment)
            for move, places in zip(batch.mine, batch.places, strict=True)
            for at, fragment in places
            if at is None
        ]
        if len(parts) == 1:
            shards = parts[0].contiguous()  # which the transfer keeps alive
        else:
            self.sent = shards = self._buffer(sum(batch.out))
            if parts:
                torch.cat(parts, out=shards)
        self.under_way = all_to_all_v_into(self.shards, shards, batch.into, batch.out, self.exchange.group)

    def arrive(self) -> list[Tensor]:
        """The matrices owned here, in the batch's order, until ``scatter``."""
        self._wait()
        batch = self.of
        if batch.is_matrix:
            matrix = batch.mine[0].matrix
            return [self.shards.view(matrix.rows, matrix.cols)]
        matrices, kept = [], iter(self.kept)
        for move, places in zip(batch.mine, batch.places, strict=True):
            parts = [(f, next(kept) if at is None else self.shards[at : at + f.numel]) for at, f in places]
            matrices.append(_assemble(move, parts))
        del self.kept
        return matrices

    def scatter(self, matrices: Sequence[Tensor]) -> None:
        """Compute the updates; apply them to what lies here, and send the others theirs."""
        batch = self.of
        self.sent = send = self._buffer(sum(batch.into))
        numbers = {(move.of, move.index): number for number, move in enumerate(batch.mine)}
        for alike in _alike((self.live_of[move.of], move.index) for move in batch.mine):
            chosen = [numbers[live.of, index] for live, index in alike]
            updates = _updates(alike, [matrices[number] for number in chosen])
            for (live, index), number, update in zip(alike, chosen, updates, strict=True):
                for at, fragment in batch.places[number]:
                    piece = _cut(update, fragment)
                    if at is None:
                        live.apply(index, fragment, piece)
                    else:
                        send[at : at + fragment.numel].copy_(piece)
        self.exchange.give_back(self.shards)
        self.updates = self._buffer(sum(batch.out))
        self.under_way = all_to_all_v_into(self.updates, send, batch.out, batch.into, self.exchange.group)

    def apply(self) -> None:
        """Step what lies here of the others' matrices."""
        self._wait()
        at = 0
        for move, fragment in self.of.away:  # in the order of owners, as sent
            self.live_of[move.of].apply(move.index, fragment, self.updates[at : at + fragment.numel])
            at += fragment.numel
        self.exchange.give_back(self.updates)

    def _wait(self) -> None:
        self.under_way.wait()
        if self.sent is not None:
            self.exchange.give_back(self.sent)
            self.sent = None

    def _buffer(self, numel: int) -> Tensor:
        return self.exchange.buffer(numel, self.like, self.of.wire)


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
