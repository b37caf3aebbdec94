"""A bucket's flat buffer: what its parameters and their gradients lie in, sharded and whole.

    params      sharded, the original dtype        what ``module.parameters()`` shows between iterations (DTensors)
    full        whole, the compute dtype           what the module computes with; memory only while unsharded
    full_grads  whole, the reduction dtype         unreduced gradients; memory from the first gradient to the reduction
    grads       sharded, the original dtype        what ``parameter.grad`` shows (DTensors); lives as long as those do

``grads`` has memory of its own, except at the end of a backward on CPU: then no other bucket needs that of
``full_grads`` any more, and the shard stays where it was summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from fsdp.weight_grad import GradientPlace, WeightParameter
from ragged_shard.dbuffer import DBuffer, Layout, buffer_of
from ragged_shard.pool import Lease, Pool

__all__ = ["BucketParameter", "FlatBuffer", "dtensor_of", "parameter_of", "register"]


def dtensor_of(parameter: nn.Parameter) -> DTensor:
    """A sharded parameter as the DTensor that it is: ``nn.Parameter(dtensor)`` is typed as a plain Parameter."""
    return cast(DTensor, parameter)


def parameter_of(dtensor: DTensor, requires_grad: bool) -> nn.Parameter:
    """``dtensor`` as a parameter with the same local tensor, of which ``nn.Parameter`` makes an alias: buffers know the
    one they made.
    """
    parameter = nn.Parameter(dtensor, requires_grad=requires_grad)
    dtensor_of(parameter)._local_tensor = dtensor._local_tensor
    return parameter


_SETATTR = nn.Module.__setattr__


def register(module: nn.Module, attribute: str, parameter: nn.Parameter) -> None:
    """Make ``parameter`` the module's; by its class's own ``__setattr__`` if there is one, which may keep it elsewhere
    too.
    """
    if type(module).__setattr__ is _SETATTR:
        module._parameters[attribute] = parameter
    else:
        setattr(module, attribute, parameter)


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

    @property
    def local(self) -> Tensor:
        """What lies on this rank."""
        return dtensor_of(self.sharded)._local_tensor

    def show(self, parameter: nn.Parameter) -> None:
        """Register ``parameter``, the sharded or the unsharded one, with the modules."""
        for module, attribute in self.places:
            if type(module).__setattr__ is _SETATTR:
                module._parameters[attribute] = parameter
            else:
                register(module, attribute, parameter)

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
        return all(p.local.untyped_storage()._cdata == storage for p in self.parameters)

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
                if hasattr(parameter.local, "fsdp_pre_all_gather"):
                    # A layout is settled in fully_shard; the method, set on a tensor later, would never be called.
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


def _run_hooks(parameter: nn.Parameter) -> None:
    """``register_post_accumulate_grad_hook`` on a sharded parameter fires when its reduced gradient is there."""
    for hook in (parameter._post_accumulate_grad_hooks or {}).values():
        hook(parameter)
