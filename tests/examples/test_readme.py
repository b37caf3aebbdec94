"""What the README shows is what runs."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from gpt import GPT, MODELS
from tests import cluster

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


def test_links_and_pictures_exist() -> None:
    root = Path(__file__).resolve().parents[2]
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert any(link.endswith(".png") for link in links)
    assert all(link.startswith("http") or (root / link).exists() for link in links), links


def train_as_shown(code: str) -> list[float]:
    torch.manual_seed(1)
    model = GPT(MODELS["micro"])
    names = {"model": model}
    exec(code, names)
    optimizer = names["optimizer"]
    tokens = torch.arange(64).reshape(2, 32) % 7
    losses = []
    for _ in range(8):
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), (tokens + 1).flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert all(isinstance(p, DTensor) for p in model.parameters())
    return losses


def test_the_five_lines_train_a_model() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    lines = [line for line in code.splitlines() if line and not line.startswith(("from ", "import "))]
    assert len(lines) <= 5
    one, other = cluster.run(2, train_as_shown, code)
    assert one == other
    assert one[-1] < 0.7 * one[0]
