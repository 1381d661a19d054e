// Barriers, shuffles and votes.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "machine.h"

namespace sparselift::simt {

template <typename T>
std::uint64_t to_bits(T value) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 8, "a lane exchanges at most 8 bytes");
    std::uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    return bits;
}

template <typename T>
T from_bits(std::uint64_t bits) {
    T value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

/// What the lanes of a collective bring, for `resolve`. A shuffle's source may lie outside its segment: then a lane keeps its own value.
void resolve_shfl(Thread* warp, unsigned lanes);
void resolve_shfl_up(Thread* warp, unsigned lanes);
void resolve_shfl_down(Thread* warp, unsigned lanes);
void resolve_shfl_xor(Thread* warp, unsigned lanes);
void resolve_ballot(Thread* warp, unsigned lanes);
void resolve_match_any(Thread* warp, unsigned lanes);
void resolve_add(Thread* warp, unsigned lanes);
void resolve_min(Thread* warp, unsigned lanes);
void resolve_max(Thread* warp, unsigned lanes);
void resolve_min_signed(Thread* warp, unsigned lanes);
void resolve_max_signed(Thread* warp, unsigned lanes);

inline constexpr Collective kSyncwarp{"__syncwarp", nullptr, false, true};
inline constexpr Collective kShfl{"__shfl_sync", resolve_shfl, true, false};
inline constexpr Collective kShflUp{"__shfl_up_sync", resolve_shfl_up, true, false};
inline constexpr Collective kShflDown{"__shfl_down_sync", resolve_shfl_down, true, false};
inline constexpr Collective kShflXor{"__shfl_xor_sync", resolve_shfl_xor, true, false};
inline constexpr Collective kBallot{"__ballot_sync", resolve_ballot, true, false};
inline constexpr Collective kAny{"__any_sync", resolve_ballot, true, false};
inline constexpr Collective kAll{"__all_sync", resolve_ballot, true, false};
inline constexpr Collective kMatchAny{"__match_any_sync", resolve_match_any, true, false};
inline constexpr Collective kReduceAdd{"__reduce_add_sync", resolve_add, true, false};
inline constexpr Collective kReduceMin{"__reduce_min_sync", resolve_min, true, false};
inline constexpr Collective kReduceMax{"__reduce_max_sync", resolve_max, true, false};
inline constexpr Collective kReduceMinSigned{"__reduce_min_sync", resolve_min_signed, true, false};
inline constexpr Collective kReduceMaxSigned{"__reduce_max_sync", resolve_max_signed, true, false};

inline std::uint64_t meet(const Collective& collective, unsigned lanes, std::uint64_t value, Site site, int operand = 0, int width = 32) {
    return meet_warp({collective.name, &collective, site, lanes, value, operand, width, 0});
}

template <typename T>
T shuffle(const Collective& collective, unsigned lanes, T value, int operand, int width, Site site) {
    if (width < 1 || width > 32 || (width & (width - 1)))
        fault(cudaErrorLaunchFailure, site, "%s: width %d is no power of two up to 32", collective.name, width);
    return from_bits<T>(meet(collective, lanes, to_bits(value), site, operand, width));
}

}  // namespace sparselift::simt

/// The last parameter of what a kernel calls: the line of the call.
#define SPARSELIFT_SIMT_SITE ::sparselift::simt::Site site = ::sparselift::simt::Site::here()

inline void __syncthreads(SPARSELIFT_SIMT_SITE) {
    sparselift::simt::meet_block("__syncthreads", false, site);
}

inline int __syncthreads_count(int predicate, SPARSELIFT_SIMT_SITE) {
    return sparselift::simt::meet_block("__syncthreads_count", predicate != 0, site).count;
}

inline int __syncthreads_or(int predicate, SPARSELIFT_SIMT_SITE) {
    return sparselift::simt::meet_block("__syncthreads_or", predicate != 0, site).count > 0;
}

