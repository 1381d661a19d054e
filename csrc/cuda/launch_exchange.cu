// Launches what surrounds an exchange: distinct ids, ids by owner, packed buffers.
#include <algorithm>

#include "owners.cuh"
#include "pack.cuh"
#include "program.h"
#include "rank.h"
#include "sort.h"

namespace sparselift::cuda {
namespace {

constexpr unsigned kThreads = 256;

unsigned blocks_for(int64_t threads) { return static_cast<unsigned>(divide_up(threads, kThreads)); }

struct Space {
    uint64_t* keys;
    uint64_t* sorted_keys;
    uint32_t* positions;
    uint32_t* sorted_positions;
    void* sort;
    int64_t sort_bytes;
    RankSpace ranks;
};

Space lay_out(Layout& layout, int64_t count) {
    Space space{};
    space.keys = layout.take<uint64_t>(count);
    space.sorted_keys = layout.take<uint64_t>(count);
    space.positions = layout.take<uint32_t>(count);
    space.sorted_positions = layout.take<uint32_t>(count);
    space.sort_bytes = count > 0 ? static_cast<int64_t>(sort_workspace_bytes<uint64_t>(count)) : 0;
    space.sort = layout.take<char>(space.sort_bytes);
    space.ranks = lay_out_ranks(layout, count);
    return space;
}

int64_t workspace_bytes(int64_t count) {
    Layout layout(nullptr);
    lay_out(layout, count);
    return layout.used();
}

/// Sorts ids by id / rows_per_key; what is no row comes last, with key `unused`.
sl_status sort_ids(const sl_cuda_ids& ids, int64_t rows_per_key, uint64_t unused, const Space& space, cudaStream_t stream) {
    if (ids.count > INT32_MAX) return fail(SL_BAD_ARGUMENT, "at most 2**31 - 1 ids; got %lld", static_cast<long long>(ids.count));
    const IdKeyArgs args{ids.data, ids.are_64, static_cast<int32_t>(ids.count), ids.rows, rows_per_key, unused, space.keys, space.positions};
    SL_TRY(launch<&id_keys_kernel>(blocks_for(ids.count), kThreads, 0, stream, args));
    const SortPairs<uint64_t> pairs{space.keys, space.sorted_keys, space.positions, space.sorted_positions, ids.count, bits_of(unused)};
    return sort(pairs, space.sort, space.sort_bytes, stream);
}

int64_t aligned(int64_t bytes) { return divide_up(bytes, 16) * 16; }

/// Describes the parts to the device. Rows of the longest.
sl_status put_parts(const sl_cuda_part* parts, int64_t num_parts, void* buffer, const sl_cuda_context& context, int64_t& rows) {
    if (num_parts > kMaxGridY) return fail(SL_BAD_ARGUMENT, "at most %lld parts; got %lld", static_cast<long long>(kMaxGridY), static_cast<long long>(num_parts));
    std::vector<PackPart> described;
    rows = 0;
    for (int64_t i = 0; i < num_parts; ++i) {
        const sl_cuda_part& part = parts[i];
        if (part.offset_bytes % 16 != 0 || !is_aligned(buffer))
            return fail(SL_BAD_ARGUMENT, "part %lld must begin at a multiple of 16 bytes; its offset is %lld", static_cast<long long>(i),
                        static_cast<long long>(part.offset_bytes));
        if (part.dtype < 0 || part.dtype > SL_INT8_ROWWISE)
            return fail(SL_BAD_ARGUMENT, "part %lld: no dtype has number %d", static_cast<long long>(i), part.dtype);
        const bool in_fours = is_aligned(part.rows) && part.row_stride % 4 == 0;
        described.push_back({part.rows, part.row_stride, part.num_rows, sl_cuda_packed_row_bytes(part.dim, part.dtype),
                             static_cast<char*>(buffer) + part.offset_bytes, part.dim, part.dtype, in_fours, 0});
        rows = std::max(rows, part.num_rows);
    }
    if (rows == 0) return SL_OK;
    SL_TRY(check_workspace(context, sl_cuda_pack_workspace_bytes(num_parts)));
    return put(context.workspace, described.data(), static_cast<int64_t>(described.size() * sizeof(PackPart)), stream_of(context));
}

}  // namespace
}  // namespace sparselift::cuda

using namespace sparselift;
using namespace sparselift::cuda;

extern "C" int64_t sl_cuda_dedup_workspace_bytes(int64_t num_ids) { return workspace_bytes(num_ids); }

