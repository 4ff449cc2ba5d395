// What the lower bits of an output matrix's weights can add to a logit.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "matmul_int8.h"
#include "matrix.h"
#include "pool.h"
#include "simd.h"

namespace quire {

// Octets by their six higher bits: a quant is 4 h + 1.5, give or take 1.5.
struct HigherBits {
  using Layout = quire::Layout<8, 63, 32, false, Half>;
  static constexpr int kBlockBytes = Octets::kBlockBytes;
  static constexpr float kZero = (Octets::kZero - 1.5f) / 4;
  static_assert(kBlockBytes == Layout::kBlockBytes);

  static simd::Bytes quad(const uint8_t* block, int quad, int t) {
    const simd::Bytes stored = simd::load_bytes(block + t * Octets::kTileBytes + quad * 4 * simd::kLanes);
    return reinterpret_cast<simd::Bytes>(reinterpret_cast<simd::Shorts>(stored) >> 2) & 63;
  }
  static simd::Floats factor(const uint8_t* block, int g, int t) {
    return int8::Packed<Octets>::factor(block, g, t) * simd::splat(4.0f);
  }
};

// What HigherBits leaves out of an output matrix's rows, and how large they are.
struct OutputBounds {
  std::vector<float> panel_rests;  // the largest norm of what is left out of a panel's rows
  float largest_norms = 0.0f;  // of the norms of a row as it is and by its higher bits, together

  // Whether likeliest tokens can be found so at all
  static bool are_for(const Matrix& matrix) {
    return reads_words<Octets>() && matrix.format == Format::kQ8_0;
  }
  bool are_measured() const { return !panel_rests.empty(); }

  void measure(const Matrix& matrix, ThreadPool& pool) {
    panel_rests.assign(matrix.num_panels(), 0.0f);
    std::vector<float> norms(matrix.num_panels());  // at most, of both
    pool.run(matrix.num_panels(), [&](int panel, int) {
      measure_panel(matrix.panel(panel), matrix.num_columns / kBlock, panel_rests[panel], norms[panel]);
    });
    largest_norms = *std::max_element(norms.begin(), norms.end());
  }

 private:
  static constexpr float kRounding = 1.0001f;  // of the sums below

  static void measure_panel(const uint8_t* block, int num_blocks, float& rest, float& norms) {
    using namespace simd;
    if constexpr (reads_words<Octets>()) {
      Floats rests[2] = {}, wholes[2] = {};
      for (int b = 0; b < num_blocks; ++b, block += Octets::kBlockBytes) {
        for (int t = 0; t < 2; ++t) {
          Ints squares = {};
          Shorts rest_squares = {};
          for (int quad = 0; quad < kQuads; ++quad) {
            const Bytes stored = load_bytes(block + t * Octets::kTileBytes + quad * 4 * kLanes);
            const Shorts even = even_unsigned(stored) - Octets::kZero, odd = odd_unsigned(stored) - Octets::kZero;
            squares += dot_words(even, even) + dot_words(odd, odd);
            // twice the rest: 3 for the lower bits 0 and 3, 1 for 1 and 2
            const Bytes twice = 3 - 2 * ((stored ^ reinterpret_cast<Bytes>(reinterpret_cast<Shorts>(stored) >> 1)) & 1);
            rest_squares += dot_pairs(twice, twice);
          }
          const Floats scale = Octets::scale(block + t * Octets::kTileBytes, 0);
          wholes[t] += scale * scale * to_floats(squares);
          rests[t] += scale * scale * to_floats(add_pairs(rest_squares)) * splat(0.25f);
        }
      }
      rest = kRounding * std::sqrt(std::max(largest(rests[0]), largest(rests[1])));
      norms = 2.0f * kRounding * std::sqrt(std::max(largest(wholes[0]), largest(wholes[1]))) + rest;
    }
  }
};

}  // namespace quire
