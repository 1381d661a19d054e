// CUDA's dim3 and short vectors, with CUDA's alignments.
#pragma once

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

struct uint3 {
    unsigned x, y, z;
};

#define SPARSELIFT_SIMT_VECTOR2(name, scalar, alignment)                                                             \
    struct alignas(alignment) name {                                                                                 \
        scalar x, y;                                                                                                 \
    };                                                                                                               \
    inline name make_##name(scalar x, scalar y) { return {x, y}; }
#define SPARSELIFT_SIMT_VECTOR4(name, scalar, alignment)                                                             \
    struct alignas(alignment) name {                                                                                 \
        scalar x, y, z, w;                                                                                           \
    };                                                                                                               \
    inline name make_##name(scalar x, scalar y, scalar z, scalar w) { return {x, y, z, w}; }

SPARSELIFT_SIMT_VECTOR2(char2, signed char, 2)
SPARSELIFT_SIMT_VECTOR2(uchar2, unsigned char, 2)
SPARSELIFT_SIMT_VECTOR2(short2, short, 4)
SPARSELIFT_SIMT_VECTOR2(ushort2, unsigned short, 4)
SPARSELIFT_SIMT_VECTOR2(int2, int, 8)
SPARSELIFT_SIMT_VECTOR2(uint2, unsigned, 8)
SPARSELIFT_SIMT_VECTOR2(float2, float, 8)
SPARSELIFT_SIMT_VECTOR2(longlong2, long long, 16)
SPARSELIFT_SIMT_VECTOR2(ulonglong2, unsigned long long, 16)
SPARSELIFT_SIMT_VECTOR2(double2, double, 16)
SPARSELIFT_SIMT_VECTOR4(char4, signed char, 4)
SPARSELIFT_SIMT_VECTOR4(uchar4, unsigned char, 4)
SPARSELIFT_SIMT_VECTOR4(short4, short, 8)
SPARSELIFT_SIMT_VECTOR4(ushort4, unsigned short, 8)
SPARSELIFT_SIMT_VECTOR4(int4, int, 16)
SPARSELIFT_SIMT_VECTOR4(uint4, unsigned, 16)
SPARSELIFT_SIMT_VECTOR4(float4, float, 16)

#undef SPARSELIFT_SIMT_VECTOR2
#undef SPARSELIFT_SIMT_VECTOR4
