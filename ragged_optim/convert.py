"""State dicts of other optimizers, in the form that ``load_state_dict`` of ours takes, and one the other way.

    optimizer.load_state_dict(convert.from_torch(torch_state_dict, optimizer))
    optimizer.load_state_dict(convert.from_dion(dion_state_dict, optimizer))
    optimizer.load_state_dict(convert.from_bitsandbytes(bnb_state_dict, optimizer))
    bnb_optimizer.load_state_dict(convert.to_bitsandbytes(optimizer, bnb_optimizer))

The other optimizer must have had the same parameters in the same order, or names (``param_names``) by which they are
found; its groups may be cut differently. Hyperparameters stay those of ``optimizer``: only states are taken over.
What is taken over is full tensors or DTensors of any placement; they are resharded when they are loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ragged_optim import quantize as q
from ragged_optim.layout import Extent
from ragged_optim.rule import MatrixRule

if TYPE_CHECKING:
    from ragged_optim.optimizer import RaggedOptimizer

__all__ = ["from_bitsandbytes", "from_dion", "from_torch", "to_bitsandbytes"]

States = dict[str, Any]
EIGHT_BIT = ("adamw8bit", "adam8bit")
WRAPPED = "__bnb_optimizer_quant_state__"  # where bitsandbytes hides its tensors from FSDP1


def from_torch(state_dict: Mapping[str, Any], optimizer: RaggedOptimizer) -> dict[str, Any]:
    """Of ``torch.optim.AdamW``, ``Adam``, ``SGD`` or ``Muon``; for a model trained with two of them, call it for each.

    For ``AdamW8bit`` and ``Adam8bit`` the moments are rounded to 8 bits. Parameters that ``state_dict`` does not hold
    keep the states that ``optimizer`` has now.
    """

    def translate(group: Mapping[str, Any], states: States, param: Tensor) -> States:
        if group["rule"] in EIGHT_BIT and "exp_avg" in states:
            if "max_exp_avg_sq" in states:
                raise ValueError(
                    f"the state dict is of Adam with amsgrad, which {group['rule']} has not; take 'max_exp_avg_sq' out "
                    "of its states to go on without"
                )
            return _adam_states(group, optimizer, param, states["step"], [states["exp_avg"], states["exp_avg_sq"]])
        return dict(states)

    return _merge(state_dict, optimizer, translate)


def from_dion(state_dict: Mapping[str, Any], optimizer: RaggedOptimizer) -> dict[str, Any]:
    """Of microsoft/dion's ``Muon`` and ``NorMuon``, and of their AdamW and Lion groups.

    dion sums its momentum (M = mu M + g) where Muon here averages (buf = mu buf + (1 - mu) g), so it is 1 / (1 - mu)
    larger.
    """

    def translate(group: Mapping[str, Any], states: States, param: Tensor) -> States:
        if group["rule"] in ("muon", "normuon"):
            found = {"momentum_buffer": states["momentum"] * (1 - float(group["momentum"]))}
            if group["rule"] == "normuon" and "variance_neuron" in states:
                matrices = cast(MatrixRule, optimizer.rule_of(group)).matrices(tuple(param.shape), group)
                slices = 1 + max((matrix.slice for matrix in matrices), default=0)
                stack = _whole(states["variance_neuron"]).reshape(slices, -1, 1)
                for index, matrix in enumerate(matrices):
                    suffix = "" if len(matrices) == 1 else f".{index}"
                    rows = stack[matrix.slice, matrix.row : matrix.row + matrix.rows]
                    found[f"second_momentum_buffer{suffix}"] = rows
            return found
        if group["rule"] in ("adam", "adamw", *EIGHT_BIT):
            step = states.get("step", states.get("t", 0))
            return _adam_states(group, optimizer, param, step, [states["momentum"], states["variance"]])
        if group["rule"] == "lion":
            return {"exp_avg": states["momentum"]}
        raise ValueError(f"dion has no counterpart of the rule {group['rule']!r}")

    return _merge(state_dict, optimizer, translate)


def from_bitsandbytes(state_dict: Mapping[str, Any], optimizer: RaggedOptimizer) -> dict[str, Any]:
    """Of bitsandbytes' ``AdamW``, ``AdamW8bit``, ``Adam`` and ``Adam8bit``.

    For ``AdamW8bit(format="bitsandbytes")`` codes and scales are taken as they are. For ``AdamW`` / ``Adam`` 8-bit
    states are decoded to fp32. For our own 8-bit formats they are rounded again, into tiles, to nearest, which is exact
    in the sign and to one part in 16 in size.
    """

    def translate(group: Mapping[str, Any], states: States, param: Tensor) -> States:
        states = dict(states.get(WRAPPED, {}), **{key: value for key, value in states.items() if key != WRAPPED})
        own = optimizer.state[param]
        direct = group["rule"] in EIGHT_BIT and group["format"] == "bitsandbytes" and "exp_avg" not in own
        if direct and states["state1"].dtype == torch.uint8:
            blocks = own["exp_avg.scales"].numel()
            if states["absmax1"].numel() == blocks:
                found: States = {"step": torch.tensor(float(states["step"])), "salt": own["salt"]}
                for number, moment in ((1, "exp_avg"), (2, "exp_avg_sq")):
                    found[f"{moment}.codes"] = states[f"state{number}"].view(param.shape)
                    found[f"{moment}.scales"] = states[f"absmax{number}"].float().view(blocks)
                return found
        moments = [_decode_bitsandbytes(states, number, tuple(param.shape)) for number in (1, 2)]
        if group["rule"] in ("adam", "adamw", *EIGHT_BIT):
            return _adam_states(group, optimizer, param, states["step"], moments)
        raise ValueError(f"bitsandbytes' Adam has no counterpart of the rule {group['rule']!r}")

    return _merge(state_dict, optimizer, translate)


def to_bitsandbytes(optimizer: RaggedOptimizer, target: torch.optim.Optimizer) -> dict[str, Any]:
    """The other way: what ``target``, bitsandbytes' ``AdamW8bit`` or ``Adam8bit`` on the same parameters in the same
    order, takes in ``load_state_dict``. ``optimizer``: ``AdamW``, ``Adam`` or an 8-bit one of ours; states that are not
    of ``format="bitsandbytes"`` are rounded by the library. Sharded states are gathered, by all ranks together.
    """
    from ragged_optim.kernels import bitsandbytes as bnb

    saved = target.state_dict()
    entries = list(optimizer.named_entries())
    count = sum(len(group["params"]) for group in saved["param_groups"])
    if count != len(entries):
        raise ValueError(f"the target has {count} parameters, this optimizer {len(entries)}")
    made: dict[int, Any] = {}
    for place, position in enumerate(optimizer.given_order()):
        name, param, group = entries[position]
        if group["rule"] not in ("adam", "adamw", *EIGHT_BIT):
            raise ValueError(
                f"parameter {name!r} is updated by {group['rule']}, which is none of bitsandbytes' algorithms; only "
                "states of AdamW, Adam, AdamW8bit and Adam8bit can be given to it"
            )
        state = {key: _whole(value) for key, value in optimizer.state[param].items()}
        states: States = {}
        signs = (True, False)
        if group.get("format") == "bitsandbytes" and "exp_avg" not in state:
            parts = [(state[f"{moment}.codes"], state[f"{moment}.scales"]) for moment in ("exp_avg", "exp_avg_sq")]
        else:
            moments = _decode_own(group, state, tuple(param.shape))
            parts = []
            if param.numel() >= 4096:  # the library's own limit, below which it keeps fp32
                parts = [bnb.quantize(moment, signed=signed) for moment, signed in zip(moments, signs, strict=True)]
            else:
                states = {"state1": moments[0], "state2": moments[1]}
        for number, (part, signed) in enumerate(zip(parts, signs, strict=False), start=1):
            states[f"state{number}"], states[f"absmax{number}"] = part
            states[f"qmap{number}"] = bnb.map_of(part[0].device, signed=signed)
        made[place] = {"step": int(state["step"]), WRAPPED: states}
    return {"state": made, "param_groups": saved["param_groups"]}


def _in_tiles(optimizer: RaggedOptimizer, group: Mapping[str, Any], states: States, param: Tensor) -> States:
    """``states``, those rounded that ``optimizer`` keeps in 8 bits for a rule that sees fp32."""
    shape, found = tuple(param.shape), dict(states)
    for key, spec in optimizer.rule_of(group).init(shape, group).items():
        if spec.tile is not None and key in found:
            value, tiles = _whole(found.pop(key)).float(), q.tiling(shape, *spec.tile)
            codes = torch.zeros(shape, dtype=torch.uint8, device=value.device)
            scales = value.new_zeros(tiles.scales)
            q.encode_tiles(value, codes, scales, tiles, Extent(shape, 0, math.prod(shape)))
            found |= {f"{key}.codes": codes, f"{key}.scales": scales}
    return found


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _decode_own(group: Mapping[str, Any], state: Mapping[str, Tensor], shape: tuple[int, ...]) -> list[Tensor]:
    """m and v in fp32, of whole states of ours."""
    if "exp_avg" in state:
        return [state["exp_avg"].float(), state["exp_avg_sq"].float()]
    tiles, extent = q.tiling(shape, *group["tile"]), Extent(shape, 0, math.prod(shape))
    return [
        q.decode_tiles(
            state[f"{moment}.codes"],
            state[f"{moment}.scales"],
            tiles,
            extent,
            signed=moment == "exp_avg",
            dynamic=group["format"] == "dynamic",
        )
        for moment in ("exp_avg", "exp_avg_sq")
    ]


def _decode_bitsandbytes(states: Mapping[str, Any], number: int, shape: tuple[int, ...]) -> Tensor:
    """State ``number`` (1 or 2) in fp32: itself, or codes of a map, scaled by the absmax of every run of codes."""
    from ragged_optim.kernels import bitsandbytes as bnb

    codes = states[f"state{number}"]
    if codes.dtype != torch.uint8:
        return torch.as_tensor(codes).float().view(shape)
    return bnb.dequantize(codes, states[f"absmax{number}"], states[f"qmap{number}"]).view(shape)


def _adam_states(
    group: Mapping[str, Any], optimizer: RaggedOptimizer, param: Tensor, step: Any, moments: list[Tensor]
) -> States:
    """Adam's states in the form that ``optimizer`` keeps for ``param``: fp32, or 8 bits in its format."""
    own = optimizer.state[param]
    found: States = {"step": torch.tensor(float(step))}
    if group["rule"] in EIGHT_BIT:
        found["salt"] = own["salt"]
    if "exp_avg" in own:
        return found | {"exp_avg": moments[0], "exp_avg_sq": moments[1]}
    shape = tuple(param.shape)
    tiles, extent = q.tiling(shape, *group["tile"]), Extent(shape, 0, math.prod(shape))
    for name, moment, signed in (("exp_avg", moments[0], True), ("exp_avg_sq", moments[1], False)):
        value = _whole(moment).float()
        if group["format"] == "bitsandbytes":
            from ragged_optim.kernels import bitsandbytes as bnb

            codes, scales = bnb.quantize(value, signed=signed)
        else:
            codes = torch.zeros(shape, dtype=torch.uint8, device=value.device)
            scales = value.new_zeros(tiles.scales)
            dynamic = group["format"] == "dynamic"
            q.encode_tiles(value, codes, scales, tiles, extent, signed=signed, dynamic=dynamic)
        found |= {f"{name}.codes": codes, f"{name}.scales": scales}
    return found


def _merge(
    state_dict: Mapping[str, Any],
    optimizer: RaggedOptimizer,
    translate: Callable[[Mapping[str, Any], States, Tensor], States],
) -> dict[str, Any]:
    """Our own state dict with the states that ``state_dict`` has, translated."""
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
        # In the order in which both were given the parameters, whatever the groups.
        if len(theirs) != len(entries):
            raise ValueError(
                f"the state dict has {len(theirs)} parameters without names, this optimizer {len(entries)}; save it "
                "with named parameters"
            )
        pairs = list(zip(optimizer.given_order(), (key for _, key in theirs), strict=True))
    frozen = [entries[position][1:] for position, key in pairs if state_dict["state"].get(key)]
    optimizer._complete_states({param: group for param, group in frozen if param not in optimizer.state})
    own = optimizer.state_dict()
    for position, key in pairs:
        name, param, group = entries[position]
        states = state_dict["state"].get(key, {})
        if not states:
            continue
        try:
            own["state"][position] = _in_tiles(optimizer, group, translate(group, states, param), param)
        except KeyError as error:
            raise ValueError(
                f"the state of parameter {name!r} has no {error}; it has {', '.join(map(str, states))}: it is of "
                "another optimizer"
            ) from None
    return own
