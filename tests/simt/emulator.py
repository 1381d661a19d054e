"""Builds the programs of this folder with g++ and the emulator of csrc/simt in place of CUDA."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SANITIZER_FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer")
SCHEDULES = ("forward", "reverse", "random:0", "random:1", "random:20")


@dataclass(frozen=True, slots=True)
class Result:
    """How a case ended: "right", "reported" (a fault, with its text), "wrong", or "died" (a sanitizer's report)."""

    verdict: str
    text: str


@dataclass(frozen=True, slots=True)
class Program:
    path: Path

    def cases(self) -> list[str]:
        return subprocess.run([self.path], check=True, capture_output=True, text=True).stdout.splitlines()

    def run(self, case: str, schedule: str) -> Result:
        environment = {**os.environ, "SPARSELIFT_SIMT_SCHEDULE": schedule}
        done = subprocess.run([self.path, case], env=environment, capture_output=True, text=True, timeout=60)
        text = done.stdout + done.stderr
        if "Sanitizer" in done.stderr or "runtime error" in done.stderr:       # their exit status is 1, too
            return Result("died", text)
        return Result({0: "right", 1: "reported", 2: "wrong"}.get(done.returncode, "died"), text)


@dataclass(frozen=True, slots=True)
class Mutant:
    """A slip of the pen in a kernel of csrc/cuda, and the case here that runs the kernel."""

    header: str                    # in csrc/cuda
    line: str
    wrong: str
    source: str                    # beside this file
    case: str

    def build(self, right: Program, folder: Path) -> Program:
        """`right`, but for the one file, which is compiled with the wrong header."""
        shutil.copytree(ROOT / "csrc", folder / "csrc")
        header = folder / "csrc/cuda" / self.header
        text = header.read_text()
        assert text.count(self.line) == 1, f"{self.header} has {text.count(self.line)} times {self.line!r}"
        header.write_text(text.replace(self.line, self.wrong))
        options = [option.replace("-Icsrc", f"-I{folder}/csrc") for option in OPTIONS if option not in ("-Werror", "-g", "-O1")]
        made = folder / f"{self.source}.o"
        subprocess.run(["g++", "-x", "c++", *options, "-c", ROOT / "tests/simt" / self.source, "-o", made], cwd=ROOT, check=True)
        others = [path for path in right.path.parent.glob("*.o") if path.name != made.name]
        subprocess.run(["g++", *others, made, "-o", folder / "cases"], check=True)
        return Program(folder / "cases")


OPTIONS = ["-std=c++17", "-O1", "-g", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-DSPARSELIFT_SIMT",
           "-Icsrc"]


def build(folder: Path, *flags: str) -> Program:
    """The program of cases, from the emulator, what launches here, and the files beside this one."""
    sources = [*sorted(ROOT.glob("csrc/simt/*.cpp")), *(ROOT / "csrc/cuda" / f"{name}.cu" for name in ("launch", "program")),
               ROOT / "csrc/api/status.cpp",
               *sorted(ROOT.glob("tests/simt/*.cu")), ROOT / "tests/simt/main.cpp"]
    options = [*OPTIONS, *flags]

    def compile_one(source: Path) -> Path:
        made = folder / f"{source.name}.o"
        subprocess.run(["g++", "-x", "c++", *options, "-c", source.relative_to(ROOT), "-o", made], cwd=ROOT, check=True)
        return made

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, sources))
    subprocess.run(["g++", *options, *objects, "-o", folder / "cases"], check=True)
    return Program(folder / "cases")
