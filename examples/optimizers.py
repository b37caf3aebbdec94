"""The optimizers of the library as the command line names them, and torch's AdamW to compare with."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn

import ragged_optim
from ragged_optim import Block, ParamPolicy, policies

BETAS = (0.9, 0.95)
# What --optimizer takes, and a learning rate (of the hidden matrices) that suits the small models here.
LEARNING_RATES = {
    "adamw": 3e-3,
    "adam": 3e-3,
    "muon": 2e-2,
    "torch-adamw": 3e-3,  # torch.optim.AdamW
}


def policy(args: argparse.Namespace) -> Any:
    """Who updates which parameter, and what no rank boundary may cut; for `fully_shard` and for the optimizer."""
    block = Block.rows(args.block)
    if args.optimizer == "muon":
        return policies.muon(block=block)  # hidden matrices; the rest to AdamW, cut anywhere
    return lambda name, parameter: ParamPolicy(block=block if parameter.ndim > 1 else None)


def build(args: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    if args.optimizer == "torch-adamw":
        return torch.optim.AdamW(model.parameters(), args.lr, BETAS, weight_decay=args.weight_decay)
    named = list(model.named_parameters())
    if args.optimizer == "muon":
        return ragged_optim.Muon(
            named,
            args.lr,
            args.weight_decay,
            ns_dtype=getattr(torch, args.ns_dtype),
            adamw_lr=args.aux_lr,
            adamw_betas=BETAS,
            adamw_weight_decay=args.weight_decay,
            orig_param_policy=policy(args),
        )
    kind = {"adamw": ragged_optim.AdamW, "adam": ragged_optim.Adam}[args.optimizer]
    return kind(named, args.lr, BETAS, weight_decay=args.weight_decay, orig_param_policy=policy(args))
