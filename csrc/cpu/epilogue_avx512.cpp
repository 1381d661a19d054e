// The epilogue kernels, compiled for AVX-512 (F, VL, BW, DQ).
#include <cstddef>

#include "epilogue.h"

namespace sparselift {
namespace avx512 {

#include "epilogue_body.h"

}  // namespace avx512
}  // namespace sparselift
