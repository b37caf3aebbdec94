"""Weight gradients are computed straight into the gradient buffer, wherever the operation is called, and are right
where they cannot be.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp import MixedPrecisionPolicy, fully_shard
from fsdp.weight_grad import WeightView
from tests import cluster
from tests.fsdp.counting import Counted
from tests.fsdp.reference import average_gradients, differences, train

E, N, K = 4, 8, 16


def numbers(step: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + torch.distributed.get_rank())
    return torch.randn(*shape, generator=generator)


class Op(nn.Module):
    """One operation with a weight; ``stack`` is (E, N, K), ``weight`` is (N, K), ``vector`` is (N,)."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        kind = name.split()[0]
        if kind in ("bmm", "unbind", "iterate", "index", "select", "grouped", "stack", "einsum"):
            self.weight = nn.Parameter(torch.randn(E, N, K))
        else:
            self.weight = nn.Parameter(torch.randn(N, K))
        if "bias" in name:
            self.bias = nn.Parameter(torch.randn(N))

    def forward(self, x: Tensor) -> Tensor:
        """x: (2, E, K); the result has E * N * 2 elements or so."""
        w, name = self.weight, self.name
        bias = getattr(self, "bias", None)
        if name == "linear" or name == "linear bias":
            return F.linear(x, w, bias)
        if name == "linear vector":
            return F.linear(x[0, 0], w)
        if name == "linear matrix":
            return F.linear(x[0], w)
        if name == "linear strided":
            return F.linear(x.transpose(0, 1), w)[..., ::2]
        if name == "linear empty":
            return torch.cat([F.linear(x[:, :0], w), F.linear(x, w)], 1)
        if name == "linear empty only":
            return F.linear(x[:, :0], w).sum() + x.sum()
        if name == "linear twice":
            return F.linear(F.linear(x, w).tanh() @ w, w)
        if name == "linear and norm":
            return F.linear(x, w) * w.norm() + w.sum()
        if name == "norm and linear":
            y = w.norm() + w.sum()
            return F.linear(x, w) * y
        if name == "linear detached":
            return F.linear(x, w.detach()) + F.linear(x, w)
        if name == "matmul":
            return x @ w.t().contiguous() + (x[..., :N] @ w).sum()
        if name == "matmul transposed":
            return x @ w.t() + (x @ w.T).sum()
        if name == "mm transposed":
            return torch.mm(x[0], w.transpose(0, 1))
        if name == "matmul mT":
            return x @ w.mT
        if name == "linear transposed":
            return F.linear(x[..., :N], w.t())
        if name == "transposed and linear":
            return x @ w.t() + F.linear(x, w) * w.t().sum()
        if name == "matmul left":
            return w @ x[0].t()
        if name == "mm":
            return torch.mm(x[0, :, :N], w)
        if name == "matmul 3d":
            return torch.matmul(x[..., :N], w)
        if name == "addmm":
            return torch.addmm(x[0], x[0, :, :N], w)
        if name == "embedding":
            return F.embedding(torch.arange(6) % N, w)
        if name == "embedding repeated":
            return F.embedding(torch.tensor([[1, 1], [3, 1]]), w)
        if name == "embedding padding":
            return F.embedding(torch.tensor([1, 2, 2, 0]), w, padding_idx=2)
        if name == "embedding negative padding":
            return F.embedding(torch.tensor([1, N - 1, 0]), w, padding_idx=-1)
        if name == "embedding empty":
            return F.embedding(torch.zeros(0, dtype=torch.long), w).sum() + x.sum()
        if name == "embedding and head":
            return F.linear(F.embedding(torch.arange(5), w), w)
        if name == "embedding scaled by frequency":
            return F.embedding(torch.tensor([1, 1, 2]), w, scale_grad_by_freq=True)
        if name == "bmm":
            return torch.bmm(x.transpose(0, 1)[..., :N], w)
        if name == "bmm transposed":
            return torch.bmm(x.transpose(0, 1), w.transpose(1, 2))
        if name == "einsum":
            return torch.einsum("bek,enk->ben", x, w)
        if name == "index":
            return torch.stack([F.linear(x[:, e], w[e]) for e in range(E)])
        if name == "index linear":
            return torch.stack([F.linear(x[:, e], w[e]) for e in (2, 0, -1)])
        if name == "index matmul":
            return torch.stack([x[:, e] @ w[torch.tensor(e)].t() for e in range(E)])
        if name == "index repeated":
            return F.linear(F.linear(x[:, 0], w[1]).tanh() @ w[1], w[1]) + F.linear(x[:, 1], w[0])
        if name == "index and whole":
            return F.linear(x[:, 0], w[1]) * w.mean()
        if name == "index others":
            return (
                F.linear(x[:, 0], w[1]) + w[1:2].sum() + w[None, 0].sum() + w[..., 0].sum() + w[torch.arange(2)].sum()
            )
        if name == "index out of range":
            try:
                return w[E]
            except IndexError:
                return F.linear(x[:, 0], w[0])
        if name == "index without gradient":
            with torch.no_grad():
                scale = w[1].norm()
            return F.linear(x[:, 0], w[1]) * scale
        if name == "select":
            y = (x[:, 1, :N] @ torch.select(w, 0, 3)).sum() + w.select(2, 0).sum()
            return F.linear(x[:, 0], w.select(0, 1)) * y
        if name.startswith("grouped") and "keywords" not in name:
            rows, offs = x.flatten(0, 1), torch.tensor([3, 3, 4, 8], dtype=torch.int32)
            if name == "grouped":
                return F.grouped_mm(rows[:, :N], w, offs=offs)
            if name == "grouped transposed":
                return torch._grouped_mm(rows, w.transpose(-2, -1), offs=offs)
            if name == "grouped twice":
                return F.grouped_mm(F.grouped_mm(rows, w.mT, offs=offs).tanh(), w, offs=offs)
            return F.grouped_mm(rows, w.mT, offs=offs) * w[0].norm()
        if name == "stack times stack":
            return torch.matmul(x.transpose(0, 1), w.mT) + (x.transpose(0, 1)[..., :N] @ w).sum()
        if name == "unbind":
            return torch.stack([F.linear(x[:, e], one) for e, one in enumerate(w.unbind(0))])
        if name == "iterate":
            return torch.stack([x[:, e, :N] @ one for e, one in enumerate(w)])
        if name == "unbind some":
            first, _, third, _ = w.unbind()
            return F.linear(x[:, 0], first) + F.linear(x[:, 2], third)
        if name == "unbind twice each":
            return torch.stack([F.linear(F.linear(x[:, e], one).tanh() @ one, one) for e, one in enumerate(w.unbind())])
        if name == "unbind otherwise":
            return torch.stack([(F.linear(x[:, e], one) * one.sum()).sum() + one.max() for e, one in enumerate(w)])
        if name == "unbind and whole":
            return torch.stack([F.linear(x[:, e], one) for e, one in enumerate(w.unbind())]) * w.mean()
        if name == "unbind two times":
            one, two = w.unbind(), w.unbind()
            return F.linear(x[:, 0], one[0]) + F.linear(x[:, 1], two[0]) + F.linear(x[:, 2], two[3])
        if name == "unbind other dim":
            return sum(F.linear(x[0, 0, :K], one) for one in w.unbind(1))
        if name == "mm keywords":
            return torch.mm(x[0, :, :N], mat2=w) + torch.matmul(input=x[1, :, :N], other=w) + x[0, :, :N].mm(mat2=w)
        if name == "grouped keywords":
            rows, offs = x.flatten(0, 1), torch.tensor([3, 3, 4, 8], dtype=torch.int32)
            return F.grouped_mm(mat_a=rows[:, :N], mat_b=w, offs=offs)
        if name == "mm out":
            out = torch.empty(E, K)
            with torch.no_grad():
                torch.mm(x[0, :, :N], w, out=out)
            return out + F.linear(x[0], w).sum()
        if name == "mm sparse rows":
            return torch.eye(N)[:3].to_sparse_csr() @ w + x.sum()
        if name == "gradient unused":
            return F.linear(x, w).detach() + x[..., :N]
        raise ValueError(name)


