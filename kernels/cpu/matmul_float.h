// Products in float32: dense weights, and quantised ones expanded to exactly their float32 values.
//
// Columns go in chunks of 32: a chunk's products are added in order by fused multiply-adds, and the
// chunks' sums in order (shorter chains round less than one long one).
#pragma once

#include <algorithm>

#include "activations.h"
#include "chunks.h"
#include "matrix.h"
#include "simd.h"

namespace quire::float32 {

// Weights of one block of 32 columns as floats [32][kPanel].
template <class L>
void expand_block(const uint8_t* block, float* weights) {
  using namespace simd;
  for (int t = 0; t < 2; ++t) {
    const uint8_t* tile = block + t * L::kTileBytes;
    for (int quad = 0; quad < kQuads; ++quad) {
      const int g = quad * 4 / L::kGroup;
      const bool is_high = L::kBits == 4 && quad >= kQuads / 2;
      const int stored_quad = is_high ? quad - kQuads / 2 : quad;
      const Ints packed = reinterpret_cast<Ints>(load_bytes(tile + stored_quad * 4 * kLanes));
      for (int j = 0; j < 4; ++j) {
        const Ints quants = L::kBits == 4 ? (packed >> (8 * j + (is_high ? 4 : 0))) & 15 : (packed >> 8 * j) & 255;
        Floats value = L::scale(tile, g) * to_floats(quants - L::kZero);
        if constexpr (L::kHasMinimum) value = value + L::minimum(tile, g);
        store(weights + (4 * quad + j) * kPanel + t * kLanes, value);
      }
    }
  }
}

// out [kRows][kPanel] += rows x [kRows][num_columns] times weights [num_columns][kPanel]
template <int kRows>
void add_chunk(const float* weights, int num_columns, const float* x, size_t stride, float* out) {
  using namespace simd;
  Floats sums[kRows][2] = {};
  for (int k = 0; k < num_columns; ++k) {
    const Floats w0 = load(weights + k * kPanel), w1 = load(weights + k * kPanel + kLanes);
    for (int row = 0; row < kRows; ++row) {
      const Floats value = splat(x[row * stride + k]);
      sums[row][0] = fused_multiply_add(w0, value, sums[row][0]);
      sums[row][1] = fused_multiply_add(w1, value, sums[row][1]);
    }
  }
  for (int row = 0; row < kRows; ++row) {
    for (int t = 0; t < 2; ++t) {
      float* total = out + row * kPanel + t * kLanes;
      store(total, load(total) + sums[row][t]);
    }
  }
}

// out [rows of the chunks][kPanel]; expand(start, count, scratch) gives the floats of columns start...
template <class Expand>
void multiply_expanded(const Matrix& matrix, const Activations& rows, int first_chunk, int end_chunk,
                       float* out, const Expand& expand) {
  alignas(64) float scratch[kBlock * kPanel];
  const int first_row = rows.chunks().start(first_chunk);
  const int num_rows = rows.chunks().start(end_chunk) - first_row;
  std::fill_n(out, num_rows * kPanel, 0.0f);
  for (int start = 0; start < matrix.num_columns; start += kBlock) {
    const int count = std::min(kBlock, matrix.num_columns - start);
    const float* weights = expand(start, count, scratch);
    in_chunks<kRowChunk>(num_rows, [&](auto size, int row) {
      add_chunk<decltype(size)::value>(weights, count, rows.row(first_row + row) + start,
                                       static_cast<size_t>(rows.row_size()), out + row * kPanel);
    });
  }
}

template <class L>
void multiply_panel(const Matrix& matrix, int panel, const Activations& rows, int first_chunk,
                    int end_chunk, float* out) {
  const uint8_t* blocks = matrix.panel(panel);
  multiply_expanded(matrix, rows, first_chunk, end_chunk, out,
                    [&](int start, int, float* scratch) -> const float* {
                      expand_block<L>(blocks + start / kBlock * L::kBlockBytes, scratch);
                      return scratch;
                    });
}

template <class Element>
void multiply_dense_panel(const Matrix& matrix, int panel, const Activations& rows, int first_chunk,
                          int end_chunk, float* out) {
  const uint8_t* elements = matrix.panel(panel);
  multiply_expanded(
      matrix, rows, first_chunk, end_chunk, out,
      [&](int start, int count, float* scratch) -> const float* {
        const uint8_t* from = elements + static_cast<size_t>(start) * kPanel * sizeof(Element);
        if constexpr (std::is_same_v<Element, Float>) return reinterpret_cast<const float*>(from);
        for (int i = 0; i < count * kPanel; i += simd::kLanes) {
          simd::store(scratch + i, Element::load(from + i * sizeof(Element)));
        }
        return scratch;
      });
}

}  // namespace quire::float32
