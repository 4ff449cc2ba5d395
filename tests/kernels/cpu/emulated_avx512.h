// Gives AVX-512's intrinsics to a machine with AVX2 alone, by SIMDe; included before the sources.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

#define QUIRE_AVX512

// What SIMDe 0.7.4 lacks or names wrongly.
namespace emulated {

template <class Vector, class Half>
Vector join(Half low, Half high) {
  Vector v;
  std::memcpy(&v, &low, 32);
  std::memcpy(reinterpret_cast<char*>(&v) + 32, &high, 32);
  return v;
}
template <class Half, class Vector>
Half half(const Vector& v, int index) {
  Half part;
  std::memcpy(&part, reinterpret_cast<const char*>(&v) + 32 * index, 32);
  return part;
}
inline simde__m512i to_ints(simde__m512 v) {
  return join<simde__m512i>(_mm256_cvtps_epi32(half<__m256>(v, 0)),
                            _mm256_cvtps_epi32(half<__m256>(v, 1)));
}
inline simde__m512 from_halves(__m256i v) {
  return join<simde__m512>(_mm256_cvtph_ps(_mm256_castsi256_si128(v)),
                           _mm256_cvtph_ps(_mm256_extracti128_si256(v, 1)));
}
inline simde__m512i widen(__m256i v) {
  return join<simde__m512i>(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(v)),
                            _mm256_cvtepu16_epi32(_mm256_extracti128_si256(v, 1)));
}
inline simde__m512i widen_signed(__m128i v) {
  return join<simde__m512i>(_mm256_cvtepi8_epi32(v), _mm256_cvtepi8_epi32(_mm_srli_si128(v, 8)));
}
inline __m128i to_bytes(simde__m512i v) {
  int32_t lanes[16];
  std::memcpy(lanes, &v, sizeof lanes);
  int8_t bytes[16];
  for (int i = 0; i < 16; ++i) bytes[i] = static_cast<int8_t>(lanes[i]);
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
}

}  // namespace emulated

#undef _mm512_madd_epi16
#define _mm512_madd_epi16(a, b) simde_mm512_madd_epi16(a, b)
#define _mm512_cvtps_epi32(v) emulated::to_ints(v)
#define _mm512_cvtph_ps(v) emulated::from_halves(v)
#define _mm512_cvtepu16_epi32(v) emulated::widen(v)
#undef _mm512_cvtepi8_epi32
#define _mm512_cvtepi8_epi32(v) emulated::widen_signed(v)
#define _mm512_cvtepi32_epi8(v) emulated::to_bytes(v)
