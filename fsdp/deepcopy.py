"""``copy.deepcopy`` of a sharded module: another sharded module, with shards, buffers and hooks of its own.

    average = copy.deepcopy(model)          or torch.optim.swa_utils.AveragedModel(model)

No communication: every rank copies its shards. The copy has the layout, the policies and the settings of the original
and starts between iterations, without gradients; it becomes a root when its own first forward runs.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp.bucket import Bucket
from fsdp.changes import take_up_changes
from fsdp.flat_buffer import BucketParameter, FlatBuffer, dtensor_of, parameter_of
from fsdp.hooks import State, state_of
from ragged_shard.dbuffer import DBuffer

__all__ = ["deepcopy"]


def deepcopy(module: nn.Module, memo: dict[int, Any], register_method: Callable[[nn.Module, str], None]) -> nn.Module:
    """What ``__deepcopy__`` of a sharded module returns. ``register_method``: ``fsdp.register_fsdp_forward_method``.

    Raises ``RuntimeError`` in the middle of an iteration, when parameters are whole and gradients unreduced.
    """
    found: dict[int, State] = {}
    for child in module.modules():
        if (state := state_of(child)) is not None and id(state) not in memo:
            found[id(state)] = state
    for state in found.values():
        _refuse_in_an_iteration(state)
    buckets = {key: _copy_bucket(state.bucket, memo) for key, state in found.items()}
    for key in found:
        # The hooks in the module's dictionaries are bound methods of the state: their copies will be of this one.
        memo[key] = object.__new__(State)

    result = object.__new__(type(module))
    memo[id(module)] = result
    result.__setstate__(copy.deepcopy(module.__getstate__(), memo))

    for key, state in found.items():
        _finish(memo[key], state, buckets[key], memo, register_method)
    return result


def _refuse_in_an_iteration(state: State) -> None:
    running = state.schedule is not None and state.schedule.root is not None
    if running or torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            f"bucket {state.bucket.name!r} cannot be copied in the middle of an iteration; copy the model between "
            f"optimizer.step() and the next forward"
        )
    # Registers the shards, which are what is copied.
    take_up_changes(state.bucket)
    state.bucket.reshard()


def _copy_bucket(bucket: Bucket, memo: dict[int, Any]) -> list[FlatBuffer]:
    """The bucket's buffers with the same values; ``memo`` maps its parameters to the new ones."""
    buffers = []
    for buffer in bucket.buffers:
        homes = _copy_shards(buffer)
        parameters = []
        for home, parameter in zip(homes, buffer.parameters, strict=True):
            sharded = parameter_of(home, parameter.sharded.requires_grad)
            for attribute, value in parameter.sharded.__dict__.items():
                if attribute not in sharded.__dict__:
                    setattr(sharded, attribute, copy.deepcopy(value, memo))
            memo[id(parameter.sharded)] = sharded
            parameters.append(BucketParameter(parameter.name, list(parameter.places), sharded))
        copied = buffer.copied(parameters)
        copied.reduce_group = buffer.reduce_group
        buffers.append(copied)
    return buffers


def _copy_shards(buffer: FlatBuffer) -> list[DTensor]:
    """Copies of a buffer's sharded parameters: in a flat buffer again, but for those of tensor subclasses."""
    if buffer.extended:
        (old,) = [dtensor_of(parameter.sharded) for parameter in buffer.parameters]
        return [DTensor(old._local_tensor.detach().clone(), old._spec, requires_grad=False)]
    params = DBuffer.sharded(buffer.layout, buffer.dtype, buffer.device, zero=False)
    with torch.no_grad():
        params.flat.copy_(buffer.params.flat)
    return [params.dtensor(index) for index in range(len(buffer.parameters))]


def _finish(
    copied: State,
    state: State,
    buffers: list[FlatBuffer],
    memo: dict[int, Any],
    register_method: Callable[[nn.Module, str], None],
) -> None:
    """Set up the state of a copied module, now that the modules it speaks of exist."""
    # Those of a list lie elsewhere in the model, which may be copied as a whole or not.
    modules = [copy.deepcopy(module, memo) for module in state.modules]
    for buffer in buffers:
        for parameter in buffer.parameters:
            parameter.places = [(memo[id(module)], attribute) for module, attribute in parameter.places]
    State.__init__(
        copied,
        modules,
        _bucket_over(buffers, state.bucket),
        state.device,
        state.mp_policy,
        state.reshard_after_forward,
        hooked=True,
    )
    copied.forward_prefetch = [memo[id(other)] for other in state.forward_prefetch if id(other) in memo]
    copied.backward_prefetch = [memo[id(other)] for other in state.backward_prefetch if id(other) in memo]
    for original, module in zip(state.modules, modules, strict=True):
        for name, method in list(vars(module).items()):
            if (inner := getattr(method, "of_fsdp", None)) is not None:
                bound = isinstance(inner, types.MethodType) and inner.__self__ is original
                setattr(module, name, types.MethodType(inner.__func__, module) if bound else inner)
                register_method(module, name)


# What a user can set on a bucket, by the methods of FSDPModule.
_SETTINGS = (
    "reshard_after_forward",
    "reshard_after_backward",
    "requires_gradient_sync",
    "requires_all_reduce",
    "divide_factor",
    "unshard_in_backward",
    "max_reductions",
    "post_forward_group",
    "post_forward_size",
    "keeps_unsharded",
    "gather_collective",
    "reduce_collective",
    "reduced_hook",
)


def _bucket_over(buffers: list[FlatBuffer], original: Bucket) -> Bucket:
    bucket = Bucket(
        original.name,
        buffers,
        param_dtype=original.param_dtype,
        reduce_dtype=original.reduce_dtype,
        replicate_dim=original.replicate_dim,
    )
    for name in _SETTINGS:
        setattr(bucket, name, getattr(original, name))
    return bucket
