"""Random values of a global element, whoever holds it.

A random operator on a RaggedShard gives every element the value that one process with the same seed gives it, and
leaves the generator in the same state (pytorch/pytorch#168058), whatever the world size and the layout. Generators of
CPU and CUDA cannot skip to the n-th draw of a distribution in general, so each rank draws the *whole* tensor and keeps
its piece.

The cost: one temporary of the global size, for the tensor at hand, and the time to fill it. Initialisation pays it once
per parameter. All ranks must have seeded alike, as for any replicated computation.
"""

from __future__ import annotations

import sys
import types
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding

from ragged_shard.placement import Region
from ragged_shard.propagation import (
    TABLE,
    Intercepted,
    _answer,
    _meta,
    _output,
    _region,
    _register,
    refuse,
    rewritten,
    watch,
)
from ragged_shard.redistribute import piece_of, write_piece

__all__ = ["register_schemas"]

aten = torch.ops.aten


def _draw(schema: OpSchema, propagator: Any) -> OutputSharding:
    op = schema.op
    spec = cast(DTensorSpec, schema.args_schema[0])
    if any(p.is_partial() for p in spec.placements):
        refuse(op, [spec], "a random value is not a sum of random addends")
    if any(isinstance(arg, DTensorSpec) for arg in schema.args_schema[1:]):
        refuse(op, [spec], "a random operator takes one sharded tensor")
    meta = _meta(propagator, schema)
    shape, region = tuple(spec.shape), _region(spec)

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        if (
            "generator" not in kwargs
            and args[0].device.type == "cpu"
            and (generator := _dropped_generator()) is not None
        ):
            kwargs = {**kwargs, "generator": generator}
        return _run(func, args[0], args[1:], kwargs, shape, region)

    args = [rewritten(spec, lambda local: Intercepted(local, run)), *schema.args_schema[1:]]
    return _answer(schema, _output(meta, spec.mesh, spec.placements), args)


def _dropped_generator() -> torch.Generator | None:
    """The generator of the call that is running. DTensor takes it out of the arguments, and on CPU forgets it there.

    It cannot be seen earlier: generators have no hash, so DTensor's cache of rules must not depend on them.
    """
    frame: types.FrameType | None = sys._getframe(1)
    for _ in range(8):
        if frame is None:
            break
        if frame.f_code.co_name == "_dispatch_get_local_results_slow_path":
            return cast("torch.Generator | None", frame.f_locals.get("maybe_user_generator"))
        frame = frame.f_back
    return None


def _run(
    func: Any, local: Tensor, rest: tuple[Any, ...], kwargs: dict[str, Any], shape: tuple[int, ...], region: Region
) -> Any:
    if local.is_meta:
        return func(local, *rest, **kwargs)
    if func is aten.native_dropout.default:
        scale, mask = func(local.new_ones(shape), *rest, **kwargs)
        return local * piece_of(scale, region), piece_of(mask, region)
    if func in (aten.bernoulli.default, aten.bernoulli.p):
        # One draw an element, compared with its own probability; those of other ranks do not matter.
        whole = write_piece(local.new_full(shape, 0.5), region, local)
        return piece_of(func(whole, *rest, **kwargs), region)
    result = func(local.new_empty(shape), *rest, **kwargs)
    if func._schema.is_mutable:
        return local.copy_(piece_of(result, region))
    return piece_of(result, region)


_register(
    "random",
    _draw,
    "uniform_.default",
    "normal_.default",
    "bernoulli_.float",
    "exponential_.default",
    "log_normal_.default",
)
_register("random", _draw, "geometric_.default", "cauchy_.default", "random_.default", "random_.from", "random_.to")
_register("random", _draw, "native_dropout.default", "bernoulli.default", "bernoulli.p")
_register("random", _draw, "rand_like.default", "rand_like.generator", "randn_like.default", "randn_like.generator")
_register("random", _draw, "randint_like.default", "randint_like.low_dtype", "randint_like.generator")


def register_schemas(propagator: Any) -> None:
    watch(propagator, TABLE["random"], 1)
