// Scattered rows as fast as memory gives them: no pooling, no output, no bookkeeping.
#include "../api/sparselift_probe.h"

#include <algorithm>
#include <cstdint>

#include "threads.h"

namespace sparselift {
namespace {

constexpr int64_t kLine = 16;      // floats
constexpr int64_t kParts = 64;
using Line = float __attribute__((vector_size(64), aligned(64), may_alias));

#ifdef __x86_64__
#define SL_EVERY_ISA __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define SL_EVERY_ISA
#endif

struct Rows {
    float* table;
    int64_t dim;
    const int32_t* ids;
    int64_t count;
    int64_t ahead;

    Line* at(int64_t k) const { return reinterpret_cast<Line*>(table + int64_t{ids[k]} * dim); }
};

template <int kWrite>
inline __attribute__((always_inline)) void prefetch(const Rows& rows, int64_t k) {
    if (rows.ahead == 0 || k + rows.ahead >= rows.count) return;
    const char* row = reinterpret_cast<const char*>(rows.at(k + rows.ahead));
    for (int64_t byte = 0; byte < rows.dim * 4; byte += 64) __builtin_prefetch(row + byte, kWrite, 3);
}

SL_EVERY_ISA float read(const Rows& rows) {
    Line a{}, b{}, c{}, d{};       // one chain of additions alone would wait for itself
    const int64_t lines = rows.dim / kLine;
    for (int64_t k = 0; k < rows.count; ++k) {
        prefetch<0>(rows, k);
        const Line* row = rows.at(k);
        int64_t i = 0;
        for (; i + 4 <= lines; i += 4) {
            a += row[i];
            b += row[i + 1];
            c += row[i + 2];
            d += row[i + 3];
        }
        for (; i < lines; ++i) a += row[i];
    }
    const Line total = (a + b) + (c + d);
    float sum = 0;
    for (int64_t j = 0; j < kLine; ++j) sum += total[j];
    return sum;
}

SL_EVERY_ISA float update(const Rows& rows) {
    const int64_t lines = rows.dim / kLine;
    for (int64_t k = 0; k < rows.count; ++k) {
        prefetch<1>(rows, k);
        Line* row = rows.at(k);
        for (int64_t i = 0; i < lines; ++i) row[i] += 1.0f;
    }
    return 0;
}

}  // namespace
}  // namespace sparselift

using namespace sparselift;

extern "C" float sl_probe_rows(float* table, int64_t dim, const int32_t* ids, int64_t count, int32_t ahead, int32_t access,
                               int32_t threads) {
    const int64_t parts = threads > 1 ? std::clamp<int64_t>(count, 1, kParts) : 1;
    float sums[kParts] = {};
    run_tasks(threads, parts, [&](int64_t part, int) {
        const int64_t first = count * part / parts;
        const Rows rows{table, dim, ids + first, count * (part + 1) / parts - first, ahead};
        sums[part] = access == SL_PROBE_UPDATE ? update(rows) : read(rows);
    });
    float sum = 0;
    for (float one : sums) sum += one;
    return sum;
}
