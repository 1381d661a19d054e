// What a packed buffer looks like: a prologue of 32 bytes, an entry of 32 bytes a part, then the parts, each from a multiple of 16 bytes on
// and zero-filled up to the next. All numbers are little-endian.
//
//   prologue   u32 magic, u32 version, i64 parts, i64 bytes of the buffer, u32 CRC-32 of all headers with this field 0, u32 0
//   entry      i64 rows, i64 offset of the part, i64 its bytes without the filling, i32 columns, i32 wire
//   part       float32, float16, bfloat16: the rows, one after the other. int8: scale and bias, float32, of every row (zero-filled to a
//              multiple of 16 bytes), then the rows of unsigned bytes
//
// A receiver knows what it waits for. It compares headers, and no number out of a buffer becomes an address or a size.
#pragma once

#include <cstdint>
#include <cstring>

#include "sparselift_exchange.h"
#include "status.h"

namespace sparselift {

constexpr uint32_t kPackedMagic = 0x4b504c53;      // "SLPK"
constexpr uint32_t kPackedVersion = 1;
constexpr int64_t kPackedAlignment = 16;
constexpr int64_t kRowScaleBytes = 8;              // scale and bias of an int8 row
constexpr int64_t kMaxPackedBytes = INT64_C(1) << 48;

struct PackedPrologue {
    uint32_t magic, version;
    int64_t num_parts, bytes;
    uint32_t checksum, reserved;
};

struct PackedEntry {
    int64_t rows, offset, bytes;
    int32_t dim, wire;
};

static_assert(sizeof(PackedPrologue) == 32 && sizeof(PackedEntry) == 32);

inline int64_t packed_aligned(int64_t bytes) { return (bytes + kPackedAlignment - 1) / kPackedAlignment * kPackedAlignment; }

inline int64_t wire_bytes(int64_t wire) { return wire == SL_WIRE_FLOAT32 ? 4 : wire == SL_WIRE_INT8 ? 1 : 2; }

/// Before the elements of a part: scales and biases.
inline int64_t packed_scale_bytes(int64_t rows, int64_t wire) { return wire == SL_WIRE_INT8 ? packed_aligned(rows * kRowScaleBytes) : 0; }

inline PackedEntry packed_entry(const sl_part& part, int64_t offset) {
    const int64_t bytes = packed_scale_bytes(part.num_rows, part.wire) + part.num_rows * part.dim * wire_bytes(part.wire);
    return {part.num_rows, offset, bytes, static_cast<int32_t>(part.dim), static_cast<int32_t>(part.wire)};
}

inline int64_t packed_header_bytes(int64_t num_parts) { return (1 + num_parts) * 32; }

inline bool has_packed_form(const sl_part& part) {
    if (part.num_rows < 0 || part.dim < 0 || part.dim > INT32_MAX || part.wire < 0 || part.wire >= SL_NUM_WIRES) return false;
    return part.num_rows <= kMaxPackedBytes / (kRowScaleBytes + 4 * part.dim);
}

/// Calls visit(part, entry) for every part, and returns the buffer's size; -1 where a part has no packed form.
template <typename Visit>
int64_t lay_out_packed(const sl_part* parts, int64_t num_parts, const Visit& visit) {
    int64_t offset = packed_header_bytes(num_parts);
    for (int64_t i = 0; i < num_parts; ++i) {
        if (!has_packed_form(parts[i])) return -1;
        const PackedEntry entry = packed_entry(parts[i], offset);
        visit(i, entry);
        offset += packed_aligned(entry.bytes);
        if (offset > kMaxPackedBytes) return -1;
    }
    return offset;
}

inline int64_t packed_bytes(const sl_part* parts, int64_t num_parts) {
    return lay_out_packed(parts, num_parts, [](int64_t, const PackedEntry&) {});
}

/// The CRC-32 of zlib and gzip, a byte at a time.
class Checksum {
  public:
    void add(const void* data, size_t bytes) {
        static const Table table;
        for (const auto* p = static_cast<const unsigned char*>(data); bytes > 0; --bytes) state_ = table.of[(state_ ^ *p++) & 255] ^ state_ >> 8;
    }
    uint32_t value() const { return ~state_; }

  private:
    struct Table {
        uint32_t of[256];
        Table() {
            for (uint32_t i = 0; i < 256; ++i) {
                uint32_t value = i;
                for (int bit = 0; bit < 8; ++bit) value = value >> 1 ^ (value & 1 ? 0xedb88320u : 0);
                of[i] = value;
            }
        }
    };
    uint32_t state_ = ~0u;
};

/// The prologue of these parts, which have packed forms.
inline PackedPrologue packed_prologue(const sl_part* parts, int64_t num_parts) {
    PackedPrologue prologue{kPackedMagic, kPackedVersion, num_parts, packed_bytes(parts, num_parts), 0, 0};
    Checksum checksum;
    checksum.add(&prologue, sizeof prologue);
    lay_out_packed(parts, num_parts, [&](int64_t, const PackedEntry& entry) { checksum.add(&entry, sizeof entry); });
    prologue.checksum = checksum.value();
    return prologue;
}

/// SL_OK where a buffer of that size, at that address, can hold these parts.
inline sl_status check_packed(const sl_part* parts, int64_t num_parts, const void* buffer, int64_t buffer_bytes) {
    const int64_t bytes = packed_bytes(parts, num_parts);
    if (bytes < 0) return fail(SL_BAD_ARGUMENT, "parts must have sizes of at least 0, a known wire, and 2**48 bytes at most");
    if (buffer_bytes < bytes)
        return fail(SL_BAD_BUFFER, "a buffer of these parts has %lld bytes; got %lld", static_cast<long long>(bytes),
                    static_cast<long long>(buffer_bytes));
    if (reinterpret_cast<uintptr_t>(buffer) % kPackedAlignment != 0)
        return fail(SL_BAD_ARGUMENT, "a packed buffer must begin at a multiple of %lld bytes", static_cast<long long>(kPackedAlignment));
    return SL_OK;
}

/// The fields of a header, for messages: those of the prologue, then those of an entry.
inline const char* packed_field(bool of_part, int64_t word) {
    static const char* const prologue[] = {"magic and version", "number of parts", "bytes", "checksum"};
    static const char* const entry[] = {"rows", "offset", "bytes", "columns and wire"};
    return (of_part ? entry : prologue)[word];
}

/// A header of another buffer. `part` -1: its prologue. Fields are words of 64 bits.
inline sl_status wrong_header(int64_t part, int64_t word, int64_t found, int64_t expected) {
    const auto got = static_cast<long long>(found), wanted = static_cast<long long>(expected);
    if (part < 0) return fail(SL_BAD_BUFFER, "the header says %s %lld; expected %lld", packed_field(false, word), got, wanted);
    return fail(SL_BAD_BUFFER, "the header of part %lld says %s %lld; expected %lld", static_cast<long long>(part), packed_field(true, word), got,
                wanted);
}

}  // namespace sparselift
