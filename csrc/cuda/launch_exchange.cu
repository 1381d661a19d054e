// Launches what surrounds an exchange: distinct ids, ids by owner, packed buffers, regrouped columns.
#include <algorithm>
#include <cstring>
#include <vector>

#include "../api/exchange_checks.h"
#include "owners.cuh"
#include "pack.cuh"
#include "program.h"
#include "rank.h"
#include "regroup.cuh"
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
    space.sort_bytes = count > 0 ? sort_workspace_bytes(count) : 0;
    space.sort = layout.take<char>(space.sort_bytes);
    space.ranks = lay_out_ranks(layout, count);
    return space;
}

int64_t workspace_bytes(int64_t count) {
    Layout layout(nullptr);
    lay_out(layout, count);
    return layout.used();
}

/// Sorts ids by their quotient or, modulo, remainder; what is no row comes last, with key `unused`.
sl_status sort_ids(const sl_ids& ids, int64_t divisor, bool modulo, uint64_t unused, const Space& space, cudaStream_t stream) {
    const IdKeyArgs args{ids.data, static_cast<int32_t>(ids.are_64), static_cast<int32_t>(ids.count), ids.rows, divisor, modulo, unused,
                         space.keys, space.positions};
    SL_TRY(launch<&id_keys_kernel>(blocks_for(ids.count), kThreads, 0, stream, args));
    const SortPairs pairs{space.keys, space.sorted_keys, space.positions, space.sorted_positions, ids.count, std::max(bits_of(unused), 1)};
    return sort(pairs, space.sort, space.sort_bytes, stream);
}

/// Many go to blocks in y.
sl_status check_grid(const char* what, int64_t count) {
    if (count <= kMaxGridY) return SL_OK;
    return fail(SL_BAD_ARGUMENT, "at most %lld %s; got %lld", static_cast<long long>(kMaxGridY), what, static_cast<long long>(count));
}

PackPart describe(const sl_part& part, const PackedEntry& entry, char* buffer) {
    char* const begin = buffer + entry.offset;
    PackPart described{};
    described.rows = part.rows;
    described.row_stride = part.row_stride;
    described.num_rows = part.num_rows;
    described.scales = reinterpret_cast<float*>(begin);
    described.elements = begin + packed_scale_bytes(part.num_rows, part.wire);
    described.bytes = entry.bytes;
    std::memcpy(described.entry, &entry, sizeof entry);
    described.dim = entry.dim;
    described.wire = entry.wire;
    described.rows_in_fours = is_aligned(part.rows) && part.row_stride % 4 == 0;
    described.elements_in_fours = part.dim % 4 == 0;
    return described;
}

/// Describes the parts to the device.
sl_status put_parts(const sl_part* parts, int64_t num_parts, void* buffer, const sl_cuda_context& context) {
    std::vector<PackPart> described;
    lay_out_packed(parts, num_parts,
                   [&](int64_t i, const PackedEntry& entry) { described.push_back(describe(parts[i], entry, static_cast<char*>(buffer))); });
    SL_TRY(check_workspace(context, sl_cuda_pack_workspace_bytes(num_parts)));
    return put(context.workspace, described.data(), static_cast<int64_t>(described.size() * sizeof(PackPart)), stream_of(context));
}

/// Groups of lanes for the rows of the longest part, and a block where there are none.
dim3 grid_of(const sl_part* parts, int64_t num_parts) {
    int64_t rows = 1;
    for (int64_t i = 0; i < num_parts; ++i) rows = std::max(rows, parts[i].num_rows);
    return dim3(blocks_for(rows * kRowLanes), static_cast<unsigned>(std::max<int64_t>(num_parts, 1)));
}

std::vector<char> header_of(const sl_part* parts, int64_t num_parts) {
    std::vector<char> header(static_cast<size_t>(packed_header_bytes(num_parts)));
    const PackedPrologue prologue = packed_prologue(parts, num_parts);
    std::memcpy(header.data(), &prologue, sizeof prologue);
    lay_out_packed(parts, num_parts,
                   [&](int64_t i, const PackedEntry& entry) { std::memcpy(header.data() + packed_header_bytes(i), &entry, sizeof entry); });
    return header;
}

