"""A run's folder: its settings, and checkpoints that any number of processes can go on from.

runs/NAME/config.json                    settings, model and text of the run
runs/NAME/metrics.jsonl                  a line per step; after a resume, later lines for the same step stand
runs/NAME/checkpoints/step-00000400/     torch.distributed.checkpoint; complete if it has this name
"""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from corpus import Corpus
from gpt import GPT, GPTConfig


class CheckpointError(ValueError):
    """A run cannot be gone on with; the message names the file and what to do."""


def write_config(folder: Path, arguments: dict[str, Any], model: GPTConfig, text: Corpus) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = {"arguments": arguments, "model": asdict(model), "text": str(text), "text_digest": text.digest}
    config["torch"] = torch.__version__
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def read_config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text())
        config["arguments"], config["model"], config["text_digest"]
    except OSError:
        raise CheckpointError(f"{file}: no such file; give --resume the folder of a run, such as runs/train") from None
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{file}: not the settings of a run; restore it, or start a new run") from None
    return config


def latest(folder: Path) -> tuple[int, Path]:
    """Step and folder of the last complete checkpoint."""
    found = sorted(folder.glob("checkpoints/step-????????"))
    if not found:
        raise CheckpointError(
            f"{folder / 'checkpoints'}: no complete checkpoint there; start a new run with another --name"
        )
    return int(found[-1].name.removeprefix("step-")), found[-1]


def check(folder: Path, steps: int, text: Corpus, model: GPTConfig) -> None:
    """That the run in ``folder`` can go on with this text and model; reads no tensor."""
    saved = read_config(folder)
    if saved["text_digest"] != text.digest:
        raise CheckpointError(
            f"{folder / 'config.json'}: the run saw other text ({saved['text']}) than {text}; give it the same --data"
        )
    step, checkpoint = latest(folder)
    if step >= steps:
        raise CheckpointError(f"{checkpoint}: the run is complete; to train on, give --steps more than {step}")
    with torch.device("meta"):
        wanted = {f"model.{name}": value.shape for name, value in GPT(model).state_dict().items()}
    metadata = stored(checkpoint)
    held = {key: value.size for key, value in metadata.items() if key.startswith("model.") and hasattr(value, "size")}
    for key in sorted(wanted.keys() | held.keys()):
        if wanted.get(key) != held.get(key):
            have, need = (tuple(shapes[key]) if key in shapes else "nothing" for shapes in (held, wanted))
            raise CheckpointError(
                f"{checkpoint}: of another model: for {key.removeprefix('model.')} it has {have}, this model {need}; "
                f"use the --model it was made with ({saved['arguments'].get('model')}), or another --name"
            )


def stored(checkpoint: Path) -> dict[str, Any]:
    try:
        return dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    except Exception as error:
        raise CheckpointError(
            f"{checkpoint}: not a readable checkpoint ({type(error).__name__}: {error}); "
            f"move it away to go on from the one before it"
        ) from None


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """On every rank. The folder gets its name when all is written, so that what has the name is complete."""
    final = folder / "checkpoints" / f"step-{step:08}"
    unfinished = final.with_name(final.name + ".unfinished")
    with quiet():
        dcp.save(state_of(model, optimizer), checkpoint_id=unfinished)
    if not dist.is_initialized() or dist.get_rank() == 0:
        if final.exists():  # of the same run gone on with twice; keep both
            final.rename(free_name(final))
        unfinished.rename(final)
    if dist.is_initialized():
        dist.barrier()


def free_name(path: Path) -> Path:
    return next(p for n in range(1, 10**6) if not (p := path.with_name(f"{path.name}.old{n}")).exists())


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """On every rank: fill ``model`` and ``optimizer`` from the last checkpoint; the number of steps done."""
    step, checkpoint = latest(folder)
    with quiet():
        state = state_of(model, optimizer)
        # DCP joins nested keys with dots. A state that only one of the optimizer and the checkpoint has is an error.
        wanted = {f"optimizer.state.{p}.{key}" for p, values in state["optimizer"]["state"].items() for key in values}
        held = {key for key in stored(checkpoint) if key.startswith("optimizer.state.")}
        if wanted != held:
            key = min(wanted ^ held)
            where = (
                "the optimizer needs it and the checkpoint lacks it" if key in wanted else "only the checkpoint has it"
            )
            raise CheckpointError(
                f"{checkpoint}: of another optimizer: {key.removeprefix('optimizer.state.')}: {where}; "
                f"use the --optimizer it was made with (see {folder / 'config.json'}), or start a new run"
            )
        dcp.load(state, checkpoint_id=checkpoint)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return step


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def quiet() -> warnings.catch_warnings:
    """DCP warns in a single process that there is only one, and of its own deprecated calls."""
    return warnings.catch_warnings(action="ignore")
