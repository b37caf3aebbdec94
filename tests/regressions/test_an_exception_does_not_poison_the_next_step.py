"""An exception or an out-of-memory error in an iteration left a state in which the next one raised, or computed with
stale weights (mosaicml/composer#3866, pytorch/torchtitan#1329, pytorch/torchtitan#3724).
"""

from __future__ import annotations

import pytest

from tests import cluster
from tests.fsdp.test_failure import CASES, recover


@pytest.mark.parametrize(("where", "index"), CASES)
def test_an_exception_does_not_poison_the_next_step(where: str, index: int) -> None:
    """Raised in forward, in backward or in a hook: the next two steps are those of a clean run, memory rests."""
    assert cluster.run(2, recover, where, index, False) == [[], []]
