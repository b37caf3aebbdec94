"""One bucket's life: sharded -> unsharded -> gradients -> reduced -> sharded.

A bucket holds the parameters of one ``fully_shard`` call. Its plan lays them out in one or a few flat buffers
(fsdp.flat_buffer). Only two things are written on the way: this rank's slot of ``full`` (once per gather), and each
gradient into ``full_grads``.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp import outdated
from fsdp.agree import agree
from fsdp.changes import find_homes
from fsdp.flat_buffer import BucketParameter, FlatBuffer
from fsdp.streams import CommStreams
from fsdp.superseded import GATHERED, supersede
from fsdp.weight_grad import GradientPlace, WeightParameter, will_run
from ragged_shard.collectives import Pending, all_gather_in_place, coalesced
from ragged_shard.dbuffer import DBuffer, Outer
from ragged_shard.pool import Lease, Pool, storage_bytes

if TYPE_CHECKING:
    from fsdp.extension import ExtendedBuffer

_DEBUG = os.environ.get("RAGGED_DEBUG") == "1"
_issued = itertools.count(1)
# What gloo says when a peer does not answer.
_OF_PEERS = re.compile("closed|closure|reset|timed? ?out|broken pipe|abort", re.IGNORECASE)

__all__ = ["Bucket", "untransformed"]


class Bucket:
    """The parameters of one ``fully_shard`` call and the state of their buffers.

    The methods are the steps of an iteration; ``fsdp.hooks`` and ``fsdp.schedule`` decide when. None of them decides
    from anything that only this rank sees, except for gradients that this rank lacks, which count as zero.
    """

    def __init__(
        self,
        name: str,
        buffers: Sequence[FlatBuffer],
        *,
        param_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
        replicate_dim: int | None,
    ) -> None:
        self.name = name
        self.buffers = list(buffers)
        self.param_dtype = param_dtype
        self.reduce_dtype = reduce_dtype
        self.replicate_dim = replicate_dim
        # Called when a graph task comes here / its last gradient has come / before memory for unreduced gradients is
        # taken.
        self.on_enter: Callable[[], None] = lambda: None
        self.on_complete: Callable[[], None] = lambda: None
        self.on_open: Callable[[], None] = lambda: None
        # Whether the backward under way hands gradients out instead of accumulating them.
        self.hands_out: Callable[[], bool] = lambda: False
        self.pool: Pool | None = None
        self.streams: CommStreams | None = None

        self.reshard_after_forward = True
        self.reshard_after_backward = True
        self.requires_gradient_sync = True
        self.requires_all_reduce = True
        self.divide_factor: float | None = None
        self.unshard_in_backward = True
        # Reductions, this bucket's included, that may be in flight when it starts one.
        self.max_reductions = 1
        # Collectives of the user's in the place of ours; what is called with a reduced gradient.
        self.gather_collective: Callable[..., Any] | None = None
        self.reduce_collective: Callable[..., Any] | None = None
        self.reduced_hook: Callable[[Tensor], object] | None = None
        # Between forward and backward the parameters stay sharded over this smaller group, if any.
        self.post_forward_group: dist.ProcessGroup | None = None
        # How many ranks that group has, or would have among more ranks than there are.
        self.post_forward_size: int | None = None
        # Unsharded by hand before the forward / by `reshard_after_forward=False`: not for an iteration's start to
        # reshard.
        self.pinned = False
        self.keeps_unsharded = False
        # Modules with buckets of their own lie within this one's.
        self.encloses_others = False

        self.is_unsharded = False
        self._gathers: list[Pending] = []
        self._reductions: tuple[list[FlatBuffer], list[Pending]] = ([], [])
        self._scratch: Lease | None = None
        # Whether that reduction's result stays in the memory it is made in.
        self._stays = False
        self._group_memory = False
        self.extended = [cast("ExtendedBuffer", buffer) for buffer in self.buffers if buffer.extended]

        self.homes = find_homes(self)
        # Of the buffers that modules go on showing gathered when their forward has ended.
        self.versions: list[int] | None = None

        # Of each graph task of this backward (a reentrant checkpoint runs one of its own): gradients still to come.
        self.outstanding: dict[int, int] = {}
        # Of each forward call that a backward may come to: the iteration it belongs to. The schedule keeps both.
        self.calls: dict[int, int] = {}
        # Those that the backward under way has not come to yet.
        self.awaited_calls: set[int] = set()
        # Of each forward call that backward has entered: inputs whose gradient is still to come.
        self.awaited_inputs: dict[int, int] = {}
        self.in_backward = False
        # Whether a graph task of this backward has come here since the last reduction.
        self.owes = False
        # Whether an earlier backward left gradients here without reducing them.
        self.unreduced = False
        # Whether this backward is torch.autograd.grad, or has `inputs`: no gradient will come.
        self.captured = False
        self.reduced = False
        # Whether that reduction's result is the gradient (and not a replica's part of it).
        self.published = False

    @property
    def parameters(self) -> list[BucketParameter]:
        return [p for buffer in self.buffers for p in buffer.parameters]

    @property
    def trainable(self) -> bool:
        return any(buffer.trainable for buffer in self.buffers)

    @property
    def mesh(self) -> DeviceMesh:
        return self.buffers[0].layout.mesh

    @functools.cached_property
    def meshes(self) -> list[DeviceMesh]:
        """Of the buffers, each once: several when parameters have meshes of their own."""
        return list(dict.fromkeys(buffer.layout.mesh for buffer in self.buffers))

    @property
    def ranks(self) -> int:
        """Over how many ranks a gradient is averaged by default."""
        return self.buffers[0].layout.mesh.size() if self.buffers else 1

    def bind(self, pool: Pool, streams: CommStreams) -> None:
        """Where buffers get their memory and collectives their streams; the first call counts."""
        if self.pool is None:
            self.pool, self.streams = pool, streams
            if self._group_memory:
                self.allocate_from_group(True)

    def allocate_from_group(self, enable: bool) -> None:
        """Whether the pool takes its memory from the process group's allocator, if its backend has one."""
        self._group_memory = enable
        if self.pool is not None and self.buffers:
            group = self.buffers[0].layout.group
            self.pool.allocator = functools.partial(_group_memory, group, self.pool.device) if enable else None
            self.pool.trim()

    def _announce(self, collective: str) -> None:
        """RAGGED_DEBUG=1: every rank says what it is about to run; a difference is an error on all instead of a
        hang.
        """
        if _DEBUG and self.buffers:
            number = next(_issued)
            for mesh in self.meshes:
                agree(mesh, "RAGGED_DEBUG", lambda: f"collective {number}: {collective} of {self.name!r}")

    @contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        """Say which collective of which bucket a backend's bare error belongs to, and if a peer is late or gone."""
        try:
            yield
        except RuntimeError as error:
            message = f"the {what} of bucket {self.name!r} failed on rank {dist.get_rank()}: {error}"
            if isinstance(error, dist.DistError) or _OF_PEERS.search(str(error)):
                message += (
                    ". Another rank has died, raised an error, or runs other modules (RAGGED_DEBUG=1 shows the first "
                    "collective that differs)"
                )
            raise RuntimeError(message) from error

    def _note(self, action: str, label: str = "") -> None:
        """What the schedule did, on the pool's timeline: ``fsdp.simulate`` replays these on other numbers of ranks."""
        if self.pool is not None:
            self.pool.note(action, label, self.name, 0)

    # -- parameters --

    @property
    def is_gathering(self) -> bool:
        """Whether gathers have been started that nobody has waited for."""
        return bool(self._gathers)

    def unshard(self) -> None:
        """Start gathering. No effect when unsharded or on the way."""
        if self.is_unsharded or self._gathers:
            return
        assert self.pool is not None and self.streams is not None
        if any(buffer.device.type == "meta" for buffer in self.buffers):
            raise RuntimeError(
                f"the parameters of {self.name!r} are on the meta device; materialise them with "
                f"module.to_empty(device=...) and initialise them before the first forward"
            )
        self._announce("all_gather")
        self._note("unshard")
        outdated.gathered(self, kept=self.pinned or self.keeps_unsharded)
        with (
            self.streams.on(self.streams.gather),
            untransformed(),
            # Buffers and views outlive an evaluation under inference_mode and are trained on afterwards.
            torch.inference_mode(False),
            torch.no_grad(),
            _profiled("fsdp.all_gather", self.name),
        ):
            plain = [buffer for buffer in self.buffers if not buffer.extended]
            whole = [buffer.make_full(self.pool, self.param_dtype, self.name) for buffer in plain]
            for full in whole:
                full.acquire()
                self.pool.note("all_gather", "parameters", self.name, full.nbytes)
            for mesh in self.meshes:
                pairs = [(b, full) for b, full in zip(plain, whole, strict=True) if b.layout.mesh == mesh]
                if not pairs:
                    continue
                group = pairs[0][0].layout.group
                if any(buffer.kept is not None and buffer.kept.held for buffer, _ in pairs):
                    assert self.post_forward_group is not None
                    group = self.post_forward_group
                # What the user passes may issue its own.
                with coalesced(group, pairs[0][1].flat, 0 if self.gather_collective else len(pairs)) as together:
                    parts = [self._gather(*pair) for pair in pairs]
                self._gathers += together(parts)
            self._gathers += [buffer.gather(self.pool, self.name) for buffer in self.extended]
            self._hook_gradients()

    def _gather(self, buffer: FlatBuffer, full: DBuffer) -> Pending:
        kept = buffer.kept
        if kept is None or not kept.held:
            return buffer.params.all_gather(full, self.gather_collective)
        assert self.post_forward_group is not None
        full.flat.chunk(self.post_forward_group.size())[self.post_forward_group.rank()].copy_(kept.tensor)
        kept.release()
        return all_gather_in_place(full.flat, self.post_forward_group)

    def reshard_to_group(self) -> None:
        """After forward: keep a part of the unsharded parameters, so that backward gathers over the smaller group."""
        assert self.pool is not None
        self._note("keep")
        if self.post_forward_group is None:
            self.reshard()
            return
        size, rank = self.post_forward_group.size(), self.post_forward_group.rank()
        for buffer in self.buffers:
            assert buffer.full is not None
            part = buffer.full.flat.chunk(size)[rank]
            if buffer.kept is None:
                buffer.kept = self.pool.lease(part.numel(), part.dtype, "parameters", self.name)
            buffer.kept.acquire()
            with torch.no_grad():
                buffer.kept.tensor.copy_(part)
        self._release_unsharded()

    def wait_unshard(self) -> None:
        """Finish gathering and register the unsharded parameters on their modules."""
        if self.is_unsharded:
            return
        self._note("wait_gather")
        with self._naming("all-gather of the parameters"):
            for gather in self._gathers:
                gather.wait()
        self._note("gathered")
        self._gathers.clear()
        if self.extended:
            self._finish_extended()
        with torch._C.DisableTorchFunctionSubclass(), untransformed():
            self._register_unsharded()
        self.versions = None
        self.is_unsharded = True

    def _finish_extended(self) -> None:
        assert self.pool is not None
        with untransformed(), torch.inference_mode(False), torch.no_grad():
            for buffer in self.extended:
                buffer.finish_gather(self.pool, self.name)
            self._hook_gradients()

    def _register_unsharded(self) -> None:
        for parameter in self.parameters:
            full = parameter.full
            assert full is not None
            if full.requires_grad != parameter.sharded.requires_grad:
                full.requires_grad_(parameter.sharded.requires_grad)
            parameter.trains = full.requires_grad
            parameter.show(full)

    def reshard(self) -> None:
        """Register the sharded parameters and give the memory of the unsharded ones back."""
        for gather in self._gathers:
            gather.wait()
        in_flight = bool(self._gathers)
        self._gathers.clear()
        for buffer in self.buffers:
            if buffer.kept is not None and buffer.kept.held:
                self._note("drop")
                buffer.kept.release()
        if self.is_unsharded or in_flight:
            self._release_unsharded()

    def _release_unsharded(self) -> None:
        self._note("reshard")
        for parameter in self.parameters:
            parameter.show(parameter.sharded)
        for buffer in self.buffers:
            buffer.release_full()
        self.is_unsharded = False
        self.pinned = False
        outdated.resharded(self)

    # -- gradients --

    def _hook_gradients(self) -> None:
        # Autograd's nodes hold these hooks where Python's collector cannot look: a strong reference to the bucket would
        # keep a deleted model alive.
        bucket = weakref.ref(self)
        for position, buffer in enumerate(self.buffers):
            if buffer.hooked or buffer.parameters[0].full is None:
                continue
            buffer.hooked = True
            for index, parameter in enumerate(buffer.parameters):
                full = parameter.full
                assert full is not None
                supersede(full, parameter.name, GATHERED)
                if not full.is_floating_point() and not full.is_complex():
                    continue
                was = full.requires_grad
                full.requires_grad_(True)
                # Held for good: the graph keeps only a weak reference to a leaf's accumulator.
                with torch.enable_grad():
                    parameter.edge = get_gradient_edge(full)
                if isinstance(full, WeightParameter):
                    place = functools.partial(_gradient_place, bucket, position, index)
                    parameter.place = GradientPlace(place, f"{parameter.name} of {self.name}")
                    full.place = parameter.place
                full.register_post_accumulate_grad_hook(functools.partial(_gradient_came, bucket, position, index))
                full.requires_grad_(was)

    def _gradient_came(self, buffer: FlatBuffer, index: int, full: Tensor) -> None:
        task = self.enter_backward()
        # A WeightParameter's attributes go through __torch_function__ otherwise.
        with torch._C.DisableTorchFunctionSubclass(), _unrecorded():
            self._take_gradient(buffer, index, full)
        self.outstanding[task] -= 1
        if self.outstanding[task] == 0:
            self.on_complete()

    def take_assigned(self) -> None:
        """Take gradients that somebody has assigned to the gathered parameters, past autograd's accumulation."""
        for buffer in self.buffers:
            for index, parameter in enumerate(buffer.parameters):
                if parameter.full is not None and parameter.full.grad is not None:
                    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                        self._take_gradient(buffer, index, parameter.full)
                    self.unreduced = True

    def _take_gradient(self, buffer: FlatBuffer, index: int, full: Tensor) -> None:
        """Write a gradient that autograd has accumulated into its view of the unreduced buffer."""
        gradient, full.grad = full.grad, None
        state = buffer.parameters[index]
        if state.place is not None:
            state.place.claimed = False
        if gradient is None:
            return
        if gradient.is_sparse:
            raise RuntimeError(
                f"parameter {buffer.parameters[index].name!r} of {self.name!r} has a sparse gradient; use sparse=False"
            )
        if isinstance(gradient, DTensor):
            assert isinstance(full, DTensor)
            gradient = _addend(gradient, full, buffer.layout.outer[index])
        view = self._open_gradients(buffer, index).views[index]
        if state.written:
            view.add_(gradient)
        elif gradient.data_ptr() != view.data_ptr() or gradient.stride() != view.stride():
            view.copy_(gradient)
        state.written = state.used = True

    def _open_gradients(self, buffer: FlatBuffer, index: int) -> DBuffer:
        full_grads = buffer.full_grads
        if full_grads is not None and full_grads.held:
            return full_grads
        assert self.pool is not None
        # Before anything is made: a new lease takes memory, which what this finishes may be about to give back.
        self.on_open()
        self._note("gradient", buffer.parameters[index].name)
        full_grads = buffer.make_grads(self.pool, self.reduce_dtype, self.name)
        full_grads.acquire()
        return full_grads.zero_gaps_()

    def _gradient_place(self, buffer: FlatBuffer, index: int) -> Tensor | None:
        """Where a weight gradient may be computed: its view, unless an earlier micro-batch's sum lies there."""
        self.enter_backward()
        if self.captured or buffer.parameters[index].written:
            return None
        return self._open_gradients(buffer, index).views[index]

    def enter_backward(self) -> int:
        """The current graph task. At its first touch: how many gradients it will bring, and what earlier ones left."""
        task = torch._C._current_graph_task_id()
        if task in self.outstanding:
            return task
        self.on_enter()
        # Its buffers are about to be written again.
        self.finish_reduce()
        leaves = [p.edge.node for p in self.parameters if p.edge is not None]
        try:
            self.outstanding[task] = sum(map(torch._C._will_engine_execute_node, leaves))
        except RuntimeError:
            # torch refuses the question about a leaf whose gradient torch.autograd.grad hands out.
            self.outstanding[task], self.captured = 0, True
        if not self.outstanding[task] and self.trainable and not self.captured:
            self.captured = self.hands_out()
        if self.captured:
            for parameter in self.parameters:
                if parameter.place is not None and parameter.edge is not None:
                    parameter.place.wanted = will_run(parameter.edge.node)
        self.owes = not self.captured
        self.open_backward()
        return task

    def open_backward(self) -> None:
        """At the first touch in a backward, note which sharded gradients are sums to add to."""
        if not self.in_backward:
            self.in_backward = True
            with torch.no_grad():
                for buffer in self.buffers:
                    buffer.adopt_gradients()

    @property
    def outlasts_its_gradients(self) -> bool:
        """Whether backward may read these parameters after their last gradient: a frozen one, on the way to the
        gradients of an enclosed module. The same on every rank.
        """
        return self.encloses_others and not all(p.sharded.requires_grad for b in self.buffers for p in b.parameters)

    @property
    def is_left(self) -> bool:
        """Whether the backward under way has left this bucket for good: it has come to all of its calls, or passed them
        by, and all gradients of parameters and of inputs have come.

        Ranks may use different parameters, or none, in each call. What they have in common is the calls, so that no
        rank gathers again, or waits for a reduction, that another does not take part in.
        """
        return (
            self.in_backward
            and not self.awaited_calls
            and not self.awaited_inputs
            and not any(self.outstanding.values())
        )

    @property
    def holds_gradients(self) -> bool:
        """Whether all memory that this bucket needs for unreduced gradients is there."""
        return all(b.full_grads is not None and b.full_grads.held for b in self.buffers if b.trainable)

    def reduce(self, last: bool = False) -> None:
        """Start the reduction of what has been written; parameters without a gradient count as zero.

        ``last``: in this backward nobody is going to need more memory for unreduced gradients.
        """
        assert self.pool is not None and self.streams is not None
        streams = self.streams
        self._announce("reduce_scatter")
        streams.after_compute(streams.reduce)
        with (
            streams.on(streams.reduce),
            untransformed(),
            torch.no_grad(),
            _profiled("fsdp.reduce_scatter", self.name),
        ):
            trainable = [buffer for buffer in self.buffers if buffer.trainable]
            whole = [self._open_gradients(buffer, 0) for buffer in trainable]
            self._stays = (
                last and self.pool.lends and not self._carries and all(buffer.may_stay for buffer in trainable)
            )
            self._note("reduce", "carries" if self._carries else "")
            scratch = list(self._take_scratch(whole))
            reductions: list[Pending] = []
            for mesh in self.meshes:
                mine = [one for one in zip(trainable, whole, scratch, strict=True) if one[0].layout.mesh == mesh]
                if not mine:
                    continue
                group, count = mine[0][0].reduce_group or mine[0][0].layout.group, len(mine)
                with coalesced(group, mine[0][1].flat, 0 if self.reduce_collective else count) as together:
                    parts = []
                    for buffer, full_grads, place in mine:
                        self.pool.note("reduce_scatter", "gradients", self.name, full_grads.nbytes)
                        if self.replicate_dim is not None and mesh.size(0) > 1 and not self._carries:
                            self.pool.note("all_reduce", "gradients", self.name, full_grads.chunk.nbytes)
                        parts.append(self._reduce_buffer(buffer, full_grads, place))
                reductions += together(parts)
            self._reductions = (trainable, reductions)
        self.reduced, self.unreduced, self.owes = True, False, False
        self.published = not self._carries

    def _take_scratch(self, whole: Sequence[DBuffer]) -> Iterator[Tensor | None]:
        """Memory for what the peers send, for each buffer."""
        assert self.pool is not None
        wanted = [full_grads.scratch_nbytes() for full_grads in whole]
        if not any(wanted):
            return itertools.repeat(None, len(wanted))
        # Each begins where any dtype may.
        room = [-(-nbytes // 128) * 128 for nbytes in wanted]
        self._scratch = self.pool.scratch(sum(room), self.name)
        parts = self._scratch.tensor[: sum(room)].split(room)
        return (part[:n].view(each.dtype) for part, n, each in zip(parts, wanted, whole, strict=True))

    def _reduce_buffer(self, buffer: FlatBuffer, full_grads: DBuffer, scratch: Tensor | None) -> Pending:
        for parameter, view in zip(buffer.parameters, full_grads.views, strict=True):
            if not parameter.written:
                view.zero_()
            parameter.written = False
        if self._carries:
            carrying = buffer.carry is not None
            if buffer.carry is None:
                buffer.carry = DBuffer.sharded(buffer.layout, full_grads.dtype, full_grads.device)
            return full_grads.reduce_scatter(
                buffer.carry,
                accumulate=carrying,
                scratch=scratch,
                group=buffer.reduce_group,
                collective=self.reduce_collective,
            )
        grads = None if self._stays else buffer.open_grads()
        accumulate = any(parameter.accumulates for parameter in buffer.parameters)
        for index, parameter in enumerate(buffer.parameters):
            if accumulate and not parameter.accumulates:
                assert grads is not None
                grads.views[index].zero_()
            parameter.accumulates = True
        return full_grads.reduce_scatter(
            grads,
            divide_by=float(buffer.layout.mesh.size()) if self.divide_factor is None else self.divide_factor,
            accumulate=accumulate,
            scratch=scratch,
            replicate_dim=self.replicate_dim,
            carry=buffer.carry,
            group=buffer.reduce_group,
            collective=self.reduce_collective,
            hook=self.reduced_hook,
        )

    def finish_reduce(self) -> None:
        """Wait for the reduction; the sharded gradients hold their values afterwards."""
        (reduced, reductions), self._reductions = self._reductions, ([], [])
        if not reductions:
            return
        self._note("wait_reduce")
        assert self.streams is not None
        with (
            self.streams.on(self.streams.reduce),
            untransformed(),
            torch.no_grad(),
            self._naming("reduction of the gradients"),
        ):
            for pending in reductions:
                pending.wait()
            for buffer in reduced:
                assert buffer.full_grads is not None
                if self._stays:
                    buffer.leave_grads()
                else:
                    buffer.full_grads.release()
                if self.published:
                    buffer.carry = None
            if self._scratch is not None:
                self._scratch.release()
                self._scratch = None
        self._note("reduced", "stays" if self._stays else "")
        self._stays = False

    @property
    def _carries(self) -> bool:
        """HSDP, and this backward only reduces within a replica."""
        return self.replicate_dim is not None and not self.requires_all_reduce

    def leave_backward(self, used: Sequence[bool] | None) -> None:
        """Publish the gradients: ``used[i]`` says whether any rank had one for parameter i (``None``: nothing was
        reduced).
        """
        if used is not None:
            flags = iter(used)
            for buffer in self.buffers:
                for index, parameter in enumerate(buffer.parameters):
                    if next(flags):
                        buffer.publish(index)
                    parameter.used = False
        for buffer in self.buffers:
            buffer.grads = None
        self.unreduced = self.unreduced or (self.in_backward and not self.reduced and not self.captured)
        if self.captured:
            for parameter in self.parameters:
                if parameter.place is not None:
                    parameter.place.wanted = True
        self.in_backward = False
        self.reduced = self.published = self.captured = self.owes = False
        self.outstanding.clear()
        self.awaited_inputs.clear()

    def discard(self, unreduced: bool) -> None:
        """Back to the resting state, whatever was going on. ``unreduced``: gradients that are not published yet are
        lost, sums of earlier backwards included.
        """
        self.finish_reduce()
        self.reshard()
        for parameter in self.parameters:
            parameter.accumulates = False
            if parameter.full is not None:
                parameter.full.grad = None
            if parameter.place is not None:
                parameter.place.claimed = False
        self.leave_backward(None)
        if unreduced:
            for buffer in self.buffers:
                buffer.carry = None
                if buffer.full_grads is not None:
                    buffer.full_grads.release()
            for parameter in self.parameters:
                parameter.written = parameter.used = False
            self.unreduced = False
        self.calls.clear()
        self.awaited_calls.clear()

    def full_storages(self) -> set[int]:
        """The memory of the unsharded parameters, by its ``_cdata``."""
        return {b.full.flat.untyped_storage()._cdata for b in self.buffers if b.full is not None}

    def live_bytes(self) -> dict[str, int]:
        """Bytes of this rank's own storages: ``parameters`` and ``gradients`` (the full buffers are the pool's)."""
        return {
            "parameters": storage_bytes([shard for b in self.buffers for shard in b.shards()]),
            "gradients": storage_bytes(
                [g._local_tensor for p in self.parameters if isinstance(g := p.sharded.grad, DTensor)]
            ),
        }

    def numel(self) -> int:
        return sum(math.prod(shape) for buffer in self.buffers for shape in buffer.layout.shapes)


def untransformed() -> AbstractContextManager[object]:
    """Outside of functorch's transforms (``torch.func.grad``, ``vmap``, ``jvp``): these are of what modules compute."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return nullcontext()
    return temporarily_clear_interpreter_stack()


_NOTHING = nullcontext()


def _unrecorded() -> AbstractContextManager[object]:
    """No graph is made of what runs in it. Only ``create_graph=True`` lets hooks of a backward record at all."""
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING


def _gradient_came(bucket: weakref.ref[Bucket], position: int, index: int, full: Tensor) -> None:
    if (alive := bucket()) is not None:
        alive._gradient_came(alive.buffers[position], index, full)


def _gradient_place(bucket: weakref.ref[Bucket], position: int, index: int) -> Tensor | None:
    alive = bucket()
    return None if alive is None else alive._gradient_place(alive.buffers[position], index)


def _group_memory(group: dist.ProcessGroup, device: torch.device, nbytes: int) -> torch.UntypedStorage:
    """``nbytes`` from the allocator of the group's backend; from torch's where it has none, or gives another number."""
    backend = group._get_backend(device)
    if backend.supports_tensor_alloc(device):
        storage: torch.UntypedStorage = backend.allocate_tensor(
            nbytes, dtype=torch.uint8, device=device
        ).untyped_storage()
        if storage.nbytes() == nbytes:
            return storage
    return torch.UntypedStorage(nbytes, device=device)


def _profiled(what: str, name: str) -> AbstractContextManager[object]:
    """A label with the bucket's name in a profile, and nothing without a profiler."""
    if torch._C._autograd._profiler_enabled():
        return torch.profiler.record_function(f"{what} ({name})")
    return nullcontext()


def _addend(gradient: DTensor, full: DTensor, outer: Outer | None) -> Tensor:
    """This rank's addend of a DTensor gradient, laid out as the parameter: the bucket sums over its own dimensions."""
    placements = list(full.placements)
    if outer is not None and outer.seen is not None:
        for dim in outer.seen[2]:
            placements[dim] = gradient.placements[dim]
    return gradient.redistribute(placements=placements).to_local()
