"""The public API: ``fully_shard`` with torch's signature and semantics, plus ``orig_param_policy``.

    from fsdp import fully_shard                       # instead of torch.distributed.fsdp

    for block in model.blocks:
        fully_shard(block, orig_param_policy=policy)
    fully_shard(model, orig_param_policy=policy)

See arXiv 2602.22437 (veScale-FSDP) for the design and torch's documentation of ``fully_shard`` for the semantics.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parameter import is_lazy

from fsdp.agree import agree, tell
from fsdp.bucket import Bucket
from fsdp.extension import ExtendedBuffer, chunk_numel, is_extended, local_shard
from fsdp.flat_buffer import BucketParameter, FlatBuffer, parameter_of
from fsdp.hooks import State, state_of
from fsdp.module import FSDPModule, fsdp_class
from fsdp.superseded import UNSHARDED, name_of_superseded, supersede
from ragged_shard.block import Block
from ragged_shard.dbuffer import DBuffer, Layout, Outer, buffer_of
from ragged_shard.placement import RaggedShard
from ragged_shard.planner import BucketPlan, TensorSpec, plan_bucket
from ragged_shard.policy import OrigParamPolicy, apply_policy

__all__ = ["fully_shard"]

# Chunks of 128 bytes keep every rank's slot aligned for vector loads and for NCCL.
ALIGNMENT_BYTES = 128

ShardPlacementFn = Callable[[nn.Parameter], object]

_FULL_PRECISION = MixedPrecisionPolicy()
_NO_OFFLOAD = OffloadPolicy()


@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: ShardPlacementFn | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
    orig_param_policy: OrigParamPolicy | None = ...,
) -> FSDPModule: ...
@overload
def fully_shard(
    module: Sequence[nn.Module],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: ShardPlacementFn | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
    orig_param_policy: OrigParamPolicy | None = ...,
) -> list[FSDPModule]: ...
def fully_shard(
    module: nn.Module | Sequence[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = _FULL_PRECISION,
    offload_policy: OffloadPolicy = _NO_OFFLOAD,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    orig_param_policy: OrigParamPolicy | None = None,
) -> FSDPModule | list[FSDPModule]:
    """Shard the parameters of ``module`` (or of a list of modules, as one bucket) that no earlier call has sharded.

    Call it bottom-up, on each block and on the whole model last. Afterwards ``module.parameters()`` are DTensors with a
    RaggedShard placement over one flat buffer; ``torch.optim``, gradient clipping and
    ``torch.distributed.checkpoint`` work on them unchanged. Build the optimizer after sharding.

    Args:
        module: the module, changed in place, or a list of modules gathered together.
        mesh: 1-D: shard over it. 2-D ``(replicate, shard)``: HSDP. Default: all ranks.
        reshard_after_forward: ``True`` frees the gathered parameters after forward and gathers them again in backward,
            ``False`` keeps them. ``None``: ``True``, except for the root and the bucket that backward starts with.
        shard_placement_fn: torch's; a ``ShardPlacementResult`` puts a parameter on a mesh of its own (experts). Of
            placements only ``Shard(0)`` and ``None`` are taken: where a parameter may be cut is said by
            ``orig_param_policy``.
        mp_policy: dtypes of computation, reduction, inputs and outputs, as torch's.
        offload_policy: torch's; with ``CPUOffloadPolicy`` shards, their gradients and so optimizer states live on the
            CPU, and move to and from the accelerator with each gather and reduction. Clipping wants a process group
            with a backend for CPU tensors too. On a CPU mesh there is nothing to do.
        ignored_params: parameters to leave alone.
        dp_mesh_dims: ``mesh`` is the mesh of all parallelisms, on which every parameter is a DTensor, and these are its
            data-parallel dimensions. Several ``shard`` (or ``replicate``) dimensions act as one.
        orig_param_policy: ``(name, parameter) -> ParamPolicy | None``; its ``block`` says where the parameter may be
            cut. ``name`` is relative to ``module`` (``"0.q_proj.weight"`` for a list).

    Raises (the same on every rank, before anything is changed):
        ValueError: a module sharded twice, a parameter tied to one in another bucket, a mesh without this rank or of
            more than two dimensions, a block that does not fit its parameter, layouts that differ between ranks.
        NotImplementedError: what docs/fsdp.md lists as not there.
        TypeError: no module, no mesh, a policy that returns no ParamPolicy.
    """
    modules = list(module) if isinstance(module, (list, tuple)) else [cast(nn.Module, module)]
    given: object = mesh
    if given is not None and not isinstance(given, DeviceMesh):
        wrong = TypeError(f"mesh must be a DeviceMesh, such as init_device_mesh('cuda', (8,)), got {given!r}")
        if not dist.is_initialized():
            raise wrong
        # Other ranks may have passed a mesh, and wait to compare notes.
        tell(wrong, "fully_shard")
    mesh = mesh if mesh is not None else _default_mesh()
    whole_mesh = mesh
    if dp_mesh_dims is not None:
        try:
            mesh = _data_parallel(mesh, tuple(dp_mesh_dims.replicate_names), tuple(dp_mesh_dims.shard_names))
        except ValueError as error:
            tell(error, "fully_shard")
    data_dims = () if dp_mesh_dims is None else (*dp_mesh_dims.replicate_names, *dp_mesh_dims.shard_names)
    found: list[_Found] = []

    def plan() -> str:
        _validate(modules, mesh, reshard_after_forward)
        mesh_of = functools.partial(_mesh_of, mesh, shard_placement_fn)
        inspect = functools.partial(_inspect, mesh_of, whole_mesh, data_dims, orig_param_policy)
        found.extend(_parameters(modules, ignored_params or set(), inspect))
        if data_dims or not isinstance(reshard_after_forward, (bool, type(None))):
            _refuse_several_meshes(found, mesh)
        if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
            _refuse_extended(found)
        for group in _groups(found):
            group.make_plan()
            groups.append(group)
        return "\n".join([one.describe() for one in found] + [group.describe() for group in groups])

    groups: list[_Group] = []
    agree(mesh, "fully_shard", plan)
    for other in dict.fromkeys(group.mesh for group in groups if group.mesh != mesh):
        there = [group for group in groups if group.mesh == other]
        agree(other, "fully_shard", functools.partial(_described, there))

    device = _device_of(mesh)
    buffers = [buffer for group in groups for buffer in group.build(device, offload_policy, mp_policy)]
    bucket = Bucket(
        _name_of(modules),
        buffers,
        param_dtype=mp_policy.param_dtype,
        reduce_dtype=mp_policy.reduce_dtype,
        replicate_dim=0 if mesh.ndim == 2 else None,
    )
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
        group_size, reshard_after_forward = reshard_after_forward, reshard_after_forward > 1
        bucket.post_forward_size = group_size if reshard_after_forward else None
        if 1 < group_size < mesh.size(mesh.ndim - 1):
            bucket.post_forward_group = _smaller_group(mesh, group_size)
    bucket.keeps_unsharded = reshard_after_forward is False
    _move_buffers(modules, device)
    State(modules, bucket, device, mp_policy, reshard_after_forward)
    for m in modules:
        m.__class__ = fsdp_class(cast(Any, type(m)))
    sharded = cast("list[FSDPModule]", modules)
    return sharded[0] if isinstance(module, nn.Module) else sharded


def _described(groups: list[_Group]) -> str:
    return "\n".join(group.describe() for group in groups)


def _default_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        dist.init_process_group()
    device = torch.accelerator.current_accelerator(check_available=True)
    backend = "cpu" if device is None else device.type
    return init_device_mesh(backend, (dist.get_world_size(),))


@functools.cache
def _smaller_group(mesh: DeviceMesh, size: int) -> dist.ProcessGroup:
    """This rank's group of ``size`` consecutive ranks of the dimension that shards."""
    return DeviceMesh(mesh.device_type, mesh.mesh.reshape(-1, size)).get_group(1)


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def _name_of(modules: Sequence[nn.Module]) -> str:
    return ", ".join(type(m).__name__ for m in modules)


