"""The three kinds of rule: what a researcher writes; everything else makes it run sharded.

    ElementwiseRule   every element is updated by itself            AdamW, SGD, Lion
    BlockwiseRule     every block is updated by itself              8-bit Adam
    MatrixRule        every matrix is updated as a whole            Muon, Shampoo

A rule is a class without attributes of its own: hyperparameters live in the param group, state in the optimizer. The
same rule runs on plain tensors, on FSDP2's ``Shard(0)`` and on ``RaggedShard``, for any number of ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, ClassVar, Literal, TypeGuard

import torch
from torch import Tensor

from ragged_optim.layout import Extent, Matrix, as_matrices
from ragged_shard.block import Block

__all__ = ["BlockwiseRule", "ElementwiseRule", "MatrixRule", "Rule", "StateSpec"]

Group = Mapping[str, Any]
State = dict[str, Tensor]

WEIGHT_DECAY_MODES = ("decoupled", "cautious")


@dataclass(frozen=True)
class StateSpec:
    """One state tensor, described globally, zero (or ``fill``) at the start.

    ``home="param"``: cut where the parameter is; ``shape`` is the parameter's own, or, for a ``BlockwiseRule``,
    ``(number of blocks, ...)``. ``home="everywhere"``: the same on every rank (counters, seeds). ``home="owner"``: a
    ``MatrixRule``'s state of one matrix, of any shape, kept by the rank that computes that matrix.

    ``tile``: kept as 8-bit codes and a scale per tile of so many rows and columns (quantize.py; states ``NAME.codes``,
    ``NAME.scales``), which no rank boundary may cut. The rule sees fp32; a ``MatrixRule`` changes it in ``direction``
    only.

    ``dtype``: ``None`` means the parameter's. ``fill="salt"``: a number made from the parameter's name, by which random
    bits differ between parameters but not between runs.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    home: Literal["param", "owner", "everywhere"] = "param"
    fill: float | Literal["salt"] = 0.0
    tile: tuple[int, int] | None = None


