"""The gradient norm that was logged was too small by about sqrt(W): ``.item()`` of a norm that was still a partial sum
gave one rank's part (pytorch/pytorch#170862).
"""

from __future__ import annotations

import math

from torch import nn

from tests import cluster
from tests.fsdp.modules import Stack, squares
from tests.fsdp.reference import average_gradients, twins


def item_of_the_norm() -> list[str]:
    sharded, plain = twins(Stack)
    for model in (sharded, plain):
        squares(model).backward()
    average_gradients(plain)
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 1.0).item() for m in (sharded, plain)]
    return [] if math.isclose(*norms, rel_tol=1e-5) else [str(norms)]


def test_the_logged_norm_is_not_one_ranks_part() -> None:
    assert cluster.run(2, item_of_the_norm) == [[], []]