def _validate(modules: Sequence[nn.Module], mesh: DeviceMesh, reshard_after_forward: bool | int | None) -> None:
    if not modules:
        raise ValueError("fully_shard got an empty list of modules")
    for module in modules:
        if not isinstance(module, nn.Module):
            raise TypeError(f"fully_shard takes a module or a list of modules, got {module!r}")
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
            raise ValueError(
                f"fully_shard cannot hook a {type(module).__name__}, which has no forward; call it on each of its "
                f"modules, or pass them as a list"
            )
        if isinstance(module, TorchFSDPModule):
            raise ValueError(
                f"{type(module).__name__} was sharded before (parameters: "
                f"{', '.join(n for n, _ in list(module.named_parameters())[:3])}, ...); call fully_shard once per "
                f"module, bottom-up"
            )
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"fully_shard takes a mesh of one dimension (shard) or two (replicate, shard), got {mesh.ndim} "
            f"dimensions: {mesh}; pass the data-parallel part, such as mesh['dp']"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} is not in {mesh}; pass a mesh of which every calling rank is a part")
    ranks, reshard = mesh.size(mesh.ndim - 1), reshard_after_forward
    if reshard is not None and (not isinstance(reshard, int) or int(reshard) < 0 or ranks % max(1, int(reshard))):
        raise ValueError(
            f"reshard_after_forward is True, False, None or the size of a smaller group, a divisor of the {ranks} "
            f"ranks that share the parameters; got {reshard!r}"
        )


