// The exchange kernels for AVX-512 (F, VL, BW, DQ).
#include "exchange.h"
#include "vec_avx512.h"

namespace sparselift {
namespace avx512 {

#include "exchange_body.h"

}  // namespace avx512
}  // namespace sparselift
