// The likeliest token of rows whose logits nobody reads, without computing most logits in full.
//
// A panel of 8-bit weights is first multiplied by its six higher bits alone, which takes 0.75 of the time where
// no instruction adds four products at once. What the other two bits can add to a logit is bounded (Cauchy and
// Schwarz): |rest . x| <= |rest| |x|. Where that cannot reach the best logit so far the panel is done, else it is
// multiplied in full. So the token and its logit are those of the full product, to the bit.
//
// A few dimensions hold most of what a model gives to its last product (half of it in one of SmolLM2-135M's 576),
// so the blocks of columns with the most of x are multiplied in full at once, and x is what is in the others.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#include "activations.h"
#include "best.h"
#include "chunks.h"
#include "matmul_int8.h"
#include "matrix.h"
#include "output_bounds.h"
#include "simd.h"

namespace quire {

class LikeliestSearch {
 public:
  // Makes room for a run.
  void reserve(int num_rows, int num_blocks) {
    rows_.reserve(num_rows);
    row_blocks_.reserve(static_cast<size_t>(num_rows) * num_blocks);
    energies_.reserve(num_blocks);
    order_.reserve(static_cast<size_t>(RowChunks::count(num_rows)) * num_blocks);
  }

  // Before panels are searched: looks at the rows of `input`, bytes and words.
  void begin(const OutputBounds& bounds, const Activations& input, int num_blocks) {
    bounds_ = &bounds;
    num_blocks_ = num_blocks;
    rows_.resize(input.chunks().num_rows());
    row_blocks_.resize(rows_.size() * num_blocks);
    order_.clear();
    for (int chunk = 0; chunk < input.chunks().count(); ++chunk) {
      with_size<kRowChunk>(input.chunks().size(chunk), [&](auto size) {
        begin_chunk<decltype(size)::value>(input, input.chunks().start(chunk));
      });
    }
  }

  // Lets the best of each row of the chunks meet the logits of a panel that may be larger; returns of how many
  // rows.
  int search(const Matrix& matrix, int panel, const Activations& input, int first_chunk, int end_chunk,
              std::vector<Best>& best) const {
    const RowChunks& chunks = input.chunks();
    int num_full = 0;
    for (int chunk = first_chunk; chunk < end_chunk; ++chunk) {
      const int8::Ahead next = int8::Ahead::part(matrix.panel(panel) + matrix.panel_bytes, num_blocks_,
                                                 Octets::kBlockBytes, chunk - first_chunk, end_chunk - first_chunk);
      with_size<kRowChunk>(chunks.size(chunk), [&](auto size) {
        num_full += search_chunk<decltype(size)::value>(matrix, panel, input, chunk, next, best);
      });
    }
    return num_full;
  }

  // After all panels: how many were multiplied in full, rows times panels, of all. Where that is many, as with
  // random weights, the next runs are better off without a search.
  void end(int64_t num_full, int64_t num_all) {
    if (num_full > num_all / kMostFull) pause_ = kPause;
  }

  // Whether the next run should be a search; counts the pauses
  bool takes_next() {
    if (pause_ == 0) return true;
    --pause_;
    return false;
  }

 private:
  using Quant = int8::Quant<Octets>;
  using OneRow = ChunkBlock<Quant, 1>;

  struct RowBound {
    float rest;  // |x| in the blocks that are not multiplied in full
    float rounding;  // what both products of a row may be off by
  };

  static constexpr int kMostFull = 8;
  static constexpr int kPause = 63;  // runs

  static int full_blocks(int num_blocks) { return std::max(1, num_blocks / 9); }

