#include "traffic.h"

#include <algorithm>
#include <tuple>

namespace sparselift::simt {
namespace {

constexpr std::uintptr_t kSectorBytes = 32;

struct Range {
    std::uintptr_t begin, end;
};

/// Sorted ranges: the bytes and the sectors of their union.
void add(const std::vector<Range>& ranges, Efficiency& total) {
    std::uintptr_t covered = 0, next_sector = 0;
    for (const Range& range : ranges) {
        if (range.end > covered) total.bytes += static_cast<std::int64_t>(range.end - std::max(range.begin, covered));
        covered = std::max(covered, range.end);
        const std::uintptr_t first = std::max(range.begin / kSectorBytes, next_sector), last = (range.end - 1) / kSectorBytes;
        if (last < first) continue;
        total.sectors += static_cast<std::int64_t>(last - first + 1);
        next_sector = last + 1;
    }
}

}  // namespace

void Traffic::start_block() {
    entries_.clear();
    visits_.resize(kMaxThreads);
    for (auto& visits : visits_) visits.clear();
}

void Traffic::note(int thread, bool is_store, const void* address, std::size_t bytes, Site site) {
    auto& visits = visits_[static_cast<std::size_t>(thread)];
    const auto is_here = [&](const Visits& known) { return known.site.line == site.line && known.site.file == site.file; };
    auto found = std::find_if(visits.begin(), visits.end(), is_here);
    if (found == visits.end()) found = visits.insert(visits.end(), {site, 0});
    const auto begin = reinterpret_cast<std::uintptr_t>(address);
    entries_.push_back({thread / 32, site, found->count++, is_store, begin, begin + bytes});
}

void Traffic::finish_block(Efficiency& loads, Efficiency& stores) {
    const auto key = [](const Entry& e) { return std::make_tuple(e.warp, e.site.file, e.site.line, e.turn); };
    std::sort(entries_.begin(), entries_.end(), [&](const Entry& a, const Entry& b) {
        return std::make_tuple(key(a), a.begin) < std::make_tuple(key(b), b.begin);
    });
    std::vector<Range> ranges;
    for (std::size_t i = 0; i < entries_.size(); ++i) {
        ranges.push_back({entries_[i].begin, entries_[i].end});
        if (i + 1 < entries_.size() && key(entries_[i]) == key(entries_[i + 1])) continue;
        add(ranges, entries_[i].is_store ? stores : loads);
        ranges.clear();
    }
}

}  // namespace sparselift::simt
