"""Every way to call a module: outputs and inputs of any structure, in-place operations, repeated and nested calls,
evaluation in between, activation checkpoints, custom methods.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.checkpoint import checkpoint

from fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from fsdp.hooks import _moved
from tests import cluster
from tests.fsdp.modules import WIDTH, Mlp, Output, Stack, Structured, data, squares
from tests.fsdp.reference import differences, shard_children, step, train, twins

EVERY = [True, False, None]


def sharded_with(**options: Any) -> Callable[[nn.Module], nn.Module]:
    return partial(shard_children, **options)


def check(world_size: int, function: Callable[..., list[str]], *args: Any, **kwargs: Any) -> None:
    assert cluster.run(world_size, function, *args, **kwargs) == [[]] * world_size


# ---- structure of inputs and outputs ----


def structured(kind: str, reshard_after_forward: bool | None) -> list[str]:
    return train(partial(Structured, kind), squares, sharded_with(reshard_after_forward=reshard_after_forward))


@pytest.mark.parametrize("reshard_after_forward", [True, None])
@pytest.mark.parametrize("kind", ["tuple", "dict", "dataclass"])
def test_outputs_and_keyword_inputs(kind: str, reshard_after_forward: bool | None) -> None:
    check(2, structured, kind, reshard_after_forward)


class InPlace(nn.Module):
    """Changes its input in place, and its output is changed in place by the caller."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x.tanh())
            x.mul_(2)
            return y.add_(x)

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
            x.mul_(0.5)
            x[:1].add_(3)
        return x


def sequences(model: nn.Module, step: int = 0) -> Tensor:
    """Inputs of three dimensions, of which a linear with a bias makes a view of rows."""
    return model(data(step, rows=6).view(2, 3, WIDTH)).square().mean()


def in_place(reshard_after_forward: bool | None) -> list[str]:
    shard = sharded_with(reshard_after_forward=reshard_after_forward)
    return train(InPlace, squares, shard) + train(InPlace, sequences, shard)


@pytest.mark.parametrize("reshard_after_forward", EVERY)
def test_in_place_on_inputs_and_outputs(reshard_after_forward: bool | None) -> None:
    check(2, in_place, reshard_after_forward)


class Views(nn.Module):
    """Blocks that return views of one output, of which only some are used."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return self.inner(x).chunk(3, dim=-1)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            a, _, c = block(x)
            x = a * c.sigmoid()
        return x


def views() -> list[str]:
    return train(Views, squares, sharded_with(reshard_after_forward=True))


def test_outputs_that_are_views_of_which_some_are_unused() -> None:
    check(2, views)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, WIDTH))

    def forward(self, rows: int) -> dict[str, Tensor]:
        return {"itself": self.weight, "view": self.weight.expand(rows, -1)}


class WithTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.block, self.head = Table(), Mlp(), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        given = self.table(len(x))
        return self.head(self.block(x + given["itself"]) * given["view"])


def returned_parameters() -> list[str]:
    """A module's own parameters, which are given back at its end, are outputs that last (FSDP2: a crash)."""
    found = train(WithTable, squares, partial(shard_children, reshard_after_forward=True))
    sharded, plain = twins(WithTable)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            if not torch.equal(sharded(data()), plain(data())):
                found.append("evaluation differs")
    return found


def test_a_module_that_returns_its_parameters() -> None:
    check(2, returned_parameters)


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = SideEffect(), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.block(x)
        return self.head(self.block.out)


class SideEffect(Mlp):
    def forward(self, x: Tensor) -> None:
        self.out = super().forward(x)


def hidden_output() -> str:
    model = shard_children(Hidden(), reshard_after_forward=True)
    try:
        squares(model).backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_backward_that_no_output_announces_is_explained() -> None:
    for message in cluster.run(2, hidden_output):
        assert "backward has come to down.weight of block, which is not gathered" in message
        assert "Outputs are what forward returns" in message