OPS = [
    "linear", "linear bias", "linear vector", "linear matrix", "linear strided", "linear empty", "linear empty only",
    "linear twice", "linear and norm", "norm and linear", "linear detached", "matmul", "matmul left", "mm",
    "matmul 3d", "addmm", "embedding", "embedding repeated", "embedding padding", "embedding negative padding",
    "embedding empty", "embedding and head", "embedding scaled by frequency", "bmm", "bmm transposed", "einsum",
    "matmul transposed", "mm transposed", "matmul mT", "linear transposed", "transposed and linear",
    "index", "index linear", "index matmul", "index repeated", "index and whole", "index others", "index out of range",
    "index without gradient", "select", "grouped", "grouped transposed", "grouped twice", "grouped and whole",
    "stack times stack", "unbind", "iterate", "unbind some", "unbind twice each", "unbind otherwise",
    "unbind and whole", "unbind two times", "unbind other dim", "gradient unused",
    "mm keywords", "grouped keywords", "mm out", "mm sparse rows",
]  # fmt: skip


class Model(nn.Module):
    def __init__(self, name: str, checkpointed: bool | None) -> None:
        super().__init__()
        self.op, self.out, self.checkpointed = Op(name), nn.Parameter(torch.randn(())), checkpointed

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed is None:
            y = self.op(x)
        else:
            y = checkpoint(self.op, x, use_reentrant=self.checkpointed)
        return y.square().mean() * self.out + y.sum() * 0.1


