"""Operators on RaggedShard tensors against one process: which keep the placement, which refuse with advice."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from ragged_shard import RaggedShard
from tests import cluster
from tests.ragged_shard import oracle

SHAPE = (6, 4)
ROWS = RaggedShard((0,), (1, 2, 0, 3))
ELEMENTS = RaggedShard((0, 1), (5, 0, 7, 12))
ROOT = RaggedShard.one_hot(2, 4)
WHOLE = RaggedShard.one_hot(1, 4, ())
LAYOUTS = (ROWS, ELEMENTS, ROOT, WHOLE)
ALL_DIMS = {ROWS: (0,), ELEMENTS: (0, 1), ROOT: (0,), WHOLE: ()}


def values(shape=SHAPE, dtype=torch.float32) -> torch.Tensor:
    return (torch.arange(math.prod(shape)).reshape(shape).to(dtype) - 7) / 8


def place(full, *placements):
    mesh = cluster.mesh((4,) if len(placements) == 1 else (2, 2))
    return distribute_tensor(full, mesh, placements, src_data_rank=None)


def same(result, expected, placement=None, exact=True):
    """``result``: a DTensor, its placement and its global value."""
    if placement is not None:
        assert result.placements == (placement,), result.placements
    whole = result.full_tensor() if isinstance(result, DTensor) else result
    assert whole.dtype == expected.dtype and whole.shape == expected.shape, (whole, expected)
    if exact:
        assert torch.equal(whole, expected) or (
            torch.equal(whole.isnan(), expected.isnan()) and torch.equal(whole.nan_to_num(), expected.nan_to_num())
        ), (whole, expected)
    else:
        torch.testing.assert_close(whole, expected)


UNARY = {
    "neg": lambda x: -x,
    "abs": torch.abs,
    "sign": torch.sign,
    "sqrt": lambda x: x.abs().sqrt(),
    "rsqrt": lambda x: (x.abs() + 1).rsqrt(),
    "exp": torch.exp,
    "pow": lambda x: x**3,
    "isnan": torch.isnan,
    "isfinite": torch.isfinite,
    "logical_not": torch.logical_not,
    "clamp": lambda x: x.clamp(-0.5, 1.0),
    "clamp_min": lambda x: x.clamp_min(0.25),
    "add number": lambda x: x + 1.5,
    "rsub": lambda x: 1 - x,
    "mul number": lambda x: x * 3,
    "div number": lambda x: x / 2,
    "compare number": lambda x: x > 0.5,
    "double": lambda x: x.double(),
    "bfloat16": lambda x: x.bfloat16(),
    "int8": lambda x: x.to(torch.int8),
    "bits": lambda x: x.view(torch.int32),
    "clone": torch.clone,
    "detach": lambda x: x.detach(),
    "contiguous": lambda x: x.contiguous(),
    "zeros_like": torch.zeros_like,
    "ones_like": torch.ones_like,
    "full_like": lambda x: torch.full_like(x, 4.0),
    "zeros_like dtype": lambda x: torch.zeros_like(x, dtype=torch.bfloat16),
    "new_zeros": lambda x: x.new_zeros(x.shape),
    "new_ones": lambda x: x.new_ones(x.shape, dtype=torch.int64),
    "new_full": lambda x: x.new_full(x.shape, 2.5),
    "view as itself": lambda x: x.view(x.shape),
    "reshape as itself": lambda x: x.reshape(x.shape),
    "0-dim tensor": lambda x: x * torch.tensor(2.0, dtype=torch.float64),
    "masked_fill": lambda x: x.masked_fill(x > 0, -1.0),
    "where scalar": lambda x: torch.where(x > 0, x, 0.0),
    "addcmul": lambda x: torch.addcmul(x, x, x + 1, value=0.5),
    "addcdiv": lambda x: torch.addcdiv(x, x, x.abs() + 1, value=2),
    "lerp number": lambda x: x.lerp(x + 1, 0.25),
    "lerp tensor": lambda x: x.lerp(x + 1, x),
    "maximum": lambda x: torch.maximum(x, -x),
    "compare": lambda x: x >= x.abs(),
    "logical_and": lambda x: (x > 0).logical_and(x < 1),
    "tanh": torch.tanh,
    "nan_to_num": torch.nan_to_num,
    "square": torch.square,
    "type_as": lambda x: x.type_as(x),
    "isclose": lambda x: torch.isclose(x, x + 1e-9),
    "dropout off": lambda x: torch.nn.functional.dropout(x, 0.5, training=False),
}


def elementwise():
    full = values()
    for layout in LAYOUTS:
        for name, function in UNARY.items():
            for context in (torch.no_grad, torch.inference_mode):
                with context():
                    try:
                        same(function(place(full, layout)), function(full), layout)
                    except Exception as error:
                        raise AssertionError(f"{name} on {layout} under {context.__name__}: {error}") from error
        assert torch.equal(place(full, layout), place(full, layout))
        assert not torch.equal(place(full, layout), place(full + 1, layout))
        assert torch.allclose(place(full, layout), place(full + 1e-9, layout))


def test_elementwise_operators_keep_the_placement():
    cluster.run(4, elementwise, deadline=60)


IN_PLACE = {
    "add_": lambda x, y: x.add_(y),
    "add_ alpha": lambda x, y: x.add_(y, alpha=-0.5),
    "sub_": lambda x, y: x.sub_(y),
    "mul_": lambda x, y: x.mul_(y),
    "div_": lambda x, y: x.div_(y.abs() + 1),
    "mul_ number": lambda x, y: x.mul_(2),
    "fill_": lambda x, y: x.fill_(3.0),
    "zero_": lambda x, y: x.zero_(),
    "copy_": lambda x, y: x.copy_(y),
    "copy_ cast": lambda x, y: x.copy_(y.double()),
    "masked_fill_": lambda x, y: x.masked_fill_(y > 0, 9.0),
    "addcmul_": lambda x, y: x.addcmul_(y, y),
    "addcdiv_": lambda x, y: x.addcdiv_(y, y.abs() + 1),
    "lerp_": lambda x, y: x.lerp_(y, 0.5),
    "clamp_": lambda x, y: x.clamp_(min=0),
    "sqrt_": lambda x, y: x.abs_().sqrt_(),
    "out": lambda x, y: torch.add(y, y, out=x),
    "constant_": lambda x, y: torch.nn.init.constant_(x, 2.0),
}


def in_place():
    full, other = values(), values().flip(0).contiguous()
    for layout in LAYOUTS:
        for name, function in IN_PLACE.items():
            mine, plain = place(full.clone(), layout), full.clone()
            address = mine.to_local().data_ptr()
            function(mine, place(other, layout))
            function(plain, other)
            same(mine, plain, layout)
            assert mine.to_local().data_ptr() == address, name


def test_in_place_operators_write_into_the_shard():
    cluster.run(4, in_place)


def operands():
    full = values()
    # Free cuts and broadcasts.
    for layout in LAYOUTS:
        x = place(full, layout)
        same(x + place(full, Replicate()), full * 2, layout)
        same(place(full, Replicate()) * x, full * full, layout)
        same(x * place(torch.tensor(3.0), Replicate()), full * 3, layout)
        same(x + place(torch.ones(1, 1), Replicate()), full + 1, layout)
    row, column = torch.arange(4.0), torch.arange(6.0)[:, None]
    for layout in (ROWS, ROOT):
        x = place(full, layout)
        same(x + place(row, Replicate()), full + row, layout)
        same(x * place(row[None], Replicate()), full * row, layout)
        same(x + place(column, Replicate()), full + column, layout)
    cube = values((3, 2, 4))
    x = place(cube, RaggedShard((0, 1), (1, 2, 0, 3)))
    same(x + place(row[None, None], Replicate()), cube + row)
    same(x + place(row[None], Replicate()), cube + row)
    same(place(full, WHOLE) + place(row, Replicate()), full + row, WHOLE)
    for layout, wrong in ((ELEMENTS, column), (ELEMENTS, row)):
        with pytest.raises(RuntimeError, match=r"differs between units.*redistribute\(\)"):
            place(full, layout) + place(wrong, Replicate())
    # copy_ redistributes its source.
    for target in (*LAYOUTS, Replicate(), Shard(0), Shard(1)):
        for source in (*LAYOUTS, Replicate(), Shard(0), Shard(1)):
            x = place(torch.zeros(SHAPE), target)
            x.copy_(place(full, source))
            same(x, full, target)


def test_operands_are_cut_or_broadcast_where_that_is_free():
    cluster.run(4, operands)


def two_mesh_dims():
    full = values((8, 6))
    ragged, elements = RaggedShard((0,), (1, 3)), RaggedShard((0, 1), (5, 7))
    for spec in (
        (ragged, Shard(0)),
        (ragged, Shard(1)),
        (Shard(0), ragged),
        (Shard(1), elements),
        (Replicate(), elements),
    ):
        x = place(full, *spec)
        same((x + x).mul_(2) - x, full * 3)
        same(x + place(full, Replicate(), Replicate()), full * 2)
        for order in (1, 2, math.inf, -math.inf, 0):
            same(torch.linalg.vector_norm(x, order), torch.linalg.vector_norm(full, order), exact=False)
        for function in (torch.sum, torch.mean, torch.max, torch.min, torch.var, torch.std):
            same(function(x), function(full), exact=False)
        same(torch.zeros_like(x).copy_(x), full)
    row = torch.arange(6.0)
    for spec in ((ragged, Shard(1)), (Shard(0), ragged)):
        same(place(full, *spec) + place(row, Replicate(), Replicate()), full + row)
    same(place(full, ragged, Shard(1)) + place(row, Replicate(), Shard(0)), full + row)
    # HSDP: gradients that are still to be reduced over replicas add up, and nothing else.
    mesh, partial = cluster.mesh((2, 2)), (Partial(), ragged)
    local = oracle.held(full, (2, 2), mesh.get_coordinate(), (Replicate(), ragged))
    g = DTensor.from_local(local, mesh, partial, shape=full.shape, stride=full.stride())
    total = (g + g).mul_(0.5).sub_(g / 2)
    assert total.placements == partial
    same(total, full)
    for wrong in (
        lambda: g * g,
        lambda: g + 1,
        lambda: g.abs(),
        lambda: g.fill_(1.0),
        lambda: torch.linalg.vector_norm(g),
    ):
        with pytest.raises(RuntimeError, match="Partial"):
            wrong()
    same(torch.zeros_like(g), torch.zeros_like(full))
    same(torch.ones_like(g), torch.ones_like(full))
    same(g.sum(), full.sum() * 2, exact=False)


def test_two_mesh_dims():
    cluster.run(4, two_mesh_dims)


REDUCTIONS = {
    "sum": torch.sum,
    "sum dims": lambda x: x.sum(tuple(range(x.ndim))),
    "sum keepdim": lambda x: x.sum(tuple(range(x.ndim)), keepdim=True),
    "mean": torch.mean,
    "mean keepdim": lambda x: x.mean(tuple(range(x.ndim)), keepdim=True),
    "max": torch.max,
    "min": torch.min,
    "amax": torch.amax,
    "amin": lambda x: x.amin(tuple(range(x.ndim)), keepdim=True),
    "prod": lambda x: torch.prod(x.clamp(0.5, 1.5)),
    "nansum": torch.nansum,
    "any": lambda x: (x > 1).any(),
    "all": lambda x: (x > -5).all(),
    "var": torch.var,
    "var biased": lambda x: x.var(correction=0),
    "std": torch.std,
    "std keepdim": lambda x: x.std(tuple(range(x.ndim)), keepdim=True),
    **{f"norm {p}": (lambda x, p=p: torch.linalg.vector_norm(x, p)) for p in (0, 1, 2, 3, math.inf, -math.inf)},
    **{
        f"norm {p} dims": (lambda x, p=p: torch.linalg.vector_norm(x, p, (0, 1)))
        for p in (0, 1, 2, math.inf, -math.inf)
    },
    "Tensor.norm": lambda x: x.norm(),
}


def reductions():
    for full in (values(), values().abs() + 3, -values().abs() - 3):
        for layout in LAYOUTS:
            for name, function in REDUCTIONS.items():
                try:
                    same(function(place(full, layout)), function(full), exact=False)
                except Exception as error:
                    raise AssertionError(f"{name} on {layout}: {error}") from error
    counts = torch.arange(24).reshape(SHAPE)
    for layout in LAYOUTS:
        for function in (torch.sum, torch.max, torch.min):
            same(function(place(counts, layout)), function(counts))
    mean, variance = torch.var_mean(place(values(), ROWS))
    expected = torch.var_mean(values())
    same(mean, expected[0], exact=False)
    same(variance, expected[1], exact=False)
    # Inside a unit nothing moves; over the whole prefix the result is still to be reduced.
    full = values((6, 4, 3))
    x = place(full, ROWS)
    for function in (
        lambda t: t.sum(-1),
        lambda t: t.mean((1, 2), keepdim=True),
        lambda t: t.amax(1),
        lambda t: t.max(2)[0],
        lambda t: t.max(2)[1],
        lambda t: torch.linalg.vector_norm(t, 2, dim=1),
        lambda t: torch.linalg.vector_norm(t, math.inf, dim=-1, keepdim=True),
        lambda t: t.var((1, 2)),
        lambda t: (t > 0).any(1),
    ):
        same(function(x), function(full), ROWS, exact=False)
    for function in (
        lambda t: t.sum(0),
        lambda t: t.mean(0, keepdim=True),
        lambda t: t.amin((0, 2)),
        lambda t: torch.linalg.vector_norm(t, 2, dim=0),
        lambda t: torch.linalg.vector_norm(t, math.inf, dim=(0, 1), keepdim=True),
    ):
        same(function(x), function(full), exact=False)
        same(function(place(full, RaggedShard((0,), (6, 0, 0, 0)))), function(full), exact=False)
    same(place(full, RaggedShard((0, 1), (5, 0, 7, 12))).sum((0, 1)), full.sum((0, 1)), exact=False)
    for order, dims in ((2, 0), (2, 1)):
        with pytest.raises(RuntimeError, match="some but not all"):
            torch.linalg.vector_norm(place(full, RaggedShard((0, 1), (5, 0, 7, 12))), order, dim=dims)


def test_reductions_over_uneven_and_empty_shards():
    """pytorch/pytorch#173238: the inf-norm of an empty shard raised on its rank, and the others waited for ever."""
    cluster.run(4, reductions, deadline=60)


