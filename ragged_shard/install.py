"""The only file that touches torch: every hook named, guarded and idempotent.

``HOOKS`` is the whole list. Each replaces one attribute by a function that begins with "no RaggedShard here: call
stock", so DTensors without a RaggedShard run exactly as before. Before the first attribute is set, ``probe`` compares
the running torch with what the hooks rely on (names, leading arguments, no new required ones, nobody else's patch); on
any misfit ``install`` raises with the whole list and patches nothing, because a half-patched DTensor would relabel
tensors without moving a byte.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import threading
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
import torch.distributed.tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Replicate

__all__ = ["HOOKS", "Hook", "install", "installed", "probe"]

OLDEST, NEWEST = (2, 12), (2, 15)
_LOCK = threading.Lock()
# What stands in place of each hook's stock attribute, by path. A mark on the object would not do: DTensor's cache of
# rules is a
# threading.local, whose attributes other threads do not see.
_INSTALLED: dict[str, Any] = {}


@dataclass(frozen=True)
class Hook:
    """One replaced attribute.

    ``path``: module, then attributes, separated by a colon. ``arguments``: the leading arguments that the replacement
    relies on.
    ``make``: stock function -> replacement. ``why``: what goes wrong without it.
    """

    path: str
    arguments: tuple[str, ...]
    make: Callable[[Any], Any]
    why: str
    static: bool = False
    optional: bool = False
    """A torch without the attribute does not need the hook."""
    passes_on: bool = False
    """The replacement hands every further argument to the stock function, so new ones do no harm."""
    code: bool = False
    """Replace the function's code, not the name, so that modules which imported it by value are served too."""

    @property
    def owner(self) -> Any:
        module, _, attributes = self.path.partition(":")
        found: Any = importlib.import_module(module)
        for name in attributes.split(".")[:-1]:
            found = getattr(found, name)
        return found

    @property
    def name(self) -> str:
        return self.path.rpartition(":")[2].rpartition(".")[2]

    def current(self) -> Any:
        return getattr(self.owner, self.name)

    def is_needed(self) -> bool:
        try:
            self.current()
        except (ImportError, AttributeError):
            return not self.optional
        return True

    def is_installed(self) -> bool:
        return self.path in _INSTALLED and self.current() is _INSTALLED[self.path]


def _ragged(placements: Any) -> bool:
    from ragged_shard.placement import has_ragged

    return has_ragged(placements)


# ---- the replacements ----


def _redistribute_local_tensor(stock: Any) -> Any:
    def redistribute_local_tensor(local_tensor: Any, current_spec: Any, target_spec: Any, **options: Any) -> Any:
        if not (_ragged(current_spec.placements) or _ragged(target_spec.placements)):
            return stock(local_tensor, current_spec, target_spec, **options)
        from ragged_shard.propagation import Rewrite
        from ragged_shard.redistribute import redistribute_local

        if target_spec.placements and isinstance(target_spec.placements[0], Rewrite):
            return target_spec.placements[0].function(local_tensor)
        return redistribute_local(
            local_tensor, current_spec, target_spec, async_op=bool(options.get("async_op", False))
        )

    return redistribute_local_tensor


@functools.lru_cache(maxsize=4096)
def _placed(spec: Any, placements: Any) -> Any:
    """``spec`` with other placements; made once, since torch's constructor checks and derives a good deal."""
    return type(spec)(spec.mesh, placements, tensor_meta=spec.tensor_meta)


def _redistribute(stock: Any) -> Any:
    def redistribute(self: Any, device_mesh: Any = None, placements: Any = None, **options: Any) -> Any:
        if placements is None or not _ragged((*placements, *self.placements)):
            return stock(self, device_mesh, placements, **options)
        from ragged_shard.redistribute import check_route, redistribute_local

        if any(p.is_partial() for p in placements):
            check_route(tuple(self.shape), tuple(self.device_mesh.shape), self.placements, tuple(placements))
        if (
            (self.requires_grad and torch.is_grad_enabled())
            or any(value is not None for name, value in options.items() if name != "async_op")
            or (device_mesh is not None and device_mesh is not self.device_mesh)
            or any(p.is_partial() or getattr(p, "dim", 0) < 0 for p in placements)
            or funcol._are_we_tracing()
            or torch._C._are_functorch_transforms_active()
        ):
            return stock(self, device_mesh, placements, **options)
        target = _placed(self._spec, tuple(placements))
        local = redistribute_local(self._local_tensor, self._spec, target, async_op=options.get("async_op", False))
        return DTensor(local, target, requires_grad=False)

    return redistribute


