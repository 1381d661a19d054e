// How well warps use the sectors of global memory that they touch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "shared_memory.h"

namespace sparselift::simt {

/// Bytes that threads asked for, each once an instruction of a warp, and 32-byte sectors that these lie in.
struct Efficiency {
    std::int64_t bytes = 0, sectors = 0;
};

/// Accesses through load_vector, store_vector and their like in csrc/cuda. The n-th time that each lane of a warp comes to a line is one
/// instruction of the warp.
class Traffic {
  public:
    void start_block();
    void note(int thread, bool is_store, const void* address, std::size_t bytes, Site site);

    /// Adds what the block did to `loads` and `stores`.
    void finish_block(Efficiency& loads, Efficiency& stores);

  private:
    struct Entry {
        int warp;
        Site site;
        int turn;                      // how often its thread came to the line before
        bool is_store;
        std::uintptr_t begin, end;
    };
    struct Visits {
        Site site;
        int count;
    };

    std::vector<Entry> entries_;
    std::vector<std::vector<Visits>> visits_;    // a thread
};

}  // namespace sparselift::simt
