// The vector operations that every kernel is written in.
//
// A vector holds kLanes 32-bit lanes. The types are GCC vector extensions, so + - * & >> and
// comparisons work on them everywhere (simd_vectors.h); what an instruction set does better than the
// compiler stands in its own header. A further instruction set is one more such header (it may set
// another kLanes).
//
// Built with -ffp-contract=off: a multiply-add is fused where it says fused_multiply_add and nowhere
// else, so every instance of a template rounds alike. The batch invariance of the results rests on it.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(QUIRE_AVX512) || (defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512VNNI__))
#include "simd_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "simd_avx2.h"
#else
#include "simd_portable.h"
#endif

// Unrolls the loop that follows; its length is a small constant.
#define QUIRE_UNROLL _Pragma("GCC unroll 16")

namespace quire::simd {

// Defined where kAddsQuads...
Ints add_quads(Ints sum, Bytes unsigned_bytes, Bytes signed_bytes);
// ... and where it does not hold.
Ints dot_words(Shorts a, Shorts b);

// Sums stay in their order from here on. Left alone, the compiler computes all products of a block
// before it adds them up, and there are more of them than registers.
template <class Vector>
inline void settle(Vector& v) {
#if defined(QUIRE_AVX512)
  (void)v;  // emulated: wider than a register
#elif defined(__AVX512F__)
  asm("" : "+v"(v));
#elif defined(__x86_64__)
  asm("" : "+x"(v));
#elif defined(__aarch64__)
  asm("" : "+w"(v));
#endif
}

// What was stored is not kept in registers too.
inline void stay_in_memory() { asm volatile("" ::: "memory"); }

// Asks for memory that is read later, into the second-level cache.
inline void prefetch_line(const void* p) { __builtin_prefetch(p, 0, 2); }

constexpr int kLine = 64;

inline void prefetch(const void* start, int num_bytes) {
  for (int i = 0; i < num_bytes; i += kLine) prefetch_line(static_cast<const char*>(start) + i);
}

// Asks for what is in the second-level cache and read next, into the first.
inline void prefetch_soon(const void* start, int num_bytes) {
  for (int i = 0; i < num_bytes; i += kLine) __builtin_prefetch(static_cast<const char*>(start) + i, 0, 3);
}

// All lanes by `operation` in pairs, then those in pairs.
template <class Operation>
inline float fold(Floats v, const Operation& operation) {
  float parts[kLanes];
  store(parts, v);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    QUIRE_UNROLL for (int i = 0; i < half; ++i) parts[i] = operation(parts[i], parts[i + half]);
  }
  return parts[0];
}

inline float sum(Floats v) {
  return fold(v, [](float a, float b) { return a + b; });
}

inline float largest(Floats v) {
  return fold(v, [](float a, float b) { return b > a ? b : a; });
}

inline int32_t bits_of_float(float x) {
  int32_t value;
  std::memcpy(&value, &x, 4);
  return value;
}

// Multiplies by powers of two with an addition of bits, which takes none of the multiplying pipes:
// times_power(over_one(v), power) = v * power, where both and the product are normal floats.
inline Floats over_one(Floats v) {
  return reinterpret_cast<Floats>(reinterpret_cast<UnsignedInts>(v) - 0x3f800000u);
}
inline Floats times_power(Floats over_one, Floats power) {
  return reinterpret_cast<Floats>(reinterpret_cast<UnsignedInts>(over_one) +
                                  reinterpret_cast<UnsignedInts>(power));
}

// x / (1 + e^-x), where e^87 stands for what is beyond: within 3 + |x| / 4 units in the last place (3 + 2 |x|
// where multiply-adds round twice). NaN for NaN.
inline Floats silu(Floats x) {
  const Floats rounder = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Floats bounded = min(splat(87.0f), max(splat(-87.0f), x));  // in this order they keep a NaN
  const Floats n = fused_multiply_add(bounded, splat(-1.44269504f), rounder);
  const Floats f = fused_multiply_add(bounded, splat(-1.44269504f), rounder - n);
  Floats p = fused_multiply_add(splat(1.5353359092e-04f), f, splat(1.3398875421e-03f));
  p = fused_multiply_add(p, f, splat(9.6184373770e-03f));
  p = fused_multiply_add(p, f, splat(5.5503324679e-02f));
  p = fused_multiply_add(p, f, splat(2.4022647913e-01f));
  p = fused_multiply_add(p, f, splat(6.9314720286e-01f));
  p = fused_multiply_add(p, f, splat(1.0f));
  const UnsignedInts power = reinterpret_cast<UnsignedInts>(n) << 23;  // to be added to an exponent
  return x / (splat(1.0f) + reinterpret_cast<Floats>(reinterpret_cast<UnsignedInts>(p) + power));
}

// 2^x for x <= 0, in place: within 2 units in the last place for -126 <= x, 0 below -126.5 (also for
// -infinity), NaN for NaN. The polynomial has the least relative error for |f| <= 1/2. Several vectors go
// step by step together, as one alone waits for its own steps.
template <int kCount>
inline void power_of_two(Floats (&x)[kCount]) {
  const Floats rounder = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  Floats p[kCount];
  Ints powers[kCount];
  const auto each = [](const auto& step) { QUIRE_UNROLL for (int i = 0; i < kCount; ++i) step(i); };
  each([&](int i) {
    x[i] = max(splat(-127.0f), x[i]);  // in this order it keeps a NaN
    p[i] = x[i] + rounder;
    powers[i] = (reinterpret_cast<Ints>(p[i]) + 127) << 23;  // 2^-127 has the bits of 0
    x[i] = x[i] - (p[i] - rounder);
    p[i] = fused_multiply_add(splat(1.5353359092e-04f), x[i], splat(1.3398875421e-03f));
  });
  each([&](int i) { p[i] = fused_multiply_add(p[i], x[i], splat(9.6184373770e-03f)); });
  each([&](int i) { p[i] = fused_multiply_add(p[i], x[i], splat(5.5503324679e-02f)); });
  each([&](int i) { p[i] = fused_multiply_add(p[i], x[i], splat(2.4022647913e-01f)); });
  each([&](int i) { p[i] = fused_multiply_add(p[i], x[i], splat(6.9314720286e-01f)); });
  each([&](int i) {
    x[i] = fused_multiply_add(p[i], x[i], splat(1.0f)) * reinterpret_cast<Floats>(powers[i]);
  });
}

}  // namespace quire::simd
