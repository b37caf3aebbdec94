"""What travels: nothing for matrices that lie whole on a rank, else two all-to-alls a batch, in the wire dtype."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import ragged_optim
from ragged_optim import ParamPolicy, exchange
from tests import cluster
from tests.ragged_optim.models import full, shard


class Counting:
    """Counts what ``torch.distributed`` is asked for, and the elements of messages and all-to-alls."""

    NAMES = (
        "all_to_all_single",
        "all_reduce",
        "all_gather_into_tensor",
        "all_gather",
        "broadcast",
        "reduce_scatter_tensor",
        "isend",
    )

    def __enter__(self) -> Counting:
        self.calls: Counter[str] = Counter()
        self.sent: list[tuple[int, torch.dtype]] = []
        self.real = {name: getattr(dist, name) for name in self.NAMES}
        for name, real in self.real.items():
            setattr(dist, name, self.wrap(name, real))
        return self

    def wrap(self, name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            if name in ("isend", "all_to_all_single"):
                tensor = args[0 if name == "isend" else 1]
                self.sent.append((tensor.numel(), tensor.dtype))
            return real(*args, **kwargs)

        return call

    def __exit__(self, *_: object) -> None:
        for name, real in self.real.items():
            setattr(dist, name, real)


def whole_on_ranks(shapes: list[tuple[int, ...]], owners: list[int]) -> list[nn.Parameter]:
    from ragged_shard.placement import RaggedShard

    mesh = cluster.mesh((dist.get_world_size(),))
    return [
        nn.Parameter(
            torch.distributed.tensor.distribute_tensor(
                full(s, i), mesh, [RaggedShard.one_hot(o, mesh.size(), dims=(0,))], src_data_rank=None
            )
        )
        for i, (s, o) in enumerate(zip(shapes, owners, strict=True))
    ]


def gradients(params: list[nn.Parameter]) -> None:
    for i, param in enumerate(params):
        grad = full(param.shape, 50 + i)
        if isinstance(param, DTensor):
            grad = torch.distributed.tensor.distribute_tensor(
                grad, param.device_mesh, param.placements, src_data_rank=None
            )
        param.grad = grad


def local_matrices(kind: str) -> dict[str, int]:
    shapes = [(8, 12), (12, 8), (4, 4)]
    if kind == "one-hot":
        params = whole_on_ranks(shapes, [1, 0, 1])
    elif kind == "plain":
        params = [nn.Parameter(full(s, i)) for i, s in enumerate(shapes)]
    elif kind == "replicate":
        params = [nn.Parameter(shard(full(s, i), "replicate", cluster.mesh((2,)))) for i, s in enumerate(shapes)]
    else:  # a stack of four experts, two on each rank
        params = [nn.Parameter(shard(full((4, 6, 5), 0), "shard0", cluster.mesh((2,))))]
    optimizer = ragged_optim.Muon(params)
    gradients(params)
    with Counting() as counting:
        optimizer.step()
    return dict(counting.calls)


@pytest.mark.parametrize("kind", ["one-hot", "plain", "replicate", "experts"])
def test_no_collective_for_matrices_that_lie_whole_on_their_owner(kind: str) -> None:
    assert cluster.run(2, local_matrices, kind) == [{}, {}]


def moving_matrices(count: int, dtype: torch.dtype, wire: torch.dtype | None = None) -> Any:
    params = [nn.Parameter(shard(full((16, 24), i), "shard0", cluster.mesh((2,)))) for i in range(count)]
    optimizer = ragged_optim.Muon(params, ns_dtype=dtype, wire_dtype=wire)
    gradients(params)
    limit, exchange.BATCH_BYTES = exchange.BATCH_BYTES, 1
    try:
        with Counting() as counting:
            optimizer.step()
    finally:
        exchange.BATCH_BYTES = limit
    return dict(counting.calls), counting.sent


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_two_all_to_alls_a_batch_of_one_matrix_per_owner(dtype: torch.dtype) -> None:
    for calls, sent in cluster.run(2, moving_matrices, 4, dtype):
        # Whether there are gradients: six bytes for each of four parameters.
        assert sent.pop(0) == (24, torch.uint8)
        # Two matrices of 16 x 24 a batch, one for each owner: half of the other's goes out, and half of the own update.
        # The other halves are where they are needed.
        assert sent == [(192, dtype)] * 4
        assert calls == {"isend": 1, "all_to_all_single": 4}


def test_bf16_on_the_wire_by_option() -> None:
    for _, sent in cluster.run(2, moving_matrices, 2, torch.float32, torch.bfloat16):
        assert [dtype for _, dtype in sent] == [torch.uint8, torch.bfloat16, torch.bfloat16]


def test_an_elementwise_optimizer_never_communicates() -> None:
    assert cluster.run(2, adamw_collectives) == [{}, {}]


def adamw_collectives() -> dict[str, int]:
    params = [nn.Parameter(shard(full((7, 5), i), "ragged", cluster.mesh((2,)), i)) for i in range(3)]
    optimizer = ragged_optim.AdamW(params)
    gradients(params)
    with Counting() as counting:
        optimizer.step()
    return dict(counting.calls)


def lacking(rank_without: int, layout: str) -> str:
    params = [nn.Parameter(shard(full((8, 6), i), layout, cluster.mesh((3,)), 3)) for i in range(3)]
    optimizer = ragged_optim.Muon([(f"layer.{i}.weight", p) for i, p in enumerate(params)])
    gradients(params)
    if dist.get_rank() == rank_without:
        params[1].grad = None
    before = [p.detach().to_local().clone() for p in params]
    try:
        optimizer.step()
    except RuntimeError as error:
        assert all(torch.equal(p.detach().to_local(), b) for p, b in zip(params, before, strict=True))
        assert all(not optimizer.state[p]["momentum_buffer"].to_local().any() for p in params)
        return str(error)
    return ""


def test_a_gradient_that_some_ranks_lack_is_one_error_on_all() -> None:
    messages = cluster.run(3, lacking, 1, "shard0")
    assert len(set(messages)) == 1
    assert "'layer.1.weight'" in messages[0] and "gradient on some ranks and None on others" in messages[0]


def algorithm_2(code: str) -> bool:
    """The paper's Algorithm 2 as docs/optimizers.md has it: gather to a root, iterate, scatter back."""
    from ragged_optim.newton_schulz import newton_schulz
    from ragged_shard.placement import RaggedShard

    mesh = cluster.mesh((3,))
    weight = shard(full((10, 14), 0), "ragged", mesh, 5)
    param = nn.Parameter(weight.clone())
    optimizer = ragged_optim.Muon([param], lr=0.02, weight_decay=0.1)
    names = {"torch": torch, "DTensor": DTensor, "RaggedShard": RaggedShard, "newton_schulz": newton_schulz}
    names |= {"mesh": mesh, "owner": 2, "lr": 0.02, "mu": 0.95, "weight_decay": 0.1}
    names |= {"weight": weight, "momentum": torch.zeros_like(weight)}
    for step in range(3):
        names["grad"] = param.grad = shard(full((10, 14), 1 + step), "ragged", mesh, 5)
        optimizer.step()
        exec(code, names)
    return torch.equal(weight.to_local(), param.to_local())


def test_equals_the_papers_algorithm_as_the_documentation_writes_it() -> None:
    text = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text()
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "one_hot" in block)
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    assert cluster.run(3, algorithm_2, code) == [True] * 3


def several_wires() -> bool:
    def policy(name: str, parameter: Any) -> ParamPolicy:
        return ParamPolicy(optimizer="muon", ns_dtype=torch.float32 if "1" in name else torch.bfloat16)

    results = []
    for layout in ("plain", "shard0"):
        params = [nn.Parameter(shard(full((8, 6), i), layout, cluster.mesh((2,)))) for i in range(4)]
        optimizer = ragged_optim.Muon([(f"{i}.weight", p) for i, p in enumerate(params)], orig_param_policy=policy)
        gradients(params)
        optimizer.step()
        results.append([p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in params])
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_matrices_of_several_wire_dtypes() -> None:
    assert cluster.run(2, several_wires) == [True, True]
