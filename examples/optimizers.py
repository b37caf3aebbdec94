"""The optimizers of the library as the command line names them, and torch's AdamW to compare with."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn

import ragged_optim
from ragged_optim import Block, ParamPolicy, policies

BETAS = (0.9, 0.95)
# What --optimizer takes, and a learning rate (for matrix optimizers, of the hidden matrices) that suits small models.
LEARNING_RATES = {
    "adamw": 3e-3,
    "adam": 3e-3,
    "sgd": 0.3,
    "lion": 5e-4,
    "adamw8bit": 3e-3,
    "adam8bit": 3e-3,
    "muon": 2e-2,
    "normuon": 2e-2,
    "shampoo": 3e-3,
    "soap": 3e-3,
    "torch-adamw": 3e-3,  # torch.optim.AdamW
}


def policy(args: argparse.Namespace) -> Any:
    """Who updates which parameter, and what no rank boundary may cut; for `fully_shard` and for the optimizer."""
    name, block = args.optimizer, Block.rows(args.block)
    if name in ("muon", "normuon", "shampoo", "soap"):
        return getattr(policies, name)(block=block)  # hidden matrices; the rest to AdamW, cut anywhere
    if name in ("adamw8bit", "adam8bit"):
        block = Block.tile(32, 32)  # what one 8-bit scale is for
    return lambda _, parameter: ParamPolicy(block=block if parameter.ndim > 1 else None)


def build(args: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    decay = args.weight_decay
    if args.optimizer == "torch-adamw":
        return torch.optim.AdamW(model.parameters(), args.lr, BETAS, weight_decay=decay)
    kind, rest = {
        "adamw": ("AdamW", {"betas": BETAS}),
        "adam": ("Adam", {"betas": BETAS}),
        "sgd": ("SGD", {"momentum": 0.9, "nesterov": True}),
        "lion": ("Lion", {}),
        "adamw8bit": ("AdamW8bit", {"betas": BETAS}),
        "adam8bit": ("Adam8bit", {"betas": BETAS}),
        "muon": ("Muon", {"ns_dtype": getattr(torch, args.ns_dtype)}),
        "normuon": ("NorMuon", {"ns_dtype": getattr(torch, args.ns_dtype)}),
        "shampoo": ("Shampoo", {"betas": BETAS}),
        "soap": ("SOAP", {}),
    }[args.optimizer]
    if args.optimizer in ("adam", "adam8bit", "sgd"):  # these add the decay to the gradient: another thing
        decay = 0.0
    if args.optimizer in ("muon", "normuon", "shampoo", "soap"):
        rest |= {"adamw_lr": args.aux_lr, "adamw_betas": BETAS, "adamw_weight_decay": decay}
    named = list(model.named_parameters())
    return getattr(ragged_optim, kind)(named, args.lr, weight_decay=decay, orig_param_policy=policy(args), **rest)
