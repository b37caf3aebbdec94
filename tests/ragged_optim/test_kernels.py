"""The C++ kernels are optional: with a compiler they come with the wheel or are built when first wanted, without one
the eager code does their work.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

import ragged_optim
from ragged_optim import kernels
from ragged_optim.kernels import compile as kernel_compile
from ragged_optim.rules import adamw8bit

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
    assert sorted(name.split("-")[0] for name in libraries) == (["adamw8bit", "muon"] if compiler else [])
