// The shared memory of the block that runs: which bytes were written, and which accesses no barrier orders.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "schedule.h"

namespace sparselift::simt {

/// Where in a kernel something happens.
struct Site {
    const char* file = "";
    int line = 0;

    /// As a default argument: the line of the call.
    static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
};

enum class Access : std::uint8_t { read, write, atomic };

/// The first access that is not ordered with one under way.
struct Race {
    int thread;
    Access access;
    Site site;
};

/// Bytes and their history. Two accesses of a byte conflict unless both read or both are atomic, and conflicting accesses must be
/// ordered: by one thread's program, by a barrier of the block, or by __syncwarp among the lanes that it names. Shuffles and votes
/// order nothing, as in CUDA. Inside a block barrier's interval each lane has a vector clock over its warp (FastTrack, Flanagan and
/// Freund 2009, with sets of readers kept whole).
class SharedMemory {
  public:
    static constexpr std::size_t kBlockBytes = 163 << 10;     // of sm_80, the smallest of the architectures that are built for
    static constexpr std::size_t kStaticBytes = 48 << 10;

    /// Dynamic bytes that the next launch may have; without, static and dynamic ones have kStaticBytes together.
    static inline thread_local std::size_t asked_bytes = 0;

    /// Contents become poison, every byte unwritten; the first `dynamic_bytes` belong to the launch.
    void start_block(std::size_t dynamic_bytes);

    std::size_t dynamic_bytes() const { return dynamic_bytes_; }

    /// Of static and dynamic memory together.
    std::size_t limit() const { return dynamic_bytes_ <= asked_bytes ? kBlockBytes : kStaticBytes; }

    unsigned char* data() { return bytes_.data(); }

    /// The offset of the static array that `key` stands for; all threads of a block get one. Negative past the limits.
    std::ptrdiff_t static_array(const void* key, std::size_t bytes, std::size_t alignment);

    void block_barrier() { ++interval_; }
    void warp_barrier(int warp, unsigned lanes);

    /// Notes an access; true, and `race` filled, when it conflicts with an earlier one.
    bool access(int thread, Access access, std::size_t offset, std::size_t bytes, Site site, Race& race);

    /// Whether this block has written each of these bytes.
    bool is_written(std::size_t offset, std::size_t bytes) const;

  private:
    struct Record {
        std::uint32_t clock;
        std::uint16_t thread;
        std::uint8_t bytes;        // a bit for each byte of the word
        Access access;
        Site site;
    };
    struct Word {
        std::uint64_t interval = 0;    // of the records
        std::uint64_t block = 0;       // of `written`
        std::uint8_t written = 0;
        std::vector<Record> records;
    };
    struct StaticArray {
        const void* key;
        std::size_t offset;
    };
    struct Clocks {
        std::uint64_t block = 0;
        std::uint32_t known[32][32];   // known[l][m]: the last clock of lane m that lane l has synchronised with
    };

    Clocks& clocks_of(int warp);
    bool is_ordered(const Record& earlier, int thread);
    bool access_word(Word& word, const Record& record, Race& race);

    std::vector<unsigned char> bytes_;
    std::vector<Word> words_;
    std::vector<Clocks> clocks_;
    std::vector<StaticArray> arrays_;
    std::size_t dynamic_bytes_ = 0, used_bytes_ = 0;    // used: static arrays included
    std::uint64_t interval_ = 0, block_ = 0;    // counted over all blocks, so that nothing need be cleared between them
};

}  // namespace sparselift::simt
