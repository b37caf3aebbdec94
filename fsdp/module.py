"""FSDPModule: what ``fully_shard`` mixes into a module's class. torch's methods with torch's semantics."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import UnshardHandle as TorchUnshardHandle

from fsdp import outdated
from fsdp.bucket import Bucket
from fsdp.changes import note_versions, rehome, take_up_changes, take_up_changes_of_gathered
from fsdp.deepcopy import deepcopy
from fsdp.hooks import State, state_of

__all__ = ["FSDPModule", "UnshardHandle", "fsdp_class", "register_fsdp_forward_method", "share_comm_ctx"]


class UnshardHandle(TorchUnshardHandle):
    """What ``module.unshard(async_op=True)`` returns."""

    def __init__(self, bucket: Bucket | None) -> None:
        self._bucket = bucket

    def wait(self) -> None:
        """Wait until the module's parameters are the gathered ones."""
        if self._bucket is not None:
            self._bucket.wait_unshard()
            note_versions(self._bucket)
            self._bucket = None


class FSDPModule(TorchFSDPModule):
    """The class that ``fully_shard`` mixes into a module's own; torch's methods with torch's semantics.

    A subclass of torch's FSDPModule, so that ``isinstance`` checks elsewhere hold.
    """

    # FSDP<Original>, this class, torch's class, Original: where `__new__` of torch's class finds the original one.
    _orig_cls_mro_index = 3

    def _get_fsdp_state(self) -> State:  # type: ignore[override]  # ours, in the place of torch's
        state = state_of(cast(nn.Module, self))
        if state is None:
            raise RuntimeError(f"{type(self).__name__} was not passed to fully_shard itself; was it copied?")
        return state

    def _states(self, recurse: bool) -> list[State]:
        if not recurse:
            return [self._get_fsdp_state()]
        found: dict[int, State] = {}
        for module in cast(nn.Module, self).modules():
            if (state := state_of(module)) is not None:
                found[id(state)] = state
        return list(found.values())

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's parameters (not its children's). ``async_op``: return a handle to wait on."""
        state = self._get_fsdp_state()
        if state.schedule is None:
            state.bind_alone()
        bucket = state.bucket
        take_up_changes(bucket)
        if outdated.is_outdated(bucket):
            bucket.reshard()
        bucket.pinned = True
        bucket.unshard()
        handle = UnshardHandle(bucket)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this module's gathered parameters (not its children's) and register the sharded ones.

        Raises ``RuntimeError`` when the gathered ones were changed in place, which is lost.
        """
        bucket = self._get_fsdp_state().bucket
        try:
            if bucket.is_unsharded:
                take_up_changes_of_gathered(bucket)
        finally:
            bucket.reshard()

    def reset_iter_state(self) -> None:
        """After an exception in forward or backward: back to the resting state. The next root forward does it by
        itself.

        Unreduced gradients are lost, those of earlier micro-batches included. Raises ``RuntimeError`` on a module that
        is not the root.
        """
        state = self._get_fsdp_state()
        if state.is_root is False:
            raise RuntimeError("reset_iter_state must be called on the root module, the one that ran forward first")
        if state.schedule is not None:
            state.schedule.reset()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """torch's, for the sharded parameters too while modules show the gathered ones (between forward and backward,
        after a failed backward, after ``unshard()``), whose gradients are the sharded ones'.
        """
        super(TorchFSDPModule, self).zero_grad(set_to_none)  # type: ignore[misc]  # nn.Module's, which the class has
        for state in self._states(True):
            for parameter in state.bucket.parameters if state.bucket.is_unsharded else ():
                if (gradient := parameter.sharded.grad) is not None:
                    parameter.sharded.grad = None if set_to_none else gradient.detach().zero_()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accepted for compatibility: every backward ends with its gradients reduced and published."""

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """``False``: accumulate unreduced gradients, in the reduction dtype, without communication."""
        for state in self._states(recurse):
            state.bucket.requires_gradient_sync = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """HSDP, ``False``: reduce gradients within a replica only; they appear once a backward reduces over
        replicas.
        """
        for state in self._states(recurse):
            state.bucket.requires_all_reduce = requires_all_reduce

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Change ``fully_shard``'s argument; ``True`` or ``False`` (``ValueError`` for anything else)."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward must be a bool, got {reshard_after_forward!r}")
        for state in self._states(recurse):
            state.reshard_after_forward = reshard_after_forward
            state.bucket.keeps_unsharded = not reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """``False``: keep the gathered parameters after backward, for accumulation without gathering again."""
        for state in self._states(recurse):
            state.bucket.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: list[TorchFSDPModule]) -> None:
        """Gather these modules' parameters as soon as this one's are there, instead of the next in last iteration's
        order.
        """
        self._get_fsdp_state().forward_prefetch = _states_of(modules)

    def set_modules_to_backward_prefetch(self, modules: list[TorchFSDPModule]) -> None:
        """The same in backward."""
        self._get_fsdp_state().backward_prefetch = _states_of(modules)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """``False``: backward does not need this module's own parameters (an embedding's), do not gather them for
        it.
        """
        self._get_fsdp_state().bucket.unshard_in_backward = unshard_in_backward

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide summed gradients by ``factor`` instead of the number of ranks. Works on gloo too."""
        if not factor > 0:
            raise ValueError(f"the gradient divide factor must be positive, got {factor!r}")
        self._get_fsdp_state().bucket.divide_factor = float(factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """torch's older name of ``set_gradient_divide_factor``."""
        self.set_gradient_divide_factor(factor)

    def set_custom_all_gather(self, comm: Callable[..., Any]) -> None:
        """Gather this module's parameters by ``comm(output_tensor, input_tensor, group, async_op)``. The input is this
        rank's slot of the output. Memory comes from the pool: ``comm.allocate`` is not called.
        """
        self._get_fsdp_state().bucket.gather_collective = comm

    def set_custom_reduce_scatter(self, comm: Callable[..., Any]) -> None:
        """Reduce this module's gradients by ``comm(output_tensor, input_tensor, group, op, async_op)``. The output is
        this rank's slot of the input, ``op`` is SUM. ``comm.allocate`` is not called.
        """
        self._get_fsdp_state().bucket.reduce_collective = comm

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None], *, stream: torch.Stream | None = None) -> None:
        """Call ``hook`` with this module's reduced gradients, 1-D, in the reduction dtype, before they are divided and
        published: a sum over further ranks, for instance. It runs on ``stream``, by default the one that reduces.
        """
        state = self._get_fsdp_state()
        if len(state.bucket.meshes) > 1:
            raise ValueError("set_all_reduce_hook: this module's parameters have several meshes; which one is reduced?")
        if stream is not None and state.bucket.replicate_dim is not None:
            raise ValueError("set_all_reduce_hook: with replicas (HSDP) the hook runs on the stream that reduces")
        on_cpu = state.device.type == "cpu"
        state.bucket.reduced_hook = hook if stream is None or on_cpu else functools.partial(_on_stream, hook, stream)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Reduce in a group of its own, so that reductions and gathers need not wait for each other. Every rank of
        these modules' meshes must call it.
        """
        groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for state in self._states(recurse):
            for buffer in state.bucket.buffers:
                ranks = tuple(dist.get_process_group_ranks(buffer.layout.group))
                if enable and ranks not in groups:
                    groups[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
                buffer.reduce_group = groups[ranks] if enable else None

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Let the next iteration's gathers wait for ``event``, recorded after the optimizer's step, instead of for all
        that the compute stream has been given. Once; without effect on CPU. Call it on the root.
        """
        self._get_fsdp_state().lazy_init().streams.optimizer_event = event

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many buffers of unreduced gradients may wait for their reductions, 1 by default: with more, a bucket's
        gradients are computed, and its reduction started, while earlier reductions still run, in more memory.

        Raises ``TypeError`` and ``ValueError`` as torch.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, got {max_input_buffers!r}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be at least 1, got {max_input_buffers}")
        for state in self._states(recurse):
            state.bucket.max_reductions = max_input_buffers

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Take the memory of communication buffers from the process group's own allocator, where its backend has one
        (NCCL does, gloo does not). One pool serves a root and all modules below it, so the last call counts for them.
        """
        self._get_fsdp_state().bucket.allocate_from_group(enable)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accepted for compatibility: gradients are always summed and then divided."""

    def set_reduce_scatter_unused_params(self, *args: Any, **kwargs: Any) -> None:
        """Accepted for compatibility: parameters that some ranks did not use are always reduced."""

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Accepted for compatibility: gathers are always asynchronous."""

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """``module.to(...)``, ``to_empty``, ``half`` and the like: on the shards, which then go back into flat
        buffers.
        """
        self.reshard()
        result = super(TorchFSDPModule, self)._apply(*args, **kwargs)  # type: ignore[misc]  # nn.Module's too
        rehome(self._get_fsdp_state().bucket)
        return result


def _unsupported(name: str, why: str) -> Callable[..., None]:
    def method(self: FSDPModule, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"{name}: {why}")

    method.__name__ = name
    method.__doc__ = f"Not available: {why}."
    return method


for _name, _why in {
    "set_symm_mem_for_comm": (
        "symmetric memory wants every buffer announced to all ranks by NCCL; buffers come from one pool here, whose "
        "memory set_allocate_memory_from_process_group_for_comm(True) takes from NCCL"
    ),
}.items():
    setattr(FSDPModule, _name, _unsupported(_name, _why))


def _on_stream(hook: Callable[[Tensor], object], stream: torch.Stream, reduced: Tensor) -> None:
    """Run ``hook`` on ``stream``, between what the current stream has been given and what it will be."""
    current = torch.accelerator.current_stream()
    stream.wait_stream(current)
    with stream:
        hook(reduced)
    current.wait_stream(stream)


def _states_of(modules: Iterable[TorchFSDPModule]) -> list[State]:
    states = []
    for module in modules:
        state = state_of(cast(nn.Module, module))
        if state is None:
            raise ValueError(f"expected modules that were passed to fully_shard, got {type(module).__name__}")
        states.append(state)
    return states


@functools.cache
def fsdp_class(cls: type[nn.Module]) -> type[nn.Module]:
    return type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__deepcopy__": _deepcopy, "__module__": cls.__module__})


def _deepcopy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
    return deepcopy(self, memo, register_fsdp_forward_method)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Treat ``module.method_name`` as a forward: gather before it, free after it. No effect on other modules, as
    torch's.
    """
    state = state_of(module)
    if state is None:
        return
    if not hasattr(module, method_name):
        raise ValueError(f"{type(module).__name__} has no method {method_name!r}")
    original = getattr(module, method_name)

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = state.pre_forward(module, args, kwargs)
        try:
            output = original(*args, **kwargs)
        except Exception:
            state.forward_failed()
            raise
        return state.post_forward(module, args, kwargs, output)

    method.of_fsdp = original  # type: ignore[attr-defined]  # a mark for deepcopy
    setattr(module, method_name, method)


def share_comm_ctx(modules: list[TorchFSDPModule]) -> None:
    """Let several roots (pipeline stages) share streams and buffer memory. Call it before their first forward."""
    states = _states_of(modules)
    if not states:
        return
    first = states[0].lazy_init()
    for state in states[1:]:
        state.share(first)