  template <int kRows>
  void begin_chunk(const Activations& input, int start) {
    energies_.assign(num_blocks_, 0.0);
    for (int row = start; row < start + kRows; ++row) {
      double whole = 0.0;
      for (int b = 0; b < num_blocks_; ++b) {
        OneRow& alone = row_blocks_[row * num_blocks_ + b];
        input.quants<Quant>().template chunk<kRows>(start, b)->copy_row(row - start, alone);
        const double square = alone.square();
        energies_[b] += std::isnan(square) ? 0.0 : square;
        whole += square;
      }
      // Each product adds num_blocks_ numbers to a sum of at most |row| |x|, which is rounded to 24 bits.
      const double largest = bounds_->largest_norms * std::sqrt(whole);
      const bool may_overflow = largest > std::numeric_limits<float>::max();
      rows_[row].rounding = may_overflow ? std::numeric_limits<float>::infinity()
                                         : static_cast<float>((num_blocks_ + 4) * 0x1p-24 * largest);
    }
    choose_full();
    const int* rest = order_.data() + order_.size() - num_blocks_ + full_blocks(num_blocks_);
    for (int row = start; row < start + kRows; ++row) {
      double square = 0.0;
      for (int i = 0; i < num_blocks_ - full_blocks(num_blocks_); ++i) {
        square += row_blocks_[row * num_blocks_ + rest[i]].square();
      }
      rows_[row].rest = static_cast<float>(1.0001 * std::sqrt(square));
    }
  }

  // Appends a chunk's blocks to order_: those with the most energy, then the others, each in their order.
  void choose_full() {
    order_.resize(order_.size() + num_blocks_);
    const auto first = order_.end() - num_blocks_, middle = first + full_blocks(num_blocks_);
    std::iota(first, order_.end(), 0);
    std::partial_sort(first, middle, order_.end(), [&](int a, int b) { return energies_[a] > energies_[b]; });
    std::sort(first, middle);
    std::sort(middle, order_.end());
  }

  // totals [kRows][kPanel] += the blocks at some places; `next`: of the next panel, to be asked for
  template <class Weights, int kRows>
  [[gnu::noinline]] static void multiply_blocks(
      const uint8_t* weights, const int* places, int count,
      const ChunkBlock<int8::Quant<typename Weights::Layout>, kRows>* rows, const int8::Ahead& next, float* totals) {
    for (int i = 0; i < count; ++i) {
      const int offset = places[i] * Weights::kBlockBytes;
      next.ask(places[i]);
      int8::multiply_block<Weights, kRows>(weights + offset, rows[places[i]], totals);
    }
  }

  template <int kRows>
  int search_chunk(const Matrix& matrix, int panel, const Activations& input, int chunk,
                   const int8::Ahead& next, std::vector<Best>& best) const {
    using namespace simd;
    const int start = input.chunks().start(chunk);
    const uint8_t* weights = matrix.panel(panel);
    alignas(64) float logits[kRows * kPanel] = {};
    const int num_full = full_blocks(num_blocks_);
    const int* full = &order_[static_cast<size_t>(chunk) * num_blocks_];
    multiply_blocks<int8::Packed<Octets>, kRows>(weights, full, num_full,
                                                 input.quants<Quant>().template chunk<kRows>(start, 0), next, logits);
    multiply_blocks<HigherBits, kRows>(weights, full + num_full, num_blocks_ - num_full,
                                       input.quants<int8_t>().template chunk<kRows>(start, 0), next, logits);
    const int first_id = panel * kPanel, count = std::min(kPanel, matrix.num_rows - first_id);
    int num_rows_full = 0;
    for (int row = 0; row < kRows; ++row) {
      const RowBound& bound = rows_[start + row];
      const float* of_row = logits + row * kPanel;
      Best& so_far = best[start + row];
      const Floats needed = splat(so_far.logit - bounds_->panel_rests[panel] * bound.rest - bound.rounding);
      const Ints are_less = (load(of_row) < needed) & (load(of_row + kLanes) < needed);
      if (largest(are_less) != 0) continue;  // true is -1: all lanes are less
      ++num_rows_full;
      alignas(64) float alone[kPanel] = {};
      int8::multiply_chunk<int8::Packed<Octets>, 1>(weights, num_blocks_, &row_blocks_[(start + row) * num_blocks_],
                                                    int8::Ahead{weights, 0}, nullptr, alone);
      so_far.meet_panel(alone, first_id, count);
    }
    return num_rows_full;
  }

  const OutputBounds* bounds_ = nullptr;
  int num_blocks_ = 0;
  std::vector<RowBound> rows_;
  std::vector<OneRow> row_blocks_;  // [row][num_blocks]: each row as a chunk of its own
  std::vector<double> energies_;  // of a chunk's blocks
  std::vector<int> order_;  // [chunk][num_blocks]: blocks that are multiplied in full, then the others
  int pause_ = 0;  // runs without a search
};

}  // namespace quire
