// Small kernels that are run under the emulator, a case a name. main.cpp is the program; test_simt.py runs it.
#pragma once

#include <cstdint>
#include <cstdio>
#include <vector>

#include "cuda/launch.cuh"

namespace sparselift::cuda {

/// Launches kernels and compares what they leave: SL_OK and a difference is "wrong", another status is a fault that was reported.
struct Outcome {
    sl_status status = SL_OK;
    bool right = true;
};

struct Case {
    const char* name;
    Outcome (*run)();
};

/// Runs one block of `threads` on fresh outputs, and compares them with `expected(i)`.
template <auto kKernel, typename T, typename Expected, typename... Arguments>
Outcome run_and_compare(dim3 grid, dim3 block, std::size_t shared_bytes, int outputs, const Expected& expected, Arguments... arguments) {
    std::vector<T> out(static_cast<std::size_t>(outputs), static_cast<T>(-77));
    Outcome outcome;
    outcome.status = launch<kKernel>(grid, block, shared_bytes, nullptr, out.data(), arguments...);
    for (int i = 0; i < outputs && outcome.status == SL_OK; ++i) {
        const T want = static_cast<T>(expected(i));
        if (out[static_cast<std::size_t>(i)] == want) continue;
        std::printf("output %d is %g, not %g\n", i, static_cast<double>(out[static_cast<std::size_t>(i)]), static_cast<double>(want));
        outcome.right = false;
        break;
    }
    return outcome;
}

extern const std::vector<Case> collective_cases, memory_cases, fault_cases, planted_cases;

}  // namespace sparselift::cuda
