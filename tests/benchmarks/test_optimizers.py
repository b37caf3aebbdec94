from __future__ import annotations

import json

import pytest
import torch

from benchmarks import models, optimizers


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("optimizers") / "optimizers.json"
    arguments = ["--model", "tiny", "--adamw-model", "tiny", "--rounds", "2", "--parts", "muon,state"]
    assert optimizers.main([*arguments, "--json", str(path)]) == 0
    return json.loads(path.read_text())


def test_muon_is_compared_with_the_iterations_alone(made):
    variants = made["muon"]["variants"]
    assert list(variants)[:2] == ["floor", "floor_b"]
    assert {"ours", "ddp_torch", "fsdp2_naive"} <= set(variants)
    assert variants["floor"]["collectives"] == variants["ddp_torch"]["collectives"] == 0
    assert variants["fsdp2_naive"]["collectives"] == 8  # one gather for each of the matrices
    assert variants["floor"]["cpu_ratio"]["median"] == 1 and len(made["muon"]["rounds"]) == 2
    assert variants["ours"]["cpu_ratio_to"]["floor"] == variants["ours"]["cpu_ratio"]


def test_bytes_of_state(made):
    figures = made["state"]["bytes_per_parameter"]
    assert figures["AdamW"] == pytest.approx(8, rel=0.01)
    assert figures["Lion"] == pytest.approx(4, rel=0.01)
    assert figures["AdamW8bit"] < 4  # the small parameters of this small model stay in fp32


def test_the_floor_does_the_iterations_of_a_fair_share():
    shapes = [(8, 8), (16, 8), (16, 16), (16, 16)]
    shares = [optimizers.Floor(shapes, 2, rank).matrices for rank in range(2)]
    assert sorted(tuple(m.shape) for share in shares for m in share) == sorted(shapes)
    loads = [sum(min(m.shape) ** 2 * max(m.shape) for m in share) for share in shares]
    assert max(loads) - min(loads) <= 16**3
    assert all(m.dtype == torch.bfloat16 for share in shares for m in share)


def test_muon_and_adamw_share_a_model():
    model = models.build("tiny")
    matrices, rest = optimizers.hidden(model)
    assert len(matrices) == 8 and len(matrices) + len(rest) == len(list(model.parameters()))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--parts", "muon,speed"], "unknown parts: speed; choose from muon, adamw, adamw8bit, state"),
        (["--parts", ""], "no part given"),
        (["--parts", "muon", "--model", "moe45"], "takes no stacks of experts"),
    ],
)
def test_a_wrong_argument_is_one_clear_error(arguments, said, capsys):
    with pytest.raises(SystemExit) as stop:
        optimizers.main(arguments)
    assert stop.value.code == 2
    assert said in capsys.readouterr().err
