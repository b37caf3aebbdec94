"""What fires when: the hooks of one ``fully_shard`` call in forward and backward.

    module forward pre-hook    unshard; outside a recomputation, remember the inputs that want gradients
    module forward hook        reshard; a hook on every output that wants a gradient
    output's tensor hook       backward reaches the module: unshard again
    parameter's hook           (fsdp.bucket) a gradient is complete
    input's tensor hook        backward has left the module: its parameters may go
    engine callback            the end of the whole backward

Tensor hooks, unlike an autograd Function around inputs or outputs, leave views and in-place operations alone, fire for
modules without differentiable inputs, and fire under both kinds of activation checkpointing.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._pytree import tree_iter, tree_map
from torch.utils.hooks import RemovableHandle

from fsdp.bucket import Bucket
from fsdp.changes import adopt_assigned, take_up_changes_of_gathered
from fsdp.pipelining import announce
from fsdp.schedule import Schedule
from fsdp.streams import CommStreams
from fsdp.weight_grad import will_run
from ragged_shard.pool import Pool

__all__ = ["State", "state_of"]

_ATTRIBUTE = "_fsdp_state"
_calls = itertools.count()


F = TypeVar("F", bound=Callable[..., Any])


def _outside_graphs(hook: F) -> F:
    """Hooks communicate: torch.compile runs them between its graphs."""
    return cast(F, torch.compiler.disable(hook))


def state_of(module: nn.Module) -> State | None:
    """The state of the ``fully_shard`` call that ``module`` was passed to."""
    found = module.__dict__.get(_ATTRIBUTE)
    return found if isinstance(found, State) else None


def _named_states(module: nn.Module) -> Iterator[tuple[str, State]]:
    for name, child in module.named_modules():
        if (state := state_of(child)) is not None:
            yield name, state


class State:
    """One ``fully_shard`` call: its modules, its bucket, and its part of a schedule."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        bucket: Bucket,
        device: torch.device,
        mp_policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | None,
        *,
        hooked: bool = False,
    ) -> None:
        """``hooked``: the modules are copies, and their hooks are already this state's."""
        self.modules = list(modules)
        self.bucket = bucket
        bucket.on_enter, bucket.on_complete = self._gradients_begin, self._gradients_complete
        bucket.on_open = self._memory_wanted
        bucket.hands_out = self._hands_out
        self.device = device
        self.mp_policy = mp_policy
        # None: as torch, True for all but the root; and, with ours, for all but the bucket that backward starts with.
        self.reshard_after_forward = reshard_after_forward
        self.schedule: Schedule | None = None
        self.is_root: bool | None = None
        self.forward_prefetch: list[State] = []
        self.backward_prefetch: list[State] = []
        self._to_run: set[nn.Module] = set()
        # Of forwards that have begun: the call's number and the autograd nodes of its inputs, by tensor.
        self._open: list[tuple[int, dict[int, Node]]] = []
        self._recomputing: list[tuple[int, dict[int, Node]]] = []
        # Of each call: hooks on leaves among its inputs and outputs, which may outlive the graph.
        self._leaf_hooks: dict[int, list[RemovableHandle]] = {}
        for module in () if hooked else self.modules:
            module.__dict__[_ATTRIBUTE] = self
            announce(module, self._reduce_accumulated)
            module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True)
            # always_call: a forward that raises must be known to have ended.
            module.register_forward_hook(self.post_forward, with_kwargs=True, always_call=True)
            module.register_state_dict_pre_hook(self._show_sharded)
            module.register_load_state_dict_pre_hook(self._show_sharded)
            module.register_load_state_dict_post_hook(self._adopt_assigned)

    def _show_sharded(self, *_: Any, **__: Any) -> None:
        if self.bucket.is_unsharded:
            take_up_changes_of_gathered(self.bucket)
        self.bucket.reshard()

    def _adopt_assigned(self, *_: Any) -> None:
        """``load_state_dict(assign=True)`` has put other parameters in the place of ours: take their values."""
        adopt_assigned(self.bucket)

    # -- root --

    def lazy_init(self) -> Schedule:
        """The first module to run forward is the root; all below it share its schedule."""
        if self.schedule is not None:
            return self.schedule
        if len(self.modules) > 1:
            raise RuntimeError(
                "the first forward of a model must go through one root module, but it went through a list that was "
                f"passed to fully_shard together ({', '.join(type(m).__name__ for m in self.modules)}); call "
                f"fully_shard on the whole model last"
            )
        return self._become_root(Schedule(self.device))

    def share(self, other: Schedule) -> None:
        """Become a root whose memory and streams are those of another root's schedule."""
        if self.schedule is not None:
            raise RuntimeError("share_comm_ctx must be called before the first forward of the modules that share")
        self._become_root(Schedule(self.device, other))

    def bind_alone(self) -> None:
        """Unsharded by hand before the first forward has shown which module is the root: memory of its own."""
        self.bucket.bind(Pool(self.device), CommStreams(self.device))

    def _become_root(self, schedule: Schedule) -> Schedule:
        below = [(name, state) for name, state in _named_states(self.modules[0]) if state is not self]
        joining = [(name, state) for name, state in below if state.schedule is None]
        for name, state in below:
            if state.is_root:
                raise RuntimeError(
                    f"{name or type(state.modules[0]).__name__} ran forward before the model that contains it, and so "
                    f"became a root of its own; run the first forward through the outermost fully_shard module"
                )
        # Modules of another root too (an encoder that an actor and a critic share): both run by one schedule.
        others = {state.schedule for _, state in below if state.schedule is not None}
        if len(others) > 1:
            names = ", ".join(name for name, state in below if (name, state) not in joining)
            raise RuntimeError(f"{names} belong to several models that have run before; run this model first")
        self.schedule = others.pop() if others else schedule
        self.is_root = True
        for name, state in joining:
            state.schedule = self.schedule
            state.is_root = False
            state.bucket.name = name
            self.schedule.add(state.bucket)
        self.schedule.add(self.bucket)
        for state in self._below:
            state.bucket.encloses_others = len(state._below) > 1
        return self.schedule

    # -- forward --

    @_outside_graphs
    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if torch._C._current_graph_task_id() != -1:
            # An activation checkpoint recomputes: backward will use these parameters at once. (Or a hook of another
            # model's backward runs this one.)
            self.lazy_init()
            if not self.bucket.is_unsharded:
                self._memory_wanted()
            self.bucket.unshard()
            self.bucket.wait_unshard()
            args, kwargs = self._cast_inputs(args, kwargs)
            self._recomputing.append(self._watch_inputs(_wanting((args, kwargs))))
            return args, kwargs
        schedule = self.lazy_init()
        if schedule.enter_forward(self):
            for state in self._below:
                state._to_run.clear()
                state._open.clear()
                state._recomputing.clear()
                if state._leaf_hooks:
                    state._unhook_leaves()
            if self.device.type != "cpu":
                args, kwargs = _moved(args, self.device), _moved(kwargs, self.device)
        if not self._to_run and not self._open:
            self._to_run.update(self.modules)
            schedule.before_forward(self.bucket, [s.bucket for s in self.forward_prefetch])
        elif not self.bucket.is_unsharded:
            self.bucket.unshard()
            self.bucket.wait_unshard()
        inputs = self._cast_inputs(args, kwargs)
        tensors = _wanting(inputs)
        if any(map(self._is_taken, tensors.values())):
            inputs = self._unshared(inputs, tensors)
            tensors = _wanting(inputs)
        self._open.append(self._watch_inputs(tensors))
        return inputs

    @_outside_graphs
    def post_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if torch._C._current_graph_task_id() != -1:
            call, inputs = self._recomputing.pop()
            output = self._cast_output(output)
            # A reentrant checkpoint: the graph made now is the one that backward will walk. (The other kind stops its
            # recomputation early, or drops what it made.)
            for tensor in _announcing(output, _tensors(output)):
                tensor.register_hook(functools.partial(self._entered, call, inputs))
            return output
        assert self.schedule is not None
        if output is None and sys.exc_info()[0] is not None:
            self.forward_failed()
            return output
        call, watched = self._open.pop()
        self._to_run.discard(module)
        output = self._cast_output(output)
        tensors = list(_tensors(output))
        if any(map(self._is_own, tensors)) and self._reshards():
            output = _map_tensors(lambda tensor: tensor.clone() if self._is_own(tensor) else tensor, output)
            tensors = list(_tensors(output))
        tensors = _announcing(output, tensors)
        needs_backward = self._needs_backward(bool(tensors))
        if needs_backward:
            self.schedule.expect(call, self.bucket)
        if not self._to_run and not self._open:
            self.bucket.reshard_after_forward = self._reshards()
            self.schedule.after_forward(self.bucket, needs_backward)
        if tensors:
            # Inputs handed through, nothing computed: backward leaves (by hooks of the same tensors) as it enters.
            computed = any(id(tensor) not in watched for tensor in tensors)
            for tensor in tensors:
                hook = functools.partial(self._entered, call, watched if computed else None)
                if tensor.is_leaf:
                    self._leaf_hooks.setdefault(call, []).append(tensor.register_hook(hook))
                elif id(tensor) in watched:
                    # Also the output of the module before, which backward enters after this one.
                    _hook_first(tensor, hook)
                else:
                    tensor.register_hook(hook)
        if self.schedule.root is self and not self._open:
            self._finish_groups()
            self.schedule.leave_forward(self)
        return output

    def forward_failed(self) -> None:
        """A forward of one of these modules raised."""
        if self._open:
            self._open.pop()
        if self.schedule is not None:
            self.schedule.forward_failed(self)

    def _reshards(self) -> bool:
        if self.reshard_after_forward is not None:
            return self.reshard_after_forward
        if not torch.is_grad_enabled():
            return True
        assert self.schedule is not None
        return not (self.is_root or self.schedule.runs_last(self.bucket))

    def _is_own(self, tensor: Tensor) -> bool:
        """Whether it is a parameter of this module, or a view of one, whose memory goes when its forward ends."""
        if type(tensor) is Tensor and not tensor._is_view():
            return False
        return torch._C._has_storage(tensor) and tensor.untyped_storage()._cdata in self.bucket.full_storages()

    def _needs_backward(self, differentiable: bool) -> bool:
        """Whether backward will gather this bucket: also if this rank used nothing of it, since others may have."""
        return torch.is_grad_enabled() and (differentiable or self.bucket.trainable)

    def _finish_groups(self) -> None:
        """Modules of a list that this forward did not run: their bucket is done all the same."""
        for bucket_state in self._below:
            if bucket_state._to_run and bucket_state is not self:
                bucket_state._to_run.clear()
                assert self.schedule is not None
                bucket_state.bucket.reshard_after_forward = bucket_state._reshards()
                self.schedule.end_group(bucket_state.bucket, bucket_state._needs_backward(False))

    @functools.cached_property
    def _below(self) -> list[State]:
        """The states of all modules here and below, found once: the first forward has finished the wrapping."""
        found: dict[int, State] = {}
        for root in self.modules:
            for module in root.modules():
                state = state_of(module)
                if state is not None:
                    found[id(state)] = state
        return list(found.values())

    def _is_taken(self, tensor: Tensor) -> bool:
        """Whether another sharded module has taken this input in this forward."""
        hooks = tensor._backward_hooks
        if not hooks or tensor.layout is not torch.strided:
            return False
        return any(type(hook) is _Left and hook.state is not self for hook in hooks.values())

    def _unshared(self, inputs: tuple[Any, Any], tensors: dict[int, Tensor]) -> tuple[Any, Any]:
        """Inputs that other sharded modules have taken too (an encoder's output in every layer of a decoder, skips of a
        U-Net) become aliases. Their gradient is there when backward has left this module, that of the tensor itself
        only when it has left all of them, and until then each would keep its parameters and gradients whole.
        """
        aliases = {key: tensor.view_as(tensor) for key, tensor in tensors.items() if self._is_taken(tensor)}
        unshared: tuple[Any, Any] = _map_tensors(lambda tensor: aliases.get(id(tensor), tensor), inputs)
        return unshared

    def _watch_inputs(self, tensors: dict[int, Tensor]) -> tuple[int, dict[int, Node]]:
        """A number for this call, and the nodes that bring its inputs' gradients, hooked to tell when backward has
        left.
        """
        call, nodes = next(_calls), {}
        for key, tensor in tensors.items():
            nodes[key] = get_gradient_edge(tensor).node
            # Knows the call by its number: a hook that held its own node would never be freed.
            hook = _Left(self, call)
            if tensor.is_leaf:
                self._leaf_hooks.setdefault(call, []).append(tensor.register_hook(hook))
            else:
                _hook_first(tensor, hook)
        return call, nodes

    def _unhook_leaves(self) -> None:
        """Between iterations: leaves keep the hooks of calls that a backward is still to come to."""
        for call in [call for call in self._leaf_hooks if call not in self.bucket.calls]:
            for handle in self._leaf_hooks.pop(call):
                handle.remove()

    # -- backward --

    def _entered(self, call: int, inputs: dict[int, Node] | None, _: Tensor) -> None:
        """``inputs``: the nodes that bring the inputs' gradients; ``None``: these are the outputs'."""
        assert self.schedule is not None
        self.schedule.enter_backward(self.bucket.calls.get(call))
        if inputs is None:
            # Passed by. Not now: gradients of modules behind this one may still be to come (Schedule._pass_by).
            return
        awaited = self.bucket.awaited_inputs
        if call not in awaited and (count := sum(map(will_run, inputs.values()))):
            awaited[call] = count
        self.schedule.before_backward(self.bucket, call, [s.bucket for s in reversed(self.backward_prefetch)])

    def _reduce_accumulated(self) -> None:
        if self.schedule is not None:
            self.schedule.reduce_accumulated()

    def _memory_wanted(self) -> None:
        if self.schedule is not None:
            self.schedule.before_memory(self.bucket)

    def _hands_out(self) -> bool:
        return self.schedule is not None and self.schedule.hands_out()

    def _gradients_begin(self) -> None:
        if self.schedule is None:
            raise RuntimeError(
                f"backward has come to parameters of {self.bucket.name!r} that were unsharded by hand before any "
                f"forward of the model; run one first: it finds the root, whose backward reduces all gradients"
            )
        # Usually an output has announced it. A forward may return what nobody can look into (a torch.distributions
        # object), and parameters unsharded by hand may be used outside of one.
        self.schedule.enter_backward(None)

    def _gradients_complete(self) -> None:
        assert self.schedule is not None
        self.schedule.after_backward(self.bucket)

    def _left(self, call: int) -> None:
        awaited = self.bucket.awaited_inputs
        if call not in awaited:
            return
        awaited[call] -= 1
        if awaited[call] == 0:
            del awaited[call]
            assert self.schedule is not None
            self.schedule.after_backward(self.bucket)

    # -- precision --

    def _cast_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        dtype = self.mp_policy.param_dtype if self.mp_policy.cast_forward_inputs else None
        args, kwargs = _cast(args, dtype), _cast(kwargs, dtype)
        return args, kwargs

    def _cast_output(self, output: Any) -> Any:
        return _cast(output, self.mp_policy.output_dtype)


