"""A file per algorithm, with its rule and its optimizer class.

Rules are found by name here, and imported when asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from ragged_optim.rule import Rule

__all__ = ["NAMES", "rule_of"]

NAMES: dict[str, tuple[str, str]] = {
    "adam": ("ragged_optim.rules.adamw", "AdamRule"),
    "adamw": ("ragged_optim.rules.adamw", "AdamWRule"),
    "adam8bit": ("ragged_optim.rules.adamw8bit", "Adam8bitRule"),
    "adamw8bit": ("ragged_optim.rules.adamw8bit", "AdamW8bitRule"),
    "lion": ("ragged_optim.rules.lion", "LionRule"),
    "muon": ("ragged_optim.rules.muon", "MuonRule"),
    "normuon": ("ragged_optim.rules.muon", "NorMuonRule"),
    "sgd": ("ragged_optim.rules.sgd", "SGDRule"),
    "shampoo": ("ragged_optim.rules.shampoo", "ShampooRule"),
    "soap": ("ragged_optim.rules.soap", "SOAPRule"),
}


def rule_of(rule: str | type) -> Rule:
    """The rule of a name or a rule class.

    Raises ``ValueError`` for an unknown name, ``TypeError`` for another class.
    """
    if isinstance(rule, str):
        if rule not in NAMES:
            raise ValueError(f"unknown optimizer rule {rule!r}; known: {', '.join(NAMES)} (or pass a rule class)")
        module, name = NAMES[rule]
        rule = getattr(importlib.import_module(module), name)
    if not (isinstance(rule, type) and issubclass(rule, Rule)):
        raise TypeError(f"a rule is a name or a subclass of ElementwiseRule, BlockwiseRule or MatrixRule, got {rule!r}")
    for attribute, kind in (("name", str), ("defaults", Mapping)):
        if not isinstance(getattr(rule, attribute, None), kind):
            raise TypeError(
                f"the rule class {rule.__name__} needs a class attribute {attribute!r}: a name of its own, and its "
                "hyperparameters with their defaults"
            )
    return rule()
