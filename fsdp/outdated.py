"""Gathered parameters whose shards have changed meanwhile: an evaluation with ``reshard_after_forward=False`` before
``optimizer.step()``, ``unshard()`` before it, an average of weights. They are not computed with, nor shown, any more.

Noticed are the steps of optimizers, and in-place operations on parameters that torch counts: not those on ``.data`` or
local tensors, nor torch's ``_foreach`` functions.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

if TYPE_CHECKING:
    from fsdp.bucket import Bucket

__all__ = ["gathered", "is_kept", "is_outdated", "resharded"]

# How often the shards of a bucket had changed when it was gathered to stay so; of others that are gathered nothing.
_gathered: weakref.WeakKeyDictionary[Bucket, list[int]] = weakref.WeakKeyDictionary()


def gathered(bucket: Bucket, kept: bool) -> None:
    """``bucket`` is being gathered; ``kept``: an iteration's start is not to reshard it."""
    _gathered[bucket] = _versions(bucket) if kept else []


def resharded(bucket: Bucket) -> None:
    """It is sharded again."""
    _gathered.pop(bucket, None)


def is_kept(bucket: Bucket) -> bool:
    """Whether it was gathered to stay so, and has the values of its shards."""
    return bool(_gathered.get(bucket)) and not is_outdated(bucket)


def is_outdated(bucket: Bucket) -> bool:
    """Whether it was gathered to stay so, and its shards have changed."""
    return bool(before := _gathered.get(bucket)) and before != _versions(bucket)


def _versions(bucket: Bucket) -> list[int]:
    # Not of local tensors: who changes those may do so on the ranks alone where they are not empty.
    return [parameter.sharded._version for parameter in bucket.parameters]


def _reshard_stepped(optimizer: Optimizer, *_: Any) -> None:
    if _gathered:
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for bucket in list(_gathered):
            if any(id(parameter.sharded) in stepped for parameter in bucket.parameters):
                bucket.reshard()


register_optimizer_step_post_hook(_reshard_stepped)
