"""What is not there says so and what to do instead; what is there is tested where docs/fsdp.md says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import DataParallelMeshDims
from torch.distributed.tensor import Shard

from fsdp import FSDPModule, fully_shard
from fsdp.module import FSDPModule as Ours
from tests import cluster
from tests.fsdp.modules import Mlp, squares
from tests.fsdp.reference import shard_children

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/fsdp.md").read_text()


def test_every_test_that_the_page_names_is_there() -> None:
    named = set(re.findall(r"`((?:tests/)?(?:fsdp|parity|regressions)/test_\w+\.py)`", PAGE))
    missing = [name for name in named if not (ROOT / "tests" / name.removeprefix("tests/")).exists()]
    assert named and not missing


def refusal(function: Any, *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except (NotImplementedError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


class Encoded(Tensor):
    """What an extension of torch's FSDP2 looks like."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any: ...

    def fsdp_post_all_gather(self, *args: Any, **kwargs: Any) -> Any: ...


def arguments() -> dict[str, str]:
    extended = Mlp()
    extended.up.weight = nn.Parameter(torch.randn(11, 8).as_subclass(Encoded))
    mesh = cluster.mesh((2, 1), ("dp", "tp"))
    return {
        "placement": refusal(fully_shard, Mlp(), shard_placement_fn=lambda p: Shard(1)),
        "first dim": refusal(fully_shard, Mlp(), shard_placement_fn=lambda p: Shard(0)),
        "extension": refusal(fully_shard, extended),
        "replicas": refusal(fully_shard, Mlp(), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(replicate="dp")),
    }


def test_arguments_that_are_not_there_are_refused_with_advice() -> None:
    results = cluster.run(2, arguments)
    assert results[0] == results[1]
    assert "orig_param_policy" in results[0]["placement"] and "Shard(dim=1)" in results[0]["placement"]
    assert results[0]["first dim"] == "accepted"
    assert "'up.weight'" in results[0]["extension"] and "mp_policy.param_dtype" in results[0]["extension"]
    assert "at least one to shard over" in results[0]["replicas"]


# Methods of torch's FSDPModule that raise here, whatever they are called with.
REFUSED = {
    "set_symm_mem_for_comm": "ragged_shard.pool",
    "set_allocate_memory_from_process_group_for_comm": "ragged_shard.pool",
}


def methods() -> dict[str, str]:
    model = shard_children(Mlp())
    found = {name: refusal(getattr(model, name), True) for name in REFUSED}
    found |= {str(count): refusal(model.set_reduce_scatter_max_input_buffers, count) for count in (1, 2, 0, True)}
    model.set_post_optim_event(None)
    squares(model).backward()
    return found


def test_methods_that_are_not_there_are_refused_with_advice() -> None:
    (found,) = cluster.run(1, methods)
    for name, word in REFUSED.items():
        assert found[name].startswith("NotImplementedError") and name in found[name] and word in found[name]
    assert found["1"] == "accepted"
    assert found["2"].startswith("NotImplementedError") and "one reduction is in flight" in found["2"]
    assert found["0"].startswith("ValueError") and found["True"].startswith("TypeError")


def test_no_public_method_of_torch_is_inherited_unawares() -> None:
    """A method that a newer torch adds would work on torch's own state, which is not there."""
    torchs = FSDPModule.__mro__[1]
    public = {name for name, value in vars(torchs).items() if callable(value) and not name.startswith("_")}
    assert public and public <= set(vars(Ours)), public - set(vars(Ours))


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_the_page_says_what_is_not_there(name: str) -> None:
    assert f"`{name}`" in PAGE
