// Eight weights of each format as eight lanes of float32, for x86-64 processors with AVX2 and
// FMA. Every function here and every function that calls one is compiled for both, whatever the
// rest of the program is compiled for; has_avx2() in weights_avx2.h says whether they may run.
#pragma once

#if defined(__x86_64__)

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "kernels/cpu/lanes.h"

#define KDTREE_AVX2 __attribute__((target("avx2,fma")))
#define KDTREE_AVX2_INLINE inline __attribute__((target("avx2,fma"), always_inline))

namespace kdtree::avx2 {

KDTREE_AVX2_INLINE __m256 decode_8(const float* from) {
  return _mm256_loadu_ps(from);
}

// bf16. Both halves of the register get all eight, and a shuffle within halves puts each into the
// upper bytes of its lane: one operation, where widening takes two.
KDTREE_AVX2_INLINE __m256 decode_8(const std::uint16_t* from) {
  constexpr char kZero = -128;
  const __m256i places = _mm256_setr_epi8(
      kZero, kZero, 0, 1, kZero, kZero, 2, 3, kZero, kZero, 4, 5, kZero, kZero, 6, 7,  //
      kZero, kZero, 8, 9, kZero, kZero, 10, 11, kZero, kZero, 12, 13, kZero, kZero, 14, 15);
  const __m256i halves =
      _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  return _mm256_castsi256_ps(_mm256_shuffle_epi8(halves, places));
}

// The `count` < 8 elements from `from` on, zeros behind them.
template <class Element>
KDTREE_AVX2_INLINE __m256 decode_tail(const Element* from, std::int64_t count) {
  Element padded[kLanes] = {};
  std::memcpy(padded, from, static_cast<std::size_t>(count) * sizeof(Element));
  return decode_8(padded);
}

// The eight codes of a word times `scale`, which all lanes hold.
KDTREE_AVX2_INLINE __m256 decode_8(const std::uint32_t* word, __m256 scale) {
  const __m256i shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
  const __m256i words = _mm256_set1_epi32(static_cast<int>(*word));
  const __m256i codes = _mm256_and_si256(_mm256_srlv_epi32(words, shifts), _mm256_set1_epi32(15));
  const __m256i integers = _mm256_sub_epi32(codes, _mm256_set1_epi32(8));
  return _mm256_mul_ps(_mm256_cvtepi32_ps(integers), scale);
}

// One value in all lanes.
KDTREE_AVX2_INLINE __m256 broadcast(const float* from) {
  return _mm256_broadcast_ss(from);
}

KDTREE_AVX2_INLINE __m256 broadcast(const std::uint16_t* from) {  // bf16
  const __m256i halves = _mm256_set1_epi16(static_cast<short>(*from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(halves, 16));
}

}  // namespace kdtree::avx2

#endif
