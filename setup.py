"""Everything about the package stands in pyproject.toml; this builds the optional C++ kernels into a wheel.

With a C++ compiler the wheel holds them and is for one platform. Without one, or with RAGGED_OPTIM_KERNELS=0, it is
pure Python: a kernel is then compiled when it is first wanted, or its work is done in eager torch. So is an editable
install, whose sources may change.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

PACKAGE = Path("ragged_optim/kernels")


class BuildKernels(build_py):
    def run(self) -> None:
        super().run()
        target = Path(self.build_lib) / PACKAGE
        for left in target.glob("*.so"):
            left.unlink()
        if self.editable_mode or os.environ.get("RAGGED_OPTIM_KERNELS", "1") == "0":
            return
        # By its path: importing the package would need torch.
        spec = importlib.util.spec_from_file_location("kernels_compile", PACKAGE / "compile.py")
        kernels = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(kernels)
        for name in kernels.KERNELS:
            made = kernels.compile_to(target, PACKAGE / f"{name}.cpp")
            print(f"kernel {name}: {made.name if made else 'no C++ compiler, left out'}")


class Wheel(bdist_wheel):
    def run(self) -> None:
        self.run_command("build_py")
        built = self.get_finalized_command("build_py").build_lib
        self.root_is_pure = not list(Path(built, PACKAGE).glob("*.so"))
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        # The kernels know nothing of Python: one wheel per platform.
        _, _, platform = super().get_tag()
        return "py3", "none", platform


setup(cmdclass={"build_py": BuildKernels, "bdist_wheel": Wheel})