def views():
    full = values((6, 2, 2))
    for layout, shape, k in (
        (ROWS, (6, 4), 1),
        (ROWS, (2, 3, 4), 2),
        (RaggedShard((0, 1), (5, 0, 7, 0)), (12, 2), 1),
        (RaggedShard((0, 1, 2), (5, 0, 7, 12)), (24,), 1),
        (RaggedShard((0, 1, 2), (5, 0, 7, 12)), (3, 8), 2),
    ):
        x = place(full, layout).requires_grad_()
        y = x.view(shape)
        assert y.placements[0].dims == tuple(range(k))
        assert y.to_local().data_ptr() == x.to_local().data_ptr()
        same(y, full.view(shape))
        y.backward(place(full.view(shape), y.placements[0]))
        same(x.grad, full, layout)


def test_views_that_keep_the_flattened_prefix_move_nothing():
    cluster.run(4, views)


def gradients_of_operators():
    full = values()
    row = torch.arange(4.0)
    for layout in (ROWS, ROOT):
        x = place(full, layout).requires_grad_()
        bias = place(row, Replicate()).requires_grad_()
        ((x * x + bias) * 2).sum().backward()
        plain, plain_bias = full.clone().requires_grad_(), row.clone().requires_grad_()
        ((plain * plain + plain_bias) * 2).sum().backward()
        same(x.grad, plain.grad, layout)
        same(bias.grad, plain_bias.grad)
        for function in (torch.mean, torch.linalg.vector_norm, torch.var):
            x.grad = plain.grad = None
            function(x * 2).backward()
            function(plain * 2).backward()
            same(x.grad, plain.grad, exact=False)


