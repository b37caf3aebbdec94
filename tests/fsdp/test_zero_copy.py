"""Parameters in forward are views of the gathered buffer, gradients views of the sharded one, and nothing moves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp import MixedPrecisionPolicy, fully_shard
from fsdp.hooks import state_of
from ragged_shard import Block, ParamPolicy, RaggedShard, buffer_of
from tests import cluster
from tests.fsdp.modules import Mlp, Stack, data, squares


def rows_of_three(name: str, parameter: Tensor) -> ParamPolicy:
    return ParamPolicy(block=Block.rows(3))


def stack(**options: object) -> nn.Module:
    torch.manual_seed(0)
    model = Stack()
    for block in model.blocks:
        fully_shard(block, orig_param_policy=rows_of_three, **options)
    return fully_shard(model, orig_param_policy=rows_of_three, **options)


def watch_forward(model: nn.Module, steps: int = 3) -> tuple[list[dict[str, int]], list[str]]:
    """Address of every parameter as each forward sees it, and what is wrong with it."""
    seen: list[dict[str, int]] = []
    wrong: list[str] = []

    def look(module: nn.Module, *_: object) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            label = f"{type(module).__name__}.{name}"
            if isinstance(parameter, DTensor):
                wrong.append(f"{label} is a DTensor in forward")
            if not (isinstance(parameter, nn.Parameter) and parameter.is_leaf and parameter.requires_grad):
                wrong.append(f"{label} is no trainable leaf parameter in forward")

    def address(module: nn.Module, *_: object) -> None:
        parameters = list(module.named_parameters())
        storages = {p.untyped_storage().data_ptr() for _, p in parameters}
        if len(storages) != 1:
            wrong.append(f"{type(module).__name__}: {len(storages)} storages, expected one gathered buffer")
        seen[-1].update({f"{id(module)}.{n}": p.data_ptr() for n, p in parameters})

    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(look))
        if isinstance(module, Mlp):
            handles.append(module.register_forward_pre_hook(address))
    for step in range(steps):
        seen.append({})
        model.zero_grad()
        squares(model, step).backward()
    for handle in handles:
        handle.remove()
    return seen, wrong


def parameters_in_forward() -> list[str]:
    model = stack()
    seen, wrong = watch_forward(model)
    for module in model.modules():
        state = state_of(module)
        assert state is not None or not isinstance(module, Mlp)
    buffers = [b for m in model.modules() if (s := state_of(m)) for b in s.bucket.buffers]
    for buffer in buffers:
        for parameter, view in zip(buffer.parameters, buffer.full.views, strict=True):
            if parameter.full.untyped_storage()._cdata != buffer.full.flat.untyped_storage()._cdata:
                wrong.append(f"{parameter.name} is not a view of the gathered buffer")
            if parameter.full.storage_offset() != view.storage_offset() or parameter.full.shape != view.shape:
                wrong.append(f"{parameter.name} lies elsewhere in the gathered buffer")
    if not all(seen):
        wrong.append("the hooks saw nothing")
    return wrong


def test_parameters_in_forward_are_views_of_the_gathered_buffer() -> None:
    assert cluster.run(2, parameters_in_forward) == [[], []]


def shards_over_steps(zero_to_none: bool) -> list[str]:
    """Parameters, gradients and their memory stay what and where they are."""
    model, wrong = stack(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    parameters = dict(model.named_parameters())
    addresses = {n: p._local_tensor.data_ptr() for n, p in parameters.items()}
    grads: dict[str, int] = {}
    for step in range(4):
        squares(model, step).backward()
        for name, parameter in model.named_parameters():
            if parameter is not parameters[name]:
                wrong.append(f"step {step}: {name} is another object")
            if parameter._local_tensor.data_ptr() != addresses[name]:
                wrong.append(f"step {step}: {name} has moved")
            if not zero_to_none and (
                grads.setdefault(name, parameter.grad._local_tensor.data_ptr())
                != parameter.grad._local_tensor.data_ptr()
            ):
                wrong.append(f"step {step}: {name}.grad has moved")
            for kind, tensor in (("", parameter), (".grad", parameter.grad)):
                placement = tensor.placements[0]
                if not isinstance(placement, RaggedShard):
                    wrong.append(f"{name}{kind} has placement {placement}")
                home = buffer_of(tensor)
                if home is None:
                    wrong.append(f"{name}{kind}: buffer_of finds nothing")
                    continue
                buffer, index = home
                local, flat = tensor._local_tensor, buffer.owned
                inside = (local.data_ptr() - flat.data_ptr()) // flat.element_size()
                if local.numel() and not 0 <= inside <= flat.numel() - local.numel():
                    wrong.append(f"{name}{kind} is no view of its buffer")
                if tuple(buffer.shapes[index]) != tuple(tensor.shape):
                    wrong.append(f"{name}{kind}: shape {buffer.shapes[index]} of buffer_of")
                if local.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr():
                    wrong.append(f"{name}{kind} has a storage of its own")
            if buffer_of(parameter)[0].plan != buffer_of(parameter.grad)[0].plan:
                wrong.append(f"{name}: parameter and gradient have different plans")
        optimizer.step()
        optimizer.zero_grad(set_to_none=zero_to_none)
        for name, parameter in model.named_parameters():
            if (parameter.grad is None) != zero_to_none:
                wrong.append(f"{name}.grad after zero_grad")
    return wrong


@pytest.mark.parametrize("zero_to_none", [True, False])
@pytest.mark.parametrize("world_size", [1, 3])
def test_shards_and_gradients_stay_where_they_are(world_size: int, zero_to_none: bool) -> None:
    assert cluster.run(world_size, shards_over_steps, zero_to_none) == [[]] * world_size


def gaps_of_shards() -> list[float]:
    """The largest value in the alignment gaps of parameters and gradients after training."""
    model = stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        squares(model, step).backward()
        optimizer.step()
        worst = []
        for tensor in [t for p in model.parameters() for t in (p, p.grad)]:
            buffer, _ = buffer_of(tensor)
            covered = torch.zeros_like(buffer.owned, dtype=torch.bool)
            for view in buffer.views:
                start = view.storage_offset() - buffer.flat.storage_offset()
                covered[start : start + view.numel()] = True
            if (~covered).any():
                worst.append(buffer.owned[~covered].abs().max().item())
        optimizer.zero_grad()
    return worst


def test_gaps_hold_zeros() -> None:
    """Norms and fused updates run over the whole flat shard, gaps included."""
    results = cluster.run(3, gaps_of_shards)
    assert any(results)
    assert all(worst == 0.0 for result in results for worst in result)


def slot_is_the_shard(param_dtype: torch.dtype | None) -> list[bool]:
    """While unsharded, this rank's slot of the gathered buffer holds its shard, cast."""
    model = stack(mp_policy=MixedPrecisionPolicy(param_dtype=param_dtype))
    model.unshard()
    for block in model.blocks:
        block.unshard()
    equal = []
    for module in model.modules():
        for buffer in state_of(module).bucket.buffers if state_of(module) else ():
            equal.append(torch.equal(buffer.full.chunk, buffer.params.flat.to(buffer.full.dtype)))
    return equal


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
def test_the_slot_is_written_with_the_shard(param_dtype: torch.dtype | None) -> None:
    for equal in cluster.run(2, slot_is_the_shard, param_dtype):
        assert equal and all(equal)


def saved_views() -> bool:
    """What autograd saved in forward is right again in backward, though its memory was given away in between."""
    model = stack(reshard_after_forward=True)
    loss = squares(model)
    # Another model of the same layout overwrites whatever lies in freed memory.
    torch.full((1 << 16,), 7.0)
    loss.backward()
    first = [p.grad.full_tensor().clone() for p in model.parameters()]
    model.zero_grad()
    for module in model.modules():
        if state_of(module):
            module.set_reshard_after_forward(False, recurse=False)
    model(data()).square().mean().backward()
    return all(torch.equal(a, p.grad.full_tensor()) for a, p in zip(first, model.parameters(), strict=True))


def test_views_that_autograd_saved_are_right_in_backward() -> None:
    assert cluster.run(2, saved_views) == [True, True]