class _Found:
    """A parameter that this call shards: its name, every place that holds it, and its policy's block."""

    def __init__(
        self, name: str, parameter: nn.Parameter, block: Block | None, outer: Outer | None, mesh: DeviceMesh
    ) -> None:
        self.name, self.parameter, self.outer, self.mesh = name, parameter, outer, mesh
        self.places: list[tuple[nn.Module, str]] = []
        local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
        # Whether a tensor subclass says what is gathered.
        self.extended = is_extended(name, local)
        self.local: Tensor = local.detach()
        self.block = 1 if block is None else block.numel(self.local.shape)

    def describe(self) -> str:
        """What must be equal on all ranks, so that a difference can be named."""
        parameter = self.parameter
        grad = "trainable" if parameter.requires_grad else "frozen"
        kind = f" {type(self.local).__name__} with fsdp_pre_all_gather" if self.extended else ""
        return f"{self.name} {tuple(parameter.shape)} {parameter.dtype} {grad} block={self.block}{kind}"


def _parameters(
    modules: Sequence[nn.Module], ignored: set[nn.Parameter], inspect: Callable[[str, nn.Parameter], _Found]
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
                found[parameter] = inspect(name, parameter)
            found[parameter].places.append((module, attribute))
        for attribute, child in module._modules.items():
            if child is not None:
                visit(child, f"{prefix}{attribute}.", False)

    for index, module in enumerate(modules):
        visit(module, f"{index}." if len(modules) > 1 else "", True)
    return list(found.values())


def _inspect(
    mesh_of: Callable[[str, nn.Parameter], DeviceMesh],
    whole_mesh: DeviceMesh,
    data_dims: Sequence[str],
    policy: OrigParamPolicy | None,
    name: str,
    parameter: nn.Parameter,
) -> _Found:
    if (owner := name_of_superseded(parameter)) is not None:
        raise ValueError(
            f"parameter {name!r} is tied to {owner!r}, which an earlier fully_shard call has sharded; parameters that "
            f"share memory must lie in one bucket: leave that module to the call on their common parent, or pass both "
            f"modules in one list"
        )
    if is_lazy(parameter):
        raise ValueError(
            f"parameter {name!r} is not initialised yet, as those of lazy modules before their first forward; run one "
            f"on a small batch before fully_shard"
        )
    mesh, outer = mesh_of(name, parameter), None
    if data_dims:
        outer = _outer_of_whole_mesh(name, parameter, mesh, whole_mesh, data_dims)
    elif isinstance(parameter, DTensor):
        outer = _outer(name, parameter, mesh)
    answer = apply_policy(policy, name, parameter)
    return _Found(name, parameter, answer.block, outer, mesh)


def _mesh_of(
    mesh: DeviceMesh, shard_placement_fn: ShardPlacementFn | None, name: str, parameter: nn.Parameter
) -> DeviceMesh:
    """The mesh of one parameter: that of the call, or the one that torch's ``ShardPlacementResult`` holds."""
    answer = None if shard_placement_fn is None else shard_placement_fn(parameter)
    placement, own = answer, mesh
    if hasattr(answer, "mesh_info"):
        placement, own = answer.placement, answer.mesh_info.mesh  # type: ignore[attr-defined]  # newer torch's result
    if placement is not None and placement != Shard(0):
        raise ValueError(
            f"shard_placement_fn returned {answer!r} for {name!r}; parameters are cut along their flattened elements: "
            f"say with orig_param_policy what must stay together, and return None, Shard(0) or a ShardPlacementResult "
            f"with another mesh"
        )
    if own.ndim != mesh.ndim or own.device_type != mesh.device_type or own.get_coordinate() is None:
        raise ValueError(
            f"shard_placement_fn wants {name!r} on {own}; a parameter's own mesh holds this rank and has devices of "
            f"the same type and as many dimensions as the mesh of the call, {mesh}"
        )
    return own


def _refuse_several_meshes(found: Sequence[_Found], mesh: DeviceMesh) -> None:
    for one in found:
        if one.mesh != mesh:
            raise ValueError(
                f"shard_placement_fn wants {one.name!r} on a mesh of its own, which goes neither with dp_mesh_dims nor "
                f"with a number as reshard_after_forward; shard its module by a fully_shard call with that mesh"
            )


def _refuse_extended(found: Sequence[_Found]) -> None:
    for one in found:
        if one.extended:
            raise NotImplementedError(
                f"parameter {one.name!r} has fsdp_pre_all_gather, which does not go with a number as "
                f"reshard_after_forward (nor does it with FSDP2); pass True or False"
            )


def _outer(name: str, parameter: DTensor, mesh: DeviceMesh) -> Outer:
    """A parameter that tensor parallelism has placed on another mesh: its part here is what gets sharded."""
    other = parameter.device_mesh
    if buffer_of(parameter) is not None:
        raise ValueError(
            f"parameter {name!r} was sharded by an earlier fully_shard call, on another module that contains it; to "
            f"share a module between models, pass it to a fully_shard call of its own, before those on the models"
        )
    if other == mesh or any(p.is_partial() or isinstance(p, RaggedShard) for p in parameter.placements):
        raise ValueError(
            f"parameter {name!r} is a DTensor with placements {parameter.placements} on {other}; fully_shard takes "
            f"plain parameters, or DTensors that are sharded or replicated on another dimension of the same mesh"
        )
    try:
        both = DeviceMesh._concatenate([mesh, other])
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"parameter {name!r} is a DTensor on {other}, which is no part of the same mesh as {mesh} ({error}); "
            f"make one mesh with init_device_mesh and pass its data-parallel dimension to fully_shard"
        ) from None
    return Outer(both, parameter.placements, tuple(parameter.shape))


