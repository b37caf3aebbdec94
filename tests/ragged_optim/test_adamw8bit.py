"""AdamW8bit.

Exact for every cut between tiles, eager and C++ alike, close to fp32 AdamW, one bad element harms only itself.
"""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

import ragged_optim
from ragged_optim import Block, ParamPolicy, kernels
from ragged_optim import quantize as q
from ragged_optim.layout import Extent
from ragged_optim.rules import adamw8bit
from tests import cluster
from tests.ragged_optim.models import full, shard, train

MOMENTUM_8BIT = {"momentum_8bit": True}
SHAPES = [(96, 100), (161, 37), (3, 50, 8), (4, 64, 33), (5000,), (7, 3), (0, 5)]
OPTIONS: dict[str, Any] = {"min_8bit_size": 256, "weight_decay": 0.1}


def run(name: str, use_kernel: bool, *args: Any, **kwargs: Any) -> dict[str, list[str]]:
    real = adamw8bit.adamw8bit_kernel
    if not use_kernel:
        adamw8bit.adamw8bit_kernel = lambda: None
    try:
        return train(getattr(ragged_optim, name), *args, **kwargs)
    finally:
        adamw8bit.adamw8bit_kernel = real


KERNELS = [False] if kernels.adamw8bit_kernel() is None else [False, True]


@pytest.mark.parametrize("use_kernel", KERNELS, ids=["eager", "C++"][: len(KERNELS)])
@pytest.mark.parametrize(("name", "dtype"), [("AdamW8bit", torch.float32), ("Adam8bit", torch.bfloat16)])
def test_worlds_1_to_4_end_alike(name: str, dtype: torch.dtype, use_kernel: bool) -> None:
    options = {**OPTIONS, "bf16_stochastic_round": dtype == torch.bfloat16}
    for world in (1, 2, 3, 4):
        expected = run(name, use_kernel, SHAPES, dtype=dtype, seed=world, **options)
        for got in cluster.run(world, run, name, use_kernel, SHAPES, "tiles", dtype=dtype, seed=world, **options):
            assert got == expected, world


