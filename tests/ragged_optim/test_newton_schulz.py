"""Newton-Schulz: near the SVD's polar factor, within the stated bounds, for every coefficient set."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ragged_optim import newton_schulz as ns
from ragged_optim.newton_schulz import COEFFICIENTS, flops, newton_schulz, schedule, singular_value_range
from tests.ragged_optim.models import full


def with_spectrum(rows: int, cols: int, singular: Tensor, seed: int = 0) -> Tensor:
    u, _, v = torch.linalg.svd(full((rows, cols), seed).double(), full_matrices=False)
    return u @ torch.diag(singular.double()) @ v


def polar(matrix: Tensor) -> Tensor:
    u, _, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    return u @ v


@pytest.mark.parametrize("name", COEFFICIENTS)
@pytest.mark.parametrize(("rows", "cols"), [(24, 40), (40, 24), (24, 24)])
@pytest.mark.parametrize("condition", [1.0, 30.0, 1000.0])
@pytest.mark.parametrize("steps", [5, 8, 10])
def test_singular_values_lie_in_the_stated_range(name: str, rows: int, cols: int, condition: float, steps: int) -> None:
    singular = torch.logspace(0, -torch.tensor(condition).log10().item(), 24)
    matrix = with_spectrum(rows, cols, singular)
    lowest = float(singular.min() / singular.norm())
    low, high = singular_value_range(name, steps, lowest)
    got = torch.linalg.svdvals(newton_schulz(matrix, name, steps))
    assert got.min() >= low - 1e-6 and got.max() <= high + 1e-6
    # The singular vectors stay: U^T O V is diagonal.
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    inner = u.T @ newton_schulz(matrix, name, steps) @ v.T
    assert (inner - torch.diag(inner.diagonal())).abs().max() < 1e-9


@pytest.mark.parametrize(("name", "steps"), [("polar_express", 12), ("deepseek", 12), ("cubic", 16)])
@pytest.mark.parametrize(("rows", "cols"), [(24, 40), (40, 24), (24, 24)])
def test_enough_steps_give_the_polar_factor_of_the_svd(name: str, steps: int, rows: int, cols: int) -> None:
    matrix = with_spectrum(rows, cols, torch.logspace(0, -2, 24))
    torch.testing.assert_close(newton_schulz(matrix, name, steps), polar(matrix), rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("name", "steps", "low", "high"),
    [
        ("keller", 5, 0.68, 1.14),
        ("quintic", 5, 0.97, 1.04),
        ("polar_express", 8, 0.999, 1.001),
        ("deepseek", 10, 0.999, 1.001),
    ],
)
def test_stated_bounds_of_the_sets(name: str, steps: int, low: float, high: float) -> None:
    found = singular_value_range(name, steps, 0.01)
    assert low <= found[0] and found[1] <= high


def test_float32_equals_float64() -> None:
    matrix = full((48, 32), 3)
    exact = newton_schulz(matrix.double())
    torch.testing.assert_close(newton_schulz(matrix).double(), exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "cols"), [(48, 32), (32, 48), (1, 16), (16, 1), (1, 1)])
def test_equals_torchs_iteration_bit_for_bit(rows: int, cols: int, dtype: torch.dtype) -> None:
    from torch.optim._muon import _zeropower_via_newtonschulz

    matrix = full((rows, cols), 1, dtype)
    if dtype == torch.bfloat16:
        expected = _zeropower_via_newtonschulz(matrix.float(), (3.4445, -4.7750, 2.0315), 5, 1e-7)
        assert torch.equal(newton_schulz(matrix), expected)


def test_the_matrix_is_left_alone() -> None:
    # pytorch/pytorch#194664: a bf16 momentum buffer was normalised in place.
    matrix = full((8, 8), 0, torch.bfloat16)
    kept = matrix.clone()
    newton_schulz(matrix)
    assert torch.equal(matrix, kept)


@given(scale=st.floats(1e-4, 1e4), rows=st.integers(1, 20), cols=st.integers(1, 20))
def test_scale_free(scale: float, rows: int, cols: int) -> None:
    matrix = full((rows, cols), rows * 31 + cols).double()
    torch.testing.assert_close(newton_schulz(matrix * scale), newton_schulz(matrix), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", COEFFICIENTS)
@pytest.mark.parametrize(("condition", "tolerance"), [(1.0, 1e-5), (100.0, 2e-3)])
@pytest.mark.parametrize("tall", [False, True])
def test_the_iteration_on_the_gram_matrix_is_the_same_iteration(
    name: str, condition: float, tolerance: float, tall: bool
) -> None:
    singular = torch.logspace(0, -torch.tensor(condition).log10().item(), 16)
    matrix = with_spectrum(16, 80, singular)
    x = (matrix.T if tall else matrix).contiguous()
    wide = matrix / matrix.norm()
    for a, b, c in schedule(name, 6):
        gram = wide @ wide.T
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    expected = wide.T if tall else wide
    torch.testing.assert_close(newton_schulz(x, name, 6, gram=True), expected, rtol=0, atol=1e-8)
    torch.testing.assert_close(newton_schulz(x.float(), name, 6, gram=True).double(), expected, rtol=0, atol=tolerance)
    narrow = newton_schulz(x.bfloat16(), name, 6)
    assert torch.equal(newton_schulz(x.bfloat16(), name, 6, gram=True), narrow)


def test_the_gram_matrix_costs_less_where_it_is_used() -> None:
    assert flops(64, 256, dtype=torch.float32, gram=True) < 0.7 * flops(64, 256)
    assert flops(64, 100, dtype=torch.float32, gram=True) == flops(64, 256, gram=True) - flops(64, 256) + flops(64, 100)


def test_zero_stays_zero() -> None:
    assert torch.equal(newton_schulz(torch.zeros(3, 4)), torch.zeros(3, 4))


def test_flops_count_the_products() -> None:
    assert flops(10, 20, "keller", 1) == 2 * 10 * 10 * 20 * 2 + 2 * 10**3
    assert flops(20, 10) == flops(10, 20) and flops(10, 10, "cubic", 3) < flops(10, 10, "keller", 3)


@pytest.mark.parametrize(
    ("coefficients", "steps", "message"),
    [
        ("jordan", 5, "unknown ns_coefficients 'jordan'; known sets: keller"),
        ((1.0, 2.0), 5, "three numbers, a list of triples or a name"),
        ([(1.0, 2.0)], 5, "three numbers, a list of triples or a name"),
        ("keller", 100, r"\[0, 100\)"),
        ("keller", 2.5, "integer"),
    ],
)
def test_bad_coefficients_are_refused(coefficients: object, steps: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedule(coefficients, steps)  # type: ignore[arg-type]


@given(
    count=st.integers(1, 6),
    rows=st.integers(1, 70),
    cols=st.integers(1, 70),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
    name=st.sampled_from(list(COEFFICIENTS)),
    steps=st.integers(0, 6),
    gram=st.booleans(),
)
def test_matrices_together_have_the_bits_of_each_alone(
    count: int, rows: int, cols: int, dtype: torch.dtype, name: str, steps: int, gram: bool
) -> None:
    matrices = [full((rows, cols), seed).to(dtype) for seed in range(count)]
    alone = [newton_schulz(matrix, name, steps, gram=gram) for matrix in matrices]
    for one, together in zip(alone, ns.newton_schulz_all(matrices, name, steps, gram=gram), strict=True):
        assert torch.equal(one, together)


def test_a_device_whose_batched_products_round_otherwise_iterates_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    matrices, real, batched = [full((12, 20), seed) for seed in range(3)], torch.baddbmm, []
    alone = [newton_schulz(matrix) for matrix in matrices]

    def otherwise(*args: Tensor, out: Tensor, **kwargs: float) -> Tensor:
        result = real(*args, out=out, **kwargs)
        if len(result) > 1:
            batched.append(result.shape)
            result.mul_(1 + 1e-6)
        return result

    monkeypatch.setattr(torch, "baddbmm", otherwise)
    ns._batches_exactly.cache_clear()
    try:
        for _ in range(2):
            found = ns.newton_schulz_all(matrices)
            assert all(torch.equal(a, b) for a, b in zip(alone, found, strict=True))
        assert len(batched) == 2  # one step, once, to find out
    finally:
        ns._batches_exactly.cache_clear()


def test_a_result_stays_when_the_next_one_is_computed() -> None:
    first = newton_schulz(full((6, 8), 0))
    kept = first.clone()
    newton_schulz(full((6, 8), 1))
    assert torch.equal(first, kept)
