// Vector operations for x86-64 with AVX2, FMA and F16C, and AVX-VNNI where it is built for: 8 lanes.
#pragma once

#include <immintrin.h>

namespace quire::simd {
constexpr int kLanes = 8;
}  // namespace quire::simd

#include "simd_vectors.h"

namespace quire::simd {

inline Floats splat(float x) { return (Floats)_mm256_set1_ps(x); }
// Of floats b, where either is a NaN
inline Floats max(Floats a, Floats b) { return (Floats)_mm256_max_ps((__m256)a, (__m256)b); }
inline Floats min(Floats a, Floats b) { return (Floats)_mm256_min_ps((__m256)a, (__m256)b); }

// a * b + c, rounded once
inline Floats fused_multiply_add(Floats a, Floats b, Floats c) {
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}

// One IEEE half
inline float half_to_float(uint16_t half) { return _cvtsh_ss(half); }

// kLanes IEEE halves
inline Floats load_half(const uint16_t* p) {
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
}

// kLanes bfloat16
inline Floats load_bfloat(const uint16_t* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  return (Floats)_mm256_slli_epi32(wide, 16);
}

// kLanes signed bytes as numbers
inline Floats load_signed_bytes(const int8_t* p) {
  return to_floats((Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}

// Unsigned bytes with an even index, as shorts. By shifts, as a mask takes a register, and all are taken where
// this is used.
inline Shorts even_unsigned(Bytes v) {
  UnsignedShorts even = reinterpret_cast<UnsignedShorts>(v) << 8;
  asm("" : "+x"(even));  // else the compiler takes a mask
  return reinterpret_cast<Shorts>(even >> 8);
}

// Sums of pairs of products, unsigned by signed; the caller keeps them within 16 bits.
inline Shorts dot_pairs(Bytes unsigned_bytes, Bytes signed_bytes) {
  return (Shorts)_mm256_maddubs_epi16((__m256i)unsigned_bytes, (__m256i)signed_bytes);
}

// Sums of pairs of 16-bit integers
inline Ints add_pairs(Shorts v) {
  return (Ints)_mm256_madd_epi16((__m256i)v, _mm256_set1_epi16(1));
}

#if defined(__AVXVNNI__)
// A sum of four products per lane, unsigned by signed, is added in one instruction.
constexpr bool kAddsQuads = true;
inline Ints add_quads(Ints sum, Bytes unsigned_bytes, Bytes signed_bytes) {
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)unsigned_bytes, (__m256i)signed_bytes);
}

#else
// No instruction adds a sum of four products.
constexpr bool kAddsQuads = false;

// Sums of pairs of products of 16-bit integers
inline Ints dot_words(Shorts a, Shorts b) { return (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
#endif

inline int32_t largest(Ints v) {
  __m128i s = _mm_max_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
  s = _mm_max_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}

}  // namespace quire::simd
