"""What `make train` concludes from its four runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import compare
import optimizers
import plots


def run_of(folder: Path, losses: list[float], valid: float = 1.0) -> Path:
    folder.mkdir(parents=True)
    entries: list[dict[str, float]] = [{"step": step, "train_loss": loss} for step, loss in enumerate(losses)]
    entries.append({"step": len(losses) - 1, "valid_loss": valid})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    summary = dict.fromkeys(("tokens_per_s", "peak_bytes", "parameter_bytes", "state_bytes"), 2048.0)
    (folder / "summary.json").write_text(json.dumps(summary | {"train_loss": losses[-1], "valid_loss": valid}))
    return folder


def test_the_largest_difference_is_found_in_any_step(tmp_path: Path) -> None:
    one = run_of(tmp_path / "one", [4.0, 3.0, 2.0])
    assert compare.largest_difference(one, one) == 0
    assert compare.largest_difference(one, run_of(tmp_path / "b", [4.0, 3.003, 2.0])) == pytest.approx(1e-3)
    assert compare.largest_difference(one, run_of(tmp_path / "c", [4.0, 3.0])) == float("inf")


def test_a_step_that_was_trained_again_counts_as_it_was_last(tmp_path: Path) -> None:
    folder = run_of(tmp_path / "run", [4.0, 3.0, 2.0])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "train_loss": 2.5}\n')
    assert plots.read_metrics(folder, "train_loss") == {0: 4.0, 1: 2.5, 2: 2.0}


def test_no_earlier_comparison_is_overwritten(tmp_path: Path) -> None:
    assert compare.free_folder(tmp_path).name == "compare"
    (tmp_path / "compare").mkdir()
    (tmp_path / "compare-2").mkdir()
    assert compare.free_folder(tmp_path).name == "compare-3"


@pytest.mark.parametrize(("sharded", "status"), [(2.0, 0), (2.001, 1)])
def test_the_command_fails_when_sharded_and_unsharded_runs_differ(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    sharded: float,
    status: int,
) -> None:
    def train(command: list[str]) -> int:
        folder = Path(command[command.index("--runs") + 1], command[command.index("--name") + 1])
        last = sharded if folder.name == "fsdp-adamw" else 2.0
        run_of(folder, [4.0, 3.0, last], valid=1.5 if "adamw" in folder.name else 1.2)
        return 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare.subprocess, "call", train)
    assert compare.main([]) == status
    said = capsys.readouterr().out
    assert ("DISAGREE" in said) == bool(status)
    assert "0.300 nats below" in said
    assert all(name in said for name in compare.RUNS)
    assert (tmp_path / "runs/compare/loss.png").read_bytes()[:4] == b"\x89PNG"


def test_further_optimizers_join_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = []

    def train(command: list[str]) -> int:
        trained.append(command[command.index("--optimizer") + 1])
        run_of(Path(command[command.index("--runs") + 1], command[command.index("--name") + 1]), [4.0, 2.0])
        assert "--optimizers" not in command and "--steps" in command
        return 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare.subprocess, "call", train)
    assert compare.main(["--optimizers", "all", "--steps", "3"]) == 0
    assert sorted(set(trained)) == sorted({*optimizers.LEARNING_RATES}) and len(trained) == 12
    assert len(json.loads((tmp_path / "runs/compare/table.json").read_text())) == 12
    assert "fsdp + soap" in capsys.readouterr().out
    trained.clear()
    assert compare.main(["--optimizers", "lion", "--steps", "3"]) == 0 and len(trained) == 5
    assert compare.main(["--optimizers", "lamb"]) == 2
    assert "unknown: lamb; choose from all, adamw, adam" in capsys.readouterr().err
