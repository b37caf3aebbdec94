"""Tensor subclasses that say what is gathered and what becomes of it: as with stock FSDP2, for the same subclass."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.utils.checkpoint import checkpoint

from fsdp import fully_shard
from fsdp.hooks import state_of
from ragged_shard import Block, ParamPolicy
from tests import cluster
from tests.fsdp.modules import WIDTH, Mlp, Stack, data, squares
from tests.fsdp.reference import full, message_of, shard_children

# What stays an instance when the whole tensor is cut, copied and moved; all else computes on the values.
KEEPS = {
    torch.ops.aten.detach.default,
    torch.ops.aten.split.Tensor,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.new_zeros.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.view.default,
    torch.ops.aten.as_strided.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.copy_.default,
    torch.ops.aten._to_copy.default,
}


class Wrapped(Tensor):
    """A tensor around another, ``values``, as torchao's: ordinary operations compute with the values."""

    values: Tensor
    calls: ClassVar[list[str]] = []

    @staticmethod
    def __new__(cls, values: Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, values.shape, strides=values.stride(), dtype=values.dtype, device=values.device
        )

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def __tensor_flatten__(self) -> Any:
        return ["values"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["values"])

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        original = args[0] if args else None
        args, kwargs = pytree.tree_map_only(Wrapped, lambda x: x.values, (args, kwargs or {}))
        result = func(*args, **kwargs)
        if func is torch.ops.aten.copy_.default:
            return original
        return pytree.tree_map_only(Tensor, cls, result) if func in KEEPS else result


class Half(Wrapped):
    """Gathered in bfloat16, computed with in the policy's dtype: the older signature, never padded."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        self.calls.append(f"pre {mesh.ndim} {self.shape[0]}")
        return (self.values.to(torch.bfloat16),), None

    def fsdp_post_all_gather(self, gathered: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        (half,) = gathered
        assert half.dtype == torch.bfloat16 and metadata is None
        self.calls.append("new" if out is None else "out")
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(half)
            return None
        whole = half.to(dtype)
        return whole, (half, whole)


class Split(Wrapped):
    """Two tensors are gathered, fp32 as its upper and lower sixteen bits, with metadata; the newer signature."""

    def fsdp_pre_all_gather(self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> Any:
        assert isinstance(module, nn.Module) and isinstance(policy, MixedPrecisionPolicy)
        assert tuple(stride) == torch.empty(size, device="meta").stride()
        rows = math.ceil(size[0] / mesh.size())
        padded = torch.zeros(rows, *size[1:], dtype=self.dtype)
        padded[: self.shape[0]].copy_(self.values)
        bits = padded.view(torch.int32)
        upper = (bits >> 16).to(torch.int16).view(torch.bfloat16)
        lower = (bits & 0xFFFF).to(torch.int32).to(torch.int16).view(torch.bfloat16)
        return (upper, lower), {"size": size}

    def fsdp_post_all_gather(self, gathered: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        upper, lower = (one.view(torch.int16).to(torch.int32) for one in gathered)
        whole = ((upper << 16) | (lower & 0xFFFF)).view(torch.float32)[: metadata["size"][0]]
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(whole)
            return None
        whole = whole.clone()
        return whole, (whole,)


class Scaled(Wrapped):
    """int8 and the largest value, which the ranks agree on: the whole parameter is an instance of ``Codes``."""

    def fsdp_pre_all_gather(self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> Any:
        largest = self.values.abs().max() if self.values.numel() else torch.zeros(())
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group())
        scale = largest / 127
        codes = torch.zeros(math.ceil(size[0] / mesh.size()), *size[1:], dtype=torch.uint8)
        codes[: self.shape[0]] = (self.values / scale).round().to(torch.int16).add(128).to(torch.uint8)
        return (codes,), (scale,)

    def fsdp_post_all_gather(self, gathered: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        (codes,), (scale,) = gathered, metadata
        if out is not None:
            assert isinstance(out, Codes) and out.codes.untyped_storage()._cdata == codes.untyped_storage()._cdata
            out.scale = scale
            return None
        return Codes(codes, scale), (codes,)


class Codes(Tensor):
    """Whole: codes and a scale, with products of its own (what float8 tensors are)."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, strides=codes.stride(), dtype=torch.float32, device=codes.device
        )

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Codes({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.as_strided.default):
            one, *others = args
            return Codes(func(one.codes, *others), one.scale)
        args, kwargs = pytree.tree_map_only(Codes, lambda x: (x.codes.float() - 128) * x.scale, (args, kwargs or {}))
        return func(*args, **kwargs)


class Extended(nn.Module):
    """Blocks in which one weight is of a subclass and the other, and the biases, are not."""

    reentrant: bool | None = None

    def __init__(self, kind: Callable[[Tensor], Tensor], rows: int = 11) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp(hidden=rows) for _ in range(2))
        self.head = nn.Parameter(torch.randn(WIDTH, 5))
        for block in self.blocks:
            block.up.weight = nn.Parameter(kind(block.up.weight.detach()))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x @ self.head


