// Quantising activations to 8 bits, one block of up to four rows at once.
//
// Per row and block of 32 columns: scale = the smallest power of two that keeps the quants within 127,
// quants = x / scale rounded to the nearest (ties to even). A scale that is a power of two multiplies another
// by an addition to its exponent. A block's sums of quants times scale stand by it: weights with a minimum or
// a zero need them. A block that holds a NaN, an infinity or what is near it gets a NaN for scale and sums,
// and with it every product of its row.
#pragma once

#include <cstddef>
#include <cstdint>

#include "simd_eight.h"

namespace quire {

constexpr int kBlock = 32;  // columns per block

// Scales of activations. Times a weight's scale, 2^-24 to 2^22 (matrix.h), they stay normal floats.
constexpr float kMinScale = 0x1p-100f, kMaxScale = 0x1p100f;

// A block of each of four rows. The lanes of `scales` and `sums` are the rows, twice.
struct RowBlocks {
  simd::Eight quants[4];  // bytes
  simd::EightFloats scales;
  simd::EightFloats sums;  // scale * (sum of the quants)
  simd::EightFloats half_sums;  // the same over the first 16 columns, and then over the last
};

// x [kCount][kBlock], `stride` apart; further rows of `blocks` hold no meaning, nor do quants with a NaN for
// scale.
template <int kCount>
inline void quantise_rows(const float* x, size_t stride, RowBlocks& blocks) {
  using namespace simd;
  // The bits of magnitudes are ordered like the floats as integers, and NaNs stand above infinity.
  const auto magnitudes = [](const float* p) -> Eight { return load_eight(p) & 0x7fffffff; };
  const auto larger = [](const Eight& a, const Eight& b) -> Eight { return a > b ? a : b; };
  const auto added = [](const Eight& a, const Eight& b) -> Eight { return a + b; };
  Eight tops[4] = {};
  QUIRE_UNROLL for (int row = 0; row < kCount; ++row) {
    tops[row] = magnitudes(x + row * stride);
    QUIRE_UNROLL for (int i = 8; i < kBlock; i += 8) {
      tops[row] = larger(tops[row], magnitudes(x + row * stride + i));
    }
  }
  const Eight half_tops = fold_rows(tops, larger);
  const Eight top = larger(half_tops, swap_halves(half_tops));
  const Eight power = larger(next_power_of_two(reinterpret_cast<EightFloats>(top) * (1.0f / 127.0f)),
                             Eight{} + bits_of_float(kMinScale));
  const Eight inverse = inverse_of_power(power);
  blocks.quants[0] = to_bytes(x, repeat<0>(inverse));
  blocks.quants[1] = kCount > 1 ? to_bytes(x + stride, repeat<1>(inverse)) : Eight{};
  blocks.quants[2] = kCount > 2 ? to_bytes(x + 2 * stride, repeat<2>(inverse)) : Eight{};
  blocks.quants[3] = kCount > 3 ? to_bytes(x + 3 * stride, repeat<3>(inverse)) : Eight{};
  Eight quads[4];
  QUIRE_UNROLL for (int row = 0; row < 4; ++row) quads[row] = quad_sums(blocks.quants[row]);
  const Eight half_quants = fold_rows(quads, added);
  const Eight is_beyond = top > bits_of_float(127.0f * kMaxScale);  // its bits are those of a NaN
  blocks.scales = reinterpret_cast<EightFloats>(power | is_beyond);
  blocks.half_sums = __builtin_convertvector(half_quants, EightFloats) * blocks.scales;
  blocks.sums = blocks.half_sums + __builtin_convertvector(swap_halves(half_quants), EightFloats) * blocks.scales;
}

}  // namespace quire
