"""Ready-made policies: who updates which parameter of a real model, by name suffix and global shape.

A policy is a function ``(name, parameter) -> ParamPolicy | None``; the same one goes to ``fully_shard`` (which calls
it with names relative to a module) and to an optimizer (full names). So everything here looks at the last parts of a
name only.

    Muon(model.named_parameters(), orig_param_policy=policies.by_name({"*.q_proj.weight": ParamPolicy(...)},
    policies.muon()))
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from ragged_shard.block import Block
from ragged_shard.policy import OrigParamPolicy, ParamPolicy

__all__ = ["ByName", "by_name", "is_hidden_matrix", "muon"]

# Parts of a dotted name that mark an input or output table, or a router: rows there are looked up or compete, they are
# no linear map between hidden states. Whole parts, as used in transformers, torchtitan, timm, nanoGPT, mamba and
# whisper.
_TABLES = re.compile(
    r"""^(
      .*embed(ding|dings|s|der)?(_?tokens|_?positions|_?in|_?out)? | .*embeddings?_.* | tok_?embeddings | embed_.* |
      .*_embed
    | wte | wpe | shared | relative_attention_bias | rel_pos.* | pos_emb.* | position.*
    | lm_head | head | heads | output | embed_out | unembed | output_projection | proj_out | classifier | score | scores
    | qa_outputs | vocab_projector | vocab_transform_out | decoder_head | predictions | cls | pooler
    | router | gate | wg | gating | routers? | switch
    )$""",
    re.VERBOSE,
)
# Marks a convolution: dims 1.. are one input.
_CONVOLUTION = re.compile(r"(^|[._])(conv\w*|patch_embed\w*|downsample|stem)([._]|$)")
_EXPERTS = re.compile(
    r"(^|[._])(experts?|moe|w1|w2|w3|gate_up_proj|down_proj|gate_proj|up_proj|mlp1|mlp2)([._]|_weight|$)"
)


def is_hidden_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether a parameter is a linear map between hidden states, alone, fused or stacked.

    No: vectors, embeddings, heads, norms, routers, and convolutions that look at one channel (depthwise).
    """
    if len(shape) < 2 or (min(shape[-2:]) == 1 and len(shape) == 2) or 0 in shape:
        return False
    parts = name.split(".")
    leaf = parts[-1] if parts[-1] not in ("weight", "bias") else (parts[-2] if len(parts) > 1 else "weight")
    if parts[-1].endswith("bias") or re.search(r"norm|(^|_)ln(_|\d|$)", leaf):
        return False
    if _TABLES.match(leaf):
        return False
    # `decoder.weight` under a head is tied to the embedding; a `decoder` elsewhere holds layers.
    if leaf == "decoder" and len(parts) > 2 and _TABLES.match(parts[-3]):
        return False
    if _is_convolution(name, shape):
        return shape[1] > 1
    return True


def _is_convolution(name: str, shape: Sequence[int]) -> bool:
    if len(shape) == 4 and not _EXPERTS.search(name):
        return True
    return len(shape) >= 3 and _CONVOLUTION.search(name) is not None


class _Muon:
    def __init__(
        self, block: Block | None, expert_block: Block | None, rule: str, rest: str, rest_block: Block | None
    ) -> None:
        self.block, self.expert_block, self.rule, self.rest, self.rest_block = (
            block,
            expert_block,
            rule,
            rest,
            rest_block,
        )

    def __call__(self, name: str, parameter: Any) -> ParamPolicy:
        shape = tuple(parameter.shape)
        if not is_hidden_matrix(name, shape):
            return ParamPolicy(optimizer=self.rest, block=self.rest_block if len(shape) > 1 else None)
        if _is_convolution(name, shape):
            return ParamPolicy(optimizer=self.rule, block=self.block, flatten=True)
        if len(shape) > 2:
            return ParamPolicy(optimizer=self.rule, block=self.expert_block)
        return ParamPolicy(optimizer=self.rule, block=self.block)


def muon(*, block: Block | None = None, expert_block: Block | None = None) -> OrigParamPolicy:
    """Hidden matrices to Muon, everything else to AdamW.

    Leading dims of a stack of experts are a matrix each; convolutions are flattened to (out, in * kernel).
    ``block``: what ``fully_shard`` shall keep together of a hidden matrix (``Block.whole()`` saves all communication
    of the optimizer where the balance allows it); ``expert_block``: the same for stacks (``Block.slices(1)``: whole
    experts).
    """
    return _Muon(block, expert_block, "muon", "adamw", None)


class ByName:
    """Policies by name pattern, the first that matches; see ``by_name``."""

    def __init__(self, patterns: Mapping[str, ParamPolicy], default: OrigParamPolicy | None) -> None:
        self.patterns, self.default = dict(patterns), default

    def __call__(self, name: str, parameter: Any) -> ParamPolicy | None:
        for pattern, policy in self.patterns.items():
            if _matches(name, pattern):
                return policy
        return None if self.default is None else self.default(name, parameter)

    def check(self, names: Iterable[str]) -> None:
        """Raise ``ValueError`` for patterns that match none of ``names``."""
        names = list(names)
        idle = [pattern for pattern in self.patterns if not any(_matches(name, pattern) for name in names)]
        if idle:
            raise ValueError(
                f"orig_param_policy: the pattern(s) {', '.join(map(repr, idle))} match no parameter; the names are "
                f"such as "
                f"{', '.join(map(repr, names[:5]))}"
            )
        check = getattr(self.default, "check", None)
        if check is not None:
            check(names)


def _matches(name: str, pattern: str) -> bool:
    """A shell pattern against the full name or, since fully_shard sees relative names, its tail after a dot."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}") or fnmatchcase(f".{name}", pattern)


def by_name(patterns: Mapping[str, ParamPolicy], default: OrigParamPolicy | None = None) -> OrigParamPolicy:
    """``{"*.q_proj.weight": ParamPolicy(...), ...}``: shell patterns, the first match wins, then ``default``.

    The optimizer refuses patterns that match no parameter.
    """
    return ByName(patterns, default)