def no_gradient_for_inputs() -> list[str]:
    """The loss of a model whose first block gets integers, and whose last returns something without gradient."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(9, WIDTH)
            self.blocks = nn.ModuleList(Mlp() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            tokens = (x[:, 0] > 0).long() + 3
            h = self.embed(tokens)
            for block in self.blocks:
                h = block(h)
            return h + self.blocks[0](h).detach()

    return train(Model, squares, sharded_with(reshard_after_forward=True))


def test_inputs_without_gradient_and_detached_outputs() -> None:
    check(2, no_gradient_for_inputs)


def run_by_a_hook() -> list[str]:
    """A frozen model whose first forward, and each after that, is within the backward of another."""
    scorer, plain = twins(Stack)
    found = []

    def scored(model: nn.Module, number: int) -> Tensor:
        output = model(data(number))

        def score(gradient: Tensor) -> None:
            with torch.no_grad():
                if not torch.equal(scorer(gradient.repeat(1, 2)[:, :WIDTH]), plain(gradient.repeat(1, 2)[:, :WIDTH])):
                    found.append(f"score of step {number}")

        output.register_hook(score)
        return output.square().mean()

    return train(Stack, scored) + found


def test_a_model_that_only_runs_in_the_backward_of_another() -> None:
    check(2, run_by_a_hook)


# ---- calls ----


class Repeated(Stack):
    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0]
        return super().forward(first(x) * self.blocks[1](first(x)).sigmoid())


def repeated(reshard_after_forward: bool | None) -> list[str]:
    return train(Repeated, squares, sharded_with(reshard_after_forward=reshard_after_forward), tolerance=1e-6)


@pytest.mark.parametrize("reshard_after_forward", EVERY)
def test_a_module_called_repeatedly(reshard_after_forward: bool | None) -> None:
    check(2, repeated, reshard_after_forward)


def several_forwards(reshard_after_forward: bool | None, how: str) -> list[str]:
    def loss_of(model: nn.Module, number: int) -> Tensor:
        losses = [squares(model, 3 * number + i) for i in range(3)]
        if how == "sum":
            return losses[0] + losses[1] * 2 + losses[2]
        return losses[1] * 2  # the graphs of the others are dropped

    return train(Stack, loss_of, sharded_with(reshard_after_forward=reshard_after_forward), tolerance=1e-6)


@pytest.mark.parametrize("how", ["sum", "one of three"])
@pytest.mark.parametrize("reshard_after_forward", EVERY)
def test_several_forwards_before_one_backward(reshard_after_forward: bool | None, how: str) -> None:
    check(2, several_forwards, reshard_after_forward, how)


def forwards_then_backwards(reshard_after_forward: bool | None) -> list[str]:
    """Two forwards, then two backwards, each reduced: sums."""
    sharded, plain = twins(Stack, sharded_with(reshard_after_forward=reshard_after_forward))
    for model in (sharded, plain):
        one, two = squares(model, 0), squares(model, 1)
        two.backward()
        one.backward()
    from tests.fsdp.reference import average_gradients

    average_gradients(plain)
    return differences(sharded, plain, 1e-6)


@pytest.mark.parametrize("reshard_after_forward", EVERY)
def test_two_forwards_then_two_backwards(reshard_after_forward: bool | None) -> None:
    check(2, forwards_then_backwards, reshard_after_forward)


def abandoned(reshard_after_forward: bool | None) -> list[str]:
    """Forwards whose loss is thrown away, with different modules running each time."""
    sharded, plain = twins(Stack, sharded_with(reshard_after_forward=reshard_after_forward))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=True) for m in (sharded, plain)]
    found = []
    for number in range(3):
        for model in (sharded, plain):
            squares(model, 10 + number)
        found += step(sharded, plain, lambda m, n=number: squares(m, n), optimizers)
    return found


@pytest.mark.parametrize("reshard_after_forward", EVERY)
def test_forward_without_backward_then_training(reshard_after_forward: bool | None) -> None:
    check(2, abandoned, reshard_after_forward)


def edited(how: str, reshard_after_forward: bool | None) -> list[str]:
    """What is written into sharded parameters between forwards is what the next forward computes with."""
    sharded, plain = twins(Stack, sharded_with(reshard_after_forward=reshard_after_forward))
    found = step(sharded, plain, squares)
    with torch.no_grad():
        squares(sharded, 5)
    if reshard_after_forward is False:
        # As torch's: whole parameters are registered; they must be given back before the sharded ones are edited.
        for module in sharded.modules():
            if hasattr(module, "reshard"):
                module.reshard()
    for model in (sharded, plain):
        model.zero_grad()
        averages = {n: p.detach() * 0.25 for n, p in model.named_parameters()}
        with torch.no_grad():
            if how == "copy_":
                for name, parameter in model.named_parameters():
                    parameter.copy_(averages[name])
            elif how == "mul_":
                for parameter in model.parameters():
                    parameter.mul_(0.25)
            elif how == "data":
                for name, parameter in model.named_parameters():
                    parameter.data.copy_(averages[name])
            elif how == "load_state_dict":
                model.load_state_dict(averages)
            elif how == "foreach":
                torch._foreach_copy_(list(model.parameters()), list(averages.values()))
    with torch.no_grad():
        outputs = [model(data(3)) for model in (sharded, plain)]
    if not torch.equal(*outputs):
        found.append("the next forward uses old values")
    return found + step(sharded, plain, partial(squares, step=4))


@pytest.mark.parametrize("how", ["copy_", "mul_", "data", "load_state_dict", "foreach"])
def test_parameters_edited_between_forwards(how: str) -> None:
    for reshard_after_forward in EVERY:
        check(2, edited, how, reshard_after_forward)


# ---- activation checkpointing ----


class Checkpointed(Stack):
    reentrant = False
    calls = 1

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for block in self.blocks:
            for _ in range(self.calls):
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x @ self.head


class Inside(nn.Module):
    """The checkpoint lies inside the sharded block."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.mlp, self.reentrant = Mlp(), reentrant
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.mlp, x, use_reentrant=self.reentrant) * self.scale