/// Ranges that have somewhere to go, with pointers for numbers, and the terms that are there. Terms lie at `terms` on the device.
struct Regrouped {
    std::vector<RegroupRange> ranges;
    std::vector<RegroupTerm> terms;

    Regrouped(const sl_range* given, int64_t num_ranges, const sl_term* all, const sl_matrix* from, const sl_matrix* to, RegroupTerm* placed) {
        for (int64_t r = 0; r < num_ranges; ++r) {
            const sl_range& range = given[r];
            const sl_matrix& target = to[range.matrix];
            if (!target.data) continue;
            RegroupRange described{target.data + range.column, target.row_stride, placed + terms.size(), 0, static_cast<int32_t>(range.width), 0, 0};
            bool in_fours = is_aligned(described.to) && target.row_stride % 4 == 0;
            for (int64_t t = range.first_term; t < range.first_term + range.num_terms; ++t) {
                const sl_matrix& source = from[all[t].matrix];
                if (!source.data) continue;
                terms.push_back({source.data + all[t].column, source.row_stride});
                in_fours = in_fours && is_aligned(terms.back().from) && source.row_stride % 4 == 0;
                ++described.num_terms;
            }
            described.in_fours = in_fours;
            ranges.push_back(described);
        }
    }
};

}  // namespace
}  // namespace sparselift::cuda

using namespace sparselift;
using namespace sparselift::cuda;

extern "C" int64_t sl_cuda_dedup_workspace_bytes(int64_t num_ids) { return workspace_bytes(num_ids); }

extern "C" sl_status sl_cuda_dedup(const sl_ids* ids, int64_t* distinct, int32_t* slots, int64_t* count, const sl_cuda_context* context) {
    return guarded([&]() -> sl_status {
        SL_TRY(check_ids(*ids));
        const cudaStream_t stream = stream_of(*context);
        if (ids->count == 0) {
            const int64_t none = 0;
            return put(count, &none, sizeof none, stream);
        }
        Layout layout(context->workspace);
        const Space space = lay_out(layout, ids->count);
        SL_TRY(check_workspace(*context, layout.used()));
        const auto unused = static_cast<uint64_t>(ids->rows);
        SL_TRY(sort_ids(*ids, 1, false, unused, space, stream));
        SL_TRY(rank(RunHeads{space.sorted_keys, unused}, ids->count, space.ranks, count, stream));
        const DedupArgs args{space.sorted_keys, space.sorted_positions, space.ranks.ranks, unused, static_cast<int32_t>(ids->count), distinct, slots};
        return launch<&slots_kernel>(blocks_for(ids->count), kThreads, 0, stream, args);
    });
}

extern "C" int64_t sl_cuda_bucketize_workspace_bytes(int64_t num_ids) { return workspace_bytes(num_ids); }

extern "C" sl_status sl_cuda_bucketize(const sl_ids* ids, const sl_boundaries* bags, const sl_owners* owners, const sl_buckets* buckets,
                                       const sl_cuda_context* context) {
    return guarded([&]() -> sl_status {
        SL_TRY(check_ids(*ids));
        SL_TRY(check_owners(*owners, ids->rows, kMaxGridY));
        const cudaStream_t stream = stream_of(*context);
        Layout layout(context->workspace);
        const Space space = lay_out(layout, ids->count);
        SL_TRY(check_workspace(*context, layout.used()));
        const bool modulo = owners->modulo != 0;
        if (ids->count > 0)
            SL_TRY(sort_ids(*ids, modulo ? owners->count : owners->rows_per_owner, modulo, static_cast<uint64_t>(owners->count), space, stream));
        const OwnerArgs args{ids->data, space.sorted_keys, space.sorted_positions, bags->data, static_cast<int32_t>(ids->are_64),
                             static_cast<int32_t>(bags->are_64), static_cast<int32_t>(ids->count), static_cast<int32_t>(bags->num_bags),
                             *owners, *buckets};
        if (ids->count > 0) SL_TRY(launch<&owned_rows_kernel>(blocks_for(ids->count), kThreads, 0, stream, args));
        if (bags->num_bags == 0) return SL_OK;
        return launch<&owned_lengths_kernel>(dim3(blocks_for(bags->num_bags), static_cast<unsigned>(owners->count)), kThreads, 0, stream, args);
    });
}

