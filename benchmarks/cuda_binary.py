"""What the compiler made of each CUDA kernel, read from a built module with NVIDIA's own tools."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deadline import run_within

ROOT = Path(__file__).parents[1]
NAMESPACE = "sparselift::"                # kernels of ours, not the runtime's
MODULE = "sparselift.kernels._cuda"
DEFAULT_BLOCK_THREADS = 256

# Compiles some modules alone: setup.py has no name for that.
BUILD = """
import sys
import setuptools
from distutils.core import run_setup
command = run_setup("setup.py", stop_after="init").get_command_obj("build_ext")
command.build_lib, command.build_temp = sys.argv[1], sys.argv[1] + "/temp"
command.ensure_finalized()
command.extensions = [each for each in command.extensions if each.name in sys.argv[2:]]
command.run()
"""


class ToolMissing(Exception):
    """A tool of the CUDA toolkit that is needed here is not installed."""


@dataclass(frozen=True, slots=True)
class Toolkit:
    """A folder with CUDA's compiler, its dumpers and its headers."""

    home: Path

    @classmethod
    def find(cls) -> Toolkit:
        """CUDA_HOME where that is set, else NVIDIA's wheels in the running Python's environment, else what is on PATH."""
        wheels = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/cu*"), reverse=True)
        on_path = [Path(path).parents[1] for path in [shutil.which("cuobjdump")] if path]
        homes = [Path(os.environ["CUDA_HOME"])] if os.environ.get("CUDA_HOME") else [*wheels, *on_path]
        needed = ("bin/nvcc", "bin/cuobjdump", "bin/nvdisasm", "include/cuda_occupancy.h")
        for home in homes:
            if all((home / name).is_file() for name in needed):
                return cls(home)
        looked = ", ".join(map(str, homes)) or "PATH and the wheels of this Python"
        raise ToolMissing(f"no folder with all of {', '.join(needed)} (looked in {looked})")

    def run(self, tool: str, *arguments: str | Path) -> str:
        return subprocess.run([self.home / "bin" / tool, *arguments], check=True, capture_output=True, text=True).stdout

    def release(self) -> str:
        """The compiler's version, "13.5.37"."""
        return re.findall(r"V(\d+\.\d+\.\d+)", self.run("nvcc", "--version"))[0]

    def build(self, folder: Path) -> Path:
        """The CUDA module for every architecture of the budget, built with this toolkit and setup.py's flags."""
        [module] = build_modules(folder, MODULE, CUDA_HOME=str(self.home), SPARSELIFT_CUDA_ARCHITECTURES="")
        return module


def build_modules(folder: Path, *names: str, timeout_s: float = math.inf, **variables: str) -> list[Path]:
    """Modules as setup.py makes them, given variables beside the environment's. Raises CalledProcessError or OutOfTime."""
    command, environment = [sys.executable, "-c", BUILD, folder, *names], {**os.environ, "SPARSELIFT_CUDA": "1", **variables}
    status = run_within(timeout_s, command, cwd=ROOT, env=environment, stdout=sys.stderr)
    if status != 0:
        raise subprocess.CalledProcessError(status, command)
    return [next(folder.glob(f"{name.replace('.', '/')}.*.so")) for name in names]


@dataclass(frozen=True, slots=True, order=True)
class Kernel:
    """One kernel of one architecture.

    `local_accesses` counts loads and stores of local memory, where spilled registers are; `block_threads` is the largest block that the
    kernel is compiled for, at most 256, the default of the launches.
    """

    name: str                             # with template arguments
    architecture: int                     # 80: sm_80
    registers: int                        # of a thread
    stack_bytes: int                      # of a thread
    local_accesses: int
    shared_bytes: int                     # static, of a block
    loads_128: int                        # instructions that load at least 128 bits of global memory
    stores_128: int
    block_threads: int
    occupancy_percent: int                # of the multiprocessor's warps, with blocks of block_threads