def test_gradients_of_operators():
    cluster.run(4, gradients_of_operators)


def numbers():
    full = values()
    for layout in (*LAYOUTS, Shard(0)):
        x = place(full, layout)
        assert x.sum().item() == full.sum().item()
        assert abs(torch.linalg.vector_norm(x).item() - full.norm().item()) < 1e-5
        assert bool((x > 1.9).any()) is True and bool((x > 2.9).any()) is False
        assert bool(torch.isfinite(x).all()) is True


def test_a_number_read_from_a_partial_result_is_the_global_one():
    """pytorch/pytorch#170862: item() of a norm that was still Partial gave the norm of one rank."""
    cluster.run(4, numbers)


# ---- lists ----


def lists():
    fulls = [values(), values() * 2, values((8, 3)), values() + 1]
    layouts = [ROWS, ELEMENTS, Shard(0), ROOT]
    others = [f.flip(0).contiguous() for f in fulls]

    def lists_of(tensors):
        return [place(t.clone(), layout) for t, layout in zip(tensors, layouts, strict=True)]

    def check(function, *lists):
        mine, plain = [lists_of(x) for x in lists], [[t.clone() for t in x] for x in lists]
        result, expected = function(*mine), function(*plain)
        for got, want in zip(
            result if result is not None else mine[0], expected if expected is not None else plain[0], strict=True
        ):
            same(got, want, exact=False)

    positive = [f.abs() + 1 for f in fulls]
    for function in (
        torch._foreach_add,
        torch._foreach_add_,
        torch._foreach_sub,
        torch._foreach_mul,
        torch._foreach_mul_,
        torch._foreach_maximum,
        torch._foreach_copy_,
    ):
        check(function, fulls, others)
    check(lambda x, y: torch._foreach_div(x, y), fulls, positive)
    check(lambda x: torch._foreach_add(x, 2.0), fulls)
    check(lambda x: torch._foreach_mul_(x, [1.0, 2.0, 3.0, 4.0]), fulls)
    check(lambda x: torch._foreach_mul_(x, torch.tensor(0.5)), fulls)
    check(torch._foreach_sqrt, positive)
    check(torch._foreach_neg, fulls)
    check(torch._foreach_reciprocal, positive)
    check(torch._foreach_zero_, fulls)
    check(lambda x, y: torch._foreach_lerp_(x, y, 0.25), fulls, others)
    check(lambda x, y, z: torch._foreach_addcdiv_(x, y, z, 0.5), fulls, others, positive)
    check(lambda x, y, z: torch._foreach_addcmul(x, y, z, [1.0, 2.0, 3.0, 4.0]), fulls, others, positive)
    check(lambda x: torch._foreach_pow(x, 2), fulls)
    check(lambda x: torch._foreach_clamp_min(x, 0.0), fulls)
    for order in (0, 1, 2, math.inf):
        check(lambda x, p=order: torch._foreach_norm(x, p), fulls)
    check(torch._foreach_max, [-f.abs() - 1 for f in fulls])


