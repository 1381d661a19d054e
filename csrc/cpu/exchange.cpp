// Schedules packed buffers and regrouped columns: rows are cut among threads.
#include "exchange.h"

#include <algorithm>

#include "../api/packed_header.h"
#include "threads.h"

namespace sparselift {
namespace {

constexpr int64_t kTaskFloats = 1 << 15;     // a task of fewer costs more than it saves
constexpr int64_t kTasksPerThread = 8;
constexpr int64_t kRowCost = 8;              // of a row without columns, in floats

const ExchangeKernels* kernels_of(int32_t isa) {
    switch (isa) {
        case SL_ISA_PORTABLE: return portable::exchange_kernels();
#ifdef __x86_64__
        case SL_ISA_AVX2: return avx2::exchange_kernels();
        case SL_ISA_AVX512: return avx512::exchange_kernels();
#endif
        default: return nullptr;
    }
}

sl_status check_isa(int32_t isa) {
    return sl_isa_runnable(isa) ? SL_OK : fail(SL_UNSUPPORTED, "instruction set %d is missing here", isa);
}

int64_t tasks_of(int64_t floats, int32_t threads) {
    return threads > 1 ? std::clamp<int64_t>(floats / kTaskFloats, 1, threads * kTasksPerThread) : 1;
}

int64_t row_cost(const sl_part& part) { return part.dim + kRowCost; }

/// Calls run(rows) for the rows of every part, cut into tasks of about equal cost. A row belongs to the task that its first float is in.
template <typename Run>
void run_rows(const sl_part* parts, int64_t num_parts, char* buffer, int32_t threads, const Run& run) {
    int64_t total = 0;
    for (int64_t i = 0; i < num_parts; ++i) total += parts[i].num_rows * row_cost(parts[i]);
    const int64_t tasks = tasks_of(total, threads);
    run_tasks(threads, tasks, [&](int64_t task, int) {
        const int64_t begin = total / tasks * task + std::min(total % tasks, task), end = total / tasks * (task + 1) + std::min(total % tasks, task + 1);
        int64_t before = 0;
        lay_out_packed(parts, num_parts, [&](int64_t i, const PackedEntry& entry) {
            const sl_part& part = parts[i];
            const int64_t cost = row_cost(part);
            const auto row_at = [&](int64_t at) { return std::clamp<int64_t>((at - before + cost - 1) / cost, 0, part.num_rows); };
            char* const first = buffer + entry.offset;
            const int64_t stride = part.dim > 0 ? part.row_stride : 0;      // without columns there is no memory either
            const PackedRows rows{part.rows, stride, reinterpret_cast<float*>(first), first + packed_scale_bytes(part.num_rows, part.wire),
                                  part.dim, part.wire, begin <= before ? 0 : row_at(begin), end <= before ? 0 : row_at(end)};
            if (rows.first_row < rows.last_row) run(rows);
            before += part.num_rows * cost;
        });
    });
}

/// What lies between the parts: zeros, so that equal rows make equal buffers and no old memory goes out.
void fill_gaps(const sl_part* parts, int64_t num_parts, char* buffer) {
    lay_out_packed(parts, num_parts, [&](int64_t i, const PackedEntry& entry) {
        const int64_t scales = packed_scale_bytes(parts[i].num_rows, parts[i].wire), end = entry.offset + entry.bytes;
        if (scales > 0) {
            const int64_t used = parts[i].num_rows * kRowScaleBytes;
            std::memset(buffer + entry.offset + used, 0, static_cast<size_t>(scales - used));
        }
        std::memset(buffer + end, 0, static_cast<size_t>(packed_aligned(entry.bytes) - entry.bytes));
    });
}

void write_header(const sl_part* parts, int64_t num_parts, char* buffer) {
    const PackedPrologue prologue = packed_prologue(parts, num_parts);
    std::memcpy(buffer, &prologue, sizeof prologue);
    lay_out_packed(parts, num_parts, [&](int64_t i, const PackedEntry& entry) { std::memcpy(buffer + (1 + i) * 32, &entry, sizeof entry); });
}

/// SL_OK, or SL_BAD_BUFFER with the first of `count` words of a header's line that differs. `part` -1: the prologue.
sl_status check_words(int64_t part, const void* expected, const char* buffer, int64_t first, int64_t count) {
    const char* const found = buffer + (1 + part) * 32;
    for (int64_t word = first; word < first + count; ++word) {
        int64_t wanted, got;
        std::memcpy(&wanted, static_cast<const char*>(expected) + 8 * word, sizeof wanted);
        std::memcpy(&got, found + 8 * word, sizeof got);
        if (wanted != got) return wrong_header(part, word, got, wanted);
    }
    return SL_OK;
}

/// Entries before the totals, which change with them: the message then names what differs.
sl_status check_header(const sl_part* parts, int64_t num_parts, const char* buffer) {
    const PackedPrologue prologue = packed_prologue(parts, num_parts);
    sl_status status = check_words(-1, &prologue, buffer, 0, 2);
    lay_out_packed(parts, num_parts, [&](int64_t i, const PackedEntry& entry) {
        if (status == SL_OK) status = check_words(i, &entry, buffer, 0, 4);
    });
    return status == SL_OK ? check_words(-1, &prologue, buffer, 2, 2) : status;
}

}  // namespace
}  // namespace sparselift

using namespace sparselift;

extern "C" int64_t sl_packed_bytes(const sl_part* parts, int64_t num_parts) { return packed_bytes(parts, num_parts); }

extern "C" sl_status sl_pack(const sl_part* parts, int64_t num_parts, void* buffer, int64_t buffer_bytes, int32_t isa, int32_t threads) {
    if (sl_status status = check_isa(isa)) return status;
    if (sl_status status = check_packed(parts, num_parts, buffer, buffer_bytes)) return status;
    char* const to = static_cast<char*>(buffer);
    write_header(parts, num_parts, to);
    fill_gaps(parts, num_parts, to);
    run_rows(parts, num_parts, to, threads, kernels_of(isa)->pack);
    return SL_OK;
}

extern "C" sl_status sl_unpack(const sl_part* parts, int64_t num_parts, const void* buffer, int64_t buffer_bytes, int32_t isa,
                               int32_t threads) {
    if (sl_status status = check_isa(isa)) return status;
    if (sl_status status = check_packed(parts, num_parts, buffer, buffer_bytes)) return status;
    if (sl_status status = check_header(parts, num_parts, static_cast<const char*>(buffer))) return status;
    run_rows(parts, num_parts, static_cast<char*>(const_cast<void*>(buffer)), threads, kernels_of(isa)->unpack);
    return SL_OK;
}

extern "C" sl_status sl_regroup(const sl_range* ranges, int64_t num_ranges, const sl_term* terms, const sl_matrix* from, const sl_matrix* to,
                                int64_t batch, int32_t isa, int32_t threads) {
    if (sl_status status = check_isa(isa)) return status;
    int64_t floats = 0;
    for (int64_t i = 0; i < num_ranges; ++i) floats += ranges[i].width * std::max<int64_t>(ranges[i].num_terms, 1) + kRowCost;
    const int64_t tasks = std::min(tasks_of(floats * batch, threads), std::max<int64_t>(batch, 1));
    run_tasks(threads, tasks, [&](int64_t task, int) {
        kernels_of(isa)->regroup({ranges, num_ranges, terms, from, to, batch * task / tasks, batch * (task + 1) / tasks});
    });
    return SL_OK;
}