def _redistribute_backward(stock: Any) -> Any:
    def redistribute_backward(grad_output: Any, previous_spec: Any, *rest: Any, **options: Any) -> Any:
        # torch keeps the gradient of a Partial replicated, but does not see that a RaggedShard is a cut.
        if _ragged(grad_output._spec.placements) or _ragged(previous_spec.placements):
            placements = tuple(
                Replicate() if was.is_partial() and not now.is_partial() else was
                for now, was in zip(grad_output._spec.placements, previous_spec.placements, strict=True)
            )
            if placements != previous_spec.placements:
                previous_spec = type(previous_spec)(
                    previous_spec.mesh, placements, tensor_meta=previous_spec.tensor_meta
                )
        return stock(grad_output, previous_spec, *rest, **options)

    return redistribute_backward


def _nested_redistribute_forward(stock: Any) -> Any:
    def forward(ctx: Any, grad_output: Any, *rest: Any) -> Any:
        result = stock(ctx, grad_output, *rest)
        if _ragged(grad_output._spec.placements) or _ragged(result._spec.placements):
            # torch remembers the layout of its result here, and would leave a second derivative there.
            ctx.current_spec = grad_output._spec
        return result

    return forward


def _propagate_op_sharding_non_cached(stock: Any) -> Any:
    def propagate_op_sharding_non_cached(op_schema: Any) -> Any:
        from ragged_shard.propagation import propagate

        return propagate(DTensor._op_dispatcher.sharding_propagator, op_schema, stock)

    return propagate_op_sharding_non_cached


def _propagate_op_sharding(stock: Any) -> Any:
    # The cache holds the stock function: rebuild it around the replacement, which was installed just before.
    return type(stock)(DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding_non_cached)


def _distribute_tensor(stock: Any) -> Any:
    def distribute_tensor(
        tensor: Any, device_mesh: Any = None, placements: Any = None, *, src_data_rank: int | None = 0, **options: Any
    ) -> Any:
        if placements is None or not _ragged(placements):
            return stock(tensor, device_mesh, placements, src_data_rank=src_data_rank, **options)
        from ragged_shard.construct import distribute_tensor as ours

        return ours(tensor, device_mesh, placements, src_data_rank=src_data_rank)

    return distribute_tensor


def _from_local(stock: Any) -> Any:
    def from_local(local_tensor: Any, device_mesh: Any = None, placements: Any = None, **options: Any) -> Any:
        if placements is None or not _ragged(placements):
            return stock(local_tensor, device_mesh, placements, **options)
        from ragged_shard.construct import from_local as ours

        return ours(stock, local_tensor, device_mesh, placements, **options)

    return from_local


def _dtensor_init_helper(stock: Any) -> Any:
    def init_helper(init_op: Any, size: Any, device_mesh: Any = None, placements: Any = None, **options: Any) -> Any:
        if placements is None or not _ragged(placements):
            return stock(init_op, size, device_mesh, placements, **options)
        from ragged_shard.construct import made_by

        return made_by(stock, init_op, size, device_mesh, placements, **options)

    return init_helper


def _to_local_backward(stock: Any) -> Any:
    def backward(ctx: Any, grad_output: Any) -> Any:
        spec, wanted = ctx.dtensor_spec, ctx.grad_placements
        if grad_output is None or not (_ragged(spec.placements) or (wanted is not None and _ragged(wanted))):
            return stock(ctx, grad_output)
        if wanted is None:
            wanted = tuple(Replicate() if isinstance(p, Partial) else p for p in spec.placements)
        grad = DTensor.from_local(grad_output, spec.mesh, wanted, shape=spec.shape, stride=spec.stride)
        return grad, None

    return backward