def test_foreach_lists_may_mix_layouts():
    cluster.run(4, lists, deadline=40)


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "SGD fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, 0.1, amsgrad=True, foreach=True),
    "Adam loop": lambda p: torch.optim.Adam(p, 0.1, foreach=False),
    "Adam fused": lambda p: torch.optim.Adam(p, 0.1, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.1, foreach=True),
    "AdamW loop": lambda p: torch.optim.AdamW(p, 0.1, foreach=False),
    "AdamW fused": lambda p: torch.optim.AdamW(p, 0.1, fused=True, amsgrad=True),
    "AdamW tensor lr": lambda p: torch.optim.AdamW(p, torch.tensor(0.1), foreach=False),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "Adagrad foreach": lambda p: torch.optim.Adagrad(p, 0.1, foreach=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.1, momentum=0.5, centered=True),
    "Adamax": lambda p: torch.optim.Adamax(p, 0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, 0.1, foreach=True),
}


def optimizers():
    torch.manual_seed(3)
    fulls = [torch.randn(6, 4), torch.randn(6, 4), torch.randn(5), torch.randn(8, 3), torch.randn(())]
    layouts = [ROWS, ELEMENTS, RaggedShard((0,), (0, 2, 0, 3)), Shard(0), RaggedShard((), (0, 1, 0, 0))]
    gradients = [[torch.randn_like(f) for f in fulls] for _ in range(3)]
    for name, make in OPTIMIZERS.items():
        plain = [torch.nn.Parameter(f.clone()) for f in fulls]
        mine = [torch.nn.Parameter(place(f.clone(), layout)) for f, layout in zip(fulls, layouts, strict=True)]
        both = [make(plain), make(mine)]
        for row in gradients:
            for p, q, g, layout in zip(plain, mine, row, layouts, strict=True):
                p.grad, q.grad = g.clone(), place(g.clone(), layout)
            for order in (1, 2, math.inf):
                for foreach in (False, True):
                    total = torch.nn.utils.clip_grad_norm_(plain, 0.5, order, foreach=foreach)
                    other = torch.nn.utils.clip_grad_norm_(mine, 0.5, order, foreach=foreach)
                    same(other, total, exact=False)
            for optimizer in both:
                optimizer.step()
        for p, q, layout in zip(plain, mine, layouts, strict=True):
            assert q.placements == (layout,)
            torch.testing.assert_close(q.full_tensor(), p.detach(), rtol=1e-5, atol=1e-6, msg=lambda m: f"{name}: {m}")  # noqa: B023


