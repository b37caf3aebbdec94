"""What users of other libraries ran into, each by the public issue and its symptom."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import ragged_optim
from ragged_optim import policies
from tests.ragged_optim.models import full


def trained(pairs: list[tuple[str, nn.Parameter]], name: str = "AdamW", **options: Any) -> Any:
    optimizer = getattr(ragged_optim, name)(pairs, **options)
    for seed in range(2):
        for i, (_, param) in enumerate(sorted(pairs)):
            param.grad = full(param.shape, 10 * seed + i, param.dtype)
        optimizer.step()
    return optimizer


def test_megatron_2625_a_state_dict_with_the_parameters_in_another_order_loads_by_name() -> None:
    pairs = [("a", nn.Parameter(full((4, 3), 0))), ("b", nn.Parameter(full((4, 3), 1)))]
    saved = trained(pairs)
    again = ragged_optim.AdamW([pairs[1], pairs[0]])
    again.load_state_dict(saved.state_dict())
    for _, param in pairs:
        assert torch.equal(again.state[param]["exp_avg"], saved.state[param]["exp_avg"])
    assert again.param_groups[0]["param_names"] == ["b", "a"]


def test_prime_rl_3252_parameters_without_elements_keep_their_keys() -> None:
    pairs = [("empty", nn.Parameter(full((0, 5), 0))), ("full", nn.Parameter(full((3, 5), 1)))]
    for name in ("AdamW", "Lion", "Muon"):
        optimizer = trained(pairs, name)
        saved = copy.deepcopy(optimizer.state_dict())
        assert len(saved["state"]) == 2
        optimizer.load_state_dict(saved)


def test_deepspeed_7746_gradients_of_another_dtype_than_the_momentum() -> None:
    param = nn.Parameter(full((8, 8), 0))
    param.grad_dtype = None
    optimizer = ragged_optim.Muon([param])
    param.grad = full((8, 8), 1, torch.bfloat16)
    optimizer.step()
    assert optimizer.state[param]["momentum_buffer"].dtype == torch.float32


def test_llamafactory_8041_a_model_without_a_matrix_for_muon_is_seen_in_explain() -> None:
    optimizer = ragged_optim.Muon(nn.LayerNorm(8).named_parameters())
    assert {row.rule for row in ragged_optim.explain(optimizer).rows} == {"adamw"}


def test_dion_94_the_head_is_stepped_with_the_lr_of_its_own_group() -> None:
    head = nn.Parameter(torch.zeros(40, 8))
    optimizer = ragged_optim.Muon([("lm_head.weight", head)], lr=0.5, adamw_lr=0.125, adamw_weight_decay=0.0)
    head.grad = torch.ones_like(head)
    optimizer.step()
    torch.testing.assert_close(head.detach(), torch.full((40, 8), -0.125), rtol=1e-4, atol=0)


def test_deepspeed_8438_routing_looks_at_the_shape_and_name_not_at_what_lies_here() -> None:
    weight = nn.Parameter(torch.empty(64, 32, device="meta"))
    assert policies.muon()("layers.0.q_proj.weight", weight).optimizer == "muon"  # type: ignore[union-attr]


def test_ao_730_a_float_may_be_assigned_to_lr() -> None:
    param = nn.Parameter(torch.zeros(64, 64))
    optimizer = ragged_optim.AdamW8bit([param], lr=torch.tensor(0.5), weight_decay=0.0)
    optimizer.param_groups[0]["lr"] = 0.25
    param.grad = torch.ones_like(param)
    optimizer.step()
    torch.testing.assert_close(param.detach(), torch.full((64, 64), -0.25), rtol=1e-3, atol=0)


@pytest.mark.parametrize("name", ["AdamW", "AdamW8bit", "Muon"])
def test_bitsandbytes_2010_a_large_decay_is_applied_to_the_old_parameter(name: str) -> None:
    param = nn.Parameter(torch.ones(64, 64))
    optimizer = getattr(ragged_optim, name)([param], lr=0.1, weight_decay=5.0)
    param.grad = torch.zeros_like(param)
    optimizer.step()
    torch.testing.assert_close(param.detach(), torch.full((64, 64), 0.5), rtol=1e-6, atol=0)


def test_bitsandbytes_drops_the_imaginary_part_and_we_refuse() -> None:
    with pytest.raises(ValueError, match="parameter 'z' is complex"):
        ragged_optim.AdamW8bit([("z", nn.Parameter(torch.zeros(64, 64, dtype=torch.complex64)))])
