"""The notebook about the planner runs from top to bottom, and its printed output is what the planner says today."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
NOTEBOOK = ROOT / "notebooks" / "02_planner.ipynb"


def printed(notebook: Any) -> list[str]:
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return ["".join(o["text"] for o in cell.outputs if o.get("name") == "stdout") for cell in cells]


def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    notebook = nbformat.read(NOTEBOOK, 4)
    stored = printed(notebook)
    resources = {"metadata": {"path": str(NOTEBOOK.parent)}}
    nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3", resources=resources).execute()
    assert printed(notebook) == stored
    pictures = [o for cell in notebook.cells for o in cell.get("outputs", []) if "image/png" in o.get("data", {})]
    assert len(pictures) == 5