extern "C" sl_status sl_cuda_dedup(const sl_cuda_ids* ids, int64_t* distinct, int32_t* slots, int64_t* count, const sl_cuda_context* context) {
    return guarded([&]() -> sl_status {
        const cudaStream_t stream = stream_of(*context);
        if (ids->count == 0) {
            const int64_t none = 0;
            return put(count, &none, sizeof none, stream);
        }
        Layout layout(context->workspace);
        const Space space = lay_out(layout, ids->count);
        SL_TRY(check_workspace(*context, layout.used()));
        const auto unused = static_cast<uint64_t>(ids->rows);
        SL_TRY(sort_ids(*ids, 1, unused, space, stream));
        SL_TRY(rank(RunHeads{space.sorted_keys, unused}, ids->count, space.ranks, count, stream));
        const DedupArgs args{space.sorted_keys, space.sorted_positions, space.ranks.ranks, unused, static_cast<int32_t>(ids->count), distinct, slots};
        return launch<&slots_kernel>(blocks_for(ids->count), kThreads, 0, stream, args);
    });
}

extern "C" int64_t sl_cuda_bucketize_workspace_bytes(int64_t num_ids) { return workspace_bytes(num_ids); }

extern "C" sl_status sl_cuda_bucketize(const sl_cuda_ids* ids, const int32_t* offsets, int64_t num_bags, int64_t rows_per_owner,
                                       int64_t num_owners, int64_t* rows, int32_t* sources, int32_t* lengths, const sl_cuda_context* context) {
    return guarded([&]() -> sl_status {
        if (rows_per_owner < 1 || num_owners < 1 || num_owners > kMaxGridY || rows_per_owner * num_owners < ids->rows)
            return fail(SL_BAD_ARGUMENT, "%lld owners of %lld rows each do not own %lld rows", static_cast<long long>(num_owners),
                        static_cast<long long>(rows_per_owner), static_cast<long long>(ids->rows));
        const cudaStream_t stream = stream_of(*context);
        Layout layout(context->workspace);
        const Space space = lay_out(layout, ids->count);
        SL_TRY(check_workspace(*context, layout.used()));
        if (ids->count > 0) SL_TRY(sort_ids(*ids, rows_per_owner, static_cast<uint64_t>(num_owners), space, stream));
        const OwnerArgs args{ids->data, space.sorted_keys, space.sorted_positions, offsets, ids->are_64, static_cast<int32_t>(ids->count),
                             static_cast<int32_t>(num_bags), static_cast<int32_t>(num_owners), rows_per_owner, rows, sources, lengths};
        if (ids->count > 0) SL_TRY(launch<&owned_rows_kernel>(blocks_for(ids->count), kThreads, 0, stream, args));
        if (num_bags == 0) return SL_OK;
        return launch<&owned_lengths_kernel>(dim3(blocks_for(num_bags), static_cast<unsigned>(num_owners)), kThreads, 0, stream, args);
    });
}

extern "C" int64_t sl_cuda_packed_row_bytes(int64_t dim, int32_t dtype) {
    if (dtype == SL_INT8_ROWWISE) return aligned(kInt8Header + dim);
    return aligned(dim * element_bytes(dtype));
}

extern "C" int64_t sl_cuda_pack_workspace_bytes(int64_t num_parts) { return num_parts * static_cast<int64_t>(sizeof(PackPart)); }

extern "C" sl_status sl_cuda_pack(const sl_cuda_part* parts, int64_t num_parts, void* buffer, const sl_cuda_context* context) {
    return guarded([&]() -> sl_status {
        int64_t rows = 0;
        SL_TRY(put_parts(parts, num_parts, buffer, *context, rows));
        if (rows == 0) return SL_OK;
        const dim3 grid(blocks_for(rows * kPackLanes), static_cast<unsigned>(num_parts));
        return launch<&pack_kernel>(grid, kThreads, 0, stream_of(*context), static_cast<const PackPart*>(context->workspace));
    });
}

extern "C" sl_status sl_cuda_unpack(const sl_cuda_part* parts, int64_t num_parts, const void* buffer, const sl_cuda_context* context) {
    return guarded([&]() -> sl_status {
        int64_t rows = 0;
        SL_TRY(put_parts(parts, num_parts, const_cast<void*>(buffer), *context, rows));
        if (rows == 0) return SL_OK;
        const dim3 grid(blocks_for(rows * kPackLanes), static_cast<unsigned>(num_parts));
        return launch<&unpack_kernel>(grid, kThreads, 0, stream_of(*context), static_cast<const PackPart*>(context->workspace));
    });
}