@pytest.mark.parametrize("use_kernel", KERNELS, ids=["eager", "C++"][: len(KERNELS)])
@pytest.mark.parametrize("cuts", [(32,), (64,), (32, 64)], ids=str)
@pytest.mark.parametrize("format", ["float", "dynamic"])
def test_cutting_at_a_tile_changes_no_8_bit_value(format: str, cuts: tuple[int, ...], use_kernel: bool) -> None:
    # bitsandbytes and torchao re-block the local memory: 27 to 42 % of the values change.
    whole = nn.Parameter(full((96, 100), 0))
    rule = adamw8bit.AdamW8bitRule()
    group = {**rule.defaults, "min_8bit_size": 0, "format": format}
    real = adamw8bit.adamw8bit_kernel
    if not use_kernel:
        adamw8bit.adamw8bit_kernel = lambda: None
    try:
        results = []
        for edges in ((0, 96), (0, *cuts, 96)):
            parts: list[list[Tensor]] = []
            for start, stop in itertools.pairwise(edges):
                param = whole.detach()[start:stop].clone()
                bands = -(-stop // 32) - start // 32
                state = {"step": torch.zeros(()), "salt": torch.tensor(7)}
                for moment in ("exp_avg", "exp_avg_sq"):
                    state[f"{moment}.codes"] = torch.zeros(stop - start, 100, dtype=torch.uint8)
                    state[f"{moment}.scales"] = torch.zeros(bands, 4)
                for step in range(3):
                    grad = full((96, 100), 1 + step)[start:stop]
                    rule.update(param, grad, state, group, Extent((96, 100), start * 100, stop * 100))
                parts.append([param, *(state[key] for key in sorted(state) if "." in key)])
            results.append([torch.cat(tensors) for tensors in zip(*parts, strict=True)])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        assert (results[0][1] != 0).float().mean() > 0.9
    finally:
        adamw8bit.adamw8bit_kernel = real


def test_the_dynamic_map_is_bitsandbytes_own() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    for signed in (True, False):
        theirs = functional.create_dynamic_map(signed=signed)
        torch.testing.assert_close(q.dynamic_map(torch.device("cpu"), signed=signed), theirs, rtol=1e-6, atol=1e-9)
    assert float(q.dynamic_map(torch.device("cpu"), signed=True)[q.DYNAMIC_ZERO]) == 0.0


@pytest.mark.parametrize("use_kernel", KERNELS, ids=["eager", "C++"][: len(KERNELS)])
def test_the_dynamic_format_is_the_same_for_worlds_1_to_3(use_kernel: bool) -> None:
    options = {**OPTIONS, "format": "dynamic"}
    expected = run("AdamW8bit", use_kernel, SHAPES, **options)
    for world in (1, 2, 3):
        for got in cluster.run(world, run, "AdamW8bit", use_kernel, SHAPES, "tiles", **options):
            assert got == expected, world


@given(values=st.lists(st.floats(0.0, 1.0, width=32), min_size=1, max_size=40))
def test_dynamic_codes_are_neighbours_and_zero_is_exact(values: list[float]) -> None:
    levels = q.dynamic_map(torch.device("cpu"), signed=False).square()
    squares = torch.tensor(values)
    for dither in (0, (1 << 20) - 1):
        code = q.encode_dynamic_square(squares.clone(), torch.full((len(values),), dither, dtype=torch.int32)).long()
        assert (levels[(code - 1).clamp(min=0)] <= squares).all() and (
            squares <= levels[(code + 1).clamp(max=255)]
        ).all()
    assert (code[squares == 0] == 0).all()


def test_the_dynamic_tables_find_what_a_search_finds() -> None:
    cpu = torch.device("cpu")
    middles = q.dynamic_tables(cpu)[1][:-1]
    squares = q.dynamic_tables(cpu)[2][:-1]
    up, down = torch.tensor(2.0), torch.tensor(-2.0)
    spread = full((20_000,), 0).mul(8).exp().neg().exp()  # many decades
    m = torch.cat(
        [middles, middles.nextafter(up), middles.nextafter(down), spread, -spread, torch.tensor([0.0, -0.0, 1.0, -1.0])]
    )
    m = m.clamp(-1, 1)
    assert torch.equal(q.encode_dynamic(m), torch.bucketize(m, middles, out_int32=True))
    v = torch.cat([squares, squares.nextafter(up), squares.nextafter(down), spread]).clamp(0, 1)
    below = torch.bucketize(v, squares, right=True, out_int32=True).sub_(1).clamp_(max=254)
    always_down = torch.full_like(below, 1 << 20)
    assert torch.equal(q.encode_dynamic_square(v, always_down), below)


@pytest.mark.skipif(len(KERNELS) < 2, reason="no C++ compiler")
@example(shape=(64, 64), coupled=True, bad=True, beta1=0.9, format="float", tile=(32, 32))
@given(
    shape=st.one_of(
        st.tuples(st.integers(1, 3000)),
        st.tuples(st.integers(1, 70), st.integers(1, 70)),
        st.tuples(st.integers(1, 3), st.integers(1, 70), st.integers(1, 40)),
    ),
    coupled=st.booleans(),
    bad=st.booleans(),
    beta1=st.sampled_from([0.9, 0.3]),
    format=st.sampled_from(["float", "dynamic"]),
    tile=st.sampled_from([(32, 32), (3, 5)]),
)
def test_eager_and_compiled_agree_in_every_code_and_scale(
    shape: tuple[int, ...], coupled: bool, bad: bool, beta1: float, format: str, tile: tuple[int, int]
) -> None:
    make = ragged_optim.Adam8bit if coupled else ragged_optim.AdamW8bit
    params = [nn.Parameter(full(shape, 0)) for _ in range(2)]
    options: dict[str, Any] = {"min_8bit_size": 0, "format": format, "tile": tile}
    optimizers = [make([p], weight_decay=0.1, betas=(beta1, 0.99), **options) for p in params]
    real = adamw8bit.adamw8bit_kernel
    for step in range(3):
        grad = full(shape, 1 + step) * full(shape, 50 + step).exp()
        # Coupled decay feeds the parameter, whose last bit may differ (torch's sqrt), back into the moments.
        params[1].data.copy_(params[0])
        if bad and step == 1:
            grad.view(-1)[grad.numel() // 2] = math.nan
            grad.view(-1)[0] = math.inf
        for param, optimizer, use in zip(params, optimizers, (False, True), strict=True):
            param.grad = grad.clone()
            if not use:
                adamw8bit.adamw8bit_kernel = lambda: None
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                optimizer.step()
            adamw8bit.adamw8bit_kernel = real
    a, b = (o.state[p] for o, p in zip(optimizers, params, strict=True))
    assert all(torch.equal(a[key], b[key]) for key in a)
    torch.testing.assert_close(params[0], params[1], rtol=1e-6, atol=1e-7, equal_nan=True)


@pytest.mark.skipif(len(KERNELS) < 2, reason="no C++ compiler")
@pytest.mark.parametrize("format", ["float", "dynamic"])
def test_the_kernel_does_the_same_with_any_vectors_and_threads(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (416, 1003)  # several threads' worth, edge tiles
    threads, best = torch.get_num_threads(), kernels._level()
    found = []
    try:
        for level, count in ((best, 1), (min(best, 1), 1), (best, 3)):
            monkeypatch.setattr(kernels, "_level", lambda level=level: level)
            monkeypatch.setattr(adamw8bit, "adamw8bit_kernel", kernels.adamw8bit_kernel.__wrapped__)
            torch.set_num_threads(count)
            param = nn.Parameter(full(shape, 0))
            optimizer = ragged_optim.AdamW8bit([("w", param)], format=format)
            for step in range(2):
                param.grad = full(shape, 1 + step)
                param.grad[5, 7] = param.grad[400, 900] = math.nan
                with pytest.warns(
                    RuntimeWarning, match=r"2 tile.s. .* at \(row 0, column 0\), \(row 384, column 896\);"
                ):
                    optimizer.step()
            found.append([param.detach(), *optimizer.state[param].values()])
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(found[0], other, strict=True))


def test_two_bytes_of_state_per_parameter_and_a_scale_per_tile() -> None:
    param = nn.Parameter(torch.zeros(1024, 1024))
    state = ragged_optim.AdamW8bit([param]).state[param]
    size = sum(t.numel() * t.element_size() for t in state.values())
    assert size / param.numel() <= 2.01
    assert state["exp_avg.codes"].dtype == torch.uint8 and state["exp_avg.scales"].shape == (32, 32)


def test_small_parameters_and_those_a_policy_names_keep_fp32_moments() -> None:
    params = [("small", nn.Parameter(torch.zeros(63, 64))), ("exempt", nn.Parameter(torch.zeros(64, 64)))]
    params.append(("large", nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16))))

    def policy(name: str, parameter: Tensor) -> ParamPolicy | None:
        return ParamPolicy(min_8bit_size=10**9) if name == "exempt" else None

    optimizer = ragged_optim.AdamW8bit(params, orig_param_policy=policy)
    keys = [set(optimizer.state[p]) - {"step", "salt"} for _, p in params]
    assert keys[0] == keys[1] == {"exp_avg", "exp_avg_sq"}
    assert keys[2] == {f"{m}.{part}" for m in ("exp_avg", "exp_avg_sq") for part in ("codes", "scales")}