@functools.cache
def _data_parallel(mesh: DeviceMesh, replicate: tuple[str, ...], shard: tuple[str, ...]) -> DeviceMesh:
    """The mesh ``(shard,)`` or ``(replicate, shard)`` of these dimensions of ``mesh``, several of a kind made one."""
    names = mesh.mesh_dim_names
    if names is None or not shard or (unknown := sorted({*replicate, *shard} - set(names))):
        raise ValueError(
            f"dp_mesh_dims wants a mesh with named dimensions and names of them, at least one to shard over; got "
            f"shard={shard}, replicate={replicate} and {mesh}"
            + (f", which has no {unknown}" if names is not None and shard else "")
        )

    def one(kind: tuple[str, ...]) -> DeviceMesh:
        return mesh[kind[0]] if len(kind) == 1 else mesh[kind]._flatten("_".join(kind))

    return DeviceMesh._concatenate([one(replicate), one(shard)]) if replicate else one(shard)


def _outer_of_whole_mesh(
    name: str, parameter: Tensor, mesh: DeviceMesh, whole_mesh: DeviceMesh, data_dims: Sequence[str]
) -> Outer:
    """A DTensor on the mesh of all parallelisms, replicated along the data-parallel dimensions."""
    names = whole_mesh.mesh_dim_names
    assert names is not None
    dims = tuple(names.index(dim) for dim in data_dims)
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    if (
        not isinstance(parameter, DTensor)
        or parameter.device_mesh != whole_mesh
        or not all(placements[dim].is_replicate() for dim in dims)
        or any(p.is_partial() or isinstance(p, RaggedShard) for p in placements)
    ):
        found = f"{placements} on {parameter.device_mesh}" if isinstance(parameter, DTensor) else "no DTensor"
        raise ValueError(
            f"parameter {name!r} is {found}; with dp_mesh_dims every parameter is a DTensor on the mesh passed, "
            f"{whole_mesh}, with Replicate() along {list(data_dims)}. Make it one with distribute_module or "
            f"distribute_tensor, or pass the data-parallel part of the mesh alone"
        )
    rest = tuple(dim for dim in names if dim not in data_dims)
    both = DeviceMesh._concatenate([mesh, whole_mesh[rest]]) if rest else mesh
    others = tuple(placements[names.index(dim)] for dim in rest)
    return Outer(both, others, tuple(parameter.shape), seen=(whole_mesh, tuple(placements), dims))


