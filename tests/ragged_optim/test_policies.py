"""Routing of real models: embeddings, heads, norms, biases, routers and depthwise convolutions are not Muon's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ragged_optim
from ragged_optim import Block, ParamPolicy, explain, policies
from tests.ragged_optim.models import full

SMALL = {"hidden_size": 32, "num_attention_heads": 2, "vocab_size": 64}
LLAMA = {**SMALL, "num_hidden_layers": 1, "intermediate_size": 48, "num_key_value_heads": 2}
ATTENTION = {f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkvo"}
MLP = {f"model.layers.0.mlp.{x}_proj.weight" for x in ("gate", "up", "down")}
EXPERTS = {f"model.layers.0.mlp.experts.{x}" for x in ("gate_up_proj", "down_proj")}
MODELS = {
    "GPT2": (
        {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 64},
        {f"transformer.h.0.{x}.weight" for x in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")},
    ),
    "Llama": (LLAMA, ATTENTION | MLP),
    "Mixtral": ({**LLAMA, "num_local_experts": 4}, ATTENTION | EXPERTS),
    "Qwen2Moe": (
        {**LLAMA, "num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
        ATTENTION | EXPERTS | {f"model.layers.0.mlp.shared_expert.{x}_proj.weight" for x in ("gate", "up", "down")},
    ),
    "Qwen3Moe": ({**LLAMA, "num_experts": 4, "moe_intermediate_size": 16, "head_dim": 16}, ATTENTION | EXPERTS),
    "DeepseekV3": (
        {
            **LLAMA,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 0,
            "moe_intermediate_size": 16,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
        },
        {f"model.layers.0.self_attn.{x}.weight" for x in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")}
        | {"model.layers.0.self_attn.o_proj.weight"}
        | EXPERTS
        | {f"model.layers.0.mlp.shared_experts.{x}_proj.weight" for x in ("gate", "up", "down")},
    ),
    "GptOss": ({**LLAMA, "num_local_experts": 4, "head_dim": 16}, ATTENTION | EXPERTS),
    "Mamba": (
        {"num_hidden_layers": 1, "hidden_size": 32, "vocab_size": 64, "state_size": 8},
        {f"backbone.layers.0.mixer.{x}_proj.weight" for x in ("in", "x", "dt", "out")},
    ),
    "Bert": (
        {**SMALL, "num_hidden_layers": 1, "intermediate_size": 48, "is_decoder": True},
        {f"bert.encoder.layer.0.attention.self.{x}.weight" for x in ("query", "key", "value")}
        | {f"bert.encoder.layer.0.{x}.dense.weight" for x in ("attention.output", "intermediate", "output")}
        | {"cls.predictions.transform.dense.weight"},
    ),
    "ViT": (
        {
            "hidden_size": 32,
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "intermediate_size": 48,
            "image_size": 32,
        },
        {f"vit.layers.0.attention.{x}_proj.weight" for x in "qkvo"}
        | {f"vit.layers.0.mlp.fc{i}.weight" for i in (1, 2)},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    options, expected = MODELS[name]
    kind = "ForImageClassification" if name == "ViT" else "ForCausalLM"
    with torch.device("meta"):
        auto = getattr(transformers, f"AutoModel{kind}")
        model = auto.from_config(getattr(transformers, f"{name}Config")(**options))
    rows = explain(model.named_parameters(), policies.muon()).rows
    assert {row.name for row in rows if row.rule == "muon"} == expected
    assert {row.rule for row in rows} == {"muon", "adamw"}
    # The whole model can be optimized, tied weights once.
    optimizer = ragged_optim.Muon(model.named_parameters())
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))


@pytest.mark.parametrize(
    ("name", "shape", "hidden"),
    [
        ("tok_embeddings.weight", (64, 8), False),
        ("output.weight", (64, 8), False),
        ("layers.0.attention.wq.weight", (8, 8), True),
        ("layers.0.feed_forward.w1.weight", (8, 8), True),
        ("layers.0.moe.router.gate.weight", (4, 8), False),
        ("layers.0.moe.experts.w1", (4, 8, 8), True),
        ("layers.0.mlp.gate.weight", (128, 2880), False),  # GPT-OSS: a row per expert
        ("gate.weight", (512, 2048), False),  # Qwen3-Next, as fully_shard names it
        ("layers.0.mlp.gate.weight", (96, 32), True),  # a gated MLP
        ("layers.0.mlp.gate.weight", (32, 32), True),
        ("layers.0.mlp.experts.3.gate.weight", (8, 32), True),  # the gate of a narrow expert
        ("layers.0.mlp.shared_expert_gate.weight", (1, 32), False),
        ("transformer.wte.weight", (64, 8), False),
        ("lm_head.weight", (64, 8), False),
        ("head.weight", (10, 8), False),
        ("blocks.0.norm1.weight", (8,), False),
        ("blocks.0.mlp.fc1.bias", (8,), False),
        ("patch_embed.proj.weight", (8, 3, 4, 4), False),
        ("layer1.0.conv2.weight", (8, 8, 3, 3), True),
        ("mixer.conv1d.weight", (8, 1, 4), False),
        ("0.weight", (8, 8), True),
        ("proj.weight", (8, 1), False),
        ("lm_head.decoder.weight", (64, 8), False),
        ("model.layers.0.mlp.router.layer.weight", (4, 32), False),  # JetMoe, DBRX
        ("transformer.blocks.0.ffn.router.layer.weight", (4, 32), False),
        ("classifier.dense.weight", (32, 32), True),  # Roberta, Bart
        ("classifier.out_proj.weight", (2, 32), False),
        ("classification_head.out_proj.weight", (3, 32), False),
        ("self_attn.out_proj.weight", (32, 32), True),
        ("classifier.1.weight", (2, 16), False),  # ResNet
        ("cls.seq_relationship.weight", (2, 32), False),
        ("generator_lm_head.weight", (64, 16), False),
        ("proj_out.weight", (64, 32), False),  # Whisper, untied
        ("transformer_blocks.0.proj_out.weight", (32, 32), True),
        ("resnet.embedder.embedder.convolution.weight", (8, 3, 7, 7), False),
        ("efficientnet.embeddings.convolution.weight", (64, 3, 3, 3), False),
        ("conv1.weight", (64, 3, 7, 7), False),
        ("features.0.weight", (64, 3, 11, 11), False),
        ("features.3.weight", (192, 64, 5, 5), True),
        ("rwkv.blocks.0.attention.output.weight", (32, 32), True),
        ("blocks.0.att.output.weight", (32, 32), True),
        ("vocab_transform.weight", (32, 32), True),  # DistilBert
        ("vocab_projector.weight", (64, 32), False),
        ("empty.weight", (0, 8), False),
        # Of the families of transformers: Bark and Clvp, Canine, MarkupLM, CTRL, Kosmos-2.5, Dac, Mask2Former
        ("semantic.input_embeds_layer.weight", (64, 32), False),
        ("fine_acoustics.input_embeds_layers.3.weight", (64, 32), False),
        ("char_embeddings.HashBucketCodepointEmbedder_7.weight", (64, 32), False),
        ("embeddings.xpath_embeddings.xpath_tag_sub_embeddings.4.weight", (64, 32), False),
        ("transformer.w.weight", (64, 32), False),
        ("model.segment_emb.weight", (2, 32), False),
        ("quantizer.quantizers.0.codebook.weight", (64, 8), False),
        ("transformer_module.queries_features.weight", (10, 32), False),
        # Blip-2, Idefics2, Aria, Levit, Swin, Parakeet, Phi-4, Inkling
        ("query_tokens", (1, 32, 76), False),
        ("connector.perceiver_resampler.latents", (64, 32), False),
        ("multi_modal_projector.query", (64, 32), False),
        ("layer.attention.self.query.weight", (32, 32), True),
        ("stages.0.layers.1.module.attention_biases", (4, 196), False),
        ("attention.self.relative_position_bias_table", (169, 12), False),
        ("layers.0.self_attn.bias_u", (8, 32), False),
        ("relative_attention_bias_layer.bias_values.weight", (64, 16), False),
        ("self_attn.q_proj.norm.scale", (24, 128), False),
        # MGP-STR, Parakeet CTC, Csm, Flava, Levit, DeiT, Dia, Ovis2; heads before the last layer
        ("wp_head.weight", (64, 32), False),
        ("ctc_head.weight", (64, 32), False),
        ("depth_decoder.codebooks_head.weight", (31, 32, 64), False),
        ("mmm_text_head.decoder.weight", (64, 32), False),
        ("classifier_distill.linear.weight", (2, 32), False),
        ("distillation_classifier.weight", (2, 32), False),
        ("logits_dense.weight", (64, 32), False),
        ("vision_tower.head_linear.weight", (64, 32), False),
        ("pre_classifier.weight", (32, 32), True),
        ("attention.q_head.weight", (32, 32), True),  # Funnel
        ("lm_head.dense.weight", (32, 32), True),
        ("classifier.linear_hidden.weight", (32, 32), True),
        # Convolutions: of one output, of later stages, by their kernels alone
        ("decoder.conv_post.weight", (1, 32, 7), False),
        ("segformer.encoder.patch_embeddings.1.proj.weight", (64, 32, 3, 3), True),
        ("x_embedder.patch_embed.proj.weight", (32, 16, 2, 2), False),
        ("quantizer.input_proj.weight", (32, 64, 1), True),
    ],
)
def test_names_and_shapes(name: str, shape: tuple[int, ...], hidden: bool) -> None:
    assert policies.is_hidden_matrix(name, shape) is hidden


def test_weights_that_fully_shard_sees_without_a_name_ask_for_what_an_embedding_would_need() -> None:
    """fully_shard(model.tok_embeddings) passes "weight", fully_shard([norm, output]) "1.weight"."""
    tiles, whole = policies.muon_adamw8bit(), policies.muon(block=Block.whole())
    weight = torch.empty(200, 40)
    for name, of_tiles, of_whole in (
        ("weight", Block.rows(32), None),
        ("1.weight", Block.rows(32), Block.whole()),
        ("layers.0.w1.weight", None, Block.whole()),
        ("output.weight", Block.rows(32), None),
    ):
        one, two = tiles(name, weight), whole(name, weight)
        assert one is not None and two is not None
        assert (one.block, two.block) == (of_tiles, of_whole), name


def test_convolutions_are_flattened_and_stacks_are_not() -> None:
    policy = policies.muon(expert_block=Block.slices(1))
    conv = policy("layer.conv2.weight", torch.empty(8, 4, 3, 3))
    assert conv is not None and dict(conv.hyperparameters) == {"flatten": True}
    for name, shape in (("quantizer.input_proj.weight", (32, 64, 1)), ("upsampler.0.weight", (64, 32, 4))):
        over_time = policy(name, torch.empty(shape))
        assert over_time is not None and dict(over_time.hyperparameters) == {"flatten": True}, name
    stack = policy("experts.w1", torch.empty(4, 8, 8))
    assert stack is not None and not stack.hyperparameters and stack.block == Block.slices(1)


def test_patterns_take_the_first_match_full_or_relative() -> None:
    policy = policies.by_name(
        {"q_proj.weight": ParamPolicy(optimizer="muon", lr=1.0), "*.weight": ParamPolicy(optimizer="adamw", lr=2.0)},
        policies.muon(),
    )
    weight = torch.empty(4, 4)
    for name in ("q_proj.weight", "model.layers.3.q_proj.weight"):
        assert policy(name, weight) == ParamPolicy(optimizer="muon", lr=1.0)
    assert policy("a.weight", weight) == ParamPolicy(optimizer="adamw", lr=2.0)
    assert policy("experts.w1", torch.empty(2, 4, 4)) == ParamPolicy(optimizer="muon")


def test_fused_heads_by_policy_are_separate_matrices() -> None:
    weight = nn.Parameter(full((12, 8), 0))
    policy = policies.by_name({"qkv.weight": ParamPolicy(optimizer="muon", split_sizes=(4,) * 3)})
    optimizer = ragged_optim.Muon([("attn.qkv.weight", weight)], orig_param_policy=policy, weight_decay=0.0, lr=1.0)
    start = weight.detach().clone()
    weight.grad = full((12, 8), 1)
    optimizer.step()
    for part in (start - weight.detach()).split(4):
        singular = torch.linalg.svdvals(part)
        assert singular.min() > 0.6 and singular.max() < 1.2


def test_explain_shows_every_parameter_rule_and_state_as_text_and_as_a_rich_table() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    optimizer = ragged_optim.Muon(model.named_parameters(), lr=0.02)
    explanation = explain(optimizer)
    text = str(explanation)
    for part in ("0.weight", "16x8", "muon", "0.02", "512", "0.bias", "adamw", "muon: 2 parameters, 192 elements"):
        assert part in text
    assert [row.state_bytes for row in explanation.rows] == [512, 256, 2 * 64 + 4, 2 * 16 + 4]
    assert [who for who, _, _ in explanation.loads] == ["every rank"]
    rich = pytest.importorskip("rich.console")
    console = rich.Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(explanation)
    assert "0.weight" in console.export_text()


@pytest.mark.parametrize(
    ("name", "hidden"),
    [
        ("lm_head._orig_mod.weight", False),  # torch.compile(model.lm_head)
        ("model.embed_tokens._checkpoint_wrapped_module._orig_mod.weight", False),
        ("module._orig_mod.layers.0._fsdp_wrapped_module.mlp.up_proj.weight", True),
        ("embed.parametrizations.weight.original1", False),
        ("layers.0.proj.parametrizations.weight.original", True),
        ("base_model.model.lm_head.base_layer.weight", False),  # peft
        ("base_model.model.score.modules_to_save.default.weight", False),
        ("base_model.model.model.embed_tokens.lora_embedding_A.default", False),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight", True),
        ("layers.0.mlp._orig_mod.gate.weight", False),
    ],
)
def test_wrappers_do_not_hide_what_a_weight_is(name: str, hidden: bool) -> None:
    assert policies.is_hidden_matrix(name, (8, 32)) == hidden
