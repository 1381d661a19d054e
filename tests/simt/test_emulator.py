"""The emulator runs right kernels right under every schedule, and reports each fault with the kernel, the place and the reason."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from .emulator import ROOT, SANITIZER_FLAGS, SCHEDULES, Mutant, Program, build

LAUNCH = r"grid \d+ x \d+ x \d+, block \d+ x \d+ x \d+, \d+ bytes of shared memory"
PLACE = r"; tests/simt/\w+\.cu:\d+, block \(\d+,\d+,\d+\), thread \(\d+,\d+,\d+\)$"
FAULTS = {
    "exit before barrier": r"LaunchFailure in .*exit_before_barrier_kernel .*63 of 64 threads wait, but thread 7 has exited",
    "two barriers": r"divergent __syncthreads: thread \d+ waits at __syncthreads \(tests/simt/faults.cu:\d+\)",
    "barrier and warp": r"divergent __syncwarp: lane \d+ waits at __syncwarp .* but lane \d+ waits at __syncthreads",
    "absent lanes": r"__shfl_sync: lanes 0xffffffff include lanes that the block does not have, 0xffffff00",
    "exited lane": r"lane 3 has exited, but lane \d+ waits at __shfl_xor_sync|include lanes that have exited, 0x00000008",
    "masks disagree": r"divergent __ballot_sync with lanes 0x[7f]fffffff: lane \d+ waits at __ballot_sync with lanes 0x[7f]fffffff",
    "mask without me": r"__ballot_sync: lanes 0x0000ffff leave out the calling lane, \d+|divergent __ballot_sync",
    "collectives disagree": r"divergent __a\w\w_sync with lanes 0xffffffff: lane \d+ waits at __a\w\w_sync",
    "lines disagree": r"divergent __shfl_sync with lanes 0xffffffff: lane \d+ waits at __shfl_sync",
    "reads lane outside": r"__shfl_down_sync: lane 7 reads lane 8, which lanes 0x000000ff leave out",
    "bad width": r"width 12 is no power of two up to 32",
    "unwritten shared": r"read of shared memory that was never written, byte \d+",
    "stale shared": r"read of shared memory that was never written, byte \d+",
    "past shared": r"IllegalAddress in .*element 31 of a shared array of 31",
    "past dynamic shared": r"IllegalAddress in .*bytes 64 to 132 of dynamic shared memory, of which the launch has 128",
    "unaligned shared": r"MisalignedAddress in .*shared access of 16 bytes at byte 8, no multiple of 16",
    "too much shared": r"array 'values' of 49160 bytes: static shared memory has at most 49152",
    "neighbour without __syncwarp": r"race on shared memory: thread \d+ reads byte \d+, which thread \d+ writes at |never written",
    "another group's value": r"race on shared memory: thread \d+ reads|never written",
    "two writers": r"race on shared memory: thread (5|40) writes byte 0, which thread (5|40) writes",
    "reuse without barrier": r"race on shared memory: thread \d+ (reads|writes) byte \d+, which thread \d+ (reads|writes) at",
    "writers of one byte": r"race on shared memory: thread \d+ writes byte \d+, which thread \d+ writes",
    "count without atomics": r"race on shared memory: thread \d+ (reads|writes) byte 0",
    "dynamic shared race": r"race on shared memory: thread \d+ writes byte (28[89]|29\d|3[01]\d)",
    "unaligned load": r"MisalignedAddress in .*access of 16 bytes at address 0x[0-9a-f]+, no multiple of 16",
    "unaligned store": r"MisalignedAddress in .*access of 16 bytes",
    "planted deleted barrier": r"bag_sum_kernel<.*deleted_barrier> .*(race on shared memory|never written)",
    "planted unaligned vector": r"MisalignedAddress in .*unaligned_vector> .*access of 16 bytes",
    "planted shared race": r"race on shared memory: thread \d+ writes byte \d+, which thread \d+ writes",
}
REFUSED = {
    "block too large": r"cudaErrorInvalidConfiguration in .*bytes_kernel<0> \(grid 1 x 1 x 1, block 1025 x 1 x 1",
    "empty grid": r"cudaErrorInvalidConfiguration in .*\(grid 0 x 1 x 1",
    "shared memory past the device's": r"cudaErrorInvalidValue in .*167936 bytes of shared memory",
}
WRONG = {"planted off-by-one row", "planted missing tail"}


RACE = "race on shared memory"
TRADE = "trade(select(is_second, low, high));\n            float* to"
MUTANTS = {
    "keys ranked before a lane has counted": (
        Mutant("sort.cuh", "        __syncwarp();\n", "", "kernel_sort.cu", "sort pass"), RACE),
    "a tile looks back too far": (
        Mutant("sort.cuh", "if (state & kRunningCount) break;", "", "kernel_sort.cu", "sort pass"), "output"),
    "digits added up before all are counted": (
        Mutant("digits.cuh", "flush() const {\n        __syncthreads();", "flush() const {", "kernel_sort.cu", "sort pass"), RACE),
    "products of a slice that is not there yet": (
        Mutant("interaction.cuh", "            __syncthreads();\n            if (first == 0)", "            if (first == 0)",
               "kernel_interaction.cu", "interaction forward"), f"{RACE}|never written"),
    "a gradient without its mirror image": (
        Mutant("interaction.cuh", " + product_grad(args, grad, column, row)", "", "kernel_interaction.cu", "interaction backward"),
        "output"),
    "pieces written over before they are added": (
        Mutant("dense.cuh", "                    });\n                __syncthreads();", "                    });",
               "kernel_dense.cu", "dense rows"), RACE),
    "a piece that begins with NaN hides the rest": (
        Mutant("forward.cuh", "column, piece.begin != piece.bag_bounds.begin);", "column, false);", "kernel_maxima.cu", "long maxima"),
        "output"),
    "lanes of a pair keep what they should give": (
        Mutant("vectors.cuh", TRADE, TRADE.replace("low, high", "high, low"), "kernel_maxima.cu", "long maxima"), "output"),
}


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    return build(tmp_path_factory.mktemp("simt"))


@pytest.fixture(scope="session")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Program:
    return build(tmp_path_factory.mktemp("simt-sanitized"), *SANITIZER_FLAGS)


def right_cases(program: Program) -> list[str]:
    faulty = FAULTS.keys() | REFUSED.keys() | WRONG
    cases = program.cases()
    assert faulty <= set(cases)
    return [case for case in cases if case not in faulty]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_right_kernels_are_right(program: Program, schedule: str) -> None:
    results = {case: program.run(case, schedule) for case in right_cases(program)}
    assert len(results) > 20
    assert {case: result for case, result in results.items() if result.verdict != "right"} == {}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("case", FAULTS)
def test_a_fault_is_reported(program: Program, case: str, schedule: str) -> None:
    result = program.run(case, schedule)
    assert result.verdict == "reported"
    assert re.search(FAULTS[case], result.text)
    assert re.search(LAUNCH, result.text)
    assert re.search(PLACE, result.text, re.MULTILINE)


@pytest.mark.parametrize("case", REFUSED)
def test_a_launch_that_cuda_refuses_is_refused(program: Program, case: str) -> None:
    result = program.run(case, "forward")
    assert result.verdict == "reported"
    assert re.search(REFUSED[case], result.text)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("case", sorted(WRONG))
def test_what_no_rule_forbids_shows_in_the_result(program: Program, case: str, schedule: str) -> None:
    assert program.run(case, schedule).verdict == "wrong"


@pytest.mark.slow
@pytest.mark.parametrize("slip", MUTANTS)
def test_a_slip_in_a_kernel_is_caught(program: Program, tmp_path: Path, slip: str) -> None:
    """In the kernels that ship, whose right versions are among the right cases."""
    mutant, text = MUTANTS[slip]
    result = mutant.build(program, tmp_path).run(mutant.case, "reverse")
    assert result.verdict in ("wrong", "reported") and re.search(text, result.text)


def test_an_unknown_schedule_is_refused(program: Program) -> None:
    result = program.run("shuffles", "sideways")
    assert result.verdict == "reported"
    assert "SPARSELIFT_SIMT_SCHEDULE must be forward, reverse or random:SEED; got 'sideways'" in result.text
    assert program.run("schedules", "sideways").verdict == "right"             # a call overrides it


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES[:3])
def test_right_kernels_and_faults_are_clean_under_sanitizers(sanitized: Program, schedule: str) -> None:
    """Fibers, abandoned ones too, must not look like wild addresses."""
    expected = dict.fromkeys(right_cases(sanitized), "right") | dict.fromkeys(FAULTS, "reported")
    results = {case: sanitized.run(case, schedule) for case in expected}
    assert {case: result for case, result in results.items() if result.verdict != expected[case]} == {}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES[:3])
def test_a_row_past_the_table_is_caught_by_the_sanitizer(sanitized: Program, schedule: str) -> None:
    result = sanitized.run("planted off-by-one row", schedule)
    assert result.verdict == "died"
    assert "heap-buffer-overflow" in result.text
    assert "bag_sum_kernel" in result.text


@pytest.mark.slow
def test_the_portable_fibers_do_the_same(program: Program, tmp_path: Path) -> None:
    """ucontext, for processors that the assembly is not written for."""
    portable = build(tmp_path, "-DSPARSELIFT_SIMT_UCONTEXT")
    for case in program.cases():
        expected, got = (built.run(case, "random:5") for built in (program, portable))
        assert (got.verdict, re.sub("0x[0-9a-f]+, no", "", got.text)) == (expected.verdict, re.sub("0x[0-9a-f]+, no", "", expected.text))


@pytest.mark.parametrize("line", ["__activemask();", "float x = 0; atomicAdd(&x, 1.0f);", "long x = 0; atomicAdd(&x, 1L);",
                                  "double d[2]; __shfl_sync(~0u, *reinterpret_cast<double2*>(d), 0);"])
def test_what_cuda_or_the_project_does_not_have_does_not_compile(line: str, tmp_path: Path) -> None:
    source = tmp_path / "kernel.cpp"
    source.write_text(f'#include "cuda/platform.h"\n__global__ void kernel() {{ {line} }}\n')
    command = ["g++", "-std=c++17", "-DSPARSELIFT_SIMT", "-I", ROOT / "csrc", "-fsyntax-only", source]
    assert subprocess.run(command, capture_output=True).returncode != 0
    source.write_text(source.read_text().replace(line, "__syncthreads();"))
    subprocess.run(command, check=True)
