"""Builds the file library (``oars/adapt/files/native``), which ranks preload; all else is in pyproject.toml.

The library is no Python module and uses nothing of Python's binary interface: one wheel is for all versions of Python.
"""

from __future__ import annotations

import platform
from glob import glob

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError, ExecError, PlatformError

NATIVE = "src/oars/adapt/files/native"
# Before glibc 2.34 dlsym and dladdr are in libdl. It is named by its file: newer compilers know it as an empty archive.
LIBDL = ["-Wl,--no-as-needed", "-l:libdl.so.2"] if platform.libc_ver()[0] == "glibc" else []


class BuildLibrary(build_ext):
    """Says in one line what is missing when there is no C compiler; leaves no trace of where Python is."""

    def build_extension(self, ext: Extension) -> None:
        self.compiler.linker_so = [word for word in self.compiler.linker_so if not word.startswith("-Wl,-rpath")]
        try:
            super().build_extension(ext)
        except (CCompilerError, ExecError, PlatformError, FileNotFoundError) as error:
            compiler = getattr(self.compiler, "compiler_so", ["cc"])[0]
            raise SystemExit(f"manyoars needs a working C compiler to build its file library, and {compiler} failed "
                             f"({error}): install one (Debian: gcc libc6-dev; Rocky: gcc glibc-devel)") from None

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []  # it is no Python module


class AnyPython(bdist_wheel):
    """The wheel depends on the platform only."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension(
        "oars.adapt.files._preload", sorted(glob(f"{NATIVE}/*.c")), depends=glob(f"{NATIVE}/*.h"),
        py_limited_api=True, extra_link_args=LIBDL,
        extra_compile_args=["-std=gnu11", "-O2", "-fvisibility=hidden", "-ftls-model=initial-exec", "-U_FORTIFY_SOURCE",
                            "-fno-delete-null-pointer-checks", "-Wno-nonnull-compare", "-Wall"])],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": AnyPython},
)
