// What tests steer and count of the emulator, for ctypes.
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
