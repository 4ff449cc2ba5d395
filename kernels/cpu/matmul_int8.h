// Products of quantised weights and 8-bit activations.
//
// Per block of 32 columns the dot product is an exact integer; it is scaled and added in float32, block
// after block. So each element's value is the same whatever rows stand beside it.
//
// Columns go in slices of some blocks, and all rows pass over a slice before the next one, so that its
// weights, the rows' quants and their totals stay in the L1 cache. For many rows a slice's 4-bit weights
// are taken apart once, not once for each chunk of rows.
#pragma once

#include <algorithm>

#include "activations.h"
#include "chunks.h"
#include "matrix.h"
#include "simd.h"

namespace quire::int8 {

constexpr int kSlice = 8;        // blocks
constexpr int kExpandRows = 9;   // from so many rows on, 4-bit weights are taken apart ahead
constexpr int kRowChunk4 = 6;    // 12 sums, 2 weights, an activation and a product: 16 registers
constexpr int kRowChunk8 = 4;

// Weights as they lie in a matrix.
template <class L>
struct Packed {
  using Layout = L;
  static constexpr int kBlockBytes = L::kBlockBytes;

  // 4 columns of the kLanes rows of tile t, as bytes
  static simd::Bytes quad(const uint8_t* block, int quad, int t) {
    using namespace simd;
    const uint8_t* tile = block + t * L::kTileBytes;
    if constexpr (L::kBits == 8) return load_bytes(tile + quad * 4 * kLanes);
    if (quad < kQuads / 2) return low_nibbles(load_bytes(tile + quad * 4 * kLanes));
    return high_nibbles(load_bytes(tile + (quad - kQuads / 2) * 4 * kLanes));
  }
  static simd::Floats scale(const uint8_t* block, int g, int t) {
    return L::scale(block + t * L::kTileBytes, g);
  }
  static simd::Floats minimum(const uint8_t* block, int g, int t) {
    return L::minimum(block + t * L::kTileBytes, g);
  }
};

// 4-bit weights taken apart: bytes [quad][tile][kLanes][4], floats [scale, minimum][tile][kLanes].
template <class L>
struct Expanded {
  using Layout = L;
  static_assert(L::kBits == 4 && L::kGroups == 1);
  static constexpr int kQuadBytes = 4 * simd::kLanes;
  static constexpr int kWeightBytes = kQuads * 2 * kQuadBytes;
  static constexpr int kScaleBytes = 2 * simd::kLanes * static_cast<int>(sizeof(float));
  static constexpr int kBlockBytes = kWeightBytes + (L::kHasMinimum ? 2 : 1) * kScaleBytes;

  static simd::Bytes quad(const uint8_t* block, int quad, int t) {
    return simd::load_bytes(block + (2 * quad + t) * kQuadBytes);
  }
  static simd::Floats scale(const uint8_t* block, int, int t) {
    return simd::load(reinterpret_cast<const float*>(block + kWeightBytes) + t * simd::kLanes);
  }
  static simd::Floats minimum(const uint8_t* block, int, int t) {
    return scale(block + kScaleBytes, 0, t);
  }

  static void expand(const uint8_t* packed, uint8_t* block) {
    using namespace simd;
    float* scales = reinterpret_cast<float*>(block + kWeightBytes);
    for (int t = 0; t < 2; ++t) {
      for (int quad = 0; quad < kQuads / 2; ++quad) {
        const Bytes both = load_bytes(packed + t * L::kTileBytes + quad * kQuadBytes);
        store_bytes(block + (2 * quad + t) * kQuadBytes, low_nibbles(both));
        store_bytes(block + (2 * quad + kQuads + t) * kQuadBytes, high_nibbles(both));
      }
      store(scales + t * kLanes, Packed<L>::scale(packed, 0, t));
      if constexpr (L::kHasMinimum) {
        store(scales + (2 + t) * kLanes, Packed<L>::minimum(packed, 0, t));
      }
    }
  }
};

// Rows of activations from one of their blocks on.
struct Rows {
  const int8_t* quants;
  const BlockScale* scales;
  size_t blocks_per_row;

