"""The C++ kernels are optional: with a compiler they come with the wheel or are built when first wanted, without one
the eager code does their work.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ragged_optim
from ragged_optim import kernels
from ragged_optim.kernels import compile as kernel_compile
from ragged_optim.kernels.compiled import compiled_step
from ragged_optim.rules import adamw8bit
from tests.ragged_optim.models import full

ROOT = Path(__file__).parents[2]
COMPILER = """#!/bin/sh
# Writes its arguments where the library should go.
for last; do :; done
echo "$@" > "$last"
"""


def script(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def nothing_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache and no compiler; the cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(kernel_compile, "HERE", tmp_path / "package")
    shutil.copytree(Path(kernels.__file__).parent, tmp_path / "package", ignore=shutil.ignore_patterns("*.so"))
    return tmp_path / "cache" / "ragged_optim"


def test_without_a_compiler_there_is_no_kernel_and_a_step_is_eager(
    nothing_built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kernel_compile.build("adamw8bit") is None
    monkeypatch.setattr(adamw8bit, "adamw8bit_kernel", kernels.adamw8bit_kernel.__wrapped__)
    assert kernels.adamw8bit_kernel.__wrapped__() is None and kernels.muon_kernel.__wrapped__() is None
    assert kernels.adamw_kernel.__wrapped__() is None
    param = nn.Parameter(torch.zeros(64, 64))
    param.grad = torch.ones_like(param)
    ragged_optim.AdamW8bit([param], lr=0.25).step()
    torch.testing.assert_close(param.detach(), torch.full((64, 64), -0.25), rtol=1e-3, atol=0)


def test_a_compiler_that_fails_leaves_nothing_behind(
    nothing_built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(script(tmp_path / "bin", "broken", "#!/bin/sh\nexit 1\n")))
    assert kernel_compile.build("adamw8bit") is None
    assert list(nothing_built.iterdir()) == []


def test_a_library_is_named_for_its_source_and_taken_from_the_package_first(
    nothing_built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(script(tmp_path / "bin", "compiler", COMPILER)))
    monkeypatch.setenv("PATH", os.defpath)
    made = kernel_compile.build("adamw8bit")
    assert made is not None and made.parent == nothing_built and "-ffp-contract=off" in made.read_text()
    installed = tmp_path / "package" / made.name
    shutil.copy(made, installed)
    assert kernel_compile.build("adamw8bit") == installed
    source = tmp_path / "package" / "adamw8bit.cpp"
    source.write_text(source.read_text() + "// changed\n")
    again = kernel_compile.build("adamw8bit")
    assert again is not None and again.name != made.name


def test_an_environment_variable_turns_kernels_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAGGED_OPTIM_KERNELS", "0")
    assert kernels.adamw8bit_kernel.__wrapped__() is None and kernels.muon_kernel.__wrapped__() is None
    assert kernels.adamw_kernel.__wrapped__() is None


@pytest.mark.parametrize(("compiler", "tag"), [(True, "py3-none-linux"), (False, "py3-none-any")])
@pytest.mark.skipif(sys.platform != "linux", reason="the tag of another platform")
def test_a_wheel_holds_the_kernels_if_there_is_a_compiler_and_is_pure_without(
    compiler: bool, tag: str, tmp_path: Path
) -> None:
    pytest.importorskip("setuptools", minversion="77", reason="pyproject.toml's build-system.requires")
    project = tmp_path / "project"
    shutil.copytree(ROOT / "ragged_optim" / "kernels", project / "ragged_optim" / "kernels")
    (project / "ragged_optim" / "__init__.py").touch()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, project)
    script(tmp_path / "bin", "g++", COMPILER)
    environment = {**os.environ, "PATH": str(tmp_path / "bin") if compiler else str(tmp_path / "empty")}
    environment.pop("CXX", None)
    command = [sys.executable, "setup.py", "-q", "bdist_wheel", "--dist-dir", str(tmp_path)]
    subprocess.run(command, cwd=project, env=environment, check=True, capture_output=True, timeout=60)
    (wheel,) = tmp_path.glob("*.whl")
    assert tag in wheel.name
    libraries = [Path(name).stem for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    assert sorted(name.split("-")[0] for name in libraries) == (["adamw", "adamw8bit", "muon"] if compiler else [])


@pytest.fixture(scope="module")
def cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For Inductor: in the machine's it finds code that was made for other vectors, and computes wrong values by it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


def compiled_beside(device: str, shape: tuple[int, ...], coupled: bool, **options: Any) -> None:
    """Three steps, one gradient of which is bad: every code and scale of the compiled step is the other's."""
    make = ragged_optim.Adam8bit if coupled else ragged_optim.AdamW8bit
    params = [nn.Parameter(full(shape, 0).to(device)) for _ in range(2)]
    optimizers = [make([p], min_8bit_size=0, weight_decay=0.1, **options) for p in params]
    real = adamw8bit._kernel
    for step in range(3):
        grad = (full(shape, 1 + step) * full(shape, 50 + step).exp()).to(device)
        if step == 1:
            grad.view(-1)[grad.numel() // 2], grad.view(-1)[0] = math.nan, math.inf
        params[1].data.copy_(params[0])
        reports = []
        for param, optimizer, kernel in zip(params, optimizers, (None, compiled_step()), strict=True):
            param.grad = grad.clone()
            adamw8bit._kernel = lambda device, kernel=kernel: kernel
            try:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    optimizer.step()
            finally:
                adamw8bit._kernel = real
            reports.append([str(one.message) for one in caught if "non-finite gradient" in str(one.message)])
        assert reports[0] == reports[1] and (step != 1 or reports[0])
    a, b = (o.state[p] for o, p in zip(optimizers, params, strict=True))
    assert all(torch.equal(a[key], b[key]) for key in a)
    torch.testing.assert_close(params[0], params[1], rtol=1e-6, atol=1e-7, equal_nan=True)


@pytest.mark.usefixtures("cache_of_its_own")
@pytest.mark.skipif(kernel_compile.build("adamw8bit") is None, reason="Inductor needs a C++ compiler on the CPU")
def test_the_compiled_step_agrees_with_eager_in_every_code_and_scale() -> None:
    compiled_beside("cpu", (40, 33), False)


def test_the_compiled_step_is_allowed_a_graph_for_every_option_and_kind_of_shape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A process with nine of them died of FailOnRecompileLimitHit.
    limits = []

    def compiled(function: Any, **options: Any) -> Any:
        def run(*args: Any) -> torch.Tensor:
            limits.append(torch._dynamo.config.recompile_limit)
            return torch.zeros(1, 1, dtype=torch.bool)

        return run

    monkeypatch.setattr(torch, "compile", compiled)
    step = compiled_step.__wrapped__()
    monkeypatch.setattr(adamw8bit, "_kernel", lambda device: step)
    param = nn.Parameter(torch.zeros(64, 64))
    param.grad = torch.ones_like(param)
    ragged_optim.AdamW8bit([param]).step()
    assert limits == [256] and torch._dynamo.config.recompile_limit < 256


@pytest.mark.deep
@pytest.mark.usefixtures("cache_of_its_own")
@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"format": "dynamic"}, {"betas": (0.3, 0.9)}, {"skip_nonfinite": True}], ids=str
)
@pytest.mark.parametrize("shape", [(64, 64), (3000,), (3, 50, 8)])
def test_the_compiled_step_agrees_with_eager_with_every_option(
    shape: tuple[int, ...], options: dict[str, Any], coupled: bool
) -> None:
    compiled_beside("cpu", shape, coupled, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["float", "dynamic"])
def test_the_compiled_step_on_a_gpu_ends_near_the_cpu(format: str) -> None:
    # Eager torch on a GPU rounds multiply-adds as nvcc likes, so it is compared with the CPU, where a rare element may
    # sit on the edge between two codes.
    params = [nn.Parameter(full((200, 133), 0).to(device)) for device in ("cpu", "cuda")]
    optimizers = [ragged_optim.AdamW8bit([("w", p)], format=format) for p in params]
    for step in range(3):
        for param, optimizer in zip(params, optimizers, strict=True):
            param.grad = full((200, 133), 1 + step).to(param.device)
            optimizer.step()
    a, b = (o.state[p] for o, p in zip(optimizers, params, strict=True))
    for key in ("exp_avg.codes", "exp_avg_sq.codes"):
        assert (a[key] != b[key].cpu()).float().mean() < 1e-3
    torch.testing.assert_close(params[0], params[1].cpu(), rtol=1e-5, atol=1e-6)