def shard(model: nn.Module) -> nn.Module:
    fully_shard(model.op, reshard_after_forward=True)
    return fully_shard(model)


def loss_of(model: nn.Module, step: int) -> Tensor:
    return model(numbers(step, 2, E, K).requires_grad_())


def right(checkpointed: bool | None) -> list[str]:
    found = []
    for name in OPS:
        # A sum of several uses may be added in another order.
        found += [
            f"{name}: {d}" for d in train(partial(Model, name, checkpointed), loss_of, shard, steps=2, tolerance=2e-5)
        ]
    return found


@pytest.mark.parametrize("checkpointed", [None, False, True])
def test_every_operation_is_right(checkpointed: bool | None) -> None:
    assert cluster.run(2, right, checkpointed) == [[], []]


def accumulated() -> list[str]:
    """Micro-batches add up, whether computed in place or not, and a retained graph may be used again."""
    found = []
    for name in OPS:
        torch.manual_seed(0)
        plain = Model(name, None)
        model = shard(copy.deepcopy(plain))
        for micro in range(3):
            model.set_requires_gradient_sync(micro == 2)
            for one in (model, plain):
                loss = loss_of(one, micro)
                loss.backward(retain_graph=micro == 1)
                if micro == 1:
                    loss.backward()
        average_gradients(plain)
        found += [f"{name}: {d}" for d in differences(model, plain, 1e-4)]
    return found


def test_accumulation_is_right() -> None:
    assert cluster.run(2, accumulated) == [[], []]


