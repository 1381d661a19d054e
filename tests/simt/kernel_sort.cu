// The sort, and its kernels by themselves: a pass of several tiles, counted digits, and what a tile that looks back may meet.
#include <algorithm>
#include <numeric>

#include "cuda/sort.cu"      // the launches, too: kernels are defined once in a program
#include "harness.h"

namespace sparselift::cuda {
namespace {

constexpr int kPairs = 2 * kSortTile + 37, kShift = 4;

uint64_t key_at(std::size_t i) { return i * 2654435761u % 99991; }

/// Keys' second digits are counted on the device, and the pairs sorted by them.
Outcome sorts() {
    constexpr int kTiles = 3;
    std::vector<uint64_t> keys(kPairs), sorted(kPairs);
    std::vector<uint32_t> places(kPairs), sorted_places(kPairs), counts(2 * kDigits), ticket(1);
    std::vector<unsigned long long> said(kTiles * kDigits, 7), next(kTiles * kDigits, 7);
    for (std::size_t i = 0; i < kPairs; ++i) keys[i] = key_at(i) << kDigitBits, places[i] = static_cast<uint32_t>(i);
    Outcome outcome;
    const SortStart start{counts.data(), said.data(), kTiles * kDigits, 2};
    outcome.status = launch<&count_digits_kernel>(3, 64, 0, nullptr, keys.data(), int64_t{kPairs}, start);
    if (outcome.status != SL_OK) return outcome;
    const RadixPass pass{keys.data(), places.data(), sorted.data(), sorted_places.data(), counts.data() + kDigits, said.data(), next.data(),
                         ticket.data(), kPairs, kDigitBits};
    outcome.status = launch<&radix_pass_kernel>(kTiles, kSortThreads, 0, nullptr, pass);
    if (outcome.status != SL_OK) return outcome;
    std::vector<uint32_t> order = places;
    std::stable_sort(order.begin(), order.end(), [](uint32_t a, uint32_t b) { return key_at(a) % kDigits < key_at(b) % kDigits; });
    outcome.right = is_right(sorted_places, [&](std::size_t i) { return order[i]; }) &&
                    is_right(sorted, [&](std::size_t i) { return key_at(order[i]) << kDigitBits; }) &&
                    is_right(next, [](std::size_t) { return 0; });
    return outcome;
}

bool sorts_all(int count, int key_bits) {
    const auto n = static_cast<std::size_t>(count);
    std::vector<uint64_t> keys(n), sorted(n);
    std::vector<uint32_t> values(n), order(n);
    for (std::size_t i = 0; i < n; ++i) keys[i] = i * 0x9e3779b97f4a7c15 & ~(i % 3 ? 0 : ~uint64_t{0} >> 9);       // some are equal
    std::iota(values.begin(), values.end(), 0);
    std::vector<char> workspace(static_cast<std::size_t>(sort_workspace_bytes(count)) + 256);
    char* aligned = workspace.data() + (256 - reinterpret_cast<uintptr_t>(workspace.data()) % 256) % 256;
    const SortPairs pairs{keys.data(), sorted.data(), values.data(), order.data(), count, key_bits};
    if (count && sort(pairs, aligned, sort_workspace_bytes(count) - 1, nullptr) != SL_BAD_ARGUMENT) return false;
    if (sort(pairs, aligned, sort_workspace_bytes(count), nullptr) != SL_OK) return false;
    const uint64_t mask = ~uint64_t{0} >> (64 - (key_bits + kDigitBits - 1) / kDigitBits * kDigitBits);
    std::stable_sort(values.begin(), values.end(), [&](auto a, auto b) { return (keys[a] & mask) < (keys[b] & mask); });
    return is_right(order, [&](std::size_t i) { return values[i]; }) && is_right(sorted, [&](std::size_t i) { return keys[order[i]]; });
}

Outcome sorts_any() {
    Outcome outcome;
    for (int count : {0, 1, 33, 3 * kSortTile + 5})
        for (int bits : {1, 8, 31, 40, 64}) outcome.right = outcome.right && sorts_all(count, bits);
    return outcome;
}

__global__ void look_back_kernel(uint32_t* before, const unsigned long long* said) {
    before[threadIdx.x] = count_before(said, threadIdx.x, 3);
}

/// Of seven tiles the third and the first know their running counts; the others, only their own.
Outcome looks_back() {
    constexpr int kTiles = 7;
    const std::vector<unsigned long long> states{kRunningCount | 5, kTileCount | 1,     kRunningCount | 9, kTileCount | 0,
                                                 kTileCount | 4,    kTileCount | 1000u, kTileCount | 2};
    std::vector<unsigned long long> said(kTiles * kDigits);
    for (std::size_t t = 0; t < kTiles; ++t) said[t * kDigits + 3] = states[t];
    const uint32_t want[] = {0, 5, 6, 9, 9, 13, 1013};
    return run_and_compare<look_back_kernel, uint32_t>(1, kTiles, 0, kTiles, [&](int i) { return want[i]; }, said.data());
}

}  // namespace

const std::vector<Case> sort_cases = {{"sort", sorts_any}, {"sort pass", sorts}, {"look back", looks_back}};

}  // namespace sparselift::cuda
