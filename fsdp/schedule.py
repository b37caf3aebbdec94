"""Order, prefetch and overlap: when each bucket is gathered, reduced and released. One Schedule for all buckets of a
root.

Every decision follows from what all ranks see alike (the order in which modules run), so every rank issues the same
sequence of collectives:

    forward    before a bucket computes, the next one of the last iteration's order is already being gathered
    backward   the same in the reverse order of this iteration's forward; on CPU only what the user asks for
    reduction  in the reverse order in which buckets began their forward, each started when backward has left it and all
               before it, at most one in flight; what is still missing at the end is reduced then, and what a rank has
               no gradient for counts as zero

Backward goes through the calls of modules in the reverse order of forward. Where a rank's graph lacks one (the module
handed its input through, or the loss does not depend on it), the call is passed by when the rank comes to one before
it: gathered and reduced as on the ranks that compute there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._functorch import TransformType
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh

from fsdp import outdated
from fsdp.bucket import Bucket, untransformed
from fsdp.changes import note_versions, take_up_changes, take_up_changes_of_gathered
from fsdp.flat_buffer import FlatBuffer
from fsdp.streams import CommStreams
from fsdp.weight_grad import Witnesses, witnesses_of
from ragged_shard.collectives import all_reduce_small
from ragged_shard.pool import Pool

__all__ = ["Schedule"]

# Forwards that are remembered at most until a backward comes to them.
_KEPT = 256


@dataclass(eq=False)
class _Forward:
    """A forward of the root: its buckets in the order in which they began, its calls of modules that backward comes to,
    and some of its autograd nodes.
    """

    began: dict[Bucket, None] = field(default_factory=dict)
    calls: dict[int, Bucket] = field(default_factory=dict)
    witnesses: Witnesses = field(default_factory=Witnesses)


def _to_be_differentiated() -> bool:
    """Within a backward: whether another may go through what it does (``create_graph=True``), and then needs weights
    before it meets any module's output.
    """
    if not torch.is_grad_enabled():
        return False
    # torch.func.grad always makes a graph; only another one around it can use it.
    transforms = torch._C._functorch.get_interpreter_stack()
    return transforms is None or [one.key() for one in transforms].count(TransformType.Grad) > 1


class Schedule:
    def __init__(self, device: torch.device, shared: Schedule | None = None) -> None:
        """``shared``: use the memory and the streams of another root, with one reduction in flight between both."""
        self.device = device
        self.pool: Pool = Pool(device) if shared is None else shared.pool
        self.streams: CommStreams = CommStreams(device) if shared is None else shared.streams
        # On CPU it would overlap with nothing but gloo's thread, and hold one more buffer at the peak.
        self.prefetches_backward = device.type != "cpu"
        self.buckets: list[Bucket] = []
        # The state whose forward started this iteration, while that forward runs.
        self.root: object | None = None
        # A forward raised since the last reset.
        self.failed = False
        # Of forwards.
        self.iteration = 0
        self._hands_out: bool | None = None
        self._keeps_unsharded = False
        self._sequence: list[Bucket] = []
        self._last_sequence: list[Bucket] = []
        # Forwards that a backward may come to; the calls, in the order of their ends, that the one under way has not.
        self._forwards: dict[int, _Forward] = {}
        self._calls: dict[int, Bucket] = {}
        # The forwards that it covers, and whether their graphs stay for another.
        self._covered: list[int] = []
        self._retained = False
        self._reduce_order: list[Bucket] = []
        self._ready: set[Bucket] = set()
        self._in_flight: list[Bucket] = [] if shared is None else shared._in_flight
        # What is to run at the end of the backward under way; only autograd refers to it, so that nothing is left of it
        # when that backward has raised.
        self._callback: weakref.ref[Callable[[], None]] | None = None
        self._masks: dict[DeviceMesh, Tensor] = {}

    def add(self, bucket: Bucket) -> None:
        if bucket not in self.buckets:
            self.buckets.append(bucket)
            bucket.bind(self.pool, self.streams)

    # -- forward --

    def enter_forward(self, root: object) -> bool:
        """Called by every module before its forward; ``True`` for the one that starts an iteration."""
        if self.failed or self._callback is not None:
            # The last forward or backward raised: nothing of it may be taken for this iteration's. A forward leaves the
            # gradients of earlier micro-batches what they were.
            self.reset(unreduced=self._callback is not None)
        if self.root is not None:
            return False
        self.root = root
        self.iteration += 1
        if torch.is_grad_enabled():
            witnesses_of(self._forward().witnesses)
        for bucket in self.buckets:
            take_up_changes(bucket, self.buckets)
            if not ((bucket.pinned or bucket.keeps_unsharded) and outdated.is_kept(bucket)):
                bucket.reshard()
        self._last_sequence, self._sequence = self._sequence, []
        self.streams.after_optimizer()
        return True

    def _forward(self) -> _Forward:
        """The record of the forward under way."""
        if self.iteration not in self._forwards:
            self._forwards[self.iteration] = _Forward()
            if len(self._forwards) > _KEPT:
                # No backward follows them.
                self._forget([next(iter(self._forwards))])
        return self._forwards[self.iteration]

    def leave_forward(self, root: object) -> None:
        if self.root is root:
            self.root = None
            witnesses_of(None)
            for bucket in self.buckets:
                # Prefetched and not run after all.
                if bucket.is_gathering and not bucket.pinned:
                    bucket.reshard()

    def before_forward(self, bucket: Bucket, prefetch: list[Bucket]) -> None:
        """Unshard ``bucket`` and start on the next."""
        position = len(self._sequence)
        self._sequence.append(bucket)
        if bucket.trainable and (forward := self._forwards.get(self.iteration)) is not None:
            forward.began[bucket] = None
        bucket.unshard()
        bucket.wait_unshard()
        bucket.pinned = False
        last = self._last_sequence
        if prefetch:
            for other in prefetch:
                other.unshard()
        elif position + 1 < len(last) and last[position] is bucket:
            last[position + 1].unshard()

    def expect(self, call: int, bucket: Bucket) -> None:
        """A forward call of ``bucket`` that this or another rank's backward will come to."""
        bucket.calls[call] = self.iteration
        self._forward().calls[call] = bucket

    def after_forward(self, bucket: Bucket, needs_backward: bool) -> None:
        """``bucket`` has computed for the last time in this forward, or call of its module."""
        if bucket.reshard_after_forward:
            if needs_backward and bucket.post_forward_size is not None:
                bucket.reshard_to_group()
            else:
                bucket.reshard()
        else:
            note_versions(bucket)

    def end_group(self, bucket: Bucket, needs_backward: bool) -> None:
        """The root's forward ends, and did not run all modules of this bucket's list on this rank: on all ranks,
        backward comes to it next.
        """
        calls = self._forward().calls
        for call in [call for call, other in calls.items() if other is bucket]:
            calls[call] = calls.pop(call)
        self.after_forward(bucket, needs_backward)

    def runs_last(self, bucket: Bucket) -> bool:
        """Whether ``bucket`` was the last to begin its forward in the last iteration: backward starts with it."""
        return bool(self._last_sequence) and self._last_sequence[-1] is bucket

    # -- backward --

    def enter_backward(self, iteration: int | None) -> None:
        """Called by every module that backward enters; ``iteration``: that of the forward, if it is remembered."""
        if self._callback is not None and self._callback() is None:
            # The last backward raised, and no forward has begun since.
            self.reset()
        if self._callback is not None:
            if iteration is not None and iteration not in self._covered:
                self._cover(iteration)
            return
        iteration = self.iteration if iteration is None else iteration
        for bucket in self.buckets:
            if bucket.is_unsharded:
                take_up_changes_of_gathered(bucket)
        self._keeps_unsharded = _to_be_differentiated()
        self._covered, self._retained = [], torch._C._autograd._get_current_graph_task_keep_graph()
        callback = self.end_backward
        self._callback = weakref.ref(callback)
        Variable._execution_engine.queue_callback(callback)
        self._hands_out = None
        for number, forward in [*self._forwards.items()]:
            # Backward begins with the last forward that it covers. Unlike the calls of one module, what the loss
            # depends on is the same on all ranks.
            if number == iteration or (number < iteration and forward.witnesses.will_run() is not False):
                self._cover(number)
            elif forward.witnesses.are_gone:
                self._forget([number])

    def _cover(self, iteration: int) -> None:
        """The backward under way comes to this forward: to all of its calls, on this or another rank."""
        self._covered.append(iteration)
        if (forward := self._forwards.get(iteration)) is not None:
            for call, bucket in forward.calls.items():
                self._calls[call] = bucket
                bucket.awaited_calls.add(call)
            order: dict[Bucket, None] = {}
            for number in self._covered:
                order.update(self._forwards[number].began if number in self._forwards else {})
            self._reduce_order = [bucket for bucket in reversed(order) if not bucket.reduced]

    def hands_out(self) -> bool:
        """Whether this backward is ``torch.autograd.grad`` (or has ``inputs``, or is a transform of ``torch.func``) for
        something else than weights: the same on every rank.
        """
        if self._hands_out is None:
            transformed = torch._C._functorch.peek_interpreter_stack() is not None
            covered = [self._forwards[number] for number in self._covered if number in self._forwards]
            self._hands_out = transformed or any(forward.witnesses.leave_out() for forward in covered)
        return self._hands_out

    def _forget(self, iterations: Iterable[int]) -> None:
        """No backward comes to these forwards any more."""
        for iteration in iterations:
            if (forward := self._forwards.pop(iteration, None)) is not None:
                for call, bucket in forward.calls.items():
                    bucket.calls.pop(call, None)

    def _last_call(self) -> int | None:
        """The last of the calls that this backward has not come to."""
        return next(reversed(self._calls), None)

    def before_backward(self, bucket: Bucket, call: int, prefetch: list[Bucket]) -> None:
        """Backward enters ``call`` of ``bucket``: unshard it again and start on the one whose backward comes next."""
        if call in self._calls:
            while (last := self._last_call()) is not None and last != call:
                self._pass_by(last)
            del self._calls[call]
            bucket.awaited_calls.discard(call)
        self._gather_in_backward(bucket)
        bucket.enter_backward()
        if prefetch:
            for other in prefetch:
                other.unshard()
        elif self.prefetches_backward and (last := self._last_call()) is not None:
            following = self._calls[last]
            if following.unshard_in_backward:
                following.unshard()

    def _gather_in_backward(self, bucket: Bucket) -> None:
        if not bucket.is_unsharded:
            self.before_memory(bucket)
        if bucket.unshard_in_backward:
            bucket.unshard()
            bucket.wait_unshard()

    def _pass_by(self, call: int, running: bool = True, captured: bool = False) -> None:
        """Backward does not come to ``call`` on this rank, where it computed nothing that the loss depends on, but may
        on others: gather and reduce its bucket when they do. ``running``: within the backward, not at its end.
        ``captured``: it is torch.autograd.grad, which reduces nothing.
        """
        bucket = self._calls.pop(call)
        bucket.awaited_calls.discard(call)
        if running:
            bucket.enter_backward()
        self._gather_in_backward(bucket)
        if captured or bucket.captured or (running and any(bucket.outstanding.values())):
            # A gradient will come here all the same.
            return
        bucket.open_backward()
        bucket.owes = True
        self.after_backward(bucket)

    def before_memory(self, bucket: Bucket) -> None:
        """In backward ``bucket`` is about to take memory, for parameters or for unreduced gradients.

        On CPU the reduction in flight is finished first: what it holds is what is asked for now, so the pool need not
        be larger, and nothing but gloo's thread could have worked on. On accelerators waiting here would stall the
        compute stream.
        """
        if self.device.type == "cpu":
            self._finish_reductions(bucket.max_reductions - 1)

    def _finish_reductions(self, but: int = 0) -> None:
        """Wait for the reductions in flight, in order, ``but`` the last so many."""
        while len(self._in_flight) > but:
            self._in_flight.pop(0).finish_reduce()

    def after_backward(self, bucket: Bucket) -> None:
        """Some gradient of ``bucket`` or of its inputs has come. If it was the last: release its parameters, in whose
        memory the reduction may receive, and reduce its gradients when it is its turn.
        """
        if not bucket.is_left:
            return
        if bucket.reshard_after_backward and not (bucket.outlasts_its_gradients or self._keeps_unsharded):
            bucket.reshard()
        if bucket.owes and bucket.trainable and bucket.requires_gradient_sync:
            if bucket in self._reduce_order:
                self._ready.add(bucket)
                while self._reduce_order and self._reduce_order[0] in self._ready:
                    self._start_reduce(self._reduce_order.pop(0), self._reduce_order)
            else:
                self._start_reduce(bucket, self._reduce_order)

    def _start_reduce(self, bucket: Bucket, later: Sequence[Bucket]) -> None:
        """Reduce ``bucket``; ``later`` are those whose turn comes after it in this backward."""
        self._finish_reductions(bucket.max_reductions - 1)
        bucket.reduce(last=all(other.holds_gradients for other in later))
        self._in_flight.append(bucket)

    def end_backward(self) -> None:
        """Runs when the whole backward has run: reduce what is left, publish the gradients, rest."""
        with untransformed():
            self._end_backward()

    def _end_backward(self) -> None:
        self._callback = None
        captured = any(bucket.captured for bucket in self.buckets)
        while (call := self._last_call()) is not None:
            self._pass_by(call, running=False, captured=captured)
        owing = self._owing()
        for position, bucket in enumerate(owing):
            bucket.open_backward()
            self._start_reduce(bucket, owing[position + 1 :])
        self._finish_reductions()
        self.streams.compute_waits(self.streams.reduce)
        used = self._used_anywhere([bucket for bucket in self.buckets if bucket.published])
        for bucket in self.buckets:
            if bucket.in_backward:
                bucket.leave_backward(used.get(bucket))
            if bucket.reshard_after_backward and not self._keeps_unsharded:
                bucket.reshard()
            bucket.awaited_calls.clear()
        self._calls.clear()
        if not self._retained:
            self._forget(self._covered)
        self._ready.clear()

    def reduce_accumulated(self) -> None:
        """Between backwards: reduce and publish what those without synchronisation have left."""
        for bucket in self.buckets:
            bucket.take_assigned()
        self._end_backward()

    def _owing(self) -> list[Bucket]:
        """Buckets still to be reduced, in the order that all ranks share."""
        order, self._reduce_order = self._reduce_order, []
        if any(bucket.captured for bucket in self.buckets):
            # torch.autograd.grad: nothing was accumulated, nothing is reduced.
            return []
        order += [b for b in self.buckets if (b.owes or b.unreduced) and b not in order]
        return [bucket for bucket in order if bucket.trainable and bucket.requires_gradient_sync]

    def _used_anywhere(self, buckets: list[Bucket]) -> dict[Bucket, list[bool]]:
        """Of each parameter, whether any rank had a gradient for it: one small reduction per mesh."""
        by_mesh: dict[DeviceMesh, list[FlatBuffer]] = {}
        for bucket in buckets:
            for buffer in bucket.buffers:
                by_mesh.setdefault(buffer.layout.mesh, []).append(buffer)
        answer: dict[FlatBuffer, list[bool]] = {}
        for mesh, members in by_mesh.items():
            used = [p.used for b in members for p in b.parameters]
            rows = self._masks.get(mesh)
            if rows is None or rows.shape[1] != len(used):
                # The mask, and room for those of the ranks along a dimension.
                shape = (1 + max(mesh.shape), len(used))
                rows = self._masks[mesh] = torch.empty(shape, dtype=torch.uint8, device=self.device)
            mask, room = rows[0], rows[1:]
            mask.copy_(torch.frombuffer(bytearray(used), dtype=torch.uint8))
            for dim in range(mesh.ndim):
                all_reduce_small(mask, dist.ReduceOp.MAX, mesh.get_group(dim), room)
            flags = iter(mask.tolist())
            for member in members:
                answer[member] = [bool(next(flags)) for _ in member.parameters]
        return {bucket: [flag for buffer in bucket.buffers for flag in answer[buffer]] for bucket in buckets}

    # -- failure --

    def forward_failed(self, root: object) -> None:
        """A forward raised. If it is the root's, the next one starts from a clean state; what others raise may be
        caught.
        """
        if self.root is not root:
            return
        self.failed = True
        for bucket in self.buckets:
            # Who looks at parameters before the next forward, or wants memory, finds them sharded. Those on their way
            # here may never come.
            if bucket.is_unsharded:
                bucket.reshard()

    def reset(self, unreduced: bool = True) -> None:
        """Back to the resting state after an exception; ``unreduced``: without gradients that are not published yet."""
        self._finish_reductions()
        self.root = None
        self.failed, self._callback = False, None
        for bucket in self.buckets:
            bucket.discard(unreduced)
        witnesses_of(None)
        for record in (self._sequence, self._reduce_order, self._calls, self._forwards, self._ready):
            record.clear()
