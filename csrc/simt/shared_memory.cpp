#include "shared_memory.h"

#include <algorithm>
#include <cstring>

namespace sparselift::simt {
namespace {

constexpr int kPoison = 0xff;          // NaN as a float, -1 as an integer
constexpr std::size_t kWordBytes = 4;

std::uint8_t bytes_in_word(std::size_t word, std::size_t offset, std::size_t bytes) {
    std::uint8_t mask = 0;
    for (std::size_t i = 0; i < kWordBytes; ++i) {
        const std::size_t byte = word * kWordBytes + i;
        if (byte >= offset && byte < offset + bytes) mask |= static_cast<std::uint8_t>(1u << i);
    }
    return mask;
}

bool conflict(Access a, Access b) { return !(a == b && a != Access::write); }

}  // namespace

void SharedMemory::start_block(std::size_t dynamic_bytes) {
    if (bytes_.empty()) {
        bytes_.assign(kBlockBytes, kPoison);
        words_.resize(kBlockBytes / kWordBytes);
        clocks_.resize(kMaxThreads / 32);
    }
    std::memset(bytes_.data(), kPoison, std::max(dynamic_bytes, used_bytes_));
    dynamic_bytes_ = used_bytes_ = dynamic_bytes;
    arrays_.clear();
    ++block_;
    ++interval_;
}

std::ptrdiff_t SharedMemory::static_array(const void* key, std::size_t bytes, std::size_t alignment) {
    for (const StaticArray& array : arrays_)
        if (array.key == key) return static_cast<std::ptrdiff_t>(array.offset);
    const std::size_t offset = (used_bytes_ + alignment - 1) / alignment * alignment;
    if (offset + bytes > limit() || offset + bytes - dynamic_bytes_ > kStaticBytes) return -1;
    arrays_.push_back({key, offset});
    used_bytes_ = offset + bytes;
    return static_cast<std::ptrdiff_t>(offset);
}

SharedMemory::Clocks& SharedMemory::clocks_of(int warp) {
    Clocks& clocks = clocks_[static_cast<std::size_t>(warp)];
    if (clocks.block != block_) {
        clocks.block = block_;
        std::memset(clocks.known, 0, sizeof clocks.known);
        for (int lane = 0; lane < 32; ++lane) clocks.known[lane][lane] = 1;
    }
    return clocks;
}

void SharedMemory::warp_barrier(int warp, unsigned lanes) {
    Clocks& clocks = clocks_of(warp);
    std::uint32_t joined[32] = {};
    for (int lane = 0; lane < 32; ++lane)
        if (lanes >> lane & 1)
            for (int other = 0; other < 32; ++other) joined[other] = std::max(joined[other], clocks.known[lane][other]);
    for (int lane = 0; lane < 32; ++lane)
        if (lanes >> lane & 1) {
            std::memcpy(clocks.known[lane], joined, sizeof joined);
            ++clocks.known[lane][lane];
        }
}

bool SharedMemory::is_ordered(const Record& earlier, int thread) {
    if (earlier.thread == thread) return true;
    if (earlier.thread / 32 != thread / 32) return false;
    return clocks_of(thread / 32).known[thread % 32][earlier.thread % 32] >= earlier.clock;
}

bool SharedMemory::access_word(Word& word, const Record& record, Race& race) {
    if (word.interval != interval_) {
        word.interval = interval_;
        word.records.clear();
    }
    for (std::size_t i = 0; i < word.records.size();) {
        const Record& earlier = word.records[i];
        const bool ordered = is_ordered(earlier, record.thread);
        if (!ordered && (earlier.bytes & record.bytes) && conflict(earlier.access, record.access)) {
            race = {earlier.thread, earlier.access, earlier.site};
            return true;
        }
        // Whoever comes after this access and conflicts with `earlier` conflicts with this one too: `earlier` need not be kept.
        const bool stronger = record.access == earlier.access || record.access == Access::write;
        if (ordered && stronger && (earlier.bytes & ~record.bytes) == 0) {
            word.records[i] = word.records.back();
            word.records.pop_back();
        } else {
            ++i;
        }
    }
    word.records.push_back(record);
    return false;
}

bool SharedMemory::access(int thread, Access access, std::size_t offset, std::size_t bytes, Site site, Race& race) {
    const std::uint32_t clock = clocks_of(thread / 32).known[thread % 32][thread % 32];
    for (std::size_t i = offset / kWordBytes; i * kWordBytes < offset + bytes; ++i) {
        Word& word = words_[i];
        const std::uint8_t mask = bytes_in_word(i, offset, bytes);
        if (access_word(word, {clock, static_cast<std::uint16_t>(thread), mask, access, site}, race)) return true;
        if (access == Access::read) continue;
        if (word.block != block_) word.written = 0;
        word.block = block_;
        word.written |= mask;
    }
    return false;
}

bool SharedMemory::is_written(std::size_t offset, std::size_t bytes) const {
    for (std::size_t i = offset / kWordBytes; i * kWordBytes < offset + bytes; ++i) {
        const std::uint8_t mask = bytes_in_word(i, offset, bytes);
        if (words_[i].block != block_ || (words_[i].written & mask) != mask) return false;
    }
    return true;
}

}  // namespace sparselift::simt
