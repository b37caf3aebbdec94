"""Buckets with 3-D stacks of experts were padded by 25 % and more (NVIDIA/Megatron-LM#5013, #4979, #7585), and cut
along the experts alone, which ranks beyond the number of experts go without (pytorch/torchtitan#1561, #2668).
"""

from __future__ import annotations

import math

import pytest

from ragged_shard import TensorSpec, plan_bucket, validate

# A layer of GPT-OSS: shape, and the rows that are a block.
EXPERTS, HIDDEN = 32, 2880
LAYER = {
    "experts.gate_up_proj": (EXPERTS, HIDDEN, 2 * HIDDEN),
    "experts.gate_up_proj_bias": (EXPERTS, 2 * HIDDEN),
    "experts.down_proj": (EXPERTS, HIDDEN, HIDDEN),
    "experts.down_proj_bias": (EXPERTS, HIDDEN),
    "router.weight": (EXPERTS, HIDDEN),
    "router.bias": (EXPERTS,),
    "q_proj.weight": (4096, HIDDEN),
    "k_proj.weight": (512, HIDDEN),
    "v_proj.weight": (512, HIDDEN),
    "o_proj.weight": (HIDDEN, 4096),
    "norm.weight": (HIDDEN,),
}


@pytest.mark.parametrize("world_size", [8, 64, 256, 1024])
def test_rows_of_expert_stacks_cost_less_than_half_a_percent(world_size: int) -> None:
    specs = [TensorSpec(name, math.prod(shape), 2, shape[-1] if len(shape) > 1 else 1) for name, shape in LAYER.items()]
    plan = plan_bucket(specs, world_size)
    validate(plan, specs)
    total = sum(spec.numel for spec in specs)
    assert plan.padding < 0.005 * total
    # Every rank has its part, also where there are more ranks than experts.
    assert plan.shard < 1.005 * total / world_size
    by_experts = sum(world_size * math.ceil(s[0] / world_size) * math.prod(s[1:]) for s in LAYER.values())
    assert plan.padding < 0.01 * (by_experts - total) or world_size <= EXPERTS
