"""The public API: ``fully_shard`` with torch's signature and semantics, plus ``orig_param_policy``.

    from fsdp import fully_shard                       # instead of torch.distributed.fsdp

    for block in model.blocks:
        fully_shard(block, orig_param_policy=policy)
    fully_shard(model, orig_param_policy=policy)

See arXiv 2602.22437 (veScale-FSDP) for the design and torch's documentation of ``fully_shard`` for the semantics.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import UnshardHandle as TorchUnshardHandle
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from fsdp.agree import agree
from fsdp.bucket import Bucket, BucketParameter, FlatBuffer
from fsdp.hooks import State, state_of
from ragged_shard.dbuffer import DBuffer, Layout
from ragged_shard.planner import BucketPlan, TensorSpec, plan_bucket
from ragged_shard.policy import OrigParamPolicy, apply_policy

__all__ = ["FSDPModule", "UnshardHandle", "fully_shard", "register_fsdp_forward_method", "share_comm_ctx"]

# Chunks of 128 bytes keep every rank's slot aligned for vector loads and for NCCL.
ALIGNMENT_BYTES = 128

M = TypeVar("M", bound=nn.Module)


@overload
def fully_shard(module: M, **options: Any) -> M: ...
@overload
def fully_shard(module: Sequence[nn.Module], **options: Any) -> list[nn.Module]: ...
def fully_shard(
    module: nn.Module | Sequence[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy = OffloadPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
    orig_param_policy: OrigParamPolicy | None = None,
) -> nn.Module | list[nn.Module]:
    """Shard the parameters of ``module`` (or of a list of modules, as one bucket) that no earlier call has sharded.

    Call it bottom-up, on each block and on the whole model last. Afterwards ``module.parameters()`` are DTensors with a
    RaggedShard placement over one flat buffer; ``torch.optim``, gradient clipping and
    ``torch.distributed.checkpoint`` work on them unchanged. Build the optimizer after sharding.

    Args:
        module: the module, changed in place, or a list of modules gathered together.
        mesh: 1-D: shard over it. 2-D ``(replicate, shard)``: HSDP. Default: all ranks.
        reshard_after_forward: ``True`` frees the gathered parameters after forward and gathers them again in backward,
            ``False`` keeps them. ``None``: ``True``, except for the root and the bucket that backward starts with.
        mp_policy: dtypes of computation, reduction, inputs and outputs, as torch's.
        offload_policy: torch's; parameters that live on the CPU anyway need none.
        ignored_params: parameters to leave alone.
        orig_param_policy: ``(name, parameter) -> ParamPolicy | None``; its ``block`` says where the parameter may be
            cut. ``name`` is relative to ``module`` (``"0.q_proj.weight"`` for a list).

    Raises (the same on every rank, before anything is changed):
        ValueError: a module sharded twice, a parameter tied to one in another bucket, a mesh without this rank or of
            more than two dimensions, a block that does not fit its parameter, layouts that differ between ranks.
        TypeError: a policy that returns no ParamPolicy.
    """
    modules = [module] if isinstance(module, nn.Module) else list(module)
    mesh = mesh if mesh is not None else _default_mesh()
    found: list[_Found] = []

    def plan() -> str:
        _validate(modules, mesh, reshard_after_forward, offload_policy)
        found.extend(_parameters(modules, ignored_params or set(), orig_param_policy))
        for group in _groups(found):
            group.plan = plan_bucket(group.specs, mesh.size(mesh.ndim - 1), alignment_bytes=ALIGNMENT_BYTES)
            groups.append(group)
        return "\n".join(group.describe() for group in groups)

    groups: list[_Group] = []
    agree(mesh, "fully_shard", plan)

    device = _device_of(mesh)
    buffers = [buffer for group in groups for buffer in group.build(mesh, device)]
    bucket = Bucket(
        _name_of(modules),
        buffers,
        param_dtype=mp_policy.param_dtype,
        reduce_dtype=mp_policy.reduce_dtype,
        replicate_dim=0 if mesh.ndim == 2 else None,
    )
    bucket.keeps_unsharded = reshard_after_forward is False
    _move_buffers(modules, device)
    State(modules, bucket, device, mp_policy, cast("bool | None", reshard_after_forward))
    for m in modules:
        m.__class__ = _fsdp_class(type(m))
    return module if isinstance(module, nn.Module) else cast("list[nn.Module]", module)


def _default_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        dist.init_process_group()
    device = torch.accelerator.current_accelerator()
    backend = "cpu" if device is None else device.type
    return init_device_mesh(backend, (dist.get_world_size(),))


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def _name_of(modules: Sequence[nn.Module]) -> str:
    return ", ".join(type(m).__name__ for m in modules)


def _validate(
    modules: Sequence[nn.Module], mesh: DeviceMesh, reshard_after_forward: bool | int | None, offload: OffloadPolicy
) -> None:
    if not modules:
        raise ValueError("fully_shard got an empty list of modules")
    for module in modules:
        if not isinstance(module, nn.Module):
            raise TypeError(f"fully_shard takes a module or a list of modules, got {module!r}")
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
            raise ValueError(
                f"fully_shard cannot hook a {type(module).__name__}, which has no forward; call it on each of its modules, "
                f"or pass them as a list"
            )
        if isinstance(module, TorchFSDPModule):
            raise ValueError(
                f"{type(module).__name__} was sharded before (parameters: "
                f"{', '.join(n for n, _ in list(module.named_parameters())[:3])}, ...); call fully_shard once per module, "
                f"bottom-up"
            )
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"fully_shard takes a mesh of one dimension (shard) or two (replicate, shard), got {mesh.ndim} dimensions: {mesh}; "
            f"pass the data-parallel part, such as mesh['dp']"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} is not in {mesh}; pass a mesh of which every calling rank is a part")
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
        raise NotImplementedError(
            f"reshard_after_forward={reshard_after_forward!r}: resharding to a smaller group is not implemented; use True, False "
            f"or None"
        )
    if isinstance(offload, CPUOffloadPolicy) and mesh.device_type != "cpu":
        raise NotImplementedError("CPUOffloadPolicy is not implemented for accelerators; leave offload_policy out")


class _Found:
    """A parameter that this call shards: its name, every place that holds it, and its policy's block."""

    def __init__(self, name: str, parameter: nn.Parameter, block: int) -> None:
        self.name, self.parameter, self.block = name, parameter, block
        self.places: list[tuple[nn.Module, str]] = []


