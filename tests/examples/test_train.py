"""The main job as a user runs it: `python examples/train.py ...` on local processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import cluster
from train import main

TRAIN = Path(__file__).resolve().parents[2] / "examples" / "train.py"
SMALL = ["--model", "micro", "--global-batch", "6", "--eval-every", "1000", "--sample", "0"]
DEADLINE = 6 * cluster.SHARED_BY * cluster.DEADLINE
# A test must not depend on the GPUs there, nor on being itself a rank of something.
ENVIRONMENT = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")} | {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(TRAIN.parents[1]),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few kilobytes that are read at once."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("".join(f"line {i} of a text, {i * i} and {i * 7 % 13}\n" for i in range(2000)))
    return file


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(TRAIN), *arguments]
    return subprocess.Popen(
        command, cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen[str], status: int = 0) -> str:
    try:
        output, _ = process.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        process.terminate()
        raise AssertionError(f"no end within {DEADLINE} s:\n{process.communicate(timeout=30)[0]}") from None
    assert process.returncode == status, output
    return output


def train(folder: Path, *arguments: str, status: int = 0) -> str:
    return finish(start(folder, *arguments), status)


def losses(run: Path) -> dict[int, float]:
    """Training loss of each step, as last trained."""
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {entry["step"]: entry["train_loss"] for entry in entries if "train_loss" in entry}


def assert_close(one: dict[int, float], other: dict[int, float], relative: float) -> None:
    assert one.keys() == other.keys()
    for step in one:
        assert abs(one[step] - other[step]) <= relative * abs(one[step]), f"step {step}: {one[step]}, {other[step]}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """A run of 24 steps of sharded Muon on two processes, with checkpoints after 12 and 24 steps."""
    folder = tmp_path_factory.mktemp("whole")
    train(folder, *SMALL, *MUON, "--data", str(text), "--steps", "24", "--save-every", "12", "--sample", "20")
    return folder / "runs" / "train"


MUON = ["--sharding", "fsdp", "--optimizer", "muon", "--ns-dtype", "float32", "--world-size", "2"]


def half_of(run: Path, folder: Path) -> Path:
    """A copy of ``run`` as it was after 12 steps."""
    copy = folder / "half"
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints" / "step-00000024")
    return copy


def test_a_run_leaves_its_results(whole: Path) -> None:
    assert {"config.json", "metrics.jsonl", "summary.json", "loss.png", "layout.png", "checkpoints"} <= {
        path.name for path in whole.iterdir()
    }
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["sample"].startswith("def ")
    assert 0 < summary["parameter_bytes"] < summary["peak_bytes"]
    curve = losses(whole)
    assert list(curve) == list(range(24))
    assert curve[23] < curve[0] - 0.5
    assert all((whole / name).read_bytes()[:4] == b"\x89PNG" for name in ("loss.png", "layout.png"))


def test_resume_goes_on_bit_by_bit(whole: Path, tmp_path: Path) -> None:
    half = half_of(whole, tmp_path)
    train(tmp_path, "--resume", "half")
    lines = (half / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 25 + 12 + 1, "12 more steps and a validation"
    assert lines[25:37] == lines[12:24]
    assert json.loads(lines[-1])["valid_loss"] == json.loads(lines[24])["valid_loss"]


@pytest.mark.parametrize(("sharding", "world_size"), [("fsdp", 3), ("fsdp", 1), ("none", 1)])
def test_resume_on_another_number_of_processes(whole: Path, tmp_path: Path, sharding: str, world_size: int) -> None:
    half = half_of(whole, tmp_path)
    train(tmp_path, "--resume", "half", "--sharding", sharding, "--world-size", str(world_size))
    assert_close(losses(whole), losses(half), 1e-5)


def test_an_interrupted_run_saves_and_goes_on(tmp_path: Path, text: Path) -> None:
    long = [*SMALL, *MUON, "--data", str(text), "--steps", "100000", "--name", "long"]
    process, metrics = start(tmp_path, *long), tmp_path / "runs/long/metrics.jsonl"
    end = time.monotonic() + DEADLINE
    while not (metrics.exists() and metrics.read_text().count("\n") >= 4):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    output = finish(process, status=130)
    done = len(losses(tmp_path / "runs/long"))
    assert f"saved after step {done}" in output
    assert [path.name for path in (tmp_path / "runs/long/checkpoints").iterdir()] == [f"step-{done:08}"]
    output = train(tmp_path, "--resume", "runs/long", "--steps", str(done + 3))
    assert len(losses(tmp_path / "runs/long")) == done + 3


def test_the_four_ways_agree(whole: Path, tmp_path: Path, text: Path) -> None:
    """`fsdp` and DDP with the same optimizer; FSDP2 with it too."""
    for sharding in ("ddp", "fsdp2"):
        train(tmp_path, *SMALL, *MUON, "--data", str(text), "--steps", "24", "--sharding", sharding, "--name", sharding)
        assert_close(losses(whole), losses(tmp_path / "runs" / sharding), 1e-5)


def test_under_torchrun(tmp_path: Path, text: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(TRAIN)]
    run = [*SMALL, "--sharding", "fsdp", "--data", str(text), "--steps", "4", "--name", "torchrun"]
    done = subprocess.run(
        [*launcher, *run], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=DEADLINE
    )
    assert done.returncode == 0, done.stderr
    assert len(losses(tmp_path / "runs/torchrun")) == 4
    # Each rank finds the same thing wrong, and says the same.
    done = subprocess.run(
        [*launcher, *run], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=DEADLINE
    )
    assert done.returncode != 0
    said = {line for line in done.stderr.splitlines() if line.startswith("train.py: error")}
    assert said == {
        "train.py: error: runs/torchrun exists; choose another --name, or go on with that run: --resume runs/torchrun"
    }


@pytest.mark.gpu
def test_on_the_gpus_there(tmp_path: Path, text: Path) -> None:
    environment = {key: value for key, value in ENVIRONMENT.items() if key != "CUDA_VISIBLE_DEVICES"}
    command = [sys.executable, str(TRAIN), *SMALL, "--optimizer", "muon", "--data", str(text), "--steps", "20"]
    command += ["--global-batch", "32"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    assert "x cuda" in done.stdout
    curve = losses(tmp_path / "runs/train")
    assert curve[19] < curve[0] - 0.3


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--name", "half", "--runs", "."], ["half exists", "--name", "--resume half"]),
        (["--resume", "half", "--model", "tiny"], ["step-00000012", "another model", "blocks.0", "--model"]),
        (["--resume", "half", "--optimizer", "adamw"], ["step-00000012", "another optimizer", "--optimizer"]),
        (["--resume", "half", "--data", "other.txt"], ["config.json", "other text", "--data"]),
        (["--resume", "half", "--steps", "12"], ["step-00000012", "complete", "--steps more than 12"]),
        (["--resume", "nothing"], ["nothing/config.json", "--resume"]),
        (["--resume", "broken"], ["broken/config.json", "not the settings"]),
        (["--resume", "empty"], ["empty/checkpoints", "no complete checkpoint"]),
        (["--resume", "torn"], ["step-00000012", "not a readable checkpoint"]),
        (["--data", "missing.txt"], ["missing.txt", "no such file", "--data"]),
        (["--world-size", "3", "--global-batch", "2"], ["--global-batch 2", "--global-batch 3"]),
        (["--sharding", "none", "--world-size", "2"], ["--sharding none", "--world-size 1"]),
    ],
)
def test_what_is_wrong_is_named_and_nothing_is_touched(
    whole: Path,
    tmp_path: Path,
    arguments: list[str],
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    half = half_of(whole, tmp_path)
    (tmp_path / "other.txt").write_text("another text\n" * 1000)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    shutil.copy(half / "config.json", tmp_path / "empty")
    shutil.copytree(half, tmp_path / "torn")
    (tmp_path / "torn/checkpoints/step-00000012/.metadata").write_bytes(b"torn")
    before = snapshot(tmp_path)
    monkeypatch.chdir(tmp_path)
    for key in ("PYTHONPATH", "CUDA_VISIBLE_DEVICES"):  # for the ranks, of the one case that is found out there
        monkeypatch.setenv(key, ENVIRONMENT[key])
    assert main(arguments) == 2
    output = "".join(capfd.readouterr())
    said = {line for line in output.splitlines() if line.startswith("train.py: error: ")}
    assert len(said) == 1, output
    assert all(word in said.copy().pop() for word in words), output
    assert "Traceback" not in output
    assert snapshot(tmp_path) == before
