// A weight matrix in the order in which the kernels read it.
//
// Rows (outputs) stand in panels of kPanel = 2 * kLanes. Quantised, a panel is a run of blocks of 32
// columns, and a block two tiles of kLanes rows:
//
//   tile  | quants, 4 columns of one row after another:   row 0: k k+1 k+2 k+3 | row 1: ... | row 7
//         | for groups of 4 columns g = 0..7; with 4 bits, group g is the low and g + 4 the high nibble
//         | scales [groups of 16 or 32 columns][kLanes], then minima likewise, if the format has any
//
// so that one load brings 4 columns of kLanes rows, to be multiplied by 4 activations repeated in each
// lane. Dense, a panel is [num_columns][kPanel] elements. Rows beyond the matrix are zero.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <optional>
#include <type_traits>

#include "arena.h"
#include "formats.h"
#include "pool.h"
#include "quants.h"
#include "simd.h"

namespace quire {

constexpr int kPanel = 2 * simd::kLanes;

struct Half {
  uint16_t bits;
  static simd::Floats load(const uint8_t* p) {
    return simd::load_half(reinterpret_cast<const uint16_t*>(p));
  }
};

struct Bfloat {
  uint16_t bits;
  static simd::Floats load(const uint8_t* p) {
    return simd::load_bfloat(reinterpret_cast<const uint16_t*>(p));
  }
};

struct Float {
  float value;
  static simd::Floats load(const uint8_t* p) { return simd::load(reinterpret_cast<const float*>(p)); }
};

// How a quantised format lies in a tile. kBits: 4 or 8. kLargest: of the quants, which are unsigned; `zero`
// stands for 0.
template <int bits, int largest, int group, bool has_minimum, class ScaleType, int zero = 0>
struct Layout {
  using Scale = ScaleType;
  static constexpr int kBits = bits;
  static constexpr int kLargest = largest;
  static constexpr int kGroup = group;
  static constexpr int kGroups = kBlock / group;
  static constexpr bool kHasMinimum = has_minimum;
  static constexpr int kZero = zero;
  static constexpr int kQuantBytes = simd::kLanes * kBlock * bits / 8;
  static constexpr int kScaleBytes = kGroups * simd::kLanes * static_cast<int>(sizeof(Scale));
  static constexpr int kTileBytes = kQuantBytes + kScaleBytes * (has_minimum ? 2 : 1);
  static constexpr int kBlockBytes = 2 * kTileBytes;

  static simd::Floats scale(const uint8_t* tile, int g) {
    return Scale::load(tile + kQuantBytes + g * simd::kLanes * static_cast<int>(sizeof(Scale)));
  }
  static simd::Floats minimum(const uint8_t* tile, int g) { return scale(tile + kScaleBytes, g); }
};

using Nibbles = Layout<4, 15, 32, false, Half, 8>;
using NibblesMinimum = Layout<4, 15, 32, true, Half>;
using NibblesMinimumWide = Layout<4, 15, 32, true, Float>;
using Fives = Layout<8, 31, 32, false, Half, 16>;
using FivesMinimum = Layout<8, 31, 32, true, Half>;
using FivesMinimumWide = Layout<8, 31, 32, true, Float>;
using Sixes16 = Layout<8, 63, 16, false, Float, 32>;
using Twos16Minimum = Layout<8, 3, 16, true, Float>;
using Octets = Layout<8, 255, 32, false, Half, 128>;

// Whether products read activations as 16-bit words: where no instruction adds four products at once, and the
// sum of four does not fit 16 bits.
template <class L>
constexpr bool reads_words() {
  return 4 * 127 * L::kLargest >= 1 << 15 && !simd::kAddsQuads;
}

// Calls visitor(Layout()) with the layout of a quantised format.
template <class Visitor>
void with_layout(Format format, const Visitor& visitor) {
  switch (format) {
    case Format::kQ4_0: return visitor(Nibbles());
    case Format::kQ4_1: return visitor(NibblesMinimum());
    case Format::kQ4_K: return visitor(NibblesMinimumWide());
    case Format::kQ5_0: return visitor(Fives());
    case Format::kQ5_1: return visitor(FivesMinimum());
    case Format::kQ5_K: return visitor(FivesMinimumWide());
    case Format::kQ3_K:  // -4 to 3
    case Format::kQ6_K: return visitor(Sixes16());
    case Format::kQ2_K: return visitor(Twos16Minimum());
    case Format::kQ8_0: return visitor(Octets());
    case Format::kF32:
    case Format::kF16:
    case Format::kBF16: break;
  }
}

struct Matrix {
  Format format = Format::kF32;
  int num_rows = 0;
  int num_columns = 0;
  size_t panel_bytes = 0;
  uint8_t* bytes = nullptr;  // in the arena

