// Instruction counts of kernels that need no program: what surrounds an exchange, and the dot interaction.
#include "instructions.h"

#include <array>

#include "api/sparselift_exchange.h"
#include "api/sparselift_interaction.h"
#include "cpu/exchange.h"
#include "cpu/interaction.h"

// As in instructions.cpp: builds that were not asked for give way to those that were.
namespace sparselift {
namespace portable {
__attribute__((weak)) const ExchangeKernels* exchange_kernels() { return nullptr; }
__attribute__((weak)) const InteractionKernels* interaction_kernels() { return nullptr; }
}
#ifdef __x86_64__
namespace avx2 {
__attribute__((weak)) const ExchangeKernels* exchange_kernels() { return nullptr; }
__attribute__((weak)) const InteractionKernels* interaction_kernels() { return nullptr; }
}
namespace avx512 {
__attribute__((weak)) const ExchangeKernels* exchange_kernels() { return nullptr; }
__attribute__((weak)) const InteractionKernels* interaction_kernels() { return nullptr; }
}
#endif
}  // namespace sparselift

namespace {

constexpr int64_t kRows = 4096, kIds = 4096, kBags = 256, kOwners = 8;       // of a table that is sharded
constexpr int64_t kFeatures = 8, kSamples = 64;                             // whose pooled rows are packed or regrouped
constexpr int64_t kVectors = 27;                                            // that interact

/// Ids of bags of equal length, half of them among few rows, and everything that calls on them write.
struct Ids {
    std::vector<int64_t> ids, bounds, rows;
    std::vector<int32_t> sources, places, lengths;
    std::vector<char> workspace;
    int64_t count = 0;
    sl_ids given{};

    Ids() : rows(kIds), sources(kIds), places(kIds), lengths(kOwners * kBags) {
        Random random;
        for (int64_t i = 0; i < kIds; ++i) ids.push_back(random.below(random.below(2) ? kRows : kRows / 16));
        for (int64_t bag = 0; bag <= kBags; ++bag) bounds.push_back(bag * kIds / kBags);
        given.data = ids.data();
        given.count = kIds;
        given.rows = kRows;
        given.are_64 = 1;
    }
};

Counted dedup(int64_t, int32_t) {
    auto s = std::make_shared<Ids>();
    s->workspace.resize(static_cast<size_t>(sl_dedup_workspace_bytes(&s->given, 1)));
    return {[s] { check(sl_dedup(&s->given, s->rows.data(), s->places.data(), &s->count, s->workspace.data(), 1)); }, kIds};
}

Counted bucketize(bool modulo) {
    auto s = std::make_shared<Ids>();
    const sl_owners owners{kOwners, kRows / kOwners, modulo};
    s->workspace.resize(static_cast<size_t>(sl_bucketize_workspace_bytes(&s->given, &owners, 1)));
    return {[s, owners] {
                const sl_boundaries bags{s->bounds.data(), kBags, 1};
                const sl_buckets out{s->rows.data(), s->sources.data(), s->places.data(), s->lengths.data()};
                check(sl_bucketize(&s->given, &bags, &owners, &out, s->workspace.data(), 1));
            },
            kIds};
}

/// Pooled rows of features side by side in one matrix, as parts of a buffer.
struct Packed {
    Floats rows, buffer;
    std::vector<sl_part> parts;
    int64_t bytes;