class _Group:
    """Parameters of one dtype, ``requires_grad`` and mesh: what can lie in one flat buffer and be reduced together."""

    def __init__(self, dtype: torch.dtype, mesh: DeviceMesh, members: list[_Found]) -> None:
        self.dtype, self.mesh, self.members = dtype, mesh, members
        self.specs = [TensorSpec(m.name, m.local.numel(), dtype.itemsize, m.block) for m in members]
        self.plan: BucketPlan | None = None

    def make_plan(self) -> None:
        ranks = self.mesh.size(self.mesh.ndim - 1)
        if not self.members[0].extended:
            self.plan = plan_bucket(self.specs, ranks, alignment_bytes=ALIGNMENT_BYTES)
            return
        (one,), itemsize = self.members, self.dtype.itemsize
        chunk = chunk_numel(one.name, one.local.shape, one.block, ranks)
        spec = TensorSpec(one.name, one.local.numel(), itemsize, chunk)
        self.plan = plan_bucket([spec], ranks, alignment_bytes=itemsize)

    def describe(self) -> str:
        """What must be equal on all ranks."""
        assert self.plan is not None
        return f"plan {self.plan.digest()} of {', '.join(m.name for m in self.members)}"

    def build(
        self, device: torch.device, offload: OffloadPolicy, mp_policy: MixedPrecisionPolicy
    ) -> Iterable[FlatBuffer]:
        assert self.plan is not None
        mesh = self.mesh
        by_name = {m.name: m for m in self.members}
        for plan in self.plan.buffers:
            members = [by_name[name] for name, _ in plan.starts]
            shapes = tuple(tuple(m.local.shape) for m in members)
            outer = tuple(m.outer for m in members) if any(m.outer for m in members) else ()
            layout = Layout(plan, shapes, mesh, mesh.ndim - 1, outer)
            home, pinned = device, False
            if isinstance(offload, CPUOffloadPolicy):
                home, pinned = torch.device("cpu"), offload.pin_memory and device.type != "cpu"
            if members[0].local.device.type == "meta":
                home, pinned = torch.device("meta"), False
            if members[0].extended:
                yield ExtendedBuffer(layout, _shard_extended(members[0], layout, home), mp_policy)
                continue
            params = DBuffer.sharded(layout, self.dtype, home, pin_memory=pinned)
            parameters = []
            for index, member in enumerate(members):
                parameters.append(_shard(member, params, index))
            yield FlatBuffer(layout, parameters, params)


def _groups(found: list[_Found]) -> list[_Group]:
    groups: dict[tuple[Any, ...], list[_Found]] = {}
    for one in found:
        p = one.parameter
        alone = one.name if one.extended else None
        groups.setdefault((p.dtype, one.mesh, p.requires_grad, p.device.type == "meta", alone), []).append(one)
    return [_Group(members[0].parameter.dtype, members[0].mesh, members) for members in groups.values()]


def _shard(member: _Found, params: DBuffer, index: int) -> BucketParameter:
    """Replace a parameter by its shard, copied from this rank's own full copy (no communication, as torch)."""
    dtensor = params.dtensor(index)
    local = dtensor._local_tensor
    base, _ = params.plan.owned(params.layout.rank)
    start = dict(params.plan.starts)[member.name]
    _, _, (lo, hi) = params.layout.specs[index]
    if member.local.device.type != "meta":
        flat = member.local.reshape(-1)
        local.view(-1).copy_(flat[base + lo - start : base + hi - start])
    return _replace(member, dtensor)


def _shard_extended(member: _Found, layout: Layout, home: torch.device) -> BucketParameter:
    """The same for a tensor subclass: its shard is one too, in memory of its own."""
    data = member.local if home.type == "meta" else member.local.to(home)
    local = local_shard(data, layout.shard, layout.rank)
    return _replace(member, DTensor(local, layout.dtensor_spec(0, data.dtype), requires_grad=False))


def _replace(member: _Found, dtensor: DTensor) -> BucketParameter:
    """Register the shard in the place of the parameter."""
    original = member.parameter
    sharded = parameter_of(dtensor, original.requires_grad)
    for attribute, value in original.__dict__.items():
        if not (member.extended and isinstance(value, Tensor)):  # what a subclass keeps its whole values in
            setattr(sharded, attribute, value)
    supersede(original, member.name, UNSHARDED)
    parameter = BucketParameter(member.name, member.places, sharded)
    parameter.show(sharded)
    return parameter


def _move_buffers(modules: Sequence[nn.Module], device: torch.device) -> None:
    for module in modules:
        for child in module.modules():
            for buffer in child._buffers.values():
                if buffer is not None and buffer.device != device and buffer.device.type != "meta":
                    buffer.data = buffer.to(device)
