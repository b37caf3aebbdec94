"""Any model, wrapping, blocks and policy, precision, checkpoints, frozen, tied and unused parameters, micro-batches and
mesh: the gradients of plain data parallelism, to the bit.

Weights and inputs are small integers and every operation is linear or a relu, so that sums have no rounding and no
order; in bfloat16 both sides round the same exact sums. Where FSDP2 supports the case it is a second oracle.
"""

from __future__ import annotations

import copy
import dataclasses
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import given, note, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.utils.checkpoint import checkpoint

from fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from ragged_shard import Block, ParamPolicy
from tests import cluster
from tests.fsdp.reference import Masters, average_gradients, differences, full

WIDTH = 4
KINDS = ("linear", "wide", "tied", "scaled", "half", "idle", "odd")


class Unit(nn.Module):
    """One block. Which of its two layers ``half`` runs, and whether ``idle`` runs any, depends on rank and step."""

    def __init__(self, kind: str, checkpointed: str) -> None:
        super().__init__()
        self.kind, self.checkpointed, self.step = kind, checkpointed, 0
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH, bias=False)
        if kind == "wide":
            self.a, self.b = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)
        if kind == "tied":
            self.b.weight = self.a.weight
        if kind == "scaled":
            self.scale = nn.Parameter(torch.tensor(1.0))
        if kind == "odd":
            self.shift, self.nothing = nn.Parameter(torch.zeros(3, 1, WIDTH)), nn.Parameter(torch.zeros(0, 2))

    def compute(self, x: Tensor) -> Tensor:
        if self.kind == "half":
            return (self.a if (dist.get_rank() + self.step) % 3 else self.b)(x).relu()
        if self.kind == "idle" and (dist.get_rank() + self.step) % 2:
            return x
        y = self.b(self.a(x).relu())
        if self.kind == "scaled":
            y = y * self.scale
        if self.kind == "odd":
            y = y + self.shift.sum(0) + self.nothing.sum()
        return y

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed == "none":
            return self.compute(x)
        return checkpoint(self.compute, x, use_reentrant=self.checkpointed == "reentrant")


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.units = nn.ModuleList(Unit(*unit) for unit in case.units)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, step: int) -> Tensor:
        for index, unit in enumerate(self.units):
            unit.step = step
            if (index, step) in self.case.skipped:
                continue
            x = unit(x)
            if index == self.case.repeated:
                x = unit(x)
        return self.head(x)


@dataclasses.dataclass(frozen=True)
class Case:
    units: tuple[tuple[str, str], ...]
    wrap: tuple[str, ...]
    reshard_after_forward: bool | int | None
    block: Block | None
    # A policy may speak of some parameters only, and wants other blocks of others.
    other_block: Block | None
    low: bool
    # Of each unit, on a 2x2 world: whether its bucket is cut over all four ranks, without replicas.
    flat: tuple[bool, ...]
    frozen: frozenset[str]
    skipped: frozenset[tuple[int, int]]
    repeated: int
    micro_batches: int
    synchronise: str
    forwards: int
    # How backward goes through the forwards, and whether torch.autograd.grad does so first.
    order: str
    probed: bool
    evaluate: str
    # Whether the model's input wants a gradient.
    differentiable: bool


def integers(model: nn.Module, seed: int) -> None:
    """Weights in {-1, 0, 1}, the same for every way of holding them, written between steps as an optimizer does."""
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(100 * seed + index)
            values = torch.randint(-1, 2, tuple(parameter.shape), generator=generator).float()
            if isinstance(parameter, nn.Parameter) and hasattr(parameter, "placements"):
                mesh, placements = parameter.device_mesh, parameter.placements
                values = torch.distributed.tensor.distribute_tensor(values, mesh, placements, src_data_rank=None)
            parameter.copy_(values)


def shard(model: Model, case: Case, wrap: Any, hybrid: bool = False, **options: Any) -> Model:
    """``wrap[i]`` says of unit i: of its own, in a list with the next one, or left to the root."""
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options["mp_policy"] = mixed if case.low else MixedPrecisionPolicy()
    meshes = [cluster.mesh((4,)) if hybrid and flat else options.get("mesh") for flat in case.flat]
    index = 0
    while index < len(model.units):
        how, mesh = case.wrap[index], {"mesh": meshes[index]}
        if how == "pair" and index + 1 < len(model.units):
            wrap([model.units[index], model.units[index + 1]], **{**options, **mesh})
            index += 1
        elif how == "own":
            wrap(model.units[index], **{**options, **mesh})
        index += 1
    return wrap(model, **options)


