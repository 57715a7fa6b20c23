"""The package's own build: as pyproject.toml says, and the matrix products compiled for this kind of processor.

Without a compiler the package is built all the same: it runs on ggml's products then.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

KERNELS = Path("puna") / "native" / "kernels"


def _builder() -> ModuleType:
    """By its path: nothing is installed yet."""
    spec = importlib.util.spec_from_file_location("puna_kernels_build", Path(__file__).parent / "src" / KERNELS / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildWithKernels(build_py):
    def run(self) -> None:
        super().run()
        builder = _builder()
        folder = builder.FOLDER if self.editable_mode else Path(self.build_lib) / KERNELS
        try:
            builder.build(folder / builder.LIBRARY.name)
        except builder.BuildError as error:
            print(f"Puna's own matrix products were not compiled, ggml's will be used: {error}")


class PlatformDistribution(Distribution):
    """Its wheel is for one platform, although nothing of it is a module of Python's."""

    def has_ext_modules(self) -> bool:
        return True


setup(distclass=PlatformDistribution, cmdclass={"build_py": BuildWithKernels})