  const int8_t* block(int row, int b) const { return quants + (row * blocks_per_row + b) * kBlock; }
  const BlockScale& scale(int row, int b) const { return scales[row * blocks_per_row + b]; }
  Rows from(int row, int b) const { return {block(row, b), &scale(row, b), blocks_per_row}; }
};

// Integer dot products over the columns of group g. Where no instruction adds four products at once, 4
// bits sum in 16-bit lanes (8 * 2 * 15 * 127 fits) and are widened at the end, 8 bits at each step.
template <class Weights, int kRows>
inline void dot_group(const uint8_t* block, int g, const Rows rows, int b, simd::Ints (&sums)[kRows][2]) {
  using namespace simd;
  constexpr int kGroupQuads = Weights::Layout::kGroup / 4;
  if constexpr (Weights::Layout::kBits == 4 && !kAddsQuads) {
    Shorts pairs[kRows][2];
    QUIRE_UNROLL for (int quad = 0; quad < kGroupQuads; ++quad) {
      const Bytes w0 = Weights::quad(block, quad, 0), w1 = Weights::quad(block, quad, 1);
      QUIRE_UNROLL for (int row = 0; row < kRows; ++row) {
        const Bytes x = splat_quad(rows.block(row, b) + quad * 4);
        const Shorts p0 = dot_pairs(w0, x), p1 = dot_pairs(w1, x);
        pairs[row][0] = quad == 0 ? p0 : pairs[row][0] + p0;
        pairs[row][1] = quad == 0 ? p1 : pairs[row][1] + p1;
        settle(pairs[row][0]);
        settle(pairs[row][1]);
      }
    }
    for (int row = 0; row < kRows; ++row) {
      for (int t = 0; t < 2; ++t) sums[row][t] = add_pairs(pairs[row][t]);
    }
  } else {
    QUIRE_UNROLL for (int i = 0; i < kGroupQuads; ++i) {
      const int quad = g * kGroupQuads + i;
      const Bytes w0 = Weights::quad(block, quad, 0), w1 = Weights::quad(block, quad, 1);
      QUIRE_UNROLL for (int row = 0; row < kRows; ++row) {
        const Bytes x = splat_quad(rows.block(row, b) + quad * 4);
        if constexpr (Weights::Layout::kBits == 4) {
          sums[row][0] = add_quads(i == 0 ? Ints{} : sums[row][0], w0, x);
          sums[row][1] = add_quads(i == 0 ? Ints{} : sums[row][1], w1, x);
        } else {
          const Ints p0 = dot_quads(w0, x), p1 = dot_quads(w1, x);
          sums[row][0] = i == 0 ? p0 : sums[row][0] + p0;
          sums[row][1] = i == 0 ? p1 : sums[row][1] + p1;
        }
        settle(sums[row][0]);
        settle(sums[row][1]);
      }
    }
  }
}

// totals [kRows][kPanel] += some blocks of one panel; fetches what lies `ahead` bytes further, if any
template <class Weights, int kRows>
void multiply_rows(const uint8_t* block, int num_blocks, const Rows rows, const uint8_t* ahead,
                   float* totals) {
  using namespace simd;
  using L = typename Weights::Layout;
  for (int b = 0; b < num_blocks; ++b, block += Weights::kBlockBytes) {
    if (ahead != nullptr) prefetch(ahead + b * L::kBlockBytes, L::kBlockBytes);
    for (int g = 0; g < L::kGroups; ++g) {
      Ints sums[kRows][2];
      dot_group<Weights, kRows>(block, g, rows, b, sums);
      QUIRE_UNROLL for (int row = 0; row < kRows; ++row) {
        const BlockScale& of_row = rows.scale(row, b);
        const Floats row_scale = splat(of_row.scale);
        const Floats row_sum = splat(L::kGroups == 1 ? of_row.sum : of_row.half_sums[g]);
        QUIRE_UNROLL for (int t = 0; t < 2; ++t) {
          float* total = totals + row * kPanel + t * kLanes;
          Floats dot = to_floats(sums[row][t]);
          if constexpr (L::kZero != 0) {
            dot = fused_multiply_add(dot, row_scale, row_sum * splat(-L::kZero));
          } else {
            dot = dot * row_scale;
          }
          Floats value = fused_multiply_add(dot, Weights::scale(block, g, t), load(total));
          if constexpr (L::kHasMinimum) {
            value = fused_multiply_add(row_sum, Weights::minimum(block, g, t), value);
          }
          store(total, value);
        }
        stay_in_memory();
      }
    }
  }
}

// out [num_rows][kPanel]: rows first_row... of the activations times one panel.
template <class L>
void multiply_panel(const Matrix& matrix, int panel, const Activations& activations, int first_row,
                    int num_rows, float* out) {
  constexpr int kChunk = L::kBits == 4 ? kRowChunk4 : kRowChunk8;
  const Rows rows{activations.row_quants(first_row), activations.row_scales(first_row),
                  static_cast<size_t>(activations.blocks_per_row)};
  const int num_blocks = matrix.num_columns / kBlock;
  std::fill_n(out, num_rows * kPanel, 0.0f);
  for (int b = 0; b < num_blocks; b += kSlice) {
    const int count = std::min(kSlice, num_blocks - b);
    const uint8_t* slice = matrix.panel(panel) + b * L::kBlockBytes;
    const auto multiply = [&](auto weights, const uint8_t* from) {
      in_even_chunks<kChunk>(num_rows, [&](auto size, int start) {
        multiply_rows<decltype(weights), decltype(size)::value>(
            from, count, rows.from(start, b), start == 0 ? slice + matrix.panel_bytes : nullptr,
            out + start * kPanel);
      });
    };
    if constexpr (L::kBits == 4) {
      if (num_rows >= kExpandRows) {
        alignas(64) uint8_t expanded[kSlice * Expanded<L>::kBlockBytes];
        for (int i = 0; i < count; ++i) {
          Expanded<L>::expand(slice + i * L::kBlockBytes, expanded + i * Expanded<L>::kBlockBytes);
        }
        multiply(Expanded<L>(), expanded);
        continue;
      }
    }
    multiply(Packed<L>(), slice);
  }
}

}  // namespace quire::int8