class Rule(ABC):
    """What all three kinds have: a name, hyperparameters with defaults, and the states of a parameter."""

    name: ClassVar[str]
    defaults: ClassVar[Mapping[str, Any]]
    # Rules of one family take the same hyperparameters: Muon(adamw_lr=...) reaches AdamW8bit too.
    family: ClassVar[str] = ""
    # Stands in each param group as ``state_version``; raise it when the meaning of a state changes.
    state_version: ClassVar[int] = 1
    # Hyperparameters by which parameters were cut and states made: loading a state dict leaves them as they are.
    shaping: ClassVar[frozenset[str]] = frozenset(
        {"split_sizes", "flatten", "tile", "min_8bit_size", "momentum_8bit", "state_dtype"}
    )

    def check(self, group: Group) -> None:
        """Raise ``ValueError`` for hyperparameters that cannot be meant, ``TypeError`` for wrong types."""
        for key in ("lr", "weight_decay", "eps", "momentum", "min_8bit_size"):
            if key not in group or (group[key] is None and self.defaults.get(key, 0) is None):
                continue
            value = group[key]
            if isinstance(value, Tensor) and value.numel() != 1:
                raise ValueError(
                    f"{self.name}: {key} must be a number or a tensor of one element, got shape {tuple(value.shape)}"
                )
            if not isinstance(value, (Tensor, Real)):
                raise ValueError(f"{self.name}: {key} must be a number, got {value!r}")
            if not float(value) >= 0.0:
                raise ValueError(f"{self.name}: {key} must be at least 0, got {value!r}")
        mode = group.get("weight_decay_mode", "decoupled")
        if mode not in WEIGHT_DECAY_MODES:
            raise ValueError(f"{self.name}: weight_decay_mode must be one of {WEIGHT_DECAY_MODES}, got {mode!r}")
        betas = group.get("betas")
        if betas is not None and not (
            _is_list(betas) and len(betas) == 2 and all(0.0 <= float(beta) < 1.0 for beta in betas)
        ):
            raise ValueError(f"{self.name}: betas must be two numbers in [0, 1), got {betas!r}")
        tile = group.get("tile")
        if tile is not None and not (_are_sizes(tile) and len(tile) == 2):
            raise ValueError(f"{self.name}: tile must be two positive integers (rows, columns), got {tile!r}")
        split_sizes = group.get("split_sizes")
        if split_sizes is not None and not _are_sizes(split_sizes):
            raise ValueError(
                f"{self.name}: split_sizes must be positive integers (the rows of each matrix), got {split_sizes!r}"
            )

    def accepts(self, shape: Sequence[int]) -> str | None:
        """Why a parameter of this global shape cannot be updated by this rule; ``None`` when it can."""
        return None

    @abstractmethod
    def init(self, shape: tuple[int, ...], group: Group) -> dict[str, StateSpec]:
        """The states of a parameter of global ``shape``. A function of these two alone, never of a local size.

        A ``MatrixRule`` is asked for its states at the owner with the (rows, columns) of each matrix.
        """

    def lacks(self, state: Mapping[str, Tensor], group: Group) -> bool:
        """Whether ``state`` has become incomplete as a hyperparameter was changed; what is missing is then made."""
        return False

    def implied(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """What torch's optimizer of the same algorithm leaves out of the ``state`` that it saves for a parameter."""
        return {}


class ElementwiseRule(Rule):
    """Updates every element by itself, so it may run on any piece: a tensor, its shard, or a whole bucket at once."""

    @abstractmethod
    def update(self, param: Tensor, grad: Tensor, state: State, group: Group) -> None:
        """Update ``param`` and ``state`` in place. All tensors but counters have ``param``'s (local) shape."""

    def update_all(self, params: list[Tensor], grads: list[Tensor], states: list[State], group: Group) -> None:
        """Update a list of pieces; override it where one call for all of them is cheaper."""
        for param, grad, state in zip(params, grads, states, strict=True):
            self.update(param, grad, state, group)


class BlockwiseRule(Rule):
    """Updates every block by itself; no rank boundary may cut a block, which the optimizer checks."""

    @abstractmethod
    def block(self, shape: tuple[int, ...], group: Group) -> Block:
        """What must lie whole on one rank, for a parameter of global ``shape``."""

    @abstractmethod
    def update(self, param: Tensor, grad: Tensor, state: State, group: Group, extent: Extent) -> None:
        """Update ``param`` (the elements ``extent`` of the flattened global tensor, in its local shape) and ``state``
        in place.
        """


class MatrixRule(Rule):
    """Updates every matrix as a whole, at one rank, its owner.

    A parameter is one matrix, a stack of matrices (leading dims), or several row blocks of one (``split_sizes``); with
    ``flatten=True`` dims 1.. are the columns (convolutions). The three methods run in this order::

        shards:  direction(param, grad, state) -> shard of what travels to the owner
        owner:   update(matrix, state) -> the update of that matrix, of the same shape
        shards:  apply(param, update, state, shape) with the update's shard

    A matrix that already lies whole on a rank goes through the same three calls there, without communication.
    """

    # Whether ``update`` would spoil its states with a matrix that is not finite; it is then not called, and the matrix
    # left alone (a warning says so). An ``update`` of such a rule that returns nothing but nan asks for that, too.
    needs_finite: ClassVar[bool] = False

    def accepts(self, shape: Sequence[int]) -> str | None:
        if len(shape) < 2:
            return f"it needs a matrix or a stack of matrices, not {len(shape)} dims"
        return None

    def matrices(self, shape: tuple[int, ...], group: Group) -> tuple[Matrix, ...]:
        """The matrices of a parameter, in the order of its flattened elements."""
        return as_matrices(shape, split_sizes=group.get("split_sizes"), flatten=bool(group.get("flatten", False)))

    def cost(self, rows: int, cols: int, group: Group) -> float:
        """About how many FLOPs ``update`` takes; owners are balanced by it."""
        small, large = sorted((rows, cols))
        return 2.0 * small * small * large

    def wire_dtype(self, dtype: torch.dtype, group: Group) -> torch.dtype:
        """In what a direction and an update travel, given the parameter's dtype; both are cast to it everywhere."""
        return torch.float32

    @abstractmethod
    def direction(self, param: Tensor, grad: Tensor, state: State, group: Group) -> Tensor:
        """On the shard: advance the parameter's states, return what the owner shall see. Never an alias of a state."""

    @abstractmethod
    def update(self, matrix: Tensor, state: State, group: Group) -> Tensor:
        """At the owner.

        ``matrix`` (rows, cols), its owned states; returns the update. ``matrix`` may be overwritten.
        """

    def update_all(self, matrices: Sequence[Tensor], states: Sequence[State], group: Group) -> list[Tensor]:
        """Updates of matrices of one shape; override it where one call for all of them is cheaper and gives the same
        bits.

        The updates may lie in scratch memory that the next call overwrites.
        """
        return [self.update(matrix, state, group) for matrix, state in zip(matrices, states, strict=True)]

    def settle(self, state: State, group: Group) -> None:
        """Bring into the owned states of a matrix what is still being computed for them in the background.

        Called before states are saved, loaded or copied.
        """

    @abstractmethod
    def apply(self, param: Tensor, update: Tensor, state: State, group: Group, shape: tuple[int, int]) -> None:
        """On the shard: apply a piece of the update of a matrix of (rows, cols) = ``shape`` to ``param`` in place."""


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    # Configuration libraries have lists of their own.
    return isinstance(value, Sequence) and not isinstance(value, str)


def _are_sizes(value: object) -> TypeGuard[Sequence[int]]:
    return _is_list(value) and all(isinstance(size, Integral) and int(size) > 0 for size in value)


def learning_rate(group: Group) -> float:
    """The group's lr as a number; schedulers may have made it a tensor."""
    return float(group["lr"])


def wide(tensor: Tensor) -> Tensor:
    """``tensor`` in the dtype to compute in: itself for fp32 and fp64, an fp32 copy of anything narrower.

    Narrow kernels round differently in their vector body and scalar tail, so a result would depend on where a tensor
    is cut; computing in fp32 and rounding once does not.
    """
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def decay(param: Tensor, step: Tensor, group: Group) -> None:
    """Decoupled weight decay of ``param``, before ``step`` is subtracted.

    ``"cautious"``: only where both pull alike.
    """
    amount = learning_rate(group) * float(group["weight_decay"])
    if group["weight_decay_mode"] == "cautious":
        param.addcmul_(param, (param * step > 0).to(param.dtype), value=-amount)
    else:
        param.mul_(1 - amount)