def other_numbers() -> list[str]:
    """The gradient of a complex product is conjugated, a nested tensor has no shape: autograd's affair, not ours."""

    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(N, N, dtype=torch.cfloat)
            self.weight = nn.Parameter(torch.randn(N, N, dtype=torch.cfloat))
            self.rows = nn.Linear(N, N)

        def forward(self, x: Tensor) -> Tensor:
            nested = torch.nested.as_nested_tensor([x[:1], x[1:]])
            return (self.up(x * (1 + 2j)) @ self.weight).abs() + torch.cat(self.rows(nested).unbind())

    torch.manual_seed(0)
    plain = Other()
    model = fully_shard(copy.deepcopy(plain))
    for one in (model, plain):
        one(numbers(0, 4, N)).sum().backward()
    average_gradients(plain)
    return [
        name
        for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True)
        if not torch.allclose(mine.grad.full_tensor(), theirs.grad, atol=1e-5)
    ]


def test_complex_weights_and_nested_inputs() -> None:
    assert cluster.run(2, other_numbers) == [[], []]


def two_graphs() -> list[str]:
    """Slices of a stack that is in two graphs at once: both forwards take them, each backward walks its own."""
    found = []
    for name in ("index linear", "index repeated", "unbind", "unbind some", "bmm transposed", "grouped twice"):
        torch.manual_seed(0)
        plain = Model(name, None)
        model = shard(copy.deepcopy(plain))
        for one in (model, plain):
            losses = [loss_of(one, 0), loss_of(one, 1)]
            for loss in losses:
                loss.backward()
        average_gradients(plain)
        found += [f"{name}: {d}" for d in differences(model, plain, 1e-5)]
    return found


def test_two_graphs_may_share_the_slices() -> None:
    assert cluster.run(2, two_graphs) == [[], []]


def views() -> list[WeightView]:
    gc.collect()
    return [one for one in gc.get_objects() if type(one) is WeightView]


def views_left() -> list[int]:
    """Slices and transposes that outlive their graph, which autograd's nodes may hold out of the collector's sight."""
    # Not those of earlier tests on this rank, whose graphs may be cycles that nobody frees (create_graph=True).
    earlier = {id(one): weakref.ref(one) for one in views()}
    counts = []
    for name in ("index linear", "index matmul", "unbind", "mm transposed"):
        model = shard(Model(name, None))
        for step in range(3):
            loss_of(model, step).backward()
        counts.append(sum(id(one) not in earlier or earlier[id(one)]() is not one for one in views()))
    return counts


def test_slices_do_not_outlive_their_graph() -> None:
    assert cluster.run(2, views_left) == [[0] * 4] * 2


IN_PLACE = [
    "linear", "linear matrix", "linear strided", "embedding", "embedding repeated", "embedding padding", "mm",
    "matmul 3d", "bmm", "bmm transposed", "mm transposed", "matmul mT", "linear transposed", "unbind", "iterate",
    "unbind some", "index", "index linear", "index matmul", "grouped", "grouped transposed",
]  # fmt: skip


def copied(name: str, checkpointed: bool | None, prepare: Callable[[nn.Module], None] | None = None) -> tuple[int, int]:
    """Bytes that a step copies on the communication path, and bytes of the weight."""
    torch.manual_seed(0)
    plain = Model(name, checkpointed)
    model = shard(copy.deepcopy(plain))
    if prepare is not None:
        prepare(model)
    counts = []
    for one in (model, plain):
        for step in range(2):
            one.zero_grad()
            with Counted() as counted:
                loss_of(one, step).backward()
        counts.append(counted.copied)
    return (counts[0] - counts[1]).total(), plain.op.weight.numel() * 4


@pytest.mark.parametrize("checkpointed", [None, False, True])
def test_gradients_are_written_in_place(checkpointed: bool | None) -> None:
    """Beyond this rank's slots of two gathers of the weight and of two of the scalar nothing is copied but the scalar's
    own gradient.
    """
    for name in IN_PLACE:
        for extra, weight in cluster.run(2, copied, name, checkpointed):
            slots = 2 * weight // 2
            assert extra <= slots + 1024, (name, extra, weight)


@pytest.mark.parametrize("name", ["linear and norm", "matmul left", "einsum"])
def test_other_gradients_are_written_once(name: str) -> None:
    for extra, weight in cluster.run(2, copied, name, None):
        assert weight < extra <= 2 * weight // 2 + weight + 1024, (name, extra, weight)