def test_torch_optimizers_and_clip_grad_norm_agree_with_one_process():
    """pytorch/pytorch#159856, #165962, #170862: the norm is the global one, and not that of one rank."""
    cluster.run(4, optimizers, deadline=60)


def refusing_optimizers():
    x = torch.nn.Parameter(place(torch.randn(6, 6), RaggedShard((0, 1), (5, 1, 10, 20))))
    for make in (lambda p: torch.optim.Adafactor([p]), lambda p: torch.optim.Muon([p])):
        optimizer = make(x)
        x.grad = place(torch.randn(6, 6), *x.placements)
        with pytest.raises(RuntimeError, match=r"redistribute\(\)"):
            optimizer.step()


def test_adafactor_and_muon_refuse():
    cluster.run(4, refusing_optimizers)


def scaled_gradients():
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    parameter = torch.nn.Parameter(place(values(), ROWS))
    optimizer = torch.optim.SGD([parameter], 1.0)
    for poison in (False, True):
        g = values().clone()
        if poison:
            g[4, 1] = math.inf
        scaler.scale(torch.ones(()))
        parameter.grad = place(g * 4, ROWS)
        before = parameter.full_tensor().detach()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        expected = before if poison else before - g
        assert torch.equal(parameter.full_tensor(), expected), "an inf on one rank must stop the step on all"


