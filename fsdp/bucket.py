"""One bucket's life: sharded -> unsharded -> gradients -> reduced -> sharded.

A bucket holds the parameters of one ``fully_shard`` call. Its plan lays them out in one or a few flat buffers; each has

    params      sharded, the original dtype        what ``module.parameters()`` shows between iterations (DTensors)
    full        whole, the compute dtype           what the module computes with; memory only while unsharded
    full_grads  whole, the reduction dtype         unreduced gradients; memory from the first gradient to the reduction
    grads       sharded, the original dtype        what ``parameter.grad`` shows (DTensors); lives as long as those do

``grads`` has memory of its own, except at the end of a backward on CPU: then no other bucket needs that of
``full_grads`` any more, and the shard stays where it was summed.

Only two things are written on the way: this rank's slot of ``full`` (once per gather), and each gradient into
``full_grads``.
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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from fsdp.agree import agree
from fsdp.streams import CommStreams
from fsdp.superseded import ASSIGNED, GATHERED, supersede
from fsdp.weight_grad import GradientPlace, WeightParameter, will_run
from ragged_shard.collectives import Pending, all_gather_in_place, coalesced
from ragged_shard.dbuffer import DBuffer, Layout, Outer, buffer_of
from ragged_shard.pool import Lease, Pool, storage_bytes

if TYPE_CHECKING:
    from fsdp.extension import ExtendedBuffer

_DEBUG = os.environ.get("RAGGED_DEBUG") == "1"
_issued = itertools.count(1)
# What gloo says when a peer does not answer.
_OF_PEERS = re.compile("closed|closure|reset|timed? ?out|broken pipe|abort", re.IGNORECASE)

__all__ = ["Bucket", "BucketParameter", "FlatBuffer"]


@dataclass(eq=False)
class BucketParameter:
    """One parameter of a bucket. ``places``: every module attribute that holds it (several when tied)."""

    name: str
    places: list[tuple[nn.Module, str]]
    sharded: nn.Parameter
    full: nn.Parameter | None = None
    place: GradientPlace | None = None
    edge: GradientEdge | None = None
    # What ``full.requires_grad`` was set to by us.
    trains: bool = True
    # Whether the unreduced gradient holds something / the reduced gradient is part of a sum / anything arrived at all.
    written: bool = False
    accumulates: bool = False
    used: bool = False

    def is_shown_as(self, tensor: Tensor) -> bool:
        return tensor is self.sharded or tensor is self.full


class FlatBuffer:
    """The four DBuffers of one ``BufferPlan`` of a bucket, made when they are first needed."""

    # Whether a tensor subclass says what is gathered (fsdp.extension).
    extended = False

    def __init__(self, layout: Layout, parameters: Sequence[BucketParameter], params: DBuffer) -> None:
        self.layout = layout
        self.parameters = list(parameters)
        self.params = params
        self.full: DBuffer | None = None
        self.full_grads: DBuffer | None = None
        self.grads: DBuffer | None = None
        # HSDP without all-reduce: the sum of this replica's reduced gradients so far.
        self.carry: DBuffer | None = None
        # Whether ``grads`` lies in the memory that was ``full_grads``'.
        self.in_place = False
        # Between forward and backward, when resharding to a smaller group: this rank's part of the whole buffer.
        self.kept: Lease | None = None
        # Another group of the same ranks to reduce in, if any.
        self.reduce_group: dist.ProcessGroup | None = None
        # Whether autograd tells when gradients of these parameters come.
        self.hooked = False

    @property
    def trainable(self) -> bool:
        return any(p.sharded.requires_grad for p in self.parameters)

    @property
    def dtype(self) -> torch.dtype:
        """Of the sharded parameters and their gradients."""
        return self.params.dtype

    @property
    def device(self) -> torch.device:
        return self.params.device

    @property
    def full_dtype(self) -> torch.dtype:
        """Of the unsharded parameters."""
        assert self.full is not None
        return self.full.dtype

    def shards(self) -> list[Tensor]:
        """The plain tensors in which this rank's parameters lie."""
        return [self.params.flat]

    def shard_nbytes(self) -> int:
        """Of the memory of the sharded parameters, as laid out."""
        return self.layout.shard * self.dtype.itemsize

    def copied(self, parameters: Sequence[BucketParameter]) -> FlatBuffer:
        """A buffer for copies of the parameters (``copy.deepcopy``)."""
        home = buffer_of(parameters[0].sharded)
        assert home is not None
        return FlatBuffer(self.layout, parameters, home[0])

    def release_full(self) -> None:
        """Give the memory of the unsharded parameters back."""
        if self.full is not None:
            self.full.release()

    @property
    def is_home(self) -> bool:
        """Whether the sharded parameters lie in the flat tensor that is gathered."""
        storage = self.params.flat.untyped_storage()._cdata
        locals_ = [p.sharded._local_tensor for p in self.parameters]  # type: ignore[attr-defined]
        return all(local.untyped_storage()._cdata == storage for local in locals_)

    def forget(self) -> None:
        """Whatever was made for parameters of another dtype or device."""
        self.full = self.full_grads = self.grads = self.carry = self.kept = None
        self.hooked = False
        for parameter in self.parameters:
            parameter.full = parameter.place = parameter.edge = None
            sharded, grad = parameter.sharded, parameter.sharded.grad
            if grad is not None and (grad.dtype, grad.device) != (sharded.dtype, sharded.device):
                sharded.grad = None

    def make_full(self, pool: Pool, param_dtype: torch.dtype | None, owner: str) -> DBuffer:
        if self.full is None:
            dtype = self.params.dtype
            if param_dtype is not None and dtype.is_floating_point:
                dtype = param_dtype
            self.full = DBuffer.whole(self.layout, dtype, pool, label="parameters", owner=owner)
            for index, parameter in enumerate(self.parameters):
                if hasattr(parameter.sharded._local_tensor, "fsdp_pre_all_gather"):  # type: ignore[attr-defined]
                    raise NotImplementedError(
                        f"the local tensor of {parameter.name!r} was given fsdp_pre_all_gather after fully_shard, when "
                        f"it had been laid out with others; make the parameter an instance of a subclass that has it "
                        f"before"
                    )
                parameter.full = self._unsharded(index, self.full.views[index], parameter.sharded.requires_grad)
        return self.full

    def _unsharded(self, index: int, view: Tensor, requires_grad: bool) -> nn.Parameter:
        outer = self.layout.outer[index] if self.layout.outer else None
        if outer is None:
            # What an extension has made may be of a type of its own.
            kind = WeightParameter if type(view) is Tensor else nn.Parameter
            return kind(view, requires_grad=requires_grad)
        inner = self.layout.mesh.ndim
        assert outer.mesh.mesh_dim_names is not None
        if outer.seen is None:
            mesh, placements = outer.mesh[outer.mesh.mesh_dim_names[inner:]], outer.placements
        else:
            mesh, placements, _ = outer.seen
        stride = torch.empty(outer.shape, device="meta").stride()
        spec = DTensorSpec(mesh, placements, tensor_meta=TensorMeta(torch.Size(outer.shape), stride, view.dtype))
        return nn.Parameter(DTensor(view, spec, requires_grad=False), requires_grad=requires_grad)

    def make_grads(self, pool: Pool, reduce_dtype: torch.dtype | None, owner: str) -> DBuffer:
        if self.full_grads is None:
            dtype = reduce_dtype or self.full_dtype
            self.full_grads = DBuffer.whole(self.layout, dtype, pool, partial=True, label="gradients", owner=owner)
        return self.full_grads

    def adopt_gradients(self) -> None:
        """Find the sums that this backward adds to. Gradients that the user put there are copied together first."""
        present = [p.sharded.grad for p in self.parameters]
        for parameter, grad in zip(self.parameters, present, strict=True):
            parameter.accumulates = grad is not None
        homes = [(index, buffer_of(grad)) for index, grad in enumerate(present) if grad is not None]
        first = next((home[0] for _, home in homes if home is not None), None)
        if not homes or (
            first is not None
            and first.layout is self.layout
            and all(home is not None and home[0] is first and home[1] == index for index, home in homes)
        ):
            self.grads = first
            return
        self.grads, self.in_place = DBuffer.sharded(self.layout, self.dtype, self.device), False
        for index, parameter in enumerate(self.parameters):
            grad = parameter.sharded.grad
            if grad is None:
                continue
            mine = self.grads.dtensor(index)
            mine.copy_(grad)
            parameter.sharded.grad = mine

    def open_grads(self) -> DBuffer:
        """Where reduced gradients go. New memory for every sum: who kept the gradients of the last step keeps them."""
        if self.grads is None:
            self.grads = DBuffer.sharded(self.layout, self.dtype, self.device, zero=False)
            self.in_place = False
        return self.grads

    @property
    def may_stay(self) -> bool:
        """Whether the reduced gradient can be what the unreduced one's memory holds: same type, nothing to add to."""
        assert self.full_grads is not None
        full = self.full_grads
        return self.grads is None and full.dtype == self.dtype and full.device == self.device

    def leave_grads(self) -> None:
        """The reduced gradient stays where it was summed."""
        assert self.full_grads is not None
        self.grads, self.in_place = self.full_grads.leave_shard(), True

    def grads_nbytes(self) -> int:
        """Bytes of the memory that the sharded gradient lies in."""
        if self.in_place and self.full_grads is not None and self.full_grads.lease is not None:
            return self.full_grads.lease.nbytes
        return self.layout.shard * self.dtype.itemsize

    def publish(self, index: int) -> None:
        """Show the reduced gradient on the parameter."""
        sharded = self.parameters[index].sharded
        assert self.grads is not None
        shown = sharded.grad
        if shown is None or buffer_of(shown) != (self.grads, index):
            sharded.grad = self.grads.dtensor(index)
            if shown is not None:
                # Autograd made it in this backward: the loss has a term of the sharded parameters themselves.
                sharded.grad.add_(shown)
        _run_hooks(sharded)


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
        # Called when the last gradient of a graph task has come / before memory for unreduced gradients is taken.
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
        self._extended = [cast("ExtendedBuffer", buffer) for buffer in self.buffers if buffer.extended]

        self._homes = self._find_homes()
        # Of the buffers that modules go on showing gathered when their forward has ended.
        self._versions: list[int] | None = None

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
            self._gathers += [buffer.gather(self.pool, self.name) for buffer in self._extended]
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
        if self._extended:
            self._finish_extended()
        with torch._C.DisableTorchFunctionSubclass(), untransformed():
            self._register_unsharded()
        self._versions = None
        self.is_unsharded = True

    def _finish_extended(self) -> None:
        assert self.pool is not None
        with untransformed(), torch.inference_mode(False), torch.no_grad():
            for buffer in self._extended:
                buffer.finish_gather(self.pool, self.name)
            self._hook_gradients()

    def _register_unsharded(self) -> None:
        for parameter in self.parameters:
            full = parameter.full
            assert full is not None
            if full.requires_grad != parameter.sharded.requires_grad:
                full.requires_grad_(parameter.sharded.requires_grad)
            parameter.trains = full.requires_grad
            for module, attribute in parameter.places:
                module._parameters[attribute] = full

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
            for module, attribute in parameter.places:
                module._parameters[attribute] = parameter.sharded
        for buffer in self.buffers:
            buffer.release_full()
        self.is_unsharded = False
        self.pinned = False

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

    def discard(self) -> None:
        """Back to the resting state, whatever was going on; unreduced gradients are lost."""
        self.finish_reduce()
        self.reshard()
        for buffer in self.buffers:
            if buffer.full_grads is not None:
                buffer.full_grads.release()
        for parameter in self.parameters:
            parameter.written = parameter.used = parameter.accumulates = False
            if parameter.full is not None:
                parameter.full.grad = None
            if parameter.place is not None:
                parameter.place.claimed = False
        self.leave_backward(None)
        self.unreduced = False
        self.calls.clear()
        self.awaited_calls.clear()

    # -- moving --

    def rehome(self) -> None:
        """Bring the sharded parameters back into flat buffers after ``module.to(...)`` / ``to_empty`` gave them
        memory of their own. Those of a buffer wait until all of them have the same dtype and device: the modules of a
        list, and modules within others, may be converted one by one.
        """
        for extended in self._extended:
            extended.rehome()
        for buffer in self.buffers:
            if buffer.extended:
                continue
            locals_ = [p.sharded._local_tensor for p in buffer.parameters]  # type: ignore[attr-defined]
            if buffer.is_home:
                continue
            dtypes, devices = {t.dtype for t in locals_}, {t.device for t in locals_}
            if len(dtypes) > 1 or len(devices) > 1:
                continue
            params = DBuffer.sharded(buffer.layout, dtypes.pop(), devices.pop())
            with torch.no_grad():
                for index, (parameter, local) in enumerate(zip(buffer.parameters, locals_, strict=True)):
                    home = params.dtensor(index)
                    home._local_tensor.copy_(local)
                    home.requires_grad_(parameter.sharded.requires_grad)
                    _move_into(parameter.sharded, home)
            buffer.params = params
            buffer.forget()
        self._homes = self._find_homes()

    def _find_homes(self) -> list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter, Tensor]]:
        """What ``take_up_changes`` compares: where a sharded parameter is registered, itself, its local tensor."""
        return [
            (module._parameters, attribute, p.sharded, p.sharded._local_tensor)  # type: ignore[attr-defined]
            for p in self.parameters
            for module, attribute in p.places
        ]

    def take_up_changes(self, others: Sequence[Bucket] = ()) -> None:
        """Between iterations: what was done to modules that are no FSDPModules themselves (``model.head.to(...)``,
        ``to_empty``, ``load_state_dict(assign=True)``, another parameter assigned), so that the parameters that
        compute, those that are shown and those that an optimizer trains are the same.

        ``others``: the buckets of the model. Raises ``RuntimeError`` where that cannot be: a parameter removed, or of
        another shape, or of another dtype or device than those in its buffer, or tied to one of another bucket.
        """
        if self.is_unsharded:
            self.take_up_changes_of_gathered()
            if all(m._parameters.get(name) is p.full for p in self.parameters for m, name in p.places):
                return
        else:
            for registered, name, sharded, local in self._homes:
                if registered.get(name) is not sharded or sharded._local_tensor is not local:  # type: ignore[attr-defined]
                    break
            else:
                return
        for parameter, other in self.adopt_assigned(others):
            if buffer_of(other) is None:
                supersede(other, parameter.name, ASSIGNED)
        self.rehome()
        for buffer in self.buffers:
            if not buffer.extended and not buffer.is_home:
                where = {p.name: (str(p.sharded.dtype), str(p.sharded.device)) for p in buffer.parameters}
                raise RuntimeError(
                    f"parameters of {self.name!r} that share one flat buffer are now of different dtypes or on "
                    f"different devices: {where}; convert (or materialise) all of them"
                )

    def note_versions(self) -> None:
        """The gathered parameters are as they should be: in-place operations from now on are the user's."""
        self._versions = self._current_versions()

    def _current_versions(self) -> list[int]:
        return [0 if buffer.full is None else buffer.full.views[0]._version for buffer in self.buffers]

    def take_up_changes_of_gathered(self) -> None:
        """What was done to parameters while modules showed the gathered ones, outside of their forward: freezing them
        means the sharded ones too; raises ``RuntimeError`` when values were changed, which the next gather would undo.
        """
        if self._versions is not None and self._versions != self._current_versions():
            self.note_versions()
            # Views of one buffer share their version: which ones is not known.
            raise RuntimeError(
                f"parameters of {self.name!r} were changed in place while they were gathered (after a forward without "
                f"backward, or after unshard()), and the next gather would undo it; change the sharded ones: after a "
                f"backward, under torch.no_grad(), or after module.reshard()"
            )
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in self.parameters:
                full = parameter.full
                if full is not None and full.requires_grad != parameter.trains:
                    parameter.sharded.requires_grad_(full.requires_grad)
                    parameter.trains = full.requires_grad

    def adopt_assigned(self, others: Sequence[Bucket] = ()) -> list[tuple[BucketParameter, nn.Parameter]]:
        """Take values, dtype and device of parameters that were assigned to the modules; ours stay registered. One of
        this bucket's own is tied. Returns what was assigned to each parameter.
        """
        changes = [
            (parameter, place, other)
            for parameter in self.parameters
            for place in parameter.places
            if (other := place[0]._parameters.get(place[1])) is None
            or not (other is parameter.sharded or other is parameter.full)
        ]
        if not changes:
            return []
        adopted = []
        for parameter, (module, _), other in changes:
            adopted.append((parameter, _fitting(parameter, module, other, [o for o in others if o is not self])))
        self.reshard()
        for (parameter, other), (_, place, _) in zip(adopted, changes, strict=True):
            module, attribute = place
            if (own := next((p for p in self.parameters if p.is_shown_as(other)), None)) is not None:
                parameter.places.remove(place)
                own.places.append(place)
                module._parameters[attribute] = own.sharded
                continue
            spec = parameter.sharded._spec  # type: ignore[attr-defined]
            if isinstance(other, DTensor):
                value = other.redistribute(placements=spec.placements)
            else:
                value = distribute_tensor(other.detach(), spec.mesh, spec.placements, src_data_rank=None)
            home = next(buffer.device for buffer in self.buffers if parameter in buffer.parameters)
            _take_values(parameter.sharded, value.detach(), home)
            parameter.sharded.requires_grad_(other.requires_grad)
            module._parameters[attribute] = parameter.sharded
        self.rehome()
        return adopted

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