def input_gradient_first(model: nn.Module) -> None:
    """torch.autograd.grad for the input alone must not take the weight's place for good."""
    x = numbers(0, 2, E, K).requires_grad_()
    torch.autograd.grad(model(x), x)


def test_a_gradient_of_the_input_alone_does_not_spoil_the_next_step() -> None:
    for extra, weight in cluster.run(2, copied, "linear", None, input_gradient_first):
        assert extra <= 2 * weight // 2 + 1024


def kept_gradients() -> list[str]:
    """autograd.grad for the input while unreduced gradients wait in the buffer leaves them alone."""
    torch.manual_seed(0)
    plain = Model("linear", None)
    model = shard(copy.deepcopy(plain))
    for one in (model, plain):
        if one is model:
            one.set_requires_gradient_sync(False)
        loss_of(one, 0).backward()
        x = numbers(5, 2, E, K).requires_grad_()
        torch.autograd.grad(one(x), x)
        if one is model:
            one.set_requires_gradient_sync(True)
        loss_of(one, 1).backward()
    average_gradients(plain)
    return differences(model, plain, 1e-5)


def test_waiting_gradients_survive_a_gradient_of_the_input() -> None:
    assert cluster.run(2, kept_gradients) == [[], []]


def in_low_precision() -> list[str]:
    """param_dtype bf16, reduced in bf16 (in place) and in fp32 (written once): the same up to rounding."""
    found = []
    for name in ("linear bias", "embedding", "bmm", "unbind"):
        grads = []
        for reduce_dtype in (torch.bfloat16, torch.float32):
            torch.manual_seed(0)
            model = Model(name, None)
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
            fully_shard(model.op, mp_policy=policy)
            fully_shard(model, mp_policy=policy)
            loss_of(model, 0).backward()
            grads.append(model.op.weight.grad.full_tensor())
        if grads[0].dtype != torch.float32 or not torch.allclose(*grads, rtol=2e-2, atol=1e-2 * grads[0].abs().max()):
            found.append(name)
    return found


def test_low_precision() -> None:
    assert cluster.run(2, in_low_precision) == [[], []]


def under_vmap() -> list[str]:
    """functorch transforms over a module that computes with unsharded parameters."""
    torch.manual_seed(0)
    plain = Model("linear", None)
    model = shard(copy.deepcopy(plain))
    x = numbers(0, 3, 2, E, K)
    results = []
    for one in (model, plain):
        if one is model:
            one.unshard()
            one.op.unshard()
        weight = one.op.weight
        results.append(torch.vmap(lambda v, w=weight: F.linear(v, w))(x).sum())
    return [] if torch.equal(results[0], results[1]) else ["vmap"]


def test_vmap_over_unsharded_parameters() -> None:
    assert cluster.run(2, under_vmap) == [[], []]


def penalty() -> list[str]:
    """create_graph=True: the gradient is itself differentiated."""
    found = []
    for name in ("linear", "matmul 3d", "bmm", "embedding and head", "unbind"):
        torch.manual_seed(0)
        plain = Model(name, None)
        model = fully_shard(copy.deepcopy(plain), reshard_after_forward=False)
        for one in (model, plain):
            x = numbers(0, 2, E, K).requires_grad_()
            out: Any = one(x)
            if one is model:
                one.set_reshard_after_backward(False)
            (slope,) = torch.autograd.grad(out, x, create_graph=True, allow_unused=True)
            if one is model:
                one.set_reshard_after_backward(True)
            (out + (0 if slope is None else slope.square().sum())).backward()
        average_gradients(plain)
        found += [f"{name}: {d}" for d in differences(model, plain, 1e-2)]
    return found


def test_double_backward() -> None:
    assert cluster.run(2, penalty) == [[], []]
