// Products of quantised weights and 8-bit activations.
//
// Per block of 32 columns the dot product is an exact integer; it is scaled and added in float32, block
// after block. So each element's value is the same whatever rows stand beside it.
//
// Columns go in slices of some blocks, and all rows pass over a slice before the next one, so that its
// weights, the rows' quants and their totals stay in the L1 cache. For several chunks of rows a slice's
// 4-bit weights are taken apart once. A chunk asks for the quants of the next one: they are too few in a
// row for the hardware to notice. Each chunk of rows asks for its part of the next panel's slice, so that
// memory has the same to do all the time. Rows of one chunk pass over several panels at once (panel_group.h).
#pragma once

#include <algorithm>

#include "activations.h"
#include "chunks.h"
#include "matrix.h"
#include "simd.h"

namespace quire::int8 {

constexpr int kSlice = 12;  // blocks at most
constexpr int kLongSlice = 24;  // blocks at most where chunks of rows are few
constexpr int kBlocksAhead = 2;  // how far a group of panels asks for its weights
constexpr int kExpandChunks = 4;  // from so many chunks on, 4-bit weights are taken apart ahead

template <class L>
using Quant = std::conditional_t<reads_words<L>(), int16_t, int8_t>;

// Weights as they lie in a matrix.
template <class L>
struct Packed {
  using Layout = L;
  static constexpr int kBlockBytes = L::kBlockBytes;
  static constexpr float kZero = L::kZero;

  // 4 columns of the kLanes rows of tile t, as bytes
  static simd::Bytes quad(const uint8_t* block, int quad, int t) {
    using namespace simd;
    const uint8_t* tile = block + t * L::kTileBytes;
    if constexpr (L::kBits == 8) return load_bytes(tile + quad * 4 * kLanes);
    if (quad < kQuads / 2) return low_nibbles(load_bytes(tile + quad * 4 * kLanes));
    return high_nibbles(load_bytes(tile + (quad - kQuads / 2) * 4 * kLanes));
  }
  // columns 0 and 2 of them (half 0) or 1 and 3, as words
  static simd::Shorts words(const uint8_t* block, int quad, int half, int t) {
    const simd::Bytes both = Packed::quad(block, quad, t);
    return half == 0 ? simd::even_unsigned(both) : simd::odd_unsigned(both);
  }
  // the scale; of weights with a minimum over one, for times_power
  static simd::Floats factor(const uint8_t* block, int g, int t) {
    const simd::Floats scale = L::scale(block + t * L::kTileBytes, g);
    return L::kHasMinimum ? simd::over_one(scale) : scale;
  }
  static simd::Floats minimum(const uint8_t* block, int g, int t) {
    return L::minimum(block + t * L::kTileBytes, g);
  }
};

// 4-bit weights taken apart: bytes [quad][tile][kLanes][4], floats [factor, minimum][tile][kLanes].
template <class L>
struct Expanded {
  using Layout = L;
  static_assert(L::kBits == 4 && L::kGroups == 1);
  static constexpr float kZero = L::kZero;
  static constexpr int kQuadBytes = 4 * simd::kLanes;
  static constexpr int kWeightBytes = kQuads * 2 * kQuadBytes;
  static constexpr int kFactorBytes = 2 * simd::kLanes * static_cast<int>(sizeof(float));
  static constexpr int kBlockBytes = kWeightBytes + (L::kHasMinimum ? 2 : 1) * kFactorBytes;

  static simd::Bytes quad(const uint8_t* block, int quad, int t) {
    return simd::load_bytes(block + (2 * quad + t) * kQuadBytes);
  }
  static simd::Floats factor(const uint8_t* block, int, int t) {
    return simd::load(reinterpret_cast<const float*>(block + kWeightBytes) + t * simd::kLanes);
  }
  static simd::Floats minimum(const uint8_t* block, int, int t) {
    return factor(block + kFactorBytes, 0, t);
  }

