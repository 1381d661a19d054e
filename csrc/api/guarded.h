// The one place where exceptions become a status.
#pragma once

#include <exception>
#include <new>

#include "status.h"

namespace sparselift {

template <typename Body>
sl_status guarded(const Body& body) {
    try {
        return body();
    } catch (const std::bad_alloc&) {
        return fail(SL_NO_MEMORY, "out of memory");
    } catch (const std::exception& error) {
        return fail(SL_BAD_ARGUMENT, "%s", error.what());
    }
}

}  // namespace sparselift
