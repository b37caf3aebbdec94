"""The part that ``reshard_after_forward=2`` keeps for backward was dropped when the root's forward ended, so that
backward gathered from all ranks again.
"""

from __future__ import annotations

from tests import cluster
from tests.fsdp.counting import Counted
from tests.fsdp.modules import Stack, squares
from tests.fsdp.reference import shard_children


def broadcasts() -> tuple[int, int]:
    """In forward and in backward: on gloo a gather is one from each rank of the group."""
    model = shard_children(Stack(), mesh=cluster.mesh((4,)), reshard_after_forward=2)
    squares(model).backward()
    found = []
    with Counted() as counted:
        loss = squares(model)
        found.append(sum(name == "broadcast_" for name, _ in counted.collectives))
        loss.backward()
    found.append(sum(name == "broadcast_" for name, _ in counted.collectives) - found[0])
    return found[0], found[1]


def test_resharding_to_a_smaller_group_gathers_within_it() -> None:
    assert cluster.run(4, broadcasts) == [(4 * 4, 4 * 2)] * 4