def values(parameter: Tensor) -> Tensor:
    """This rank's part."""
    local = parameter.detach()._local_tensor  # type: ignore[attr-defined]
    return local.values if isinstance(local, Wrapped) else local


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)


def against_fsdp2(kind: type[Wrapped], rows: int, reshard_after_forward: bool | None) -> list[str]:
    """Losses, shards and gradients of three steps; memory between and after them."""
    found = []
    models = []
    for shard in (fully_shard, torch_fully_shard):
        torch.manual_seed(0)
        # On one rank FSDP2 hands out the first of several tensors only; nothing is lost by this kind, though.
        alone = kind is Split and dist.get_world_size() == 1 and shard is torch_fully_shard
        model = Extended(torch.Tensor.clone if alone else kind, rows)
        for block in model.blocks:
            shard(block, reshard_after_forward=reshard_after_forward)
        models.append((shard(model), optimizer_of(model)))
    state = state_of(models[0][0])
    for step in range(3):
        losses = []
        for model, optimizer in models:
            optimizer.zero_grad()
            loss = squares(model, step)
            with torch.no_grad():
                squares(model, 50)  # evaluation between a forward and its backward
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
        if abs(losses[0] - losses[1]) > 1e-6:
            found.append(f"step {step}: losses {losses}")
        ours, theirs = (dict(model.named_parameters()) for model, _ in models)
        for name, mine in ours.items():
            for what, one, other in (("", mine, theirs[name]), (".grad", mine.grad, theirs[name].grad)):
                # Those of subclasses are cut as FSDP2 cuts them.
                pair = (values(one), values(other)) if name.endswith("up.weight") else (full(one), full(other))
                if pair[0].shape != pair[1].shape or not torch.allclose(*pair, rtol=1e-5, atol=1e-6):
                    found.append(f"step {step}: {name}{what}")
        ledger = state.schedule.pool.ledger
        if step == 1:
            grown = ledger.grown
        if reshard_after_forward is not False and ledger.in_use:
            found.append(f"step {step}: {ledger.in_use} bytes in use at rest")
    if ledger.grown != grown:
        found.append(f"{ledger.grown - grown} allocations in the last step")
    return found


def every_kind() -> list[str]:
    found = []
    for kind, rows, reshard in ((Half, 12, True), (Split, 11, True), (Scaled, 11, None), (Split, 2, None)):
        found += [f"{kind.__name__} {rows} {reshard}: {d}" for d in against_fsdp2(kind, rows, reshard)]
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_training_is_that_of_fsdp2(world_size: int) -> None:
    """Mixed with plain parameters in one bucket; rows that do not divide, and fewer than ranks."""
    assert cluster.run(world_size, every_kind) == [[]] * world_size


def where_fsdp2_cannot() -> list[str]:
    """Parts of unequal size that nobody padded, and whole blocks of rows; what is gathered is encoded."""
    found = []
    rank, ranks, gelu = dist.get_rank(), dist.get_world_size(), torch.nn.functional.gelu
    for policy, block in ((None, 1), (ParamPolicy(block=Block.rows(4)), 4)):
        torch.manual_seed(0)
        model = Extended(Half)
        plain = copy.deepcopy(model)
        shard_children(model, orig_param_policy=lambda name, p, policy=policy: policy, reshard_after_forward=True)
        Half.calls.clear()
        squares(model).backward()
        chunk = math.ceil(math.ceil(11 / block) / ranks) * block
        rows = max(0, min(11, (rank + 1) * chunk) - rank * chunk)
        once = [f"pre 1 {rows}"]
        if Half.calls != [*once, "new", *once, "new", *once, "out", *once, "out"]:
            found.append(str(Half.calls))
        pool = state_of(model).bucket.pool
        pool.timeline = []
        loss = squares(model)
        gathered = [e.nbytes for e in pool.timeline if e.action == "all_gather" and e.owner == "blocks.0"]
        pool.timeline = None
        if 11 * WIDTH * 2 not in gathered:
            found.append(f"gathered {gathered}")
        y = data()
        for one in plain.blocks:
            weight = one.up.weight.detach().values.bfloat16().float()
            y = y + one.down(gelu(torch.nn.functional.linear(y, weight, one.up.bias)))
        if not torch.equal((y @ plain.head).square().mean(), loss):
            found.append(f"{policy}: loss {loss.item()}")
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_unequal_parts_and_whole_blocks(world_size: int) -> None:
    assert cluster.run(world_size, where_fsdp2_cannot) == [[]] * world_size