def _fitting(
    parameter: BucketParameter, module: nn.Module, other: nn.Parameter | None, others: Sequence[Bucket]
) -> nn.Parameter:
    """What stands in a module in the place of a sharded parameter, if it can be its new value."""
    what = f"parameter {parameter.name!r} of shape {tuple(parameter.sharded.shape)}"
    if other is None:
        raise RuntimeError(f"{what} was removed from its {type(module).__name__} after fully_shard; remove it before")
    if other.shape != parameter.sharded.shape:
        raise RuntimeError(
            f"{what} was replaced after fully_shard by one of shape {tuple(other.shape)}; replace it before, or shard "
            f"a module of its own"
        )
    for bucket in others:
        if (tied := next((p for p in bucket.parameters if p.is_shown_as(other)), None)) is not None:
            raise RuntimeError(
                f"{what} was tied after fully_shard to {tied.name!r} of {bucket.name!r}, which is gathered and reduced "
                f"at other times; tie them before, and pass both modules in one list or to the call on their parent"
            )
    return other


def _take_values(sharded: nn.Parameter, value: Tensor, home: torch.device) -> None:
    """Let ``sharded`` hold the local tensor of ``value``, a DTensor, on ``home`` unless that is meta."""
    assert isinstance(value, DTensor)
    local = value._local_tensor if home.type == "meta" else value._local_tensor.to(home)
    if (local.dtype, local.device) != (sharded.dtype, sharded.device):
        # The outer tensor has a dtype and a device too.
        fresh = nn.Parameter(DTensor(local, value._spec, requires_grad=False), requires_grad=sharded.requires_grad)
        fresh.__dict__.update(sharded.__dict__)
        torch.utils.swap_tensors(sharded, fresh)
    sharded._local_tensor = local  # type: ignore[attr-defined]  # a DTensor


def _run_hooks(parameter: nn.Parameter) -> None:
    """``register_post_accumulate_grad_hook`` on a sharded parameter fires when its reduced gradient is there."""
    for hook in (parameter._post_accumulate_grad_hooks or {}).values():
        hook(parameter)


# nn.Parameter(DTensor) is typed as a plain Parameter: hence the ignores where this file reaches its local and spec.


def _move_into(parameter: nn.Parameter, home: DTensor) -> None:
    """Make ``parameter`` (an ``nn.Parameter`` that is a DTensor) a view of ``home``'s local tensor, keeping its
    identity.
    """
    parameter._local_tensor = home._local_tensor  # type: ignore[attr-defined]
    parameter._spec = home._spec  # type: ignore[attr-defined]