def _parameters(
    modules: Sequence[nn.Module], ignored: set[nn.Parameter], policy: OrigParamPolicy | None
) -> list[_Found]:
    found: dict[nn.Parameter, _Found] = {}
    seen: set[nn.Module] = set()

    def visit(module: nn.Module, prefix: str, top: bool) -> None:
        if module in seen or (not top and state_of(module) is not None):
            return
        seen.add(module)
        for attribute, parameter in module._parameters.items():
            if parameter is None or parameter in ignored:
                continue
            name = prefix + attribute
            if parameter not in found:
                found[parameter] = _inspect(name, parameter, policy)
            found[parameter].places.append((module, attribute))
        for attribute, child in module._modules.items():
            if child is not None:
                visit(child, f"{prefix}{attribute}.", False)

    for index, module in enumerate(modules):
        visit(module, f"{index}." if len(modules) > 1 else "", True)
    return list(found.values())


def _inspect(name: str, parameter: nn.Parameter, policy: OrigParamPolicy | None) -> _Found:
    if (owner := _superseded.get(parameter)) is not None:
        raise ValueError(
            f"parameter {name!r} is tied to {owner!r}, which an earlier fully_shard call has sharded; parameters that share "
            f"memory must lie in one bucket: leave that module to the call on their common parent, or pass both in one list"
        )
    if isinstance(parameter, DTensor):
        raise ValueError(
            f"parameter {name!r} is a DTensor with placements {parameter.placements} on {parameter.device_mesh}; only plain "
            f"parameters can be sharded"
        )
    answer = apply_policy(policy, name, parameter)
    block = 1 if answer.block is None else answer.block.numel(parameter.shape)
    return _Found(name, parameter, block)


