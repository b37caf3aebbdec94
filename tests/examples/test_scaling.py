"""The prediction for a cluster that docs/fsdp.md shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch.distributed as dist

import scaling

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "fsdp.md").read_text()


def test_the_command_of_the_page_prints_its_table_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = re.findall(r"^\.venv/bin/python examples/scaling\.py (.*)$", PAGE, re.MULTILINE)
    picture = tmp_path / "scaling.png"
    arguments = shlex.split(command.replace("medium", "micro"))
    arguments[arguments.index("--out") + 1] = str(picture)
    assert scaling.main(arguments) == 0
    assert not dist.is_initialized()
    printed = capsys.readouterr().out
    rows = re.findall(r"^ *([\d,]+) +(\d+) +[\d.]+ +[\d.]+ +[\d.]+ +([\d.]+)%", printed, re.MULTILINE)
    assert [row[0] for row in rows] == ["8", "64", "512", "4,096"]
    # Two blocks and the root: gathered in forward, the blocks but the last again in backward, all reduced.
    assert {int(row[1]) for row in rows} == {3 + 1 + 3}
    efficiency = [float(row[2]) for row in rows]
    assert efficiency == sorted(efficiency, reverse=True) and efficiency[0] > efficiency[1]
    assert "speed-up: over 1 rank without communication" in printed and "assumed:" in printed
    assert picture.stat().st_size > 10_000


def test_ranks_that_are_none_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        scaling.main(["--ranks", "8,0"])
    assert "--ranks" in capsys.readouterr().err