def policy_of(case: Case) -> Any:
    if case.block is None and case.other_block is None:
        return None

    def policy(name: str, parameter: nn.Parameter) -> ParamPolicy | None:
        block = case.block if name.endswith(("a.weight", "b.bias", "shift")) else case.other_block
        return None if block is None else ParamPolicy(block=block)

    return policy


def run(case: Case, hybrid: bool, oracle: str) -> list[str]:
    torch.manual_seed(0)
    plain = Model(case)
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(name not in case.frozen)
    model = copy.deepcopy(plain)
    reshard = case.reshard_after_forward
    options: dict[str, Any] = {"reshard_after_forward": True if reshard == 2 and dist.get_world_size() % 2 else reshard}
    if hybrid:
        options["mesh"] = cluster.mesh((2, 2), ("replicate", "shard"))
    models: list[nn.Module] = [model, plain]
    if oracle == "fsdp2":
        models.append(shard(copy.deepcopy(plain), case, torch_fully_shard, **options))
    shard(model, case, fully_shard, hybrid, orig_param_policy=policy_of(case), **options)
    masters = Masters(plain, torch.bfloat16 if case.low else torch.float32)
    reference = masters if case.low else plain
    if oracle == "plain":
        # Sums, not means: thirds would round.
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)

    found: list[str] = []
    probes: dict[nn.Module, list[Tensor]] = {}
    for step in range(2):
        for one in models:
            probes[one] = []
            integers(one, step)
            one.zero_grad()
            for master in masters.masters.values():
                master.grad = None if one is plain else master.grad
            for micro in range(case.micro_batches):
                if one is not plain:
                    last = micro == case.micro_batches - 1
                    one.set_requires_gradient_sync(last or case.synchronise == "each")
                dtype = torch.bfloat16 if case.low and one is plain else torch.float32
                losses = [loss_of(one, case, step, 10 * micro + number, dtype) for number in range(case.forwards)]
                evaluated(one, case, step, dtype)
                probes[one] += backward(case, *zip(*losses, strict=True))
        found += [
            f"step {step}: an input's gradient"
            for pair in zip(probes[model], probes[plain], strict=True)
            if not torch.equal(*pair)
        ]
        average_gradients(reference, 1.0 if oracle == "plain" else None)
        with torch.no_grad():
            for master, low in zip(masters.masters.values(), plain.parameters(), strict=case.low):
                master.copy_(low)
        found += [f"step {step}: {d}" for d in differences(model, reference)]
        if oracle == "fsdp2":
            theirs = dict(models[2].named_parameters())
            for name, parameter in model.named_parameters():
                grads = [parameter.grad, theirs[name].grad]
                if grads[0] is not None and grads[1] is not None and not torch.equal(*map(full, grads)):
                    found.append(f"step {step}: {name}.grad is not FSDP2's")
    return found


