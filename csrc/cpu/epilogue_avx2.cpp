// The epilogue kernels, compiled for AVX2.
#include <cstddef>

#include "epilogue.h"

namespace sparselift {
namespace avx2 {

#include "epilogue_body.h"

}  // namespace avx2
}  // namespace sparselift