class WithInside(Stack):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Inside(reentrant) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clone().requires_grad_())


def checkpointed(reentrant: bool, where: str, reshard_after_forward: bool | None, calls: int = 1) -> list[str]:
    def make() -> nn.Module:
        if where == "inside":
            return WithInside(reentrant)
        model = Checkpointed()
        model.reentrant, model.calls = reentrant, calls
        return model

    return train(
        make, squares, sharded_with(reshard_after_forward=reshard_after_forward), tolerance=0.0 if calls == 1 else 1e-6
    )


@pytest.mark.parametrize("reshard_after_forward", EVERY)
@pytest.mark.parametrize("where", ["around", "inside"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool, where: str, reshard_after_forward: bool | None) -> None:
    check(2, checkpointed, reentrant, where, reshard_after_forward)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_of_a_module_called_twice(reentrant: bool) -> None:
    """A reentrant recomputation is a backward of its own: the second one must add to the first."""
    check(2, checkpointed, reentrant, "around", True, 2)


def wrapped(impl: str) -> list[str]:
    """torch's checkpoint_wrapper, applied before sharding, and sharded after."""

    def make() -> nn.Module:
        model = Stack()
        kind = CheckpointImpl.REENTRANT if impl == "reentrant" else CheckpointImpl.NO_REENTRANT
        apply_activation_checkpointing(
            model,
            checkpoint_wrapper_fn=partial(checkpoint_wrapper, checkpoint_impl=kind),
            check_fn=lambda m: isinstance(m, Mlp),
        )
        return model

    def loss_of(model: nn.Module, number: int) -> Tensor:
        return model(data(number).requires_grad_()).square().mean()

    return train(make, loss_of, sharded_with(reshard_after_forward=True))


@pytest.mark.parametrize("impl", ["reentrant", "non-reentrant"])
def test_checkpoint_wrapper(impl: str) -> None:
    check(2, wrapped, impl)


def random_in_recomputation() -> list[str]:
    """Dropout under checkpoints draws the same numbers as without sharding."""

    class Dropped(Checkpointed):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(super().forward(x), 0.5)

    class Block(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(super().forward(x), 0.3)

    def make() -> nn.Module:
        model = Dropped()
        model.blocks = nn.ModuleList(Block() for _ in range(3))
        return model

    def loss_of(model: nn.Module, number: int) -> Tensor:
        torch.manual_seed(number)
        return squares(model, number)

    return train(make, loss_of)


def test_dropout_under_checkpoints() -> None:
    check(2, random_in_recomputation)


# ---- custom forward methods ----


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Mlp() for _ in range(2))

    def encode(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Tensor]:
        x = self.inner(x) * scale
        for block in self.blocks:
            x = block(x)
        return {"x": x}

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)["x"]


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.out = Encoder(), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.encoder.encode(x, scale=2.0)["x"])


