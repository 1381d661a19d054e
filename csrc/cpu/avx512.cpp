// The kernels for AVX-512 (F, VL, BW, DQ).
#include "kernels.h"
#include "vec_avx512.h"

namespace sparselift {
namespace avx512 {

constexpr int kMaxVectors = 16;

#include "kernel_body.h"

}  // namespace avx512
}  // namespace sparselift
