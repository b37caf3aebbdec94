"""What users do to a module's parameters after it was sharded: other dtypes and devices, other tensors, new values.

Sharded parameters must lie in their bucket's flat buffers, and be those that are registered in the modules and that
an optimizer trains.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import stateless

from fsdp.flat_buffer import dtensor_of, register
from fsdp.superseded import ASSIGNED, supersede
from ragged_shard.dbuffer import DBuffer, buffer_of

if TYPE_CHECKING:
    from fsdp.bucket import Bucket
    from fsdp.flat_buffer import BucketParameter

__all__ = [
    "adopt_assigned",
    "find_homes",
    "note_versions",
    "rehome",
    "take_up_changes",
    "take_up_changes_of_gathered",
]


def rehome(bucket: Bucket) -> None:
    """Bring the sharded parameters back into flat buffers after ``module.to(...)`` / ``to_empty`` gave them
    memory of their own. Those of a buffer wait until all of them have the same dtype and device: the modules of a
    list, and modules within others, may be converted one by one.
    """
    for extended in bucket.extended:
        extended.rehome()
    for buffer in bucket.buffers:
        if buffer.extended:
            continue
        locals_ = [p.local for p in buffer.parameters]
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
    bucket.homes = find_homes(bucket)


def find_homes(bucket: Bucket) -> list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter, Tensor]]:
    """What ``take_up_changes`` compares: where a sharded parameter is registered, itself, its local tensor."""
    return [
        (module._parameters, attribute, p.sharded, p.local) for p in bucket.parameters for module, attribute in p.places
    ]


def take_up_changes(bucket: Bucket, others: Sequence[Bucket] = ()) -> None:
    """Between iterations: what was done to modules that are no FSDPModules themselves (``model.head.to(...)``,
    ``to_empty``, ``load_state_dict(assign=True)``, another parameter assigned), so that the parameters that
    compute, those that are shown and those that an optimizer trains are the same.

    ``others``: the buckets of the model. Raises ``RuntimeError`` where that cannot be: a parameter removed, or of
    another shape, or of another dtype or device than those in its buffer, or tied to one of another bucket.
    """
    if bucket.is_unsharded:
        take_up_changes_of_gathered(bucket)
        if all(m._parameters.get(name) is p.full for p in bucket.parameters for m, name in p.places):
            return
    else:
        for registered, name, sharded, local in bucket.homes:
            if registered.get(name) is not sharded or dtensor_of(sharded)._local_tensor is not local:
                break
        else:
            return
    for parameter, other in adopt_assigned(bucket, others):
        if buffer_of(other) is None:
            supersede(other, parameter.name, ASSIGNED)
    rehome(bucket)
    for buffer in bucket.buffers:
        if not buffer.extended and not buffer.is_home:
            where = {p.name: (str(p.sharded.dtype), str(p.sharded.device)) for p in buffer.parameters}
            raise RuntimeError(
                f"parameters of {bucket.name!r} that share one flat buffer are now of different dtypes or on "
                f"different devices: {where}; convert (or materialise) all of them"
            )


def note_versions(bucket: Bucket) -> None:
    """The gathered parameters are as they should be: in-place operations from now on are the user's."""
    bucket.versions = _current_versions(bucket)


def _current_versions(bucket: Bucket) -> list[int]:
    return [0 if buffer.full is None else buffer.full.views[0]._version for buffer in bucket.buffers]


def take_up_changes_of_gathered(bucket: Bucket) -> None:
    """What was done to parameters while modules showed the gathered ones, outside of their forward: freezing them
    means the sharded ones too; raises ``RuntimeError`` when values were changed, which the next gather would undo.
    """
    if bucket.versions is not None and bucket.versions != _current_versions(bucket):
        note_versions(bucket)
        # Views of one buffer share their version: which ones is not known.
        raise RuntimeError(
            f"parameters of {bucket.name!r} were changed in place while they were gathered (after a forward without "
            f"backward, or after unshard()), and the next gather would undo it; change the sharded ones: after a "
            f"backward, under torch.no_grad(), or after module.reshard()"
        )
    with torch._C.DisableTorchFunctionSubclass():
        for parameter in bucket.parameters:
            full = parameter.full
            if full is not None and full.requires_grad != parameter.trains:
                parameter.sharded.requires_grad_(full.requires_grad)
                parameter.trains = full.requires_grad


def adopt_assigned(bucket: Bucket, others: Sequence[Bucket] = ()) -> list[tuple[BucketParameter, nn.Parameter]]:
    """Take values, dtype and device of parameters that were assigned to the modules; ours stay registered. One of
    this bucket's own is tied. Returns what was assigned to each parameter.
    """
    changes = [
        (parameter, place, other)
        for parameter in bucket.parameters
        for place in parameter.places
        if (other := place[0]._parameters.get(place[1])) is None
        or not (other is parameter.sharded or other is parameter.full)
    ]
    if not changes:
        return []
    if _is_functional_call():
        raise RuntimeError(
            f"torch.func.functional_call got other tensors than parameter {changes[0][0].name!r} of {bucket.name!r}: a "
            f"sharded module computes with what is gathered from its own shards. Copy the values into the parameters "
            f"under torch.no_grad() and back afterwards, or run a copy.deepcopy of the model"
        )
    adopted = []
    for parameter, (module, _), other in changes:
        adopted.append((parameter, _fitting(parameter, module, other, [o for o in others if o is not bucket])))
    bucket.reshard()
    for (parameter, other), (_, place, _) in zip(adopted, changes, strict=True):
        module, attribute = place
        if (own := next((p for p in bucket.parameters if p.is_shown_as(other)), None)) is not None:
            parameter.places.remove(place)
            own.places.append(place)
            register(module, attribute, own.sharded)
            continue
        spec = dtensor_of(parameter.sharded)._spec
        if isinstance(other, DTensor):
            value = other.redistribute(placements=spec.placements)
        else:
            value = distribute_tensor(other.detach(), spec.mesh, spec.placements, src_data_rank=None)
        home = next(buffer.device for buffer in bucket.buffers if parameter in buffer.parameters)
        _take_values(parameter.sharded, value.detach(), home)
        parameter.sharded.requires_grad_(other.requires_grad)
        register(module, attribute, parameter.sharded)
    rehome(bucket)
    return adopted


def _is_functional_call() -> bool:
    """Whether parameters are replaced for one call alone."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not stateless._functional_call.__code__:
        frame = frame.f_back
    return frame is not None


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
    dtensor_of(sharded)._local_tensor = local


def _move_into(parameter: nn.Parameter, home: DTensor) -> None:
    """Make ``parameter`` (an ``nn.Parameter`` that is a DTensor) a view of ``home``'s local tensor, keeping its
    identity.
    """
    dtensor = dtensor_of(parameter)
    dtensor._local_tensor, dtensor._spec = home._local_tensor, home._spec
