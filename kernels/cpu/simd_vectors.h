// The vectors, and what the compiler does with them as well as any instruction; `kLanes` is set.
#pragma once

namespace quire::simd {

constexpr int kBytes = 4 * kLanes;
using Floats = float __attribute__((vector_size(kBytes)));
using Ints = int32_t __attribute__((vector_size(kBytes)));
using UnsignedInts = uint32_t __attribute__((vector_size(kBytes)));  // their sums may wrap
using Shorts = int16_t __attribute__((vector_size(kBytes)));
using UnsignedShorts = uint16_t __attribute__((vector_size(kBytes)));
using Bytes = uint8_t __attribute__((vector_size(kBytes)));

// Where they lie in memory: aligned as their elements are
using StoredFloats = float __attribute__((vector_size(kBytes), aligned(4), may_alias));
using StoredBytes = uint8_t __attribute__((vector_size(kBytes), aligned(1), may_alias));

inline Floats load(const float* p) { return *reinterpret_cast<const StoredFloats*>(p); }
inline void store(float* p, Floats v) { *reinterpret_cast<StoredFloats*>(p) = v; }
inline Bytes load_bytes(const uint8_t* p) { return *reinterpret_cast<const StoredBytes*>(p); }
inline void store_bytes(uint8_t* p, Bytes v) { *reinterpret_cast<StoredBytes*>(p) = v; }

inline Floats to_floats(Ints v) { return __builtin_convertvector(v, Floats); }

// 4 bytes, repeated in every lane
inline Bytes splat_quad(const int8_t* p) {
  int32_t quad;
  std::memcpy(&quad, p, 4);
  return reinterpret_cast<Bytes>(Ints{} + quad);
}

inline Bytes low_nibbles(Bytes v) { return v & 15; }
inline Bytes high_nibbles(Bytes v) {
  return low_nibbles(reinterpret_cast<Bytes>(reinterpret_cast<Shorts>(v) >> 4));
}

// Unsigned bytes with an odd index, as shorts
inline Shorts odd_unsigned(Bytes v) { return reinterpret_cast<Shorts>(reinterpret_cast<UnsignedShorts>(v) >> 8); }

}  // namespace quire::simd