class _Left:
    """The hook of a call of ``state``'s module on one of its inputs."""

    __slots__ = ("call", "state")

    def __init__(self, state: State, call: int) -> None:
        self.state, self.call = state, call

    def __call__(self, _: Tensor) -> None:
        self.state._left(self.call)


def _hook_first(tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Register a hook that runs before those that ``tensor`` has.

    An input is often the output of another bucket's module, whose hook gathers: backward must leave this module before
    it enters that one, so that the memory released here is what is gathered into.
    """
    handle = tensor.register_hook(hook)
    hooks = tensor._backward_hooks
    # Autograd runs them in the order of insertion.
    if hooks is not None and len(hooks) > 1:
        others = {key: value for key, value in hooks.items() if key != handle.id}
        for key, other in others.items():
            del hooks[key]
            hooks[key] = other


def _moved(tree: Any, device: torch.device) -> Any:
    """Tensors of ``tree`` on ``device``: a model's inputs may come from the CPU, as with FSDP2."""
    return _map_tensors(lambda tensor: tensor.to(device), tree)


def _cast(tree: Any, dtype: torch.dtype | None) -> Any:
    """Floating-point tensors of ``tree`` in ``dtype``."""
    if dtype is None:
        return tree
    return _map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, tree)


def _map_tensors(change: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """``tree`` with its tensors changed. What pytree takes for leaves and is none is copied when it changes."""

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return change(leaf)
        if (before := _inside(leaf)) is None:
            return leaf
        after = [_map_tensors(change, value) for value in before]
        same = all(a is b for a, b in zip(tree_iter(before), tree_iter(after), strict=True))
        return leaf if same else _rebuilt(leaf, after)

    return tree_map(of_leaf, tree)


def _tensors(tree: Any) -> Iterator[Tensor]:
    """The tensors of ``tree``."""
    for leaf in tree_iter(tree):
        if isinstance(leaf, Tensor):
            yield leaf
        elif (values := _inside(leaf)) is not None:
            yield from _tensors(values)


def _inside(leaf: Any) -> list[Any] | None:
    """What a leaf of pytree's holds: a dataclass, a set, or one of a subclass of dict, list or tuple (a packed
    sequence).
    """
    if leaf is None or isinstance(leaf, (bool, int, float, str, type)):
        return None
    if dataclasses.is_dataclass(leaf):
        return [getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)]
    if isinstance(leaf, MutableMapping):
        return list(leaf.values())
    return list(leaf) if isinstance(leaf, (list, tuple, set, frozenset)) else None


