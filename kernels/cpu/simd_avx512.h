// Vector operations for x86-64 with AVX-512 (F, BW, DQ, VL) and VNNI: 16 lanes.
#pragma once

#include <immintrin.h>

namespace quire::simd {
constexpr int kLanes = 16;
}  // namespace quire::simd

#include "simd_vectors.h"

namespace quire::simd {

inline Floats splat(float x) { return (Floats)_mm512_set1_ps(x); }
// Of floats b, where either is a NaN
inline Floats max(Floats a, Floats b) { return (Floats)_mm512_max_ps((__m512)a, (__m512)b); }
inline Floats min(Floats a, Floats b) { return (Floats)_mm512_min_ps((__m512)a, (__m512)b); }

// a * b + c, rounded once
inline Floats fused_multiply_add(Floats a, Floats b, Floats c) {
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}

// One IEEE half
inline float half_to_float(uint16_t half) { return _cvtsh_ss(half); }

// kLanes IEEE halves
inline Floats load_half(const uint16_t* p) {
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}

// kLanes bfloat16
inline Floats load_bfloat(const uint16_t* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  return (Floats)_mm512_slli_epi32(wide, 16);
}

// kLanes signed bytes as numbers
inline Floats load_signed_bytes(const int8_t* p) {
  return to_floats((Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}

// Unsigned bytes with an even index, as shorts
inline Shorts even_unsigned(Bytes v) { return reinterpret_cast<Shorts>(v) & 255; }

// A sum of four products per lane, unsigned by signed, is added in one instruction.
constexpr bool kAddsQuads = true;
inline Ints add_quads(Ints sum, Bytes unsigned_bytes, Bytes signed_bytes) {
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)unsigned_bytes, (__m512i)signed_bytes);
}

// Sums of pairs of products, unsigned by signed; the caller keeps them within 16 bits.
inline Shorts dot_pairs(Bytes unsigned_bytes, Bytes signed_bytes) {
  return (Shorts)_mm512_maddubs_epi16((__m512i)unsigned_bytes, (__m512i)signed_bytes);
}

// Sums of pairs of 16-bit integers
inline Ints add_pairs(Shorts v) {
  return (Ints)_mm512_madd_epi16((__m512i)v, _mm512_set1_epi16(1));
}

inline int32_t largest(Ints v) {
  int32_t best = v[0];
  for (int i = 1; i < kLanes; ++i) best = v[i] > best ? v[i] : best;
  return best;
}

}  // namespace quire::simd
