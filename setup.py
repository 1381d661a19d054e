"""Packages and extension modules of the distribution. Everything else that describes it is in pyproject.toml.

SPARSELIFT_SANITIZE=1 builds the extensions under AddressSanitizer and UndefinedBehaviorSanitizer.
"""

import os
import platform
from glob import glob

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

SANITIZE = bool(int(os.environ.get("SPARSELIFT_SANITIZE", "0")))
# Roundings are part of what the kernels promise: no contraction of a product and a sum unless the source says fma.
FLAGS = ["-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra",
         "-Wno-maybe-uninitialized", "-Wno-uninitialized"]      # g++ 12 warns of its own AVX-512 header
SANITIZER_FLAGS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g"]
ISAS: dict[str, list[str]] = {"portable": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    ISAS |= {"avx2": ["-mavx2", "-mfma"], "avx512": ["-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq", "-mavx2", "-mfma"]}
BAG_ISAS = {f"csrc/cpu/{isa}.cpp": flags for isa, flags in ISAS.items()}
INTERACTION_ISAS = {f"csrc/cpu/interaction_{isa}.cpp": flags for isa, flags in ISAS.items()}
ISA_FLAGS = BAG_ISAS | INTERACTION_ISAS
HEADERS = sorted(glob("csrc/**/*.h", recursive=True))
SHARED = ["csrc/api/status.cpp", "csrc/cpu/isa.cpp", "csrc/cpu/threads.cpp"]
BAGS = [f"csrc/cpu/{name}.cpp" for name in ("forward", "pool", "prepare", "program", "update")]
KERNEL_SOURCES = {
    "sparselift._memory": ["csrc/cpu/huge_pages.cpp", "csrc/cpu/pool.cpp", "csrc/cpu/ring.cpp"],
    "sparselift.kernels._cpu": [*SHARED, *BAGS, *BAG_ISAS],
    "sparselift.kernels._interaction": [*SHARED, "csrc/cpu/interaction.cpp", *INTERACTION_ISAS],
    "sparselift._probe": ["csrc/cpu/probe.cpp", "csrc/cpu/threads.cpp"],
    "sparselift.runtime._hot": [],                             # Cython alone
}


class BuildKernels(build_ext):
    """Compiles each source with the flags of its instruction set."""

    def build_extension(self, ext: Extension) -> None:
        extra = SANITIZER_FLAGS if SANITIZE else ["-g0"]       # Python's own flags ask for debug symbols: most of a wheel's size
        objects = []
        for source in KERNEL_SOURCES[ext.name]:
            objects += self.compiler.compile([source], output_dir=self.build_temp, include_dirs=["csrc"],
                                             extra_postargs=FLAGS + extra + ISA_FLAGS.get(source, []))
        ext.extra_objects = objects
        ext.extra_link_args = ["-lstdc++", "-ldl", "-lpthread", *extra]
        ext.extra_compile_args = ["-O2", "-Wno-unused-function", *extra]
        super().build_extension(ext)


def extension(name: str) -> Extension:
    declarations = [*glob("sparselift/*.pxd"), *glob("sparselift/kernels/*.pxd")]
    return Extension(name, [f"{name.replace('.', '/')}.pyx"], include_dirs=["csrc"],
                     depends=[*HEADERS, *declarations, *KERNEL_SOURCES[name]])


def main() -> None:
    # Here, since those who only read the flags above need not have it.
    from Cython.Build import cythonize

    setup(
        packages=[*find_packages(include=["sparselift", "sparselift.*"]), "sparselift.tuning"],
        package_dir={"sparselift.tuning": "tuning"},
        package_data={"sparselift": ["py.typed"]},
        include_package_data=False,
        ext_modules=cythonize([extension(name) for name in KERNEL_SOURCES], language_level=3, show_all_warnings=True),
        cmdclass={"build_ext": BuildKernels},
        zip_safe=False,
    )


if __name__ == "__main__":
    main()
