"""Tensors that look like a model's parameters and are not, and optimizers that hold one: these would train it alone,
without a word.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["ASSIGNED", "GATHERED", "UNSHARDED", "name_of_superseded", "supersede"]

# What such a tensor is, and so what an optimizer that holds it is told.
UNSHARDED = (
    "was built before fully_shard: it still holds the unsharded parameter {name!r}, which the model does not use any "
    "more. Build the optimizer after fully_shard, from model.parameters()"
)
GATHERED = (
    "holds the gathered parameter {name!r}: it was built while modules showed those (between forward and backward, or "
    "after unshard()), and would train what the next gather overwrites. Build it before the first forward, or after a "
    "backward"
)
ASSIGNED = (
    "holds the tensor that was assigned to {name!r} after fully_shard. The sharded parameter took its values in the "
    "next forward, and is what the model uses. Assign before fully_shard or copy_ the values, or build the optimizer "
    "from model.parameters() after that forward"
)

_superseded: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_count = 0
# Of each optimizer: how many parameters it had, and how many tensors were known here, when it was found in order.
_checked: weakref.WeakKeyDictionary[Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()


def supersede(tensor: Tensor, name: str, kind: str) -> None:
    """Optimizers must not hold ``tensor``: ``kind`` says what it was to parameter ``name``."""
    global _count
    _count += 1
    _superseded[tensor] = (name, kind)


def name_of_superseded(tensor: Tensor) -> str | None:
    """The name of the parameter that ``tensor`` was, if ``fully_shard`` has replaced it."""
    name, kind = _superseded.get(tensor, (None, UNSHARDED))
    return name if kind is UNSHARDED else None


def _is_of_a_module(tensor: Tensor) -> bool:
    """Whether another module has it, whose values were assigned. Looks at all objects; few optimizers need it, once."""
    for one in gc.get_objects():
        if issubclass(type(one), nn.Module) and any(tensor is p for p in one.__dict__.get("_parameters", {}).values()):
            return True
    return False


def _refuse_superseded(optimizer: Optimizer, *_: Any) -> None:
    groups = optimizer.param_groups
    count = sum(len(group["params"]) for group in groups)
    if _checked.get(optimizer) == (count, _count):
        return
    for group in groups:
        for parameter in group["params"]:
            if (found := _superseded.get(parameter)) is not None:
                name, kind = found
                if kind is ASSIGNED and _is_of_a_module(parameter):
                    continue
                raise RuntimeError(f"{type(optimizer).__name__} {kind.format(name=name)}")
    _checked[optimizer] = (count, _count)


register_optimizer_step_pre_hook(_refuse_superseded)