    Packed(int64_t dim, int64_t wire) : rows(floats(kSamples * kFeatures * dim)) {
        for (int64_t f = 0; f < kFeatures; ++f) parts.push_back({rows.get() + f * dim, kFeatures * dim, kSamples, dim, wire});
        bytes = sl_packed_bytes(parts.data(), kFeatures);
        buffer = floats(bytes / 4);
    }
};

Counted pack(int64_t dim, int32_t isa, int64_t wire) {
    auto s = std::make_shared<Packed>(dim, wire);
    return {[s, isa] { check(sl_pack(s->parts.data(), kFeatures, s->buffer.get(), s->bytes, isa, 1)); }, kFeatures * kSamples};
}

Counted unpack(int64_t dim, int32_t isa, int64_t wire) {
    auto s = std::make_shared<Packed>(dim, wire);
    check(sl_pack(s->parts.data(), kFeatures, s->buffer.get(), s->bytes, isa, 1));
    return {[s, isa] { check(sl_unpack(s->parts.data(), kFeatures, s->buffer.get(), s->bytes, isa, 1)); }, kFeatures * kSamples};
}

/// Features of one source in reverse order in one group; or the sums of two groups' columns in one source.
Counted regroup(int64_t dim, int32_t isa, int64_t num_terms) {
    struct Columns {
        std::array<Floats, 3> matrices;
        std::vector<sl_range> ranges;
        std::vector<sl_term> terms;
    };
    auto s = std::make_shared<Columns>();
    for (Floats& matrix : s->matrices) matrix = floats(kSamples * kFeatures * dim);
    for (int64_t f = 0; f < kFeatures; ++f) {
        s->ranges.push_back({0, f * dim, dim, num_terms * f, num_terms});
        for (int64_t t = 0; t < num_terms; ++t) s->terms.push_back({t, (kFeatures - 1 - f) * dim});
    }
    return {[s, dim, isa] {
                const int64_t stride = kFeatures * dim;
                const sl_matrix to{s->matrices[0].get(), stride}, from[] = {{s->matrices[1].get(), stride}, {s->matrices[2].get(), stride}};
                check(sl_regroup(s->ranges.data(), kFeatures, s->terms.data(), from, &to, kSamples, isa, 1));
            },
            kFeatures * kSamples};
}

/// DLRM's: all pairs below the diagonal, and the first vector passed on. Every vector of a sample is a unit.
Counted interaction(int64_t dim, int32_t isa, bool backward) {
    struct Samples {
        Floats vectors, grads, output;
        std::vector<sl_pair_run> runs;
        std::vector<sl_matrix> matrices, grad_matrices;
        std::vector<char> workspace;
        sl_interaction shape{};
    };
    constexpr int64_t kBatch = 4;
    auto s = std::make_shared<Samples>();
    int64_t width = dim;
    for (int64_t row = 1; row < kVectors; width += row++) s->runs.push_back({row, 0, row, width});
    s->vectors = floats(kBatch * kVectors * dim);
    s->grads = floats(kBatch * kVectors * dim);
    s->output = floats(kBatch * width);
    for (int64_t v = 0; v < kVectors; ++v) {
        s->matrices.push_back({s->vectors.get() + v * dim, kVectors * dim});
        s->grad_matrices.push_back({s->grads.get() + v * dim, kVectors * dim});
    }
    s->shape = {kBatch, kVectors, dim, 0, s->runs.data(), static_cast<int64_t>(s->runs.size())};
    s->workspace.resize(static_cast<size_t>(sl_interaction_workspace_bytes(&s->shape, 1)));
    const sl_matrix output{s->output.get(), width};
    if (backward)
        return {[s, output, isa] {
                    check(sl_interaction_backward(&s->shape, s->matrices.data(), output, s->grad_matrices.data(), s->workspace.data(), isa, 1));
                },
                kBatch * kVectors};
    return {[s, output, isa] { check(sl_interaction_forward(&s->shape, s->matrices.data(), output, s->workspace.data(), isa, 1)); },
            kBatch * kVectors};
}

}  // namespace

std::vector<FreeCase> free_cases() {
    std::vector<FreeCase> all = {
        {"dedup", dedup},
        {"bucketize block", [](int64_t, int32_t) { return bucketize(false); }},
        {"bucketize modulo", [](int64_t, int32_t) { return bucketize(true); }},
        {"regroup", [](int64_t dim, int32_t isa) { return regroup(dim, isa, 1); }},
        {"regroup backward of two uses", [](int64_t dim, int32_t isa) { return regroup(dim, isa, 2); }},
        {"interaction", [](int64_t dim, int32_t isa) { return interaction(dim, isa, false); }},
        {"interaction backward", [](int64_t dim, int32_t isa) { return interaction(dim, isa, true); }},
    };
    const struct { const char* name; int64_t wire; } wires[] = {
        {"float32", SL_WIRE_FLOAT32}, {"float16", SL_WIRE_FLOAT16}, {"bfloat16", SL_WIRE_BFLOAT16}, {"int8", SL_WIRE_INT8}};
    for (const auto& wire : wires) {
        all.push_back({std::string("pack ") + wire.name, [=](int64_t dim, int32_t isa) { return pack(dim, isa, wire.wire); }});
        all.push_back({std::string("unpack ") + wire.name, [=](int64_t dim, int32_t isa) { return unpack(dim, isa, wire.wire); }});
    }
    return all;
}
