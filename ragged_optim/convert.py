"""State dicts of other optimizers, in the form that ``load_state_dict`` of ours takes.

    optimizer.load_state_dict(convert.from_torch(torch_state_dict, optimizer))
    optimizer.load_state_dict(convert.from_dion(dion_state_dict, optimizer))
    optimizer.load_state_dict(convert.from_bitsandbytes(bnb_state_dict, optimizer))

The other optimizer must have had the same parameters in the same order, or names (``param_names``) by which they are
found; its groups may be cut differently. Hyperparameters stay those of ``optimizer``: only states are taken over.
What is taken over is full tensors or DTensors of any placement; they are resharded when they are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ragged_optim import quantize as q
from ragged_optim.layout import Extent

if TYPE_CHECKING:
    from ragged_optim.optimizer import RaggedOptimizer

__all__ = ["from_bitsandbytes", "from_dion", "from_torch"]

States = dict[str, Any]


def from_torch(state_dict: Mapping[str, Any], optimizer: RaggedOptimizer) -> dict[str, Any]:
    """Of ``torch.optim.AdamW``, ``Adam``, ``SGD`` or ``Muon``; for a model trained with two of them, call it for each.

    Parameters that ``state_dict`` does not hold keep the states that ``optimizer`` has now.
    """
    return _merge(state_dict, optimizer, lambda rule, states, param: dict(states))


def from_dion(state_dict: Mapping[str, Any], optimizer: RaggedOptimizer) -> dict[str, Any]:
    """Of microsoft/dion's ``Muon`` and ``NorMuon``, and of their AdamW and Lion groups.

    dion sums its momentum (M = mu M + g) where Muon here averages (buf = mu buf + (1 - mu) g), so it is 1 / (1 - mu)
    larger.
    """

    def translate(group: Mapping[str, Any], states: States, param: Tensor) -> States:
        if group["rule"] in ("muon", "normuon"):
            found = {"momentum_buffer": states["momentum"] * (1 - float(group["momentum"]))}
            if group["rule"] == "normuon" and "variance_neuron" in states:
                found["second_momentum_buffer"] = states["variance_neuron"]
            return found
        if group["rule"] in ("adam", "adamw"):
            step = states.get("step", states.get("t", 0))
            return {"step": step, "exp_avg": states["momentum"], "exp_avg_sq": states["variance"]}
        if group["rule"] == "lion":
            return {"exp_avg": states["momentum"]}
        raise ValueError(f"dion has no counterpart of the rule {group['rule']!r}")

    return _merge(state_dict, optimizer, translate)


def from_bitsandbytes(state_dict: Mapping[str, Any], optimizer: RaggedOptimizer) -> dict[str, Any]:
    """Of bitsandbytes' ``AdamW``, ``AdamW8bit``, ``Adam`` and ``Adam8bit``: 8-bit states are decoded to fp32.

    Load the result into ``AdamW`` / ``Adam``. For ``AdamW8bit`` of ours they would have to be rounded again, into
    tiles; that is done too, to nearest, which is exact in the sign and to one part in 16 in size.
    """

    def translate(group: Mapping[str, Any], states: States, param: Tensor) -> States:
        states = dict(states.get("__bnb_optimizer_quant_state__", {}), **states)
        moments = [_decode_bitsandbytes(states, number, tuple(param.shape)) for number in (1, 2)]
        step = torch.tensor(float(states["step"]))
        if group["rule"] in ("adam", "adamw"):
            return {"step": step, "exp_avg": moments[0], "exp_avg_sq": moments[1]}
        if group["rule"] in ("adam8bit", "adamw8bit"):
            own = optimizer.state[param]
            if "exp_avg" in own:
                return {"step": step, "salt": own["salt"], "exp_avg": moments[0], "exp_avg_sq": moments[1]}
            return {"step": step, "salt": own["salt"], **_encode_tiles(moments, tuple(param.shape), group["tile"])}
        raise ValueError(f"bitsandbytes' Adam has no counterpart of the rule {group['rule']!r}")

    return _merge(state_dict, optimizer, translate)


def _decode_bitsandbytes(states: Mapping[str, Any], number: int, shape: tuple[int, ...]) -> Tensor:
    """State ``number`` (1 or 2) in fp32: itself, or codes of a map, scaled by the absmax of every run of codes."""
    codes = states[f"state{number}"]
    if codes.dtype != torch.uint8:
        return torch.as_tensor(codes).float().view(shape)
    absmax, levels = states[f"absmax{number}"], states[f"qmap{number}"]
    flat: Tensor = levels[codes.reshape(-1).long()]
    run = 256
    while -(-flat.numel() // run) > absmax.numel():
        run *= 2  # older versions have runs of 2048
    scaled: Tensor = flat * absmax.repeat_interleave(run)[: flat.numel()]
    return scaled.view(shape)


def _encode_tiles(moments: list[Tensor], shape: tuple[int, ...], tile: tuple[int, int]) -> States:
    tiles, extent = q.tiling(shape, *tile), Extent(shape, 0, moments[0].numel())
    found: States = {}
    for name, moment, signed in (("exp_avg", moments[0], True), ("exp_avg_sq", moments[1], False)):
        codes, scales = torch.zeros(shape, dtype=torch.uint8), torch.zeros(tiles.scales)
        q.encode_tiles(moment, codes, scales, tiles, extent, signed=signed)
        found |= {f"{name}.codes": codes, f"{name}.scales": scales}
    return found


def _merge(
    state_dict: Mapping[str, Any],
    optimizer: RaggedOptimizer,
    translate: Callable[[Mapping[str, Any], States, Tensor], States],
) -> dict[str, Any]:
    """Our own state dict with the states that ``state_dict`` has, translated."""
    own = optimizer.state_dict()
    theirs: list[tuple[str | None, Any]] = []
    for group in state_dict["param_groups"]:
        names = group.get("param_names") or [None] * len(group["params"])
        theirs += zip(names, group["params"], strict=True)
    entries = list(optimizer.named_entries())
    by_name = {name: key for name, key in theirs if name is not None}
    if by_name:
        pairs = [(position, by_name[name]) for position, (name, _, _) in enumerate(entries) if name in by_name]
        if not pairs:
            raise ValueError(
                f"the state dict names {', '.join(map(repr, list(by_name)[:3]))}, ..., none of which is a parameter "
                f"of this optimizer ({', '.join(repr(name) for name, _, _ in entries[:3])}, ...)"
            )
    else:
        # Parameters in the order in which the model has them, whatever the groups.
        if len(theirs) != len(entries):
            raise ValueError(
                f"the state dict has {len(theirs)} parameters without names, this optimizer {len(entries)}; save it "
                "with named parameters"
            )
        pairs = list(zip(range(len(entries)), (key for _, key in theirs), strict=True))
    for position, key in pairs:
        name, param, group = entries[position]
        states = state_dict["state"].get(key, {})
        if not states:
            continue
        try:
            own["state"][position] = translate(group, states, param)
        except KeyError as error:
            raise ValueError(
                f"the state of parameter {name!r} has no {error}; it has {', '.join(map(str, states))}: it is of "
                "another optimizer"
            ) from None
    return own
