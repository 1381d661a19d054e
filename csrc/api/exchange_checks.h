// What dedup and bucketize refuse, on the CPU and on a device, in the same words.
#pragma once

#include "sparselift_exchange.h"
#include "status.h"

namespace sparselift {

/// Positions among the ids are kept as int32.
inline sl_status check_ids(const sl_ids& ids) {
    if (ids.count >= 0 && ids.count <= INT32_MAX && ids.rows >= 0) return SL_OK;
    return fail(SL_BAD_ARGUMENT, "at most 2**31 - 1 ids of at least 0 rows; got %lld of %lld", static_cast<long long>(ids.count),
                static_cast<long long>(ids.rows));
}

/// Owners of all rows, `most` at most.
inline sl_status check_owners(const sl_owners& owners, int64_t rows, int64_t most) {
    if (owners.count > most)
        return fail(SL_BAD_ARGUMENT, "at most %lld owners; got %lld", static_cast<long long>(most), static_cast<long long>(owners.count));
    const bool known = owners.count >= 1 && owners.rows_per_owner >= 1;
    if (known && (owners.modulo || owners.rows_per_owner > (rows - 1) / owners.count)) return SL_OK;
    return fail(SL_BAD_ARGUMENT, "%lld owners of %lld rows each do not own %lld rows", static_cast<long long>(owners.count),
                static_cast<long long>(owners.rows_per_owner), static_cast<long long>(rows));
}

}  // namespace sparselift
