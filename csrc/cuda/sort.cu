// Lays out a sort's workspace and launches its passes.
#include "sort.cuh"

#include "program.h"

namespace sparselift::cuda {
namespace {

constexpr unsigned kCountThreads = 256;

/// What a sort keeps. Tiles of even and odd passes say their counts in turns, and clear those of the next pass.
struct SortSpace {
    uint32_t* counts;
    unsigned long long* said[2];
    uint64_t* keys;
    uint32_t* values;
};

SortSpace lay_out(Layout& layout, int64_t count) {
    const int64_t num_said = divide_up(count, kSortTile) * kDigits;
    SortSpace space{};
    space.counts = layout.take<uint32_t>(kMostPasses * (kDigits + 1));
    for (auto& said : space.said) said = layout.take<unsigned long long>(num_said);
    space.keys = layout.take<uint64_t>(count);
    space.values = layout.take<uint32_t>(count);
    return space;
}

}  // namespace

int bits_of(uint64_t value) {
    int bits = 0;
    while (value >> bits != 0) ++bits;
    return bits;
}

int sort_passes(int key_bits) { return key_bits > kDigitBits ? static_cast<int>(divide_up(key_bits, kDigitBits)) : 1; }

int64_t sort_workspace_bytes(int64_t count) {
    Layout layout(nullptr);
    lay_out(layout, count);
    return layout.used();
}

SortStart start_sort(void* workspace, int64_t count, int key_bits) {
    Layout layout(workspace);
    const SortSpace space = lay_out(layout, count);
    return {space.counts, space.said[0], divide_up(count, kSortTile) * kDigits, sort_passes(key_bits)};
}

sl_status sort_counted(const SortPairs& pairs, void* workspace, int64_t workspace_bytes, cudaStream_t stream) {
    if (pairs.count == 0) return SL_OK;
    Layout layout(workspace);
    const SortSpace space = lay_out(layout, pairs.count);
    if (workspace_bytes < layout.used())
        return fail(SL_BAD_ARGUMENT, "a sort of %lld pairs needs %lld bytes; got %lld", static_cast<long long>(pairs.count),
                    static_cast<long long>(layout.used()), static_cast<long long>(workspace_bytes));
    const int passes = sort_passes(pairs.key_bits);
    RadixPass pass{};
    pass.keys_in = pairs.keys_in;
    pass.values_in = pairs.values_in;
    pass.count = pairs.count;
    for (int i = 0; i < passes; ++i) {
        const bool ends_in_outputs = (passes - i) % 2 == 1;      // the last pass does, the one before it must not
        pass.keys_out = ends_in_outputs ? pairs.keys_out : space.keys;
        pass.values_out = ends_in_outputs ? pairs.values_out : space.values;
        pass.counts = space.counts + i * kDigits;
        pass.ticket = space.counts + passes * kDigits + i;
        pass.said = space.said[i % 2];
        pass.said_next = space.said[(i + 1) % 2];
        pass.shift = i * kDigitBits;
        SL_TRY(launch<&radix_pass_kernel>(static_cast<unsigned>(divide_up(pairs.count, kSortTile)), kSortThreads, 0, stream, pass));
        pass.keys_in = pass.keys_out;
        pass.values_in = pass.values_out;
    }
    return SL_OK;
}

sl_status sort(const SortPairs& pairs, void* workspace, int64_t workspace_bytes, cudaStream_t stream) {
    if (pairs.count == 0) return SL_OK;
    const SortStart start = start_sort(workspace, pairs.count, pairs.key_bits);
    SL_TRY(put(nullptr, nullptr, 0, stream, {start.counts, words_to_clear(start)}));
    const auto blocks = static_cast<unsigned>(divide_up(pairs.count, kCountThreads * kKeysPerThread));
    SL_TRY(launch<&count_digits_kernel>(blocks, kCountThreads, 0, stream, pairs.keys_in, pairs.count, start));
    return sort_counted(pairs, workspace, workspace_bytes, stream);
}

}  // namespace sparselift::cuda