def custom_method() -> list[str]:
    def shard(model: nn.Module) -> nn.Module:
        for block in model.encoder.blocks:
            fully_shard(block)
        fully_shard(model.encoder)
        register_fsdp_forward_method(model.encoder, "encode")
        return fully_shard(model)

    return train(Decoder, squares, shard)


def test_register_fsdp_forward_method() -> None:
    check(2, custom_method)


def root_method() -> list[str]:
    """The root's own custom method is an iteration of its own, before and after plain forwards."""

    def shard(model: nn.Module) -> nn.Module:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        register_fsdp_forward_method(model, "encode")
        return model

    def loss_of(model: nn.Module, number: int) -> Tensor:
        if number % 2:
            return model(data(number)).square().mean()
        return model.encode(data(number), scale=0.5)["x"].square().mean()

    return train(Encoder, loss_of, shard, steps=4)


def test_a_custom_method_of_the_root() -> None:
    check(2, root_method)


def not_registered() -> list[str]:
    """On a module that is not sharded it does nothing; an unknown name is an error that names it."""
    plain = Encoder()
    before = plain.encode
    register_fsdp_forward_method(plain, "encode")
    found = [] if plain.encode == before else ["a plain module was changed"]
    model = fully_shard(Encoder())
    try:
        register_fsdp_forward_method(model, "decode")
        found.append("no error")
    except ValueError as error:
        if "decode" not in str(error):
            found.append(str(error))
    return found


def test_register_fsdp_forward_method_on_other_modules() -> None:
    check(2, not_registered)


# ---- lists of modules ----


class Chunked(nn.Module):
    """Norm and head are one bucket; the head runs per chunk after the main forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def list_of_modules(reshard_after_forward: bool | None) -> list[str]:
    def shard(model: nn.Module) -> nn.Module:
        for block in model.blocks:
            fully_shard(block, reshard_after_forward=reshard_after_forward)
        returned = fully_shard([model.norm, model.head], reshard_after_forward=reshard_after_forward)
        assert returned == [model.norm, model.head]
        return fully_shard(model, reshard_after_forward=reshard_after_forward)

    return train(Chunked, squares, shard)


@pytest.mark.parametrize("reshard_after_forward", EVERY)
def test_a_list_is_one_bucket(reshard_after_forward: bool | None) -> None:
    check(2, list_of_modules, reshard_after_forward)


class ChunkedLoss(Chunked):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return torch.cat([self.head(chunk) for chunk in x.chunk(2)])


def head_per_chunk() -> list[str]:
    def shard(model: nn.Module) -> nn.Module:
        for block in model.blocks:
            fully_shard(block)
        fully_shard([model.norm, model.head])
        return fully_shard(model)

    return train(ChunkedLoss, squares, shard, tolerance=1e-6)


def test_a_module_of_a_list_called_repeatedly() -> None:
    check(2, head_per_chunk)


def precision() -> list[tuple[torch.dtype, torch.dtype, torch.dtype]]:
    """(block input, block output, root output) under param_dtype bf16 and output_dtype of the root."""
    seen = []

    class Look(Mlp):
        def forward(self, x: Tensor, *, shift: Tensor, index: Tensor) -> Tensor:
            seen.append((x.dtype, shift.dtype, index.dtype, self.up.weight.dtype))
            return super().forward(x + shift)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Look()

        def forward(self, x: Tensor) -> Tensor:
            y = self.block(x, shift=torch.ones(WIDTH), index=torch.ones(WIDTH, dtype=torch.long))
            seen.append(y.dtype)
            return y

    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for policy in (bf16, MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)):
        model = Model()
        fully_shard(model.block, mp_policy=policy)
        fully_shard(model, mp_policy=MixedPrecisionPolicy(output_dtype=torch.float64))
        out = model(data())
        seen.append(out.dtype)
        out.sum().backward()
        seen.append({p.grad.dtype for p in model.parameters()})
    return seen


def test_dtypes_of_inputs_outputs_and_gradients() -> None:
    inside = (torch.bfloat16, torch.bfloat16, torch.long, torch.bfloat16)
    for seen in cluster.run(2, precision):
        first, second = seen[:4], seen[4:]
        assert first == [inside, torch.bfloat16, torch.float64, {torch.float32}]
        assert second == [inside, torch.float32, torch.float64, {torch.float32}]


class Attributes(dict):
    """A dict as configurations and model outputs subclass it."""

    __getattr__ = dict.__getitem__


class Recurrent(nn.Module):
    """Blocks whose outputs pytree takes for leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.packed, self.subclass, self.set = Packed(), Subclass(), Set()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        packed = self.packed(pack_sequence([x, x[1:]]))
        (last,) = self.set(self.subclass(Attributes(y=packed.data)).y)
        return self.head(last)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(WIDTH, WIDTH)

    def forward(self, x: PackedSequence) -> PackedSequence:
        return self.cell(x)[0]


