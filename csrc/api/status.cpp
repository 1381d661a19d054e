#include "status.h"

#include <cstdarg>
#include <cstdio>

namespace sparselift {
namespace {

thread_local char error_text[1536] = "";

}  // namespace

sl_status fail(sl_status status, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(error_text, sizeof error_text, format, arguments);
    va_end(arguments);
    return status;
}

}  // namespace sparselift

extern "C" const char* sl_error_text(void) { return sparselift::error_text; }
