"""What went wrong once with RaggedShard tensors, by its symptom."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor as dtensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from ragged_shard import RaggedShard
from tests import cluster

ROWS = RaggedShard((0,), (1, 2, 0, 3))


def values(*shape: int) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).view(shape) - 3


def placed(full: torch.Tensor, *placements, mesh_shape=(4,)) -> DTensor:
    return distribute_tensor(full, cluster.mesh(mesh_shape), placements, src_data_rank=None)


def message_of(function, kind: type[Exception] = RuntimeError) -> str:
    """The error's message, the same on every rank."""
    with pytest.raises(kind) as caught:
        function()
    messages = [None] * dist.get_world_size()
    dist.all_gather_object(messages, str(caught.value))
    assert len(set(messages)) == 1, messages
    return str(caught.value)


def means_of_halves():
    for full in (torch.full((600, 200), 2.0, dtype=torch.float16), torch.full((6, 3), 3.0, dtype=torch.bfloat16)):
        tensor = placed(full, ROWS)
        torch.testing.assert_close(tensor.mean().full_tensor(), full.mean())
        torch.testing.assert_close(tensor.mean(0).full_tensor(), full.mean(0))


def test_the_mean_of_16_bit_values_does_not_overflow():
    cluster.run(4, means_of_halves)


def truths_as_numbers():
    full = values(6, 4)
    for condition in (full > -10, full > 5, full > 100):
        tensor = placed(condition, ROWS)
        for number in (lambda t: t.any().float(), lambda t: t.any(0).float() * 2, lambda t: t.all().float() * 2):
            assert torch.equal(number(tensor).full_tensor(), number(condition))


def test_any_is_one_and_not_the_number_of_ranks():
    cluster.run(4, truths_as_numbers)


def rounded_addends():
    mesh = cluster.mesh((2, 2))
    column = mesh.get_local_rank(1)
    full = values(6, 2)
    local = full[:4] if column == 0 else full[4:]
    tensor = DTensor.from_local(
        local, mesh, [Partial(), RaggedShard((0,), (2, 1))], shape=full.shape, stride=full.stride()
    )
    for rounds in (
        lambda t: torch.div(t, 3, rounding_mode="floor"),
        lambda t: (t * 0.3).to(torch.int32),
        lambda t: t.bool(),
        lambda t: torch.zeros_like(t, dtype=torch.int64).copy_(t),
    ):
        assert "not linear" in message_of(lambda f=rounds: f(tensor))
    assert torch.equal(tensor.double().full_tensor(), 2 * full.double())
    assert torch.equal((tensor / 2).full_tensor(), full)


def test_addends_are_not_rounded_before_they_are_summed():
    cluster.run(4, rounded_addends)


def wrong_sources():
    for source in (4, -1):
        message = message_of(
            lambda s=source: distribute_tensor(values(6, 4), cluster.mesh((4,)), [ROWS], src_data_rank=s), ValueError
        )
        assert "src_data_rank" in message


def test_a_source_that_is_no_rank_is_one_error_on_all_of_them():
    cluster.run(4, wrong_sources)


def negative_norms():
    full = values(6, 4) + 5
    tensor = placed(full, ROWS)
    for order in (-1, -2.5, -math.inf):
        torch.testing.assert_close(tensor.norm(order).full_tensor(), full.norm(order))
        torch.testing.assert_close(tensor.norm(order, dim=0).full_tensor(), full.norm(order, dim=0))


def test_norms_of_negative_order_do_not_fail_on_empty_ranks():
    cluster.run(4, negative_norms)


def means_of_nothing():
    full = torch.empty(0, 3)
    variance, mean = torch.var_mean(placed(full, ROWS))
    assert variance.full_tensor().isnan() and mean.full_tensor().isnan()


def test_the_mean_of_nothing_is_nan():
    cluster.run(4, means_of_nothing)


def transposed_operands():
    full, other = values(6, 4), values(4, 6)
    tensor = placed(full, ROWS).requires_grad_()
    result = placed(other, Replicate()).t() + tensor
    assert result.stride() == (4, 1) and torch.equal(result.full_tensor(), other.t() + full)
    result.to_local().sum().backward()
    assert torch.equal(tensor.grad.full_tensor(), torch.ones(6, 4))
    small = values(4, 3).t()
    wide = placed(small, Replicate()) + placed(values(6, 3, 4), ROWS)
    assert wide.to_local().is_contiguous() and torch.equal(wide.full_tensor(), small + values(6, 3, 4))


def test_a_transposed_operand_does_not_transpose_the_result():
    cluster.run(4, transposed_operands)


def memory_formats():
    tensor = placed(values(6, 4, 2, 2), ROWS)
    tensor.clone(), tensor.contiguous(), torch.zeros_like(tensor)  # what DTensor remembers must not answer for others
    for function in (
        lambda t: t.to(memory_format=torch.channels_last),
        lambda t: t.contiguous(memory_format=torch.channels_last),
        lambda t: t.clone(memory_format=torch.channels_last),
        lambda t: torch.zeros_like(t, memory_format=torch.channels_last),
        lambda t: torch.rand_like(t, memory_format=torch.channels_last),
    ):
        assert "memory format" in message_of(lambda f=function: f(tensor))


def test_channels_last_is_refused_before_a_checkpoint_fails():
    cluster.run(4, memory_formats)


