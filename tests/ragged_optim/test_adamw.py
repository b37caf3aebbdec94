"""AdamW and Adam against torch.optim: parameters, states and options."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ragged_optim
from ragged_optim import kernels
from ragged_optim.rules import adamw
from tests.ragged_optim.models import full


def both(
    name: str, shapes: list[tuple[int, ...]], steps: int = 6, dtype: torch.dtype = torch.float32, **options: Any
) -> Any:
    ours = [nn.Parameter(full(shape, i, dtype)) for i, shape in enumerate(shapes)]
    theirs = copy.deepcopy(ours)
    a = getattr(ragged_optim, name)(ours, **options)
    b = getattr(torch.optim, name)(theirs, **options)
    for step in range(steps):
        for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
            p.grad = full(p.shape, 100 * step + i, dtype)
            q.grad = p.grad.clone()
        a.step()
        b.step()
    return a, b, ours, theirs


OPTIONS = [
    {},
    {"lr": 0.1, "weight_decay": 0.5},
    {"betas": (0.5, 0.95), "eps": 1e-3},
    {"amsgrad": True, "maximize": True},
    {"lr": torch.tensor(0.02)},
]


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equals_torch(name: str, options: dict[str, Any]) -> None:
    a, b, ours, theirs = both(name, [(17, 31), (1,), (64, 64), (0, 3), (), (2, 3, 5)], **options)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)
        assert list(a.state[p]) == list(b.state[q])
        for key, value in b.state[q].items():
            torch.testing.assert_close(a.state[p][key], value, rtol=1e-5, atol=1e-7)


@given(shapes=st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), min_size=1, max_size=4), adam=st.booleans())
def test_equals_torch_on_any_shape(shapes: list[tuple[int, ...]], adam: bool) -> None:
    _, _, ours, theirs = both("Adam" if adam else "AdamW", shapes, 3, weight_decay=0.1)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


def test_decay_is_decoupled_in_adamw_and_coupled_in_adam() -> None:
    _, _, adamw, _ = both("AdamW", [(8,)], 1, weight_decay=0.5, lr=0.1)
    _, _, adam, _ = both("Adam", [(8,)], 1, weight_decay=0.5, lr=0.1)
    assert (adamw[0] - adam[0]).abs().max() > 0.01


def test_bfloat16_parameters_keep_bfloat16_states_as_torch_does() -> None:
    a, _, ours, theirs = both("AdamW", [(17, 31)], dtype=torch.bfloat16)
    assert a.state[ours[0]]["exp_avg"].dtype == torch.bfloat16
    torch.testing.assert_close(ours[0], theirs[0], rtol=2e-2, atol=2e-2)


def test_state_dtype_keeps_fp32_moments_of_bfloat16_parameters() -> None:
    param = nn.Parameter(full((17, 31), 0, torch.bfloat16))
    optimizer = ragged_optim.AdamW([param], lr=0.1, state_dtype=torch.float32)
    param.grad = full((17, 31), 1, torch.bfloat16)
    reference = param.detach().float()
    optimizer.step()
    state = optimizer.state[param]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32
    torch.testing.assert_close(state["exp_avg"], 0.1 * param.grad.float())
    assert ((param.float() - reference).abs() > 0.05).float().mean() > 0.9


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
@pytest.mark.parametrize(
    ("dtype", "state_dtype"), [(torch.float32, torch.bfloat16), (torch.float64, torch.float32)], ids=str
)
def test_parameters_are_not_rounded_to_the_dtype_of_narrower_moments(
    name: str, dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    param = nn.Parameter(full((17, 31), 0, torch.float64).to(dtype))
    cut = [nn.Parameter(part.clone()) for part in param.detach().view(-1).split([100, 427])]
    optimizer = getattr(ragged_optim, name)([param], lr=1e-4, weight_decay=0.0, state_dtype=state_dtype)
    parts = getattr(ragged_optim, name)(cut, lr=1e-4, weight_decay=0.0, state_dtype=state_dtype)
    p, m, v = param.detach().clone().double(), torch.zeros(17, 31), torch.zeros(17, 31)
    for step in range(1, 4):
        g = full((17, 31), step, dtype)
        m = (0.9 * m.double() + 0.1 * g.double()).to(state_dtype)
        v = (0.999 * v.double() + 0.001 * g.double().square()).to(state_dtype)
        param.grad, (cut[0].grad, cut[1].grad) = g, g.reshape(-1).split([100, 427])
        optimizer.step()
        parts.step()
        # The step is of the moments before they are rounded: within their rounding.
        p = p - 1e-4 / (1 - 0.9**step) * m.double() / ((v.double() / (1 - 0.999**step)).sqrt() + 1e-8)
    assert (param.double() - p).abs().max() < (1e-5 if dtype == torch.float32 else 1e-10)
    assert torch.equal(param.detach().view(-1), torch.cat([c.detach() for c in cut]))
    for key, rounded in (("exp_avg", m), ("exp_avg_sq", v)):
        assert optimizer.state[param][key].dtype == state_dtype
        torch.testing.assert_close(optimizer.state[param][key], rounded)


def test_gradients_of_another_dtype_are_accepted() -> None:
    param = nn.Parameter(full((5, 7), 0))
    param.grad_dtype = None
    param.grad = full((5, 7), 1, torch.bfloat16)
    optimizer = ragged_optim.AdamW([param])
    optimizer.step()
    torch.testing.assert_close(optimizer.state[param]["exp_avg"], 0.1 * param.grad.float())


@pytest.mark.parametrize("strided", ["transposed", "sliced", "channels_last"])
def test_parameters_that_are_not_contiguous(strided: str) -> None:
    base = full((4, 6, 8, 10), 0)
    view = {
        "transposed": lambda: base[0, 0].T,
        "sliced": lambda: base[0, 0, :, ::2],
        "channels_last": lambda: base.to(memory_format=torch.channels_last),
    }[strided]()
    param = nn.Parameter(view)
    assert not param.is_contiguous()
    dense = nn.Parameter(param.detach().clone(memory_format=torch.contiguous_format))
    a, b = ragged_optim.AdamW([param]), ragged_optim.AdamW([dense])
    for step in range(3):
        dense.grad = full(param.shape, step)
        param.grad = dense.grad.clone()
        a.step()
        b.step()
    torch.testing.assert_close(param, dense, rtol=1e-6, atol=1e-7)


@given(
    numel=st.integers(1, 200),
    cut=st.integers(0, 200),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_the_scalar_tail_of_the_kernel_rounds_like_its_body(numel: int, cut: int, dtype: torch.dtype) -> None:
    cut = min(cut, numel)
    whole = nn.Parameter(full((numel,), 0, dtype))
    parts = [nn.Parameter(whole.detach()[:cut].clone()), nn.Parameter(whole.detach()[cut:].clone())]
    a, b = ragged_optim.AdamW([whole], lr=0.1), ragged_optim.AdamW(parts, lr=0.1)
    for step in range(3):
        whole.grad = full((numel,), 7 + step, dtype)
        parts[0].grad, parts[1].grad = whole.grad[:cut].clone(), whole.grad[cut:].clone()
        a.step()
        b.step()
    assert torch.equal(whole, torch.cat([p.detach() for p in parts]))
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(a.state[whole][key], torch.cat([b.state[p][key] for p in parts]))


@pytest.mark.skipif(kernels.adamw_kernel() is None, reason="no C++ compiler, or torch rounds otherwise here")
@given(
    shapes=st.lists(st.sampled_from([(1,), (15,), (16,), (17, 31), (64, 64), (0, 3), ()]), min_size=1, max_size=4),
    name=st.sampled_from(["AdamW", "Adam"]),
    betas=st.sampled_from([(0.9, 0.999), (0.3, 0.5)]),
    weight_decay=st.sampled_from([0.0, 0.1]),
)
def test_the_kernel_gives_the_bits_of_torchs(
    shapes: list[tuple[int, ...]], name: str, betas: tuple[float, float], weight_decay: float
) -> None:
    ends = []
    for kernel in (kernels.adamw_kernel, lambda: None):
        with mock.patch.object(adamw, "adamw_kernel", kernel):
            a, _, ours, _ = both(name, shapes, 3, lr=0.1, betas=betas, weight_decay=weight_decay)
        ends.append([t for p in ours for t in (p.detach(), *a.state[p].values())])
    assert all(torch.equal(with_it, without) for with_it, without in zip(*ends, strict=True))


@pytest.mark.skipif(kernels.adamw_kernel() is None, reason="no C++ compiler, or torch rounds otherwise here")
def test_the_kernels_threads_share_a_tensor_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, ends = kernels.adamw_kernel(), []
    assert kernel is not None
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        tensors = [full((200_001,), i) for i in range(3)] + [full((200_001,), 3).square()]
        options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
        kernel(tensors, 1.0, decoupled=True, **options)
        ends.append(tensors)
    assert all(torch.equal(one, three) for one, three in zip(*ends, strict=True))