def test_equals_adamw_in_fp32_below_the_size_limit() -> None:
    ours = [nn.Parameter(full((17, 31), 0))]
    theirs = copy.deepcopy(ours)
    a, b = ragged_optim.AdamW8bit(ours, weight_decay=0.3), torch.optim.AdamW(theirs, weight_decay=0.3)
    for step in range(5):
        ours[0].grad = full((17, 31), step)
        theirs[0].grad = ours[0].grad.clone()
        a.step()
        b.step()
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("coupled", "format"), [(False, "float"), (True, "float"), (False, "dynamic")])
def test_stays_near_fp32_over_many_steps(coupled: bool, format: str) -> None:
    name = "Adam" if coupled else "AdamW"
    ours = nn.Parameter(full((64, 96), 0))
    theirs = nn.Parameter(ours.detach().clone())
    target = full((64, 96), 1)
    a = getattr(ragged_optim, f"{name}8bit")([ours], lr=0.01, weight_decay=0.01, format=format)
    b = getattr(torch.optim, name)([theirs], lr=0.01, weight_decay=0.01)
    for step in range(200):
        noise = 0.5 * full((64, 96), 10 + step)
        ours.grad, theirs.grad = ours.detach() - target + noise, theirs.detach() - target + noise
        a.step()
        b.step()
    moved = (theirs.detach() - full((64, 96), 0)).norm()
    assert (ours - theirs).norm() < 0.06 * moved


