// Reused memory: blocks that come back from any thread, without the GIL.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sparselift {

class Pool;

struct Block {
    void* data;            // of aligned_allocate
    size_t capacity;
    Pool* pool;
    Block* next;           // in the pool's list, while idle
};

/// Memory that is 64-byte aligned; from 2 MiB on, 2 MiB-aligned, untouched, and in huge pages where the system has them. Null when
/// memory is out. `capacity` must be a multiple of 4 KiB from 2 MiB on.
void* aligned_allocate(size_t capacity);
void aligned_free(void* data, size_t capacity);

/// A pool that keeps at most `max_idle_bytes` of returned blocks. Its blocks may outlive the owner's handle.
Pool* pool_create(size_t max_idle_bytes);
void pool_release(Pool* pool);

/// A block of at least `bytes`, returned earlier or new, its contents undefined; null when memory is out.
Block* pool_take(Pool* pool, size_t bytes);
void pool_give(Block* block);

/// Bytes in returned blocks, and in all blocks.
void pool_bytes(Pool* pool, size_t* idle, size_t* total);

}  // namespace sparselift
