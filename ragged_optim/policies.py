"""Ready-made policies: who updates which parameter of a real model, by name suffix and global shape.

A policy is a function ``(name, parameter) -> ParamPolicy | None``; the same one goes to ``fully_shard`` (which calls
it with names relative to a module) and to an optimizer (full names). So everything here looks at the last parts of a
name only.

    Muon(model.named_parameters(), orig_param_policy=policies.by_name({"*.q_proj.weight": ParamPolicy(...)},
    policies.muon()))
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar

from ragged_optim.quantize import tiling
from ragged_shard.block import Block
from ragged_shard.policy import OrigParamPolicy, ParamPolicy, apply_policy

if TYPE_CHECKING:
    from ragged_optim.optimizer import RaggedOptimizer

__all__ = [
    "ByName",
    "Explanation",
    "HiddenMatrices",
    "Row",
    "Tiles",
    "adamw8bit",
    "bare_name",
    "by_name",
    "explain",
    "is_hidden_matrix",
    "muon",
    "muon_adamw8bit",
    "normuon",
    "shampoo",
    "soap",
]

# The last part of a name, for input and output tables and for routers: rows there are looked up or compete, they are no
# linear map between hidden states. As used in transformers, torchtitan, timm, nanoGPT, mamba and whisper.
_TABLES = re.compile(
    r"""^(
      .*[Ee]mbed(ding|dings|s|der)?(_?tokens|_?positions|_?in|_?out|_layer|_\d+)? | .*embeddings?_.* | tok_?embeddings
    | embed_.* | .*_emb(ed)? | tokens? | positions? | (?!vocab_transform$).*vocab.* | wte | wpe | shared | codebooks? |
    rel_pos.* | pos_emb.* | position.* | .*_tokens? | queries_.* | query_feat | latents(_.*)? | latent_quer(y|ies) |
    (.*_)?bias(es)?(_(u|v|table|values))? | (?![qkv]_)(.*_)?heads?(_linear)? | output | embed_out | unembed |
    output_projection | (?!pre_)(.*_)?classifier | (.*_)?logits(_dense)? | scores? | qa_outputs | predict_.* |
    predictions | cls | seq_relationship | router | routers | switch | A_log | D
    )$""",
    re.VERBOSE,
)
# Parts of a router, a head or a list of tables whose own name says nothing: `router.layer`, `classifier.1`.
_HEADS = re.compile(
    r"""^((routers? | \w*classifier\w* | \w*_head)\.(layer|out_proj|linear|linear_out|\d+) | head\.linear
    | \w*embed(dings|s_layers)\.\d+ | transformer\.w)$""",
    re.VERBOSE,
)
# Parameters that are no weight of a module: vectors per head, and what is learned in place of an input.
_LEARNED = re.compile(r"^(scale|gamma|query|queries)$")
# `output` and `proj_out` are heads at the top of a model; within a layer they are its last projection.
_LAST = re.compile(r"^((.*\.)?(\w*att\w*|ffn|mlp|feed_forward)\.output|.+\.proj_out)$")
# What wrappers put into names: torch.compile, activation checkpointing, FSDP and DDP of torch; adapters of peft.
_WRAPPERS = re.compile(
    r"""(^|(?<=\.))(_orig_mod | _checkpoint_wrapped_module | _fsdp_wrapped_module | module
    | base_layer | original_module | modules_to_save\.\w+)\.""",
    re.VERBOSE,
)
# Parametrizations (weight norm, ...), and adapters of embeddings: the last part says nothing.
_LAST_PARTS = re.compile(r"\.parametrizations(\.\w+)\.original\d*$|(\.lora_embedding_[AB])\.\w+$")
# What fully_shard calls the weights of a module that it wraps alone, or in a list of modules.
_NAMELESS = re.compile(r"^(\d+\.)?weight$")
# A router of experts, or the gate of a gated MLP: by its shape. A router has a row per expert, many times fewer than
# columns (GPT-OSS 128 x 2880, Qwen3-Next 512 x 2048); a gate has one per hidden unit of the MLP.
_GATES = frozenset({"gate", "wg", "gating"})
# The first layer of a vision model sees pixels (or a few channels of latents), not hidden states.
_PATCHES = re.compile(r"(^|[._])(patch_embed\w*|patchify|stem)([._]|$)")
PIXELS = 16  # channels at most
_NORM = re.compile(r"norm|(^|_)ln(_|\d|$)")
# Marks a convolution: dims 1.. are one input.
_CONVOLUTION = re.compile(r"(^|[._])(\w*conv\w*|downsampl\w*)([._]|$)")
KERNEL = 16  # elements at most
_EXPERTS = re.compile(r"(^|[._])(experts?|moe)([._]|$)")
_ONE_EXPERT = re.compile(r"(^|[._])experts?[._]\d+([._]|$)")


def is_hidden_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether a parameter is a linear map between hidden states, alone, fused or stacked.

    No: vectors, embeddings, heads, norms, routers, and convolutions that look at one channel (depthwise) or at three
    (the first layer of a vision model).
    """
    if len(shape) < 2 or 0 in shape:
        return False
    name = bare_name(name)
    *path, last = name.split(".")
    leaf = path[-1] if last == "weight" and path else last
    if _LEARNED.match(last) or _NORM.search(leaf):
        return False
    if _PATCHES.search(name) and not (len(shape) > 2 and shape[1] > PIXELS):
        return False
    module = ".".join(path)
    if _HEADS.match(".".join(path[-2:])) or module == "proj_out" or (_TABLES.match(leaf) and not _LAST.match(module)):
        return False
    if leaf in _GATES and 2 * shape[0] <= shape[-1] and not _ONE_EXPERT.search(name):
        return False
    # `decoder.weight` under a head is tied to the embedding; a `decoder` elsewhere holds layers.
    if leaf == "decoder" and len(path) > 1 and _TABLES.match(path[-2]):
        return False
    if _is_convolution(name, shape):
        # One channel: depthwise, or of grey pixels or sound; three: of colours.
        return shape[0] > 1 and shape[1] not in (1, 3)
    return min(shape[-2:]) > 1


