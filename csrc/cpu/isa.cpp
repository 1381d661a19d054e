// Which instruction sets run here.
#include "../api/sparselift_cpu.h"

extern "C" int32_t sl_isa_runnable(int32_t isa) {
#ifdef __x86_64__
    if (isa == SL_ISA_AVX2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (isa == SL_ISA_AVX512)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && sl_isa_runnable(SL_ISA_AVX2);
#endif
    return isa == SL_ISA_PORTABLE;
}

extern "C" const char* sl_isa_name(int32_t isa) {
    switch (isa) {
        case SL_ISA_PORTABLE: return "portable";
        case SL_ISA_AVX2: return "avx2";
        case SL_ISA_AVX512: return "avx512";
        default: return "";
    }
}
