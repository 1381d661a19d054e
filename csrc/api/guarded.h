// The one place where exceptions become a status. Code that refuses arguments returns their status, or throws std::invalid_argument where it
// returns something else; anything else that is thrown is no fault of the caller.
#pragma once

#include <cstdint>
#include <exception>
#include <new>
#include <stdexcept>

#include "status.h"

namespace sparselift {

/// The status of `body`, or of what it threw.
template <typename Body>
sl_status guarded(const Body& body) {
    try {
        return body();
    } catch (const std::bad_alloc&) {
        return fail(SL_NO_MEMORY, "out of memory");
    } catch (const std::invalid_argument& error) {
        return fail(SL_BAD_ARGUMENT, "%s", error.what());
    } catch (const std::exception& error) {
        return fail(SL_INTERNAL, "internal error: %s", error.what());
    } catch (...) {
        return fail(SL_INTERNAL, "internal error: an exception that is no std::exception");
    }
}

/// The size that `body`, which returns a status, leaves in its argument; or minus the status of what went wrong.
template <typename Body>
int64_t guarded_size(const Body& body) {
    int64_t size = 0;
    const sl_status status = guarded([&] { return body(size); });
    return status == SL_OK ? size : -int64_t{status};
}

}  // namespace sparselift
