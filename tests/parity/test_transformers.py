"""Models as users have them: transformers' own classes with small random configurations, against DDP."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import MixedPrecisionPolicy, fully_shard
from ragged_shard import Block, ParamPolicy
from tests import cluster
from tests.fsdp.reference import differences
from tests.parity.ddp import MIXED, train_beside_ddp

pytest.importorskip("transformers")

VOCABULARY = 61
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}

NAMES = ("llama", "gpt2", "qwen3_moe", "gpt_oss", "deepseek_v3", "bert", "vit")
# Experts that no token chose, and parameters that a task does not use.
UNUSED = ("qwen3_moe", "gpt_oss", "deepseek_v3", "vit")


def build(name: str) -> nn.Module:
    import transformers as t

    torch.manual_seed(0)
    if name == "llama":
        config = t.LlamaConfig(**SMALL, intermediate_size=40, num_key_value_heads=1)
        return t.LlamaForCausalLM(config)
    if name == "gpt2":
        config = t.GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=16,
            n_layer=2,
            n_head=2,
            n_positions=32,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
        )
        return t.GPT2LMHeadModel(config)
    if name == "qwen3_moe":
        config = t.Qwen3MoeConfig(
            **SMALL,
            intermediate_size=40,
            moe_intermediate_size=24,
            num_experts=6,
            num_experts_per_tok=2,
            num_key_value_heads=1,
            head_dim=8,
            decoder_sparse_step=1,
        )
        return t.Qwen3MoeForCausalLM(config)
    if name == "gpt_oss":
        config = t.GptOssConfig(
            **SMALL,
            intermediate_size=24,
            num_key_value_heads=1,
            head_dim=8,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=4,
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )
        return t.GptOssForCausalLM(config)
    if name == "deepseek_v3":
        config = t.DeepseekV3Config(
            **SMALL,
            intermediate_size=40,
            moe_intermediate_size=24,
            num_key_value_heads=2,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            n_shared_experts=1,
            first_k_dense_replace=1,
            q_lora_rank=12,
            kv_lora_rank=8,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=8,
        )
        return t.DeepseekV3ForCausalLM(config)
    if name == "bert":
        config = t.BertConfig(**SMALL, intermediate_size=40, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
        return t.BertForMaskedLM(config)
    if name == "vit":
        config = t.ViTConfig(
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=40,
            image_size=8,
            patch_size=4,
            num_labels=7,
            hidden_dropout_prob=0,
            attention_probs_dropout_prob=0,
        )
        return t.ViTForImageClassification(config)
    raise ValueError(name)


def inputs(name: str, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    if name == "vit":
        return {
            "pixel_values": torch.randn(2, 3, 8, 8, generator=generator),
            "labels": torch.randint(7, (2,), generator=generator),
        }
    tokens = torch.randint(VOCABULARY, (2, 9), generator=generator)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def layers_of(model: nn.Module) -> list[nn.Module]:
    (found,) = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == 2]
    return list(found)


def policy(name: str, parameter: nn.Parameter) -> ParamPolicy | None:
    return ParamPolicy(block=Block.rows(4)) if parameter.ndim == 2 else None


def train(name: str, checkpoints: str, low: bool) -> list[str]:
    plain = build(name)
    model = copy.deepcopy(plain)
    for one in (plain, model):
        if checkpoints:
            one.gradient_checkpointing_enable({"use_reentrant": checkpoints == "reentrant"})
        one.train()
    options = {"orig_param_policy": policy, "mp_policy": MIXED if low else MixedPrecisionPolicy()}
    for layer in layers_of(model):
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return train_beside_ddp(
        model, plain, lambda m, step: m(**inputs(name, step)).loss, low=low, find_unused_parameters=name in UNUSED
    )


@pytest.mark.parametrize("low", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("name", "checkpoints"),
    [(name, how) for name in NAMES for how in ("", "checkpointed")] + [("llama", "reentrant")],
)
def test_trains_as_ddp(name: str, checkpoints: str, low: bool) -> None:
    # The first call imports the model's module.
    for found in cluster.run(2, train, name, checkpoints, low, deadline=120):
        assert found == []


def tied_and_saved() -> list[str]:
    """GPT-2's head and embedding are one parameter after sharding and in the state dict."""
    model = build("gpt2")
    names = list(model.state_dict())
    for layer in layers_of(model):
        fully_shard(layer)
    fully_shard(model)
    found = [] if model.lm_head.weight is model.transformer.wte.weight else ["untied"]
    if list(model.state_dict()) != names:
        found.append("names of the state dict")
    with torch.no_grad():
        first = model(**inputs("gpt2", 0)).logits
    return found if torch.isfinite(first).all() else [*found, "logits"]


def test_tied_head_of_gpt2() -> None:
    assert cluster.run(2, tied_and_saved, deadline=120) == [[], []]


def generated() -> list[str]:
    """generate(), a method of the root that calls forward many times, under no_grad and inference_mode; then training
    goes on.
    """
    plain = build("llama")
    model = copy.deepcopy(plain)
    for layer in layers_of(model):
        fully_shard(layer)
    fully_shard(model)
    prompt = torch.arange(5)[None]
    found = []
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            outputs = [m.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0) for m in (model, plain)]
        if not torch.equal(*outputs):
            found.append(f"{outputs}")
    losses = [m(input_ids=prompt, labels=prompt).loss for m in (model, plain)]
    for loss in losses:
        loss.backward()
    return found + differences(model, plain, 1e-6)


def test_generate() -> None:
    assert cluster.run(2, generated, deadline=120) == [[], []]
