"""Every notebook runs from top to bottom, prints what it printed when it was stored, and draws its pictures."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# What these print depends on how fast the machine trains, and on how long it may.
SHORTENED = {"05_optimizers_compared": {"NOTEBOOK_STEPS": "5"}}


def printed(notebook: Any) -> list[str]:
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return ["".join(o["text"] for o in cell.outputs if o.get("name") == "stdout") for cell in cells]


def pictures(notebook: Any) -> int:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return sum("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    for name, value in SHORTENED.get(path.stem, {}).items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(path, 4)
    stored, drawn = printed(notebook), pictures(notebook)
    resources = {"metadata": {"path": str(path.parent)}}
    # What arrives later than iopub_timeout after the end of its cell (by default 4 seconds) is dropped, and no error.
    options = {"timeout": 240, "iopub_timeout": 120, "kernel_name": "python3", "resources": resources}
    nbclient.NotebookClient(notebook, **options).execute()
    assert drawn and pictures(notebook) == drawn
    if path.stem not in SHORTENED:
        assert printed(notebook) == stored


def test_there_are_notebooks() -> None:
    assert len(NOTEBOOKS) == 5