class _Group:
    """Parameters of one dtype and one ``requires_grad``: what can lie in one flat buffer and be reduced together."""

    def __init__(self, dtype: torch.dtype, members: list[_Found]) -> None:
        self.dtype, self.members = dtype, members
        self.specs = [TensorSpec(m.name, m.parameter.numel(), dtype.itemsize, m.block) for m in members]
        self.plan: BucketPlan | None = None

    def describe(self) -> str:
        """What must be equal on all ranks, one line a parameter, so that a difference can be named."""
        assert self.plan is not None
        lines = [f"{m.name} {tuple(m.parameter.shape)} {self.dtype} block={m.block}" for m in self.members]
        return "\n".join([*lines, f"plan {self.plan.digest()}"])

    def build(self, mesh: DeviceMesh, device: torch.device) -> Iterable[FlatBuffer]:
        assert self.plan is not None
        by_name = {m.name: m for m in self.members}
        for plan in self.plan.buffers:
            members = [by_name[name] for name, _ in plan.starts]
            shapes = tuple(tuple(m.parameter.shape) for m in members)
            layout = Layout(plan, shapes, mesh, mesh.ndim - 1)
            meta = members[0].parameter.device.type == "meta"
            params = DBuffer.sharded(layout, self.dtype, torch.device("meta") if meta else device)
            parameters = []
            for index, member in enumerate(members):
                parameters.append(_shard(member, params, index))
            yield FlatBuffer(layout, parameters, params)


def _groups(found: list[_Found]) -> list[_Group]:
    groups: dict[tuple[torch.dtype, bool, bool], list[_Found]] = {}
    for one in found:
        p = one.parameter
        groups.setdefault((p.dtype, p.requires_grad, p.device.type == "meta"), []).append(one)
    return [_Group(key[0], members) for key, members in groups.items()]


def _shard(member: _Found, params: DBuffer, index: int) -> BucketParameter:
    """Replace a parameter by its shard, copied from this rank's own full copy (no communication, as torch)."""
    original = member.parameter
    dtensor = params.dtensor(index)
    local = dtensor._local_tensor
    base, _ = params.plan.owned(params.layout.rank)
    start = dict(params.plan.starts)[member.name]
    _, _, (lo, hi) = params.layout.specs[index]
    if original.device.type != "meta":
        flat = original.detach().reshape(-1)
        local.view(-1).copy_(flat[base + lo - start : base + hi - start])
    sharded = nn.Parameter(dtensor, requires_grad=original.requires_grad)
    for attribute, value in original.__dict__.items():
        setattr(sharded, attribute, value)
    for module, attribute in member.places:
        module._parameters[attribute] = sharded
    _superseded[original] = member.name
    return BucketParameter(member.name, member.places, sharded)


def _move_buffers(modules: Sequence[nn.Module], device: torch.device) -> None:
    for module in modules:
        for child in module.modules():
            for buffer in child._buffers.values():
                if buffer is not None and buffer.device != device and buffer.device.type != "meta":
                    buffer.data = buffer.to(device)


# Parameters that fully_shard has replaced, by the name they had: an optimizer or a module that still holds one is
# out of date, and would train (or be left) alone without a word.
_superseded: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_checked: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()


def _refuse_superseded(optimizer: Optimizer, *_: Any) -> None:
    groups = optimizer.param_groups
    count = sum(len(group["params"]) for group in groups)
    if _checked.get(optimizer) == count:
        return
    for group in groups:
        for parameter in group["params"]:
            if (name := _superseded.get(parameter)) is not None:
                raise RuntimeError(
                    f"{type(optimizer).__name__} was built before fully_shard: it still holds the unsharded parameter {name!r}, "
                    f"which the model does not use any more. Build the optimizer after fully_shard, from model.parameters()"
                )
    _checked[optimizer] = count


register_optimizer_step_pre_hook(_refuse_superseded)


# -- the module class
# ---------------------------------------------------------------------------------------------------------


class UnshardHandle(TorchUnshardHandle):
    """What ``module.unshard(async_op=True)`` returns."""

    def __init__(self, bucket: Bucket | None) -> None:
        self._bucket = bucket

    def wait(self) -> None:
        """Wait until the module's parameters are the gathered ones."""
        if self._bucket is not None:
            self._bucket.wait_unshard()
            self._bucket = None


