"""Block-aware optimizers for plain, FSDP2 and ragged parameters. Names load lazily."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ragged_optim import policies as policies
    from ragged_optim.optimizer import RaggedOptimizer as RaggedOptimizer
    from ragged_optim.policies import explain as explain
    from ragged_optim.rule import BlockwiseRule as BlockwiseRule
    from ragged_optim.rule import ElementwiseRule as ElementwiseRule
    from ragged_optim.rule import MatrixRule as MatrixRule
    from ragged_optim.rule import StateSpec as StateSpec
    from ragged_optim.rules.adamw import Adam as Adam
    from ragged_optim.rules.adamw import AdamW as AdamW
    from ragged_optim.rules.adamw8bit import Adam8bit as Adam8bit
    from ragged_optim.rules.adamw8bit import AdamW8bit as AdamW8bit
    from ragged_optim.rules.lion import Lion as Lion
    from ragged_optim.rules.muon import Muon as Muon
    from ragged_optim.rules.muon import NorMuon as NorMuon
    from ragged_optim.rules.sgd import SGD as SGD
    from ragged_optim.rules.shampoo import Shampoo as Shampoo
    from ragged_optim.rules.soap import SOAP as SOAP
    from ragged_shard.block import Block as Block
    from ragged_shard.policy import ParamPolicy as ParamPolicy

_HOMES = {
    "Adam": "ragged_optim.rules.adamw",
    "Adam8bit": "ragged_optim.rules.adamw8bit",
    "AdamW8bit": "ragged_optim.rules.adamw8bit",
    "AdamW": "ragged_optim.rules.adamw",
    "Block": "ragged_shard.block",
    "BlockwiseRule": "ragged_optim.rule",
    "ElementwiseRule": "ragged_optim.rule",
    "Lion": "ragged_optim.rules.lion",
    "MatrixRule": "ragged_optim.rule",
    "Muon": "ragged_optim.rules.muon",
    "NorMuon": "ragged_optim.rules.muon",
    "ParamPolicy": "ragged_shard.policy",
    "RaggedOptimizer": "ragged_optim.optimizer",
    "SGD": "ragged_optim.rules.sgd",
    "SOAP": "ragged_optim.rules.soap",
    "Shampoo": "ragged_optim.rules.shampoo",
    "StateSpec": "ragged_optim.rule",
    "explain": "ragged_optim.policies",
    "policies": "ragged_optim.policies",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(_HOMES[name])
    return module if name == "policies" else getattr(module, name)


def __dir__() -> list[str]:
    return __all__
