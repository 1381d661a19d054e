"""Packages and extension modules of the distribution. Everything else that describes it is in pyproject.toml.

SPARSELIFT_SANITIZE=1 builds the extensions under AddressSanitizer and UndefinedBehaviorSanitizer.
CFLAGS (what Cython wrote) and CXXFLAGS (the kernels) come after the flags below.
SPARSELIFT_CUDA=1 demands the CUDA kernels, SPARSELIFT_CUDA=0 leaves them out; otherwise they are built where there are nvcc and a device.
SPARSELIFT_CUDA_ARCHITECTURES=90 compiles them for sm_90 alone, and likewise for several numbers with commas between them.
"""

import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError
from setuptools.modified import newer_group

SANITIZE = bool(int(os.environ.get("SPARSELIFT_SANITIZE", "0")))
# Roundings are part of what the kernels promise: no contraction of a product and a sum unless the source says fma.
FLAGS = ["-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra",
         "-Wno-maybe-uninitialized", "-Wno-uninitialized"]      # g++ 12 warns of its own AVX-512 header
SANITIZER_FLAGS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g1",
                   "-O1"]                                      # -O3 takes the compiler more than twice as long
ISAS: dict[str, list[str]] = {"portable": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    ISAS |= {"avx2": ["-mavx2", "-mfma", "-mf16c"], "avx512": ["-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq", "-mavx2", "-mfma"]}
BAG_ISAS = {f"csrc/cpu/{isa}.cpp": flags for isa, flags in ISAS.items()}
INTERACTION_ISAS = {f"csrc/cpu/interaction_{isa}.cpp": flags for isa, flags in ISAS.items()}
EXCHANGE_ISAS = {f"csrc/cpu/exchange_{isa}.cpp": flags for isa, flags in ISAS.items()}
EPILOGUE_ISAS = {f"csrc/cpu/epilogue_{isa}.cpp": flags for isa, flags in ISAS.items()}
ISA_FLAGS = BAG_ISAS | INTERACTION_ISAS | EXCHANGE_ISAS | EPILOGUE_ISAS
EXTRA_FLAGS = SANITIZER_FLAGS if SANITIZE else ["-g0"]         # Python's own flags ask for debug symbols: most of a wheel's size
CORES = os.cpu_count() or 1
HEADERS = sorted(glob("csrc/**/*.h", recursive=True) + glob("csrc/**/*.cuh", recursive=True))
SHARED = ["csrc/api/status.cpp", "csrc/cpu/isa.cpp", "csrc/cpu/threads.cpp"]
BAGS = [f"csrc/cpu/{name}.cpp" for name in ("arrange", "forward", "pool", "prepare", "program", "update")]
CUDA_MODULE = "sparselift.kernels._cuda"
CUDA_ARCHITECTURES = (80, 90, 100)
LEAST_ARCHITECTURE = 80                                        # bfloat16 in hardware


def cuda_architectures() -> tuple[int, ...]:
    """What to compile for, ascending. Exits where SPARSELIFT_CUDA_ARCHITECTURES is no list of numbers that the kernels can run on."""
    wanted = os.environ.get("SPARSELIFT_CUDA_ARCHITECTURES", "")
    if not wanted:
        return CUDA_ARCHITECTURES
    numbers = wanted.split(",")
    if not all(number.isdecimal() and int(number) >= LEAST_ARCHITECTURE for number in numbers):
        sys.exit(f"SPARSELIFT_CUDA_ARCHITECTURES must be numbers from {LEAST_ARCHITECTURE} on with commas between them, such as 80,90; "
                 f"got {wanted!r}")
    return tuple(sorted({int(number) for number in numbers}))


ARCHITECTURES = cuda_architectures()
# Contraction as for the host. A kernel whose registers spill to memory is an error.
NVCC_FLAGS = ["-std=c++17", "-O3", "-fmad=false", "-Xcompiler=-fPIC,-fvisibility=hidden", "-Xptxas=-warn-spills,-Werror",
              *(f"-gencode=arch=compute_{number},code=sm_{number}" for number in ARCHITECTURES),
              "-gencode=arch=compute_{0},code=compute_{0}".format(ARCHITECTURES[-1])]
KERNEL_SOURCES = {
    "sparselift._memory": ["csrc/cpu/huge_pages.cpp", "csrc/cpu/pool.cpp", "csrc/cpu/ring.cpp"],
    "sparselift.kernels._cpu": [*SHARED, *BAGS, *BAG_ISAS],
    "sparselift.kernels._interaction": [*SHARED, "csrc/cpu/interaction.cpp", *INTERACTION_ISAS],
    "sparselift.kernels._exchange": [*SHARED, "csrc/cpu/exchange.cpp", "csrc/cpu/indices.cpp", *EXCHANGE_ISAS],
    "sparselift.kernels._epilogue": [*SHARED, "csrc/cpu/epilogue.cpp", *EPILOGUE_ISAS],
    "sparselift._probe": ["csrc/cpu/probe.cpp", "csrc/cpu/threads.cpp"],
    "sparselift.runtime._hot": [],                             # Cython alone
}


def find_nvcc() -> Path | None:
    """nvcc of CUDA_HOME where that is set, else of PATH, else of NVIDIA's wheels in the running Python's environment."""
    home = os.environ.get("CUDA_HOME")
    if home:
        candidates = [Path(home, "bin", "nvcc")]
    else:
        on_path = shutil.which("nvcc")
        candidates = [Path(on_path)] if on_path else sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/bin/nvcc"), reverse=True)
    return next((path for path in candidates if path.is_file()), None)


def has_cuda_device() -> bool:
    """Whether CUDA's driver is here and knows of a device."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def cuda_compiler() -> Path | None:
    """The nvcc to build with, or None: no CUDA module. Exits where SPARSELIFT_CUDA demands what is missing."""
    wanted = os.environ.get("SPARSELIFT_CUDA", "")
    if wanted not in ("", "0", "1"):
        sys.exit(f"SPARSELIFT_CUDA must be 0, 1 or unset; got {wanted!r}")
    nvcc = None if wanted == "0" else find_nvcc()
    if wanted == "1" and nvcc is None:
        sys.exit("SPARSELIFT_CUDA=1, but there is no nvcc in CUDA_HOME, on PATH or in the wheels nvidia-cuda-nvcc of this Python")
    # nvcc takes minutes, for kernels that cannot run where there is no device.
    if nvcc and wanted == "" and not has_cuda_device():
        print(f"no CUDA device here: the CUDA kernels are not built, though there is {nvcc} (SPARSELIFT_CUDA=1 builds them)", flush=True)
        return None
    return nvcc


NVCC = cuda_compiler()
if NVCC:
    KERNEL_SOURCES[CUDA_MODULE] = ["csrc/api/status.cpp", *sorted(glob("csrc/cuda/*.cu"))]


class BuildKernels(build_ext):
    """Compiles each source with the flags of its instruction set, as many at a time as there are cores."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or CORES

    def run(self) -> None:
        if not NVCC:                                           # one of an earlier build would be packed, or imported, as if of this one
            Path(self.get_ext_fullpath(CUDA_MODULE)).unlink(missing_ok=True)
        super().run()

    def build_extensions(self) -> None:
        """Sources of kernels first: they take longest, and extensions share some of them."""
        sources = sorted({source for ext in self.extensions for source in KERNEL_SOURCES[ext.name]}, key=slowest_first)
        self.notes = {".cu": self.note("nvcc", (str(NVCC), NVCC_FLAGS)),
                      ".cpp": self.note("g++", (self.compiler.compiler_so, FLAGS, EXTRA_FLAGS, ISA_FLAGS, os.environ.get("CXXFLAGS"))),
                      ".c": self.note("gcc", (self.compiler.compiler_so, os.environ.get("CFLAGS")))}
        with ThreadPoolExecutor(CORES) as pool:
            self.made = dict(zip(sources, pool.map(self.compile_kernels, sources)))
        super().build_extensions()

    def build_extension(self, ext: Extension) -> None:
        ext.extra_objects = [self.made[source] for source in KERNEL_SOURCES[ext.name]]
        ext.extra_link_args = ["-lstdc++", "-ldl", "-lpthread", *EXTRA_FLAGS]
        ext.depends += self.notes.values()
        if ext.name == CUDA_MODULE:
            ext.extra_link_args += [static_runtime(), "-lrt", "-Wl,--exclude-libs,ALL"]
        ext.extra_compile_args = ["-O2", "-Wno-unused-function", *EXTRA_FLAGS, *os.environ.get("CFLAGS", "").split()]
        super().build_extension(ext)

    def note(self, compiler: str, settings: object) -> str:
        """A file that is newer than what was compiled with other settings."""
        noted, now = Path(self.build_temp, f"settings of {compiler}"), repr(settings)
        if not noted.exists() or noted.read_text() != now:
            noted.parent.mkdir(parents=True, exist_ok=True)
            noted.write_text(now)
        return str(noted)

    def compile_kernels(self, source: str) -> str:
        """The object of one source, made anew where something that it may depend on has changed."""
        made = Path(self.build_temp, source).with_suffix(".o")
        if not self.force and not newer_group([source, *HEADERS, __file__, self.notes[Path(source).suffix]], str(made)):
            return str(made)
        if source.endswith(".cu"):
            made.parent.mkdir(parents=True, exist_ok=True)
            command = [str(NVCC), *NVCC_FLAGS, "-Icsrc", "-c", source, "-o", str(made)]
            print(" ".join(command), flush=True)
            if subprocess.run(command).returncode != 0:
                raise CompileError(f"nvcc failed on {source}")
        else:
            flags = FLAGS + EXTRA_FLAGS + ISA_FLAGS.get(source, []) + os.environ.get("CXXFLAGS", "").split()
            self.compiler.compile([source], output_dir=self.build_temp, include_dirs=["csrc"], extra_postargs=flags)
        return str(made)


def slowest_first(source: str) -> tuple[bool, bool, str]:
    """So that no core waits at the end for a long one."""
    return not source.endswith(".cu"), source not in ISA_FLAGS, source


def static_runtime() -> str:
    """CUDA's runtime as an archive: the module then imports where there is no CUDA, and says what is missing when it is used."""
    shown = subprocess.run([str(NVCC), "-dryrun", "-c", "any.cu"], capture_output=True, text=True).stderr
    libraries = next((line for line in shown.splitlines() if line.startswith("#$ LIBRARIES=")), "")
    folders = re.findall(r'"-L([^"]+)"', libraries)
    found = [path for path in (Path(folder, "libcudart_static.a") for folder in folders) if path.is_file()]
    if not found:
        raise LinkError(f"{NVCC} has no libcudart_static.a (in {', '.join(folders) or 'no folder that it names'})")
    return str(found[0])


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
        # Apart, or the next build without sanitizers would take what it finds there for its own.
        options={"build": {"build_base": "build/sanitized"}} if SANITIZE else {},
        zip_safe=False,
    )


if __name__ == "__main__":
    main()
