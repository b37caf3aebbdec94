"""Every optimizer that the library offers, and torch's AdamW to compare with."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn

BETAS = (0.9, 0.95)
# What --optimizer takes: a learning rate that suits the small models here (of the hidden matrices).
LEARNING_RATES = {
    "adamw": 3e-3,
    "muon": 1e-2,
    "torch-adamw": 3e-3,  # torch.optim.AdamW
}


def policy(args: argparse.Namespace) -> Any:
    return None


def build(args: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    if args.optimizer == "torch-adamw":
        return torch.optim.AdamW(model.parameters(), args.lr, BETAS, weight_decay=args.weight_decay)
    raise NotImplementedError
