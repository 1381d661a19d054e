// In which order the threads of a block, and the blocks of a grid, run.
#pragma once

#include <cstdint>

namespace sparselift::simt {

constexpr int kMaxThreads = 1024;    // of a block, in CUDA as here

enum class Order : std::uint8_t { forward, reverse, random, unknown };

struct Schedule {
    Order order = Order::forward;
    std::uint32_t seed = 0;
};

/// "forward", "reverse" or "random:SEED"; false for any other text, which changes nothing. Concerns launches from now on, of every
/// OS thread. Before the first call the environment variable SPARSELIFT_SIMT_SCHEDULE decides, else the order is forward; what that
/// variable says and nobody understands is Order::unknown, under which nothing runs.
bool set_schedule(const char* text);
Schedule current_schedule();

/// The threads of a block that could go on, and which of them does next. Equal seeds give equal choices.
class Scheduler {
  public:
    void start(Schedule schedule);
    bool is_random() const { return schedule_.order == Order::random; }
    void clear();
    void insert(int thread) { ready_[thread / 64] |= std::uint64_t{1} << (thread % 64); }
    void erase(int thread) { ready_[thread / 64] &= ~(std::uint64_t{1} << (thread % 64)); }

    /// A thread that is ready, or -1.
    int pick();

    /// The number of the block that runs as the `position`-th of `count`.
    std::uint64_t block_at(std::uint64_t position, std::uint64_t count) const;

  private:
    int first() const;
    int last() const;
    int any();
    std::uint64_t draw();

    static constexpr int kWords = kMaxThreads / 64;
    Schedule schedule_;
    std::uint64_t state_ = 0;
    std::uint64_t ready_[kWords] = {};
};

}  // namespace sparselift::simt
