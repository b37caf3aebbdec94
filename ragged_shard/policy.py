"""ParamPolicy: what one parameter asks of the sharding and of the optimizer.

One function, ``orig_param_policy(name, parameter) -> ParamPolicy | None``, is given to ``fully_shard`` (where may this
parameter be cut?) and to ``RaggedOptimizer`` (who updates it?).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from ragged_shard.block import Block

__all__ = ["OrigParamPolicy", "ParamPolicy", "apply_policy"]


class ParamPolicy:
    """The block of a parameter, the optimizer that updates it, and that optimizer's hyperparameters.

    ``block``: what no rank boundary may cut (``None``: any element boundary will do).
    ``optimizer``: the name of a rule (``"muon"``) or a rule class; ``None`` leaves it to the optimizer's default rule.
    Further keywords are hyperparameters of that rule for this parameter (``lr=...``); they are checked by the rule.

    Immutable and comparable. Raises ``TypeError`` for a block that is not a ``Block``.
    """

    __slots__ = ("block", "hyperparameters", "optimizer")

    block: Block | None
    optimizer: str | type | None
    hyperparameters: Mapping[str, Any]

    def __init__(
        self, *, block: Block | None = None, optimizer: str | type | None = None, **hyperparameters: Any
    ) -> None:
        if block is not None and not isinstance(block, Block):
            raise TypeError(f"ParamPolicy(block=...) takes a ragged_shard.Block, such as Block.rows(32), got {block!r}")
        if optimizer is not None and not isinstance(optimizer, (str, type)):
            raise TypeError(f"ParamPolicy(optimizer=...) takes the name of a rule or a rule class, got {optimizer!r}")
        object.__setattr__(self, "block", block)
        object.__setattr__(self, "optimizer", optimizer)
        object.__setattr__(self, "hyperparameters", MappingProxyType(dict(hyperparameters)))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"ParamPolicy is immutable; make a new one to change {name}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ParamPolicy):
            return NotImplemented
        return (self.block, self.optimizer, dict(self.hyperparameters)) == (
            other.block,
            other.optimizer,
            dict(other.hyperparameters),
        )

    def __hash__(self) -> int:
        return hash((self.block, self.optimizer, tuple(sorted(self.hyperparameters))))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.block, self.optimizer, dict(self.hyperparameters))

    def __repr__(self) -> str:
        fields = [
            f"block={self.block}" if self.block else "",
            f"optimizer={self.optimizer!r}" if self.optimizer else "",
        ]
        fields += [f"{k}={v!r}" for k, v in self.hyperparameters.items()]
        return f"ParamPolicy({', '.join(f for f in fields if f)})"


def _rebuild(block: Block | None, optimizer: str | type | None, hyperparameters: dict[str, Any]) -> ParamPolicy:
    return ParamPolicy(block=block, optimizer=optimizer, **hyperparameters)


OrigParamPolicy = Callable[[str, Any], "ParamPolicy | None"]


def _naming(name: str, error: Exception) -> Exception:
    """``error`` as its own type with the parameter's name in the message, if that type can be made from a message."""
    message = f"orig_param_policy({name!r}, ...): {error}"
    try:
        named = type(error)(message)
    except Exception:
        return RuntimeError(f"{message} ({type(error).__name__})")
    return named if str(named) == message else RuntimeError(f"{message} ({type(error).__name__})")


def apply_policy(policy: OrigParamPolicy | None, name: str, parameter: Any) -> ParamPolicy:
    """What ``policy`` says of the parameter ``name``; ``ParamPolicy()`` when there is no policy or it returns ``None``.

    Raises ``TypeError`` naming the parameter when the policy returns anything else, and re-raises what the block says
    against the parameter's global shape as ``ValueError`` naming the parameter.
    """
    try:
        answer = None if policy is None else policy(name, parameter)
    except Exception as error:
        raise _naming(name, error) from error
    if answer is None:
        return ParamPolicy()
    if not isinstance(answer, ParamPolicy):
        raise TypeError(
            f"orig_param_policy({name!r}, ...) returned {answer!r}; return a ParamPolicy, or None for the default"
        )
    if answer.block is not None:
        try:
            answer.block.numel(parameter.shape)
        except ValueError as error:
            raise ValueError(f"orig_param_policy: parameter {name!r} cannot have {error}") from None
    return answer
