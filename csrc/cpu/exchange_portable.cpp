// The exchange kernels for any processor, in the compiler's own vectors.
#include "exchange.h"

namespace sparselift {
namespace portable {

typedef float Vec __attribute__((vector_size(16)));
typedef float Unaligned __attribute__((vector_size(16), aligned(4), may_alias));
using Mask = int;      // leading lanes
constexpr int kWidth = 4;

static inline Vec zero() { return Vec{0, 0, 0, 0}; }
static inline Vec splat(float x) { return Vec{x, x, x, x}; }
static inline Vec load(const float* p) { return *reinterpret_cast<const Unaligned*>(p); }
static inline Vec load_part(const float* p, Mask lanes) {
    Vec x = zero();
    for (int i = 0; i < lanes; ++i) x[i] = p[i];
    return x;
}
static inline void store(float* p, Vec x) { *reinterpret_cast<Unaligned*>(p) = x; }
static inline void store_part(float* p, Mask lanes, Vec x) {
    for (int i = 0; i < lanes; ++i) p[i] = x[i];
}
static inline Vec add(Vec a, Vec b) { return a + b; }
static inline Vec sub(Vec a, Vec b) { return a - b; }
static inline Vec mul(Vec a, Vec b) { return a * b; }
static inline Vec min(Vec a, Vec b) { return b < a ? b : a; }
static inline Vec max(Vec a, Vec b) { return b > a ? b : a; }
static inline float sum(Vec x) { return (x[0] + x[2]) + (x[1] + x[3]); }
static inline float least(Vec x) {
    const Vec two = min(x, Vec{x[2], x[3], x[2], x[3]});
    return two[1] < two[0] ? two[1] : two[0];
}
static inline float greatest(Vec x) {
    const Vec two = max(x, Vec{x[2], x[3], x[2], x[3]});
    return two[1] > two[0] ? two[1] : two[0];
}
static inline Mask mask_for(int64_t lanes) { return static_cast<Mask>(lanes); }

#include "half_portable.h"

typedef uint8_t Bytes __attribute__((vector_size(4)));
/// Of numbers in [0, 255], nearest, ties to even: the sum with 1.5 * 2^23 has it in its last bits.
static inline void store_bytes(uint8_t* p, Vec x) {
    const Bytes found = __builtin_convertvector(reinterpret_cast<Words>(x + 0x1.8p23f), Bytes);
    __builtin_memcpy(p, &found, sizeof found);
}
static inline Vec load_bytes(const uint8_t* p) {
    Bytes x;
    __builtin_memcpy(&x, p, sizeof x);
    return __builtin_convertvector(x, Vec);
}

#include "exchange_body.h"

}  // namespace portable
}  // namespace sparselift
