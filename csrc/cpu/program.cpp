// Creating and destroying programs.
#include "program.h"

#include <sys/mman.h>

#include <memory>

namespace sparselift {
namespace {

constexpr size_t kPage = 4096;
#ifdef __SANITIZE_ADDRESS__
constexpr size_t kSlack = SIZE_MAX;                      // none: an access past the end is to be seen
#else
constexpr size_t kSlack = 4;                             // a quarter more than asked for: batches vary in size
#endif
constexpr size_t kMaxIdleBytes = size_t{256} << 20;      // of batches that came back

const Kernels* kernels_of(int32_t isa) {
    switch (isa) {
        case SL_ISA_PORTABLE: return portable::kernels();
#ifdef __x86_64__
        case SL_ISA_AVX2: return avx2::kernels();
        case SL_ISA_AVX512: return avx512::kernels();
#endif
        default: return nullptr;
    }
}

}  // namespace

Buffer::~Buffer() { aligned_free(data_, bytes_); }

void* Buffer::reserve(size_t bytes) {
    if (bytes <= bytes_) return data_;
    aligned_free(data_, bytes_);
    bytes_ = 0;
    size_t wanted = bytes + bytes / kSlack;
    if (wanted >= kPage) wanted = (wanted + kPage - 1) / kPage * kPage;
    data_ = aligned_allocate(wanted);
    if (!data_) throw std::bad_alloc();
    bytes_ = wanted;
    return data_;
}

Zeros::~Zeros() {
    if (data_) munmap(data_, bytes_);
}

void* Zeros::map(size_t bytes) {
    void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    data_ = mapped;
    bytes_ = bytes;
    return data_;
}

}  // namespace sparselift

using namespace sparselift;

sl_program::~sl_program() {
    if (pool) pool_release(pool);
}

void sl_program::reserve_workers(int threads) {
    const size_t wanted = threads > 1 ? static_cast<size_t>(threads) : 1;
    if (workspaces.size() < wanted) workspaces.resize(wanted);
}

extern "C" sl_status sl_program_create(const sl_table* tables, int64_t num_tables, const sl_feature* features, int64_t num_features,
                                       int32_t isa, sl_program** program) {
    return guarded([&]() -> sl_status {
        if (!sl_isa_runnable(isa)) return fail(SL_UNSUPPORTED, "instruction set %d is missing here", isa);
        auto created = std::make_unique<sl_program>();
        created->kernels = kernels_of(isa);
        created->tables.assign(tables, tables + num_tables);
        created->features.assign(features, features + num_features);
        created->table_features.resize(static_cast<size_t>(num_tables));
        for (int64_t f = 0; f < num_features; ++f)
            created->table_features[static_cast<size_t>(features[f].table)].push_back(static_cast<int32_t>(f));
        created->heads.resize(static_cast<size_t>(num_tables));
        created->heads_ahead.resize(static_cast<size_t>(num_tables));
        created->sums.resize(static_cast<size_t>(num_tables));
        created->statuses.resize(static_cast<size_t>(num_features));
        created->faults.resize(static_cast<size_t>(num_features));
        created->pool = pool_create(kMaxIdleBytes);
        if (!created->pool) throw std::bad_alloc();
        *program = created.release();
        return SL_OK;
    });
}

extern "C" void sl_program_destroy(sl_program* program) { delete program; }

extern "C" int64_t sl_program_workspace_bytes(const sl_program* program) {
    size_t bytes = 0;
    for (const Zeros& heads : program->heads) bytes += heads.bytes();
    for (const Zeros& heads : program->heads_ahead) bytes += heads.bytes();
    for (const Zeros& sums : program->sums) bytes += sums.bytes();
    bytes += program->ahead.entries.bytes();
    for (const Workspace& w : program->workspaces)
        bytes += w.nodes.bytes() + w.rows.bytes() + w.scratch.bytes() + w.slots.bytes() + w.paddings.bytes() + w.gathered.bytes() +
                 w.packed.bytes() + w.firsts.bytes() + w.entries.bytes() + w.bags.bytes() + w.marks.size() * sizeof(uint64_t);
    return static_cast<int64_t>(bytes);
}