def test_v_does_not_freeze_at_beta2_999() -> None:
    # With rounding to nearest sqrt(v_hat / v) has median .54 in this setup: a step is far below half a code.
    sigma = (1.5 * full((96, 96), 0)).exp()
    param = nn.Parameter(torch.zeros(96, 96))
    optimizer = ragged_optim.AdamW8bit([param], betas=(0.9, 0.999), lr=0.0, weight_decay=0.0)
    exact = torch.zeros(96, 96)
    for step in range(500):
        if step == 250:
            sigma = sigma.flip(0)
        param.grad = sigma * full((96, 96), 1 + step)
        exact.mul_(0.999).addcmul_(param.grad, param.grad, value=0.001)
        optimizer.step()
    state = optimizer.state[param]
    bits = state["exp_avg_sq.codes"].to(torch.int32)
    scales = state["exp_avg_sq.scales"].repeat_interleave(32, 0).repeat_interleave(32, 1)
    ratio = q.decode_v(bits) * scales / exact
    root = ratio.sqrt()
    assert 0.95 <= float(root.median()) <= 1.05
    assert float(root.flatten().kthvalue(len(root.flatten()) // 100).values) > 0.55
    assert 0.97 <= float(ratio.mean()) <= 1.03


@given(values=st.lists(st.floats(0.0, 1.0, width=32), min_size=1, max_size=40), exponent=st.integers(-30, 30))
def test_codes_of_v_are_within_an_eighth_and_zero_is_exact(values: list[float], exponent: int) -> None:
    v = torch.tensor(values) * 2.0**exponent
    scale = q.powers_of_two(v.max().reshape(1) * (2 / q.LARGEST))
    codes = q.encode_v(v / scale, torch.full((len(values),), q.HALF, dtype=torch.int32)) & 255
    back = q.decode_v(codes.clone()) * scale
    assert torch.equal(back[v == 0], v[v == 0])
    assert ((back - v).abs() <= v / 16 + scale * 2.0**-34).all()


@given(values=st.lists(st.floats(-1.0, 1.0, width=32), min_size=1, max_size=40), exponent=st.integers(-30, 30))
def test_codes_of_m_are_within_an_eighth_and_keep_the_sign(values: list[float], exponent: int) -> None:
    m = torch.tensor(values) * 2.0**exponent
    scale = q.powers_of_two(m.abs().max().reshape(1) * (2 * q.M_OVER_V / q.LARGEST))
    codes = q.encode_m(m.abs() / scale, m.clone()) & 255
    back = q.decode_m(codes, torch.empty(len(values))) * scale
    assert ((back - m).abs() <= m.abs() / 16 + scale * 2.0**-34).all()
    assert (back * m >= 0).all()


def test_rounding_of_v_is_unbiased() -> None:
    value = torch.full((256, 256), 0.7)
    total = torch.zeros(256, 256)
    columns = q.keys(256, 0, (), torch.device("cpu"))
    for step in range(64):
        rows = q.keys(256, 0, (0, 1, step), torch.device("cpu"))
        noise = q.noise(rows[:, None], columns[None, :], torch.empty(256, 256, dtype=torch.int32))
        total += q.decode_v(q.encode_v(value.clone(), noise) & 255)
    # 0.7 lies between 0.6875 and 0.75; the mean of 4 M draws has a standard error of 1.2e-5.
    assert abs(float(total.mean()) / 64 - 0.7) < 6e-5
    assert float((total / 64).std()) < 0.01


@pytest.mark.parametrize("use_kernel", KERNELS, ids=["eager", "C++"][: len(KERNELS)])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("format", ["float", "dynamic"])
@pytest.mark.parametrize("columns", [70, 96])
def test_a_bad_gradient_harms_its_own_element_only_and_its_tile_is_reported(
    value: float, skip: bool, format: str, columns: int, use_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not use_kernel:
        monkeypatch.setattr(adamw8bit, "adamw8bit_kernel", lambda: None)
    shape = (64, columns)  # with edge tiles and without: only then the step is in place
    good, hurt = (nn.Parameter(full(shape, 0)) for _ in range(2))
    a = ragged_optim.AdamW8bit([("good", good)], skip_nonfinite=skip, format=format)
    b = ragged_optim.AdamW8bit([("hurt", hurt)], skip_nonfinite=skip, format=format)
    a.state[good]["salt"].copy_(b.state[hurt]["salt"])
    for step in range(3):
        good.grad = full(shape, 1 + step)
        hurt.grad = good.grad.clone()
        good.grad[40, 66] = 0.0
        hurt.grad[40, 66] = value if step == 1 else 0.0
        a.step()
        if step == 1:
            with pytest.warns(
                RuntimeWarning, match=r"parameter 'hurt' in 1 tile\(s\) of 32 x 32, at \(row 32, column 64\)"
            ):
                b.step()
        else:
            b.step()
    rest = torch.ones(shape, dtype=torch.bool)
    rest[40, 66] = False
    assert torch.equal(good[rest], hurt[rest])
    assert bool(hurt[40, 66].isfinite()) == skip
    assert all(torch.equal(a.state[good][key], b.state[hurt][key]) for key in a.state[good])


def test_bf16_parameters_move_by_steps_below_half_a_unit_when_rounded_stochastically() -> None:
    moved = {}
    for stochastic in (False, True):
        param = nn.Parameter(torch.ones(128, 128, dtype=torch.bfloat16))
        optimizer = ragged_optim.AdamW8bit([param], lr=1e-4, weight_decay=0.0, bf16_stochastic_round=stochastic)
        for _ in range(20):
            param.grad = torch.ones_like(param)
            optimizer.step()
        moved[stochastic] = 1.0 - float(param.float().mean())
    assert moved[False] == 0.0
    assert moved[True] == pytest.approx(20e-4, rel=0.1)


def test_decay_is_applied_before_rounding() -> None:
    param = nn.Parameter(torch.ones(128, 128, dtype=torch.bfloat16))
    optimizer = ragged_optim.AdamW8bit([param], lr=1e-3, weight_decay=0.5, bf16_stochastic_round=True)
    param.grad = torch.zeros_like(param)
    optimizer.step()
    assert float(param.float().mean()) == pytest.approx(1 - 5e-4, abs=1e-4)


@pytest.mark.parametrize("use_kernel", KERNELS, ids=["eager", "C++"][: len(KERNELS)])
@pytest.mark.parametrize("name", ["AdamW8bit", "Adam8bit"])
def test_fp64_parameters_are_neither_read_as_fp32_nor_rounded_to_it(
    name: str, use_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not use_kernel:
        monkeypatch.setattr(adamw8bit, "adamw8bit_kernel", lambda: None)
    for shape in ((70, 96), (10,)):
        ours, theirs = (nn.Parameter(full(shape, 0).double()) for _ in range(2))
        a = getattr(ragged_optim, name)([ours], lr=1e-3, weight_decay=0.1)
        b = getattr(torch.optim, name.removesuffix("8bit"))([theirs], lr=1e-3, weight_decay=0.1)
        ours.grad, theirs.grad = full(shape, 1).double(), full(shape, 1).double()
        a.step()  # moments of the first step have not been rounded yet
        b.step()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)
        b.step()
        a.step()
        assert (ours - theirs).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("name", "options"),
    [("AdamW8bit", {}), ("AdamW8bit", {"min_8bit_size": 10**6}), ("Lion", MOMENTUM_8BIT), ("Muon", MOMENTUM_8BIT)],
    ids=str,
)
def test_channels_last_and_transposed_parameters_end_as_contiguous_ones(name: str, options: dict[str, Any]) -> None:
    for base in (
        full((64, 32, 3, 3), 0).contiguous(memory_format=torch.channels_last),
        full((96, 64), 0).T,
    ):
        params = [nn.Parameter(base.clone(memory_format=f)) for f in (torch.preserve_format, torch.contiguous_format)]
        assert not params[0].is_contiguous()
        for param in params:
            optimizer = getattr(ragged_optim, name)([("conv.weight", param)], lr=0.01, **options)
            for step in range(3):
                param.grad = full(param.shape, 1 + step)
                optimizer.step()
        assert torch.equal(*params)


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("name", ["AdamW8bit", "Adam8bit"])
def test_a_bad_gradient_of_a_small_parameter_is_reported_and_its_moments_recover(name: str, skip: bool) -> None:
    param = nn.Parameter(full((5, 7), 0))
    optimizer = getattr(ragged_optim, name)([("b", param)], weight_decay=0.1, skip_nonfinite=skip)
    param.grad = full((5, 7), 1)
    param.grad[2, 3], param.grad[4, 0] = math.nan, -math.inf
    with pytest.warns(RuntimeWarning, match=r"'b' in 2 element\(s\), at \(row 2, column 3\), \(row 4, column 0\)"):
        optimizer.step()
    assert int(param.isnan().sum()) == (0 if skip else 2)
    assert all(bool(optimizer.state[param][key].isfinite().all()) for key in ("exp_avg", "exp_avg_sq"))


@given(
    shape=st.sampled_from([(37,), (7, 3), (1500,), (2, 5, 3), (60, 41)]),
    cuts=st.lists(st.integers(0, 2460), max_size=3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@example(shape=(7, 3), cuts=[10], dtype=torch.bfloat16)
def test_small_parameters_cut_anywhere_end_as_whole_ones(
    shape: tuple[int, ...], cuts: list[int], dtype: torch.dtype
) -> None:
    rule = adamw8bit.AdamW8bitRule()
    group = {**rule.defaults, "lr": 1e-4, "bf16_stochastic_round": True}
    numel, ends = math.prod(shape), []
    for edges in ((0, numel), sorted({0, numel, *(min(cut, numel) for cut in cuts)})):
        parts = []
        for start, stop in itertools.pairwise(edges):
            param = full(shape, 0, dtype).view(-1)[start:stop].clone()
            state = {"step": torch.zeros(()), "salt": torch.tensor(7)}
            state |= {moment: torch.zeros(stop - start) for moment in ("exp_avg", "exp_avg_sq")}
            for step in range(3):
                grad = full(shape, 1 + step, dtype).view(-1)[start:stop]
                rule.update(param, grad, state, group, Extent(shape, start, stop))
            parts.append([param, state["exp_avg"], state["exp_avg_sq"]])
        ends.append([torch.cat(tensors) for tensors in zip(*parts, strict=True)])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def cut_tile() -> list[str]:
    messages = []
    for shape, layout in (((96, 100), "shard0"), ((3, 50, 8), "ragged")):
        param = nn.Parameter(shard(full(shape, 0), layout, cluster.mesh((2,)), 1))
        try:
            ragged_optim.AdamW8bit([("w", param)], min_8bit_size=0)
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_a_cut_tile_is_refused_with_the_cut_and_the_fix() -> None:
    first, second = cluster.run(2, cut_tile)
    assert first == second and len(first) == 2
    assert "parameter 'w' of shape (96, 100)" in first[0]
    assert "a rank boundary at element 4800 cuts the block of elements 3200 to 6400" in first[0]
    assert "ParamPolicy(block=Block.rows(32))" in first[0] and "ParamPolicy(block=Block.rows(50))" in first[1]


def test_tilings_of_every_kind() -> None:
    assert q.tiling((96, 100), 32, 32).scales == (3, 4)
    assert q.tiling((4, 64, 33), 32, 32).scales == (8, 2)
    assert q.tiling((3, 50, 8), 32, 32).scales == (3, 2, 1) and q.tiling((3, 50, 8), 32, 32).block == Block.rows(50)
    assert q.tiling((5000,), 32, 32).scales == (5, 1)
    assert q.tiling((7, 3), 32, 32).scales == (1, 1)


MOMENTUM = {
    "Muon": {"momentum_8bit": True, "min_8bit_size": 256},
    "Lion": {"momentum_8bit": True, "min_8bit_size": 256},
}


@pytest.mark.parametrize("name", MOMENTUM)
def test_8_bit_momentum_is_the_same_for_worlds_1_to_4(name: str) -> None:
    shapes = SHAPES[:4]
    expected = run(name, True, shapes, **MOMENTUM[name])
    assert len(expected["layer.0.weight"]) == 3
    for world in (1, 2, 3, 4):
        for got in cluster.run(world, run, name, True, shapes, "tiles", **MOMENTUM[name]):
            assert got == expected, world


@pytest.mark.parametrize("name", MOMENTUM)
def test_8_bit_momentum_takes_one_byte_and_stays_near_fp32(name: str) -> None:
    exact, rough = (nn.Parameter(full((256, 256), 0)) for _ in range(2))
    a = getattr(ragged_optim, name)([exact], lr=0.01)
    b = getattr(ragged_optim, name)([rough], lr=0.01, **MOMENTUM[name])
    size = sum(t.numel() * t.element_size() for t in b.state[rough].values())
    assert size / rough.numel() <= 1.01
    for step in range(20):
        exact.grad = full((256, 256), 1 + step)
        rough.grad = exact.grad.clone()
        a.step()
        b.step()
    moved = (exact.detach() - full((256, 256), 0)).norm()
    assert 0 < (exact - rough).norm() < 0.15 * moved


def test_8_bit_momentum_refuses_a_cut_tile() -> None:
    for message in cluster.run(2, cut_momentum):
        assert "muon needs every block rows(32) whole on one rank" in message


def cut_momentum() -> str:
    param = nn.Parameter(shard(full((96, 100), 0), "shard0", cluster.mesh((2,))))
    try:
        ragged_optim.Muon([("w", param)], momentum_8bit=True)
    except ValueError as error:
        return str(error)
    return ""
