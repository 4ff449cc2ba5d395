// Vectors of eight 32-bit lanes, whatever kLanes is: a block's 32 columns are four of them as floats and one
// as bytes. What is done for several rows at once is written with them.
#pragma once

#include "simd.h"

#pragma GCC diagnostic ignored "-Wpsabi"  // how vectors are passed: all that pass any are inlined

namespace quire::simd {

using Eight = int32_t __attribute__((vector_size(32)));
using UnsignedEight = uint32_t __attribute__((vector_size(32)));  // its sums may wrap
using EightFloats = float __attribute__((vector_size(32)));
using SixteenShorts = int16_t __attribute__((vector_size(32)));

// The bits of eight floats
inline Eight load_eight(const float* p) {
  Eight v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// The bits of the smallest powers of two that are no less than `v`: positive normal floats (0 for 0).
inline Eight next_power_of_two(const EightFloats& v) {
  return reinterpret_cast<Eight>((reinterpret_cast<UnsignedEight>(v) + 0x7fffffu) & ~0x7fffffu);
}

// Those of 1 / v of powers of two within 2^-126 and 2^126
inline Eight inverse_of_power(const Eight& v) {
  return reinterpret_cast<Eight>(0x7f000000u - reinterpret_cast<UnsignedEight>(v));
}

// Signed bytes with an even or an odd index, as words
inline Eight even_words(const Eight& v) {
  return reinterpret_cast<Eight>((reinterpret_cast<SixteenShorts>(v) << 8) >> 8);
}
inline Eight odd_words(const Eight& v) { return reinterpret_cast<Eight>(reinterpret_cast<SixteenShorts>(v) >> 8); }

#if defined(__AVX2__)
// 32 floats times those of `factors`, rounded to the nearest (ties to even), as bytes
inline Eight to_bytes(const float* x, const Eight& factors) {
  __m256i v[4];
  for (int i = 0; i < 4; ++i) {
    v[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), (__m256)factors));
  }
  const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
  return (Eight)_mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

// The sums of each lane's four signed bytes
inline Eight quad_sums(const Eight& bytes) {
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), (__m256i)bytes);
  return (Eight)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}

// turned[i] = lane i of the four rows, then lane i + 4 of them
inline void turn(const Eight (&rows)[4], Eight (&turned)[4]) {
  const __m256i* v = (const __m256i*)rows;
  const __m256i low01 = _mm256_unpacklo_epi32(v[0], v[1]), high01 = _mm256_unpackhi_epi32(v[0], v[1]);
  const __m256i low23 = _mm256_unpacklo_epi32(v[2], v[3]), high23 = _mm256_unpackhi_epi32(v[2], v[3]);
  turned[0] = (Eight)_mm256_unpacklo_epi64(low01, low23);
  turned[1] = (Eight)_mm256_unpackhi_epi64(low01, low23);
  turned[2] = (Eight)_mm256_unpacklo_epi64(high01, high23);
  turned[3] = (Eight)_mm256_unpackhi_epi64(high01, high23);
}

inline Eight swap_halves(const Eight& v) {
  return (Eight)_mm256_permute2x128_si256((__m256i)v, (__m256i)v, 1);
}

// In each half its lane kLane, repeated
template <int kLane>
inline Eight repeat(const Eight& v) {
  return (Eight)_mm256_shuffle_epi32((__m256i)v, kLane * 0x55);
}

// The first kCount lanes of the lower half
template <int kCount>
inline void store_low(void* p, const Eight& v) {
  const __m128i half = _mm256_castsi256_si128((__m256i)v);
  if constexpr (kCount == 4) {
    _mm_storeu_si128((__m128i*)p, half);
  } else {
    std::memcpy(p, &half, 4 * kCount);
  }
}
#else
inline Eight to_bytes(const float* x, const Eight& factors) {
  const float rounder = 12582912.0f;  // 1.5 * 2^23: adding it puts the nearest integer into the low bits
  uint8_t bytes[32];
  float factor;
  std::memcpy(&factor, &factors, sizeof factor);
  for (int i = 0; i < 32; ++i) bytes[i] = static_cast<uint8_t>(bits_of_float(x[i] * factor + rounder));
  Eight v;
  std::memcpy(&v, bytes, sizeof v);
  return v;
}

inline Eight quad_sums(const Eight& bytes) {
  return ((bytes << 24) >> 24) + ((bytes << 16) >> 24) + ((bytes << 8) >> 24) + (bytes >> 24);
}

inline void turn(const Eight (&rows)[4], Eight (&turned)[4]) {
  for (int i = 0; i < 4; ++i) {
    for (int row = 0; row < 4; ++row) {
      turned[i][row] = rows[row][i];
      turned[i][row + 4] = rows[row][i + 4];
    }
  }
}

inline Eight swap_halves(const Eight& v) { return Eight{v[4], v[5], v[6], v[7], v[0], v[1], v[2], v[3]}; }

template <int kLane>
inline Eight repeat(const Eight& v) {
  const int32_t low = v[kLane], high = v[kLane + 4];
  return Eight{low, low, low, low, high, high, high, high};
}

template <int kCount>
inline void store_low(void* p, const Eight& v) {
  std::memcpy(p, &v, 4 * kCount);
}
#endif

// All lanes 0 to 3 of each row by `operation`, then all lanes 4 to 7 of each
template <class Operation>
inline Eight fold_rows(const Eight (&rows)[4], const Operation& operation) {
  Eight v[4];
  turn(rows, v);
  return operation(operation(v[0], v[1]), operation(v[2], v[3]));
}

}  // namespace quire::simd