def test_grad_scaler_sees_an_inf_on_any_rank():
    cluster.run(4, scaled_gradients)


# ---- refusals ----

REFUSED = {
    "matmul": lambda x: x @ x.t() if False else torch.mm(x, place(torch.ones(4, 4), Replicate())),
    "linear": lambda x: torch.nn.functional.linear(place(torch.ones(2, 4), Replicate()), x),
    "t": lambda x: x.t(),
    "view": lambda x: place(values(), ROWS if x.placements[0] == ELEMENTS else x.placements[0]).view(3, 8),
    "flatten": lambda x: place(values(), ROWS if x.placements[0] == ELEMENTS else x.placements[0]).flatten(),
    "index": lambda x: x[0],
    "slice": lambda x: x[:, 1:],
    "stack": lambda x: torch.stack([x, x]),
    "cat": lambda x: torch.cat([x, x]),
    "argmax": lambda x: x.argmax(),
    "cumsum": lambda x: x.cumsum(0),
    "softmax": lambda x: x.softmax(0),
    "topk": lambda x: x.topk(2),
    "item": lambda x: place(torch.ones(1), RaggedShard((0,), (0, 1, 0, 0))).item(),
    "expand": lambda x: x.expand(2, *x.shape),
    "other layout": lambda x: x + place(values(), RaggedShard((0,), (3, 3, 0, 0))),
    "shard": lambda x: x + place(values(), Shard(0)),
    "into replicate": lambda x: place(values(), Replicate()).add_(x),
    "repeat a row": lambda x: place(values((6, 6, 4)), Replicate()) + x,
    "svd": lambda x: torch.linalg.svd(x),
    "partial sum": lambda x: DTensor.from_local(values(), cluster.mesh((4,)), [Partial()]) + x,
}


def refusals():
    for layout in (ROWS, ELEMENTS, ROOT):
        for name, function in REFUSED.items():
            for context in (torch.no_grad, torch.inference_mode):
                with context():
                    x = place(values(), layout)
                    try:
                        result = function(x)
                    except RuntimeError as error:
                        assert "Ragged" in str(error) and "redistribute()" in str(error), (name, error)
                    else:
                        raise AssertionError(f"{name} on {layout} returned {result}")
    dist.barrier()


def test_what_needs_communication_refuses_with_advice_on_every_rank():
    cluster.run(4, refusals)
