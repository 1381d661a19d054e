#include "pool.h"

#include <sys/mman.h>

#include <cstdlib>
#include <mutex>
#include <new>

namespace sparselift {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kLine = 64;

/// Capacities are a power of two, or one and a half: a returned block fits requests of similar size, at most half of it wasted.
size_t capacity_for(size_t bytes) {
    size_t power = 4096;
    while (power < bytes) power *= 2;
    size_t three_quarters = power / 4 * 3;
    return bytes <= three_quarters && three_quarters >= 4096 ? three_quarters : power;
}

Block* make_block(size_t capacity, Pool* pool) {
    auto* block = static_cast<Block*>(std::malloc(sizeof(Block)));
    void* data = block ? aligned_allocate(capacity) : nullptr;
    if (!data) {
        std::free(block);
        return nullptr;
    }
    *block = Block{data, capacity, pool, nullptr};
    return block;
}

void destroy(Block* block) {
    aligned_free(block->data, block->capacity);
    std::free(block);
}

}  // namespace

// Small ones come from malloc. Large ones are mapped, and so untouched: memory that malloc recycles has small pages already.
void* aligned_allocate(size_t capacity) {
    if (capacity < kHugePage) {
        void* data = nullptr;
        return posix_memalign(&data, kLine, capacity) == 0 ? data : nullptr;
    }
    const size_t padded = capacity + kHugePage;
    void* mapped = mmap(nullptr, padded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) return nullptr;
    const auto begin = reinterpret_cast<uintptr_t>(mapped), data = (begin + kHugePage - 1) / kHugePage * kHugePage;
    if (data > begin) munmap(mapped, data - begin);
    munmap(reinterpret_cast<void*>(data + capacity), begin + kHugePage - data);
    madvise(reinterpret_cast<void*>(data), capacity, MADV_HUGEPAGE);
    return reinterpret_cast<void*>(data);
}

void aligned_free(void* data, size_t capacity) {
    if (capacity < kHugePage) std::free(data);
    else if (data) munmap(data, capacity);
}

class Pool {
  public:
    explicit Pool(size_t max_idle_bytes) : max_idle_(max_idle_bytes) {}

    Block* take(size_t bytes) {
        const size_t capacity = capacity_for(bytes);
        std::lock_guard<std::mutex> lock(mutex_);
        for (Block** link = &idle_; *link; link = &(*link)->next) {
            Block* block = *link;
            if (block->capacity != capacity) continue;
            *link = block->next;
            idle_bytes_ -= capacity;
            ++out_;
            return block;
        }
        Block* block = make_block(capacity, this);
        if (block) {
            total_bytes_ += capacity;
            ++out_;
        }
        return block;
    }

    /// Returns whether the pool is done with: released by its owner, and this was the last block out.
    bool give(Block* block) {
        std::lock_guard<std::mutex> lock(mutex_);
        --out_;
        if (released_ || block->capacity > max_idle_) {
            total_bytes_ -= block->capacity;
            destroy(block);
            return released_ && out_ == 0;
        }
        block->next = idle_;
        idle_ = block;
        idle_bytes_ += block->capacity;
        while (idle_bytes_ > max_idle_) drop_oldest();
        return false;
    }

    bool release() {
        std::lock_guard<std::mutex> lock(mutex_);
        released_ = true;
        while (idle_) drop_oldest();
        return out_ == 0;
    }

    void bytes(size_t* idle, size_t* total) {
        std::lock_guard<std::mutex> lock(mutex_);
        *idle = idle_bytes_;
        *total = total_bytes_;
    }

  private:
    void drop_oldest() {
        Block** link = &idle_;
        while ((*link)->next) link = &(*link)->next;
        idle_bytes_ -= (*link)->capacity;
        total_bytes_ -= (*link)->capacity;
        destroy(*link);
        *link = nullptr;
    }

    std::mutex mutex_;
    Block* idle_ = nullptr;       // the latest to come back first: its lines may still be cached
    size_t idle_bytes_ = 0, total_bytes_ = 0, max_idle_;
    int64_t out_ = 0;
    bool released_ = false;
};

Pool* pool_create(size_t max_idle_bytes) { return new (std::nothrow) Pool(max_idle_bytes); }

void pool_release(Pool* pool) {
    if (pool->release()) delete pool;
}

Block* pool_take(Pool* pool, size_t bytes) { return pool->take(bytes); }

void pool_give(Block* block) {
    Pool* pool = block->pool;
    if (pool->give(block)) delete pool;
}

void pool_bytes(Pool* pool, size_t* idle, size_t* total) { pool->bytes(idle, total); }

}  // namespace sparselift
