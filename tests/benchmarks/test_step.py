"""The command as a user types it, with a model small enough for a test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import ranks, step
from benchmarks.variants import VARIANTS, check_names
from tests import cluster

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "step.py"
FIGURES = (
    "collectives",
    "collective_bytes",
    "copied_bytes",
    "allocated_bytes",
    "live_param_bytes",
    "live_state_bytes",
    "high_water_bytes",
)


def command(*arguments):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=6 * cluster.SHARED_BY * cluster.DEADLINE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    path = tmp_path_factory.mktemp("step") / "new" / "step.json"
    done = command(
        *("--model", "tiny", "--world-size", "2", "--variants", "fsdp2,local,ddp,fsdp2_fastgloo", "--rounds", "2"),
        *("--json", str(path)),
    )
    assert done.returncode == 0, done.stderr
    assert "fsdp2_fastgloo" in done.stdout and "MALLOC_MMAP_THRESHOLD_" in done.stdout
    return json.loads(path.read_text())


def test_every_figure_and_every_round_is_in_the_json(report):
    names = {"fsdp2", "local", "ddp", "fsdp2_fastgloo", "fsdp2_b"}  # the control comes by itself
    assert set(report["variants"]) == names
    assert report["params_bytes"] == 42368 * 4
    for figures in report["variants"].values():
        assert all(isinstance(figures[key], int) for key in FIGURES)
        for key in ("cpu_ratio", "wall_ratio"):
            ratio = figures[key]
            assert ratio["min"] <= ratio["ci95"][0] <= ratio["median"] <= ratio["ci95"][1] <= ratio["max"]
    assert report["variants"]["fsdp2"]["cpu_ratio"]["ci95"] == [1, 1]
    assert len(report["rounds"]) == 2
    for one in report["rounds"]:
        assert set(one["order"]) == set(one["cpu"]) == set(one["wall"]) == names
        assert set(one["laps"]["ddp"]) == {"forward", "backward", "optimizer"}
    assert report["control"] == "fsdp2_b"


def test_fsdp2_is_counted_as_its_source_says(report):
    """Three buckets, gathered twice, reduced once; copy-in 2 P/W, copy-out 2 P, chunk_cat P, P/W in gloo's wait."""
    size, counts = report["params_bytes"], report["variants"]
    assert counts["fsdp2"]["collectives"] == 9
    assert counts["fsdp2"]["collective_bytes"] == 3 * size
    assert counts["fsdp2"]["copied_bytes"] == 4.5 * size
    assert counts["fsdp2"]["live_param_bytes"] == size / 2
    assert counts["fsdp2"]["communication_buffers_allocated"] > 0
    assert counts["fsdp2_fastgloo"]["copied_bytes"] == 4 * size
    assert counts["fsdp2_fastgloo"]["collectives"] == 9
    same = [key for key in FIGURES if key != "high_water_bytes"]
    assert [counts["fsdp2"][key] for key in same] == [counts["fsdp2_b"][key] for key in same]


def test_local_and_ddp_are_counted(report):
    size, counts = report["params_bytes"], report["variants"]
    assert (counts["local"]["collectives"], counts["local"]["copied_bytes"]) == (0, 0)
    assert counts["ddp"]["collective_bytes"] == size
    assert counts["ddp"]["copied_bytes"] == 0  # gradients are views of the buckets
    for name in ("local", "ddp"):
        assert counts[name]["live_param_bytes"] == size
        assert 2 * size <= counts[name]["live_state_bytes"] <= 2 * size + 400


def test_all_variants_train_alike(report):
    assert not [warning for warning in report["warnings"] if "losses" in warning]
    assert report["losses"]["fsdp2"] == pytest.approx(report["losses"]["ddp"], rel=1e-4)


def test_counts_alone_take_no_round(tmp_path):
    path = tmp_path / "counts.json"
    arguments = ["--model=tinymoe", "--world-size=1", "--variants=local", "--rounds=0", f"--json={path}"]
    assert step.main(arguments) == 0
    report = json.loads(path.read_text())
    assert report["rounds"] == [] and report["variants"]["local"]["cpu_ratio"] is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--variants", "fsdp2,nonsense"], "unknown variants: nonsense; choose from local, ddp, fsdp2"),
        (["--variants", ""], "no variant given"),
        (["--variants", "ddp,ddp"], "ddp_b"),
        (["--model", "gpt2"], "invalid choice: 'gpt2'"),
        (["--world-size", "0"], "0 is not positive"),
        (["--model", "tiny", "--length", "17"], "tiny has 16 positions"),
    ],
)
def test_a_wrong_argument_is_one_clear_error(arguments, said, capsys):
    with pytest.raises(SystemExit) as stop:
        step.main(arguments)
    assert stop.value.code == 2
    assert said in capsys.readouterr().err


def test_every_variant_has_a_control():
    check_names([*VARIANTS, *(f"{name}_b" for name in VARIANTS)])


def fails_on_one_rank(send):
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise RuntimeError("the reason")
    dist.barrier()


def dies(send):
    os._exit(3)


def says_nothing(send):
    time.sleep(600)  # a hang; the test ends when whoever watches has ended this process


@pytest.mark.parametrize(
    ("world_size", "function", "said", "silence"),
    [(2, fails_on_one_rank, "the reason", 600), (1, dies, "exit code 3", 600), (1, says_nothing, "no rank said", 3)],
)
def test_a_rank_that_fails_ends_the_run_with_its_reason(world_size, function, said, silence):
    with pytest.raises(ranks.RankFailed, match=said):
        list(ranks.stream(world_size, function, silence=silence))