def bare_name(name: str) -> str:
    """``name`` without what wrappers have put there."""
    return _LAST_PARTS.sub(r"\1\2", _WRAPPERS.sub("", name))


def _is_convolution(name: str, shape: Sequence[int]) -> bool:
    if len(shape) < 3 or _CONVOLUTION.search(name):
        return len(shape) > 2
    if len(shape) > 3 or _EXPERTS.search(name):
        return not _EXPERTS.search(name)
    # Over time or a stack of matrices: kernels are smaller than hidden sizes.
    return shape[2] <= KERNEL and 4 * shape[2] <= min(shape[:2])


@dataclass(frozen=True)
class HiddenMatrices:
    """Hidden matrices to ``rule``, everything else to ``rest``; the blocks are what ``fully_shard`` shall keep
    together.

    Leading dims of a stack of experts are a matrix each; convolutions are flattened to (out, in * kernel).
    """

    rule: str
    rest: str
    block: Block | None = None
    expert_block: Block | None = None
    rest_block: Block | None = None

    def __call__(self, name: str, parameter: Any) -> ParamPolicy:
        name, shape = bare_name(name), tuple(parameter.shape)
        if not is_hidden_matrix(name, shape):
            return ParamPolicy(optimizer=self.rest, block=self.rest_block and _fitting(self.rest_block, shape))
        if _is_convolution(name, shape):
            return ParamPolicy(optimizer=self.rule, block=self.block, flatten=True)
        block = self.expert_block if len(shape) > 2 else self.block
        if _NAMELESS.match(name):
            # It may be the embedding or the head: their tiles too, and never the whole of one that is wrapped alone.
            if name == "weight" and block is not None and block.kind == "whole":
                block = None
            block = block or (self.rest_block and _fitting(self.rest_block, shape))
        return ParamPolicy(optimizer=self.rule, block=block)


def _fitting(block: Block, shape: tuple[int, ...]) -> Block:
    """A tile where it fits; whole matrices of a stack whose rows are no multiple of it; runs of a vector."""
    if block.kind != "tile":
        return block
    return tiling(shape, *block.sizes).block


def muon(*, block: Block | None = None, expert_block: Block | None = None) -> OrigParamPolicy:
    """Hidden matrices to Muon, everything else to AdamW.

    ``block``: what ``fully_shard`` shall keep together of a hidden matrix (``Block.whole()`` saves all communication
    of the optimizer where the balance allows it); ``expert_block``: the same for stacks (``Block.slices(1)``: whole
    experts).
    """
    return HiddenMatrices("muon", "adamw", block, expert_block)


def normuon(*, block: Block | None = None, expert_block: Block | None = None) -> OrigParamPolicy:
    """As ``muon``, with NorMuon."""
    return HiddenMatrices("normuon", "adamw", block, expert_block)


def muon_adamw8bit(
    *, block: Block | None = None, expert_block: Block | None = None, tile: tuple[int, int] = (32, 32)
) -> OrigParamPolicy:
    """Hidden matrices to Muon, everything else to AdamW8bit, whose tiles ``fully_shard`` keeps whole."""
    return HiddenMatrices("muon", "adamw8bit", block, expert_block, Block.tile(*tile))


def shampoo(*, block: Block | None = None, expert_block: Block | None = None) -> OrigParamPolicy:
    """Hidden matrices to Shampoo, everything else to AdamW."""
    return HiddenMatrices("shampoo", "adamw", block, expert_block)


def soap(*, block: Block | None = None, expert_block: Block | None = None) -> OrigParamPolicy:
    """Hidden matrices to SOAP, everything else to AdamW."""
    return HiddenMatrices("soap", "adamw", block, expert_block)


