// What one build of the exchange kernels (an instruction set) offers to exchange.cpp.
//
// As in kernels.h: plain structs alone, since this is included by sources compiled with different instruction sets.
#pragma once

#include <stdint.h>

#include "../api/int8_rows.h"
#include "../api/sparselift_exchange.h"

namespace sparselift {

/// Rows [first_row, last_row) of one part, and where its rows begin on both sides.
struct PackedRows {
    float* rows;
    int64_t row_stride;
    float* scales;             // (num_rows, 2) scale and bias; int8 alone
    char* elements;
    int64_t dim;
    int64_t wire;
    int64_t first_row, last_row;
};

/// Samples [first_row, last_row) of one call.
struct RegroupRows {
    const sl_range* ranges;
    int64_t num_ranges;
    const sl_term* terms;
    const sl_matrix* from;
    const sl_matrix* to;
    int64_t first_row, last_row;
};

struct ExchangeKernels {
    void (*pack)(const PackedRows& args);
    void (*unpack)(const PackedRows& args);
    void (*regroup)(const RegroupRows& args);
};

namespace portable {
const ExchangeKernels* exchange_kernels();
}
#ifdef __x86_64__
namespace avx2 {
const ExchangeKernels* exchange_kernels();
}
namespace avx512 {
const ExchangeKernels* exchange_kernels();
}
#endif

}  // namespace sparselift
