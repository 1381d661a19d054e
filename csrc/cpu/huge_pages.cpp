// Huge pages under memory that exists already: pointers stay, contents stay.
#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

#include "../api/sparselift_memory.h"

namespace {

constexpr uintptr_t kHugePage = uintptr_t{2} << 20;
constexpr int kMadvCollapse = 25;      // MADV_COLLAPSE, Linux 6.1; older headers lack it

/// PAGEMAP_SCAN of linux/fs.h, Linux 6.7.
struct Region {
    uint64_t start, end, categories;
};
struct Scan {
    uint64_t size, flags, start, end, walk_end, regions, num_regions, max_pages;
    uint64_t inverted, wanted, any_of, returned;
};
constexpr uint64_t kPageIsHuge = 1 << 6;
#define SL_PAGEMAP_SCAN _IOWR('f', 16, Scan)

}  // namespace

extern "C" int64_t sl_huge_bytes(uintptr_t begin, uintptr_t end) {
    const int pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    if (pagemap < 0) return -1;
    Region regions[64];
    int64_t bytes = 0;
    while (begin < end) {
        Scan scan{};
        scan.size = sizeof scan;
        scan.start = begin;
        scan.end = end;
        scan.regions = reinterpret_cast<uintptr_t>(regions);
        scan.num_regions = sizeof regions / sizeof *regions;
        scan.wanted = scan.returned = kPageIsHuge;
        const int found = ioctl(pagemap, SL_PAGEMAP_SCAN, &scan);
        if (found < 0) {
            bytes = -1;
            break;
        }
        for (int i = 0; i < found; ++i) bytes += static_cast<int64_t>(regions[i].end - regions[i].start);
        begin = static_cast<uintptr_t>(scan.walk_end);
    }
    close(pagemap);
    return bytes;
}

extern "C" int32_t sl_collapse(uintptr_t begin, uintptr_t end) {
    if (madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE) != 0) return errno;
    int32_t failure = 0;
    for (uintptr_t at = begin; at < end; at += kHugePage)      // one by one: a failure stops a longer call half-way
        if (madvise(reinterpret_cast<void*>(at), kHugePage, kMadvCollapse) != 0 && !failure) failure = errno;
    return failure;
}

extern "C" int32_t sl_split(uintptr_t begin, uintptr_t end) {
    if (madvise(reinterpret_cast<void*>(begin), end - begin, MADV_NOHUGEPAGE) != 0) return errno;
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    for (uintptr_t at = begin; at < end; at += kHugePage) {
        // A mapping that starts inside a huge page makes the kernel map that by small pages. Setting a page apart for core dumps and
        // joining it again does so without touching protection: other threads may read and write all along.
        auto* inner = reinterpret_cast<void*>(at + page);
        if (madvise(inner, page, MADV_DONTDUMP) != 0 || madvise(inner, page, MADV_DODUMP) != 0) return errno;
    }
    return 0;
}
