"""What a step knows of one parameter."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ragged_optim.exchange import MatrixParam
from ragged_optim.layout import Extent
from ragged_optim.rule import Rule
from ragged_optim.state import (
    Tiled,
    local,
)

__all__ = [
    "Entry",
    "is_incomplete",
]


class Entry:
    """What a step needs to know of one parameter, and its local gradient during one."""

    __slots__ = ("extent", "grad", "group", "here", "name", "of", "param", "rule", "state")

    def __init__(
        self,
        name: str,
        param: Tensor,
        group: dict[str, Any],
        rule: Rule,
        of: MatrixParam | None,
        state: dict[str, Tensor] | None,
    ) -> None:
        self.name, self.param, self.group, self.rule, self.of, self.state = name, param, group, rule, of, state
        self.grad: Tensor | None = None
        # For block-wise rules: which blocks lie here.
        self.extent: Extent | None = None
        # The local tensors of the states, and what they are to the rule.
        self.here: tuple[list[Tensor], dict[str, Tensor], dict[str, Tiled], dict[int, dict[str, Tensor]]] | None = None

    def is_of(self, param: Tensor, group: dict[str, Any], state: dict[str, Tensor] | None) -> bool:
        """Whether this still holds, and all states are there that should be."""
        if self.param is not param or self.group is not group or self.state is not state:
            return False
        return not is_incomplete(self.rule, state, param, group)

    def is_finite(self) -> bool:
        """Whether the gradient is, as far as it lies here; true where a group does not ask for it."""
        return self.grad is None or not self.group.get("skip_nonfinite") or bool(self.grad.isfinite().all())

    def without_nonfinite(self) -> bool:
        """Take what is not finite of the gradient as 0, where the group asks for it; whether there was any."""
        if self.grad is None or self.is_finite():
            return False
        bad = ~self.grad.isfinite()
        self.grad = self.grad.masked_fill(bad, 0.0)
        warnings.warn(
            f"non-finite gradient of parameter {self.name!r} in {int(bad.sum())} element(s), which are taken as 0",
            RuntimeWarning,
            stacklevel=2,
        )
        return True

    def local_grad(self) -> Tensor | None:
        """What lies here of the gradient; checked against the parameter."""
        param, grad = self.param, self.param.grad
        if grad is None:
            return None
        if param.is_meta:
            raise RuntimeError(f"parameter {self.name!r} is on the meta device and has a gradient: materialise it")
        if grad.layout is not torch.strided:
            raise RuntimeError(
                f"the gradient of parameter {self.name!r} is sparse ({grad.layout}); ragged_optim takes dense "
                "gradients only"
            )
        if isinstance(param, DTensor) and not (isinstance(grad, DTensor) and _same_placements(grad, param)):
            found = grad.placements if isinstance(grad, DTensor) else "a plain tensor"
            raise RuntimeError(
                f"parameter {self.name!r} lies as {param.placements}, its gradient as {found}; redistribute the "
                "gradient to the parameter's placements before step()"
            )
        return local(grad)


def is_incomplete(rule: Rule, state: Mapping[str, Tensor] | None, param: Tensor, group: Mapping[str, Any]) -> bool:
    """Whether ``param`` should have states that it has not. Meta and frozen parameters need none.

    An empty ``state`` may be that of a rule without states, or come from a look into the optimizer's defaultdict.
    """
    if state:
        return rule.lacks(state, group)
    if param.is_meta or not (param.requires_grad or param.grad is not None):
        return False
    return state is None or bool(rule.init(tuple(param.shape), group))


def _same_placements(a: DTensor, b: DTensor) -> bool:
    return a.placements is b.placements or a.placements == b.placements
