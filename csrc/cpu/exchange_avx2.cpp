// The exchange kernels for AVX2 with FMA and F16C.
#include "exchange.h"
#include "vec_avx2.h"

namespace sparselift {
namespace avx2 {

#include "exchange_body.h"

}  // namespace avx2
}  // namespace sparselift
