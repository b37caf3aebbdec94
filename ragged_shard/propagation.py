"""Which DTensor operators keep a RaggedShard, and which refuse, with advice.

The rule for an operator sees specs only. It answers with the placements of the result, and, where the local operator
needs other arguments than the local tensors, with a *rewrite* of an argument: a marker placement whose redistribution
is a local function of the local tensor. Four families, in ``TABLE``:

    elementwise   one value in, one value out: the placements of the ragged operand; operands that lie inside a unit
    broadcast reduction     over everything, over the whole flattened prefix (both Partial), or inside a unit (stays
    ragged) random        the values of the global tensor, see ``random.py`` shape         results that are made from a
    shape, and views that do not move a boundary

Everything else would need communication that the user did not ask for, and raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding, RuntimeSchemaInfo
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from ragged_shard.placement import RaggedShard, Region, Shape, contiguous_stride, has_ragged, region_of

__all__ = ["TABLE", "Rewrite", "propagate", "register_schemas", "watch"]

aten = torch.ops.aten
Stock = Callable[[OpSchema], OutputSharding]
Placements = tuple[Placement, ...]

# What each overload does with a RaggedShard: family -> the overloads. Filled by ``_register`` below.
TABLE: dict[str, list[OpOverload]] = {}
_RULES: dict[OpOverload, Callable[[OpSchema, Any], OutputSharding]] = {}


# ---- rewriting a local argument ----


class Rewrite(RaggedShard):
    """A marker: redistributing a local tensor to it applies ``function``. It is never the placement of a DTensor."""

    function: Callable[[Tensor], Any]

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__((0,), (1,))
        object.__setattr__(self, "function", function)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


def rewritten(spec: DTensorSpec, function: Callable[[Tensor], Any]) -> DTensorSpec:
    return DTensorSpec(spec.mesh, (Rewrite(function),) * spec.mesh.ndim, tensor_meta=spec.tensor_meta)


class Intercepted(Tensor):
    """Stands in for a local tensor, so that the local operator becomes ``run(operator, args, kwargs)``.

    ``args`` hold the real local tensor again. This is how an operator whose local part differs from the global one (a
    mean over uneven shards, random values of a global tensor) is computed without a kernel of DTensor's being replaced.
    """

    local: Tensor
    run: Callable[..., Any]

    @staticmethod
    def __new__(cls, local: Tensor, run: Callable[..., Any]) -> Intercepted:
        made = Tensor._make_wrapper_subclass(cls, local.shape, dtype=local.dtype, device=local.device)
        made.local, made.run = local, run
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        found = next(arg for arg in args if isinstance(arg, Intercepted))
        return found.run(func, tuple(arg.local if isinstance(arg, Intercepted) else arg for arg in args), kwargs or {})


# ---- errors ----


def refuse(op: OpOverload, specs: Iterable[DTensorSpec], why: str) -> NoReturn:
    ragged = next(spec for spec in specs if has_ragged(spec.placements))
    shown = ", ".join(str(p) for p in ragged.placements)
    raise RuntimeError(
        f"{op} on a tensor of shape {tuple(ragged.shape)} placed ({shown}): {why}. "
        f"Call redistribute() to other placements, or full_tensor(), first. (Modules that fully_shard has sharded "
        f"compute in their model's forward, in methods given to register_fsdp_forward_method, and after unshard().)"
    )


def _not_supported(op: OpOverload, specs: Sequence[DTensorSpec]) -> NoReturn:
    if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), torch._C.DispatchKey.CompositeImplicitAutograd):
        # Under inference_mode composite operators arrive whole; DTensor decomposes them upon this error.
        raise NotImplementedError(f"{op} is decomposed")
    refuse(op, specs, "it would need values of other ranks, and a RaggedShard never communicates unasked")


# ---- entry ----


def specs_of(value: Any) -> list[DTensorSpec]:
    """Every DTensorSpec in nested lists, tuples and dicts (a DTensorSpec and a TensorMeta are leaves)."""
    if isinstance(value, DTensorSpec):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [spec for item in value for spec in specs_of(item)]


def propagate(propagator: Any, schema: OpSchema, stock: Stock) -> OutputSharding:
    """The OutputSharding of ``schema``; ``stock`` answers for schemas without a RaggedShard."""
    op = schema.op
    specs = specs_of(schema.args_schema) + specs_of(schema.kwargs_schema)
    if not any(has_ragged(spec.placements) for spec in specs):
        if op is aten._local_scalar_dense.default and any(p.is_partial() for p in specs[0].placements):
            return _number(schema, specs[0])
        return stock(schema)
    meshes = {spec.mesh for spec in specs if spec.ndim}
    if len(meshes) > 1 and not _is_list_op(op):
        refuse(op, specs, f"its operands lie on different meshes {sorted(map(str, meshes))}")
    if schema.kwargs_schema.get("memory_format") in (torch.channels_last, torch.channels_last_3d):
        refuse(op, specs, "a RaggedShard splits the contiguous tensor and has no other memory format")
    if _is_list_op(op):
        return _lists(propagator, schema, stock)
    rule = _RULES.get(op)
    if rule is not None:
        return rule(schema, propagator)
    if is_pointwise(op):
        return _elementwise(schema, propagator)
    _not_supported(op, specs)


@cache
def is_pointwise(op: OpOverload) -> bool:
    """Tagged so, or the in-place or out= form of an operator that is: torch tags only some of those."""
    if torch.Tag.nondeterministic_seeded in op.tags:
        return False
    packet, overload = op._overloadpacket, op._overloadname
    name = packet._qualified_op_name.partition("::")[2]
    forms = [(packet, overload)]
    if name.endswith("_") and not name.startswith("_") and hasattr(aten, name[:-1]):
        forms.append((getattr(aten, name[:-1]), overload))
    if overload == "out":
        forms += [(packet, form) for form in ("default", "Tensor", "self", "other")]
    elif overload.endswith("_out"):
        forms.append((packet, overload[:-4]))
    return any(torch.Tag.pointwise in getattr(found, form).tags for found, form in forms if form in found.overloads())


def _meta(propagator: Any, schema: OpSchema) -> Any:
    return propagator._propagate_tensor_meta(schema)


def _answer(schema: OpSchema, output: Any, args: Sequence[Any] | None, *, values: bool = False) -> OutputSharding:
    """``args``: the new args_schema where local arguments must change (``values``: non-tensors too)."""
    if args is None or all(new is old for new, old in zip(args, schema.args_schema, strict=True)):
        return OutputSharding(output)
    suggested = OpSchema(schema.op, tuple(args), schema.kwargs_schema, schema_info=schema.schema_info)
    return OutputSharding(output, suggested, needs_redistribute=True, use_val_from_redistribute_schema=values)


def _output(meta: Any, mesh: DeviceMesh, placements: Placements) -> Any:
    if isinstance(meta, TensorMeta):
        if has_ragged(placements):
            # A transposed operand would give its strides to the result; what a RaggedShard splits is contiguous.
            meta = TensorMeta(meta.shape, contiguous_stride(meta.shape), meta.dtype)
        return DTensorSpec(mesh, placements, tensor_meta=meta)
    if meta is None:
        return None
    return type(meta)(_output(item, mesh, placements) for item in meta)


# ---- elementwise ----

# Which operands may be Partial("sum" | "avg") on another mesh dim, for the result to be Partial as well.
_LINEAR: dict[Any, str] = {}
for _packet, _which in (
    ("add", "all"),
    ("add_", "all"),
    ("sub", "all"),
    ("sub_", "all"),
    ("mul", "one"),
    ("mul_", "one"),
    ("div", "first"),
    ("div_", "first"),
    ("neg", "all"),
    ("neg_", "all"),
    ("clone", "any"),
    ("detach", "any"),
    ("alias", "any"),
    ("lift_fresh", "any"),
    ("_to_copy", "any"),
    ("zero_", "any"),
    ("zeros_like", "any"),
    ("empty_like", "any"),
    ("copy_", "any"),
    ("_foreach_add", "all"),
    ("_foreach_add_", "all"),
    ("_foreach_sub", "all"),
    ("_foreach_sub_", "all"),
    ("_foreach_mul", "one"),
    ("_foreach_mul_", "one"),
    ("_foreach_div", "first"),
    ("_foreach_div_", "first"),
    ("_foreach_neg", "all"),
    ("_foreach_neg_", "all"),
    ("_foreach_zero_", "any"),
    ("_foreach_copy_", "any"),
):
    _LINEAR[getattr(aten, _packet)] = _which


def _elementwise(schema: OpSchema, propagator: Any) -> OutputSharding:
    meta = _meta(propagator, schema)
    args, placements = _align(schema.op, schema.args_schema, schema.kwargs_schema, _first_shape(meta))
    mesh = (
        specs_of(schema.args_schema)[0].mesh if specs_of(schema.args_schema) else specs_of(schema.kwargs_schema)[0].mesh
    )
    return _answer(schema, _output(meta, mesh, placements), args)


def _first_shape(meta: Any) -> Shape | None:
    while meta is not None and not isinstance(meta, TensorMeta):
        meta = meta[0]
    return None if meta is None else tuple(meta.shape)


def _align(
    op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], shape: Shape | None
) -> tuple[list[Any], Placements]:
    """Bring every tensor operand to the layout of the ragged one. Returns the new args and the common placements."""
    flat = specs_of(list(args)) + specs_of(kwargs)
    if shape is None:
        shape = tuple(flat[0].shape)
    leads = [spec for spec in flat if has_ragged(spec.placements) and tuple(spec.shape) == shape]
    leads = leads or [found for spec in flat if (found := _grown(spec, shape)) is not None]
    written = flat[0] if op._schema.is_mutable and _writes_first(op) else None
    if not leads:
        refuse(op, flat, f"the result has shape {shape}, so the ragged operand would have to be repeated across units")
    lead = leads[0]
    if written is not None and written.placements != lead.placements:
        refuse(op, flat, f"it writes into a tensor placed {_show(written)}, which a ragged operand cannot fill locally")
    how = _LINEAR.get(op._overloadpacket)
    if any(p.is_partial() for p in lead.placements):
        if kwargs.get("rounding_mode") is not None or (how == "any" and not _keeps_sums(flat, kwargs.get("dtype"))):
            how = None
        _check_linear(op, how, args, flat, lead)

    def aligned(value: Any) -> Any:
        if isinstance(value, DTensorSpec):
            return _operand(op, value, lead, flat)
        if isinstance(value, (list, tuple)) and not isinstance(value, (DTensorSpec, torch.Size)):
            return type(value)(aligned(item) for item in value)
        return value

    for spec in specs_of(kwargs):
        if _operand(op, spec, lead, flat) is not spec:
            refuse(
                op, flat, f"its keyword operand is placed {_show(spec)}; give it the placements of the ragged operand"
            )
    return [aligned(arg) for arg in args], lead.placements


def _grown(spec: DTensorSpec, shape: Shape) -> DTensorSpec | None:
    """How a result of ``shape`` lies that repeats ``spec`` inside units (a value for each row beside a replicated
    matrix); ``None`` where it would repeat units."""
    ragged = next((p for p in spec.placements if isinstance(p, RaggedShard)), None)
    if ragged is None or spec.ndim != len(shape) or not ragged.dims:
        return None
    grown = {d for d, size in enumerate(shape) if size != spec.shape[d]}
    if any(d < len(ragged.dims) for d in grown) or any(
        isinstance(p, Shard) and p.dim in grown for p in spec.placements
    ):
        return None
    meta = TensorMeta(torch.Size(shape), contiguous_stride(shape), cast(TensorMeta, spec.tensor_meta).dtype)
    return DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)


def _writes_first(op: OpOverload) -> bool:
    first = op._schema.arguments[0]
    return first.alias_info is not None and first.alias_info.is_write


def _show(spec: DTensorSpec) -> str:
    return "(" + ", ".join(str(p) for p in spec.placements) + ")"


def _keeps_sums(flat: Sequence[DTensorSpec], dtype: torch.dtype | None) -> bool:
    """Whether addends may be cast to ``dtype``, or to that of the first operand: not to integers, which rounds them,
    and not from bools."""
    kinds = [cast(TensorMeta, spec.tensor_meta).dtype for spec in flat]
    target = kinds[0] if dtype is None else dtype
    return all(kind == target or (target.is_floating_point and kind is not torch.bool) for kind in kinds)


def _check_linear(
    op: OpOverload, how: str | None, args: Sequence[Any], flat: Sequence[DTensorSpec], lead: DTensorSpec
) -> None:
    partial = [any(p.is_partial() for p in spec.placements) for spec in flat]
    numbers = [a for a in args[1:] if isinstance(a, (int, float)) and not isinstance(a, bool)]
    linear = all(not p.is_partial() or getattr(p, "reduce_op", "") in ("sum", "avg") for p in lead.placements)
    allowed = (
        how == "any"
        or (linear and how == "all" and all(partial) and (len(flat) > 1 or not numbers))
        or (linear and how == "one" and sum(partial) == 1)
        or (linear and how == "first" and partial[0] and sum(partial) == 1)
    )
    if not allowed:
        refuse(op, flat, "it is not linear, and a Partial placement still has to be reduced")


def _operand(op: OpOverload, spec: DTensorSpec, lead: DTensorSpec, flat: Sequence[DTensorSpec]) -> DTensorSpec:
    """``spec`` as it must be for the local operator: itself, a free local cut, or a reshaped small tensor."""
    if spec.placements == lead.placements and spec.shape == lead.shape:
        return spec
    if spec.ndim == 0:
        if all(p.is_replicate() for p in spec.placements):
            return spec
        if has_ragged(spec.placements):
            refuse(op, flat, "its 0-dim operand lies on one rank")
        # A scalar that is still to be reduced (a norm): torch reduces it here as well.
        return DTensorSpec(spec.mesh, (Replicate(),) * spec.mesh.ndim, tensor_meta=spec.tensor_meta)
    if spec.shape == lead.shape:
        for given, wanted in zip(spec.placements, lead.placements, strict=True):
            if given != wanted and not (given.is_replicate() and not wanted.is_partial()):
                refuse(op, flat, f"its operands are placed {_show(lead)} and {_show(spec)}")
        if any(
            given.is_replicate() and wanted.is_partial()
            for given, wanted in zip(spec.placements, lead.placements, strict=True)
        ):
            refuse(op, flat, f"its operands are placed {_show(lead)} and {_show(spec)}")
        return DTensorSpec(spec.mesh, lead.placements, tensor_meta=spec.tensor_meta)
    return _broadcast(op, spec, lead, flat)


def _broadcast(op: OpOverload, spec: DTensorSpec, lead: DTensorSpec, flat: Sequence[DTensorSpec]) -> DTensorSpec:
    """An operand with a value for each entry of the flattened dims (a norm of each row), cut like the lead; or one that
    is the same for every unit: all of its flattened dims have size 1 (or are missing)."""
    missing = lead.ndim - spec.ndim
    prefix = next(len(p.dims) for p in lead.placements if isinstance(p, RaggedShard))
    if not missing and prefix and spec.shape[:prefix] == lead.shape[:prefix]:
        return _cut_alike(op, spec, lead, flat)
    wanted: list[Placement] = []
    if missing < 0 or any(spec.shape[d - missing] != 1 for d in range(missing, prefix)):
        refuse(
            op,
            flat,
            f"its operand of shape {tuple(spec.shape)} differs between units, so it would have to be cut like one",
        )
    for given, placement in zip(spec.placements, lead.placements, strict=True):
        if isinstance(placement, Shard):
            d = placement.dim - missing
            full = d >= 0 and spec.shape[d] == lead.shape[placement.dim] and spec.shape[d] != 1
            wanted.append(Shard(d) if full else Replicate())
        else:
            wanted.append(Replicate())
        if given != wanted[-1] and not given.is_replicate():
            refuse(op, flat, f"its operand of shape {tuple(spec.shape)} is placed {_show(spec)}")
    local = region_of(tuple(spec.shape), tuple(spec.mesh.shape), _here(spec.mesh), wanted)
    ones = max(0, prefix - missing)
    if tuple(wanted) == spec.placements and ones <= 1 and spec.stride == contiguous_stride(spec.shape):
        return spec
    shape = ((1,) * min(ones, 1)) + local.local_shape[ones:]
    starts, sizes = local.offsets, local.sizes

    def cut(tensor: Tensor) -> Tensor:
        for d, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            if tensor.shape[d] != size:
                tensor = tensor.narrow(d, start, size)
        return tensor.reshape(shape).contiguous()

    return rewritten(spec, cut)


def _cut_alike(op: OpOverload, spec: DTensorSpec, lead: DTensorSpec, flat: Sequence[DTensorSpec]) -> DTensorSpec:
    wanted = tuple(
        Replicate() if p.is_partial() or (isinstance(p, Shard) and spec.shape[p.dim] != lead.shape[p.dim]) else p
        for p in lead.placements
    )
    if any(given != want and not given.is_replicate() for given, want in zip(spec.placements, wanted, strict=True)):
        refuse(op, flat, f"its operands are placed {_show(lead)} and {_show(spec)}")
    return spec if wanted == spec.placements else DTensorSpec(spec.mesh, wanted, tensor_meta=spec.tensor_meta)


def _here(mesh: DeviceMesh) -> Shape:
    coordinate = mesh.get_coordinate()
    return (0,) * mesh.ndim if coordinate is None else tuple(coordinate)


def _region(spec: DTensorSpec) -> Region:
    return region_of(tuple(spec.shape), tuple(spec.mesh.shape), _here(spec.mesh), spec.placements)


def _like(schema: OpSchema, propagator: Any) -> OutputSharding:
    """``*_like``: a new tensor with the layout of the first; where that is Partial, values are not to be added up."""
    meta = _meta(propagator, schema)
    spec = cast(DTensorSpec, schema.args_schema[0])
    placements = spec.placements
    if schema.op not in (aten.zeros_like.default, aten.empty_like.default):
        placements = tuple(Replicate() if p.is_partial() else p for p in placements)
    return OutputSharding(_output(meta, spec.mesh, placements))


def _copy(schema: OpSchema, propagator: Any) -> OutputSharding:
    """``copy_``: the source is redistributed to wherever the target lies, as DTensor does for any placements."""
    target, source = cast(DTensorSpec, schema.args_schema[0]), schema.args_schema[1]
    meta = _meta(propagator, schema)
    moves = isinstance(source, DTensorSpec) and source.ndim and source.placements != target.placements
    if isinstance(source, DTensorSpec) and moves and source.shape == target.shape and source.mesh == target.mesh:
        if any(p.is_partial() for p in target.placements):
            refuse(schema.op, [target, source], f"it writes into a Partial tensor, placed {_show(target)}")
        source = DTensorSpec(source.mesh, target.placements, tensor_meta=source.tensor_meta)
        args = [target, source, *schema.args_schema[2:]]
        return _answer(schema, _output(meta, target.mesh, target.placements), args)
    return _elementwise(schema, propagator)


def _equal(schema: OpSchema, propagator: Any) -> OutputSharding:
    args, _ = _align(schema.op, schema.args_schema, schema.kwargs_schema, None)
    return _answer(schema, None, args)


def _allclose(schema: OpSchema, propagator: Any) -> OutputSharding:
    args, placements = _align(schema.op, schema.args_schema, schema.kwargs_schema, None)
    mesh = specs_of(schema.args_schema)[0].mesh

    def run(func: Any, args: Any, kwargs: Any) -> bool:
        close = torch.tensor(bool(func(*args, **kwargs)), dtype=torch.int32, device=args[0].device)
        for mesh_dim, placement in enumerate(placements):
            if not placement.is_replicate():
                dist.all_reduce(close, dist.ReduceOp.MIN, group=mesh.get_group(mesh_dim))
        return bool(close)

    first = cast(DTensorSpec, args[0])
    before = cast(DTensorSpec, schema.args_schema[0])
    if first is not before:
        refuse(schema.op, specs_of(args), "its first operand is not the ragged one; exchange the two")
    return _answer(schema, None, [rewritten(first, lambda local: Intercepted(local, run)), *args[1:]])


# ---- lists ----


def _is_list_op(op: OpOverload) -> bool:
    name = op._schema.name
    return "::_foreach_" in name or "::_fused_" in name or "::_amp_foreach_" in name


_LIST_REDUCTIONS = {aten._foreach_norm.Scalar, aten._foreach_max.default}


def _lists(propagator: Any, schema: OpSchema, stock: Stock) -> OutputSharding:
    """Index by index: those without a RaggedShard take the stock rule, so one list may mix layouts."""
    op = schema.op
    args: list[Any] = list(schema.args_schema)
    count = len(cast(Sequence[Any], args[0]))
    listed = [
        i
        for i, a in enumerate(args)
        if isinstance(a, (list, tuple)) and len(a) == count and not isinstance(a, DTensorSpec)
    ]
    columns = [i for i in listed if any(isinstance(item, DTensorSpec) for item in args[i])]
    ragged = [j for j in range(count) if any(has_ragged(s.placements) for i in columns for s in specs_of(args[i][j]))]
    others = [j for j in range(count) if j not in set(ragged)]
    kwargs = dict(schema.kwargs_schema)
    metas = _meta(propagator, schema)
    results: list[Any] = [None] * count
    new: list[Any] = [list(a) if i in listed else a for i, a in enumerate(args)]
    changed = False
    for j in ragged:
        row = [a[j] if i in listed else a for i, a in enumerate(args)]
        if op in _LIST_REDUCTIONS:
            meta = metas[j]
            results[j], filled = _reduce_whole(op, row[0], meta, _list_fill(op, row))
            replaced = [filled, *row[1:]]
        else:
            # The steps of fused optimizers are 0-dim and may be on any placements that replicate them.
            replaced, placements = _align(op, row, {}, tuple(cast(DTensorSpec, row[0]).shape))
            if metas is not None:
                if metas[j].shape != row[0].shape:
                    _not_supported(op, specs_of(row))
                results[j] = _output(metas[j], cast(DTensorSpec, row[0]).mesh, placements)
        for i in listed:
            if replaced[i] is not row[i]:
                new[i][j], changed = replaced[i], True
        for i in range(len(args)):
            if i not in listed and replaced[i] is not row[i]:
                new[i], changed = replaced[i], True
    if others:
        rest = [[a[j] for j in others] if i in listed else a for i, a in enumerate(args)]
        sharding = _stock_list(stock, OpSchema(op, tuple(rest), kwargs, schema_info=schema.schema_info))
        if metas is not None:
            found: Any = sharding.output_spec
            if found is None:
                found = [_output(metas[j], args[0][j].mesh, args[0][j].placements) for j in others]
            for j, spec in zip(others, found, strict=True):
                results[j] = spec
        if sharding.needs_redistribute and sharding.redistribute_schema is not None:
            for i in listed:
                for place, j in enumerate(others):
                    new[i][j] = cast(Sequence[Any], sharding.redistribute_schema.args_schema[i])[place]
            changed = True
    for spec in specs_of(kwargs):
        if spec.ndim or not all(p.is_replicate() for p in spec.placements):
            refuse(op, specs_of(args), f"its keyword operand is placed {_show(spec)}")
    output = tuple(results) if metas is not None else None
    if not changed:
        return OutputSharding(output)
    suggested = OpSchema(op, tuple(new), kwargs, schema_info=schema.schema_info)
    return OutputSharding(output, suggested, needs_redistribute=True)


def _stock_list(stock: Stock, schema: OpSchema) -> OutputSharding:
    """The stock rule; where torch has none (``_foreach_copy_``, ``_fused_sgd_``), rows of one layout need none."""
    try:
        return stock(schema)
    except NotImplementedError:
        columns = [specs_of(arg) for arg in schema.args_schema if isinstance(arg, (list, tuple))]
        for row in zip(*(column for column in columns if column), strict=False):
            if len({spec.placements for spec in row if spec.ndim}) > 1 or any(
                p.is_partial() for p in row[0].placements
            ):
                raise
        return OutputSharding(None)


# ---- reductions ----

_SUM, _NORM, _MEAN, _VARIANCE = "sum", "norm", "mean", "variance"


def _lowest(dtype: torch.dtype) -> float | int | bool:
    if dtype is torch.bool:
        return False
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _highest(dtype: torch.dtype) -> float | int | bool:
    if dtype is torch.bool:
        return True
    return math.inf if dtype.is_floating_point else torch.iinfo(dtype).max


def _norm_placement(order: float) -> tuple[Placement, float | None]:
    """How partial norms combine, and the value of an absent element where an empty shard has no norm."""
    if order == math.inf:
        return Partial("max"), 0.0
    if order == -math.inf:
        return Partial("min"), math.inf
    if order == 0:
        return Partial("sum"), None
    return _NormPartial(order), math.inf if order < 0 else None


def _list_fill(op: OpOverload, row: Sequence[Any]) -> tuple[Placement, Any]:
    if op is aten._foreach_max.default:
        spec = cast(DTensorSpec, row[0])
        return Partial("max"), _lowest(cast(TensorMeta, spec.tensor_meta).dtype)
    return _norm_placement(float(row[1]) if len(row) > 1 else 2.0)


def _reduce_whole(
    op: OpOverload, spec: DTensorSpec, meta: TensorMeta, how: tuple[Placement, Any]
) -> tuple[DTensorSpec, DTensorSpec]:
    """A reduction of all dims, one value a rank: the spec of the result and the one of the argument, filled if it is
    empty."""
    partial, fill = how
    placements = []
    for p in spec.placements:
        if p.is_partial():
            if p != partial or partial != Partial("sum"):
                refuse(op, [spec], "a Partial placement still has to be reduced")
            placements.append(p)
        else:
            placements.append(p if p.is_replicate() else partial)
    argument = spec
    if fill is not None and _region(spec).numel == 0 and spec.shape.numel():
        # Only this rank is empty; the others would wait for it if the local operator raised here.
        argument = rewritten(spec, lambda local: local.new_full((1,) * local.ndim, fill))
    return DTensorSpec(spec.mesh, tuple(placements), tensor_meta=meta), argument


def _dims_of(op: OpOverload, schema: OpSchema, ndim: int) -> list[int]:
    """The dims that a reduction reduces, all of them when it names none."""
    index = next((i for i, a in enumerate(op._schema.arguments) if a.name in ("dim", "dims")), None)
    if index is None or index >= len(schema.args_schema):
        return list(range(ndim))
    value = schema.args_schema[index]
    if value is None or (isinstance(value, (list, tuple)) and not value and op not in (aten.any.dims, aten.all.dims)):
        return list(range(ndim))
    given = [value] if isinstance(value, int) else list(cast(Sequence[int], value))
    return sorted({d + ndim if d < 0 else d for d in given})


def _argument(op: OpOverload, schema: OpSchema, name: str, default: Any) -> Any:
    for i, argument in enumerate(op._schema.arguments):
        if argument.name == name:
            return schema.args_schema[i] if i < len(schema.args_schema) else schema.kwargs_schema.get(name, default)
    return default


def _reduction(kind: str) -> Callable[[OpSchema, Any], OutputSharding]:
    def rule(schema: OpSchema, propagator: Any) -> OutputSharding:
        op = schema.op
        spec = cast(DTensorSpec, schema.args_schema[0])
        meta = _meta(propagator, schema)
        dims = _dims_of(op, schema, spec.ndim)
        prefix = next(len(p.dims) for p in spec.placements if isinstance(p, RaggedShard))
        keep = bool(_argument(op, schema, "keepdim", False))
        if not spec.ndim or len(dims) == spec.ndim or (prefix and set(range(prefix)) <= set(dims)):
            return _across(op, schema, spec, meta, kind, dims, prefix, keep)
        if all(d >= prefix for d in dims):
            return _inside(op, schema, spec, meta, kind, dims, prefix, keep)
        refuse(
            op, [spec], f"it reduces dims {tuple(dims)}, some but not all of the {prefix} that are flattened into units"
        )

    return rule


def _combine_rule(op: OpOverload, schema: OpSchema, spec: DTensorSpec, kind: str) -> tuple[Placement, Any]:
    dtype = cast(TensorMeta, spec.tensor_meta).dtype
    if kind == _NORM:
        order = schema.args_schema[1] if len(schema.args_schema) > 1 else 2
        return _norm_placement(2.0 if order is None else float(cast(float, order)))
    if kind in ("max", "min"):
        return Partial(kind), _lowest(dtype) if kind == "max" else _highest(dtype)
    # A sum of bools would count ranks once it is cast.
    return Partial({"mean": "sum", "any": "max", "all": "product"}.get(kind, kind)), None


def _across(
    op: OpOverload, schema: OpSchema, spec: DTensorSpec, meta: Any, kind: str, dims: list[int], prefix: int, keep: bool
) -> OutputSharding:
    """Over every unit: each rank reduces what it has, the result is Partial on the mesh dims that were reduced."""
    everything = len(dims) == spec.ndim
    if kind == "indexed":
        refuse(
            op,
            [spec],
            "the index of an extreme value needs the values of other ranks; without indices, use amax or amin",
        )
    if kind == _VARIANCE:
        return _variance(schema, spec, meta, dims, prefix, keep)
    partial, fill = _combine_rule(op, schema, spec, kind)
    kept = {d: (d if keep else d - sum(r < d for r in dims)) for d in range(spec.ndim) if d not in dims}
    placements: list[Placement] = []
    for p in spec.placements:
        if p.is_partial():
            if kind not in (_SUM, _MEAN) or getattr(p, "reduce_op", "") != "sum":
                refuse(op, [spec], "a Partial placement still has to be reduced")
            placements.append(p)
        elif isinstance(p, Shard):
            placements.append(Shard(kept[p.dim]) if p.dim in kept else partial)
        else:
            placements.append(p if p.is_replicate() else partial)
    output = DTensorSpec(spec.mesh, tuple(placements), tensor_meta=meta)
    region = _region(spec)
    plain = everything and not keep and not _names_dims(op, schema)
    if plain and kind != _MEAN and (region.numel or fill is None or not spec.shape.numel()):
        return OutputSharding(output)
    count = math.prod(spec.shape[d] for d in dims)
    shape = _local_result_shape(region, spec.ndim, dims, prefix, keep)
    # The dims of the local tensor, whose first one is the whole flattened prefix.
    local_dims = (
        list(range(spec.ndim - prefix + 1)) if everything else [0, *(d - prefix + 1 for d in dims if d >= prefix)]
    )

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        local = args[0]
        if not local.numel() and fill is not None and spec.shape.numel():
            local = local.new_full((1, *local.shape[1:]), fill)
        if kind == _MEAN:
            dtype = kwargs.get("dtype") or (args[3] if len(args) > 3 else None) or local.dtype
            # The sum of 16-bit values may overflow where their mean does not.
            wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
            return (torch.sum(local, local_dims, dtype=wide) / count).to(dtype).reshape(shape)
        if kind == _NORM:
            order = args[1] if len(args) > 1 and args[1] is not None else 2
            return torch.linalg.vector_norm(local, order, local_dims, dtype=kwargs.get("dtype")).reshape(shape)
        if kind in ("max", "min"):
            return (torch.amax if kind == "max" else torch.amin)(local, local_dims).reshape(shape)
        if kind in ("any", "all"):
            return (torch.any if kind == "any" else torch.all)(local, local_dims).reshape(shape)
        if kind == "product":  # prod takes one dim at most
            return (torch.prod(local) if everything else torch.prod(local, 0)).reshape(shape)
        return (torch.nansum if op is aten.nansum.default else torch.sum)(
            local, local_dims, dtype=kwargs.get("dtype")
        ).reshape(shape)

    return _answer(schema, output, [rewritten(spec, lambda local: Intercepted(local, run)), *schema.args_schema[1:]])


def _names_dims(op: OpOverload, schema: OpSchema) -> bool:
    index = next((i for i, a in enumerate(op._schema.arguments) if a.name in ("dim", "dims")), None)
    return index is not None and index < len(schema.args_schema) and bool(schema.args_schema[index] not in (None, []))


def _local_result_shape(region: Region, ndim: int, dims: list[int], prefix: int, keep: bool) -> Shape:
    """The local shape of the result of reducing ``dims``: what is kept, with the sizes that this rank has."""
    sizes = region.sizes
    if keep:
        return tuple(1 if d in dims else sizes[d] for d in range(ndim))
    return tuple(sizes[d] for d in range(ndim) if d not in dims)


def _inside(
    op: OpOverload, schema: OpSchema, spec: DTensorSpec, meta: Any, kind: str, dims: list[int], prefix: int, keep: bool
) -> OutputSharding:
    """Inside units: no value leaves its rank, and the result is ragged like the operand."""
    if kind in (_VARIANCE, "indexed"):
        partial: Placement = Partial("sum")
        if any(isinstance(p, Shard) and p.dim in dims for p in spec.placements):
            refuse(op, [spec], f"dim {dims[0]} is cut on another mesh dim, so it needs the values of other ranks")
    else:
        partial, _ = _combine_rule(op, schema, spec, kind)
    placements: list[Placement] = []
    for p in spec.placements:
        if p.is_partial() and not (kind in (_SUM, _MEAN) and getattr(p, "reduce_op", "") == "sum"):
            refuse(op, [spec], "a Partial placement still has to be reduced")
        if isinstance(p, Shard):
            moved = p.dim if keep else p.dim - sum(r < p.dim for r in dims)
            if p.dim in dims and kind == _MEAN:
                refuse(op, [spec], "the mean of a dim that is cut is not the mean of its parts")
            placements.append(partial if p.dim in dims else Shard(moved))
        else:
            placements.append(p)
    index = next(i for i, a in enumerate(op._schema.arguments) if a.name in ("dim", "dims"))
    local = [d - prefix + 1 for d in dims]
    args: list[Any] = list(schema.args_schema)
    args[index] = local[0] if isinstance(args[index], int) else local
    return _answer(schema, _output(meta, spec.mesh, tuple(placements)), args, values=True)


# The name of the functional all-gather of one tensor, which 2.13 changed.
_gather_rows: Callable[..., Tensor] = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor


def _variance(
    schema: OpSchema, spec: DTensorSpec, meta: Any, dims: list[int], prefix: int, keep: bool
) -> OutputSharding:
    """var, std and var_mean over all elements: counts, means and squared deviations of the ranks are merged (Chan et
    al.)."""
    op = schema.op
    if len(dims) != spec.ndim:
        refuse(op, [spec], "the variance over some dims needs the values of other ranks")
    if any(p.is_partial() for p in spec.placements):
        refuse(op, [spec], "a Partial placement still has to be reduced")
    output = _output(meta, spec.mesh, (Replicate(),) * spec.mesh.ndim)
    cut = [i for i, p in enumerate(spec.placements) if not p.is_replicate()]
    shape = (1,) * spec.ndim if keep else ()

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        local = args[0]
        wide = local.double() if local.dtype == torch.float64 else local.float()
        mean = wide.mean() if local.numel() or not spec.shape.numel() else wide.new_zeros(())
        moments = torch.stack([wide.new_tensor(float(local.numel())), mean, (wide - mean).square().sum()])
        for mesh_dim in cut:
            rows = _gather_rows(moments[None], 0, (spec.mesh, mesh_dim))
            if isinstance(rows, funcol.AsyncCollectiveTensor):
                rows = rows.wait()
            counts, means, squares = rows.unbind(1)
            total = counts.sum()
            mean = (counts * means).sum() / total.clamp(min=1)
            moments = torch.stack([total, mean, squares.sum() + (counts * (means - mean).square()).sum()])
        correction = kwargs.get("correction")
        variance = moments[2] / (moments[0] - (1 if correction is None else correction)).clamp(min=0)
        value = variance.sqrt() if op is aten.std.correction else variance
        value = value.to(local.dtype).reshape(shape)
        return (value, moments[1].to(local.dtype).reshape(shape)) if op is aten.var_mean.correction else value

    return _answer(schema, output, [rewritten(spec, lambda local: Intercepted(local, run)), *schema.args_schema[1:]])


# ---- shapes ----


def _new(schema: OpSchema, propagator: Any) -> OutputSharding:
    """``new_zeros(size)`` and its kin: laid out like the tensor when the size is its own, replicated otherwise."""
    spec, size = cast(DTensorSpec, schema.args_schema[0]), tuple(cast(Sequence[int], schema.args_schema[1]))
    meta = _meta(propagator, schema)
    if size != tuple(spec.shape):
        return OutputSharding(_output(meta, spec.mesh, (Replicate(),) * spec.mesh.ndim))
    placements = tuple(Replicate() if p.is_partial() else p for p in spec.placements)
    local = _region(spec).local_shape
    args = [spec, list(local), *schema.args_schema[2:]]
    if schema.op is aten.new_empty_strided.default:
        args[2] = [math.prod(local[d + 1 :]) for d in range(len(local))]
    return _answer(schema, _output(meta, spec.mesh, placements), args, values=True)


def _view(schema: OpSchema, propagator: Any) -> OutputSharding:
    """A view that keeps the flattened prefix whole: the same elements lie on the same rank."""
    spec = cast(DTensorSpec, schema.args_schema[0])
    meta = cast(TensorMeta, _meta(propagator, schema))
    shape = tuple(meta.shape)
    mesh_dim = next(i for i, p in enumerate(spec.placements) if isinstance(p, RaggedShard))
    ragged = cast(RaggedShard, spec.placements[mesh_dim])
    local = _region(spec).local_shape
    if shape == tuple(spec.shape):
        return _seen_as(schema, _output(meta, spec.mesh, spec.placements), local)
    prefix = math.prod(spec.shape[: len(ragged.dims)])
    matching = [k for k in range(1, len(shape) + 1) if math.prod(shape[:k]) == prefix]
    if not ragged.dims or not matching or any(isinstance(p, Shard) for p in spec.placements):
        refuse(
            schema.op,
            [spec],
            f"a view of shape {shape} does not keep the {prefix} leading entries that units are cut from",
        )
    k = matching[0]
    placements = list(spec.placements)
    placements[mesh_dim] = RaggedShard(tuple(range(k)), ragged.local_units)
    return _seen_as(schema, _output(meta, spec.mesh, tuple(placements)), (local[0], *shape[k:]))


def _seen_as(schema: OpSchema, output: Any, local: Shape) -> OutputSharding:
    """The local tensor is seen in the shape ``local``."""
    spec = cast(DTensorSpec, schema.args_schema[0])
    if schema.op in (aten.view.default, aten._unsafe_view.default, aten.reshape.default):
        return _answer(schema, output, [spec, list(local)], values=True)

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        return args[0].view(local)

    return _answer(schema, output, [rewritten(spec, lambda t: Intercepted(t, run)), *schema.args_schema[1:]])


def _expand(schema: OpSchema, propagator: Any) -> OutputSharding:
    """``expand`` inside units (the gradient of a reduction there), which is a copy: a local tensor is contiguous."""
    spec = cast(DTensorSpec, schema.args_schema[0])
    meta = cast(TensorMeta, _meta(propagator, schema))
    prefix = next(len(p.dims) for p in spec.placements if isinstance(p, RaggedShard))
    grown = [d for d, size in enumerate(meta.shape) if d >= spec.ndim or size != spec.shape[d]]
    if len(meta.shape) != spec.ndim or any(d < prefix for d in grown):
        refuse(schema.op, [spec], f"to shape {tuple(meta.shape)} it would repeat units")
    if any(isinstance(p, Shard) and p.dim in grown for p in spec.placements):
        refuse(schema.op, [spec], f"it would repeat dims {tuple(grown)}, of which one is cut on another mesh dim")

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        sizes = [meta.shape[d] if d in grown else -1 for d in range(prefix, spec.ndim)]
        return args[0].expand(-1, *sizes).contiguous()

    args = [rewritten(spec, lambda t: Intercepted(t, run)), *schema.args_schema[1:]]
    return _answer(schema, _output(meta, spec.mesh, spec.placements), args)


def _bits(schema: OpSchema, propagator: Any) -> OutputSharding:
    """``view(dtype)`` of the same width; another width changes how many elements lie in a unit."""
    spec, dtype = cast(DTensorSpec, schema.args_schema[0]), cast(torch.dtype, schema.args_schema[1])
    if dtype.itemsize != cast(TensorMeta, spec.tensor_meta).dtype.itemsize:
        refuse(schema.op, [spec], f"its elements are not of the width of {dtype}")
    return OutputSharding(_output(_meta(propagator, schema), spec.mesh, spec.placements))


def _number(schema: OpSchema, spec: DTensorSpec) -> OutputSharding:
    """``item()`` and ``bool()`` of a sum, norm, any, ... that is still Partial: reduced first.

    The one rule for DTensors without a RaggedShard. torch returns the addend of the rank, so a norm is too small and
    ``if x.isnan().any()`` goes different ways on different ranks (pytorch/pytorch#170862).
    """
    whole = DTensorSpec(spec.mesh, (Replicate(),) * spec.mesh.ndim, tensor_meta=spec.tensor_meta)
    return _answer(schema, None, [whole])


def _item(schema: OpSchema, propagator: Any) -> OutputSharding:
    refuse(schema.op, specs_of(schema.args_schema), "the value lies on one rank")


# ---- registrations ----


def _register(family: str, rule: Callable[[OpSchema, Any], OutputSharding] | None, *names: str) -> None:
    for name in names:
        packet, _, overload = name.partition(".")
        found = getattr(aten, packet, None)
        if found is None or (overload and overload not in found.overloads()):
            continue
        for each in [overload] if overload else found.overloads():
            op = getattr(found, each)
            TABLE.setdefault(family, []).append(op)
            if rule is not None:
                _RULES[op] = rule


_register(
    "elementwise",
    _elementwise,
    "detach.default",
    "alias.default",
    "clone.default",
    "_to_copy.default",
    "lift_fresh.default",
)
# Activations that torch does not tag, and gradients of those that it does.
_register("elementwise", _elementwise, "hardswish.default", "hardswish_.default", "hardswish_backward.default")
_register("elementwise", _elementwise, "hardtanh_backward.default", "hardsigmoid_backward.default")
_register("elementwise", _elementwise, "hardshrink_backward.default", "softshrink_backward.default")
_register("elementwise", _elementwise, "elu_backward.default", "leaky_relu_backward.default")
_register("elementwise", _elementwise, "softplus_backward.default")
_register(
    "elementwise",
    _elementwise,
    "fill_.Scalar",
    "fill_.Tensor",
    "fill.Scalar",
    "fill.Tensor",
    "zero_.default",
    "zero.default",
)
_register(
    "elementwise",
    _elementwise,
    "masked_fill_.Scalar",
    "masked_fill_.Tensor",
    "masked_fill.Scalar",
    "masked_fill.Tensor",
)
_register("elementwise", _copy, "copy_.default")
_register("elementwise", _equal, "equal.default")
_register("elementwise", _allclose, "allclose.default")
_register("shape", _like, "zeros_like.default", "ones_like.default", "empty_like.default", "full_like.default")
_register(
    "shape",
    _new,
    "new_empty.default",
    "new_zeros.default",
    "new_ones.default",
    "new_full.default",
    "new_empty_strided.default",
)
_register("shape", _view, "view.default", "_unsafe_view.default", "reshape.default")
_register("shape", _view, "unsqueeze.default", "squeeze.default", "squeeze.dim", "squeeze.dims")
_register("shape", _expand, "expand.default")
_register("shape", _bits, "view.dtype")
_register("refused", _item, "_local_scalar_dense.default")
_register("reduction", _reduction(_SUM), "sum.default", "sum.dim_IntList", "nansum.default")
_register("reduction", _reduction(_MEAN), "mean.default", "mean.dim")
_register("reduction", _reduction("max"), "max.default", "amax.default")
_register("reduction", _reduction("min"), "min.default", "amin.default")
_register("reduction", _reduction("indexed"), "max.dim", "min.dim")
_register("reduction", _reduction("product"), "prod.default", "prod.dim_int")
_register("reduction", _reduction("any"), "any.default", "any.dim", "any.dims")
_register("reduction", _reduction("all"), "all.default", "all.dim", "all.dims")
_register("reduction", _reduction(_NORM), "linalg_vector_norm.default", "norm.Scalar", "norm.ScalarOpt_dim")
_register("reduction", _reduction(_VARIANCE), "var.correction", "std.correction", "var_mean.correction")


def watch(propagator: Any, ops: Iterable[OpOverload], static_argnum: int = 100) -> None:
    """Make DTensor's cache key hold the non-tensor arguments that our rules look at: some keywords and, where no stock
    rule says more, positions from ``static_argnum`` on."""
    known = (propagator.op_to_schema_info, propagator.op_to_schema_info_for_single_dim_strategy)
    for op in ops:
        infos = next((infos for infos in known if op in infos), known[0])
        info = infos.get(op, RuntimeSchemaInfo(static_argnum))
        keys = info.static_kwargkey or []
        named = {argument.name for argument in op._schema.arguments if argument.kwarg_only}
        missing = [key for key in ("keepdim", "dtype", "memory_format") if key in named and key not in keys]
        infos[op] = replace(info, static_kwargkey=[*keys, *missing])


def register_schemas(propagator: Any) -> None:
    watch(propagator, TABLE["elementwise"])
    watch(propagator, (*TABLE["reduction"], *TABLE["shape"]), 1)
