// What the drivers of instruction counts share.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "api/sparselift_cpu.h"

inline void check(sl_status status) {
    if (status == SL_OK) return;
    std::fprintf(stderr, "instructions: %s\n", sl_error_text());
    std::exit(1);
}

/// The same numbers on every machine.
class Random {
  public:
    int64_t below(int64_t bound) {
        state_ = state_ * 6364136223846793005u + 1442695040888963407u;
        return static_cast<int64_t>((state_ >> 33) % static_cast<uint64_t>(bound));
    }

  private:
    uint64_t state_ = 0;
};

struct Free {
    void operator()(float* data) const { std::free(data); }
};
using Floats = std::unique_ptr<float[], Free>;

/// On a cache line of its own, wherever malloc would have put it.
inline Floats floats(int64_t count) {
    auto* data = static_cast<float*>(std::aligned_alloc(64, (static_cast<size_t>(count) * sizeof(float) + 63) / 64 * 64));
    if (!data) std::abort();
    for (int64_t i = 0; i < count; ++i) data[i] = static_cast<float>(i % 7 + 1);
    return Floats(data);
}

/// A call that is counted, and how many lookups or rows it is for.
struct Counted {
    std::function<void()> call;
    int64_t units;
};

/// A kernel that needs no program.
struct FreeCase {
    std::string name;
    std::function<Counted(int64_t dim, int32_t isa)> make;
};

/// Of csrc/api/sparselift_exchange.h and sparselift_interaction.h.
std::vector<FreeCase> free_cases();
