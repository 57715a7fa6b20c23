"""The package's own build: as pyproject.toml says, the matrix products compiled for this kind of processor, and the
libraries of the page fetched through npm.

Without a compiler the package is built all the same: it runs on ggml's products then, and its wheel fits any platform.
Without npm as well: the page shows answers as plain text then.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

KERNELS = Path("puna") / "native" / "kernels"
WEB = Path("puna") / "web"
SHARED = Path(__file__).parent / "share"  # manual and completions, where shells and man look for them under any prefix


def _module(path: Path) -> ModuleType:
    """By its path: nothing is installed yet."""
    spec = importlib.util.spec_from_file_location(f"puna_{path.stem}", Path(__file__).parent / "src" / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BUILDER = _module(KERNELS / "build.py")
LIBRARIES = _module(WEB / "libraries.py")


class BuildWithAll(build_py):
    def run(self) -> None:
        super().run()
        self._compile()
        self._fetch()

    def _compile(self) -> None:
        folder = BUILDER.FOLDER if self.editable_mode else Path(self.build_lib) / KERNELS
        (folder / BUILDER.LIBRARY.name).unlink(missing_ok=True)  # of an earlier build, perhaps of other sources
        try:
            BUILDER.build(folder / BUILDER.LIBRARY.name)
        except BUILDER.BuildError as error:
            print(f"Puna's own matrix products were not compiled, ggml's will be used: {error}")

    def _fetch(self) -> None:
        target = LIBRARIES.TARGET
        if not self.editable_mode:
            target = Path(self.build_lib) / target.relative_to(Path(__file__).resolve().parent / "src")
        try:
            LIBRARIES.fetch(target)
        except LIBRARIES.FetchError as error:
            print(f"The page's libraries were not fetched, it will show answers as plain text: {error}")


class PlatformDistribution(Distribution):
    """With compiled products it is for one platform, although nothing of it is a module of Python's."""

    def has_ext_modules(self) -> bool:
        return bool(BUILDER.compiler())


class WheelForEveryPython(bdist_wheel):
    """The products are opened by ctypes: one wheel serves every version of Python on its platform."""

    def get_tag(self) -> tuple[str, str, str]:
        platform = super().get_tag()[2]
        return "py3", "none", platform


def data_files() -> list[tuple[str, list[str]]]:
    folders = sorted({path.parent for path in SHARED.rglob("*") if path.is_file()})
    root = SHARED.parent
    return [
        (str(folder.relative_to(root)), sorted(str(path.relative_to(root)) for path in folder.iterdir() if path.is_file()))
        for folder in folders
    ]


setup(
    distclass=PlatformDistribution,
    cmdclass={"build_py": BuildWithAll, "bdist_wheel": WheelForEveryPython},
    data_files=data_files(),
)