INNER = {
    "sum": lambda t: t.sum(1),
    "sum keepdim": lambda t: t.sum(1, keepdim=True),
    "mean of two dims": lambda t: t.mean((1, 2)),
    "norm": lambda t: t.norm(dim=2),
    "amax": lambda t: t.amax(-1),
    "variance": lambda t: t.var(2),
    "each row over its norm": lambda t: t / t.norm(dim=2, keepdim=True),
    "row by row": lambda t: t.sum((1, 2), keepdim=True) * t,
    "unsqueeze": lambda t: t.unsqueeze(0) * t.unsqueeze(0),
    "squeeze": lambda t: t.unsqueeze(2).squeeze(2),
    "expand": lambda t: t.sum(2, keepdim=True).expand(6, 2, 5),
}


def inner_gradients():
    full = values(6, 2, 4) + 3.5
    for layout in (ROWS, RaggedShard.one_hot(2, 4)):
        for name, function in INNER.items():
            plain = full.clone().requires_grad_()
            expected = function(plain)
            weight = torch.linspace(0.5, 2, expected.numel()).view(expected.shape)
            (expected * weight).sum().backward()
            tensor = placed(full, layout).requires_grad_()
            result = function(tensor)
            (result.redistribute(placements=[Replicate()]) * placed(weight, Replicate())).sum().backward()
            torch.testing.assert_close(result.full_tensor(), expected, msg=lambda text, n=name: f"{n}: {text}")
            torch.testing.assert_close(tensor.grad.full_tensor(), plain.grad, msg=lambda text, n=name: f"{n}: {text}")
    sums = placed(full, ROWS).sum((1, 2), keepdim=True)
    product = placed(full, Replicate()) * sums
    assert product.placements == (ROWS,)
    assert torch.equal(product.full_tensor(), full * full.sum((1, 2), keepdim=True))
    message_of(lambda: placed(full, Replicate()).mul_(sums))
    other = placed(full, RaggedShard((0,), (3, 2, 0, 1))).sum((1, 2), keepdim=True)
    assert "operands are placed" in message_of(lambda: placed(full, ROWS) * other)
    assert "repeat units" in message_of(lambda: placed(full, ROWS).expand(2, 6, 2, 4))


def test_what_is_reduced_inside_units_has_a_gradient_and_scales_its_rows():
    cluster.run(4, inner_gradients)


def beside_tensor_parallelism():
    full = values(4, 6)
    layout = (RaggedShard((0,), (1, 3)), Shard(1))
    tensor = placed(full, *layout, mesh_shape=(2, 2))
    sums = placed(full.sum(1, keepdim=True), RaggedShard((0,), (1, 3)), Replicate(), mesh_shape=(2, 2))
    replicated = placed(full.sum(1, keepdim=True), Replicate(), Replicate(), mesh_shape=(2, 2))
    for operand in (sums, replicated):
        result = tensor + operand
        assert result.placements == layout and torch.equal(result.full_tensor(), full + full.sum(1, keepdim=True))


def test_a_value_for_each_row_is_cut_like_the_rows_beside_tensor_parallelism():
    cluster.run(4, beside_tensor_parallelism)


def made_whole():
    mesh = cluster.mesh((4,))
    for function, plain in ((dtensor.rand, torch.rand), (dtensor.randn, torch.randn)):
        torch.manual_seed(5)
        made = function(6, 4, device_mesh=mesh, placements=[ROWS])
        torch.manual_seed(5)
        assert made.placements == (ROWS,) and torch.equal(made.full_tensor(), plain(6, 4))
    assert "do not divide" in message_of(lambda: dtensor.zeros(7, device_mesh=mesh, placements=[ROWS]), ValueError)


def test_random_tensors_can_be_made_and_wrong_layouts_cannot():
    cluster.run(4, made_whole)


def without_memory():
    tensor = placed(torch.empty(6, 4, device="meta"), ROWS)
    for target in (Replicate(), Shard(1), RaggedShard.one_hot(2, 4)):
        moved = tensor.redistribute(placements=[target])
        expected = placed(values(6, 4), target)
        assert moved.is_meta and moved.to_local().shape == expected.to_local().shape


def test_meta_tensors_are_redistributed_without_a_collective():
    cluster.run(4, without_memory)


def activations():
    functional = torch.nn.functional
    names = ("elu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "softplus", "softshrink")
    for name in (*names, "gelu", "silu", "mish", "relu6", "celu", "selu", "threshold"):
        arguments = (0.5, -1.0) if name == "threshold" else ()
        full = (values(6, 4) / 4).requires_grad_()
        getattr(functional, name)(full, *arguments).square().sum().backward()
        tensor = placed(full.detach(), ROWS).requires_grad_()
        getattr(functional, name)(tensor, *arguments).square().sum().backward()
        torch.testing.assert_close(tensor.grad.full_tensor(), full.grad, msg=lambda text, n=name: f"{n}: {text}")


def test_activations_have_gradients():
    cluster.run(4, activations)


def safetensors(directory: str):
    full = {"pieces": values(6, 4), "rows": values(6, 3), "other": values(4, 6)}
    layouts = {"pieces": RaggedShard((0, 1), (5, 0, 6, 13)), "rows": ROWS, "other": RaggedShard((0, 1), (1, 10, 13, 0))}
    state = {name: placed(tensor, layouts[name]) for name, tensor in full.items()}
    files = {"pieces": 1, "rows": 2, "other": 1}
    for folder, options in (("apart", {}), ("together", {"enable_consolidation": True, "fqn_to_index_mapping": files})):
        path = f"{directory}/{folder}"
        dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(path, save_distributed=True, **options))
        loaded = {name: placed(torch.zeros_like(full[name]), layout) for name, layout in layouts.items()}
        dcp.load(loaded, storage_reader=dcp.HuggingFaceStorageReader(path))
        for name, tensor in full.items():
            assert torch.equal(loaded[name].full_tensor(), tensor), (folder, name)


def test_safetensors_hold_every_box_of_a_shard(tmp_path):
    cluster.run(4, safetensors, str(tmp_path))
