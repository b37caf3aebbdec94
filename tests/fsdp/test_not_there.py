"""What is not there says so and what to do instead; what is there is tested where docs/fsdp.md says."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Shard

import fsdp
from fsdp import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
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


def arguments() -> dict[str, str]:
    mesh = cluster.mesh((2, 1), ("dp", "tp"))
    return {
        "placement": refusal(fully_shard, Mlp(), shard_placement_fn=lambda p: Shard(1)),
        "first dim": refusal(fully_shard, Mlp(), shard_placement_fn=lambda p: Shard(0)),
        "replicas": refusal(fully_shard, Mlp(), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(replicate="dp")),
    }


def test_arguments_that_are_not_there_are_refused_with_advice() -> None:
    results = cluster.run(2, arguments)
    assert results[0] == results[1]
    assert "orig_param_policy" in results[0]["placement"] and "Shard(dim=1)" in results[0]["placement"]
    assert results[0]["first dim"] == "accepted"
    assert "at least one to shard over" in results[0]["replicas"]


# Methods of torch's FSDPModule that raise here, whatever they are called with.
REFUSED = {"set_symm_mem_for_comm": "set_allocate_memory_from_process_group_for_comm"}

# What every other public method of torch's can be called with; each is tested where docs/fsdp.md says.
CALLS: dict[str, tuple[Any, ...]] = {
    "reshard": (),
    "unshard": (),
    "reset_iter_state": (),
    "set_is_last_backward": (False,),
    "set_requires_gradient_sync": (True,),
    "set_requires_all_reduce": (True,),
    "set_reshard_after_forward": (True,),
    "set_reshard_after_backward": (True,),
    "set_modules_to_forward_prefetch": ([],),
    "set_modules_to_backward_prefetch": ([],),
    "set_custom_all_gather": (None,),
    "set_custom_reduce_scatter": (None,),
    "set_all_reduce_hook": (torch.Tensor.zero_,),
    "set_post_optim_event": (None,),
    "set_reduce_scatter_divide_factor": (2.0,),
    "set_gradient_divide_factor": (2.0,),
    "set_force_sum_reduction_for_comms": (True,),
    "set_reduce_scatter_unused_params": (True,),
    "set_reduce_scatter_max_input_buffers": (2,),
    "set_separate_reduce_scatter_group": (True,),
    "set_unshard_in_backward": (True,),
    "set_allocate_memory_from_process_group_for_comm": (True,),
    "set_symm_mem_for_comm": (),
}


def methods() -> dict[str, str]:
    found = {}
    for name, given in CALLS.items():
        model = shard_children(Mlp())
        found[name] = refusal(getattr(model, name), *given)
        squares(model).backward()
    limit = model.set_reduce_scatter_max_input_buffers
    return found | {str(wrong): refusal(limit, wrong) for wrong in (0, True, 1.5)}


def test_methods_work_or_are_refused_with_advice() -> None:
    (found,) = cluster.run(1, methods)
    for name in CALLS:
        if name in REFUSED:
            assert (
                found[name].startswith("NotImplementedError") and name in found[name] and REFUSED[name] in found[name]
            )
        else:
            assert found[name] == "accepted", name
    assert found["0"].startswith("ValueError") and found["True"].startswith("TypeError") == found["1.5"].startswith("T")


def test_no_public_method_of_torch_is_inherited_unawares() -> None:
    """A method that a newer torch adds would work on torch's own state, which is not there; an argument that it adds
    to one would not be taken.
    """
    torchs = FSDPModule.__mro__[1]
    public = {name for name, value in vars(torchs).items() if callable(value) and not name.startswith("_")}
    # An older torch has fewer.
    assert public <= set(CALLS) <= set(vars(Ours)), (public - set(CALLS), set(CALLS) - set(vars(Ours)))
    for name in public - set(REFUSED) - {"set_reduce_scatter_unused_params"}:  # that one takes anything
        assert parameters_of(getattr(torchs, name)) == parameters_of(getattr(Ours, name)), name


def parameters_of(function: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def test_no_argument_or_policy_of_torch_is_missing() -> None:
    theirs, ours = parameters_of(torch_fully_shard), parameters_of(fully_shard)
    assert ours[:-1] == theirs and ours[-1][0] == "orig_param_policy"
    for name in ("register_fsdp_forward_method", "share_comm_ctx"):
        assert parameters_of(getattr(fsdp, name)) == parameters_of(getattr(torch.distributed.fsdp, name)), name
    # Read by fully_shard, or by what it builds, one by one: a new field is a new promise.
    fields = {kind: {f.name for f in dataclasses.fields(kind)} for kind in (MixedPrecisionPolicy, CPUOffloadPolicy)}
    assert fields[MixedPrecisionPolicy] == {"param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs"}
    assert fields[CPUOffloadPolicy] == {"pin_memory"} and not dataclasses.fields(OffloadPolicy)
    assert {f.name for f in dataclasses.fields(DataParallelMeshDims)} == {"shard", "replicate"}
    # FSDP2's public names: those of its own file.
    module = "torch.distributed.fsdp._fully_shard"
    names = {
        name
        for name in torch.distributed.fsdp.__all__
        if sys.modules[module].__dict__.get(name) is getattr(torch.distributed.fsdp, name)
    }
    assert "fully_shard" in names and names <= set(fsdp.__all__), names - set(fsdp.__all__)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_the_page_says_what_is_not_there(name: str) -> None:
    assert f"`{name}`" in PAGE