def _local_shape_and_offset(stock: Any) -> Any:
    def compute(
        global_shape: Any,
        mesh_shape: Any,
        my_coordinate: Any,
        placements: Any,
        skip_offset: bool = False,
        **options: Any,
    ) -> Any:
        if not _ragged(placements):
            return stock(global_shape, mesh_shape, my_coordinate, placements, skip_offset, **options)
        from ragged_shard.checkpoint import single_box
        from ragged_shard.placement import region_of

        if callable(my_coordinate):
            my_coordinate = [my_coordinate(dim) for dim in range(len(mesh_shape))]
        if skip_offset:
            return region_of(tuple(global_shape), tuple(mesh_shape), my_coordinate, placements).local_shape, ()
        return single_box(global_shape, mesh_shape, my_coordinate, placements)

    return compute


def _create_write_items(stock: Any) -> Any:
    def __create_write_items__(self: Any, fqn: str, object: Any) -> Any:
        if not _ragged(self.placements):
            return stock(self, fqn, object)
        from ragged_shard.checkpoint import write_items

        return write_items(fqn, object)

    return __create_write_items__


def _split_by_storage_plan(stock: Any) -> Any:
    def split(self: Any, storage_plan: Any, items: Any) -> Any:
        from ragged_shard.checkpoint import one_box_a_file

        return one_box_a_file(stock(self, storage_plan, items), max((storage_plan or {"": 1}).values()))

    return split


def _create_chunk_list(stock: Any) -> Any:
    def __create_chunk_list__(self: Any) -> Any:
        if not _ragged(self.placements):
            return stock(self)
        from ragged_shard.checkpoint import chunk_list

        return chunk_list(self)

    return __create_chunk_list__


def _get_tensor_shard(stock: Any) -> Any:
    def __get_tensor_shard__(self: Any, index: Any) -> Any:
        if not _ragged(self.placements):
            return stock(self, index)
        from ragged_shard.checkpoint import tensor_shard

        return tensor_shard(self, index)

    return __get_tensor_shard__


def _distribute_tensors(stock: Any) -> Any:
    def distribute_tensors(local_state_dict: Any, keys: Any, *rest: Any, **options: Any) -> Any:
        from ragged_shard.checkpoint import load_from_full

        others = []
        for key in keys:
            state = local_state_dict.get(key)
            if isinstance(state, tuple) and isinstance(state[0], DTensor) and _ragged(state[0].placements):
                local_state_dict[key] = load_from_full(state[0], state[1])
            else:
                others.append(key)
        return stock(local_state_dict, others, *rest, **options)

    return distribute_tensors


def _data_ptr(stock: Any) -> Any:
    def data_ptr(self: Any) -> int:
        # torch knows a wrapper by its address 0, but gives it the offset of its local tensor.
        return 0 if _ragged(self.placements) else stock(self)

    return data_ptr


_TENSOR = "torch.distributed.tensor."
_PROPAGATOR = _TENSOR + "_api:DTensor._op_dispatcher.sharding_propagator."
_SPECS = ("local_tensor", "current_spec", "target_spec")


def _stable_hash_for_caching(stock: Any) -> Any:
    def _stable_hash_for_caching(self: Any) -> str:
        found = str(stock(self))
        if not _ragged(self.placements):
            return found
        from ragged_shard.compile_cache import cache_key

        return f"{found} {tuple(self._local_tensor.shape)} {cache_key()}"

    return _stable_hash_for_caching


def _check_equals(stock: Any) -> Any:
    def _check_equals(self: Any, other: Any, skip_shapes: bool = False) -> bool:
        # Dynamo's guard leaves the global shape to the local one, which does not change on a rank without elements.
        return bool(stock(self, other, skip_shapes=skip_shapes and not _ragged(self.placements)))

    return _check_equals


def _custom_op_handlers(stock: Any) -> Any:
    from ragged_shard import fused

    return {**stock, **dict.fromkeys(fused.OPERATORS, fused.run)}


