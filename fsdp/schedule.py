"""Order, prefetch and overlap: when each bucket is gathered, reduced and released. One Schedule for all buckets of a
root.

Every decision follows from what all ranks see alike (the order in which modules run), so every rank issues the same
sequence of collectives:

    forward    before a bucket computes, the next one of the last iteration's order is already being gathered
    backward   the same in the reverse order of this iteration's forward; on CPU only what the user asks for
    reduction  in the reverse order in which buckets began their forward, each started when backward has left it and all
               before it, at most one in flight; what is still missing at the end is reduced then, and what a rank has
               no gradient for counts as zero
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh

from fsdp.bucket import Bucket, FlatBuffer
from fsdp.streams import CommStreams
from ragged_shard.pool import Pool

__all__ = ["Schedule"]


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
        self._records_backward = False
        # Of forwards; and the one that the backward under way began with.
        self.iteration = 0
        self._backward_of = 0
        self._sequence: list[Bucket] = []
        self._last_sequence: list[Bucket] = []
        self._backward_stack: list[Bucket] = []
        self._reduce_order: list[Bucket] = []
        self._ready: set[Bucket] = set()
        self._in_flight: list[Bucket] = [] if shared is None else shared._in_flight
        self._callback_queued = False
        self._masks: dict[DeviceMesh, Tensor] = {}

    def add(self, bucket: Bucket) -> None:
        if bucket not in self.buckets:
            self.buckets.append(bucket)
            bucket.bind(self.pool, self.streams)

    # -- forward --

    def enter_forward(self, root: object) -> bool:
        """Called by every module before its forward; ``True`` for the one that starts an iteration."""
        if self.failed or self._callback_queued:
            # The last forward or backward raised: nothing of it may be taken for this iteration's.
            self.reset()
        if self.root is not None:
            return False
        self.root = root
        self.iteration += 1
        self._records_backward = torch.is_grad_enabled()
        for bucket in self.buckets:
            if not (bucket.pinned or bucket.keeps_unsharded):
                bucket.reshard()
        self._last_sequence, self._sequence = self._sequence, []
        self.streams.after_optimizer()
        return True

    def leave_forward(self, root: object) -> None:
        if self.root is root:
            self.root = None
            for bucket in self.buckets:
                # Prefetched and not run after all.
                if not bucket.is_unsharded and not bucket.pinned:
                    bucket.reshard()

    def before_forward(self, bucket: Bucket, prefetch: list[Bucket]) -> None:
        """Unshard ``bucket`` and start on the next."""
        position = len(self._sequence)
        self._sequence.append(bucket)
        if self._records_backward and bucket not in self._reduce_order and bucket.trainable:
            self._reduce_order.insert(0, bucket)
        bucket.unshard()
        bucket.wait_unshard()
        bucket.pinned = False
        last = self._last_sequence
        if prefetch:
            for other in prefetch:
                other.unshard()
        elif position + 1 < len(last) and last[position] is bucket:
            last[position + 1].unshard()

    def after_forward(self, bucket: Bucket, needs_backward: bool) -> None:
        if needs_backward:
            if bucket in self._backward_stack:
                self._backward_stack.remove(bucket)
            self._backward_stack.append(bucket)
        if bucket.reshard_after_forward:
            if needs_backward and bucket.post_forward_group is not None:
                bucket.reshard_to_group()
            else:
                bucket.reshard()

    def runs_last(self, bucket: Bucket) -> bool:
        """Whether ``bucket`` was the last to begin its forward in the last iteration: backward starts with it."""
        return bool(self._last_sequence) and self._last_sequence[-1] is bucket

    # -- backward --

    def enter_backward(self, iteration: int) -> None:
        """Called by every module that backward enters; ``iteration``: that of the forward."""
        if not self._callback_queued:
            self._callback_queued = True
            # Backward begins with the last forward that it covers.
            self._backward_of = iteration
            Variable._execution_engine.queue_callback(self.end_backward)

    def before_backward(self, bucket: Bucket, prefetch: list[Bucket]) -> None:
        """Unshard ``bucket`` again and start on the one whose backward comes next."""
        stack = self._backward_stack
        if bucket in stack:
            while (other := stack.pop()) is not bucket:
                other.enter_backward()
                self._pass_by(other, any(other.outstanding.values()))
        self._gather_in_backward(bucket)
        bucket.enter_backward()
        if prefetch:
            for other in prefetch:
                other.unshard()
        elif self.prefetches_backward and stack and stack[-1].unshard_in_backward:
            stack[-1].unshard()

    def _gather_in_backward(self, bucket: Bucket) -> None:
        if not bucket.is_unsharded:
            self.before_memory()
        if bucket.unshard_in_backward:
            bucket.unshard()
            bucket.wait_unshard()

    def _pass_by(self, bucket: Bucket, awaited: bool = False) -> None:
        """Backward does not enter ``bucket`` on this rank, where its forward computed nothing that the loss depends on,
        but may on others: gather and reduce it when they do. ``awaited``: a gradient will come here all the same.
        """
        self._gather_in_backward(bucket)
        if awaited or bucket.captured:
            return
        bucket.forget_calls(self._backward_of)
        bucket.open_backward()
        bucket.owes = True
        self.after_backward(bucket)

    def before_memory(self) -> None:
        """In backward a bucket is about to take memory, for parameters or for unreduced gradients.

        On CPU the reduction in flight is finished first: what it holds is what is asked for now, so the pool need not
        be larger, and nothing but gloo's thread could have worked on. On accelerators waiting here would stall the
        compute stream.
        """
        if self.device.type == "cpu":
            self._finish_reductions()

    def _finish_reductions(self) -> None:
        while self._in_flight:
            self._in_flight.pop(0).finish_reduce()

    def after_backward(self, bucket: Bucket) -> None:
        """Some gradient of ``bucket`` or of its inputs has come. If it was the last: release its parameters, in whose
        memory the reduction may receive, and reduce its gradients when it is its turn.
        """
        if not bucket.is_left(self._backward_of):
            return
        if bucket.reshard_after_backward and not bucket.outlasts_its_gradients:
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
        self._finish_reductions()
        bucket.reduce(last=all(other.holds_gradients for other in later))
        self._in_flight.append(bucket)

    def end_backward(self) -> None:
        """Runs when the whole backward has run: reduce what is left, publish the gradients, rest."""
        self._callback_queued = False
        while self._backward_stack and not any(bucket.captured for bucket in self.buckets):
            self._pass_by(self._backward_stack.pop())
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
            bucket.forget_calls(self._backward_of)
            if bucket.reshard_after_backward:
                bucket.reshard()
        self._backward_stack.clear()
        self._ready.clear()

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
            mask = self._masks.get(mesh)
            if mask is None or mask.numel() != len(used):
                mask = self._masks[mesh] = torch.empty(len(used), dtype=torch.uint8, device=self.device)
            mask.copy_(torch.frombuffer(bytearray(used), dtype=torch.uint8))
            for dim in range(mesh.ndim):
                if mesh.size(dim) > 1:
                    dist.all_reduce(mask, dist.ReduceOp.MAX, group=mesh.get_group(dim))
            flags = iter(mask.tolist())
            for member in members:
                answer[member] = [bool(next(flags)) for _ in member.parameters]
        return {bucket: [flag for buffer in bucket.buffers for flag in answer[buffer]] for bucket in buckets}

    # -- failure --

    def reset(self) -> None:
        """Back to the resting state after an exception; the failed iteration's gradients are lost."""
        self._finish_reductions()
        self.root = None
        self.failed = self._callback_queued = False
        for bucket in self.buckets:
            bucket.discard()
        for record in (self._sequence, self._backward_stack, self._reduce_order):
            record.clear()
        self._ready.clear()
