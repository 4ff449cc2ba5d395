// The rows that a matrix product reads: float32, and in 8 bits where the weights are quantised too.
//
// Quantisation, per row and block of 32 columns: scale = largest magnitude / 127, quants = x / scale
// rounded to the nearest (ties to even). A block's sums of quants times scale stand by it: weights with
// a minimum or a zero need them. A block that holds a NaN or an infinity gets a NaN for scale and sums, and
// with it every product of its row.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "buffer.h"
#include "matrix.h"
#include "simd.h"

namespace quire {

struct BlockScale {
  float scale;
  float sum;  // scale * (sum of the quants)
  float half_sums[2];  // the same over the first and the last 16 columns
};

// Rows of up to `max_columns`; filled row by row.
struct Activations {
  Activations() = default;
  Activations(int max_rows, int max_columns, bool with_quants)
      : row_size(max_columns), values(static_cast<size_t>(max_rows) * max_columns) {
    if (with_quants) {
      blocks_per_row = (max_columns + kBlock - 1) / kBlock;
      quants = Buffer<int8_t>(static_cast<size_t>(max_rows) * blocks_per_row * kBlock);
      scales = Buffer<BlockScale>(static_cast<size_t>(max_rows) * blocks_per_row);
    }
  }

  float* row(int index) { return values.data() + static_cast<size_t>(index) * row_size; }
  const float* row(int index) const { return values.data() + static_cast<size_t>(index) * row_size; }
  const int8_t* row_quants(int index) const {
    return quants.data() + static_cast<size_t>(index) * blocks_per_row * kBlock;
  }
  const BlockScale* row_scales(int index) const {
    return scales.data() + static_cast<size_t>(index) * blocks_per_row;
  }
  int8_t* block_quants(int index, int block) {
    return quants.data() + (static_cast<size_t>(index) * blocks_per_row + block) * kBlock;
  }
  BlockScale& block_scale(int index, int block) {
    return scales[static_cast<size_t>(index) * blocks_per_row + block];
  }

  int row_size = 0;
  int blocks_per_row = 0;  // 0: without quants
  Buffer<float> values;
  Buffer<int8_t> quants;
  Buffer<BlockScale> scales;
};

inline void quantise_block(const float* x, int8_t* quants, BlockScale& out) {
  using namespace simd;
  constexpr int kVectors = kBlock / kLanes;
  // As integers the bits of magnitudes are ordered like the floats, and NaNs stand above infinity.
  Ints bits = reinterpret_cast<Ints>(absolute(load(x)));
  for (int i = 1; i < kVectors; ++i) {
    bits = max(bits, reinterpret_cast<Ints>(absolute(load(x + i * kLanes))));
  }
  const float magnitude = float_of_bits(largest(bits));
  if (!(magnitude <= std::numeric_limits<float>::max())) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    std::fill_n(quants, kBlock, int8_t{0});
    out = {nan, nan, {nan, nan}};
    return;
  }
  const float scale = magnitude / 127.0f;
  const Floats inverse = splat(scale > 1e-37f ? 1.0f / scale : 0.0f);
  Ints sums[2] = {};
  for (int i = 0; i < kVectors; ++i) {
    const Ints rounded = round_to_ints(load(x + i * kLanes) * inverse);
    store_bytes(quants + i * kLanes, rounded);
    sums[i / (kVectors / 2)] += rounded;
  }
  const int first = sum(sums[0]), second = sum(sums[1]);
  out.scale = scale;
  out.sum = scale * static_cast<float>(first + second);
  out.half_sums[0] = scale * static_cast<float>(first);
  out.half_sums[1] = scale * static_cast<float>(second);
}

// Quantises the first `num_columns` (a multiple of 32) of a row, if the activations carry quants.
inline void quantise_row(Activations& rows, int index, int num_columns) {
  if (rows.blocks_per_row == 0) return;
  const float* x = rows.row(index);
  for (int block = 0; block < num_columns / kBlock; ++block) {
    quantise_block(x + block * kBlock, rows.block_quants(index, block), rows.block_scale(index, block));
  }
}

}  // namespace quire
