// What tests steer and count of the emulator, for ctypes.
#include <new>
#include <stdexcept>
#include <string>

#include "simt/machine.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

/// 0, or 1 for a text that is no schedule.
EXPORTED int simt_set_schedule(const char* text) { return sparselift::simt::set_schedule(text) ? 0 : 1; }

/// Of this OS thread since the last call.
EXPORTED void simt_take_counts(std::int64_t* launches, std::int64_t* copies, std::int64_t* synchronizations) {
    *launches = sparselift::simt::counts.launches;
    *copies = sparselift::simt::counts.copies;
    *synchronizations = sparselift::simt::counts.synchronizations;
    sparselift::simt::counts = {};
}

/// A line "name count" for each kernel that this OS thread has launched since the last call; valid until the next one.
EXPORTED const char* simt_take_launches() {
    static thread_local std::string text;
    text.clear();
    for (const auto& [name, count] : sparselift::simt::launches_by_name) text += name + " " + std::to_string(count) + "\n";
    sparselift::simt::launches_by_name.clear();
    return text.c_str();
}

/// Lets the next launch of this OS thread throw: std::bad_alloc, or another exception with a text.
EXPORTED void simt_throw_at_launch(int bad_alloc) {
    if (bad_alloc) sparselift::simt::at_next_launch = [] { throw std::bad_alloc(); };
    else sparselift::simt::at_next_launch = [] { throw std::logic_error("thrown by a test"); };
}

/// Whether the vector accesses of this OS thread are counted from now on.
EXPORTED void simt_count_traffic(int on) { sparselift::simt::counts_traffic = on != 0; }

/// Bytes that warps asked for and sectors that they touched, of this OS thread since the last call.
EXPORTED void simt_take_traffic(std::int64_t* load_bytes, std::int64_t* load_sectors, std::int64_t* store_bytes, std::int64_t* store_sectors) {
    sparselift::simt::Counts& counts = sparselift::simt::counts;
    *load_bytes = counts.loads.bytes;
    *load_sectors = counts.loads.sectors;
    *store_bytes = counts.stores.bytes;
    *store_sectors = counts.stores.sectors;
    counts.loads = counts.stores = {};
}