def loss_of(model: nn.Module, case: Case, step: int, number: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """And the input."""
    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    x = torch.randint(-1, 2, (2, WIDTH), generator=generator).float().requires_grad_(case.differentiable)
    # Cast below the leaf, as mixed precision casts a model's inputs.
    return model(x.to(dtype), step).sum(), x


def backward(case: Case, losses: tuple[Tensor, ...], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """The gradients of the inputs that torch.autograd.grad gives, if asked."""
    probe = list(torch.autograd.grad(losses, inputs, retain_graph=True)) if case.probed else []
    if case.order in ("one by one", "last first"):
        for loss in losses if case.order == "one by one" else reversed(losses):
            loss.backward()
        return probe
    total = sum(losses[1:], start=losses[0])
    if case.order == "twice":
        total.backward(retain_graph=True)
    total.backward()
    return probe


def evaluated(model: nn.Module, case: Case, step: int, dtype: torch.dtype) -> None:
    if case.evaluate != "never":
        with torch.no_grad() if case.evaluate == "no_grad" else torch.inference_mode():
            model(torch.ones(1, WIDTH, dtype=dtype), step)


BLOCKS = st.one_of(
    st.none(),
    st.builds(Block.elements, st.integers(1, 12)),
    st.builds(Block.rows, st.integers(1, 5)),
    st.builds(Block.slices, st.integers(1, 3)),
    st.builds(Block.tile, st.integers(8, 9), st.integers(1, 3)),
    st.just(Block.whole()),
)


@st.composite
def cases(draw: Any, kinds: tuple[str, ...], oracle: str) -> Case:
    depth = draw(st.integers(1, 3))
    checkpoints = st.sampled_from(["none", "none", "reentrant", "non-reentrant"])
    units = tuple((draw(st.sampled_from(kinds)), draw(checkpoints)) for _ in range(depth))
    wrap = tuple(draw(st.sampled_from(["own", "own", "pair", "root"])) for _ in range(depth))
    names = [n for n, _ in Model(Case(units, wrap, *[None] * 15)).named_parameters()]  # type: ignore[arg-type]
    frozen = draw(st.one_of(st.just(frozenset()), st.frozensets(st.sampled_from(names), max_size=4)))
    skipped = frozenset()
    repeated = -1
    ways = ["together", "together", "one by one", "last first", "twice"]
    order = draw(st.sampled_from(ways)) if oracle == "plain" else "together"
    # A list of modules runs as a whole or not at all.
    if "pair" not in wrap:
        skipped = draw(st.frozensets(st.tuples(st.integers(0, depth - 1), st.integers(0, 1)), max_size=1))
        repeated = draw(st.integers(-2, depth - 1))
    # A reentrant checkpoint of inputs without gradient has none for its parameters either; and where all units are
    # passed by, a loss without a trainable head has none at all.
    reentrant = any(how == "reentrant" for _, how in units)
    differentiable = reentrant or {"head.weight", "head.bias"} <= frozen or draw(st.booleans())
    # torch.autograd.grad refuses reentrant checkpoints; and whether a backward computes gradients of weights, which it
    # does not, is each rank's own guess: one that all make alike where they run the same modules.
    alike = not any(kind in ("idle", "half") for kind, _ in units)
    probed = oracle == "plain" and differentiable and not reentrant and alike and draw(st.booleans())
    return Case(
        units=units,
        wrap=wrap,
        reshard_after_forward=draw(
            st.sampled_from([True, False, None, 2] if oracle == "plain" else [True, False, None])
        ),
        block=draw(BLOCKS),
        other_block=draw(BLOCKS),
        low=draw(st.sampled_from([False, False, True])),
        flat=tuple(draw(st.booleans()) for _ in range(depth)),
        frozen=frozen,
        skipped=skipped,
        repeated=repeated,
        order=order,
        probed=probed,
        micro_batches=draw(st.integers(1, 2)),
        synchronise=draw(st.sampled_from(["last", "each"])),
        forwards=draw(st.sampled_from([1, 1, 2])),
        evaluate=draw(st.sampled_from(["never", "never", "no_grad", "inference"])),
        differentiable=differentiable,
    )


def check(world_size: int, case: Case, hybrid: bool, oracle: str) -> None:
    note(str(case))
    assert cluster.run(world_size, partial(run, case, hybrid, oracle)) == [[]] * world_size


@settings(max_examples=2 * settings.default.max_examples)
@given(case=cases(KINDS, "plain"), world=st.sampled_from([1, 2, 3, 4, (2, 2)]))
def test_gradients_of_any_model_are_those_of_plain_data_parallelism(case: Case, world: Any) -> None:
    check(4 if world == (2, 2) else world, case, world == (2, 2), "plain")


@given(case=cases(("linear", "wide", "tied"), "fsdp2"), world=st.sampled_from([2, 4]))
def test_gradients_of_any_model_are_those_of_fsdp2(case: Case, world: int) -> None:
    """Without evaluation under inference_mode, after which FSDP2 cannot train, and without micro-batches that are not
    reduced where a module has never run, which it fails on ("no attribute '_unsharded_param'").
    """
    if case.evaluate == "inference":
        case = dataclasses.replace(case, evaluate="no_grad")
    if any(step == 0 for _, step in case.skipped):
        case = dataclasses.replace(case, synchronise="each")
    check(world, case, False, "fsdp2")