extern "C" int64_t sl_cuda_pack_workspace_bytes(int64_t num_parts) { return num_parts * static_cast<int64_t>(sizeof(PackPart)); }

extern "C" sl_status sl_cuda_pack(const sl_part* parts, int64_t num_parts, void* buffer, int64_t buffer_bytes, const sl_cuda_context* context) {
    return guarded([&]() -> sl_status {
        SL_TRY(check_packed(parts, num_parts, buffer, buffer_bytes));
        SL_TRY(check_grid("parts", num_parts));
        const std::vector<char> header = header_of(parts, num_parts);
        SL_TRY(put(buffer, header.data(), static_cast<int64_t>(header.size()), stream_of(*context)));
        if (num_parts == 0) return SL_OK;
        SL_TRY(put_parts(parts, num_parts, buffer, *context));
        return launch<&pack_kernel>(grid_of(parts, num_parts), kThreads, 0, stream_of(*context), static_cast<const PackPart*>(context->workspace));
    });
}

extern "C" int64_t sl_cuda_unpack_workspace_bytes(int64_t num_parts) { return sl_cuda_pack_workspace_bytes(num_parts); }

extern "C" sl_status sl_cuda_unpack(const sl_part* parts, int64_t num_parts, const void* buffer, int64_t buffer_bytes,
                                    const sl_cuda_context* context) {
    return guarded([&]() -> sl_status {
        SL_TRY(check_packed(parts, num_parts, buffer, buffer_bytes));
        SL_TRY(check_grid("parts", num_parts));
        SL_TRY(put_parts(parts, num_parts, const_cast<void*>(buffer), *context));
        const PackedPrologue prologue = packed_prologue(parts, num_parts);
        UnpackArgs args{static_cast<const PackPart*>(context->workspace), num_parts, static_cast<const int64_t*>(buffer), {},
                        &static_cast<Status*>(context->status)->faulted, context->fault};
        std::memcpy(args.prologue, &prologue, sizeof prologue);
        return launch<&unpack_kernel>(grid_of(parts, num_parts), kThreads, 0, stream_of(*context), args);
    });
}

extern "C" sl_status sl_cuda_buffer_fault(const sl_cuda_fault* fault) {
    if (*static_cast<const volatile int32_t*>(&fault->status) == SL_OK) return SL_OK;
    return wrong_header(fault->feature, fault->position, fault->value, fault->previous);
}

extern "C" int64_t sl_cuda_regroup_workspace_bytes(int64_t num_ranges, int64_t num_terms) {
    Layout layout(nullptr);
    layout.take<RegroupRange>(num_ranges);
    layout.take<RegroupTerm>(num_terms);
    return layout.used();
}

extern "C" sl_status sl_cuda_regroup(const sl_range* ranges, int64_t num_ranges, const sl_term* terms, int64_t num_terms, const sl_matrix* from,
                                     const sl_matrix* to, int64_t batch, const sl_cuda_context* context) {
    return guarded([&]() -> sl_status {
        SL_TRY(check_grid("ranges", num_ranges));
        SL_TRY(check_workspace(*context, sl_cuda_regroup_workspace_bytes(num_ranges, num_terms)));
        Layout layout(context->workspace);
        auto* const device_ranges = layout.take<RegroupRange>(num_ranges);
        auto* const device_terms = layout.take<RegroupTerm>(num_terms);
        const Regrouped described(ranges, num_ranges, terms, from, to, device_terms);
        if (described.ranges.empty() || batch == 0) return SL_OK;
        const cudaStream_t stream = stream_of(*context);
        SL_TRY(put(device_ranges, described.ranges.data(), static_cast<int64_t>(described.ranges.size() * sizeof(RegroupRange)), stream));
        SL_TRY(put(device_terms, described.terms.data(), static_cast<int64_t>(described.terms.size() * sizeof(RegroupTerm)), stream));
        const dim3 grid(blocks_for(batch * kRowLanes), static_cast<unsigned>(described.ranges.size()));
        return launch<&regroup_kernel>(grid, kThreads, 0, stream, static_cast<const RegroupRange*>(device_ranges), batch);
    });
}
