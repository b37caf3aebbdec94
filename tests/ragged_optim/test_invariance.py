"""World-size invariance: the same parameters and states, bit for bit, for every world size, layout and cut."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ragged_optim
from tests import cluster
from tests.ragged_optim.models import train

SIZES = st.sampled_from([1, 2, 3, 5, 7, 8, 11, 16, 17, 31])
SHAPES = st.one_of(
    st.tuples(SIZES),
    st.tuples(SIZES, SIZES),
    st.tuples(SIZES, SIZES),
    st.tuples(st.integers(1, 4), SIZES, SIZES),
    st.sampled_from([(0, 4), (5, 0), (0,), (1, 1), (1, 13), (13, 1), (2, 3, 4, 5)]),
)
LAYOUTS = ["shard0", "ragged", "ragged7", "replicate"]
ANY_LAYOUT = [*LAYOUTS, "onehot", "mixed"]


def run(name: str, *args: Any, **kwargs: Any) -> dict[str, list[str]]:
    return train(functools.partial(getattr(ragged_optim, name)), *args, **kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("AdamW", {}),
        ("Adam", {"weight_decay": 0.1, "amsgrad": True}),
        ("SGD", {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
        ("SGD", {"momentum": 0.9, "nesterov": True}),
        ("Lion", {"weight_decay": 0.1, "weight_decay_mode": "cautious"}),
        ("Muon", {}),
        ("Muon", {"ns_dtype": torch.float32, "nesterov": False, "weight_decay_mode": "cautious"}),
        ("NorMuon", {"ns_dtype": torch.float32, "wire_dtype": torch.bfloat16}),
        ("Shampoo", {"precondition_frequency": 2, "max_preconditioner_dim": 16}),
        ("SOAP", {"precondition_frequency": 1}),
    ],
    ids=["adamw", "adam", "sgd", "nesterov", "lion", "muon", "muon-fp32", "normuon", "shampoo", "soap"],
)
def test_worlds_1_to_4_and_all_layouts_end_alike(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    shapes = [(17, 31), (8, 8), (1, 16), (37, 3), (3, 5, 7), (29,), (2, 1, 9)]
    expected = run(name, shapes, dtype=dtype, **options)
    for world in (1, 2, 3, 4):
        for layout in LAYOUTS:
            for got in cluster.run(world, run, name, shapes, layout, dtype=dtype, **options):
                assert got == expected, (world, layout)


@given(
    name=st.sampled_from(["AdamW", "Muon", "SGD", "Lion", "NorMuon", "Shampoo", "SOAP"]),
    shapes=st.lists(SHAPES, min_size=1, max_size=5),
    world=st.integers(1, 4),
    layout=st.sampled_from(ANY_LAYOUT),
    seed=st.integers(0, 10**6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    lacking=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 4)), max_size=4),
    groups=st.lists(st.integers(1, 3), max_size=3),
)
def test_any_shapes_cuts_and_missing_gradients(
    name: str,
    shapes: list[tuple[int, ...]],
    world: int,
    layout: str,
    seed: int,
    dtype: torch.dtype,
    lacking: list[tuple[int, int]],
    groups: list[int],
) -> None:
    arguments = {"steps": 2, "seed": seed, "dtype": dtype, "lacking": lacking, "groups": groups}
    arguments |= {"momentum": 0.9, "dampening": 0.5} if name == "SGD" else {}
    expected = run(name, shapes, **arguments)
    for got in cluster.run(world, run, name, shapes, layout, **arguments):
        assert got == expected


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "Lion", "Muon", "NorMuon", "Shampoo", "SOAP"])
def test_hybrid_sharding_ends_alike(name: str) -> None:
    shapes = [(17, 31), (3, 5, 7), (29,)]
    expected = run(name, shapes)
    for mesh_shape in ((2, 1), (1, 2), (2, 2)):
        for layout in ("shard0", "ragged"):
            for got in cluster.run(mesh_shape[0] * mesh_shape[1], run, name, shapes, layout, mesh_shape):
                assert got == expected, (mesh_shape, layout)


@pytest.mark.parametrize("name", ["AdamW", "Muon", "SOAP"])
def test_parameters_of_every_layout_mixed_in_one_optimizer_end_alike(name: str) -> None:
    shapes = [(17, 31), (8, 6), (3, 5, 4), (12, 12), (29, 4), (6, 20), (9, 14), (11, 5)]
    expected = run(name, shapes)
    for got in cluster.run(3, run, name, shapes, "mixed"):
        assert got == expected


def test_shards_of_columns_end_alike() -> None:
    shapes = [(17, 31), (3, 5), (29, 4)]
    expected = run("Muon", shapes)
    for got in cluster.run(3, run, "Muon", shapes, "shard1"):
        assert got == expected


@pytest.mark.parametrize("name", ["AdamW", "Muon", "NorMuon", "Shampoo", "SOAP"])
@pytest.mark.parametrize("layout", ["tensor0", "tensor1"])
def test_ragged_shards_of_tensor_parallel_weights_end_alike(name: str, layout: str) -> None:
    """A matrix lies over both mesh dims; what its owner keeps lies on one rank of the two flattened."""
    shapes = [(16, 30), (10, 4), (2, 6, 8), (14,)]
    expected = run(name, shapes)
    for got in cluster.run(4, run, name, shapes, layout, (2, 2)):
        assert got == expected
