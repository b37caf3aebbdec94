"""Writes through ``.data`` in what torch.compile traces broke its graphs (pytorch/pytorch#161153)."""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo

from tests import cluster
from tests.fsdp.modules import Stack, squares
from tests.fsdp.reference import shard_children, train


def compiled() -> tuple[list[str], int, int]:
    """What differs from a plain model; graph breaks; graphs that were compiled."""
    graphs = []

    def backend(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()

    def shard(model: torch.nn.Module) -> torch.nn.Module:
        for block in model.blocks:
            # fullgraph: a break in the block is an error.
            block.forward = torch.compile(block.forward, backend=backend, fullgraph=True)
        return shard_children(model, reshard_after_forward=True)

    found = train(Stack, squares, shard, tolerance=1e-6)
    torch._dynamo.reset()
    return found, len(graphs), sum("set_data" in str(node.target) for graph in graphs for node in graph.graph.nodes)


def test_a_compiled_block_is_one_graph_without_writes_through_data() -> None:
    for found, graphs, writes in cluster.run(2, compiled, deadline=120):
        assert found == []
        # One for each block (its parameters are other objects), and none more in later steps.
        assert 1 <= graphs <= 3
        assert writes == 0