  static void expand(const uint8_t* packed, uint8_t* block) {
    using namespace simd;
    float* factors = reinterpret_cast<float*>(block + kWeightBytes);
    for (int t = 0; t < 2; ++t) {
      for (int quad = 0; quad < kQuads; ++quad) {
        store_bytes(block + (2 * quad + t) * kQuadBytes, Packed<L>::quad(packed, quad, t));
      }
      store(factors + t * kLanes, Packed<L>::factor(packed, 0, t));
      if constexpr (L::kHasMinimum) store(factors + (2 + t) * kLanes, Packed<L>::minimum(packed, 0, t));
    }
  }
};

// The 4 bytes at `quants`, repeated in every lane
template <class Element>
inline simd::Bytes splat_4_bytes(const Element* quants) {
  return simd::splat_quad(reinterpret_cast<const int8_t*>(quants));
}

// Integer dot products over the columns of group g, of weights and one block of a chunk. Where no
// instruction adds four products at once, they sum in 16-bit lanes as far as they fit (8 of 2 * 15 * 127, 2 of
// 2 * 63 * 127) and are widened then; weights of 8 bits are widened before.
template <class Weights, int kRows>
inline void dot_group(const uint8_t* block, int g,
                      const ChunkBlock<Quant<typename Weights::Layout>, kRows>& rows,
                      simd::Ints (&sums)[kRows][2]) {
  using namespace simd;
  using L = typename Weights::Layout;
  constexpr int kGroupQuads = L::kGroup / 4;
  if constexpr (L::kBits == 4 && !kAddsQuads) {
    Shorts pairs[kRows][2];
    QUIRE_UNROLL for (int quad = 0; quad < kGroupQuads; ++quad) {
      const Bytes w0 = Weights::quad(block, quad, 0), w1 = Weights::quad(block, quad, 1);
      QUIRE_UNROLL for (int row = 0; row < kRows; ++row) {
        const Bytes x = splat_4_bytes(rows.quants + (quad * kRows + row) * 4);
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
  } else if constexpr (!reads_words<L>() && !kAddsQuads) {
    QUIRE_UNROLL for (int i = 0; i < kGroupQuads; i += 2) {
      const int quad = g * kGroupQuads + i;
      Bytes first[2], second[2];
      for (int t = 0; t < 2; ++t) {
        first[t] = Weights::quad(block, quad, t);
        second[t] = Weights::quad(block, quad + 1, t);
      }
      QUIRE_UNROLL for (int row = 0; row < kRows; ++row) {
        const Bytes x = splat_4_bytes(rows.quants + (quad * kRows + row) * 4);
        const Bytes y = splat_4_bytes(rows.quants + ((quad + 1) * kRows + row) * 4);
        QUIRE_UNROLL for (int t = 0; t < 2; ++t) {
          const Ints sum = add_pairs(dot_pairs(first[t], x) + dot_pairs(second[t], y));
          sums[row][t] = i == 0 ? sum : sums[row][t] + sum;
          settle(sums[row][t]);
        }
      }
    }
  } else if constexpr (reads_words<L>()) {
    QUIRE_UNROLL for (int i = 0; i < 2 * kGroupQuads; ++i) {
      const int quad = g * kGroupQuads + i / 2;
      const Shorts w0 = Weights::words(block, quad, i % 2, 0);
      const Shorts w1 = Weights::words(block, quad, i % 2, 1);
      QUIRE_UNROLL for (int row = 0; row < kRows; ++row) {
        const Bytes bytes = splat_4_bytes(rows.quants + ((2 * quad + i % 2) * kRows + row) * 2);
        const Shorts x = reinterpret_cast<Shorts>(bytes);
        const Ints p0 = dot_words(w0, x), p1 = dot_words(w1, x);
        sums[row][0] = i == 0 ? p0 : sums[row][0] + p0;
        sums[row][1] = i == 0 ? p1 : sums[row][1] + p1;
        settle(sums[row][0]);
        settle(sums[row][1]);
      }
    }
  } else {
    QUIRE_UNROLL for (int i = 0; i < kGroupQuads; ++i) {
      const int quad = g * kGroupQuads + i;
      const Bytes w0 = Weights::quad(block, quad, 0), w1 = Weights::quad(block, quad, 1);
      QUIRE_UNROLL for (int row = 0; row < kRows; ++row) {
        const Bytes x = splat_4_bytes(rows.quants + (quad * kRows + row) * 4);
        const Ints start0 = i == 0 ? Ints{} : sums[row][0], start1 = i == 0 ? Ints{} : sums[row][1];
        sums[row][0] = add_quads(start0, w0, x);
        sums[row][1] = add_quads(start1, w1, x);
        settle(sums[row][0]);
        settle(sums[row][1]);
      }
    }
  }
}

// Memory that is asked for while blocks are multiplied: some bytes for each of them.
struct Ahead {
  const uint8_t* start;
  int bytes_per_block;

  // The index-th of the parts of what lies at `start`, as large as `num_blocks` blocks.
  static Ahead part(const uint8_t* start, int num_blocks, int block_bytes, int index, int num_parts) {
    const int bytes_per_block = (block_bytes + num_parts - 1) / num_parts;
    return {start + index * num_blocks * bytes_per_block, bytes_per_block};
  }
  void ask(int block) const { simd::prefetch(start + block * bytes_per_block, bytes_per_block); }
};

// totals [kRows][kPanel] += one block of a panel
template <class Weights, int kRows>
[[gnu::always_inline]] inline void multiply_block(
    const uint8_t* block, const ChunkBlock<Quant<typename Weights::Layout>, kRows>& rows, float* totals) {
  using namespace simd;
  using L = typename Weights::Layout;
  for (int g = 0; g < L::kGroups; ++g) {
    Ints sums[kRows][2];
    dot_group<Weights, kRows>(block, g, rows, sums);
    const Floats factors[] = {Weights::factor(block, g, 0), Weights::factor(block, g, 1)};
    Floats minima[2];
    if constexpr (L::kHasMinimum) {
      for (int t = 0; t < 2; ++t) minima[t] = Weights::minimum(block, g, t);
    }
    QUIRE_UNROLL for (int row = 0; row < kRows; ++row) {
      const Floats row_scale = splat(rows.scales[row]);
      const Floats row_sum = splat(L::kGroups == 1 ? rows.sums[row] : rows.half_sums[g][row]);
      QUIRE_UNROLL for (int t = 0; t < 2; ++t) {
        float* total = totals + row * kPanel + t * kLanes;
        Floats dot = to_floats(sums[row][t]);
        if constexpr (L::kHasMinimum) {  // a NaN comes with the sum
          const Floats value = fused_multiply_add(dot, times_power(factors[t], row_scale), load(total));
          store(total, fused_multiply_add(row_sum, minima[t], value));
        } else {
          dot = fused_multiply_add(dot, row_scale, row_sum * splat(-Weights::kZero));
          store(total, fused_multiply_add(dot, factors[t], load(total)));
        }
      }
      stay_in_memory();
    }
  }
}

// totals [kRows][kPanel] += some blocks of one panel. `next_quants`: of the next chunk, to be asked for, or null.
template <class Weights, int kRows>
void multiply_chunk(const uint8_t* block, int num_blocks,
                    const ChunkBlock<Quant<typename Weights::Layout>, kRows>* rows, const Ahead& next_weights,
                    const uint8_t* next_quants, float* totals) {
  for (int b = 0; b < num_blocks; ++b, ++rows, block += Weights::kBlockBytes) {
    next_weights.ask(b);
    if (next_quants != nullptr) simd::prefetch_soon(next_quants + b * sizeof *rows, sizeof *rows);
    multiply_block<Weights, kRows>(block, *rows, totals);
  }
}

// out [rows of the chunks][kPanel]: chunks [first, end) of the activations times one panel.
template <class L>
void multiply_panel(const Matrix& matrix, int panel, const Activations& activations, int first, int end,
                    float* out) {
  const RowChunks& chunks = activations.chunks();
  const int first_row = chunks.start(first);
  const int num_blocks = matrix.num_columns / kBlock;
  std::fill_n(out, (chunks.start(end) - first_row) * kPanel, 0.0f);
  const auto& quants = activations.quants<Quant<L>>();
  const bool is_many = end - first >= kExpandChunks;
  const int longest = is_many ? kSlice : kLongSlice;
  const int num_slices = (num_blocks + longest - 1) / longest;
  const int most = num_slices == 1 ? num_blocks : (num_blocks + num_slices - 1) / num_slices;
  for (int b = 0; b < num_blocks; b += most) {
    const int count = std::min(most, num_blocks - b);
    const uint8_t* slice = matrix.panel(panel) + b * L::kBlockBytes;
    const auto multiply = [&](auto weights, const uint8_t* from) {
      for (int chunk = first; chunk < end; ++chunk) {
        const int start = chunks.start(chunk);
        const Ahead next_weights =
            Ahead::part(slice + matrix.panel_bytes, count, L::kBlockBytes, chunk - first, end - first);
        const uint8_t* next_quants =
            chunk + 1 < end ? quants.address(chunks.start(chunk + 1), chunks.size(chunk + 1), b) : nullptr;
        with_size<kRowChunk>(chunks.size(chunk), [&](auto size) {
          constexpr int kRows = decltype(size)::value;
          multiply_chunk<decltype(weights), kRows>(from, count, quants.template chunk<kRows>(start, b),
                                                   next_weights, next_quants, out + (start - first_row) * kPanel);
        });
      }
    };
    if constexpr (L::kBits == 4) {
      if (is_many) {
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

// out [count][rows of the chunk][kPanel]: one chunk of the activations times a group of panels, block by block.
template <class L>
void multiply_group(const uint8_t* const* panels, int count, int num_columns, const Activations& activations,
                    int chunk, float* out) {
  const RowChunks& chunks = activations.chunks();
  with_size<kRowChunk>(chunks.size(chunk), [&](auto size) {
    constexpr int kRows = decltype(size)::value;
    const auto* rows = activations.quants<Quant<L>>().template chunk<kRows>(chunks.start(chunk), 0);
    std::fill_n(out, count * kRows * kPanel, 0.0f);
    for (int b = 0; b < num_columns / kBlock; ++b, ++rows) {
      for (int i = 0; i < count; ++i) {
        const uint8_t* block = panels[i] + b * L::kBlockBytes;
        simd::prefetch(block + kBlocksAhead * L::kBlockBytes, L::kBlockBytes);
        multiply_block<Packed<L>, kRows>(block, *rows, out + i * kRows * kPanel);
      }
    }
  });
}

}  // namespace quire::int8