class Subclass(Mlp):
    def forward(self, x: Attributes) -> Attributes:
        return Attributes(y=super().forward(x.y))


class Set(Mlp):
    def forward(self, x: Tensor) -> set[Tensor]:
        return {super().forward(x)}


def subclasses() -> list[str]:
    found = train(Recurrent, squares, partial(shard_children, reshard_after_forward=True), tolerance=1e-6)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model = shard_children(Recurrent(), mp_policy=policy)
    kinds = [type(model.packed(pack_sequence([data()]))), type(model.subclass(Attributes(y=data())))]
    return found + ([] if kinds == [PackedSequence, Attributes] else [f"became {kinds}"])


def test_subclasses_of_containers() -> None:
    check(2, subclasses)


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Tensor
    rest: dict[str, Any]
    length: int = dataclasses.field(default=3, init=False)


class ThroughDataclasses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.seen: list[torch.dtype] = []

    def forward(self, given: Output, *, frozen: Frozen) -> Output:
        self.seen = [given.hidden.dtype, given.extra["mask"].dtype, frozen.rest["inner"].hidden.dtype]
        return Output(self.layer(given.hidden + frozen.x), {"y": self.layer(frozen.x)}, given.note)


def dataclasses_in_mixed_precision() -> list[str]:
    """They are cast (and moved) as other inputs and outputs are; the caller's own objects stay as they were."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    model = fully_shard(ThroughDataclasses(), mp_policy=policy)
    given = Output(data(), {"mask": torch.ones(2, dtype=torch.bool)}, "note")
    frozen = Frozen(data(), {"inner": given, "name": "a"})
    out = model(given, frozen=frozen)
    found = [] if model.seen == [torch.bfloat16, torch.bool, torch.bfloat16] else [f"inputs {model.seen}"]
    if (out.hidden.dtype, out.extra["y"].dtype, out.note) != (torch.float64, torch.float64, "note"):
        found.append(f"outputs {out}")
    if (given.hidden.dtype, frozen.x.dtype) != (torch.float32, torch.float32):
        found.append("the caller's dataclasses were changed")
    (out.hidden.sum() + out.extra["y"].sum()).backward()
    found += [f"no gradient for {n}" for n, p in model.named_parameters() if p.grad is None]
    moved, same = _moved([frozen, given], torch.device("meta")), _moved(frozen, torch.device("cpu"))
    devices = {str(t.device) for t in (moved[0].x, moved[0].rest["inner"].hidden, moved[1].extra["mask"])}
    if devices != {"meta"} or moved[0].length != 3:
        found.append(f"moved: {moved}")
    return found + ([] if same is frozen else ["copied although nothing changed"])


def test_dataclasses_are_cast_and_moved() -> None:
    check(1, dataclasses_in_mixed_precision)


def uncast() -> torch.dtype:
    model = fully_shard(
        copy.deepcopy(nn.Identity()), mp_policy=MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False)
    )
    return model(data()).dtype


def test_inputs_stay_uncast_when_asked() -> None:
    assert cluster.run(1, uncast) == [torch.float32]