HOOKS: tuple[Hook, ...] = (
    Hook(
        _TENSOR + "_api:DTensor.redistribute",
        ("self", "device_mesh", "placements"),
        _redistribute,
        passes_on=True,
        why="every move without a gradient would pay for an autograd function and a new spec: twice dist.gather's time",
    ),
    Hook(
        _TENSOR + "_api:DTensor._stable_hash_for_caching",
        ("self",),
        _stable_hash_for_caching,
        optional=True,
        why="a rank would run code from the compile cache that another rank made for its own local shapes",
    ),
    Hook(
        _TENSOR + "_dtensor_spec:DTensorSpec._check_equals",
        ("self", "other", "skip_shapes"),
        _check_equals,
        "a compiled function would run on a tensor of another shape, on ranks whose shard is empty in both",
    ),
    Hook(
        _TENSOR + "_redistribute:redistribute_local_tensor",
        _SPECS,
        _redistribute_local_tensor,
        "redistribute() would relabel a tensor as ragged without moving it",
    ),
    Hook(
        _TENSOR + "_dispatch:redistribute_local_tensor",
        _SPECS,
        _redistribute_local_tensor,
        "operators could not bring an operand to the layout of a ragged one",
    ),
    Hook(
        _TENSOR + "_api:redistribute_local_tensor",
        _SPECS,
        _redistribute_local_tensor,
        "the gradient of from_local would not be brought back to its layout",
    ),
    Hook(
        _TENSOR + "_redistribute:_redistribute_backward",
        ("grad_output", "previous_spec"),
        _redistribute_backward,
        passes_on=True,
        why="the gradient of Partial -> ragged would be asked for as Partial",
    ),
    Hook(
        _TENSOR + "_redistribute:NestedRedistribute.forward",
        ("ctx", "grad_output"),
        _nested_redistribute_forward,
        "a second derivative would stay in the layout of the first",
        static=True,
        optional=True,
        passes_on=True,
    ),
    Hook(
        _PROPAGATOR + "propagate_op_sharding_non_cached",
        ("op_schema",),
        _propagate_op_sharding_non_cached,
        "operators would refuse, or take a ragged tensor for a replicated one",
    ),
    Hook(
        _PROPAGATOR + "propagate_op_sharding",
        (),
        _propagate_op_sharding,
        "operators that the C++ cache cannot key would ask the stock rules",
    ),
    Hook(
        _TENSOR + "_api:distribute_tensor",
        ("tensor", "device_mesh", "placements"),
        _distribute_tensor,
        "distribute_tensor() refuses placements that it does not know",
        code=True,
    ),
    Hook(
        _TENSOR + "_api:DTensor.from_local",
        ("local_tensor", "device_mesh", "placements"),
        _from_local,
        "a local tensor of the wrong size or shape would be taken, and broadcast later",
        static=True,
    ),
    Hook(
        _TENSOR + "_api:_dtensor_init_helper",
        ("init_op", "size", "device_mesh", "placements"),
        _dtensor_init_helper,
        "torch.distributed.tensor.rand would draw values for each rank as if it held the whole tensor",
    ),
    Hook(
        _TENSOR + "_api:_ToTorchTensor.backward",
        ("ctx", "grad_output"),
        _to_local_backward,
        "to_local().backward() cannot infer a global shape from uneven shards",
        static=True,
    ),
    Hook(
        _TENSOR + "_utils:_compute_local_shape_and_global_offset",
        ("global_shape", "mesh_shape", "my_coordinate", "placements", "skip_offset"),
        _local_shape_and_offset,
        "every rank would claim to hold the whole tensor",
    ),
    Hook(
        _TENSOR + "_api:DTensor.__create_write_items__",
        ("self", "fqn", "object"),
        _create_write_items,
        "a checkpoint would hold one chunk for a shard that is several boxes",
    ),
    Hook(
        _TENSOR + "_api:DTensor.__create_chunk_list__",
        ("self",),
        _create_chunk_list,
        "loading would not know which boxes a rank needs",
    ),
    Hook(
        _TENSOR + "_api:DTensor.__get_tensor_shard__",
        ("self", "index"),
        _get_tensor_shard,
        "saving and loading would take the whole local tensor for each box",
    ),
    Hook(
        "torch.distributed.checkpoint.hf_storage:HuggingFaceStorageWriter._split_by_storage_plan",
        ("self", "storage_plan", "items"),
        _split_by_storage_plan,
        "of a shard that is several boxes, a safetensors file would hold the last",
    ),
    Hook(
        "torch.distributed._state_dict_utils:_distribute_tensors",
        ("local_state_dict", "keys", "device"),
        _distribute_tensors,
        passes_on=True,
        why="set_model_state_dict(full_state_dict=True) would slice a shard that is several boxes",
    ),
    Hook(
        _TENSOR + "_api:DTensor.data_ptr",
        (),
        _data_ptr,
        "deepcopy, torch.save and async_save would look for memory in a DTensor whose shard lies inside a flat buffer",
    ),
    Hook(
        _TENSOR + "_api:DTensor._op_dispatcher._custom_op_handlers",
        (),
        _custom_op_handlers,
        optional=True,
        why="a step of torch's fused optimizers would wrap and compare every tensor: 2 % of a small model's step",
    ),
)


