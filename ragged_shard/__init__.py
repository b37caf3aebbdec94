"""How tensors are cut over ranks: blocks and policies, the planner of buckets, and RaggedShard, a DTensor placement.

Names load on first use. ``Block``, ``ParamPolicy`` and the planner import no torch, so a laptop can plan a cluster.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ragged_shard.block import Block as Block
    from ragged_shard.bound import lower_bound as lower_bound
    from ragged_shard.dbuffer import DBuffer as DBuffer
    from ragged_shard.dbuffer import buffer_of as buffer_of
    from ragged_shard.placement import RaggedShard as RaggedShard
    from ragged_shard.planner import BucketPlan as BucketPlan
    from ragged_shard.planner import TensorSpec as TensorSpec
    from ragged_shard.planner import plan_bucket as plan_bucket
    from ragged_shard.planner import plan_model as plan_model
    from ragged_shard.planner import validate as validate
    from ragged_shard.policy import ParamPolicy as ParamPolicy

_HOME = {
    "RaggedShard": "placement",
    "Block": "block",
    "ParamPolicy": "policy",
    "TensorSpec": "planner",
    "BucketPlan": "planner",
    "plan_bucket": "planner",
    "plan_model": "planner",
    "lower_bound": "bound",
    "validate": "planner",
    "DBuffer": "dbuffer",
    "buffer_of": "dbuffer",
}

__all__ = [
    "RaggedShard",
    "Block",
    "ParamPolicy",
    "TensorSpec",
    "BucketPlan",
    "plan_bucket",
    "plan_model",
    "lower_bound",
    "validate",
    "DBuffer",
    "buffer_of",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'ragged_shard' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"ragged_shard.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