def _rebuilt(leaf: Any, values: list[Any]) -> Any:
    """A copy of ``leaf`` that holds these values instead of those that ``_inside`` found."""
    if isinstance(leaf, tuple) and not dataclasses.is_dataclass(leaf):
        return type(leaf)(*values) if hasattr(leaf, "_fields") else type(leaf)(values)
    if isinstance(leaf, (set, frozenset)):
        return type(leaf)(values)
    copied = copy.copy(leaf)
    if dataclasses.is_dataclass(leaf):
        frozen = cast(Any, type(leaf)).__dataclass_params__.frozen
        for field, value in zip(dataclasses.fields(leaf), values, strict=True):
            (object.__setattr__ if frozen else setattr)(copied, field.name, value)
    elif isinstance(leaf, MutableMapping):
        copied.update(zip(leaf, values, strict=True))
    else:
        copied[:] = values
    return copied


def _wanting(inputs: Any) -> dict[int, Tensor]:
    """The inputs that want a gradient, each once, by ``id``."""
    return {id(tensor): tensor for tensor in _differentiable(inputs)} if torch.is_grad_enabled() else {}


def _announcing(output: Any, tensors: Iterable[Tensor]) -> list[Tensor]:
    """By which of its outputs' ``tensors`` backward will enter a module. Where none wants a gradient: by those that
    objects among the outputs have as attributes (a torch.distributions object).
    """
    if not torch.is_grad_enabled():
        return []
    found = [tensor for tensor in tensors if tensor.requires_grad]
    if not found:
        hidden = {id(tensor): tensor for leaf in tree_iter(output) for tensor in _attributes(leaf)}
        found = [tensor for tensor in hidden.values() if tensor.requires_grad]
    return found


def _attributes(leaf: Any, depth: int = 3) -> Iterator[Tensor]:
    """Tensors among the attributes of an object, and of objects among those."""
    if isinstance(leaf, (Tensor, type, nn.Module, types.FunctionType)) or not depth:
        return
    for value in tree_iter([*getattr(leaf, "__dict__", {}).values()]):
        if isinstance(value, Tensor):
            yield value
        else:
            yield from _attributes(value, depth - 1)


def _differentiable(tree: Any) -> Iterator[Tensor]:
    """The tensors of ``tree`` that want a gradient."""
    return (tensor for tensor in _tensors(tree) if tensor.requires_grad)