class FSDPModule(TorchFSDPModule):
    """The class that ``fully_shard`` mixes into a module's own; torch's methods with torch's semantics.

    A subclass of torch's FSDPModule, so that ``isinstance`` checks elsewhere hold.
    """

    # FSDP<Original>, this class, torch's class, Original: where `__new__` of torch's class finds the original one.
    _orig_cls_mro_index = 3

    def _get_fsdp_state(self) -> State:  # type: ignore[override]
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
        bucket.unshard()
        bucket.pinned = True
        handle = UnshardHandle(bucket)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this module's gathered parameters (not its children's) and register the sharded ones."""
        self._get_fsdp_state().bucket.reshard()

    def reset_iter_state(self) -> None:
        """After an exception in forward or backward: back to the resting state. The next root forward does it by
        itself.

        Unreduced gradients of the failed iteration are lost. Raises ``RuntimeError`` on a module that is not the root.
        """
        state = self._get_fsdp_state()
        if state.is_root is False:
            raise RuntimeError("reset_iter_state must be called on the root module, the one that ran forward first")
        if state.schedule is not None:
            state.schedule.reset()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accepted for compatibility: every backward ends with its gradients reduced and published."""

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """``False``: accumulate unreduced gradients, in the reduction dtype, without communication."""
        for state in self._states(recurse):
            state.bucket.requires_gradient_sync = requires_gradient_sync

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

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accepted for compatibility: gradients are always summed and then divided."""

    def set_reduce_scatter_unused_params(self, *args: Any, **kwargs: Any) -> None:
        """Accepted for compatibility: parameters that some ranks did not use are always reduced."""

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """``module.to(...)``, ``to_empty``, ``half`` and the like: on the shards, which then go back into flat
        buffers.
        """
        self.reshard()
        result = super(TorchFSDPModule, self)._apply(*args, **kwargs)  # type: ignore[misc]
        self._get_fsdp_state().bucket.rehome()
        return result


def _unsupported(name: str, why: str) -> Callable[..., None]:
    def method(self: FSDPModule, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"{name}: {why}")

    method.__name__ = name
    method.__doc__ = f"Not available: {why}."
    return method


for _name, _why in {
    "set_requires_all_reduce": "gradients of replicas are reduced in every backward that reduces; use set_requires_gradient_sync",
    "set_all_reduce_hook": "there is no hook between the two reductions of HSDP",
    "set_custom_all_gather": "parameters are gathered in place; the collective is chosen in ragged_shard.collectives",
    "set_custom_reduce_scatter": "gradients are reduced in place; the collective is chosen in ragged_shard.collectives",
    "set_allocate_memory_from_process_group_for_comm": "communication buffers come from ragged_shard.pool",
    "set_symm_mem_for_comm": "communication buffers come from ragged_shard.pool",
    "set_reduce_scatter_max_input_buffers": "one reduction is in flight at a time",
    "set_separate_reduce_scatter_group": "gathers and reductions share the mesh's group",
    "set_post_optim_event": "gathers wait for the stream that is current when the root's forward begins",
    "_set_unshard_async_op": "gathers are always asynchronous",
}.items():
    setattr(FSDPModule, _name, _unsupported(_name, _why))


def _states_of(modules: Iterable[TorchFSDPModule]) -> list[State]:
    states = []
    for module in modules:
        state = state_of(cast(nn.Module, module))
        if state is None:
            raise ValueError(f"expected modules that were passed to fully_shard, got {type(module).__name__}")
        states.append(state)
    return states


@functools.cache
def _fsdp_class(cls: type[nn.Module]) -> type[nn.Module]:
    return type(
        f"FSDP{cls.__name__}", (FSDPModule, cls), {"__deepcopy__": _refuse_deepcopy, "__module__": cls.__module__}
    )


def _refuse_deepcopy(self: nn.Module, memo: object) -> None:
    raise RuntimeError(
        f"{type(self).__name__} cannot be deep-copied: its parameters are views of shared buffers. Copy the module before "
        f"fully_shard, or copy its state_dict(), whose tensors are shards"
    )


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
        return state.post_forward(module, args, kwargs, original(*args, **kwargs))

    setattr(module, method_name, method)


def share_comm_ctx(modules: list[TorchFSDPModule]) -> None:
    """Let several roots (pipeline stages) share streams and buffer memory. Call it before their first forward."""
    states = _states_of(modules)
    if not states:
        return
    first = states[0].lazy_init()
    for state in states[1:]:
        state.share(first)
