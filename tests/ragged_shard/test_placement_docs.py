"""docs/ragged_shard.md says what the code does, its pictures can be made, and its examples run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "ragged_shard.md"
NOTEBOOK = ROOT / "notebooks" / "01_ragged_shard.ipynb"


def test_the_operator_table_is_made_from_the_registrations():
    from ragged_shard.doctor import operator_table

    written = PAGE.read_text().partition("<!-- operators -->\n")[2].partition("<!-- end -->")[0]
    assert written.strip() == operator_table(), "run python -m ragged_shard.doctor --operators and put it into the page"


def test_the_page_counts_the_hooks():
    from ragged_shard.install import HOOKS

    assert f"replaces {len(HOOKS)} attributes" in PAGE.read_text()


def test_the_pictures_are_made_by_the_script(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import draw_layouts

    monkeypatch.setattr(draw_layouts, "IMAGES", tmp_path)
    draw_layouts.main()
    made = sorted(path.name for path in tmp_path.iterdir())
    assert made == sorted(re.findall(r"images/(ragged_\w+\.png)", PAGE.read_text()))
    for name in made:
        assert (ROOT / "docs" / "images" / name).stat().st_size > 5000


def test_the_doctor_prints_the_table():
    command = [sys.executable, "-m", "ragged_shard.doctor", "--operators"]
    assert "| elementwise |" in subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout
