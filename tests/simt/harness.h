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

/// Compares what a kernel left with `expected(i)`.
template <typename T, typename Expected>
bool is_right(const std::vector<T>& out, const Expected& expected) {
    for (std::size_t i = 0; i < out.size(); ++i) {
        const T want = static_cast<T>(expected(i));
        if (out[i] == want) continue;
        std::printf("output %zu is %g, not %g\n", i, static_cast<double>(out[i]), static_cast<double>(want));
        return false;
    }
    return true;
}

/// Runs one block of `threads` on fresh outputs, and compares them with `expected(i)`.
template <auto kKernel, typename T, typename Expected, typename... Arguments>
Outcome run_and_compare(dim3 grid, dim3 block, std::size_t shared_bytes, int outputs, const Expected& expected, Arguments... arguments) {
    std::vector<T> out(static_cast<std::size_t>(outputs), static_cast<T>(-77));
    Outcome outcome;
    outcome.status = launch<kKernel>(grid, block, shared_bytes, nullptr, out.data(), arguments...);
    if (outcome.status == SL_OK) outcome.right = is_right(out, [&](std::size_t i) { return expected(static_cast<int>(i)); });
    return outcome;
}

extern const std::vector<Case> collective_cases, memory_cases, fault_cases, planted_cases;
extern const std::vector<Case> dense_cases, interaction_cases, maxima_cases, sort_cases;

}  // namespace sparselift::cuda
