#include "schedule.h"

#include <atomic>
#include <cstdlib>
#include <cstring>

namespace sparselift::simt {
namespace {

bool parse(const char* text, Schedule& schedule) {
    if (std::strcmp(text, "forward") == 0) {
        schedule = {Order::forward, 0};
        return true;
    }
    if (std::strcmp(text, "reverse") == 0) {
        schedule = {Order::reverse, 0};
        return true;
    }
    constexpr char kRandom[] = "random:";
    if (std::strncmp(text, kRandom, sizeof kRandom - 1) != 0) return false;
    const char* digits = text + sizeof kRandom - 1;
    char* end = nullptr;
    const unsigned long seed = std::strtoul(digits, &end, 10);
    if (*digits < '0' || *digits > '9' || *end || seed > UINT32_MAX) return false;
    schedule = {Order::random, static_cast<std::uint32_t>(seed)};
    return true;
}

std::uint64_t pack(Schedule schedule) { return (static_cast<std::uint64_t>(schedule.order) << 32) | schedule.seed; }

std::uint64_t initial() {
    Schedule schedule;
    const char* text = std::getenv("SPARSELIFT_SIMT_SCHEDULE");
    if (text && !parse(text, schedule)) schedule.order = Order::unknown;
    return pack(schedule);
}

std::atomic<std::uint64_t>& chosen() {
    static std::atomic<std::uint64_t> value{initial()};
    return value;
}

/// A bijection of 64-bit numbers that looks random (the finalizer of splitmix64, Steele et al. 2014).
std::uint64_t scramble(std::uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
}

}  // namespace

bool set_schedule(const char* text) {
    Schedule schedule;
    if (!parse(text, schedule)) return false;
    chosen().store(pack(schedule));
    return true;
}

Schedule current_schedule() {
    const std::uint64_t value = chosen().load();
    return {static_cast<Order>(value >> 32), static_cast<std::uint32_t>(value)};
}

void Scheduler::start(Schedule schedule) {
    schedule_ = schedule;
    state_ = scramble(schedule.seed + std::uint64_t{1});
    clear();
}

void Scheduler::clear() { std::memset(ready_, 0, sizeof ready_); }

int Scheduler::pick() {
    switch (schedule_.order) {
        case Order::forward: return first();
        case Order::reverse: return last();
        default: return any();
    }
}

int Scheduler::first() const {
    for (int word = 0; word < kWords; ++word)
        if (ready_[word]) return word * 64 + __builtin_ctzll(ready_[word]);
    return -1;
}

int Scheduler::last() const {
    for (int word = kWords; word-- > 0;)
        if (ready_[word]) return word * 64 + 63 - __builtin_clzll(ready_[word]);
    return -1;
}

int Scheduler::any() {
    int count = 0;
    for (std::uint64_t word : ready_) count += __builtin_popcountll(word);
    if (count == 0) return -1;
    auto skip = static_cast<int>(draw() % static_cast<std::uint64_t>(count));
    for (int word = 0;; ++word) {
        const int here = __builtin_popcountll(ready_[word]);
        if (skip >= here) {
            skip -= here;
            continue;
        }
        std::uint64_t bits = ready_[word];
        while (skip-- > 0) bits &= bits - 1;
        return word * 64 + __builtin_ctzll(bits);
    }
}

std::uint64_t Scheduler::draw() { return scramble(state_ += 0x9e3779b97f4a7c15); }

std::uint64_t Scheduler::block_at(std::uint64_t position, std::uint64_t count) const {
    if (schedule_.order == Order::forward || count < 2) return position;
    if (schedule_.order == Order::reverse) return count - 1 - position;
    // A permutation of the next power of two, walked until it falls below `count`: no list of blocks is needed.
    const int bits = 64 - __builtin_clzll(count - 1);
    const std::uint64_t mask = (std::uint64_t{2} << (bits - 1)) - 1;
    const std::uint64_t salt = scramble(schedule_.seed ^ 0x5bd1e995);
    std::uint64_t block = position;
    do {
        for (int round = 0; round < 3; ++round) {
            block = (block * (salt | 1) + (salt >> (8 * round + 8))) & mask;
            block ^= block >> (bits / 2 + 1);
        }
    } while (block >= count);
    return block;
}

}  // namespace sparselift::simt
