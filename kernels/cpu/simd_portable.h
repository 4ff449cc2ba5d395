// Vector operations for any machine, left to the compiler: 4 lanes, which SSE2 and NEON have; no
// intrinsics.
#pragma once

namespace quire::simd {
constexpr int kLanes = 4;
}  // namespace quire::simd

#include "simd_vectors.h"

namespace quire::simd {

inline Floats splat(float x) { return Floats{x, x, x, x}; }
// Of floats b, where either is a NaN
inline Floats max(Floats a, Floats b) { return a > b ? a : b; }
inline Floats min(Floats a, Floats b) { return a < b ? a : b; }

// Rounded twice here: without the instruction a fused one would be a slow library call.
inline Floats fused_multiply_add(Floats a, Floats b, Floats c) { return a * b + c; }

inline float half_to_float(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7fffu;
  uint32_t bits;
  if (magnitude >= 0x7c00u) {  // infinity, NaN
    bits = 0x7f800000u | (magnitude << 13);
  } else if (magnitude >= 0x0400u) {
    bits = (magnitude << 13) + (112u << 23);
  } else {  // subnormal: a multiple of 2^-24
    const float value = static_cast<float>(magnitude) * 5.9604644775390625e-8f;
    std::memcpy(&bits, &value, 4);
  }
  bits |= sign;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

inline Floats load_half(const uint16_t* p) {
  Floats v;
  for (int i = 0; i < kLanes; ++i) v[i] = half_to_float(p[i]);
  return v;
}

inline Floats load_bfloat(const uint16_t* p) {
  Ints v;
  for (int i = 0; i < kLanes; ++i) v[i] = static_cast<int32_t>(static_cast<uint32_t>(p[i]) << 16);
  return reinterpret_cast<Floats>(v);
}

// kLanes signed bytes as numbers
inline Floats load_signed_bytes(const int8_t* p) {
  Floats v;
  for (int i = 0; i < kLanes; ++i) v[i] = static_cast<float>(p[i]);
  return v;
}

// Unsigned bytes with an even index, as shorts
inline Shorts even_unsigned(Bytes v) { return reinterpret_cast<Shorts>(v) & 255; }

// Signed bytes with an even or an odd index, as shorts
inline Shorts even_words(Bytes v) { return (reinterpret_cast<Shorts>(v) << 8) >> 8; }
inline Shorts odd_words(Bytes v) { return reinterpret_cast<Shorts>(v) >> 8; }

// No instruction adds a sum of four products.
constexpr bool kAddsQuads = false;

// Sums of pairs of products, unsigned by signed; the caller keeps them within 16 bits.
inline Shorts dot_pairs(Bytes unsigned_bytes, Bytes signed_bytes) {
  return even_unsigned(unsigned_bytes) * even_words(signed_bytes) +
         odd_unsigned(unsigned_bytes) * odd_words(signed_bytes);
}

// Sums of pairs of 16-bit integers
inline Ints add_pairs(Shorts v) {
  const Ints pairs = reinterpret_cast<Ints>(v);
  return ((pairs << 16) >> 16) + (pairs >> 16);
}

// Sums of pairs of products of 16-bit integers
inline Ints dot_words(Shorts a, Shorts b) {
  const Ints x = reinterpret_cast<Ints>(a), y = reinterpret_cast<Ints>(b);
  return ((x << 16) >> 16) * ((y << 16) >> 16) + (x >> 16) * (y >> 16);
}

inline int32_t largest(Ints v) {
  int32_t best = v[0];
  for (int i = 1; i < kLanes; ++i) best = v[i] > best ? v[i] : best;
  return best;
}

}  // namespace quire::simd