@dataclass(frozen=True)
class Tiles:
    """Everything to one rule, in tiles; see ``adamw8bit``."""

    rule: str
    block: Block

    def __call__(self, name: str, parameter: Any) -> ParamPolicy:
        return ParamPolicy(optimizer=self.rule, block=_fitting(self.block, tuple(parameter.shape)))


def adamw8bit(*, tile: tuple[int, int] = (32, 32)) -> OrigParamPolicy:
    """Everything to AdamW8bit. Give it to ``fully_shard`` too: it keeps the tiles whole."""
    return Tiles("adamw8bit", Block.tile(*tile))


class ByName:
    """Policies by name pattern, the first that matches; see ``by_name``."""

    def __init__(self, patterns: Mapping[str, ParamPolicy], default: OrigParamPolicy | None) -> None:
        self.patterns, self.default = dict(patterns), default
        for pattern, policy in self.patterns.items():
            if not isinstance(policy, ParamPolicy):
                raise TypeError(f"by_name: {pattern!r} must go to a ParamPolicy(optimizer=...), got {policy!r}")

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
                f"such as {', '.join(map(repr, names[:5]))}"
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


@dataclass(frozen=True)
class Row:
    """One parameter of an explanation. ``owners``: group rank of every matrix; empty for rules without matrices."""

    name: str
    shape: tuple[int, ...]
    rule: str
    lr: float | None
    note: str
    state_bytes: int
    owners: tuple[int, ...]


@dataclass(frozen=True)
class Explanation:
    """Who updates what. ``str()`` is a plain table; rich prints a coloured one."""

    rows: tuple[Row, ...]
    # Who does it, its FLOPs and bytes to move in a step, for matrix rules; of the ranks that share matrices with this.
    loads: tuple[tuple[str, float, int], ...] = ()

    COLUMNS: ClassVar[tuple[str, ...]] = ("parameter", "shape", "rule", "lr", "state bytes here", "owner", "")

    def _cells(self) -> list[tuple[str, ...]]:
        cells: list[tuple[str, ...]] = []
        for row in self.rows:
            owners = ",".join(map(str, row.owners[:6])) + (",..." if len(row.owners) > 6 else "")
            lr = "" if row.lr is None else f"{row.lr:g}"
            shape = "x".join(map(str, row.shape)) or "scalar"
            cells.append(
                (row.name, shape, row.rule, lr, f"{row.state_bytes:,}" if row.state_bytes else "", owners, row.note)
            )
        return cells

    def _footer(self) -> list[str]:
        counts: dict[str, tuple[int, int]] = {}
        for row in self.rows:
            number, elements = counts.get(row.rule, (0, 0))
            counts[row.rule] = number + 1, elements + math.prod(row.shape)
        lines = [f"{rule}: {number} parameters, {elements:,} elements" for rule, (number, elements) in counts.items()]
        lines += [
            f"{who}: {flops:.3g} FLOPs of matrix updates, {moved:,} bytes gathered and scattered a step"
            for who, flops, moved in self.loads
        ]
        return lines

    def __str__(self) -> str:
        table = [self.COLUMNS, *self._cells()]
        widths = [max(len(row[i]) for row in table) for i in range(len(self.COLUMNS))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
        ]
        return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], "", *self._footer()])

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table

        table = Table(*self.COLUMNS)
        colours = dict(
            zip(sorted({row.rule for row in self.rows}), itertools.cycle(("cyan", "magenta", "green")), strict=False)
        )
        for row, cells in zip(self.rows, self._cells(), strict=True):
            table.add_row(*cells, style=colours[row.rule])
        return Group(table, *self._footer())


def explain(
    target: RaggedOptimizer | Iterable[tuple[str, Any]], policy: OrigParamPolicy | None = None, default: str = "adamw"
) -> Explanation:
    """Who updates what: of an optimizer, or of ``model.named_parameters()`` under ``policy`` before there is one.

    ``print(explain(optimizer))``. ``default``: the rule of parameters for which the policy names none.
    """
    from ragged_optim.optimizer import RaggedOptimizer

    if not isinstance(target, RaggedOptimizer):
        rows = []
        pairs = list(target) if isinstance(target, Iterable) else [target]
        if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
            raise TypeError("explain() takes an optimizer of this package, or model.named_parameters() and a policy")
        for name, parameter in pairs:
            answer = apply_policy(policy, name, parameter)
            rule = default if answer.optimizer is None else answer.optimizer
            notes = [f"{key}={value}" for key, value in answer.hyperparameters.items()]
            notes += [f"block {answer.block}"] if answer.block else []
            named = rule if isinstance(rule, str) else rule.__name__
            rows.append(
                Row(name, tuple(parameter.shape), named, answer.hyperparameters.get("lr"), ", ".join(notes), 0, ())
            )
        return Explanation(tuple(rows))
    return target.explain()
