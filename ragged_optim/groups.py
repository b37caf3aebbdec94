"""What users hand to an optimizer (parameters, groups, policies, saved groups), checked and brought into one form."""

from __future__ import annotations

import functools
import math
import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ragged_optim.layout import Extent, layout_of
from ragged_optim.quantize import tiling
from ragged_optim.rule import BlockwiseRule, Rule, StateSpec
from ragged_optim.rules import NAMES, rule_of
from ragged_shard.block import Block
from ragged_shard.policy import OrigParamPolicy, ParamPolicy

__all__ = [
    "FOREIGN_KEYS",
    "OWN_KEYS",
    "PortablePolicy",
    "TORCH_SWITCHES",
    "blocks_of",
    "check_block",
    "check_keys",
    "dtype_of",
    "given",
    "hashable",
    "ids_of",
    "keys_of",
    "named_pairs",
    "refuse",
    "without_empty",
]

# What torch's schedulers and named parameters put into param groups, and what we do.
FOREIGN_KEYS = frozenset(
    {"params", "param_names", "initial_lr", "swa_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"}
)
OWN_KEYS = frozenset({"rule", "state_version"})
# Implementation switches in the state dicts of torch's own optimizers; they say nothing about the state.
TORCH_SWITCHES = frozenset({"foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"})


def refuse(optimizer: str, **requested: bool | None) -> None:
    """Raise ``ValueError`` for options of torch's optimizers that are asked for and not provided here."""
    for option, wanted in requested.items():
        if wanted:
            raise ValueError(
                f"ragged_optim.{optimizer} does not support {option}; leave it out (it chooses its own kernels)"
            )


def given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords for ``RaggedOptimizer`` from the ``locals()`` with which a constructor that names them begins.

    ``adamw_NAME`` is what parameters get that a policy sends to AdamW.
    """
    own = {key: value for key, value in arguments.items() if key not in ("self", "params", "__class__")}
    rest = {key.removeprefix("adamw_"): own.pop(key) for key in list(own) if key.startswith("adamw_")}
    return {**own, "others": {"adamw": rest}}


def without_empty(params: ParamsT) -> ParamsT:
    if isinstance(params, Tensor):
        raise TypeError(
            "params argument given to the optimizer should be an iterable of Tensors or dicts, but got "
            f"{torch.typename(params)}"
        )
    listed = list(params)
    if not listed:
        raise ValueError("optimizer got an empty parameter list")
    return cast(ParamsT, listed)


def named_pairs(params: Any) -> list[tuple[str | None, Tensor]]:
    if isinstance(params, Tensor):
        params = [params]
    if isinstance(params, set):
        raise TypeError(
            "optimizer parameters need to be organized in ordered collections, but sets have no order; use a list"
        )
    listed = list(params)
    pairs = [(item[0], item[1]) if isinstance(item, tuple) else (None, item) for item in listed]
    if len({name is None for name, _ in pairs}) > 1:
        raise ValueError("all optimizer params should be with/without names. Some param names are missing")
    return pairs


def check_keys(rule: Rule, keys: Iterable[str], where: str) -> None:
    unknown = [key for key in keys if key not in rule.defaults and key not in FOREIGN_KEYS and key not in OWN_KEYS]
    if unknown:
        raise ValueError(
            f"unknown hyperparameter {', '.join(map(repr, unknown))} for rule {rule.name!r} in {where}; it takes "
            f"{', '.join(rule.defaults)}"
        )


@functools.cache
def keys_of(family: str) -> frozenset[str]:
    """The hyperparameters of the rules of ``family``."""
    rules = map(rule_of, NAMES)
    return frozenset(key for rule in rules if rule.family == family for key in rule.defaults)


def ids_of(saved_groups: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[Any]:
    """The key of each of our parameters in a state dict: by name if it has ours in another order, else by position."""
    ids = [saved for group in saved_groups for saved in group["params"]]
    saved_names = [name for group in saved_groups for name in group.get("param_names", ())]
    # torch.distributed.checkpoint puts names in place of numbers, already in our order.
    numbered = all(isinstance(i, int) for i in ids)
    if numbered and len(saved_names) == len(ids) and set(saved_names) == set(names):
        by_name = dict(zip(saved_names, ids, strict=True))
        return [by_name[name] for name in names]
    return ids


def dtype_of(value: Any) -> Any:
    """``"torch.bfloat16"`` back to the dtype; anything else as it is."""
    if isinstance(value, str) and value.startswith("torch."):
        return getattr(torch, value.removeprefix("torch."))
    return value


def hashable(value: Any) -> Any:
    if isinstance(value, Tensor):
        return id(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(map(hashable, value))
    return value


def blocks_of(rule: Rule, shape: tuple[int, ...], hyper: Mapping[str, Any]) -> Iterable[Block]:
    """What the rule needs whole on one rank: its block, and the tiles of its 8-bit states."""
    if isinstance(rule, BlockwiseRule):
        yield rule.block(shape, hyper)
    specs = rule.init(shape, hyper)
    if not isinstance(specs, dict) or not all(isinstance(spec, StateSpec) for spec in specs.values()):
        raise TypeError(f"rule {rule.name!r}: init() returns a dict of StateSpec(shape, ...) by name, not {specs!r}")
    for spec in specs.values():
        if spec.tile is not None:
            yield tiling(shape, *spec.tile).block


def check_block(block: Block, rule: Rule, param: Tensor, name: str) -> None:
    """Every rank boundary must fall between two blocks."""
    layout, shape = layout_of(param, name), tuple(param.shape)
    size, total = block.numel(shape), math.prod(shape)
    for rank in range(len(layout.pieces)):
        extent = layout.extent(rank)
        cut = "it is not cut along its rows" if extent is None else _cut_of(extent, size, total)
        if cut:
            raise ValueError(
                f"parameter {name!r} of shape {shape} is sharded as {getattr(param, 'placements', ())}, but "
                f"{rule.name} needs every block {block} whole on one rank: {cut}. Shard it with fsdp.fully_shard and "
                f"a policy that says ParamPolicy(block=Block.{block}), or send the parameter to another rule"
            )


def _cut_of(extent: Extent, size: int, total: int) -> str:
    for edge in (extent.start, extent.stop):
        start = edge - edge % size
        if edge != start and edge != total:
            return f"a rank boundary at element {edge} cuts the block of elements {start} to {min(total, start + size)}"
    return ""


class PortablePolicy:
    """A policy on its way into a copy or a file; one that cannot be pickled is found missing when it is next asked."""

    def __init__(self, function: OrigParamPolicy | None) -> None:
        self.function = function

    def __deepcopy__(self, memo: object) -> PortablePolicy:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        try:
            pickle.dumps(self.function)
        except Exception:  # whatever its __reduce__ raises; pickle itself has no one type for "cannot"
            return PortablePolicy, (_lost,)
        return PortablePolicy, (self.function,)


def _lost(name: str, parameter: Any) -> ParamPolicy | None:
    raise ValueError(
        f"who updates parameter {name!r}? The orig_param_policy of this optimizer could not be pickled with it: define "
        "it as a function of a module, or give the group its rule"
    )