def read_kernels(toolkit: Toolkit, module: Path, scratch: Path) -> list[Kernel]:
    """Every kernel of ours in a module or object file, by name and architecture."""
    usage, threads, instructions = resource_usage(toolkit, module), max_threads(toolkit, module), opcodes(toolkit, module)
    symbols = sorted({symbol for _, symbol in usage})
    names = dict(zip(symbols, demangle(symbols)))
    ours = {key: used for key, used in usage.items() if NAMESPACE in names[key[1]]}
    blocks = {key: min(threads.get(key, DEFAULT_BLOCK_THREADS), DEFAULT_BLOCK_THREADS) for key in ours}
    shapes = [(key[0], used["REG"], used["SHARED"], blocks[key]) for key, used in ours.items()]
    kernels = []
    for (key, used), percent in zip(ours.items(), occupancies(toolkit, shapes, scratch)):
        counts = instructions.get(key, Counter())
        wide = {kind: sum(count for opcode, count in counts.items() if is_wide(opcode, kind)) for kind in ("LDG", "STG")}
        spills = sum(count for opcode, count in counts.items() if opcode.split(".")[0] in ("LDL", "STL"))
        kernels.append(Kernel(short(names[key[1]]), key[0], used["REG"], used["STACK"], spills, used["SHARED"], wide["LDG"], wide["STG"],
                              blocks[key], percent))
    return sorted(kernels)


Key = tuple[int, str]                     # architecture, symbol


def resource_usage(toolkit: Toolkit, module: Path) -> dict[Key, dict[str, int]]:
    """Registers, stack and shared memory, under cuobjdump's names."""
    usage, architecture, symbol = {}, 0, ""
    for line in toolkit.run("cuobjdump", "--dump-resource-usage", module).splitlines():
        if found := re.match(r"arch = sm_(\d+)", line):
            architecture = int(found[1])
        elif found := re.match(r"\s*Function (\S+):", line):
            symbol = found[1]
        elif "REG:" in line:
            usage[architecture, symbol] = {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", line)}
    return usage


def max_threads(toolkit: Toolkit, module: Path) -> dict[Key, int]:
    """What __launch_bounds__ says, for kernels that have it."""
    bounds, architecture, symbol, wanted = {}, 0, "", False
    for line in toolkit.run("cuobjdump", "--dump-elf", module).splitlines():
        if found := re.match(r"arch = sm_(\d+)", line):
            architecture = int(found[1])
        elif line.startswith(".nv.info."):
            symbol = line.split()[0].removeprefix(".nv.info.")
        elif "EIATTR_" in line:
            wanted = line.endswith("EIATTR_MAX_THREADS")
        elif wanted and (found := re.match(r"\s*Value:\s+0x(\w+) 0x(\w+) 0x(\w+)", line)):
            x, y, z = (int(digits, 16) for digits in found.groups())
            bounds[architecture, symbol] = x * y * z
    return bounds


def opcodes(toolkit: Toolkit, module: Path) -> dict[Key, Counter[str]]:
    """How often each instruction stands in a kernel."""
    counts: dict[Key, Counter[str]] = {}
    architecture, current = 0, Counter[str]()
    for line in toolkit.run("cuobjdump", "--dump-sass", module).splitlines():
        if found := re.match(r"\s*code for sm_(\d+)", line):
            architecture = int(found[1])
        elif found := re.match(r"\s*Function : (\S+)", line):
            current = counts.setdefault((architecture, found[1]), Counter())
        elif found := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", line):
            current[found[1]] += 1
    return counts


def is_wide(opcode: str, kind: str) -> bool:
    parts = opcode.split(".")
    return parts[0] == kind and ("128" in parts or "256" in parts)


def demangle(symbols: list[str]) -> list[str]:
    return subprocess.run(["c++filt"], input="\n".join(symbols), check=True, capture_output=True, text=True).stdout.splitlines()


def short(name: str) -> str:
    """Without namespaces, the return type and the parameters."""
    name = name.replace("sparselift::cuda::", "").replace("(anonymous namespace)::", "").removeprefix("void ")
    depth = 0
    for at, character in enumerate(name):
        depth += (character == "<") - (character == ">")
        if character == "(" and depth == 0:
            return name[:at]
    return name


def occupancies(toolkit: Toolkit, shapes: list[tuple[int, int, int, int]], scratch: Path) -> Iterator[int]:
    """Percent for each (architecture, registers, shared bytes, threads), by cuda_occupancy.h."""
    source, program = Path(__file__).with_name("occupancy.cpp"), scratch / "occupancy"
    subprocess.run(["g++", "-std=c++17", "-O1", "-isystem", toolkit.home / "include", source, "-o", program], check=True)
    lines = "".join(f"{architecture // 10} {registers} {shared} {threads}\n" for architecture, registers, shared, threads in shapes)
    yield from map(int, subprocess.run([program], input=lines, check=True, capture_output=True, text=True).stdout.split())
