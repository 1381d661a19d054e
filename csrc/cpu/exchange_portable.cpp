// The exchange kernels for any processor.
#include "exchange.h"
#include "vec_portable.h"

namespace sparselift {
namespace portable {

#include "exchange_body.h"

}  // namespace portable
}  // namespace sparselift
