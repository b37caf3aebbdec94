"""torch.distributed.pipelining with sharded stages: what it asks of the state that torch keeps of an FSDP2 module.

A stage runs the backwards of all its micro-batches without reducing, and then has what they left reduced at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

from torch import nn
from torch.distributed._composable.contract import STATE_KEY
from torch.distributed.fsdp import fully_shard

__all__ = ["announce"]


class _StageState:
    """By torch's names. Nothing is left to do for the single groups of parameters."""

    def __init__(self, reduce: Callable[[], None]) -> None:
        self._root_post_backward_final_callback = reduce
        self.all_states: list[object] = []

    @property
    def _state_ctx(self) -> _StageState:
        return self


def announce(module: nn.Module, reduce: Callable[[], None]) -> None:
    """``reduce`` is what the stage ``module`` calls when its last micro-batch has had its backward."""
    function = inspect.unwrap(fully_shard)  # what `fully_shard.state(module)` looks for
    module.__dict__.setdefault(STATE_KEY, {})[function] = _StageState(reduce)