  int num_panels() const { return (num_rows + kPanel - 1) / kPanel; }
  const uint8_t* panel(int index) const { return bytes + index * panel_bytes; }
};

namespace packing {

// The scale or minimum of row `lane`, group g; a half keeps the file's bits.
template <class Scale>
void put_scale(uint8_t* scales, int g, int lane, float value, uint16_t half) {
  uint8_t* p = scales + (g * simd::kLanes + lane) * static_cast<int>(sizeof(Scale));
  if constexpr (std::is_same_v<Scale, Half>) {
    std::memcpy(p, &half, 2);
  } else {
    std::memcpy(p, &value, 4);
  }
}

inline bool is_sound(int num_weights, int group_size, const DecodedBlock& block) {
  for (int group = 0; group < num_weights / group_size; ++group) {
    if (!std::isfinite(block.scales[group]) || !std::isfinite(block.minima[group])) return false;
  }
  return true;
}

// Scales of 0 become the smallest half, and their weights 0: products with a minimum add to a scale's
// exponent, and 0 has none.
inline void lift_zero_scales(int num_weights, int group_size, DecodedBlock& block) {
  for (int group = 0; group < num_weights / group_size; ++group) {
    if (block.scales[group] != 0.0f) continue;
    block.scales[group] = 0x1p-24f;
    block.scale_half = 1;
    std::fill_n(block.quants + group * group_size, group_size, int8_t{0});
  }
}

// 32 weights of a decoded block, from `first`, as row `lane` of a tile.
template <class L>
void put_weights(const DecodedBlock& block, int first, int lane, uint8_t* tile) {
  const int8_t* quants = block.quants + first;
  for (int quad = 0; quad < (L::kBits == 4 ? kQuads / 2 : kQuads); ++quad) {
    uint8_t* p = tile + (quad * simd::kLanes + lane) * 4;
    for (int j = 0; j < 4; ++j) {
      const int low = quants[4 * quad + j];
      p[j] = static_cast<uint8_t>(L::kBits == 4 ? low | quants[16 + 4 * quad + j] << 4 : low + L::kZero);
    }
  }
  for (int g = 0; g < L::kGroups; ++g) {
    const int group = first / L::kGroup + g;
    uint8_t* scales = tile + L::kQuantBytes;
    put_scale<typename L::Scale>(scales, g, lane, block.scales[group], block.scale_half);
    if constexpr (L::kHasMinimum) {
      put_scale<typename L::Scale>(scales + L::kScaleBytes, g, lane, block.minima[group],
                                   block.minimum_half);
    }
  }
}

// False if a scale or a minimum is not finite.
template <class L>
bool pack_row(Format format, const uint8_t* row, int num_columns, int place, uint8_t* panel) {
  const BlockShape shape = block_shape(format);
  uint8_t* tile = panel + place / simd::kLanes * L::kTileBytes;
  DecodedBlock block;
  for (int start = 0; start < num_columns; start += shape.num_weights, row += shape.num_bytes) {
    decode_block(format, row, block);
    if (!is_sound(shape.num_weights, L::kGroup, block)) return false;
    if constexpr (L::kHasMinimum) lift_zero_scales(shape.num_weights, L::kGroup, block);
    for (int first = 0; first < shape.num_weights; first += kBlock, tile += L::kBlockBytes) {
      put_weights<L>(block, first, place % simd::kLanes, tile);
    }
  }
  return true;
}

inline void pack_dense_row(int element_bytes, const uint8_t* row, int num_columns, int place,
                           uint8_t* panel) {
  for (int k = 0; k < num_columns; ++k) {
    std::memcpy(panel + (static_cast<size_t>(k) * kPanel + place) * element_bytes,
                row + static_cast<size_t>(k) * element_bytes, element_bytes);
  }
}

}  // namespace packing

// Repacks stored rows [num_rows, num_columns]; num_columns is a multiple of the format's block. Nothing if
// a scale or a minimum of quantised weights is not finite.
inline std::optional<Matrix> pack_matrix(Format format, const uint8_t* data, int num_rows, int num_columns,
                                         ThreadPool& pool, Arena& arena) {
  const BlockShape shape = block_shape(format);
  const size_t row_bytes = static_cast<size_t>(num_columns) / shape.num_weights * shape.num_bytes;
  Matrix matrix;
  matrix.format = format;
  matrix.num_rows = num_rows;
  matrix.num_columns = num_columns;
  matrix.panel_bytes = static_cast<size_t>(num_columns) * shape.num_bytes * kPanel;
  with_layout(format, [&](auto layout) {
    matrix.panel_bytes = static_cast<size_t>(num_columns) / kBlock * decltype(layout)::kBlockBytes;
  });
  matrix.bytes = arena.take(matrix.num_panels() * matrix.panel_bytes);
  std::atomic<bool> all_sound{true};
  pool.run(matrix.num_panels(), [&](int index, int) {
    uint8_t* panel = matrix.bytes + index * matrix.panel_bytes;
    const int count = std::min(kPanel, num_rows - index * kPanel);
    for (int place = 0; place < count; ++place) {
      const uint8_t* row = data + (static_cast<size_t>(index) * kPanel + place) * row_bytes;
      if (is_dense(format)) packing::pack_dense_row(shape.num_bytes, row, num_columns, place, panel);
      with_layout(format, [&](auto layout) {
        if (!packing::pack_row<decltype(layout)>(format, row, num_columns, place, panel)) all_sound = false;
      });
    }
  });
  if (!all_sound) return std::nullopt;
  return matrix;
}

}  // namespace quire