inline int __syncthreads_and(int predicate, SPARSELIFT_SIMT_SITE) {
    const sparselift::simt::Vote vote = sparselift::simt::meet_block("__syncthreads_and", predicate != 0, site);
    return vote.count == vote.threads;
}

inline void __syncwarp(unsigned lanes = 0xffffffff, SPARSELIFT_SIMT_SITE) {
    sparselift::simt::meet(sparselift::simt::kSyncwarp, lanes, 0, site);
}

template <typename T>
T __shfl_sync(unsigned lanes, T value, int source, int width = 32, SPARSELIFT_SIMT_SITE) {
    return sparselift::simt::shuffle(sparselift::simt::kShfl, lanes, value, source, width, site);
}

template <typename T>
T __shfl_up_sync(unsigned lanes, T value, unsigned delta, int width = 32, SPARSELIFT_SIMT_SITE) {
    return sparselift::simt::shuffle(sparselift::simt::kShflUp, lanes, value, static_cast<int>(delta), width, site);
}

template <typename T>
T __shfl_down_sync(unsigned lanes, T value, unsigned delta, int width = 32, SPARSELIFT_SIMT_SITE) {
    return sparselift::simt::shuffle(sparselift::simt::kShflDown, lanes, value, static_cast<int>(delta), width, site);
}

template <typename T>
T __shfl_xor_sync(unsigned lanes, T value, int mask, int width = 32, SPARSELIFT_SIMT_SITE) {
    return sparselift::simt::shuffle(sparselift::simt::kShflXor, lanes, value, mask, width, site);
}

inline unsigned __ballot_sync(unsigned lanes, int predicate, SPARSELIFT_SIMT_SITE) {
    return static_cast<unsigned>(sparselift::simt::meet(sparselift::simt::kBallot, lanes, predicate != 0, site));
}

inline int __any_sync(unsigned lanes, int predicate, SPARSELIFT_SIMT_SITE) {
    return sparselift::simt::meet(sparselift::simt::kAny, lanes, predicate != 0, site) != 0;
}

inline int __all_sync(unsigned lanes, int predicate, SPARSELIFT_SIMT_SITE) {
    return sparselift::simt::meet(sparselift::simt::kAll, lanes, predicate != 0, site) == lanes;
}

template <typename T>
unsigned __match_any_sync(unsigned lanes, T value, SPARSELIFT_SIMT_SITE) {
    return static_cast<unsigned>(sparselift::simt::meet(sparselift::simt::kMatchAny, lanes, sparselift::simt::to_bits(value), site));
}

inline unsigned __reduce_add_sync(unsigned lanes, unsigned value, SPARSELIFT_SIMT_SITE) {
    return static_cast<unsigned>(sparselift::simt::meet(sparselift::simt::kReduceAdd, lanes, value, site));
}

inline int __reduce_add_sync(unsigned lanes, int value, SPARSELIFT_SIMT_SITE) {
    return static_cast<int>(__reduce_add_sync(lanes, static_cast<unsigned>(value), site));
}

inline unsigned __reduce_min_sync(unsigned lanes, unsigned value, SPARSELIFT_SIMT_SITE) {
    return static_cast<unsigned>(sparselift::simt::meet(sparselift::simt::kReduceMin, lanes, value, site));
}

inline unsigned __reduce_max_sync(unsigned lanes, unsigned value, SPARSELIFT_SIMT_SITE) {
    return static_cast<unsigned>(sparselift::simt::meet(sparselift::simt::kReduceMax, lanes, value, site));
}

inline int __reduce_min_sync(unsigned lanes, int value, SPARSELIFT_SIMT_SITE) {
    using namespace sparselift::simt;
    return from_bits<int>(meet(kReduceMinSigned, lanes, to_bits(value), site));
}

inline int __reduce_max_sync(unsigned lanes, int value, SPARSELIFT_SIMT_SITE) {
    using namespace sparselift::simt;
    return from_bits<int>(meet(kReduceMaxSigned, lanes, to_bits(value), site));
}

/// Which lanes run together is the hardware's choice of the moment. Kernels carry their masks.
unsigned __activemask() = delete;
