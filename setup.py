"""Builds the file library (``oars/adapt/files/native``), which ranks preload; all else is in pyproject.toml."""

from __future__ import annotations

from glob import glob

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError, ExecError, PlatformError

NATIVE = "src/oars/adapt/files/native"


class BuildLibrary(build_ext):
    """Says in one line what is missing when there is no C compiler."""

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except (CCompilerError, ExecError, PlatformError, FileNotFoundError) as error:
            compiler = getattr(self.compiler, "compiler_so", ["cc"])[0]
            raise SystemExit(f"manyoars needs a working C compiler to build its file library, and {compiler} failed "
                             f"({error}): install one (Debian: gcc libc6-dev; Rocky: gcc glibc-devel)") from None

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []  # it is no Python module


setup(
    ext_modules=[Extension(
        "oars.adapt.files._preload", sorted(glob(f"{NATIVE}/*.c")), depends=glob(f"{NATIVE}/*.h"),
        libraries=["dl", "pthread"], py_limited_api=True,
        extra_compile_args=["-std=gnu11", "-O2", "-fvisibility=hidden", "-ftls-model=initial-exec", "-U_FORTIFY_SOURCE",
                            "-fno-delete-null-pointer-checks", "-Wno-nonnull-compare", "-Wall"])],
    cmdclass={"build_ext": BuildLibrary},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