def around() -> list[str]:
    """What else a parameter goes through: copies, state dicts, conversion, checkpointing, HSDP, frozen, evaluation."""
    found = []
    torch.manual_seed(0)
    model = shard_children(Extended(Split), reshard_after_forward=True)
    with torch.inference_mode():
        first = squares(model)
    copied = copy.deepcopy(model)
    if type(copied.blocks[0].up.weight._local_tensor) is not Split:
        found.append("the copy's shard is of another type")
    saved = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = optimizer_of(model)
    squares(model).backward()
    optimizer.step()
    if not torch.equal(squares(copied), first) or torch.equal(squares(model), first):
        found.append("the copy is not independent")
    model.load_state_dict(saved)
    if not torch.equal(squares(model), first):
        found.append("load_state_dict")
    whole = model.blocks[0].up.weight.full_tensor()
    whole = whole.values if isinstance(whole, Wrapped) else whole
    torch.manual_seed(0)
    plain = Extended(torch.Tensor.clone)
    if not torch.equal(whole, plain.blocks[0].up.weight.detach()):
        found.append("full_tensor")
    # Frozen, and recomputed.
    for reentrant in (False, True):
        grads = []
        for kind in (Split, torch.Tensor.clone):
            torch.manual_seed(0)
            one = Extended(kind)
            one.reentrant = reentrant
            one.blocks[1].up.weight.requires_grad_(False)
            shard_children(one, reshard_after_forward=True)
            one(data().requires_grad_()).square().mean().backward()
            grads.append({n: None if p.grad is None else full(p.grad) for n, p in one.named_parameters()})
        for name, mine in grads[0].items():
            other = grads[1][name]
            if (mine is None) != (other is None) or (mine is not None and not torch.equal(mine, other)):
                found.append(f"checkpoint, reentrant {reentrant}: {name}")
    return found


def test_copies_state_dicts_and_checkpoints() -> None:
    assert cluster.run(2, around) == [[], []]


def replicated() -> list[str]:
    """HSDP, accumulation without communication: as with plain parameters."""
    mesh, grads = cluster.mesh((2, 2), ("replicate", "shard")), []
    for kind in (Split, torch.Tensor.clone):
        torch.manual_seed(0)
        model = shard_children(Extended(kind), mesh=mesh, reshard_after_forward=True)
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            squares(model, micro).backward()
        grads.append({n: full(p.grad) for n, p in model.named_parameters()})
    return [n for n, mine in grads[0].items() if not torch.allclose(mine, grads[1][n], atol=1e-6)]


def test_replicas() -> None:
    assert cluster.run(4, replicated) == [[]] * 4


# ---- errors ----


class OnlyPre(Wrapped):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any: ...


class TwoArguments(Half):
    def fsdp_pre_all_gather(self, mesh: Any, other: Any) -> Any: ...  # type: ignore[override]


class Raises(Half):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        if dist.get_rank() == 1:
            raise KeyError("scale")
        return super().fsdp_pre_all_gather(mesh)


class PadsTooMuch(Half):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (torch.zeros(self.shape[0] + 1, *self.shape[1:]),), None


class OtherDtype(Half):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.values.to(torch.bfloat16 if dist.get_rank() else torch.float16),), None


class Changes(Half):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        (half,), metadata = super().fsdp_pre_all_gather(mesh)
        return (half.float() if len(self.calls) > 4 else half,), metadata


def wrong() -> dict[str, str]:
    found = {}
    for kind in (OnlyPre, TwoArguments):
        found[kind.__name__] = message_of(fully_shard, Extended(kind))
    for kind in (Raises, PadsTooMuch, OtherDtype):
        found[kind.__name__] = message_of(squares, shard_children(Extended(kind)))
    Half.calls.clear()
    changes = shard_children(Extended(Changes), reshard_after_forward=True)
    squares(changes)
    found["Changes"] = message_of(squares, changes)
    scalar, late = Extended(Half), shard_children(Stack())
    scalar.blocks[0].up.weight = nn.Parameter(Half(torch.ones(())))
    found["scalar"] = message_of(fully_shard, scalar)
    found["number"] = message_of(fully_shard, Extended(Half), reshard_after_forward=2)
    found["block"] = message_of(
        fully_shard, Extended(Half), orig_param_policy=lambda n, p: ParamPolicy(block=Block.elements(3))
    )
    late.head.to_local().fsdp_pre_all_gather = late.head._local_tensor.fsdp_pre_all_gather = print
    found["late"] = message_of(squares, late)
    return found


def test_errors_are_the_same_on_all_ranks_and_name_the_parameter() -> None:
    one, other = cluster.run(2, wrong)
    # The one that no rank can foresee: each names what it has.
    assert {**one, "Changes": ""} == {**other, "Changes": ""}
    expected = {
        "OnlyPre": ("ValueError", "'blocks.0.up.weight'", "define both"),
        "TwoArguments": ("ValueError", "mp_policy)"),
        "Raises": ("RuntimeError", "'up.weight'", "KeyError: 'scale'", "rank 1"),
        "PadsTooMuch": ("RuntimeError", "[7, 6]", "[6, 5]", "or 6 on every rank"),
        "OtherDtype": ("RuntimeError", "torch.float16", "only the first dimension"),
        "Changes": ("RuntimeError", "same shapes and dtypes every time"),
        "scalar": ("ValueError", "0-d Half"),
        "number": ("NotImplementedError", "reshard_after_forward"),
        "block": ("ValueError", "Block.rows"),
        "late": ("NotImplementedError", "'head'", "before"),
    }
    assert one.keys() == expected.keys()
    for name, words in expected.items():
        assert one[name].startswith(words[0]) and all(word in one[name] for word in words), (name, one[name])
