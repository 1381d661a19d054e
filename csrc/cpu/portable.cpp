// The kernels for any processor, in the compiler's own vectors. A product and a sum with one rounding is a call of fmaf where
// the processor has no such instruction: slow, but the same bits everywhere.
#include "../api/sparselift_cpu.h"
#include "kernels.h"

namespace sparselift {
namespace portable {

typedef float Vec __attribute__((vector_size(16)));
typedef float Unaligned __attribute__((vector_size(16), aligned(4), may_alias));
using Mask = int;      // leading lanes
constexpr int kWidth = 4;
constexpr int kMaxVectors = 8;

inline Vec zero() { return Vec{0, 0, 0, 0}; }
inline Vec splat(float x) { return Vec{x, x, x, x}; }
inline Vec load(const float* p) { return *reinterpret_cast<const Unaligned*>(p); }
inline Vec load_part(const float* p, Mask lanes) {
    Vec x = zero();
    for (int i = 0; i < lanes; ++i) x[i] = p[i];
    return x;
}
inline void store(float* p, Vec x) { *reinterpret_cast<Unaligned*>(p) = x; }
inline void store_part(float* p, Mask lanes, Vec x) {
    for (int i = 0; i < lanes; ++i) p[i] = x[i];
}
inline void stream(float* p, Vec x) { store(p, x); }
inline void fence() {}
inline Vec add(Vec a, Vec b) { return a + b; }
inline Vec sub(Vec a, Vec b) { return a - b; }
inline Vec mul(Vec a, Vec b) { return a * b; }
inline Vec div(Vec a, Vec b) { return a / b; }
inline Vec fma(Vec a, Vec b, Vec c) {
    Vec x;
    for (int i = 0; i < kWidth; ++i) x[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return x;
}
inline Vec sqrt(Vec a) {
    Vec x;
    for (int i = 0; i < kWidth; ++i) x[i] = __builtin_sqrtf(a[i]);
    return x;
}
typedef int32_t Flags __attribute__((vector_size(16)));
inline Flags greater(Vec a, Vec b) { return a > b; }
inline Flags same_bits(Vec a, Vec b) { return reinterpret_cast<Flags>(a) == reinterpret_cast<Flags>(b); }
inline Vec select(Flags flags, Vec a, Vec b) { return flags ? a : b; }
inline Vec bits(int32_t x) { return reinterpret_cast<Vec>(Flags{x, x, x, x}); }
inline float sum(Vec x) { return (x[0] + x[2]) + (x[1] + x[3]); }
inline Mask mask_for(int64_t lanes) { return static_cast<Mask>(lanes); }

#include "half_portable.h"

inline Words words_of(Shorts x) { return __builtin_convertvector(x, Words); }
inline Shorts shorts_of(Words x) { return __builtin_convertvector(x, Shorts); }
inline Words truncated(Vec x) { return reinterpret_cast<Words>(__builtin_convertvector(x, Flags)); }
inline Vec converted(Words x) { return __builtin_convertvector(reinterpret_cast<Flags>(x), Vec); }

#include "kernel_body.h"

}  // namespace portable
}  // namespace sparselift
