"""Reductions in the order of a Python set: another order on each rank, a hang that comes and goes with the hash seed
(NVIDIA/Megatron-LM#2218).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from tests import cluster
from tests.fsdp.test_collective_sequence import divergent

SCRIPT = """
import json, sys
from datetime import timedelta
import torch, torch.distributed as dist
rank = int(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2,
                        timeout=timedelta(minutes=5))
from tests.fsdp.test_collective_sequence import divergent
sequence = divergent(2)
dist.barrier()
print(json.dumps(sequence))
dist.destroy_process_group()
"""


def test_the_order_of_collectives_does_not_depend_on_the_hash_seed(tmp_path: Any) -> None:
    """A set or an id() in the order of collectives would show as a hang or as a different list."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(tmp_path / "store")],
            env={**os.environ, "PYTHONHASHSEED": str(17 + 4 * rank), "PYTHONPATH": cluster.REPOSITORY},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [
            json.loads(process.communicate(timeout=6 * cluster.SHARED_BY * cluster.DEADLINE)[0].splitlines()[-1])
            for process in processes
        ]
    finally:
        for process in processes:
            process.kill()
    assert outputs[0] == outputs[1]
    assert [tuple(x) for x in outputs[0]] == cluster.run(2, divergent, 2)[0]