# ---- the probe ----


def probe(hooks: tuple[Hook, ...] = HOOKS, *, shared: bool = True) -> list[str]:
    """What the running torch lacks of what ``hooks`` rely on, and (``shared``) of what all of them do; empty when it
    fits.

    Nothing is changed.
    """
    wrong: list[str] = []
    for hook in hooks:
        try:
            found = hook.current()
        except (ImportError, AttributeError) as error:
            if not hook.optional:
                wrong.append(f"{hook.path} does not exist ({error})")
            continue
        if hook.is_installed() or not hook.arguments:
            continue
        if not callable(found):
            wrong.append(f"{hook.path} is no function but {found!r}")
            continue
        parameters = list(inspect.signature(found).parameters.values())
        leading = tuple(p.name for p in parameters[: len(hook.arguments)])
        if leading != hook.arguments:
            wrong.append(f"{hook.path} takes {leading}, expected {hook.arguments}")
            continue
        required = [
            p.name
            for p in parameters[len(hook.arguments) :]
            if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        # Those that are passed on as they come.
        if not hook.passes_on and (surprising := required):
            wrong.append(f"{hook.path} requires new arguments {surprising}")
    return wrong + (_probe_shared() + _probe_types() if shared else [])


def _probe_shared() -> list[str]:
    """``_dispatch`` and ``_api`` hold the function of ``_redistribute`` by value: another library's patch shows as a
    difference."""
    from torch.distributed.tensor import _api, _dispatch, _redistribute, _utils

    wrong = []
    functions = {m.__name__: getattr(m, "redistribute_local_tensor", None) for m in (_redistribute, _dispatch, _api)}
    stock = {id(getattr(f, "__wrapped__", f)) for f in functions.values()}
    if len(stock) != 1:
        wrong.append(
            f"redistribute_local_tensor differs between {', '.join(functions)}: another library has patched it"
        )
    public = getattr(_utils, "compute_local_shape_and_global_offset", None)
    if public is None or "_compute_local_shape_and_global_offset" not in public.__code__.co_names:
        wrong.append(
            "_utils.compute_local_shape_and_global_offset does not call _compute_local_shape_and_global_offset"
        )
    return wrong


def _probe_types() -> list[str]:
    """Field order of the dataclasses that we construct, and the C++ symbols that we call."""
    import dataclasses

    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor._op_schema import OpSchema, OutputSharding

    wrong = []
    expected: dict[Any, tuple[str, ...]] = {
        DTensorSpec: ("mesh", "placements", "tensor_meta"),
        OpSchema: ("op", "args_schema", "kwargs_schema", "schema_info"),
        OutputSharding: (
            "output_spec",
            "redistribute_schema",
            "needs_redistribute",
            "use_val_from_redistribute_schema",
        ),
    }
    for kind, names in expected.items():
        found = tuple(f.name for f in dataclasses.fields(kind))[: len(names)]
        if found != names:
            wrong.append(f"{kind.__module__}.{kind.__name__} has fields {found}, expected {names}")
    if TensorMeta._fields != ("shape", "stride", "dtype"):
        wrong.append(f"TensorMeta has fields {TensorMeta._fields}, expected ('shape', 'stride', 'dtype')")
    handlers = getattr(torch.distributed.tensor.DTensor._op_dispatcher, "_custom_op_handlers", {})
    if not isinstance(handlers, dict):
        wrong.append(f"DTensor._op_dispatcher._custom_op_handlers is no dict but {handlers!r}")
    if not hasattr(torch._C, "_clear_DTensor_sharding_propagator_cache"):
        wrong.append("torch._C._clear_DTensor_sharding_propagator_cache does not exist")
    if not hasattr(torch.UntypedStorage, "_swap_data_ptr_"):
        wrong.append("torch.UntypedStorage._swap_data_ptr_ does not exist")
    if not hasattr(torch._C._distributed, "Placement"):
        wrong.append("torch._C._distributed.Placement does not exist")
    return wrong


# ---- installation ----


def installed() -> bool:
    return all(_has(hook) for hook in HOOKS)


def install() -> None:
    """Install every hook that is not installed yet. Safe to call again and from several threads.

    Raises ``ImportError`` with the whole list when torch does not fit.
    """
    with _LOCK:
        if all(_has(hook) for hook in HOOKS):
            return
        wrong = probe()
        version = _version()
        if not wrong and not OLDEST <= version < NEWEST:
            if version < OLDEST:
                wrong = [f"torch {torch.__version__} is older than {OLDEST[0]}.{OLDEST[1]}"]
            else:
                warnings.warn(
                    f"ragged_shard has not been tested with torch {torch.__version__}; its internals look as expected",
                    stacklevel=3,
                )
        if wrong:
            raise ImportError(
                f"ragged_shard cannot hook into torch {torch.__version__} (it fits {OLDEST[0]}.{OLDEST[1]} to "
                f"{NEWEST[0]}.{NEWEST[1] - 1}):\n  "
                + "\n  ".join(wrong)
                + "\nNothing was changed. Install a torch that fits."
            )
        for hook in HOOKS:
            if not _has(hook):
                _set(hook)
        _register_types()
        torch._C._clear_DTensor_sharding_propagator_cache()


def _has(hook: Hook) -> bool:
    try:
        return not hook.is_needed() or hook.is_installed()
    except (ImportError, AttributeError):
        return False


def _set(hook: Hook) -> None:
    stock = hook.current()
    if hook.code:
        _swap_code(hook, stock)
        return
    replacement = hook.make(stock)
    if inspect.isfunction(replacement):
        functools.update_wrapper(replacement, stock)
    _INSTALLED[hook.path] = replacement
    setattr(hook.owner, hook.name, staticmethod(replacement) if hook.static else replacement)


def _swap_code(hook: Hook, stock: Any) -> None:
    """Give ``stock`` the code of a call to the replacement; a copy of it keeps its own."""
    copy = types.FunctionType(stock.__code__, stock.__globals__, stock.__name__, stock.__defaults__, stock.__closure__)
    copy.__kwdefaults__ = stock.__kwdefaults__
    alias = f"_ragged_shard_{stock.__name__}"
    stock.__globals__[alias] = hook.make(copy)
    namespace: dict[str, Any] = {}
    exec(f"def {stock.__name__}(*args, **kwargs):\n    return {alias}(*args, **kwargs)", namespace)
    stock.__wrapped__ = copy
    stock.__defaults__, stock.__kwdefaults__ = None, None
    stock.__code__ = namespace[stock.__name__].__code__
    _INSTALLED[hook.path] = stock


def _version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def _register_types() -> None:
    from torch.distributed.tensor import DTensor

    from ragged_shard import propagation, random
    from ragged_shard.placement import RaggedShard

    torch.serialization.add_safe_globals([RaggedShard])
    propagator = DTensor._op_dispatcher.sharding_propagator
    propagation.register_schemas(propagator)
    random.register_schemas(propagator)
    from torch._library import opaque_object

    members = dict.fromkeys(
        ("is_shard", "is_partial", "is_replicate", "__eq__", "dims", "local_units"), opaque_object.MemberType.USE_REAL
    )
    if hasattr(opaque_object, "register_custom_class"):
        opaque_object.register_custom_class(RaggedShard, typ="constant", members=members)
    else:
        opaque_object.register_opaque_type(RaggedShard, typ="value", members=members)
