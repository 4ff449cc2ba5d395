// Products of quantised weights and 8-bit activations.
//
// Per block of 32 columns the dot product is an exact integer; it is scaled and added in float32, block
// after block. So each element's value is the same whatever rows stand beside it.
#pragma once

#include "activations.h"
#include "chunks.h"
#include "matrix.h"
#include "simd.h"

namespace quire::int8 {

constexpr int kRowChunk = 4;

// 4 columns of kLanes rows, as bytes
template <class L>
inline simd::Bytes load_quad(const uint8_t* tile, int quad) {
  using namespace simd;
  if constexpr (L::kBits == 8) return load_bytes(tile + quad * 4 * kLanes);
  if (quad < kQuads / 2) return low_nibbles(load_bytes(tile + quad * 4 * kLanes));
  return high_nibbles(load_bytes(tile + (quad - kQuads / 2) * 4 * kLanes));
}

// Integer dot products over the columns of group g: 4 bits sum in 16-bit lanes (8 * 2 * 15 * 127 fits)
// and are widened once, 8 bits are widened at each step.
template <class L, int kRows>
inline void dot_group(const uint8_t* block, int g, const int8_t* quants, size_t stride,
                      simd::Ints (&sums)[kRows][2]) {
  using namespace simd;
  constexpr int kGroupQuads = L::kGroup / 4;
  if constexpr (L::kBits == 4) {
    Shorts pairs[kRows][2] = {};
    for (int quad = 0; quad < kGroupQuads; ++quad) {
      const Bytes w0 = load_quad<L>(block, quad), w1 = load_quad<L>(block + L::kTileBytes, quad);
      for (int row = 0; row < kRows; ++row) {
        const Bytes x = splat_quad(quants + row * stride + quad * 4);
        pairs[row][0] += dot_pairs(w0, x);
        pairs[row][1] += dot_pairs(w1, x);
      }
    }
    for (int row = 0; row < kRows; ++row) {
      for (int t = 0; t < 2; ++t) sums[row][t] = add_pairs(pairs[row][t]);
    }
  } else {
    for (int row = 0; row < kRows; ++row) sums[row][0] = sums[row][1] = Ints{};
    for (int i = 0; i < kGroupQuads; ++i) {
      const int quad = g * kGroupQuads + i;
      const Bytes w0 = load_quad<L>(block, quad), w1 = load_quad<L>(block + L::kTileBytes, quad);
      for (int row = 0; row < kRows; ++row) {
        const Bytes x = splat_quad(quants + row * stride + quad * 4);
        sums[row][0] += dot_quads(w0, x);
        sums[row][1] += dot_quads(w1, x);
      }
    }
  }
}

// out [kRows][kPanel] of one panel; fetches the next one meanwhile
template <class L, int kRows>
void multiply_rows(const uint8_t* block, int num_blocks, const int8_t* quants, size_t quant_stride,
                   const BlockScale* scales, size_t scale_stride, float* out) {
  using namespace simd;
  const size_t panel_bytes = static_cast<size_t>(num_blocks) * L::kBlockBytes;
  Floats totals[kRows][2] = {};
  for (int b = 0; b < num_blocks; ++b, block += L::kBlockBytes, quants += kBlock, ++scales) {
    prefetch(block + panel_bytes, L::kBlockBytes);
    for (int g = 0; g < L::kGroups; ++g) {
      Ints sums[kRows][2];
      dot_group<L, kRows>(block, g, quants, quant_stride, sums);
      for (int t = 0; t < 2; ++t) {
        const uint8_t* tile = block + t * L::kTileBytes;
        const Floats scale = L::scale(tile, g);
        for (int row = 0; row < kRows; ++row) {
          const BlockScale& of_row = scales[row * scale_stride];
          Floats& total = totals[row][t];
          Floats dot = to_floats(sums[row][t]);
          if constexpr (L::kZero != 0) {
            dot = fused_multiply_add(dot, splat(of_row.scale), splat(of_row.sum * -L::kZero));
          } else {
            dot = dot * splat(of_row.scale);
          }
          total = fused_multiply_add(scale, dot, total);
          if constexpr (L::kHasMinimum) {
            const float sum = L::kGroups == 1 ? of_row.sum : of_row.half_sums[g];
            total = fused_multiply_add(L::minimum(tile, g), splat(sum), total);
          }
        }
      }
    }
  }
  for (int row = 0; row < kRows; ++row) {
    for (int t = 0; t < 2; ++t) store(out + row * kPanel + t * kLanes, totals[row][t]);
  }
}

// out [num_rows][kPanel]: rows first_row... of the activations times one panel.
template <class L>
void multiply_panel(const Matrix& matrix, int panel, const Activations& rows, int first_row,
                    int num_rows, float* out) {
  const size_t stride = static_cast<size_t>(rows.blocks_per_row);
  in_chunks<kRowChunk>(num_rows, [&](auto size, int start) {
    multiply_rows<L, decltype(size)::value>(
        matrix.panel(panel), matrix.num_columns / kBlock, rows.row_quants(first_row + start),
        stride * kBlock, rows.row_scales(first_row + start), stride, out + start * kPanel);
  });
}

}  // namespace quire::int8
