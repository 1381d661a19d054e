// The epilogue kernels, compiled for any processor.
#include <cstddef>

#include "epilogue.h"

namespace sparselift {
namespace portable {

#include "epilogue_body.h"

}  // namespace portable
}  // namespace sparselift
