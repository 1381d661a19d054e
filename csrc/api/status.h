// The last error of each thread.
#pragma once

#include "sparselift_cpu.h"

namespace sparselift {

/// Keeps the formatted text for sl_error_text and returns `status`.
sl_status fail(sl_status status, const char* format, ...) __attribute__((format(printf, 2, 3)));

}  // namespace sparselift
