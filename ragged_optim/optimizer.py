"""RaggedOptimizer: param groups -> rules. A ``torch.optim.Optimizer`` in every respect.

    parameters --policy--> param groups, one per (rule, hyperparameters)
    step():    element-wise rules   once per group over all local tensors, or over a bucket's flat shard
               block-wise rules     per parameter, on the blocks that lie here
               matrix rules         whole matrices at their owner (exchange.py)

States are made at construction for every parameter on every rank, so state dicts have the same keys everywhere and
DCP can load into a fresh optimizer. Whatever can be checked from rank-independent data is checked before any
collective.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace
from types import MappingProxyType
from typing import Any, cast, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, ParamsT

from ragged_optim import owners
from ragged_optim.buckets import Bucket, flat_states, whole_buckets
from ragged_optim.entry import Entry, is_incomplete
from ragged_optim.exchange import Exchange, Live, MatrixParam, compute_here
from ragged_optim.groups import (
    FOREIGN_KEYS,
    OWN_KEYS,
    TORCH_SWITCHES,
    PortablePolicy,
    blocks_of,
    check_block,
    check_keys,
    dtype_of,
    hashable,
    ids_of,
    keys_of,
    named_pairs,
    without_empty,
)
from ragged_optim.layout import Extent, Layout, fragments, layout_of, refuse_partial
from ragged_optim.policies import Explanation, Row
from ragged_optim.quantize import tiling
from ragged_optim.rule import BlockwiseRule, ElementwiseRule, MatrixRule, Rule
from ragged_optim.rules import rule_of
from ragged_optim.state import (
    Tiled,
    check_loadable,
    keep_tensors,
    load_state,
    local,
    make_block_state,
    make_owned_state,
    make_param_state,
    make_tiled_state,
)
from ragged_shard.policy import OrigParamPolicy, ParamPolicy, apply_policy

__all__ = ["RaggedOptimizer"]


class RaggedOptimizer(Optimizer):
    """Any rule on plain tensors, ``Shard`` / ``Replicate`` DTensors and ``RaggedShard``, mixed as they come.

    ``params``: as for torch.optim: parameters, ``(name, parameter)`` pairs, or groups of either. ``rule``: a name or
    a rule class, for all parameters that the policy does not send elsewhere. ``orig_param_policy(name, parameter)``:
    a ``ParamPolicy`` with the rule and hyperparameters of one parameter, or ``None``; it needs named parameters.
    ``hyperparameters``: those of ``rule``.

    A group may name its ``rule`` and any of that rule's hyperparameters; ``RULE_NAME`` keys (``adamw_lr``) reach the
    parameters that the policy sends to that rule. The groups that result hold one rule each, those of ``rule`` first.

    Raises ``ValueError`` / ``TypeError`` naming the parameter or key: unknown hyperparameters, rules that cannot
    update a parameter, policies that return nonsense or whose patterns match nothing.
    """

    def __init__(
        self,
        params: ParamsT,
        rule: str | type[Rule],
        *,
        orig_param_policy: OrigParamPolicy | None = None,
        default_policy: OrigParamPolicy | None = None,
        others: Mapping[str, Mapping[str, Any]] | None = None,
        **hyperparameters: Any,
    ) -> None:
        self._rule = rule_of(rule)
        self._rules: dict[str, Rule] = {self._rule.name: self._rule}
        self._others = {name: dict(values) for name, values in (others or {}).items()}
        self._policy, self._default_policy = orig_param_policy, default_policy
        self._forget_plans()
        self._given: dict[Tensor, int] = {}  # at which place each parameter was given
        check_keys(self._rule, hyperparameters, self._rule.name)
        self._defaults = {**self._rule.defaults, **hyperparameters}
        self._rule.check(self._defaults)
        for other, values in self._others.items():
            rest = rule_of(other)
            rest.check({**rest.defaults, **values})
        super().__init__(without_empty(params), dict(self._defaults))
        self._check_policy()

    def _forget_plans(self) -> None:
        self._layouts: dict[Tensor, Layout] = {}
        self._untouched: set[Tensor] = set()  # parameters whose states no step has changed
        self._matrix_params: dict[Tensor, MatrixParam] = {}
        self._exchanges: list[Exchange] | None = None
        self._entries: list[Entry] = []
        self._buckets: dict[int, list[Bucket]] = {}
        # Only these references keep the flat buffers under bucket states known to ``buffer_of``.
        self._state_buffers: list[Any] = []

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; a group whose parameters go to several rules becomes several groups."""
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, but got {type(param_group)}")
        before, defaults = len(self.param_groups), self.defaults
        try:
            for group in self._split(param_group):
                # The group is complete; torch would fill in the defaults of the first rule.
                self.defaults = {}
                super().add_param_group(group)
            self._exchanges = None
            self._complete_states()
        except Exception:
            for param in (param for group in self.param_groups[before:] for param in group["params"]):
                self.state.pop(param, None)
                self._matrix_params.pop(param, None)
                self._given.pop(param, None)
            del self.param_groups[before:]
            raise
        finally:
            self.defaults = defaults
        if "betas" in defaults and any("betas" not in self.rule_of(group).defaults for group in self.param_groups):
            # Schedulers that cycle ``betas`` do so in all groups; with these defaults they cycle ``momentum``.
            others = {key: value for key, value in defaults.items() if key != "betas"}
            self.defaults = {**others, "momentum": defaults["betas"][0]}

    def _split(self, param_group: dict[str, Any]) -> list[dict[str, Any]]:
        pairs = named_pairs(param_group["params"])
        named = bool(pairs) and pairs[0][0] is not None
        overrides = {key: value for key, value in param_group.items() if key not in ("params", "param_names", "rule")}
        given = param_group.get("rule")
        groups: dict[Any, dict[str, Any]] = {}
        first = self._known(rule_of(given)) if given is not None else self._rule
        for index, (name, param) in enumerate(pairs):
            if not isinstance(param, Tensor):
                raise TypeError(
                    f"optimizer can only optimize Tensors, but one of the params is {torch.typename(param)}"
                )
            label = name if name is not None else f"number {index} of shape {tuple(param.shape)}"
            if param.is_complex():
                raise ValueError(
                    f"parameter {label!r} is complex; ragged_optim updates real parameters (use torch.view_as_real)"
                )
            refuse_partial(param, label)
            policy = ParamPolicy() if given is not None else self._ask_policy(name, param)
            rule = first if policy.optimizer is None else self._known(rule_of(policy.optimizer))
            reason = rule.accepts(tuple(param.shape))
            if reason is not None:
                advice = (
                    "" if named else " Pass model.named_parameters(), so that a policy can send it to another rule."
                )
                if named and policy.optimizer is None and self._default_policy is not None:
                    advice = (
                        f" Your policy leaves it to {rule.name}: fall back on policies.{rule.name}(), as in "
                        f"policies.by_name({{...}}, policies.{rule.name}())."
                    )
                raise ValueError(
                    f"parameter {label!r} of shape {tuple(param.shape)} cannot be updated by {rule.name}: "
                    f"{reason}.{advice}"
                )
            hyper = self._hyperparameters(rule, first, overrides, policy, label)
            self._check_cuts(rule, param, hyper, label)
            key = (rule.name, tuple((k, hashable(hyper[k])) for k in sorted(hyper)))
            group = groups.setdefault(
                key, {"params": [], "rule": rule.name, **hyper, "state_version": rule.state_version}
            )
            group["params"].append((name, param) if named else param)
            self._given.setdefault(param, 1 + next(reversed(self._given.values()), -1))
        if not pairs:
            hyper = self._hyperparameters(first, first, overrides, ParamPolicy(), "(none)")
            groups[()] = {"params": [], "rule": first.name, **hyper, "state_version": first.state_version}
        self._check_reach(first, overrides, list(groups.values()))
        return sorted(groups.values(), key=lambda group: group["rule"] != first.name)

    @staticmethod
    def _check_cuts(rule: Rule, param: Tensor, group: Mapping[str, Any], label: str) -> None:
        """Whether matrices and blocks can be made of ``param`` as it is cut."""
        if isinstance(rule, MatrixRule):
            try:
                rule.matrices(tuple(param.shape), group)
            except ValueError as error:
                raise ValueError(f"parameter {label!r}: {error}") from None
        for block in blocks_of(rule, tuple(param.shape), group):
            check_block(block, rule, param, label)

    def _check_reach(self, first: Rule, overrides: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
        """A hyperparameter of ``first`` in a group that the policy sends elsewhere altogether would do nothing."""
        rules = [group["rule"] for group in groups]
        if first.name in rules:
            return
        family = self._rules[rules[0]].family
        idle = [
            key
            for key, value in overrides.items()
            if key in first.defaults and key != "maximize" and f"{family}_{key}" not in overrides
            # No decay is meant for all.
            if not (key == "weight_decay" and float(value) == 0.0)
        ]
        if idle:
            advice = f"give the group rule={rules[0]!r}, or say so in the policy"
            if family in self._others:
                advice = f"say {', '.join(f'{family}_{key}' for key in idle)}, or give the group rule={rules[0]!r}"
            raise ValueError(
                f"{', '.join(map(repr, idle))} of the param group of {groups[0]['params'][0][0]!r} would do nothing: "
                f"such keys are for {first.name}, and the policy sends all parameters of this group to "
                f"{', '.join(dict.fromkeys(rules))}; {advice}"
            )

    def _known(self, rule: Rule) -> Rule:
        known = self._rules.setdefault(rule.name, rule)
        if type(known) is not type(rule):
            raise ValueError(f"two different rules are named {rule.name!r}: {type(known)} and {type(rule)}")
        return known

    def _ask_policy(self, name: str | None, param: Tensor) -> ParamPolicy:
        if name is None:
            if self._policy is not None:
                raise ValueError(
                    "orig_param_policy needs names: pass model.named_parameters() instead of model.parameters()"
                )
            return ParamPolicy()
        return apply_policy(self._policy if self._policy is not None else self._default_policy, name, param)

    def _hyperparameters(
        self, rule: Rule, first: Rule, overrides: Mapping[str, Any], policy: ParamPolicy, label: str
    ) -> dict[str, Any]:
        """Weakest first: the rule's defaults, the optimizer's, the group's, the policy's."""
        prefixes = {f"{other}_": other for other in self._others}
        own, foreign = {}, {}
        for key, value in overrides.items():
            prefix = next((p for p in prefixes if key.startswith(p) and key not in first.defaults), None)
            if prefix is None:
                own[key] = value
            elif rule.family == prefixes[prefix]:
                foreign[key.removeprefix(prefix)] = value
            elif key.removeprefix(prefix) not in keys_of(prefixes[prefix]):
                raise ValueError(
                    f"unknown hyperparameter {key!r} in this param group; after {prefix} may stand "
                    f"{', '.join(sorted(keys_of(prefixes[prefix])))}"
                )
        check_keys(first, own, "this param group")
        check_keys(rule, foreign, f"this param group, after {rule.family}_")
        check_keys(rule, policy.hyperparameters, f"the policy of parameter {label!r}")
        if rule is first:
            hyper = {**(self._defaults if rule is self._rule else rule.defaults), **own}
        else:
            hyper = {**rule.defaults}
            if "maximize" in hyper:
                hyper["maximize"] = own.get("maximize", self._defaults.get("maximize", False))
        hyper |= {
            key: value
            for key, value in self._others.get(rule.family, {}).items()
            if rule is not self._rule and key in rule.defaults
        }
        if rule is first:
            hyper |= own
        elif "weight_decay" in hyper and own.get("weight_decay") == 0.0:
            # A group of parameters that are not to decay: whatever updates them.
            hyper["weight_decay"] = 0.0
        hyper |= {**foreign, **policy.hyperparameters}
        rule.check(hyper)
        return hyper

    def _check_policy(self) -> None:
        """A pattern that matches no parameter is a misspelled name. Only this optimizer sees all names."""
        check = getattr(self._policy, "check", None)
        if check is not None:
            check([name for group in self.param_groups for name in group.get("param_names", ())])

    def rule_of(self, group: Mapping[str, Any]) -> Rule:
        """The rule of a param group."""
        return self._rules[group["rule"]]

    def named_entries(self) -> Iterable[tuple[str, Tensor, dict[str, Any]]]:
        """(name, parameter, its group) of every parameter; unnamed ones are called by their position."""
        position = 0
        for group in self.param_groups:
            names = group.get("param_names", ())
            named = len(names) == len(group["params"])  # not where some were taken out or put in by hand
            for i, param in enumerate(group["params"]):
                yield (names[i] if named else f"#{position}"), param, group
                position += 1

    def given_order(self) -> list[int]:
        """Positions in ``named_entries`` in the order in which the parameters were given; groups have another."""
        params = [param for _, param, _ in self.named_entries()]
        return sorted(range(len(params)), key=lambda position: self._given.get(params[position], len(params)))

    def explain(self) -> Explanation:
        """Who updates what, which rank owns which matrix, and what each rank has to do for the matrices."""
        self._complete_states()
        rows: list[Row] = []
        loads: dict[str, tuple[float, int]] = {}
        for name, param, group in self.named_entries():
            of = self._matrix_params.get(param)
            state = self.state.get(param, {}).values()
            note = ", ".join(map(str, param.placements)) if isinstance(param, DTensor) else ""
            rows.append(
                Row(
                    name=name,
                    shape=tuple(param.shape),
                    rule=group["rule"],
                    lr=float(group["lr"]) if "lr" in group else None,
                    note=note,
                    state_bytes=sum(local(value).numel() * value.element_size() for value in state),
                    owners=() if of is None or of.layout.group is None else tuple(of.owners),
                )
            )
            if of is None:
                continue
            ranks = None if of.layout.group is None else dist.get_process_group_ranks(of.layout.group)
            for index, owner in enumerate(of.owners):
                job, who = of.job(index), "every rank" if ranks is None else f"rank {ranks[owner]}"
                flops, moved = loads.get(who, (0.0, 0))
                loads[who] = flops + job.flops, moved + 2 * (sum(job.held) - job.held[owner])
        in_order = sorted(loads, key=lambda who: (len(who), who))
        return Explanation(tuple(rows), tuple((who, *loads[who]) for who in in_order))

    def layout(self, param: Tensor, name: str) -> Layout:
        """How ``param`` lies on the ranks."""
        layout = self._layouts.get(param)
        if layout is None:
            layout = self._layouts[param] = layout_of(param, name)
        return layout

    def _complete_states(self, late: Mapping[Tensor, dict[str, Any]] = MappingProxyType({})) -> None:
        """Make the states of every parameter that has none, or not all; meta and frozen ones excepted.

        ``late``: parameters whose states are wanted all the same, and the hyperparameters to make them by.
        """
        self._take_up_groups()
        for name, param, group in self.named_entries():
            rule = self.rule_of(group)
            if param not in self._given and param not in self.state:  # it came into its group by hand
                self._check_cuts(rule, param, group, name)
            if isinstance(rule, MatrixRule) and param not in self._matrix_params and not param.is_meta:
                try:
                    self._matrix_params[param] = self._matrix_param(name, param, group, rule)
                except ValueError:
                    # Of frozen ones it is wanted only so that the ranks can agree on what is frozen.
                    if param.requires_grad:
                        raise
        missing = [
            (name, param, group)
            for name, param, group in self.named_entries()
            if param in late or is_incomplete(self.rule_of(group), self.state.get(param), param, group)
        ]
        if not missing:
            return
        self._exchanges = None
        self._untouched.update(param for _, param, _ in missing if not self.state.get(param))
        self._choose_owners(param for _, param, _ in missing)
        missing = [(name, param, late.get(param, group)) for name, param, group in missing]
        here = {param: self.state.get(param, {}) for _, param, _ in missing}
        flat, buffers = flat_states([(param, group) for _, param, group in missing], self.rule_of, here)
        self._state_buffers += buffers
        for name, param, group in missing:
            self.state[param] = {**self._make_state(name, param, group, flat.get(param, {})), **here[param]}

    def _make_state(
        self, name: str, param: Tensor, group: dict[str, Any], ready: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        rule, shape = self.rule_of(group), tuple(param.shape)
        state = {}
        for key, spec in rule.init(shape, group).items():
            if key in ready:
                state[key] = ready[key]
            elif spec.tile is not None:
                state |= make_tiled_state(spec, param, name, key, self.layout(param, name))
            elif isinstance(rule, BlockwiseRule) and spec.home == "param" and spec.shape != shape:
                block = rule.block(shape, group).numel(shape)
                state[key] = make_block_state(spec, param, name, self.layout(param, name), block)
            elif spec.home != "owner":
                state[key] = make_param_state(spec, param, name, contiguous=not isinstance(rule, ElementwiseRule))
        if isinstance(rule, MatrixRule):
            of = self._matrix_params[param]
            for index, matrix in enumerate(of.matrices):
                for key, spec in rule.init((matrix.rows, matrix.cols), group).items():
                    if spec.home == "owner":
                        full = key if len(of.matrices) == 1 else f"{key}.{index}"
                        state[full] = make_owned_state(spec, param, name, of.layout, of.owners[index])
        return state

    def _matrix_param(self, name: str, param: Tensor, group: dict[str, Any], rule: MatrixRule) -> MatrixParam:
        layout, matrices = self.layout(param, name), rule.matrices(tuple(param.shape), group)
        return MatrixParam(
            name=name,
            rule=rule,
            group=group,
            layout=layout,
            matrices=matrices,
            fragments=tuple(fragments(layout, matrix, name) for matrix in matrices),
            wire=rule.wire_dtype(param.dtype, group),
        )

    def _choose_owners(self, late: Iterable[Tensor] = ()) -> None:
        """One balance per process group over all matrices on it, of parameters that have states or will have them
        (``late``); owners already chosen stay.
        """
        by_group: dict[dist.ProcessGroup | None, list[MatrixParam]] = {}
        trained = {*self.state, *late}
        for of in (of for param, of in self._matrix_params.items() if param in trained):
            by_group.setdefault(of.layout.group, []).append(of)
        for group, params in by_group.items():
            if group is None:
                for of in params:
                    of.owners = [0] * len(of.matrices)
                continue
            jobs = [of.job(index) for of in params for index in range(len(of.matrices))]
            fixed = [of.owners[index] if of.owners else None for of in params for index in range(len(of.matrices))]
            chosen = iter(owners.assign(jobs, group.size(), fixed))
            for of in params:
                of.owners = [next(chosen) for _ in of.matrices]

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step. Parameters without a gradient, and their states, are left as they are."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update()
        return loss

    # Under torch.compile this part runs as it is: collectives, and counters that are read.
    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _update(self) -> None:
        with ExitStack() as stack:
            # In a step within torch.autocast, products of matrices would be in half precision.
            for kind in {group["params"][0].device.type for group in self.param_groups if group["params"]} - {"meta"}:
                stack.enter_context(torch.autocast(kind, enabled=False))
            self._update_all()

    def _update_all(self) -> None:
        entries = self._up_to_date_entries()
        wrong = ""
        for entry in entries:
            try:
                entry.grad = entry.local_grad()
            except RuntimeError as error:
                entry.grad, wrong = None, wrong or str(error)
        exchanges = self._plan_exchanges()
        by_matrices = {entry.of: entry for entry in entries if entry.of is not None}
        spoilt = {of for of, entry in by_matrices.items() if not entry.is_finite()}
        for exchange in exchanges:
            voting = [by_matrices[of] for of in exchange.voting]
            finite = [entry.of not in spoilt for entry in voting]
            nothing = [local(entry.param).numel() == 0 for entry in voting]
            has = [entry.grad is not None or none for entry, none in zip(voting, nothing, strict=True)]
            lacks = [entry.grad is None or none for entry, none in zip(voting, nothing, strict=True)]
            frozen = [entry.state is None for entry in voting]
            wrong = exchange.agree(has, lacks, finite, frozen, wrong, local(entries[0].param).device)
            spoilt |= exchange.spoilt
        if wrong:
            raise RuntimeError(wrong)
        for of, entry in by_matrices.items() if spoilt else ():
            if of not in spoilt:
                continue
            entry.grad = None
            warnings.warn(
                f"non-finite gradient: parameter {of.name!r} and its states are left alone in this step",
                RuntimeWarning,
                stacklevel=5,
            )
        by_group: dict[int, list[Entry]] = {}
        for entry in entries:
            if entry.of is None and entry.grad is not None:
                by_group.setdefault(id(entry.group), []).append(entry)
        for live in by_group.values():
            if isinstance(live[0].rule, ElementwiseRule):
                self._step_elementwise(live[0].rule, live[0].group, live)
            else:
                self._step_blockwise(live)
        self._step_matrices(exchanges, entries)
        for entry in entries:
            entry.grad = None
        self._untouched.clear()

    def _up_to_date_entries(self) -> list[Entry]:
        """What is known of each parameter; found anew when groups or states have changed since the last step."""
        self._take_up_momentum()
        here = [(param, group) for group in self.param_groups for param in group["params"]]
        if len(here) != len(self._entries) or not all(
            entry.is_of(param, group, self.state.get(param))
            for entry, (param, group) in zip(self._entries, here, strict=True)
        ):
            self._complete_states()
            self._exchanges, self._buckets = None, {}
            self._entries = [
                Entry(name, param, group, self.rule_of(group), self._matrix_params.get(param), self.state.get(param))
                for name, param, group in self.named_entries()
            ]
        return self._entries

    def _take_up_groups(self) -> None:
        """What was done to ``param_groups`` by hand: groups that are other dicts, and parameters that left them.

        As in torch, a parameter that left keeps its state, in case it comes back; but not one that no step has touched:
        accelerate makes optimizers on whole models, and puts their shards into the groups later.
        """
        group_of = {param: group for group in self.param_groups for param in group["params"]}
        for param in self._untouched - group_of.keys():
            self.state.pop(param, None)
            self._untouched.remove(param)
        for param, of in list(self._matrix_params.items()):
            if param in group_of:
                of.group = group_of[param]
                of.wire = of.rule.wire_dtype(param.dtype, of.group)
            elif param not in self.state:
                del self._matrix_params[param]
        for known in (self._layouts, self._given):
            for param in known.keys() - group_of.keys() - self.state.keys():
                del known[param]

    def _take_up_momentum(self) -> None:
        """A scheduler that cycles ``momentum`` sets it in all groups; of a rule with ``betas`` it means the first."""
        for group in self.param_groups:
            if "momentum" in group and "momentum" not in self.rule_of(group).defaults:
                momentum = group.pop("momentum")
                if "betas" in group:
                    group["betas"] = (momentum, *group["betas"][1:])

    def _step_elementwise(self, rule: ElementwiseRule, group: dict[str, Any], live: Sequence[Entry]) -> None:
        params, gradients, states = [], [], []
        taken_out = [entry.without_nonfinite() for entry in live]
        whole, rest = ([], live) if any(taken_out) else self._whole_buckets(group, live)
        for bucket, gradient in whole:
            params.append(bucket.flat)
            gradients.append(gradient)
            states.append(bucket.state)
        written: list[tuple[Tiled, dict[str, Tensor], str]] = []
        for entry in rest:
            params.append(local(entry.param))
            gradients.append(cast(Tensor, entry.grad))
            state, tiled, _ = self._states_here(entry)
            if tiled:
                state = state | {key: store.read() for key, store in tiled.items()}
                written += [(store, state, key) for key, store in tiled.items()]
            states.append(state)
        if group.get("maximize"):
            gradients = [grad.neg() for grad in gradients]
        before = [dict(state) for state in states]
        rule.update_all(params, gradients, states, group)
        for state, tensors in zip(states, before, strict=True):
            keep_tensors(state, tensors, rule.name)
        for store, state, key in written:
            store.write(state[key])
        for bucket, _ in whole:
            bucket.follow()

    def _whole_buckets(
        self, group: Mapping[str, Any], live: Sequence[Entry]
    ) -> tuple[list[tuple[Bucket, Tensor]], Sequence[Entry]]:
        """Buckets of which every parameter has a gradient in one gradient buffer, with it; the parameters left."""
        buckets = self._buckets.get(id(group))
        if buckets is None or not all(bucket.holds(self.state) for bucket in buckets):
            params = [param for param in group["params"] if param in self.state]
            buckets = self._buckets[id(group)] = whole_buckets(params, self.state)
        whole = []
        for bucket in buckets:
            gradient = bucket.gradient()
            if gradient is not None and bucket.in_step():
                whole.append((bucket, gradient))
        taken = {id(param) for bucket, _ in whole for param in bucket.params}
        return whole, [entry for entry in live if id(entry.param) not in taken] if taken else live

    def _step_blockwise(self, live: Sequence[Entry]) -> None:
        for entry in live:
            rule, group = entry.rule, entry.group
            assert isinstance(rule, BlockwiseRule) and entry.grad is not None
            state, tiled, _ = self._states_here(entry)
            if tiled:
                state = state | {key: store.read() for key, store in tiled.items()}
            before = dict(state)
            here = entry.grad.neg() if group.get("maximize") else entry.grad
            rule.update(local(entry.param), here, state, group, self._extent(entry))
            keep_tensors(state, before, rule.name)
            for key, store in tiled.items():
                store.write(state[key])

    def _states_here(self, entry: Entry) -> tuple[dict[str, Tensor], dict[str, Tiled], dict[int, dict[str, Tensor]]]:
        """What lies here of the states of a parameter: as they are, those in 8 bits, and those of its matrices."""
        assert entry.state is not None
        here = [local(value) for value in entry.state.values()]
        found = entry.here
        if found is None or len(found[0]) != len(here) or not all(a is b for a, b in zip(found[0], here, strict=True)):
            state, tiled = self._local_state(entry)
            owned: dict[int, dict[str, Tensor]] = {}
            if entry.of is not None:
                state, owned = self._split_state(entry.of, state)
            found = entry.here = here, state, tiled, owned
        return found[1:]

    def _local_state(self, entry: Entry) -> tuple[dict[str, Tensor], dict[str, Tiled]]:
        """What lies here of the states of a parameter: as they are, and those in 8 bits by the rule's own key."""
        state = {key: local(value) for key, value in self.state[entry.param].items()}
        if not any(key.endswith(".codes") for key in state):
            return state, {}
        shape, tiled = tuple(entry.param.shape), {}
        for key, spec in entry.rule.init(shape, entry.group).items():
            if spec.tile is not None:
                codes, scales = state.pop(f"{key}.codes"), state.pop(f"{key}.scales")
                tiled[key] = Tiled(codes, scales, tiling(shape, *spec.tile), self._extent(entry))
        return state, tiled

    def _extent(self, entry: Entry) -> Extent:
        """Which elements of a parameter without cut blocks lie here."""
        if entry.extent is None:
            layout = self.layout(entry.param, entry.name)
            extent = layout.extent(layout.rank)
            assert extent is not None, "checked when the group was made"
            entry.extent = replace(extent, name=entry.name)
        return entry.extent

    def _plan_exchanges(self) -> list[Exchange]:
        if self._exchanges is None:
            by_group: dict[dist.ProcessGroup, list[MatrixParam]] = {}
            for _, param, _ in self.named_entries():
                of = self._matrix_params.get(param)
                if of is not None and of.layout.group is not None:
                    by_group.setdefault(of.layout.group, []).append(of)
            self._exchanges = [Exchange(group, params) for group, params in by_group.items()]
        return self._exchanges

    def _step_matrices(self, exchanges: Sequence[Exchange], entries: Sequence[Entry]) -> None:
        lives: dict[dist.ProcessGroup | None, list[Live]] = {}
        copies: list[tuple[Tensor, Tensor]] = []
        for entry in entries:
            of, grad = entry.of, entry.grad
            if of is None:
                continue
            here = local(entry.param)
            # Where nothing lies here, the others decide; they have agreed that all have one or none has.
            if grad is None and not (here.numel() == 0 and of.moves and self._others_have(of, exchanges)):
                continue
            if grad is not None and entry.group.get("maximize"):
                grad = grad.neg()
            if len(of.matrices) > 1 and not here.is_contiguous():
                # Several matrices are runs of elements.
                copies.append((here, here.contiguous()))
                here, grad = copies[-1][1], grad.contiguous() if grad is not None else None
            state, tiled, owned = self._states_here(entry)
            lives.setdefault(of.layout.group, []).append(Live(of, here, grad, state, owned, tiled))
        compute_here((live, index) for live in lives.pop(None, []) for index in range(len(live.of.matrices)))
        for exchange in exchanges:
            exchange.run(lives.get(exchange.group, []))
        for here, copy in copies:
            here.copy_(copy)

    @staticmethod
    def _others_have(of: MatrixParam, exchanges: Sequence[Exchange]) -> bool:
        exchange = next(exchange for exchange in exchanges if exchange.group is of.layout.group)
        return of in exchange.present

    def _split_state(
        self, of: MatrixParam, state: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[int, dict[str, Tensor]]]:
        """The states on the shard, and per matrix the owned ones (by the rule's own key)."""
        owned: dict[int, dict[str, Tensor]] = {}
        names: set[str] = set()
        for index, matrix in enumerate(of.matrices):
            # Matrices of other sizes may have other states.
            specs = of.rule.init((matrix.rows, matrix.cols), of.group)
            suffix = "" if len(of.matrices) == 1 else f".{index}"
            own = {key: key + suffix for key, spec in specs.items() if spec.home == "owner"}
            names.update(own.values())
            if own and (of.layout.group is None or of.owners[index] == of.layout.rank):
                owned[index] = {key: local(state[full]) for key, full in own.items()}
        return {key: local(value) for key, value in state.items() if key not in names}, owned

    def _settle(self) -> None:
        for param, of in self._matrix_params.items():
            if type(of.rule).settle is not MatrixRule.settle and param in self.state:
                here = {key: local(value) for key, value in self.state[param].items()}
                for owned in self._split_state(of, here)[1].values():
                    of.rule.settle(owned, of.group)

    # ---- state dicts --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As torch's; complete for every parameter that is not on the meta device."""
        self._take_up_momentum()
        self._complete_states()
        self._settle()
        # torch would fail at the states of parameters that are in no group.
        here = {param for group in self.param_groups for param in group["params"]}
        elsewhere = {param: self.state.pop(param) for param in list(self.state) if param not in here}
        state_dict = super().state_dict()
        self.state.update(elsewhere)
        # torch.distributed.checkpoint.state_dict takes strings, and no dtypes.
        for group in state_dict.get("param_groups", ()):  # a hook may have put something else in its place
            group.update({key: str(value) for key, value in group.items() if isinstance(value, torch.dtype)})
        return state_dict

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load in place: states keep dtype, placement and address, and the groups what shaped them (``split_sizes``,
        ``flatten``, ``tile``, ...). State dicts of torch's optimizer of the same algorithm load too.

        Raises ``ValueError`` before anything is changed: other groups, rule, shapes or states, or a newer state
        version.
        """
        state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            if replaced is not None:
                state_dict = dict(replaced)
        self._complete_states()
        self._settle()
        saved_groups = deepcopy(state_dict["param_groups"])
        self._check_groups(saved_groups)
        entries = list(self.named_entries())
        saved_ids = ids_of(saved_groups, [name for name, _, _ in entries])
        new_groups = {
            id(group): self._loaded(group, saved) for group, saved in zip(self.param_groups, saved_groups, strict=True)
        }
        loaded = {
            param: {key: value for key, value in state_dict["state"].get(saved, {}).items() if value is not None}
            for saved, (_, param, _) in zip(saved_ids, entries, strict=True)
        }
        for name, param, _ in entries:
            if loaded[param] and param.is_meta:
                raise ValueError(f"parameter {name!r} is on the meta device: load its state when it is materialised")
        # Parameters that are frozen now, but were not when the state was saved.
        self._complete_states({p: group for _, p, group in entries if loaded[p] and p not in self.state})
        todo: list[tuple[str, Tensor, dict[str, Any], dict[str, Any]]] = []
        late: dict[Tensor, dict[str, Any]] = {}
        for name, param, group in entries:
            values, state = loaded[param], self.state.get(param, {})
            rule, new = self.rule_of(group), new_groups[id(group)]
            # States that come with a hyperparameter of the state dict, as SGD's with its momentum.
            more = not values.keys() <= state.keys()
            if more and state.keys() <= rule.init(tuple(param.shape), new).keys():
                late[param] = new
                state = self._make_state(name, param, new, {})
            values = {**{key: value for key, value in rule.implied(values).items() if key in state}, **values}
            for key, value in values.items():
                check_loadable(key, value, state, name, group["rule"])
            missing = [key for key in state if key not in values]
            # A parameter that never had a gradient has no state in torch's own state dicts: it starts afresh.
            if values and missing:
                raise ValueError(
                    f"the state dict lacks {', '.join(map(repr, missing))} of parameter {name!r} (rule {group['rule']})"
                )
            todo.append((name, param, group, values))
        self._complete_states(late)
        for name, param, group, values in todo:
            state = self.state.get(param, {})
            begun = values or (self._make_state(name, param, group, {}) if state else {})
            for key, target in state.items():
                load_state(target, begun.get(key, 0.0))
        for group in self.param_groups:
            merged = new_groups[id(group)]
            group.clear()
            group.update(merged)
        for _, param, group in entries:
            if param in self._matrix_params:
                of = self._matrix_params[param]
                of.wire = of.rule.wire_dtype(param.dtype, group)
        self._exchanges = None
        self._untouched.clear()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _loaded(self, group: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
        """``group`` with the hyperparameters of ``saved``."""
        rule = self.rule_of(group)
        own = ("params", "param_names", "rule", "state_version", *rule.shaping)
        kept = {key: group[key] for key in own if key in group}
        new = {key: dtype_of(value) for key, value in saved.items() if key not in TORCH_SWITCHES}
        return {**rule.defaults, **new, **kept}

    def _check_groups(self, saved_groups: Sequence[Mapping[str, Any]]) -> None:
        if len(saved_groups) != len(self.param_groups):
            rules = [group["rule"] for group in self.param_groups]
            raise ValueError(
                f"loaded state dict has a different number of parameter groups: {len(saved_groups)}, this optimizer "
                f"has {len(rules)} ({', '.join(rules)})"
            )
        for number, (group, saved) in enumerate(zip(self.param_groups, saved_groups, strict=True)):
            rule = self.rule_of(group)
            if len(group["params"]) != len(saved["params"]):
                raise ValueError(
                    "loaded state dict contains a parameter group that doesn't match the size of optimizer's group "
                    f"{number}: {len(saved['params'])} parameters instead of {len(group['params'])}"
                )
            if saved.get("rule", rule.name) != rule.name:
                raise ValueError(
                    f"param group {number} is updated by {rule.name}, the state dict is of {saved['rule']}; build "
                    "the same optimizer"
                )
            version = saved.get("state_version", 1)
            if version > rule.state_version:
                raise ValueError(
                    f"param group {number} ({rule.name}) was saved with state version {version}; this library knows "
                    f"versions up to {rule.state_version}: update ragged-optim"
                )
            tile = saved.get("tile")
            in_tiles = any(key.endswith(".codes") for param in group["params"] for key in self.state.get(param, ()))
            if in_tiles and tile is not None and tuple(tile) != tuple(group["tile"]):
                raise ValueError(
                    f"param group {number} ({rule.name}) was saved in tiles of {tuple(tile)}, this optimizer has "
                    f"{tuple(group['tile'])}: make it with tile={tuple(tile)}"
                )
            # torch's Adam and AdamW keep the same states and differ in this.
            decoupled, ours = saved.get("decoupled_weight_decay"), getattr(rule, "decoupled", None)
            if decoupled is not None and ours is not None and decoupled != ours and saved.get("weight_decay"):
                raise ValueError(
                    f"param group {number} is updated by {rule.name}, the state dict has decoupled_weight_decay="
                    f"{decoupled}: load it into {'AdamW' if decoupled else 'Adam'}"
                )
            unknown = set(saved) - set(rule.defaults) - FOREIGN_KEYS - OWN_KEYS - TORCH_SWITCHES - {"momentum"}
            if unknown:
                raise ValueError(
                    f"the state dict has unknown hyperparameters for {rule.name}: {', '.join(sorted(unknown))}"
                )

    def __getstate__(self) -> dict[str, Any]:
        self._settle()
        kept = ("defaults", "state", "param_groups", "_rule", "_rules", "_others", "_defaults", "_given")
        policies = {key: PortablePolicy(self.__dict__[key]) for key in ("_policy", "_default_policy")}
        # States lie at their owners, which depend on the order in which parameters were added.
        owners = {param: of.owners for param, of in self._matrix_params.items()}
        return {**{key: self.__dict__[key] for key in kept}, **policies, "_owners": owners}

    def __setstate__(self, state: dict[str, Any]) -> None:
        policies = {key: state[key].function for key in ("_policy", "_default_policy")}
        owners = state["_owners"]
        super().__setstate__({key: value for key, value in state.items() if key != "_owners"} | policies)
        self._forget_plans()
        for name, param, group in self.named_entries():
            rule = self.rule_of(group)
            if isinstance(rule, MatrixRule) and param in self.state:
                self._matrix_params[param] = self._matrix_param(name, param, group, rule)
                self._matrix_params[param].owners = list(owners[param])
        self._choose_owners()
