"""Buckets of a sharding runtime as one piece each, for element-wise rules.

A bucket's parameters lie in one flat buffer on every rank, and so do their gradients and their states: an
element-wise rule updates all of them in one call. Whether a bucket is one piece is decided by what lies here alone,
and changes no bit of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from ragged_optim.rule import ElementwiseRule, Rule

__all__ = ["Bucket", "flat_states", "whole_buckets"]

States = Mapping[Tensor, dict[str, Tensor]]


class Bucket:
    """All parameters of one buffer, in the buffer's order, with their states in one buffer per state.

    ``state``: flat, and the counters of the first parameter, which the others' follow.
    """

    def __init__(self, buffer: Any, params: Sequence[Tensor], states: Sequence[dict[str, Tensor]]) -> None:
        self.flat: Tensor = buffer.owned
        self.params = list(params)
        self._locals = [_local(param) for param in params]
        self._ranges = [(lo, hi) for _, _, (lo, hi) in buffer.layout.specs]
        # What the optimizer's states were when this was made: (its dict, the values in it).
        self._states = [(state, tuple(state.values())) for state in states]
        self.state: dict[str, Tensor] = {}
        self._counters: dict[str, list[Tensor]] = {}
        # Versions of the counters when they were last known to agree.
        self._agreed: list[int] = []
        for key, value in states[0].items():
            if isinstance(value, DTensor):
                self.state[key] = _buffer_of(value)[0].owned
            else:
                self.state[key] = value
                self._counters[key] = [state[key] for state in states]

    def holds(self, states: States) -> bool:
        """Whether parameters and states are still the tensors that they were."""
        return all(_local(param) is local for param, local in zip(self.params, self._locals, strict=True)) and all(
            states[param] is state and len(state) == len(values) and all(map(_same, state.values(), values))
            for param, (state, values) in zip(self.params, self._states, strict=True)
        )

    def gradient(self) -> Tensor | None:
        """The flat gradient, or ``None`` where the gradients are not one buffer laid out as the parameters are."""
        first = self.params[0].grad
        found = None if first is None else _buffer_of(first)
        if found is None or found[1] != 0 or found[0].owned.numel() != self.flat.numel():
            return None
        whole: Tensor = found[0].owned
        start, size = whole.data_ptr(), whole.element_size()
        for param, (lo, hi) in zip(self.params, self._ranges, strict=True):
            grad = param.grad
            if grad is None or grad.dtype != whole.dtype:
                return None
            here = _local(grad)
            if lo != hi and (here.data_ptr() != start + lo * size or not here.is_contiguous()):
                return None
        return whole

    def in_step(self) -> bool:
        """Whether all parameters have seen as many steps."""
        versions = [counter._version for counters in self._counters.values() for counter in counters]
        if versions != self._agreed:
            for counters in self._counters.values():
                first = counters[0].item()
                if any(counter.item() != first for counter in counters):
                    return False
            self._agreed = versions
        return True

    def follow(self) -> None:
        """The counters of the first parameter have advanced: so do the others'."""
        for first, *others in self._counters.values():
            for other in others:
                other.copy_(first)
        self._agreed = [counter._version for counters in self._counters.values() for counter in counters]


def _same(a: object, b: object) -> bool:
    return a is b


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _buffer_of(tensor: Tensor) -> Any:
    if not isinstance(tensor, DTensor):
        return None
    try:
        from ragged_shard.dbuffer import buffer_of
    except ImportError:
        return None
    return buffer_of(tensor)


def _by_buffer(params: Iterable[Tensor]) -> list[tuple[Any, dict[int, Tensor]]]:
    """The buckets that ``params`` lie in, and which of them at which index."""
    buckets: dict[int, tuple[Any, dict[int, Tensor]]] = {}
    for param in params:
        found = _buffer_of(param)
        if found is not None:
            buckets.setdefault(id(found[0]), (found[0], {}))[1][found[1]] = param
    return list(buckets.values())


def flat_states(
    entries: Sequence[tuple[Tensor, dict[str, Any]]], rule_of_group: Callable[[Mapping[str, Any]], Rule], made: States
) -> tuple[dict[Tensor, dict[str, Tensor]], list[Any]]:
    """States as views of one buffer per bucket, for buckets that lie whole in one group of an element-wise rule, but
    for those that some of its parameters have already (``made``).

    Also returns the buffers; only references to them keep them known to ``ragged_shard.buffer_of``.
    """
    group_of = dict(entries)
    states: dict[Tensor, dict[str, Tensor]] = {}
    buffers = []
    for buffer, members in _by_buffer(param for param, _ in entries):
        groups = {id(group_of[param]): group_of[param] for param in members.values()}
        if len(members) != len(buffer.names) or len(groups) != 1:
            continue
        (group,) = groups.values()
        rule = rule_of_group(group)
        if not isinstance(rule, ElementwiseRule):
            continue
        specs = {index: rule.init(tuple(param.shape), group) for index, param in members.items()}
        for key, spec in specs[0].items():
            if spec.home != "param" or spec.fill or spec.tile or any(key not in other for other in specs.values()):
                continue
            if any(key in made[param] for param in members.values()):
                continue
            flat = buffer.like(buffer.dtype if spec.dtype is None else spec.dtype)
            buffers.append(flat)
            for index, param in members.items():
                states.setdefault(param, {})[key] = flat.dtensor(index)
    return states, buffers


def whole_buckets(params: Iterable[Tensor], states: States) -> list[Bucket]:
    """The buckets of which all parameters are among ``params``, and whose states lie in one buffer each.

    CPU only: elsewhere the fused kernels take lists at no cost and counters cost a synchronisation.
    """
    buckets = []
    for buffer, members in _by_buffer(params):
        if len(members) != len(buffer.names) or buffer.owned.device.type != "cpu":
            continue
        ordered = [members[index] for index in range(len(members))]
        theirs = [states[param] for param in ordered]
        keys = list(theirs[0])
        if all(list(state) == keys for state in theirs) and all(_one_buffer(theirs, key) for key in keys):
            buckets.append(Bucket(buffer, ordered, theirs))
    return buckets


def _one_buffer(states: Sequence[dict[str, Tensor]], key: str) -> bool:
    """Whether the state ``key`` of every parameter lies at its index of one buffer, or is a counter."""
    values = [state[key] for state in states]
    if not isinstance(values[0], DTensor):
        return all(not isinstance(value, DTensor) and value.ndim == 0 for value in values)
    found = [_buffer_of(value) for value in values]
    return all(at is not None and at[0] is found[0][0] and at[1] == index for index, at in enumerate(found))
