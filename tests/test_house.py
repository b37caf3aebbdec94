"""The rules of the house that a reader relies on: what is packaged, what depends on what, what is loaded when."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("ragged_shard", "fsdp", "ragged_optim")
# package -> what it may not import
ABOVE = {"ragged_shard": {"fsdp", "ragged_optim"}, "fsdp": {"ragged_optim"}, "ragged_optim": {"fsdp"}}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def imported(file: Path, *, when_loaded: bool = False) -> set[str]:
    """Top-level packages that a file imports, wherever in it; or only those that it cannot be loaded without."""
    found, tree = set(), ast.parse(file.read_text())
    for node in tree.body if when_loaded else ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


def python(code: str) -> str:
    """What ``code`` prints in a fresh interpreter at the root of the repository."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_only_the_three_packages_are_packaged() -> None:
    find = PROJECT["tool"]["setuptools"]["packages"]["find"]
    assert find["include"] == [f"{package}*" for package in PACKAGES]
    folders = [path.parent.name for path in ROOT.glob("*/__init__.py")]
    assert sorted(f for f in folders if any(f.startswith(p) for p in PACKAGES)) == sorted(PACKAGES)


def test_every_folder_of_a_package_is_found_by_the_build() -> None:
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            assert (file.parent / "__init__.py").exists(), f"{file.parent} would be left out of the wheel"


@pytest.mark.parametrize("package", PACKAGES)
def test_dependencies_point_down(package: str) -> None:
    for file in (ROOT / package).rglob("*.py"):
        assert not imported(file) & ABOVE[package], file
        assert not imported(file) & {"tests", "examples", "benchmarks"}, file
        assert not imported(file, when_loaded=True) & {"tqdm", "rich", "matplotlib", "numpy", "bitsandbytes"}, file


def test_no_file_is_named_for_having_no_subject() -> None:
    for file in ROOT.glob("[a-z]*/**/*.py"):
        if file.parts[len(ROOT.parts)] in (*PACKAGES, "examples", "benchmarks", "tests"):
            assert not re.search(r"utils?$|common|^base$|helpers?$|manager|misc", file.stem), file


def test_planning_needs_no_torch() -> None:
    modules = ["block", "policy", "planner", "bound", "plan"]
    code = f"import sys, ragged_shard, importlib\nfor m in {modules}: importlib.import_module('ragged_shard.' + m)\n"
    assert python(code + "print('torch' in sys.modules)") == "False"
    # Only when a name that needs it is asked for:
    assert python("import sys\nfrom ragged_shard import RaggedShard\nprint('torch' in sys.modules)") == "True"


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_resolve_and_an_unknown_one_is_an_attribute_error(package: str) -> None:
    code = f"""
import {package} as p
try: p.no_such_name
except AttributeError as error: print("no_such_name" in str(error))
for name in p.__all__: getattr(p, name)
print(sorted(set(p.__all__) - set(dir(p))))"""
    assert python(code) == "True\n[]"


def test_types_are_marked_as_shipped() -> None:
    for package in PACKAGES:
        assert (ROOT / package / "py.typed").exists(), f"{package}/py.typed is missing: type checkers will ignore it"


def test_constraints_pin_all_that_is_installed() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pins = dict(line.split("==") for line in lines)
    assert pins["torch"] == "2.13.0"
    assert not any("+" in version for version in pins.values()), "a local version is not on the package index"
    extras = PROJECT["project"]["optional-dependencies"].values()
    wanted = PROJECT["project"]["dependencies"] + [requirement for extra in extras for requirement in extra]
    names = {re.split(r"[\[<>=!~ ]", requirement)[0].lower() for requirement in wanted} - {"ragged-optim"}
    assert names <= {name.lower() for name in pins}


def test_ci_runs_what_the_readme_says_and_nothing_else() -> None:
    script = (ROOT / ".ci/run").read_text().splitlines()
    commands = [line for line in script if line and not line.startswith(("#", "set ", "cd "))]
    assert commands == ["make lint", "make test"]
    readme = (ROOT / "README.md").read_text()
    assert all(command in readme for command in [*commands, "make train", "make bench"])
